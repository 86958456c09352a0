"""Files, local or anywhere fsspec reaches, as documents. What an ending means is the same alone, in a folder
and in a glob:

    .jsonl .ndjson .jsonlines     one row per line
    .json                         the same, or one array of objects (which is held in memory whole)
    .csv .tsv                     one row per record; the first record names the columns
    .parquet                      one row per row
    .txt, and other endings that a name or glob selects ("src/**/*.py")      documents: see text.py

All may be compressed (.gz, .bz2, .xz, .zst). Text is UTF-8, or has a byte order mark of UTF-16 or UTF-32.
A line or record that cannot be read ends the reading, and is named. (The datasets library, which reads
other sources here, turns text that looks like a date or a number into one, takes "NA" for no text, and does
not tell the line.)
"""

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

import fsspec
from fsspec.compression import compr
from fsspec.utils import infer_compression

from data.documents.names import JSON_LINES, bare, digest, split_files, states, suffix
from data.documents.text import text_rows
from utils.io.retry import diagnose
from utils.io.secrets import without_secrets
from utils.io.urls import explained

# The first bytes of compressed files, and of text in other encodings.
PACKED = {b"\x1f\x8b\x08": "gzip", b"BZh91AY": "bz2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
ENCODINGS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
             codecs.BOM_UTF16_BE: "utf-16"}  # 32 first: its mark begins as that of 16
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
    return digest(file_states, divide), [partial(_file_rows, unit, divide) for unit in units]


def _file_rows(urls: list[str], divide: bool) -> Iterator[dict]:
    for url in urls:
        ending = suffix(url)
        if ending in JSON_LINES:
            reader = json_rows
        elif ending in (".csv", ".tsv"):
            reader = partial(_csv_rows, delimiter="\t" if ending == ".tsv" else ",")
        else:
            reader = _parquet_rows if ending == ".parquet" else partial(text_rows, divide=divide)
        with explained(f"dataset_name {without_secrets(url)}", "read", (PermissionError, IsADirectoryError)):
            opened = fsspec.open(url, "rb")
        with opened as file:
            try:
                for row in reader(_unpacked(url, file)):
                    yield row if row.get("text") is not None else row | {"file": without_secrets(url)}
            except Exception as error:  # the readers' libraries raise many kinds
                if isinstance(error, UnicodeDecodeError) and ending not in (*JSON_LINES, ".csv", ".tsv"):
                    yield {"text": None, "file": without_secrets(url)}
                    continue
                known = getattr(error, "errno", None) or isinstance(error, MemoryError)
                if known or diagnose(error).transient:
                    raise  # it could not be reached, which says nothing of its content
                raise ValueError(f"{without_secrets(url)} cannot be read ({_cause(error)}); repair it or "
                                 "take it out") from error


def _cause(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8; convert it, as by `iconv -f latin1 -t utf-8`"
    return str(error)


def _unpacked(url: str, file) -> io.BufferedIOBase:
    """The file as UTF-8 without a mark, decompressed if its name or else its first bytes say so."""
    file = io.BufferedReader(file)
    by_content = (kind for first, kind in PACKED.items() if file.peek(8).startswith(first))
    kind = infer_compression(bare(url)) or next(by_content, None)
    if kind == "zip":
        raise ValueError("a .zip; unpack it")
    if kind == "zstd":  # fsspec's reader may stop after the first frame, and accepts a truncated file
        import pyarrow as pa  # not at the top: 30 MB

        file = pa.input_stream(file, compression="zstd")
    elif kind:
        file = compr[kind](file, mode="rb")
    if suffix(url) == ".parquet":
        return file
    file = io.BufferedReader(file)
    start = file.peek(4)
    for mark, encoding in ENCODINGS.items():
        if start.startswith(mark):
            return io.BufferedReader(_Recoded(file, encoding))
    if start.startswith(codecs.BOM_UTF8):
        file.read(3)
    return file


class _Recoded(io.RawIOBase):
    """A file in another encoding as UTF-8."""

    def __init__(self, file, encoding: str):
        self.file, self.decoder, self.rest = file, codecs.getincrementaldecoder(encoding)(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data = b" "
        while not self.rest and data:
            data = self.file.read(1 << 16)
            self.rest = self.decoder.decode(data, final=not data).encode("utf-8", "surrogatepass")
        part, self.rest = self.rest[: len(buffer)], self.rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


# ---- Readers of one file: binary file -> rows


def json_rows(file) -> Iterator[dict]:
    if file.peek(4096).lstrip(b" \t\r\n").startswith(b"["):
        rows = json.load(file)
        bad = next((number for number, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
        if bad:
            raise ValueError(f"item {bad:,} of the array is no object")
        yield from rows
        return
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                row = _json_object(line.decode())
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number:,}: {_cause(error)}") from error
            yield row


def _json_object(line: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of thousands of digits
        row = json.loads(line, parse_int=float)
    if not isinstance(row, dict):
        raise ValueError("no object with columns, but a value alone")
    return row


def _csv_rows(file, delimiter: str) -> Iterator[dict]:
    csv.field_size_limit((1 << 31) - 1)
    lines = io.TextIOWrapper(file, "utf-8", newline="")
    for number, row in enumerate(csv.DictReader(lines, delimiter=delimiter, strict=True), 1):
        if None in row:
            raise ValueError(f"record {number:,} has more fields than there are columns: a quote or a comma "
                             "that is not quoted")
        yield row


def _parquet_rows(file) -> Iterator[dict]:
    import pyarrow.parquet as pq  # not at the top: 30 MB

    for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
        yield from table_rows(batch)


def table_rows(table) -> Iterable[dict]:
    """The rows of a pyarrow table or batch. Text that is not UTF-8 is None; a value of a column that is not
    text is the column's type."""
    columns = []
    for column in table.columns:
        kind = getattr(column.type, "value_type", column.type)  # of a dictionary
        if not str(kind).removeprefix("large_").startswith("string"):
            columns.append([column.type] * len(column))
            continue
        try:
            columns.append(column.to_pylist())
        except UnicodeDecodeError:  # one bad value fails the whole column: read it value by value
            columns.append([attempt(value.as_py) for value in column])
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def attempt(function: Callable, *args):
    """function(*args), or None where that cannot be decoded."""
    with suppress(ValueError):
        return function(*args)
