"""Token files of other projects, trained on as they are: nothing is tokenized again, no pickle is opened.

    *.bin       nanoGPT: uint16 ids and nothing else; of others: name?dtype=uint32. llm.c, modded-nanogpt:
                256 int32 (magic, version, number of tokens), then ids. Little-endian, on a disk of this
                machine
    *.tfrecord  of transformers' Keras TPU example: Examples with int64 lists input_ids and attention_mask

The ids of all .bin files follow each other, and are cut into rows. Records are rows already, special tokens
inside; as their numbers differ in length they are copied once to an array in the cache. Either is read from
end to end once, for damage and the largest id, as long as size and time of the files stay the same. """

import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import xxhash
from tqdm import tqdm

from data.cache import build_once
from data.encode import id_count
from data.rows import PackedRows
from data.sources import files

SUFFIXES = (".bin", ".tfrecord")
DTYPES = {"uint16": "<u2", "uint32": "<u4", "int64": "<i8"}
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, type of an id
AT_ONCE = 1 << 24  # ids
VARINT = rb"[\x80-\xff]*[\x00-\x7f]"  # 7 bits of a number in each byte, the lowest first


def is_foreign(name: str) -> bool:
    """Whether it names such files: one, or a folder or glob that holds some and no text."""
    name = _bare(name)
    if os.path.splitext(name)[1] in SUFFIXES:
        return True
    if files.suffix(name) in files.SUFFIXES or not files.is_files(name):
        return False
    found = {files.suffix(path) for path in files.list_files(name)[1]}
    return not found.isdisjoint(SUFFIXES) and found.isdisjoint(files.SUFFIXES)


def _bare(name: str) -> str:
    return re.sub(r"\?dtype=\w+$", "", name)


class ForeignRows:
    """The files of a data set, opened: {split: account}. ValueError: a line for each that is not whole."""

    def __init__(self, name: str, cache_dir: str):
        self.name, given = name, re.search(r"\?dtype=(\w+)$", name)
        if given and given[1] not in DTYPES:
            raise ValueError(f"dataset_name {name}: dtype is one of {', '.join(DTYPES)}")
        self.dtype = given and DTYPES[given[1]]
        splits = {split: urls for split, urls in files.split_files(_bare(name), SUFFIXES).items() if urls}
        urls = sum(splits.values(), [])
        if len({files.suffix(url) for url in urls}) > 1:
            raise ValueError(f"dataset_name {name!r}: .bin and .tfrecord files; name one kind by a glob")
        self.records = files.suffix(urls[0]) == ".tfrecord"

        def build(folder: Path) -> None:
            accounts, problems = {}, []
            for split, urls in splits.items():
                shown = tqdm(urls, desc=f"reading {name}, {split}", disable=None)
                into = folder / f"{split}.npy"
                accounts[split] = (_read_records(shown, into, problems) if self.records
                                   else _read_flat(shown, self.dtype, problems))
            if problems:
                raise ValueError("\n".join(problems))
            (folder / "accounts.json").write_text(json.dumps(accounts, indent=1))

        self.folder = build_once(cache_dir, "foreign", [files.states(urls), self.dtype], build)
        self.accounts = json.loads((self.folder / "accounts.json").read_text())

    @property
    def block_size(self) -> int | None:
        """Tokens of a record, special ones inside; None of .bin files, which can be cut anywhere."""
        return self.accounts["train"].get("block_size")

    def problems(self, block_size: int, special: int, tokenizer) -> list[str]:
        """What does not fit, a line each. special: how many tokens are added to a row that is not a
        record."""
        lines, size = [], self.block_size or block_size - special
        if self.block_size and block_size != self.block_size:
            lines.append(f"block_size: {block_size}, but records of {self.name} have {self.block_size} "
                         f"tokens: set --block_size {self.block_size}.")
        for split, account in self.accounts.items():
            if account["tokens"] < size:
                lines.append(f"block_size: {self.name}, {split}, has not the {size} tokens of a row.")
            if tokenizer is not None and account["largest"] >= (known := id_count(tokenizer)):
                lines.append(f"tokenizer_name: ids of {self.name}, {split}, go up to {account['largest']}, "
                             f"the tokenizer knows {known}: name the one that made them.")
            wide = tokenizer is not None and id_count(tokenizer) > 1 << 16
            if wide and not self.dtype and account.get("headerless"):
                lines.append(f"dataset_name: {self.name} does not tell whether ids have 2 bytes or 4, and "
                             "the tokenizer has more than 65,536: add ?dtype=uint16 or ?dtype=uint32 to it.")
        return lines

    def rows(self, split: str, block_size: int, max_rows: int = 0) -> PackedRows:
        """Map-style rows of a split, or the first max_rows."""
        account = self.accounts[split]
        if self.block_size:
            arrays, block_size = [np.load(self.folder / f"{split}.npy", mmap_mode="r")], self.block_size
        else:
            arrays = [np.memmap(path, dtype, "r", offset, (tokens,))
                      for path, offset, dtype, tokens in account["files"]]
        return PackedRows(arrays, block_size, max_rows, account["xxh3"])


def _read_flat(urls, dtype: str | None, problems: list[str]) -> dict[str, Any]:
    largest, found, digest, headerless = 0, [], xxhash.xxh3_128(), False
    for path in (url.removeprefix("file://") for url in urls):
        try:
            offset, kind, tokens = _flat_header(path, dtype)
            found.append((path, offset, kind, tokens))
            headerless |= not offset
            digest.update(f"{kind} {tokens}".encode())
            ids = np.memmap(path, kind, "r", offset)
            for start in range(0, tokens, AT_ONCE):
                digest.update(some := np.ascontiguousarray(ids[start : start + AT_ONCE]))
                largest = max(largest, int(some.max()))
        except ValueError as error:
            problems.append(f"{path}: {error}.")
    return {"tokens": sum(tokens for *_, tokens in found), "files": found, "largest": largest,
            "headerless": headerless, "xxh3": digest.hexdigest()}  # fmt: skip


def _flat_header(path: str, given: str | None) -> tuple[int, str, int]:
    """Bytes before the ids of a .bin, their type and their number."""
    if "://" in path:
        raise ValueError("cannot be mapped from there, copy it to a disk of this machine")
    size, head = os.path.getsize(path), np.fromfile(path, "<i4", 256)
    version, dtype = HEADERS.get(int(head[0]) if len(head) else 0, (None, given or "<u2"))
    if version is None:
        _check_headerless(head, given)
    offset = 1024 if version else 0
    tokens, rest = divmod(size - offset, np.dtype(dtype).itemsize)
    if rest or tokens <= 0 or version and tokens != head[2]:
        told = f", the header tells of {head[2]:,} tokens" if version and len(head) > 2 else ""
        raise ValueError(f"truncated: {size:,} bytes{told}")
    if version and head[1] != version:
        raise ValueError(f"version {head[1]} of magic {head[0]}, known is {version}")
    return offset, dtype, tokens


def _check_headerless(head: np.ndarray, given: str | None) -> None:
    """ValueError where the first bytes, int32 [256 at most], are not those of ids and nothing else."""
    start = head.tobytes()
    if start.startswith((b"\x93NUMPY", b"PK\x03\x04", *files.PACKED)):
        raise ValueError("an array, an archive or a compressed file under this name, not token ids")
    if len(start) > 64 and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start):
        raise ValueError("text under this name, not token ids")
    if len(head) == 256 and not head[4:].any():  # no tokens begin with so many zeros
        raise ValueError(f"a header with magic {head[0]}, known are {', '.join(map(str, HEADERS))}")
    seems = ""
    if len(head) > 32 and given != "<i8" and not head[1::2].any():
        seems = "int64"
    elif len(head) > 32 and given is None and (head >= 0).all() and (head < 1 << 20).all():  # uint16: hardly
        seems = "uint32"
    if seems and given != "<u2":
        raise ValueError(f"ids of {seems}, it seems: add ?dtype={seems} to the name, or ?dtype=uint16")


def _read_records(urls, into: Path, problems: list[str]) -> dict[str, Any]:
    largest, rows, size, digest = 0, [], 0, xxhash.xxh3_128()
    for url in urls:
        number = 0
        try:
            with fsspec.open(url, "rb") as file:
                for record in _records(file):
                    number += 1
                    ids = _full_row(record)
                    size = size or len(ids)
                    if len(ids) != size:
                        raise ValueError(f"{len(ids)} tokens, those before it {size}")
                    rows.append(ids.astype(np.uint32))
                    digest.update(rows[-1])
                    largest = max(largest, int(ids.max()))
            told = re.search(r"dataset-\d+-(\d+)\.tfrecord$", url)
            if not number or told and int(told[1]) != number:
                raise ValueError("truncated: the last one, while its name tells of more")
        except ValueError as error:
            problems.append(f"{url.removeprefix('file://')}, record {number:,}: {error}.")
    if problems:
        return {}
    np.save(into, np.concatenate(rows))
    return {"block_size": size, "tokens": size * len(rows), "largest": largest, "xxh3": digest.hexdigest()}


def _records(file) -> Iterator[bytes]:
    """The records of a TFRecord file: length, its checksum, data, its checksum."""
    from crc32c import crc32c  # no other format needs it

    def checked(data: bytes) -> bytes:
        crc = crc32c(data[:-4])
        if struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32) != data[-4:]:
            raise ValueError("the next one's checksum is wrong: damaged, compressed or no TFRecord")
        return data[:-4]

    while head := file.read(12):
        size = int.from_bytes(checked(head), "little") + 4 if len(head) == 12 else 0
        data = file.read(size)
        if len(data) < max(size, 4):
            raise ValueError("truncated behind it")
        yield checked(data)


def _full_row(record: bytes) -> np.ndarray:
    """input_ids, int64 [T], of a serialized tf.train.Example whose attention_mask, if any, is all ones."""
    ids, mask = (_int64_list(record, name) for name in (b"input_ids", b"attention_mask"))
    if not len(ids) or not 0 <= ids.min() <= ids.max() < 2**32:
        raise ValueError("no Example with an int64 list input_ids of 0 to 2**32 - 1")
    if not mask.all():
        raise ValueError("padding: attention_mask has zeros, rows must be full")
    return ids


def _int64_list(example: bytes, name: bytes) -> np.ndarray:
    """A feature of an Example, int64 [n], n = 0 without it: protobuf's {1: name, 2: {3: {1: numbers}}}, where
    each of the four has its number times 8 plus 2 before it, and its length. The numbers are packed, or each
    has an 8 before it."""
    feature = b"\n%c%s\x12" % (len(name), name) + VARINT + b"\x1a(" + VARINT + b")"
    if (found := re.search(feature, example, re.DOTALL)) is None:
        return np.empty(0, np.int64)
    numbers = example[found.end() : found.end() + int(_varints(found[1])[0])]
    if packed := re.match(b"\n" + VARINT, numbers, re.DOTALL):
        return _varints(numbers[packed.end() :])
    return _varints(numbers)[1::2]


def _varints(data: bytes) -> np.ndarray:
    parts = np.frombuffer(data, np.uint8)
    if not len(parts):
        return np.empty(0, np.int64)
    last = parts < 128
    first = np.flatnonzero(np.r_[True, last[:-1]])
    shift = 7 * (np.arange(len(parts)) - first[np.cumsum(last) - last])
    return np.add.reduceat((parts & 127).astype(np.uint64) << shift.astype(np.uint64), first).view(np.int64)
