"""Where text comes from: the Python on this machine, the Hub, local or remote files, a save_to_disk folder.

    corpus = load_corpus("installed-python")    # or "user/name", "texts/*.jsonl", "s3://bucket/texts", ...
    for document in corpus:
        document[corpus.text_column]            # str, or None where the source could not be read as text

How files become documents:
    .jsonl           one row per line; a line that is no JSON object with the text column is unreadable (None)
    .json            the same, or one array of objects (which is held in memory whole)
    .csv             one row per record; the first record names the columns
    .parquet .arrow  one row per row
    .txt             one document per file. A file above 256 KiB is cut at blank lines into documents of about
                     64 KiB, so that memory stays bounded and documents can be held out for validation.
    WikiText         articles: where the rows (or the lines of a .txt file) are lines of text, and the first
                     is a heading " = Title = ", the lines of one article make one document
All but .parquet and .arrow may be compressed (.gz, .bz2, .xz). Where some file names of a folder or glob have
the word "train", the words train / validation, valid, val, dev / test name splits; otherwise all is "train".
"""

import csv
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from inspect import cleandoc
from pathlib import Path

import fsspec

SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow")
SPLIT_WORDS = {"train": {"train"}, "validation": {"validation", "valid", "val", "dev"}, "test": {"test"}}
LONG_FILE, CUT_AFTER = 1 << 18, 1 << 16  # bytes: of .txt files, as said above
TITLE = re.compile(r" ?= [^=\n]+ = ?\n?\Z")  # " = Title = "; headings inside an article have more signs


@dataclass
class Corpus:
    """A re-iterable stream of documents in a fixed order. It pickles, for dataloader workers."""

    name: str  # what the user asked for, printable
    text_column: str
    fingerprint: str  # changes when the content may have changed; part of cache keys
    columns: list[str]
    rows: Callable[[], Iterable[dict]]

    def __iter__(self) -> Iterator[dict]:
        """One dict of columns per document; the text is None where it could not be read."""
        return iter(self.rows())


def load_corpus(dataset_name, *, dataset_config_name=None, split="train", text_column=None,
                streaming=False) -> Corpus:
    """Open a source of text; of its content only the beginning is read. `streaming` concerns the Hub only.

    dataset_name: "installed-python", "installed-docs", a save_to_disk folder, a file, folder or glob of files
    (any fsspec URL), or a Hub id. Raises ValueError, with the remedy, for what cannot be opened."""
    name, config = str(dataset_name), dataset_config_name
    if not has_split(name, config, split):
        raise ValueError(f"dataset_name {name!r} has no split {split!r}; name another data set or split")
    if name in INSTALLED:
        files = [file[:3] for file in _python_files()]
        return _open(name, _digest(name, files), INSTALLED[name], text_column)
    saved = _is_saved(name)
    if not saved and _is_files(name):
        urls = _split_files(name)[split]
        version = _digest([_file_state(url) for url in urls])
        return _open(name, version, partial(_file_rows, urls), text_column)
    import datasets  # not at the top: it takes 60 MB and half a second

    if saved:
        dataset = datasets.load_from_disk(name)
        dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
        return _open(name, dataset._fingerprint, partial(_dataset_rows, dataset), text_column)
    with _hub_errors(name, config):
        dataset = datasets.load_dataset(name, config, split=split, streaming=streaming)
        if streaming:
            builder = datasets.load_dataset_builder(name, config)
            version = _digest(split, builder.hash, builder.config.data_files)
        else:
            version = dataset._fingerprint
    return _open(name, version, partial(_dataset_rows, dataset), text_column)


def has_split(dataset_name, dataset_config_name, split) -> bool:
    """Whether load_corpus finds this split; ValueError where the source itself is not found."""
    name = str(dataset_name)
    if name in INSTALLED:
        return split == "train"
    if _is_saved(name):
        saved = Path(name, "dataset_dict.json")
        return split in (json.loads(saved.read_text())["splits"] if saved.exists() else ["train"])
    if _is_files(name):
        return bool(_split_files(name).get(split))
    import datasets

    with _hub_errors(name, dataset_config_name):
        # a part of a split, "train[:1%]", is there when the split is
        return split.split("[")[0] in datasets.get_dataset_split_names(name, dataset_config_name)


def _open(name, fingerprint, rows, text_column) -> Corpus:
    """The last step for every source: find the text column, join WikiText's lines into articles."""
    columns, text, wanted = {}, None, [text_column] if text_column else ["content", "text"]
    try:
        for row in itertools.islice(rows(), 100):
            columns.update(dict.fromkeys(row))
            text = row.get("text")
            if set(wanted) & set(columns) and (len(columns) > 1 or isinstance(text, str) and text.strip()):
                break
    except OSError as error:
        raise ValueError(f"dataset_name {name!r} cannot be read: {error}") from error
    found = next((column for column in wanted if column in columns), None)
    if not columns:
        raise ValueError(f"dataset_name {name!r} holds no readable documents; name a source that has some")
    if found is None:
        asked = f"no column {text_column!r}" if text_column else "neither a column content nor text"
        raise ValueError(f"{name} has {asked}; give --text_column one of its columns: {', '.join(columns)}")
    if list(columns) == ["text"] and isinstance(text, str) and TITLE.match(text):
        rows = partial(_article_rows, rows)
    return Corpus(name, found, fingerprint, list(columns), rows)


def _digest(*parts) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


# ---- The Python on this machine


@functools.cache
def _python_files() -> list[tuple[str, str, int, str, Path]]:
    """(distribution and version, relative path, bytes, license, file) of every .py file of the standard
    library and of site-packages, in an order that does not depend on where the interpreter is installed."""
    paths, found = sysconfig.get_paths(), {}

    def search(root, owners, default):
        for folder, folders, names in os.walk(root):
            folders[:] = {*folders} - {"__pycache__", "site-packages", "dist-packages"}
            for file in (Path(folder, name) for name in names if name.endswith(".py")):
                if file not in found and file.is_file():
                    path = file.relative_to(root).as_posix()
                    owner, license = owners.get(path, default)
                    found[file] = (owner, path, file.stat().st_size, license, file)

    python = f"{platform.python_implementation()} {platform.python_version()}"
    search(paths["stdlib"], {}, (python, "PSF-2.0"))
    for root in dict.fromkeys((paths["purelib"], paths["platlib"])):
        owners = {}
        for package in metadata.distributions(path=[root]):
            owner = (f"{package.name} {package.version}", _license(package.metadata))
            owners.update((file.as_posix(), owner) for file in package.files or () if file.suffix == ".py")
        search(root, owners, ("site-packages", "unknown"))
    return sorted(found.values())


def _license(package) -> str:
    classifiers = [line.split(" :: ")[-1] for line in package.get_all("Classifier") or ()
                   if line.startswith("License ::")]
    first_line = (package.get("License") or "").strip().split("\n")[0]
    names = [package.get("License-Expression"), *classifiers, first_line]
    return next((name for name in names if name), "unknown")


def _python_documents() -> Iterator[dict]:
    """Python source with the columns, and the column types, of codeparrot-ds."""
    for owner, path, size, license, file in _python_files():
        yield {"repo_name": owner, "path": path, "copies": "1", "size": str(size),
               "content": _decode(file.read_bytes()), "license": license}


# A docstring, found lexically: a triple-quoted string that starts a line, first in the file or after a line
# that ends in ":". Parsing every installed file with ast takes a minute, this a few seconds.
COMMENT = r"[ \t]*(?:#[^\n]*)?\n"
DOCSTRING = re.compile(
    rf"""(?:\A(?:{COMMENT})*|:{COMMENT}\s*)[rRuU]?(\"\"\"|''')(.*?)\1""", re.DOTALL
)
MARKUP = re.compile(r">>>|\.\. |::|https?:|[|<>{}\\]|---|===|^\s*[:@#]", re.MULTILINE)
LEAST_PROSE = 400  # characters: modules and packages with less are left out


def _docs_documents() -> Iterator[dict]:
    """The English in the same installation: package descriptions, then docstrings, a module per document.

    Paragraphs keep their order, one line each, a blank line between; code and markup are left out."""

    def documents():
        paths = sysconfig.get_paths()
        for root in dict.fromkeys((paths["purelib"], paths["platlib"])):
            for package in sorted(metadata.distributions(path=[root]), key=lambda package: package.name):
                text = package.metadata.get_payload() or package.metadata.get("Description") or ""
                yield f"{package.name} {package.version}", "METADATA", _prose(str(text))
        for owner, path, _, _, file in _python_files():
            found = DOCSTRING.finditer(_decode(file.read_bytes()) or "")
            yield owner, path, [p for docstring in found for p in _prose(cleandoc(docstring[2]))]

    for owner, path, paragraphs in documents():
        if sum(map(len, paragraphs)) >= LEAST_PROSE:
            yield {"repo_name": owner, "path": path, "text": "\n\n".join(paragraphs)}


def _prose(text) -> list[str]:
    """The paragraphs that read as sentences: mostly letters, from a capital to a full stop."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        if len(line) >= 40 and line[0].isupper() and line[-1] in ".!?" and not MARKUP.search(paragraph):
            if sum(character.isalpha() or character == " " for character in line) >= 0.9 * len(line):
                found.append(line)
    return found


INSTALLED = {"installed-python": _python_documents, "installed-docs": _docs_documents}


# ---- Files, local or anywhere fsspec reaches


def _is_saved(name) -> bool:
    return any(os.path.exists(os.path.join(name, file)) for file in ("dataset_dict.json", "state.json"))


def _is_files(name) -> bool:
    return ("://" in name or os.path.exists(name) or glob.has_magic(name) or _suffix(name) in SUFFIXES
            or name.startswith(("/", "~", ".")))


def _suffix(path) -> str:
    return os.path.splitext(re.sub(r"\.(gz|bz2|xz)$", "", path.lower()))[1]


def _split_files(name) -> dict[str, list[str]]:
    """Split -> sorted URLs, as the head of this file says."""
    try:
        files, path = fsspec.core.url_to_fs(os.path.expanduser(name))
        if glob.has_magic(path):
            paths = files.glob(path)
        else:
            paths = files.find(path) if files.isdir(path) else [path] if files.exists(path) else []
    except (OSError, ImportError, ValueError) as error:
        raise ValueError(f"dataset_name {name!r} cannot be listed: {error}") from error
    if not paths:
        raise ValueError(f"dataset_name {name!r}: no such file, folder or Hub data set; check its spelling")
    known = sorted(path for path in paths if _suffix(path) in SUFFIXES)
    if not known:
        raise ValueError(f"dataset_name {name!r} holds no file of the types {' '.join(SUFFIXES)}")
    words = {path: set(re.split(r"[^a-z]+", os.path.basename(path).lower())) for path in known}
    splits = {split: [path for path in known if words[path] & names] for split, names in SPLIT_WORDS.items()}
    if len(known) == 1 or not splits["train"]:
        splits = {"train": known}
    return {split: [files.unstrip_protocol(path) for path in paths] for split, paths in splits.items()}


def _file_state(url) -> tuple:
    """What changes when a file does: its size, and the time or tag that its file system keeps."""
    files, path = fsspec.core.url_to_fs(url)
    info = files.info(path)
    return url, *(str(info.get(key)) for key in ("size", "mtime", "ETag", "etag", "LastModified", "updated"))


def _file_rows(urls) -> Iterator[dict]:
    readers = {".jsonl": _json_rows, ".json": _json_rows, ".csv": _csv_rows, ".txt": _txt_rows}
    if {_suffix(url) for url in urls} - readers.keys():
        from data.sources.tables import arrow_documents, parquet_documents

        readers |= {".parquet": parquet_documents, ".arrow": arrow_documents}
    for url in urls:
        with fsspec.open(url, "rb", compression="infer") as file:
            try:
                yield from readers[_suffix(url)](file)
            except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{url} is damaged ({error}); repair it or take it out") from error


def _decode(data: bytes) -> str | None:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _json_rows(file) -> Iterator[dict]:
    file = io.BufferedReader(file)
    if file.peek(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        rows = json.load(file)
        yield from (row if isinstance(row, dict) else {} for row in rows)
        return
    for line in file:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        yield row if isinstance(row, dict) else {}


def _csv_rows(file) -> Iterator[dict]:
    csv.field_size_limit((1 << 31) - 1)
    # surrogateescape: what is not UTF-8 becomes text that cannot be encoded; filters count that as unreadable
    rows = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=""))
    while True:
        try:
            row = next(rows, None)
        except csv.Error:
            row = {}
        if row is None:
            return
        row.pop(None, None)  # fields beyond the columns
        yield row


def _txt_rows(file) -> Iterator[dict]:
    file = io.BufferedReader(file)
    head = file.peek(4096)[:4096].lstrip(b"\xef\xbb\xbf \r\n").split(b"\n")[0]
    if TITLE.match(head.decode("utf-8", "replace")):
        yield from _articles(_decode(line) for line in file)
        return
    piece = file.read(LONG_FILE + 1)
    if len(piece) <= LONG_FILE:
        yield {"text": _decode(piece)}
        return
    lines, size = [], 0
    for line in itertools.chain((piece + file.readline()).splitlines(keepends=True), file):
        lines.append(line)
        size += len(line)
        if size >= CUT_AFTER and not line.strip():
            yield {"text": _decode(b"".join(lines))}
            lines, size = [], 0
    if lines:
        yield {"text": _decode(b"".join(lines))}


def _article_rows(rows) -> Iterator[dict]:
    return _articles(row.get("text") for row in rows())


def _articles(lines: Iterable[str | None]) -> Iterator[dict]:
    """A heading after a blank line opens an article. A line that cannot be read is a document by itself."""
    article, blank, started = [], True, False
    for line in lines:
        if not isinstance(line, str):
            yield {"text": None}
            continue
        if blank and started and TITLE.match(line):
            yield {"text": "".join(article)}
            article = []
        blank = not line.strip()
        started = started or not blank
        article.append(line if line.endswith("\n") else line + "\n")
    if article:
        yield {"text": "".join(article)}


# ---- Data sets of the datasets library


def _dataset_rows(dataset) -> Iterator[dict]:
    from datasets import Dataset

    from data.sources.tables import table_documents

    if isinstance(dataset, Dataset):
        for table in dataset.with_format("arrow").iter(batch_size=256):
            yield from table_documents(table)
    else:
        yield from dataset


@contextmanager
def _hub_errors(name, config):
    """What the Hub's client raises, said once, with the remedies."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        config = f", dataset_config_name {config!r}," if config else ""
        raise ValueError(
            f"dataset_name {name!r}{config} cannot be loaded: {str(error).strip()}\n  Remedies: check the "
            "spelling, dataset_config_name and the network; log in with `hf auth login` if it is private or "
            "gated; installed-python and installed-docs need none of these."
        ) from error
