"""Token files of other projects, trained on as they are: nothing is tokenized again, no pickle is opened.

    *.bin       nanoGPT: uint16 ids and nothing else; other types are named, as in train.bin?dtype=uint32.
                llm.c, modded-nanogpt: 256 int32 (magic, version, number of tokens), then the ids.
                Little-endian, on a local disk.
    *.tfrecord  transformers' Keras TPU example: Examples with int64 lists input_ids and attention_mask.

The ids of all .bin files are joined and cut into rows. Records are rows already, with their special tokens;
they are copied to an array in the cache. Each file is read through once, for damage and its largest id, and
again only if its size or time changes.
"""

import json
import os
import re
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import xxhash
from tqdm import tqdm

from data.cache import build_once
from data.sources import files
from data.token_set import Split, TokenSet

SUFFIXES = (".bin", ".tfrecord")
DTYPES = {"uint16": "<u2", "uint32": "<u4", "int64": "<i8"}
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, type of an id
AT_ONCE = 1 << 24  # ids
VARINT = rb"[\x80-\xff]*[\x00-\x7f]"  # 7 bits of a number in each byte, the lowest first


def holds_token_files(name: str) -> bool:
    """Whether the name is such a file, or a folder or glob with some of them and no text."""
    name = name.partition("?dtype=")[0]
    if os.path.splitext(name)[1] in SUFFIXES:
        return True
    if files.suffix(name) in files.SUFFIXES or not files.is_files(name):
        return False
    suffixes = {files.suffix(path) for path in files.list_files(name)[1]}
    return not suffixes.isdisjoint(SUFFIXES) and suffixes.isdisjoint(files.SUFFIXES)


def open_token_files(name: str, cache_dir) -> TokenSet | None:
    """The token files of this name, None where there are none. ValueError: one line per bad file."""
    if not holds_token_files(name):
        return None
    path, _, named = name.partition("?dtype=")
    if named and named not in DTYPES:
        raise ValueError(f"dataset_name {name}: dtype is one of {', '.join(DTYPES)}")
    dtype, splits = DTYPES.get(named), files.split_files(path, SUFFIXES)
    urls = sum(splits.values(), [])
    if len({files.suffix(url) for url in urls}) > 1:
        raise ValueError(f"dataset_name {name!r}: .bin and .tfrecord files; select one kind by a glob")

    def build(folder: Path) -> None:
        problems, accounts = [], {}
        for split, urls in splits.items():
            urls = tqdm(urls, desc=f"reading {name}, {split}", disable=None)
            accounts[split] = _account(urls, dtype, folder / f"{split}.npy", problems)
        if problems:
            raise ValueError("\n".join(problems))
        (folder / "accounts.json").write_text(json.dumps(accounts, indent=1))

    folder = build_once(cache_dir, "foreign", [files.states(urls), dtype], build)
    accounts = json.loads((folder / "accounts.json").read_text())
    lengths = {split: account.get("block_size") for split, account in accounts.items()}
    if len({*lengths.values()}) > 1:
        shown = ", ".join(f"{split} {length}" for split, length in lengths.items())
        raise ValueError(f"dataset_name {name!r}: records differ in length ({shown} tokens); select some by "
                         "a glob")
    found, headerless = {}, False
    for split, account in accounts.items():
        opened, content = partial(_opened, folder / f"{split}.npy", account), account["xxh3"]
        found[split] = Split(account["tokens"], content, opened, largest=account["largest"])
        headerless |= any(not offset for _, offset, *_ in account.get("files", ()))
    return TokenSet(name, found, row_tokens=lengths["train"], untyped=headerless and not dtype)


def _opened(records: Path, account: dict, _) -> tuple[list[np.ndarray], str]:
    """The ids of a split, memory-mapped, and their content."""
    flat = account.get("files", ())
    arrays = [np.memmap(path, dtype, "r", offset, (n,)) for path, offset, dtype, n in flat]
    return arrays or [np.load(records, mmap_mode="r")], account["xxh3"]


def _account(urls, dtype: str | None, into: Path, problems: list[str]) -> dict:
    """What these files hold. Writes records to `into`; appends a line to `problems` for each bad file."""
    arrays, largest, digest = [], 0, xxhash.xxh3_128()  # [n] of a .bin, [n, T] of records
    for path in (url.removeprefix("file://") for url in urls):
        try:
            if path.endswith(".tfrecord"):
                arrays.append(_records_of(path, arrays[0].shape[1] if arrays else None))
            else:
                arrays.append(_flat_ids(path, dtype))
                digest.update(f"{arrays[-1].dtype.str} {len(arrays[-1])}".encode())
        except ValueError as error:
            problems.append(f"{path}: {error}.")
            continue
        ids = arrays[-1].reshape(-1)
        for start in range(0, len(ids), AT_ONCE):
            digest.update(part := np.ascontiguousarray(ids[start : start + AT_ONCE]))
            largest = max(largest, int(part.max()))
    if problems:
        return {}
    account = {"tokens": sum(ids.size for ids in arrays), "largest": largest, "xxh3": digest.hexdigest()}
    if arrays[0].ndim == 1:
        return account | {"files": [(ids.filename, ids.offset, ids.dtype.str, len(ids)) for ids in arrays]}
    np.save(into, np.concatenate(arrays).reshape(-1))
    return account | {"block_size": arrays[0].shape[1]}


def _flat_ids(path: str, named_dtype: str | None) -> np.memmap:
    """The ids of a .bin."""
    if "://" in path:
        raise ValueError("cannot be mapped from there; copy it to a disk of this machine")
    size, head = os.path.getsize(path), np.fromfile(path, "<i4", 256)
    version, dtype = HEADERS.get(int(head[0]) if len(head) else 0, (None, named_dtype or "<u2"))
    if version is None:
        _check_headerless(head, named_dtype)
    offset = 1024 if version else 0
    tokens, rest = divmod(size - offset, np.dtype(dtype).itemsize)
    if rest or tokens <= 0 or version and tokens != head[2]:
        expected = f", but its header says {head[2]:,} tokens" if version and len(head) > 2 else ""
        raise ValueError(f"truncated: {size:,} bytes{expected}")
    if version not in (None, head[1]):
        raise ValueError(f"version {head[1]} of magic {head[0]}, but only {version} is supported")
    return np.memmap(path, dtype, "r", offset)


def _check_headerless(head: np.ndarray, named_dtype: str | None) -> None:
    """ValueError where the first bytes, int32 [up to 256], are not token ids of the named type."""
    start, long = head.tobytes(), len(head) > 32
    text = len(start) > 64 and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start)
    if text or start.startswith((b"\x93NUMPY", b"PK\x03\x04", *files.PACKED)):
        raise ValueError("text, an array or a compressed file under this name, not token ids")
    if len(head) == 256 and not head[4:].any():  # no tokens begin with so many zeros
        raise ValueError(f"a header with magic {head[0]}; supported are {', '.join(map(str, HEADERS))}")
    int64 = long and named_dtype in (None, "<u4") and not head[1::2].any()
    if int64 or long and named_dtype is None and ((head >= 0) & (head < 1 << 20)).all():  # rare in uint16
        likely = "int64" if int64 else "uint32"
        raise ValueError(f"ids look like {likely}: add ?dtype={likely} to the name, or ?dtype=uint16")


def _records_of(path: str, size: int | None) -> np.ndarray:
    """The records of a file, uint32 [n, T]. size: T of the records in earlier files, if any."""
    rows, number = [], 0
    try:
        with fsspec.open(path, "rb") as file:
            for record in _records(file):
                number += 1
                rows.append(_full_row(record))
                size = size or len(rows[0])
                if len(rows[-1]) != size:
                    raise ValueError(f"{len(rows[-1])} tokens, but those before it have {size}")
        expected = re.search(r"dataset-\d+-(\d+)\.tfrecord$", path)
        if not number or expected and int(expected[1]) != number:
            raise ValueError("truncated: the last record, but the file's name says there are more")
    except ValueError as error:
        raise ValueError(f"record {number:,}: {error}") from error
    return np.stack(rows)


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


def _full_row(record: bytes) -> np.ndarray:
    """input_ids, uint32 [T], of a serialized tf.train.Example whose attention_mask, if any, is all ones."""
    ids, mask = (_int64_list(record, name) for name in (b"input_ids", b"attention_mask"))
    if not len(ids) or not 0 <= ids.min() <= ids.max() < 2**32:
        raise ValueError("no Example with an int64 list input_ids of 0 to 2**32 - 1")
    if not mask.all():
        raise ValueError("padding: attention_mask has zeros, but rows must be full")
    return ids.astype(np.uint32)


def _int64_list(example: bytes, name: bytes) -> np.ndarray:
    """A feature of an Example, int64 [n], n = 0 where it is missing.

    In protobuf it is {1: name, 2: {3: {1: numbers}}}. A field begins with 8 times its number plus 2, and its
    length. Numbers are packed, or each follows an 8."""
    feature = b"\n%c%s\x12" % (len(name), name) + VARINT + b"\x1a(" + VARINT + b")"
    if (match := re.search(feature, example, re.DOTALL)) is None:
        return np.empty(0, np.int64)
    numbers = example[match.end() : match.end() + int(_varints(match[1])[0])]
    packed = re.match(b"\n" + VARINT, numbers, re.DOTALL)
    return _varints(numbers[packed.end() :]) if packed else _varints(numbers)[1::2]


def _varints(data: bytes) -> np.ndarray:
    """The numbers that these bytes encode, int64 [n]."""
    parts = np.frombuffer(data, np.uint8)
    if not len(parts):
        return np.empty(0, np.int64)
    last = parts < 128
    first = np.flatnonzero(np.r_[True, last[:-1]])
    shift = 7 * (np.arange(len(parts)) - first[np.cumsum(last) - last])
    return np.add.reduceat((parts & 127).astype(np.uint64) << shift.astype(np.uint64), first).view(np.int64)
