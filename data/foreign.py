"""Token files of other projects, trained on as they are: nothing is tokenized again, no pickle is opened.

    *.bin       nanoGPT: uint16 ids and nothing else. llm.c, modded-nanogpt: 256 int32 (magic, version, number
                of tokens), then ids, uint16, for Llama 3 uint32. Little-endian, on a disk of this machine
    *.tfrecord  of transformers' Keras TPU example: Examples with int64 lists input_ids and attention_mask

A .bin is memory-mapped and cut into rows of T tokens, each file by itself. Records are rows already, special
tokens inside; as their numbers differ in length they are copied once to an array in the cache. Either is read
from end to end once, for damage and the largest id, as long as size and time of the files stay the same.
"""

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

from data.cache import RowFile, build_once
from data.packing import PackedRows
from data.sources import files
from data.sources.storage import printable
from data.tokenizer import id_count

SUFFIXES = (".bin", ".tfrecord")
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, type of an id
AT_ONCE = 1 << 24  # ids
VARINT = rb"[\x80-\xff]*[\x00-\x7f]"  # 7 bits of a number in each byte, the lowest first


def is_foreign(name: str) -> bool:
    """Whether it names such files: one, or a folder or glob that holds some and no text."""
    if os.path.splitext(name)[1] in SUFFIXES:
        return True
    if files.suffix(name) in files.SUFFIXES or not files.is_files(name):
        return False
    found = {files.suffix(path) for path in files.list_files(name)[1]}
    return not found.isdisjoint(SUFFIXES) and found.isdisjoint(files.SUFFIXES)


def check_foreign(name: str, row_size: int | None, tokenizer, special: int, cache_dir: str) -> dict[str, Any]:
    """What `data.shards.check_shards` returns and raises, of such files; block_size is None of .bin files."""
    _, accounts = _read_once(name, cache_dir)
    block_size, problems = accounts["train"]["block_size"], []
    if row_size and tokenizer is None:
        problems.append(f"tokenizer_name: {name} brings none, name the one that made it (often gpt2).")
    if row_size and block_size not in (None, row_size + special):
        problems.append(f"block_size: {row_size + special}, but records of {name} have {block_size} tokens: "
                        f"set --block_size {block_size}.")
    splits, size = {}, block_size or row_size or 1
    for split, account in accounts.items():
        splits[split] = {"rows": sum(tokens // size for *_, tokens in account["files"])}
        if not splits[split]["rows"]:
            problems.append(f"block_size: no file of {name}, {split}, has the {size} tokens of a row.")
        if tokenizer is not None and account["largest"] >= (known := id_count(tokenizer)):
            problems.append(f"tokenizer_name: ids of {name}, {split}, go up to {account['largest']}, the "
                            f"tokenizer knows {known}: name the one that made them.")
    if problems:
        raise ValueError("\n".join(problems))
    return {"block_size": block_size, "whole": block_size is not None, "splits": splits}


def open_foreign(name: str, split: str, block_size: int, cache_dir: str, max_rows: int = 0) -> PackedRows:
    """Map-style rows of a split that has some, or the first max_rows."""
    folder, accounts = _read_once(name, cache_dir)
    if accounts[split]["block_size"]:
        return PackedRows(folder / f"{split}.npy", max_rows)
    rows = FlatRows(accounts[split]["files"], block_size, accounts[split]["xxh3"], max_rows)
    if os.environ.get("RANK", "0") == "0":
        rest = sum(tokens % block_size for *_, tokens in accounts[split]["files"])
        print(f"{name}, {split}: {len(rows):,} rows, {rest:,} tokens at ends of files left out", flush=True)
    return rows


def open_splits(name: str, block_size: int, tokenizer, cache_dir="cache") -> tuple[dict, dict]:
    """{split: rows}, and the settings that shape them, for shards that are to be made of them."""
    manifest = check_foreign(name, block_size, tokenizer, 0, cache_dir)
    splits = {split: open_foreign(name, split, block_size, cache_dir) for split in manifest["splits"]}
    content = {split: rows.fingerprint for split, rows in splits.items()}
    return splits, {"dataset_name": printable(name), "content": content, "whole": manifest["whole"]}


class FlatRows(PackedRows):
    """Rows of files of ids, each cut by itself.

    files: (path, bytes before the ids, their type, their number) of each; content: their checksum; max_rows:
    the first so many, 0 for all."""

    def __init__(self, files: list[tuple[str, int, str, int]], block_size: int, content: str,
                 max_rows: int = 0):
        self.content = content
        shapes = [(*where, (tokens // block_size, block_size)) for *where, tokens in files]
        self.parts = [np.asarray(np.memmap(path, dtype, "r", offset, shape))  # or taking a row costs more
                      for path, offset, dtype, shape in shapes if shape[0]]
        self.first = np.cumsum([0, *map(len, self.parts)])  # rows before each part
        self.shape = min(int(self.first[-1]), max_rows or int(self.first[-1])), block_size
        self.rows = self.parts[0][: max_rows or None] if len(self.parts) == 1 else self

    @property
    def fingerprint(self) -> str:
        return f"{self.content}-{self.block_size}"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:  # int64 [B] -> [B, T]; of -1 some row
        rows = np.maximum(rows, 0)
        parts = np.searchsorted(self.first, rows, "right") - 1
        within = zip(parts.tolist(), (rows - self.first[parts]).tolist(), strict=True)
        return np.stack([self.parts[part][row] for part, row in within])


def _read_once(name: str, cache_dir: str) -> tuple[Path, dict[str, dict]]:
    """A folder of the cache, with {split}.npy of records, and {split: account}. ValueError: a line for each
    file that is not whole."""
    splits = {split: urls for split, urls in files.split_files(name, SUFFIXES).items() if urls}
    urls = sum(splits.values(), [])
    if len({files.suffix(url) for url in urls}) > 1:
        raise ValueError(f"dataset_name {name!r}: .bin and .tfrecord files; name those of one kind by a glob")
    kind, read = ("flat", _read_flat) if files.suffix(urls[0]) == ".bin" else ("shards", _read_records)

    def build(folder: Path) -> None:
        accounts, problems = {}, []
        for split, urls in splits.items():
            shown = tqdm(urls, desc=f"reading {name}, {split}", disable=None)
            accounts[split] = {"bytes": 0, **read(shown, folder / f"{split}.npy", problems)}
        if problems:
            raise ValueError("\n".join(problems))
        (folder / "preparation.json").write_text(json.dumps({"accounting": accounts}, indent=1))

    folder = build_once(cache_dir, kind, files.states(urls), build)
    return folder, json.loads((folder / "preparation.json").read_text())["accounting"]


def _read_flat(urls, _, problems: list[str]) -> dict[str, Any]:
    largest, found, digest = 0, [], xxhash.xxh3_128()
    for path in (url.removeprefix("file://") for url in urls):
        try:
            offset, dtype, tokens = _flat_header(path)
            found.append((path, offset, dtype, tokens))
            digest.update(f"{dtype} {tokens}".encode())
            ids = np.memmap(path, dtype, "r", offset)
            for start in range(0, tokens, AT_ONCE):
                digest.update(some := np.ascontiguousarray(ids[start : start + AT_ONCE]))
                largest = max(largest, int(some.max()))
        except ValueError as error:
            problems.append(f"{path}: {error}.")
    return {"block_size": None, "tokens": sum(tokens for *_, tokens in found), "files": found,
            "largest": largest, "xxh3": digest.hexdigest()}


def _flat_header(path: str) -> tuple[int, str, int]:
    """Bytes before the ids of a .bin, their type and their number."""
    if "://" in path:
        raise ValueError("cannot be mapped from there, copy it to a disk of this machine")
    size, head = os.path.getsize(path), np.fromfile(path, "<i4", 256)
    version, dtype = HEADERS.get(int(head[0]) if len(head) else 0, (None, "<u2"))
    if version is None and len(head) == 256 and not head[4:].any():  # no tokens begin with so many zeros
        raise ValueError(f"a header with magic {head[0]}, known are {', '.join(map(str, HEADERS))}")
    if version is None and len(head) > 32 and not (head >> 16).any():
        raise ValueError("every second id is 0: they seem to have 4 bytes, which only a header can tell of")
    offset = 1024 if version else 0
    tokens, rest = divmod(size - offset, np.dtype(dtype).itemsize)
    if rest or tokens <= 0 or version and tokens != head[2]:
        told = f", the header tells of {head[2]:,} tokens" if version and len(head) > 2 else ""
        raise ValueError(f"truncated: {size:,} bytes{told}")
    if version and head[1] != version:
        raise ValueError(f"version {head[1]} of magic {head[0]}, known is {version}")
    return offset, dtype, tokens


def _read_records(urls, into: Path, problems: list[str]) -> dict[str, Any]:
    largest, rows = 0, None
    for url in urls:
        number = 0
        try:
            with fsspec.open(url, "rb") as file:
                for record in _records(file):
                    number += 1
                    ids = _full_row(record)
                    rows = rows or RowFile(into, len(ids), np.uint32)
                    if len(ids) != rows.block_size:
                        raise ValueError(f"{len(ids)} tokens, those before it {rows.block_size}")
                    rows.write(ids[None].astype(np.uint32))
                    largest = max(largest, int(ids.max()))
            told = re.search(r"dataset-\d+-(\d+)\.tfrecord$", url)
            if not number or told and int(told[1]) != number:
                raise ValueError("truncated: the last one, while its name tells of more")
        except ValueError as error:
            problems.append(f"{url.removeprefix('file://')}, record {number:,}: {error}.")
    if problems:
        return {}
    rows.close()
    tokens = rows.rows * rows.block_size
    return {"block_size": rows.block_size, "tokens": tokens, "files": [("", tokens)], "largest": largest}


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
    each of the four has its number times 8 plus 2 before it, and its length."""
    feature = b"\n%c%s\x12" % (len(name), name) + VARINT + b"\x1a" + VARINT + b"\n(" + VARINT + b")"
    if (found := re.search(feature, example, re.DOTALL)) is None:
        return np.empty(0, np.int64)
    end = found.end() + int(_varints(found[1])[0])
    return _varints(example[found.end() : end])


def _varints(data: bytes) -> np.ndarray:
    parts = np.frombuffer(data, np.uint8)
    last = parts < 128
    first = np.flatnonzero(np.r_[True, last[:-1]])
    shift = 7 * (np.arange(len(parts)) - first[np.cumsum(last) - last])
    return np.add.reduceat((parts & 127).astype(np.uint64) << shift.astype(np.uint64), first).view(np.int64)
