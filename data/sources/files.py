"""Text files, local or anywhere fsspec reaches, as documents:

    .jsonl      one row per line; a line that is no JSON object with the text column is unreadable (None)
    .json       the same, or one array of objects (which is held in memory whole)
    .csv        one row per record; the first record names the columns
    .parquet    one row per row
    .txt        one document per file, or per article of WikiText. A file above 256 KiB is cut into documents
                of about 64 KiB, at blank lines, or after 1 MiB where there are none. With Source.divide a
                file that is alone is cut into about 30 documents, if it is smaller.

All but .parquet may be compressed (.gz, .bz2, .xz, .zst). Files of other types in a folder are counted and
left out; those that a name or glob with their suffix selects ("src/**/*.py") are read like .txt.

If the name of any file, or of its folder, has the word "train", the words train / validation, valid, val, dev
/ test name splits, and every file must belong to exactly one; otherwise all files are "train". (The datasets
library can read these files, too, but stops at the first bad line.)
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
METADATA = {"manifest.json", "dataset_info.json", "dataset_infos.json"}  # lie beside the files of data sets
# Entries that change with a file's content, in the file systems local, S3, GCS, Azure, http, hf.
TAGS = ("mtime", "ETag", "etag", "LastModified", "last_modified", "Last-Modified", "updated", "blob_id")
# The first bytes of compressed files.
PACKED = {b"\x1f\x8b\x08": "gzip", b"BZh91AY": "bz2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
UNIT_BYTES = 1 << 26  # small files are read together up to this size
LONG_FILE, CUT_AFTER, LONGEST = 1 << 18, 1 << 16, 1 << 20  # bytes, for .txt files: see above
DOCUMENTS = 30  # of a smaller one that is alone
TITLE = re.compile(r" ?= [^=\n]+ = ?\r?\n?\Z")  # " = Title = "; headings inside an article have more "="


def is_files(name: str) -> bool:
    """Whether the name is a file, a folder, a glob or a URL, and not a save_to_disk folder."""
    path_like = "://" in name or glob.has_magic(name) or name[-1:] == "/" or name.startswith(("/", "~", "."))
    return not is_saved(name) and (path_like or os.path.exists(name) or suffix(name) in SUFFIXES)


def is_saved(name: str) -> bool:
    """Whether the name is a folder that save_to_disk of the datasets library has written."""
    alone = all(os.path.exists(f"{name}/{file}.json") for file in ("dataset_info", "state"))
    return alone or os.path.exists(f"{name}/dataset_dict.json")


def suffix(path: str) -> str:
    return os.path.splitext(re.sub(r"\.(gz|bz2|xz|zst)$", "", _bare(path).lower()))[1]


def _bare(path: str) -> str:
    """The path without the query of a web address."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


def list_files(name: str) -> tuple[fsspec.AbstractFileSystem, list[str]]:
    """The file system of a file, folder, glob or URL, and the paths that exist there."""
    with explained(f"dataset_name {name!r}", "listed"):
        files, path = open_url(os.path.expanduser(name))
        if suffix(path) in SUFFIXES and files.isfile(path):  # first, as over http isdir reads the whole file
            return files, [path]
        if glob.has_magic(path) and not files.exists(path):  # my[1].jsonl may be a file's name
            return files, files.glob(path)
        if not files.isdir(path):
            return files, [path] * files.exists(path)
        local = isinstance(files, fsspec.get_filesystem_class("file"))
        return files, _follow_links(path) if local else files.find(path)


def _follow_links(path: str) -> list[str]:
    """The files below a folder, each folder once: links may form a circle. Linked folders come last."""
    paths, seen, folders = [], set(), deque([path])
    while folders:
        if (real := os.path.realpath(folder := folders.popleft())) not in seen:
            seen.add(real)
            for entry in os.scandir(folder):
                later = folders.append if entry.is_symlink() else folders.appendleft
                (later if entry.is_dir() else paths.append)(entry.path)
    return paths


def split_files(name: str, suffixes=SUFFIXES, say: bool = False) -> dict[str, list[str]]:
    """{split: sorted URLs}, by the rules above. say: print how many files have other suffixes."""
    files, paths = list_files(name)
    if not paths:
        raise ValueError(f"dataset_name {name!r}: no such file, folder or Hub data set, or an empty one; "
                         "check its spelling")
    if suffixes == SUFFIXES and {*map(suffix, paths)} == {suffix(name)} - {"", *SUFFIXES}:
        if b"\0" not in files.head(min(paths), 4096):  # else it is no text
            return {"train": [*map(files.unstrip_protocol, sorted(paths))]}
    known = sorted(path for path in paths if suffix(path) in suffixes)
    known = [path for path in known if os.path.basename(path) not in METADATA] or known
    if not known:
        raise ValueError(f"dataset_name {name!r} holds no file of the types {' '.join(suffixes)}; to read "
                         "others as plain text, select them by a glob, such as 'src/**/*.py'")
    if say and len(known) < len(paths) and os.environ.get("RANK", "0") == "0":
        other = Counter(suffix(path) or "without any" for path in set(paths) - set(known))
        counts = ", ".join(f"{kind} {count:,}" for kind, count in sorted(other.items()))
        print(f"{without_secrets(name)}: {len(known):,} files are read, others are not: {counts}", flush=True)
    # The name of a single folder of text names no split: it may be called test for other reasons.
    by_folder = len({os.path.dirname(path) for path in known}) > 1 or suffixes != SUFFIXES
    splits_of = {path: _splits_in(path.rsplit("/", 2)[: -2 - by_folder : -1]) for path in known}
    splits = {split: [path for path in known if split in splits_of[path]] for split in SPLIT_WORDS}
    unclear = [os.path.basename(path) for path in known if len(splits_of[path]) != 1]
    if len(known) == 1 or not splits["train"]:
        splits = {"train": known}
    elif unclear:
        more = f" and {len(unclear) - 9} more" if len(unclear) > 9 else ""
        raise ValueError(f"dataset_name {name!r}: {', '.join(unclear[:9])}{more}: in no split or in two, but "
                         "other names hold the word train; rename, or select the wanted files by a glob")
    return {split: [*map(files.unstrip_protocol, paths)] for split, paths in splits.items() if paths}


def _splits_in(names: list[str]) -> list[str]:
    """The splits in the first of these names that has words of splits."""
    for name in names:
        words = set(re.split(r"[^a-z]+", name.lower()))
        if splits := [split for split, known in SPLIT_WORDS.items() if words & known]:
            return splits
    return []


def states(urls: list[str]) -> list[tuple]:
    """(URL, size, tags...) of each file, which change when the file does."""
    infos = [(url, files.info(path)) for url in urls for files, path in [fsspec.core.url_to_fs(url)]]
    return [(without_secrets(url), *(str(info.get(key)) for key in ("size", *TAGS))) for url, info in infos]


def digest(*parts) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def splits(source) -> list[str]:
    return [*split_files(source.dataset_name)]


def open_units(source) -> tuple[str, list[Callable]]:
    """(fingerprint, units) of one split: files of together UNIT_BYTES or more; the last may be smaller."""
    by_split, units, size = split_files(source.dataset_name, say=True), [], UNIT_BYTES
    urls = by_split[source.split]
    divide = source.divide and len(by_split) == len(urls) == 1
    with explained(f"dataset_name {source.dataset_name!r}", "read"):  # a link may lead nowhere
        file_states = states(urls)
    for url, (_, length, *_) in zip(urls, file_states, strict=True):
        if size >= UNIT_BYTES:
            units, size = [*units, []], 0
        units[-1].append(url)
        size += int(length) if length.isdigit() and int(length) else UNIT_BYTES
    fingerprint = digest(file_states, *["divide"] * divide)
    return fingerprint, [partial(_file_rows, unit, divide) for unit in units]


def _file_rows(urls: list[str], divide: bool) -> Iterator[dict]:
    text_rows = partial(_txt_rows, divide=divide)
    readers = (_json_rows, _json_rows, _csv_rows, text_rows, _parquet_rows)
    for url in urls:
        with fsspec.open(url, "rb") as file:
            try:
                reader = dict(zip(SUFFIXES, readers, strict=True)).get(suffix(url), text_rows)
                yield from reader(_unpacked(url, file))
            except Exception as error:  # the readers' libraries raise many kinds
                known = getattr(error, "errno", None) or isinstance(error, MemoryError)
                if known or diagnose(error).transient:
                    raise  # it could not be reached, which says nothing of its content
                raise ValueError(f"{url} is damaged ({error}); repair it or take it out") from error


def _unpacked(url: str, file) -> io.BufferedIOBase:
    """The file, decompressed if its name or else its first bytes say that it is compressed."""
    file = io.BufferedReader(file)
    by_content = (kind for first, kind in PACKED.items() if file.peek(8).startswith(first))
    kind = infer_compression(_bare(url)) or next(by_content, None)
    if kind == "zstd":  # fsspec's reader may stop after the first frame, and accepts a truncated file
        import pyarrow as pa  # not at the top: 30 MB

        return pa.input_stream(file, compression="zstd")
    return compr[kind](file, mode="rb") if kind else file


def attempt(function: Callable, *args):
    """function(*args), or None where that cannot be decoded or parsed."""
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
    # surrogateescape: bytes that are not UTF-8 become text that cannot be encoded, which counts as unreadable
    lines = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    for number, row in enumerate(csv.DictReader(lines, strict=True), 1):
        if None in row:
            raise ValueError(f"record {number:,} has more fields than there are columns: a quote or a comma "
                             "that is not quoted")
        yield row


def _parquet_rows(file) -> Iterator[dict]:
    import pyarrow.parquet as pq  # not at the top: 30 MB

    for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
        yield from table_rows(batch)


def table_rows(table) -> Iterable[dict]:
    """The rows of a pyarrow table or batch; text that is not UTF-8 becomes None."""
    try:
        return table.to_pylist()
    except UnicodeDecodeError:  # one bad value fails the whole table: read it value by value
        columns = [[attempt(value.as_py) for value in column] for column in table.columns]
        return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _txt_rows(file, divide: bool = False) -> Iterator[dict]:
    file = io.BufferedReader(file)
    first = file.peek(4096)[:4096].lstrip(b"\xef\xbb\xbf \r\n").split(b"\n")[0]
    if TITLE.match(first.decode("utf-8", "replace")):
        yield from articles(lambda: ({"text": decode(line)} for line in file))
        return
    start, cut_after, longest = file.read(LONG_FILE + 1), CUT_AFTER, LONGEST - 4
    if short := len(start) <= LONG_FILE:
        cut_after = longest = len(start) // DOCUMENTS
    document, size = [], 0
    for line in [start] if short and not divide else _bounded_lines(start, file):
        document.append(line)
        size += len(line)
        if size >= cut_after and not line.strip() or size > longest:
            yield {"text": decode(b"".join(document))}
            document, size = [], 0
    if document:
        yield {"text": decode(b"".join(document))}


def _bounded_lines(start: bytes, file) -> Iterator[bytes]:
    """The lines of `start` and of the rest of the file. Lines above LONGEST are cut between characters."""
    *lines, line = start.splitlines(keepends=True) or [b""]
    yield from lines
    while more := file.readline(max(1, LONGEST - len(line))):
        line, end = line + more, None
        if not line.endswith(b"\n"):  # cut before a character that begins in the last three bytes
            end = next((-i for i in (1, 2, 3) if line[-i:][:1] >= b"\xc0"), None)
        yield line[:end]
        line = line[end:] if end else b""
    if line:
        yield line


def articles(lines: Callable[[], Iterable[dict]]) -> Iterator[dict]:
    """The articles of WikiText, whose lines are the "text" of rows. A title after a blank line begins an
    article. Each unreadable line is a document of its own."""
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
