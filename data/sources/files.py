"""Text files, local or anywhere fsspec reaches, as documents:

    .jsonl           one row per line; a line that is no JSON object with the text column is unreadable (None)
    .json            the same, or one array of objects (which is held in memory whole)
    .csv             one row per record; the first record names the columns
    .parquet .arrow  one row per row
    .txt             one document per file, or per article of WikiText. A file above 256 KiB is cut at blank
                     lines into documents of about 64 KiB, so that memory stays bounded and documents can be
                     held out for validation.

All but .parquet and .arrow may be compressed (.gz, .bz2, .xz). Where some file names of a folder or glob have
the word "train", the words train / validation, valid, val, dev / test name splits; otherwise all is "train".
"""

import csv
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import partial

import fsspec

SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow")
SPLIT_WORDS = {"train": {"train"}, "validation": {"validation", "valid", "val", "dev"}, "test": {"test"}}
LONG_FILE, CUT_AFTER = 1 << 18, 1 << 16  # bytes: of .txt files, as said above
TITLE = re.compile(r" ?= [^=\n]+ = ?\n?\Z")  # " = Title = "; headings inside an article have more signs


def is_files(name: str) -> bool:
    """Whether it names a file, a folder, a glob or a URL; a save_to_disk folder is none of these."""
    path_like = "://" in name or glob.has_magic(name) or name.startswith(("/", "~", "."))
    return not is_saved(name) and (path_like or os.path.exists(name) or _suffix(name) in SUFFIXES)


def is_saved(name: str) -> bool:
    """Whether it is a folder that the datasets library has saved."""
    return any(os.path.exists(os.path.join(name, file)) for file in ("dataset_dict.json", "state.json"))


def has_split(source, split: str) -> bool:
    return bool(_split_files(source.dataset_name).get(split))


def open_rows(source):
    """(fingerprint, rows()) of the files of one split."""
    urls = _split_files(source.dataset_name)[source.split]
    return digest([_file_state(url) for url in urls]), partial(_file_rows, urls)


def digest(*parts) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


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


def decode(data: bytes) -> str | None:
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
        yield from articles(decode(line) for line in file)
        return
    piece = file.read(LONG_FILE + 1)
    if len(piece) <= LONG_FILE:
        yield {"text": decode(piece)}
        return
    lines, size = [], 0
    for line in itertools.chain((piece + file.readline()).splitlines(keepends=True), file):
        lines.append(line)
        size += len(line)
        if size >= CUT_AFTER and not line.strip():
            yield {"text": decode(b"".join(lines))}
            lines, size = [], 0
    if lines:
        yield {"text": decode(b"".join(lines))}


def articles(lines: Iterable[str | None]) -> Iterator[dict]:
    """The documents in WikiText's lines: a heading after a blank line opens an article. A line that cannot
    be read is a document by itself."""
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
