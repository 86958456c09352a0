"""Reads documents from files, local or at any fsspec URL. A file's ending says what its documents are:

    .jsonl .ndjson .jsonlines     one per line
    .json                         the same, or the items of one array (which is read into memory whole)
    .csv .tsv                     one per record; the first record names the columns
    .parquet                      one per row
    .txt, and other endings that a name or glob selects ("src/**/*.py")      the file

Text files larger than LONG_FILE are cut at blank lines into documents of about CUT_AFTER, at most LONGEST. A
text file that is the only file, and not larger than LONGEST, becomes about DOCUMENTS, to hold some out.

Files may be compressed: .gz, .bz2, .xz, .zst. Text is UTF-8, with or without a byte order mark. A line or
record that cannot be read is an error that names it. (The datasets library would not name it, and reads
texts such as "NA" or a date as something else.)
"""

import codecs
import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import fsspec
from fsspec.compression import compr
from fsspec.utils import infer_compression

from data.documents.names import JSON_LINES, digest, split_files, stat_files, suffix
from utils.io.mistakes import is_network_error
from utils.io.text import without_secrets
from utils.io.urls import explained

LFS = b"version https://git-lfs.github.com/spec/"  # begins a pointer file, which a clone without Git LFS has
LONG_FILE, CUT_AFTER, LONGEST = 1 << 18, 1 << 16, 1 << 20  # bytes
PIECE = 1 << 17  # characters of a line that are read at a time
DOCUMENTS = 30  # documents that the only text file is divided into
LONG_LINE = 1000  # bytes; to divide the only text file, longer lines are cut between words
WORD = re.compile(r"\s*\S+|\s+")
UNIT_BYTES = 1 << 26  # small files are read together up to this size


def splits(source) -> list[str]:
    return [*split_files(source.dataset_name)]


def open_units(source) -> tuple[str, list[Callable]]:
    """(fingerprint, units) of a split. A unit is a large file, or small files of about UNIT_BYTES."""
    by_split, units, size = split_files(source.dataset_name, report=True), [], UNIT_BYTES
    urls = by_split[source.split]
    divide = source.divide and len(by_split) == len(urls) == 1
    with explained(f"dataset_name {source.dataset_name!r}", "read"):  # a link may lead nowhere
        states = stat_files(urls)
    for url, (_, length, *_) in zip(urls, states, strict=True):
        if size >= UNIT_BYTES:
            units, size = [*units, []], 0
        units[-1].append(url)
        size += int(length) if length.isdigit() and int(length) else UNIT_BYTES
    # "words" names the way a text is divided: another way needs another name.
    return digest(states, divide and "words"), [partial(_read_files, unit, divide) for unit in units]


def _read_files(urls: list[str], divide: bool) -> Iterator[dict]:
    for url in urls:
        read = READERS.get(suffix(url), partial(read_text, divide=divide))
        with explained(f"dataset_name {without_secrets(url)}", "read", (PermissionError, IsADirectoryError)):
            opened = fsspec.open(url, "rb").open()
        with opened as file:
            try:
                for row in read(_decompress(url, file)):
                    yield row if row.get("text") is not None else {"file": without_secrets(url)} | row
            except Exception as error:  # the readers' libraries raise many types
                system_error = getattr(error, "errno", None) or isinstance(error, MemoryError)
                if system_error or is_network_error(error):
                    raise  # the file could not be reached: that says nothing about its content
                raise ValueError(f"{without_secrets(url)} cannot be read ({_describe(error)}); repair it or "
                                 "take it out") from error


def _describe(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8; convert it, as by `iconv -f utf-16 -t utf-8` or `iconv -f latin1 -t utf-8`"
    return str(error)


def _decompress(url: str, file) -> io.BufferedIOBase:
    """The file, decompressed as its ending says, without a byte order mark of UTF-8."""
    file, name = io.BufferedReader(file), re.sub(r"^(https?://[^?]*)\?.*", r"\1", url)
    if file.peek(len(LFS)).startswith(LFS):
        raise ValueError("a pointer of Git LFS, not the file: run `git lfs pull`")
    if name.lower().endswith(".zst"):  # fsspec needs another package for it
        import pyarrow as pa  # not at the top: 30 MB

        file = io.BufferedReader(pa.input_stream(file, compression="zstd"))
    elif compression := infer_compression(name):
        file = io.BufferedReader(compr[compression](file, mode="rb"))
    if file.peek(3).startswith(codecs.BOM_UTF8):
        file.read(3)
    return file


# ---- Readers of one file: binary file -> rows


def read_json(file) -> Iterator[dict]:
    array = file.peek(4096).lstrip(b" \t\r\n").startswith(b"[")
    unit = "item" if array else "line"
    for number, item in enumerate(json.load(file) if array else file, 1):
        if array or item.strip():
            try:
                row = item if array else json.loads(item.decode())
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number:,}: {_describe(error)}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{unit} {number:,}: must be an object, is a {type(row).__name__}")
            yield row


def _read_csv(file, delimiter: str) -> Iterator[dict]:
    csv.field_size_limit((1 << 31) - 1)
    lines = io.TextIOWrapper(file, "utf-8", newline="")
    for number, row in enumerate(csv.DictReader(lines, delimiter=delimiter, strict=True), 1):
        if None in row:
            raise ValueError(f"record {number:,} has more fields than there are columns: look for a quote "
                             f"or {delimiter!r} that is not quoted, or for another separator")
        if None in row.values():
            raise ValueError(f"record {number:,} has fewer fields than there are columns: look for a line "
                             "end that is not quoted")
        yield row


def _read_parquet(file) -> Iterator[dict]:
    import pyarrow.parquet as pq  # not at the top: 30 MB

    for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
        yield from table_to_rows(batch)


def table_to_rows(table) -> Iterable[dict]:
    """The rows of a pyarrow table or batch. Columns without text have their type in the place of values."""
    columns = []
    for column in table.columns:
        value_type = getattr(column.type, "value_type", column.type)  # a dictionary's
        is_text = str(value_type).removeprefix("large_").startswith("string")
        columns.append(column.to_pylist() if is_text else [column.type] * len(column))
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def read_text(file, divide: bool = False) -> Iterator[dict]:
    """The documents of a text file, {"text": None} for one that is not UTF-8. divide: it is the only file."""
    file, beginning, size = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="\n"), [], 0
    lines = iter(partial(file.readline, PIECE), "")
    long_file = LONGEST if divide else LONG_FILE
    for line in lines:
        beginning.append(line)
        size += _count_bytes(line)
        if size > long_file:
            break
    part = size // DOCUMENTS
    if size > long_file:
        yield from _cut(itertools.chain(beginning, lines), CUT_AFTER, LONGEST - 4)
    elif divide:
        long_line = max(LONG_LINE, 2 * part)
        pieces = (WORD.findall(line) if _count_bytes(line) > long_line else [line] for line in beginning)
        yield from _cut(itertools.chain.from_iterable(pieces), part, part)
    else:
        yield _make_document(beginning)


def _cut(pieces: Iterable[str], cut_after: int, longest: int) -> Iterator[dict]:
    """Documents that end at the first blank line after `cut_after` bytes, or after `longest` bytes."""
    document, size = [], 0
    for piece in pieces:
        document.append(piece)
        size += _count_bytes(piece)
        if size >= cut_after and not piece.strip() or size > longest:
            yield _make_document(document)
            document, size = [], 0
    if document:
        yield _make_document(document)


def _count_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def _make_document(pieces: list[str]) -> dict:
    """{"text": None} if bytes are not UTF-8: surrogateescape has decoded them to lone surrogates."""
    text = "".join(pieces)
    return {"text": None if any("\udc80" <= character <= "\udcff" for character in {*text}) else text}


READERS = {**dict.fromkeys(JSON_LINES, read_json), ".parquet": _read_parquet,
           ".csv": partial(_read_csv, delimiter=","), ".tsv": partial(_read_csv, delimiter="\t")}
