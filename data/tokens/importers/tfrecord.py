"""TFRecord files of transformers' Keras example for TPUs: Examples with a list input_ids, and attention_mask.

Each record is a row with its special tokens. Rows must be full, as padding would be trained on.
"""

import struct
from collections.abc import Iterator

import fsspec
import numpy as np

from data.documents.names import split_files
from data.tokens.importers import Imported

AT_ONCE = 1 << 14  # rows per array


def open_tfrecords(name: str) -> Imported:
    """All rows must have the length T of the first row."""
    try:
        import crc32c  # noqa: F401  # not at the top: no other format needs it
    except ImportError:
        raise ValueError(f"{name}: TFRecord files need the package crc32c: pip install crc32c") from None
    splits = split_files(name, (".tfrecord", ".tfrecords"))
    first = next(iter(splits.values()))[0]
    width = next(read_rows([first], None)).shape[1]
    return Imported({split: read_rows(urls, width) for split, urls in splits.items()}, width)


def read_rows(urls: list[str], width: int | None) -> Iterator[np.ndarray]:
    """Arrays uint32 [n, T]. width: T, or None to take that of the first row."""
    for url in urls:
        rows, number = [], 0
        try:
            with fsspec.open(url, "rb") as file:
                for record in _read_records(file):
                    number += 1
                    rows.append(_parse_row(record))
                    width = width or len(rows[0])
                    if len(rows[-1]) != width:
                        raise ValueError(f"{len(rows[-1])} tokens, but the first one has {width}")
                    if len(rows) == AT_ONCE:
                        yield np.stack(rows)
                        rows = []
            if not number:
                raise ValueError("the file is empty")
        except ValueError as error:
            raise ValueError(f"{url}: record {number:,}: {error}.") from error
        if rows:
            yield np.stack(rows)


def _read_records(file) -> Iterator[bytes]:
    """The records of a TFRecord file, each stored as length, checksum of it, data, checksum of it."""
    from crc32c import crc32c

    def verify(data: bytes) -> bytes:
        crc = crc32c(data[:-4])
        if struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32) != data[-4:]:
            raise ValueError("the next record's checksum is wrong: damaged, compressed or no TFRecord")
        return data[:-4]

    while head := file.read(12):
        size = int.from_bytes(verify(head), "little") + 4 if len(head) == 12 else 0
        data = file.read(size)
        if len(data) < max(size, 4):
            raise ValueError("truncated after it")
        yield verify(data)


def _parse_row(record: bytes) -> np.ndarray:
    """input_ids, uint32 [T], of a serialized tf.train.Example. ValueError: it has none, or padding."""
    features = parse_example(record)
    ids, mask = features.get("input_ids"), features.get("attention_mask")
    if ids is None or not len(ids) or not 0 <= ids.min() <= ids.max() < 2**32:
        raise ValueError(f"no int64 list input_ids of 0 to 2**32 - 1, but {', '.join(features) or 'nothing'}")
    if "attention_mask" in features and not np.array_equal(mask, np.ones_like(ids)):
        raise ValueError("padding: attention_mask is not all ones, but rows must be full")
    return ids.astype(np.uint32)


def parse_example(record: bytes) -> dict[str, np.ndarray | None]:
    """The features of a tf.train.Example: {name: int64 array, None for lists of floats or bytes}.

    In protobuf it is {1: {1: [{1: name, 2: {3: {1: values}}}]}}, the values packed. 3 is an int64 list; 1 and
    2 would be lists of bytes and floats."""
    features = {}
    for entry in (entry for _, message in parse_fields(record) for _, entry in parse_fields(message)):
        parts = dict(parse_fields(entry))
        values = dict(parse_fields(parts.get(2, b""))).get(3)
        packed = [packed for _, packed in parse_fields(values)] if values is not None else []
        features[parts[1].decode()] = decode_varints(b"".join(packed)).view(np.int64) if packed else None
    return features


def parse_fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, content) of each field of a protobuf message. ValueError: a field is not length-delimited."""
    at = 0
    while at < len(data):
        key, start = data[at], at + 1
        while start < len(data) and data[start] > 127:  # the bytes of the length, but for the last
            start += 1
        size = int(decode_varints(data[at + 1 : start + 1])[0])
        at = start + 1 + size
        if key & 7 != 2 or at > len(data):
            raise ValueError("a damaged Example")
        yield key >> 3, data[start + 1 : at]


def decode_varints(data: bytes) -> np.ndarray:
    """uint64 [n] from protobuf varints: 7 bits in each byte, the lowest first; the last byte is below 128."""
    parts = np.frombuffer(data, np.uint8)
    last = parts < 128
    if not len(parts) or not last[-1]:
        raise ValueError("a damaged Example")
    first = np.flatnonzero(np.r_[True, last[:-1]])
    shift = 7 * (np.arange(len(parts)) - first[np.cumsum(last) - last])
    return np.add.reduceat((parts & 127).astype(np.uint64) << shift.astype(np.uint64), first)
