"""Files, local or anywhere fsspec reaches, as documents. What an ending means is the same alone, in a folder
and in a glob:

    .jsonl .ndjson .jsonlines     one row per line
    .json                         the same, or one array of objects (which is held in memory whole)
    .csv .tsv                     one row per record; the first record names the columns
    .parquet                      one row per row
    .txt, and other endings that a name or glob selects ("src/**/*.py")      a document

A text above LONG_FILE is cut into documents of about CUT_AFTER, at blank lines, or after LONGEST where there
are none. One below LONGEST that is all there is becomes about DOCUMENTS, so that some can be held out.

All may be compressed, as the ending says: .gz, .bz2, .xz, .zst. Text is UTF-8, with or without a byte order
mark. A line or record that cannot be read ends the reading, and is named. (The datasets library, which reads
other sources here, turns text that looks like a date or a number into one, takes "NA" for no text, and does
not tell the line.)
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

from data.documents.names import JSON_LINES, digest, split_files, states, suffix
from utils.io.mistakes import of_network
from utils.io.text import without_secrets
from utils.io.urls import explained

LFS = b"version https://git-lfs.github.com/spec/"  # the beginning of what a clone has without Git LFS
LONG_FILE, CUT_AFTER, LONGEST = 1 << 18, 1 << 16, 1 << 20  # bytes
PIECE = 1 << 17  # characters of a line that are read at a time
DOCUMENTS, LONG_LINE = 30, 1000  # of a text that is alone; bytes: longer lines are cut between words
WORD = re.compile(r"\s*\S+|\s+")
UNIT_BYTES = 1 << 26  # small files are read together up to this size


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
    # "words": how a text is divided; another text here, where that changes.
    return digest(file_states, divide and "words"), [partial(_file_rows, unit, divide) for unit in units]


def _file_rows(urls: list[str], divide: bool) -> Iterator[dict]:
    for url in urls:
        reader = READERS.get(suffix(url), partial(text_rows, divide=divide))
        with explained(f"dataset_name {without_secrets(url)}", "read", (PermissionError, IsADirectoryError)):
            opened = fsspec.open(url, "rb").open()
        with opened as file:
            try:
                for row in reader(_unpacked(url, file)):
                    yield row if row.get("text") is not None else {"file": without_secrets(url)} | row
            except Exception as error:  # the readers' libraries raise many kinds
                known = getattr(error, "errno", None) or isinstance(error, MemoryError)
                if known or of_network(error):
                    raise  # it could not be reached, which says nothing of its content
                raise ValueError(f"{without_secrets(url)} cannot be read ({_cause(error)}); repair it or "
                                 "take it out") from error


def _cause(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8; convert it, as by `iconv -f utf-16 -t utf-8` or `iconv -f latin1 -t utf-8`"
    return str(error)


def _unpacked(url: str, file) -> io.BufferedIOBase:
    """The file decompressed, as its ending says, and without a byte order mark of UTF-8."""
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


def json_rows(file) -> Iterator[dict]:
    array = file.peek(4096).lstrip(b" \t\r\n").startswith(b"[")
    what = "item" if array else "line"
    for number, item in enumerate(json.load(file) if array else file, 1):
        if array or item.strip():
            try:
                row = item if array else json.loads(item.decode())
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number:,}: {_cause(error)}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{what} {number:,}: no object with columns, but a value alone")
            yield row


def _csv_rows(file, delimiter: str) -> Iterator[dict]:
    csv.field_size_limit((1 << 31) - 1)
    lines = io.TextIOWrapper(file, "utf-8", newline="")
    for number, row in enumerate(csv.DictReader(lines, delimiter=delimiter, strict=True), 1):
        if None in row:
            raise ValueError(f"record {number:,} has more fields than there are columns: a quote or a "
                             f"{delimiter!r} that is not quoted, or other separators")
        if None in row.values():
            raise ValueError(f"record {number:,} has fewer fields than there are columns: a line end that is "
                             "not quoted")
        yield row


def _parquet_rows(file) -> Iterator[dict]:
    import pyarrow.parquet as pq  # not at the top: 30 MB

    for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
        yield from table_rows(batch)


def table_rows(table) -> Iterable[dict]:
    """The rows of a pyarrow table or batch. A value of a column that is not text is the column's type."""
    columns = []
    for column in table.columns:
        kind = getattr(column.type, "value_type", column.type)  # of a dictionary
        text = str(kind).removeprefix("large_").startswith("string")
        columns.append(column.to_pylist() if text else [column.type] * len(column))
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def text_rows(file, divide: bool = False) -> Iterator[dict]:
    """The documents of a UTF-8 file, {"text": None} where one is not. divide: it is alone."""
    file, start, size = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="\n"), [], 0
    lines = iter(partial(file.readline, PIECE), "")
    long_file = LONGEST if divide else LONG_FILE
    for line in lines:
        start.append(line)
        size += _bytes(line)
        if size > long_file:
            break
    part = size // DOCUMENTS
    if size > long_file:
        yield from _cut(itertools.chain(start, lines), CUT_AFTER, LONGEST - 4)
    elif divide:
        words = (WORD.findall(line) if _bytes(line) > max(LONG_LINE, 2 * part) else [line] for line in start)
        yield from _cut(itertools.chain.from_iterable(words), part, part)
    else:
        yield _row(start)


def _cut(lines: Iterable[str], cut_after: int, longest: int) -> Iterator[dict]:
    document, size = [], 0
    for line in lines:
        document.append(line)
        size += _bytes(line)
        if size >= cut_after and not line.strip() or size > longest:
            yield _row(document)
            document, size = [], 0
    if document:
        yield _row(document)


def _bytes(line: str) -> int:
    return len(line.encode("utf-8", "surrogateescape"))


def _row(lines: list[str]) -> dict:
    """Bytes that were not UTF-8 are lone surrogates."""
    text = "".join(lines)
    return {"text": None if any("\udc80" <= character <= "\udcff" for character in {*text}) else text}


READERS = {**dict.fromkeys(JSON_LINES, json_rows), ".parquet": _parquet_rows,
           ".csv": partial(_csv_rows, delimiter=","), ".tsv": partial(_csv_rows, delimiter="\t")}
