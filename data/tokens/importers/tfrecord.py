"""TFRecord files of transformers' Keras example for TPUs: Examples with a list input_ids, and attention_mask.

A record is a row already, with its special tokens. Rows must be full: padding would be trained on.
"""

import re
import struct
from collections.abc import Iterator

import fsspec
import numpy as np

from data.tokens.importers import Imported, split_urls

AT_ONCE = 1 << 14  # rows


def read(name: str, dtype: str | None, tokenizer) -> Imported:
    splits = split_urls(name, (".tfrecord", ".tfrecords"))
    first = next(iter(splits.values()))[0]
    for rows in _rows([first], None):
        width = rows.shape[1]
        return Imported({split: _rows(urls, width) for split, urls in splits.items()}, width)


def _rows(urls: list[str], width: int | None) -> Iterator[np.ndarray]:
    """Arrays uint32 [n, T]. width: T, None: that of the first row."""
    for url in urls:
        rows, number = [], 0
        try:
            with fsspec.open(url, "rb") as file:
                for record in _records(file):
                    number += 1
                    rows.append(_row(record))
                    width = width or len(rows[0])
                    if len(rows[-1]) != width:
                        raise ValueError(f"{len(rows[-1])} tokens, but the first one has {width}")
                    if len(rows) == AT_ONCE:
                        yield np.stack(rows)
                        rows = []
            expected = re.search(r"dataset-\d+-(\d+)\.tfrecord$", url)
            if not number or expected and int(expected[1]) != number:
                raise ValueError("truncated: the last record, but the file's name says there are more")
        except ValueError as error:
            raise ValueError(f"{url}: record {number:,}: {error}.") from error
        if rows:
            yield np.stack(rows)


def _records(file) -> Iterator[bytes]:
    """The records of a TFRecord file: length, its checksum, data, its checksum."""
    from crc32c import crc32c  # not at the top: no other format needs it

    def checked(data: bytes) -> bytes:
        crc = crc32c(data[:-4])
        if struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32) != data[-4:]:
            raise ValueError("the next record's checksum is wrong: damaged, compressed or no TFRecord")
        return data[:-4]

    while head := file.read(12):
        size = int.from_bytes(checked(head), "little") + 4 if len(head) == 12 else 0
        data = file.read(size)
        if len(data) < max(size, 4):
            raise ValueError("truncated after it")
        yield checked(data)


def _row(record: bytes) -> np.ndarray:
    """input_ids, uint32 [T], of a serialized tf.train.Example whose attention_mask, if any, is all ones."""
    features = example(record)
    ids, mask = features.get("input_ids"), features.get("attention_mask")
    if ids is None or not len(ids) or ids.dtype != np.int64 or not 0 <= ids.min() <= ids.max() < 2**32:
        found = ", ".join(features) or "nothing"
        raise ValueError(f"no int64 list input_ids of 0 to 2**32 - 1, but {found}")
    if mask is not None and (len(mask) != len(ids) or not (mask == 1).all()):
        raise ValueError("padding: attention_mask is not all ones, but rows must be full")
    return ids.astype(np.uint32)


def example(record: bytes) -> dict[str, np.ndarray]:
    """The features of a tf.train.Example: {name: int64, float32 or object (bytes) array}.

    In protobuf it is {1: {1: [{1: name, 2: {1, 2 or 3: {1: values}}}]}}; 1: bytes, 2: floats, 3: int64."""
    features = {}
    for entry in (entry for _, whole in fields(record) for _, entry in fields(whole)):
        parts = dict(fields(entry))
        for kind, values in fields(parts.get(2, b"")):
            found = [value for _, value in fields(values)]
            if kind == 1:
                array = np.array(found or [], object)
            elif kind == 2:
                array = np.frombuffer(b"".join(found), "<f4")
            else:  # packed in bytes, or one by one
                lists = [varints(n) if isinstance(n, bytes) else np.array([n], np.uint64) for n in found]
                array = np.concatenate([np.empty(0, np.uint64), *lists]).view(np.int64)
            features[parts[1].decode()] = array
    return features


def fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(number, value) of the fields of a protobuf message. ValueError: it is none."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
        else:
            size, at = _varint(data, at) if key & 7 == 2 else ({1: 8, 5: 4}.get(key & 7, len(data)), at)
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError("a damaged Example")
        yield key >> 3, value


def varints(data: bytes) -> np.ndarray:
    """The numbers that these bytes encode, uint64 [n]."""
    parts = np.frombuffer(data, np.uint8)
    last = parts < 128
    if not len(parts) or not last[-1]:
        raise ValueError("a damaged Example")
    first = np.flatnonzero(np.r_[True, last[:-1]])
    shift = 7 * (np.arange(len(parts)) - first[np.cumsum(last) - last])
    return np.add.reduceat((parts & 127).astype(np.uint64) << shift.astype(np.uint64), first)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at this place, 7 bits in each byte, the lowest first; and where the next one is."""
    value = shift = 0
    while at < len(data):
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a damaged Example")
