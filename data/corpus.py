"""Where text comes from: the Python on this machine, the Hub, local or remote files, a save_to_disk folder.

    corpus = load_corpus("installed-python")      # or "user/name", "texts/*.jsonl", "s3://bucket/texts", ...
    for document in corpus:
        document[corpus.text_column]              # str, or None where the source could not be read as text

How files become documents:
    .jsonl         one row per line; a line that is not a JSON object with the text column is unreadable
    (None) .json          the same, or one array of objects (an array is held in memory whole)
    .csv           one row per record, the first record names the columns
    .parquet .arrow  one row per row
    .txt           one document per file; above 256 KiB a file is cut at blank lines into documents of about
                   64 KiB, so that memory stays bounded and a validation split by document exists
    WikiText       articles: wherever lines are rows (.txt files and the Hub's wikitext sets) and the first
    one with
                   text is a heading " = Title = ", the lines of one article are joined into one document
All but .parquet and .arrow may be compressed (.gz, .bz2, .xz). In a folder where some file names contain
the word "train", the words train / validation, valid, val, dev / test name the splits; otherwise every file
is "train".
"""

import csv
import glob
import hashlib
import io
import json
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from inspect import cleandoc
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet

SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow")
SPLIT_WORDS = {"train": {"train"}, "validation": {"validation", "valid", "val", "dev"}, "test": {"test"}}
TEXT_PIECE = 1 << 16  # bytes: a long .txt file is cut at the first blank line after so many
WIKITEXT_TITLE = re.compile(r"^ ?= [^=\n]+ = ?\n?$")


@dataclass
class Corpus:
    """A re-iterable stream of documents in a fixed order. It pickles, so that dataloader workers can read
    it."""

    name: str  # what the user asked for, printable
    text_column: str
    fingerprint: str  # changes when the content may have changed; part of cache keys
    columns: list[str]
    rows: Callable[[], Iterable[dict]]

    def __iter__(self) -> Iterator[dict]:
        """One dict of columns per document; the text is None where the source could not be read."""
        return iter(self.rows())


def load_corpus(
    dataset_name, *, dataset_config_name=None, split="train", text_column=None, streaming=False
) -> Corpus:
    """Open a source of text. Nothing but its first row is read here; `streaming` concerns the Hub only.

    dataset_name: "installed-python", "installed-docs", a save_to_disk folder, a file, a folder or a glob of
    files (any fsspec URL), or a Hub id. Raises ValueError, with the remedy, for everything that cannot be
    opened."""
    name = str(dataset_name)
    if name in ("installed-python", "installed-docs"):
        if split != "train":
            raise ValueError(f"split {split!r} of dataset_name {name!r} does not exist: it has train only")
        documents = python_documents if name == "installed-python" else docs_documents
        fingerprint = _digest(name, *((owner, path, size) for owner, path, size, _, _ in _python_files()))
        return _open(name, fingerprint, documents, text_column)
    if os.path.exists(os.path.join(name, "dataset_dict.json")) or os.path.exists(
        os.path.join(name, "state.json")
    ):
        saved = datasets.load_from_disk(name)
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise ValueError(f"split {split!r} is not in {name}: it has {', '.join(saved)}")
            saved = saved[split]
        elif split != "train":
            raise ValueError(
                f"split {split!r} is not in {name}: the folder holds one data set, taken as train"
            )
        return _open(name, _digest(name, saved._fingerprint), partial(_dataset_rows, saved), text_column)
    if _is_files(name):
        paths = _files_of_split(name, split)
        fingerprint = _digest(*(_file_state(path) for path in paths))
        return _open(name, fingerprint, partial(_file_rows, paths), text_column)
    dataset, version = _load_hub(name, dataset_config_name, split, streaming)
    return _open(
        name, _digest(name, dataset_config_name, split, version), partial(_dataset_rows, dataset), text_column
    )


def has_split(dataset_name, dataset_config_name, split) -> bool:
    """Whether load_corpus would find this split; ValueError where the source itself cannot be found."""
    name = str(dataset_name)
    if name in ("installed-python", "installed-docs") or os.path.exists(os.path.join(name, "state.json")):
        return split == "train"
    if os.path.exists(os.path.join(name, "dataset_dict.json")):
        return split in json.loads(Path(name, "dataset_dict.json").read_text())["splits"]
    if _is_files(name):
        return bool(_split_files(name).get(split))
    with _hub_errors(name, dataset_config_name, split):
        return split in datasets.get_dataset_split_names(name, dataset_config_name)


def _open(name, fingerprint, rows, text_column) -> Corpus:
    """The last steps for every source: join WikiText's lines into articles, find the text column."""
    first = next((row for row in rows() if row), None)
    if first is None:
        raise ValueError(f"dataset_name {name!r} holds no documents: name a source that has some")
    columns = list(first)
    if columns == ["text"] and _is_wikitext(rows()):
        rows = partial(_articles, rows)
    if text_column is not None and text_column not in columns:
        raise ValueError(
            f"text_column {text_column!r} is not in {name}: its columns are {', '.join(columns)}"
        )
    found = text_column or next((column for column in ("content", "text") if column in columns), None)
    if found is None:
        raise ValueError(
            f"{name} has neither a column content nor text: name one of {', '.join(columns)}"
            " with --text_column"
        )
    return Corpus(name, found, fingerprint, columns, rows)


def _digest(*parts) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


# The Python on this machine


def _python_files() -> list[tuple[str, str, int, str, Path]]:
    """(distribution and version, relative path, bytes, license, file) of every .py file of the standard
    library and of site-packages, in a fixed order that does not depend on where the interpreter is
    installed."""
    paths = sysconfig.get_paths()
    found = {}
    python = f"{platform.python_implementation()} {platform.python_version()}"
    _find_python(Path(paths["stdlib"]), {}, (python, "PSF-2.0"), found)
    for root in dict.fromkeys(Path(paths[kind]) for kind in ("purelib", "platlib")):
        owners = {}
        for distribution in metadata.distributions(path=[str(root)]):
            owner = (f"{distribution.name} {distribution.version}", _license(distribution.metadata))
            owners.update(
                (file.as_posix(), owner) for file in distribution.files or () if file.suffix == ".py"
            )
        _find_python(root, owners, ("site-packages", "unknown"), found)
    return sorted(found.values())


def _find_python(root, owners, default, found):
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if name not in ("__pycache__", "site-packages", "dist-packages")
        ]
        for name in names:
            file = Path(folder, name)
            if name.endswith(".py") and file not in found and file.is_file():
                path = file.relative_to(root).as_posix()
                owner, license = owners.get(path, default)
                found[file] = (owner, path, file.stat().st_size, license, file)


def _license(meta) -> str:
    classifiers = [
        c.split(" :: ")[-1] for c in meta.get_all("Classifier") or () if c.startswith("License ::")
    ]
    names = [meta.get("License-Expression"), *classifiers, (meta.get("License") or "").strip().split("\n")[0]]
    return next((name for name in names if name), "unknown")


def python_documents() -> Iterator[dict]:
    """Python source as rows with the columns, and the column types, of codeparrot-ds."""
    for owner, path, size, license, file in _python_files():
        yield {"repo_name": owner, "path": path, "copies": "1", "size": str(size),
               "content": _decode(file.read_bytes()), "license": license}  # fmt: skip


# A docstring, read lexically: a triple-quoted string that starts a line and stands first in the file or
# follows a line that ends in ":". Within 2 % of what ast finds, in a tenth of the time (parsing every
# installed file takes a minute).
DOCSTRING = re.compile(
    r'(?:\A(?:[ \t]*(?:#[^\n]*)?\n)*|:[ \t]*(?:#[^\n]*)?\n\s*)[rRuU]?("""|\'\'\')(.*?)\1', re.DOTALL
)
MARKUP = re.compile(r">>>|\.\. |::|https?:|[|<>{}\\]|---|===|^\s*[:@#]", re.MULTILINE)


def docs_documents(minimum=400) -> Iterator[dict]:
    """The English in the same installation: package descriptions, and the docstrings of one module per
    document.

    Paragraphs keep their order, one line each, blank lines between. Code, tables and markup are left out;
    modules with fewer than `minimum` characters of prose are left out."""
    for root in dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")):
        for distribution in sorted(metadata.distributions(path=[root]), key=lambda found: found.name):
            text = distribution.metadata.get_payload() or distribution.metadata.get("Description")
            paragraphs = _prose(text) if isinstance(text, str) else []
            if sum(map(len, paragraphs)) >= minimum:
                yield {"source": f"{distribution.name} {distribution.version}", "path": "METADATA",
                       "text": "\n\n".join(paragraphs)}  # fmt: skip
    for owner, path, size, _, file in _python_files():
        source = _decode(file.read_bytes()) if size >= minimum else None
        if source is None:
            continue
        paragraphs = [p for match in DOCSTRING.finditer(source) for p in _prose(cleandoc(match[2]))]
        if sum(map(len, paragraphs)) >= minimum:
            yield {"source": owner, "path": path, "text": "\n\n".join(paragraphs)}


def _prose(text) -> list[str]:
    """The paragraphs that read as sentences: they begin with a capital, end with a full stop and are mostly
    letters."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        if len(line) >= 40 and line[0].isupper() and line[-1] in ".!?" and not MARKUP.search(paragraph):
            if sum(character.isalpha() or character == " " for character in line) >= 0.9 * len(line):
                found.append(line)
    return found


# Files, local or anywhere fsspec reaches


def _suffix(path) -> str:
    path = re.sub(r"\.(gz|bz2|xz)$", "", path.lower())
    return os.path.splitext(path)[1]


def _is_files(name) -> bool:
    return ("://" in name or os.path.exists(name) or glob.has_magic(name) or _suffix(name) in SUFFIXES
            or name.startswith(("/", "~", ".")))  # fmt: skip


def _split_files(name) -> dict[str, list[str]]:
    """Split -> sorted paths, as the head of this file says."""
    name = os.path.expanduser(name)
    filesystem, path = fsspec.core.url_to_fs(name)
    try:
        if glob.has_magic(path):
            paths = filesystem.glob(path)
        else:
            paths = (
                filesystem.find(path) if filesystem.isdir(path) else [path] if filesystem.exists(path) else []
            )
    except OSError as error:
        raise ValueError(f"dataset_name {name!r} cannot be listed: {error}") from error
    if not paths:
        raise ValueError(f"dataset_name {name!r}: no such file, folder or Hub data set")
    known = sorted(path for path in paths if _suffix(path) in SUFFIXES)
    if not known:
        raise ValueError(f"dataset_name {name!r} holds none of the file types {' '.join(SUFFIXES)}")
    words = {path: set(re.split(r"[^a-z]+", os.path.basename(path).lower())) for path in known}
    splits = {split: [path for path in known if words[path] & names] for split, names in SPLIT_WORDS.items()}
    if len(known) == 1 or not splits["train"]:
        splits = {"train": known}
    return {split: [filesystem.unstrip_protocol(path) for path in paths] for split, paths in splits.items()}


def _files_of_split(name, split) -> list[str]:
    splits = _split_files(name)
    if not splits.get(split):
        raise ValueError(
            f"split {split!r} is not in {name}: its file names give {', '.join(s for s in splits if s)}"
        )
    return splits[split]


def _file_state(url) -> tuple:
    """What changes when a file does: its size, and the time or entity tag its file system keeps."""
    filesystem, path = fsspec.core.url_to_fs(url)
    info = filesystem.info(path)
    return url, *(
        str(info.get(key)) for key in ("size", "mtime", "ETag", "etag", "LastModified", "updated", "sha256")
    )


def _file_rows(urls) -> Iterator[dict]:
    readers = {".jsonl": _json_rows, ".json": _json_rows, ".csv": _csv_rows, ".txt": _txt_rows,
               ".parquet": _parquet_rows, ".arrow": _arrow_rows}  # fmt: skip
    for url in urls:
        try:
            with fsspec.open(url, "rb", compression="infer") as file:
                yield from readers[_suffix(url)](file)
        except (pa.ArrowException, EOFError, OSError) as error:
            raise ValueError(f"{url} cannot be read ({error}): repair or remove this file") from error


def _decode(data: bytes) -> str | None:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _json_rows(file) -> Iterator[dict]:
    file = io.BufferedReader(file)
    start = file.peek(1 << 12).lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"["):
        try:
            rows = json.loads(file.read())
        except ValueError as error:
            raise OSError(f"not a JSON array: {error}") from error
        yield from (row if isinstance(row, dict) else {} for row in rows)
        return
    for line in file:
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            row = {}
        yield row if isinstance(row, dict) else {}


def _csv_rows(file) -> Iterator[dict]:
    csv.field_size_limit((1 << 31) - 1)  # the largest a C long holds everywhere
    # surrogateescape: bytes that are not UTF-8 become text that cannot be encoded, which counts as unreadable
    reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=""))
    while True:
        try:
            row = next(reader, None)
        except csv.Error:
            yield {}
            continue
        if row is None:
            return
        row.pop(None, None)
        yield row


def _txt_rows(file) -> Iterator[dict]:
    file = io.BufferedReader(file)
    head = file.peek(1 << 12)[: 1 << 12].decode("utf-8", "replace")
    if _is_wikitext({"text": line} for line in head.splitlines(keepends=True)[:5]):
        yield from ({"text": _decode(line)} for line in file)
        return
    piece = file.read(4 * TEXT_PIECE + 1)
    if len(piece) <= 4 * TEXT_PIECE:
        yield {"text": _decode(piece)}
        return
    lines, size = [], 0
    for line in _lines_after(piece, file):
        lines.append(line)
        size += len(line)
        if size >= TEXT_PIECE and not line.strip():
            yield {"text": _decode(b"".join(lines))}
            lines, size = [], 0
    if lines:
        yield {"text": _decode(b"".join(lines))}


def _lines_after(piece, file) -> Iterator[bytes]:
    lines = (piece + file.readline()).splitlines(keepends=True)
    yield from lines
    yield from file


def _parquet_rows(file) -> Iterator[dict]:
    for batch in pa.parquet.ParquetFile(file).iter_batches(batch_size=256):
        yield from _arrow_table_rows(batch)


def _arrow_rows(file) -> Iterator[dict]:
    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(file)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        batches = pa.ipc.open_stream(file)
    for batch in batches:
        for start in range(0, batch.num_rows, 256):
            yield from _arrow_table_rows(batch.slice(start, 256))


def _arrow_table_rows(table) -> Iterable[dict]:
    try:
        return table.to_pylist()
    except UnicodeDecodeError:  # one bad value spoils the batch: read it value by value
        columns = dict(zip(table.column_names, table.columns, strict=True))
        return [{name: _value(column[i]) for name, column in columns.items()} for i in range(table.num_rows)]  # fmt: skip


def _value(scalar):
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return None


def _is_wikitext(rows) -> bool:
    """Whether the first line that is not blank is the heading of an article."""
    for _, row in zip(range(5), rows, strict=False):
        if isinstance(row["text"], str) and row["text"].strip():
            return bool(WIKITEXT_TITLE.match(row["text"]))
    return False


def _articles(rows) -> Iterator[dict]:
    """Lines to articles: a heading " = Title = " after a blank line opens one. Headings inside have more
    signs."""
    lines, blank = [], True
    for row in rows():
        line = row.get("text")
        if not isinstance(line, str):
            yield row  # unreadable: counted by itself, the article goes on
            continue
        if blank and lines and WIKITEXT_TITLE.match(line):
            yield {"text": "".join(lines)}
            lines = []
        blank = not line.strip()
        lines.append(line if line.endswith("\n") else line + "\n")
    if lines:
        yield {"text": "".join(lines)}


# The Hub


class _hub_errors:
    """What the Hub's client raises, said once with the remedies."""

    def __init__(self, name, config, split):
        self.asked = (
            f"dataset_name {name!r}" + (f" config {config!r}" if config else "") + f" split {split!r}"
        )

    def __enter__(self):
        pass

    def __exit__(self, kind, error, traceback):
        if isinstance(error, (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError)):
            raise ValueError(
                f"{self.asked} cannot be loaded: {str(error).strip()}\n  Remedies: check the name,"
                " dataset_config_name and split; log in with `hf auth login` if it is private or gated; check the network;"
                " installed-python and installed-docs need none of these."
            ) from error


def _load_hub(name, config, split, streaming):
    """The data set, and a string that names the version of its files."""
    with _hub_errors(name, config, split):
        if streaming:
            builder = datasets.load_dataset_builder(name, config)
            dataset = datasets.load_dataset(name, config, split=split, streaming=True)
            return dataset, repr((builder.hash, builder.config.data_files))
        dataset = datasets.load_dataset(name, config, split=split)
        return dataset, dataset._fingerprint


def _dataset_rows(dataset) -> Iterator[dict]:
    if isinstance(dataset, datasets.Dataset):
        for table in dataset.with_format("arrow").iter(batch_size=256):
            yield from _arrow_table_rows(table)
    else:
        yield from dataset
