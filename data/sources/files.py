"""Text files, local or anywhere fsspec reaches, as documents:

    .jsonl           one row per line; a line that is no JSON object with the text column is unreadable (None)
    .json            the same, or one array of objects (which is held in memory whole)
    .csv             one row per record; the first record names the columns
    .parquet         one row per row
    .txt             one document per file, or per article of WikiText. A file above 256 KiB is cut at blank
                     lines into documents of about 64 KiB, and without any after 1 MiB.

All but .parquet may be compressed (.gz, .bz2, .xz, .zst). Where some file names of a folder or glob, or the
folders in it, have the word "train", the words train / validation, valid, val, dev / test name splits, and a
file that belongs to none of them, or to two, is a mistake; otherwise all is "train". Other types are counted.
(The datasets library would read these files, but one bad line ends its reading.)
"""

import csv
import glob
import hashlib
import io
import json
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

import fsspec
from fsspec.compression import compr
from fsspec.utils import infer_compression

from utils.io.retry import diagnose
from utils.io.secrets import without_secrets
from utils.io.urls import explained, open_url

SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet")
SPLIT_WORDS = {"train": {"train"}, "validation": {"validation", "valid", "val", "dev"}, "test": {"test"}}
METADATA = {"manifest.json", "dataset_info.json", "dataset_infos.json"}  # of data sets, beside their files
# What file systems keep that changes with a file's content, beside its size: local, S3, GCS, Azure, http, hf.
TAGS = ("mtime", "ETag", "etag", "LastModified", "last_modified", "Last-Modified", "updated", "blob_id")
# The first bytes of compressed files.
PACKED = {b"\x1f\x8b\x08": "gzip", b"BZh91AY": "bz2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
UNIT_BYTES = 1 << 26  # of files that are read as one; larger ones stay whole
LONG_FILE, CUT_AFTER, LONGEST = 1 << 18, 1 << 16, 1 << 20  # bytes: of .txt files, as said above
TITLE = re.compile(r" ?= [^=\n]+ = ?\r?\n?\Z")  # " = Title = "; headings inside an article have more signs


def is_files(name: str) -> bool:
    """Whether it names a file, a folder, a glob or a URL; a save_to_disk folder is none of these."""
    path_like = "://" in name or glob.has_magic(name) or name[-1:] == "/" or name.startswith(("/", "~", "."))
    return not is_saved(name) and (path_like or os.path.exists(name) or suffix(name) in SUFFIXES)


def is_saved(name: str) -> bool:
    """Whether it is a folder that the datasets library has saved."""
    alone = all(os.path.exists(f"{name}/{file}.json") for file in ("dataset_info", "state"))
    return alone or os.path.exists(f"{name}/dataset_dict.json")


def suffix(path: str) -> str:
    return os.path.splitext(re.sub(r"\.(gz|bz2|xz|zst)$", "", _bare(path).lower()))[1]


def _bare(path: str) -> str:
    """Without the query of a web address."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


def list_files(name: str) -> tuple[fsspec.AbstractFileSystem, list[str]]:
    """Where a file, folder, glob or URL lies, and the paths that it names: none if nothing is there."""
    with explained(f"dataset_name {name!r}", "listed"):
        files, path = open_url(os.path.expanduser(name))
        if suffix(path) in SUFFIXES and files.isfile(path):  # of the web, isdir would read the whole file
            return files, [path]
        if glob.has_magic(path) and not files.exists(path):  # my[1].jsonl is a name
            return files, files.glob(path)
        if not files.isdir(path):
            return files, [path] * files.exists(path)
        local = isinstance(files, fsspec.get_filesystem_class("file"))
        return files, _follow_links(path) if local else files.find(path)


def _follow_links(path: str) -> list[str]:
    """The files below a folder. Links to folders come last, and each folder once: links may go round."""
    found, seen, folders = [], set(), deque([path])
    while folders:
        if (real := os.path.realpath(folder := folders.popleft())) not in seen:
            seen.add(real)
            for entry in os.scandir(folder):
                later = folders.append if entry.is_symlink() else folders.appendleft
                (later if entry.is_dir() else found.append)(entry.path)
    return found


def split_files(name: str, suffixes=SUFFIXES, say: bool = False) -> dict[str, list[str]]:
    """{split: sorted URLs}, as the head of this file says; say: print how many files have other suffixes."""
    files, paths = list_files(name)
    if not paths:
        raise ValueError(f"dataset_name {name!r}: no such file, folder or Hub data set, or an empty one; "
                         "check its spelling")
    known = sorted(path for path in paths if suffix(path) in suffixes)
    known = [path for path in known if os.path.basename(path) not in METADATA] or known
    if not known:
        raise ValueError(f"dataset_name {name!r} holds no file of the types {' '.join(suffixes)}")
    if say and len(known) < len(paths) and os.environ.get("RANK", "0") == "0":
        other = Counter(suffix(path) or "without any" for path in set(paths) - set(known))
        told = ", ".join(f"{kind} {count:,}" for kind, count in sorted(other.items()))
        print(f"{without_secrets(name)}: {len(known):,} files are read, others are not: {told}", flush=True)
    # One folder of text says nothing by its name: it may be called test for other reasons.
    by_folder = len({os.path.dirname(path) for path in known}) > 1 or suffixes != SUFFIXES
    own = {path: _splits_of(path.rsplit("/", 2)[: -2 - by_folder : -1]) for path in known}
    splits = {split: [path for path in known if split in own[path]] for split in SPLIT_WORDS}
    astray = [os.path.basename(path) for path in known if len(own[path]) != 1]
    if len(known) == 1 or not splits["train"]:
        splits = {"train": known}
    elif astray:
        more = f" and {len(astray) - 9} more" if len(astray) > 9 else ""
        raise ValueError(f"dataset_name {name!r}: {', '.join(astray[:9])}{more}: in no split or in two, "
                         "where other names hold the word train; rename, or name the wanted by a glob")
    return {split: [*map(files.unstrip_protocol, paths)] for split, paths in splits.items() if paths}


def _splits_of(names: list[str]) -> list[str]:
    """The splits that the first of these names with such a word tells of."""
    for name in names:
        words = set(re.split(r"[^a-z]+", name.lower()))
        if found := [split for split, known in SPLIT_WORDS.items() if words & known]:
            return found
    return []


def states(urls: list[str]) -> list[tuple]:
    """(URL, size, tags...) of each file: something of it changes when the file does."""
    found = [(url, files.info(path)) for url in urls for files, path in [fsspec.core.url_to_fs(url)]]
    return [(without_secrets(url), *(str(info.get(key)) for key in ("size", *TAGS))) for url, info in found]


def digest(*parts) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def splits(source) -> Iterable[str]:
    return split_files(source.dataset_name)


def open_units(source) -> tuple[str, list[Callable]]:
    """(fingerprint, units) of one split. A unit is files of UNIT_BYTES or more, or the last ones."""
    urls, units, size = split_files(source.dataset_name, say=True)[source.split], [], UNIT_BYTES
    with explained(f"dataset_name {source.dataset_name!r}", "read"):  # a link may lead to nothing
        found = states(urls)
    for url, (_, length, *_) in zip(urls, found, strict=True):
        if size >= UNIT_BYTES:
            units, size = [*units, []], 0
        units[-1].append(url)
        size += int(length) if length.isdigit() and int(length) else UNIT_BYTES
    return digest(found), [partial(_file_rows, unit) for unit in units]


def _file_rows(urls: list[str]) -> Iterator[dict]:
    readers = (_json_rows, _json_rows, _csv_rows, _txt_rows, _parquet_rows)
    for url in urls:
        with fsspec.open(url, "rb") as file:
            try:
                yield from dict(zip(SUFFIXES, readers, strict=True))[suffix(url)](_unpacked(url, file))
            except Exception as error:  # the readers' libraries have many kinds
                if diagnose(error).passing or getattr(error, "errno", None) or isinstance(error, MemoryError):
                    raise  # the way to the file, not what it holds
                raise ValueError(f"{url} is damaged ({error}); repair it or take it out") from error


def _unpacked(url: str, file) -> io.BufferedIOBase:
    """What the file holds that its name, or else its first bytes, tell to be compressed."""
    file = io.BufferedReader(file)
    told = (kind for first, kind in PACKED.items() if file.peek(8).startswith(first))
    kind = infer_compression(_bare(url)) or next(told, None)
    if kind == "zstd":  # fsspec's reader may end after the first of several frames, or where it is cut
        import pyarrow as pa  # not at the top: 30 MB

        return pa.input_stream(file, compression="zstd")
    return compr[kind](file, mode="rb") if kind else file


def attempt(function: Callable, *args):
    """function(*args), or None for what cannot be decoded or parsed."""
    with suppress(ValueError, RecursionError):
        return function(*args)


def decode(data: bytes) -> str | None:
    return attempt(data.decode, "utf-8-sig")


def _json_rows(file) -> Iterator[dict]:
    file = io.BufferedReader(file)
    array = file.peek(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    for row in json.load(file) if array else (attempt(json.loads, line) for line in file):
        yield row if isinstance(row, dict) else {}


def _csv_rows(file) -> Iterator[dict]:
    csv.field_size_limit((1 << 31) - 1)
    # surrogateescape: what is not UTF-8 becomes text that cannot be encoded; filters count that as unreadable
    lines = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    for number, row in enumerate(csv.DictReader(lines, strict=True), 1):
        if None in row:  # a stray quote has swallowed what came before, or a comma is not quoted
            raise ValueError(f"record {number:,} has more fields than there are columns: a quote or a comma "
                             "that is not quoted")
        yield row


def _parquet_rows(file) -> Iterator[dict]:
    import pyarrow.parquet as pq  # not at the top: 30 MB

    for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
        yield from table_rows(batch)


def table_rows(table) -> Iterable[dict]:
    """The rows of a table or batch of pyarrow; a text that is not UTF-8 is None."""
    try:
        return table.to_pylist()
    except UnicodeDecodeError:  # one bad value spoils the whole table: read it value by value
        columns = [[attempt(value.as_py) for value in column] for column in table.columns]
        return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _txt_rows(file) -> Iterator[dict]:
    file = io.BufferedReader(file)
    first = file.peek(4096)[:4096].lstrip(b"\xef\xbb\xbf \r\n").split(b"\n")[0]
    if TITLE.match(first.decode("utf-8", "replace")):
        yield from articles(lambda: ({"text": decode(line)} for line in file))
        return
    start = file.read(LONG_FILE + 1)
    document, size = [], 0
    for line in _bounded_lines(start, file) if len(start) > LONG_FILE else [start]:
        document.append(line)
        size += len(line)
        if size >= CUT_AFTER and not line.strip() or size > LONGEST - 4:
            yield {"text": decode(b"".join(document))}
            document, size = [], 0
    if document:
        yield {"text": decode(b"".join(document))}


def _bounded_lines(start: bytes, file) -> Iterator[bytes]:
    """The lines of what was read already and of the rest; longer ones in pieces, cut between characters."""
    *lines, line = start.splitlines(keepends=True)
    yield from lines
    while more := file.readline(max(1, LONGEST - len(line))):
        line, end = line + more, None
        if not line.endswith(b"\n"):  # before the first byte of a character, if among the last three
            end = next((-i for i in (1, 2, 3) if line[-i:][:1] >= b"\xc0"), None)
        yield line[:end]
        line = line[end:] if end else b""
    if line:
        yield line


def articles(lines: Callable[[], Iterable[dict]]) -> Iterator[dict]:
    """The documents in WikiText's lines, the "text" of rows: a heading after a blank line opens one. Each
    unreadable line is one, too."""
    article, blank = [], True
    for line in (row.get("text") for row in lines()):
        if not isinstance(line, str):
            yield {"text": None}
            continue
        if blank and TITLE.match(line) and "".join(article).strip():
            yield {"text": "".join(article)}
            article = []
        blank = not line.strip()
        article.append(line if line.endswith("\n") else line + "\n")
    if article:
        yield {"text": "".join(article)}
