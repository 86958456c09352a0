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
"""

import csv
import glob
import hashlib
import io
import json
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
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
    there = {file for file in ("dict", "info") if os.path.exists(f"{name}/dataset_{file}.json")}
    return "dict" in there or "info" in there and os.path.exists(f"{name}/state.json")


def has_split(source, split: str) -> bool:
    return bool(split_files(source.dataset_name).get(split))


def open_units(source):
    """(fingerprint, units) of the files of one split."""
    urls = split_files(source.dataset_name, say=True)[source.split]
    with explained(f"dataset_name {source.dataset_name!r}", "read"):  # a link may lead to nothing
        return digest(states(urls)), [partial(_file_rows, group) for group in units_of(urls)]


def digest(*parts) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _bare(path: str) -> str:
    """Without the query of a web address."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


def suffix(path: str) -> str:
    return os.path.splitext(re.sub(r"\.(gz|bz2|xz|zst)$", "", _bare(path).lower()))[1]


def list_files(name: str) -> tuple[fsspec.AbstractFileSystem, list[str]]:
    """Where a file, folder, glob or URL lies, and the paths that it names: none if nothing is there."""
    with explained(f"dataset_name {name!r}", "listed"):
        files, path = open_url(os.path.expanduser(name))
        if suffix(path) in SUFFIXES and files.isfile(path):  # of the web, isdir would read the whole file
            return files, [path]
        if glob.has_magic(path) and not files.exists(path):  # my[1].jsonl is a name
            return files, files.glob(path)
        return files, _find(files, path) if files.isdir(path) else [path] * files.exists(path)


def _find(files, path: str) -> list[str]:
    """The files below a folder. Links to folders are followed on a disk, once for each: they may go round."""
    if not isinstance(files, fsspec.get_filesystem_class("file")):
        return files.find(path)
    found, seen, folders = [], set(), deque([path])
    while folders:
        if (real := os.path.realpath(folder := folders.popleft())) not in seen:
            seen.add(real)
            for entry in os.scandir(folder):
                later = folders.append if entry.is_symlink() else folders.appendleft  # links last
                (later if entry.is_dir() else found.append)(entry.path)
    return found


def split_files(name: str, suffixes=SUFFIXES, say=False) -> dict[str, list[str]]:
    """Split -> sorted URLs, as the head of this file says. say: print how many files are of no such type."""
    files, paths = list_files(name)
    if not paths:
        told = "no such file, folder or Hub data set, or an empty one; check its spelling"
        raise ValueError(f"dataset_name {name!r}: {told}")
    kinds = {path: suffix(path) for path in paths}
    known = sorted(path for path in paths if kinds[path] in suffixes)
    known = [path for path in known if os.path.basename(path) not in METADATA] or known
    if not known:
        raise ValueError(f"dataset_name {name!r} holds no file of the types {' '.join(suffixes)}")
    if say and len(known) < len(paths) and os.environ.get("RANK", "0") == "0":
        other = Counter(kinds[path] or "without any" for path in set(paths) - set(known))
        told = ", ".join(f"{kind} {count:,}" for kind, count in sorted(other.items()))
        print(f"{without_secrets(name)}: {len(known):,} files are read, others are not: {told}", flush=True)
    # One folder for all says nothing of text: it may be called test for other reasons.
    with_folder = len({os.path.dirname(path) for path in known}) > 1 or suffixes != SUFFIXES
    own = {path: _split_words(path, with_folder) for path in known}
    splits = {split: [path for path in known if split in own[path]] for split in SPLIT_WORDS}
    astray = [os.path.basename(path) for path in known if len(own[path]) != 1]
    if len(known) == 1 or not splits["train"]:
        splits = {"train": known}
    elif astray:
        more = f" and {len(astray) - 9} more" if len(astray) > 9 else ""
        raise ValueError(f"dataset_name {name!r}: {', '.join(astray[:9])}{more}: in no split or in two, "
                         "where other names hold the word train; rename, or name the wanted by a glob")
    return {split: [files.unstrip_protocol(path) for path in paths] for split, paths in splits.items()}


def _split_words(path: str, with_folder: bool) -> list[str]:
    """The splits that a file's name tells of, or else that of its folder."""
    name, folder = os.path.basename(path), os.path.basename(os.path.dirname(path))
    words = set(re.split(r"[^a-z]+", name.lower()))
    found = [split for split, names in SPLIT_WORDS.items() if words & names]
    if not found and with_folder:
        words = set(re.split(r"[^a-z]+", folder.lower()))
        found = [split for split, names in SPLIT_WORDS.items() if words & names]
    return found


def states(urls: list[str]) -> list[tuple]:
    """What changes when one of the files does."""
    found = [(url, files.info(path)) for url in urls for files, path in [fsspec.core.url_to_fs(url)]]
    return [(without_secrets(url), *(str(info.get(key)) for key in ("size", *TAGS))) for url, info in found]


def units_of(urls: list[str]) -> list[list[str]]:
    """The files in groups of at least UNIT_BYTES, but for the last: what can be read apart from the rest."""
    groups, size = [[]], 0
    for url in urls:
        if size >= UNIT_BYTES:
            groups, size = [*groups, []], 0
        groups[-1].append(url)
        files, path = fsspec.core.url_to_fs(url)
        size += files.info(path).get("size") or UNIT_BYTES
    return groups


def _file_rows(urls) -> Iterator[dict]:
    readers = {".jsonl": _json_rows, ".json": _json_rows, ".csv": _csv_rows, ".txt": _txt_rows}
    if {suffix(url) for url in urls} - readers.keys():
        from data.sources.tables import parquet_documents

        readers[".parquet"] = parquet_documents
    for url in urls:
        with fsspec.open(url, "rb") as file:
            try:
                yield from readers[suffix(url)](_unpacked(url, file))
            except Exception as error:  # the readers' libraries have many kinds
                if diagnose(error).passing or getattr(error, "errno", None) or isinstance(error, MemoryError):
                    raise  # the way to the file, not what it holds
                raise ValueError(f"{url} is damaged ({error}); repair it or take it out") from error


def _unpacked(url: str, file):
    """What the file holds that its name, or else its first bytes, tell to be compressed."""
    file = io.BufferedReader(file)
    told = (kind for first, kind in PACKED.items() if file.peek(8).startswith(first))
    kind = infer_compression(_bare(url)) or next(told, None)
    if kind == "zstd":  # fsspec's reader may end after the first of several frames, or where it is cut
        import pyarrow as pa  # not at the top: 30 MB

        return pa.input_stream(file, compression="zstd")
    return compr[kind](file, mode="rb") if kind else file


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
    lines = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    for number, row in enumerate(csv.DictReader(lines, strict=True), 1):
        if None in row:  # a stray quote has swallowed what came before, or a comma is not quoted
            raise ValueError(f"record {number:,} has more fields than there are columns: a quote or a comma "
                             "that is not quoted")
        yield row


def _txt_rows(file) -> Iterator[dict]:
    file = io.BufferedReader(file)
    head = file.peek(4096)[:4096].lstrip(b"\xef\xbb\xbf \r\n").split(b"\n")[0]
    if TITLE.match(head.decode("utf-8", "replace")):
        yield from articles(decode(line) for line in file)
        return
    start = file.read(LONG_FILE + 1)
    if len(start) <= LONG_FILE:
        yield {"text": decode(start)}
        return
    lines, size = [], 0
    for line in _bounded_lines(start, file):
        lines.append(line)
        size += len(line)
        if size >= CUT_AFTER and not line.strip() or size > LONGEST - 4:
            yield {"text": decode(b"".join(lines))}
            lines, size = [], 0
    if lines:
        yield {"text": decode(b"".join(lines))}


def _bounded_lines(start: bytes, file) -> Iterator[bytes]:
    """The lines of what was read already and of the rest; longer ones in pieces, cut between characters."""
    *lines, last = start.splitlines(keepends=True)
    yield from lines
    while line := last + file.readline(max(1, LONGEST - len(last))):
        cut = 0
        if not line.endswith(b"\n"):  # the first byte of a character, among the last three
            cut = next((i for i in (1, 2, 3) if line[-i:][:1] >= b"\xc0"), 0)
        last = line[len(line) - cut :]
        yield line[: len(line) - cut]
        if cut and not file.peek(1):
            yield last
            return


def articles(lines: Iterable[str | None]) -> Iterator[dict]:
    """The documents in WikiText's lines: a heading after a blank line opens one, unreadable lines are one."""
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
