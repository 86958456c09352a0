"""Files of token ids, one after the other, little-endian:

    .bin of nanoGPT                  only ids: uint16, or the type that --dtype names
    .bin of llm.c, modded-nanogpt    256 int32 (magic, version, number of tokens), then the ids
    .ds of datatrove                 ids; x.ds.index: where each document ends (uint64); x.ds.metadata: the
                                     tokenizer, bytes per id, number of tokens
"""

from collections.abc import Iterator

import fsspec
import numpy as np

from data.documents.names import split_files, suffix
from data.tokens.importers import Imported

DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # {magic: (version, type of the ids)}
AT_ONCE = 1 << 24  # ids per array


def open_flat(name: str, dtype: str | None, eos: int | None) -> Imported:
    """dtype: a name in DTYPES, or None for the default. eos: added after each document of a .ds file, unless
    datatrove has done it (its option eos_token)."""
    splits = split_files(name, (".bin", ".ds"))
    return Imported({split: _read_files(urls, DTYPES.get(dtype), eos) for split, urls in splits.items()})


def _read_files(urls: list[str], id_type: str | None, eos: int | None) -> Iterator[np.ndarray]:
    for url in urls:
        try:
            yield from _read_datatrove(url, id_type, eos) if suffix(url) == ".ds" else _read_bin(url, id_type)
        except ValueError as error:
            raise ValueError(f"{url}: {error}.") from error


def _read_bin(url: str, id_type: str | None) -> Iterator[np.ndarray]:
    with fsspec.open(url, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = file.read(1024)
        head = np.frombuffer(start[: len(start) // 4 * 4], "<i4")
        version, kind = HEADERS.get(int(head[0]) if len(head) else 0, (None, id_type or "<u2"))
        if version is None:
            _check_headerless(start, head, id_type)
        tokens, remainder = divmod(size - 1024 * (version is not None), np.dtype(kind).itemsize)
        if remainder or tokens <= 0 or version and tokens != head[2]:
            expected = f", but its header says {head[2]:,} tokens" if version and len(head) > 2 else ""
            raise ValueError(f"truncated: {size:,} bytes{expected}")
        if version not in (None, head[1]):
            raise ValueError(f"version {head[1]} of magic {head[0]}, but only {version} is supported")
        file.seek(1024 if version else 0)
        while data := file.read(AT_ONCE * np.dtype(kind).itemsize):
            yield np.frombuffer(data, kind)


def _check_headerless(start: bytes, head: np.ndarray, id_type: str | None) -> None:
    """ValueError: the first 1,024 bytes do not look like ids of this type. head: the same bytes as int32."""
    text = len(start) > 64 and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start)
    packed = b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"  # gzip, bzip2, xz, zstd
    if text or start.startswith((b"\x93NUMPY", b"PK\x03\x04", *packed)):
        raise ValueError("text, an array or a compressed file, not token ids")
    if len(head) == 256 and not head[4:].any():  # token ids do not begin with so many zeros
        raise ValueError(f"a header with magic {head[0]}; supported are {', '.join(map(str, HEADERS))}")
    if id_type is None and len(head) > 32 and ((head >= 0) & (head < 1 << 20)).all():  # unlikely for uint16
        likely = "uint32" if head[1::2].any() else "int64"
        raise ValueError(f"ids look like {likely}: give --dtype {likely}, or --dtype uint16 if they are not")


def _read_datatrove(url: str, id_type: str | None, eos: int | None) -> Iterator[np.ndarray]:
    name, count, *_ = [*_read_sidecar(url, "metadata").decode().splitlines(), "", ""]
    with fsspec.open(url, "rb") as file:
        ids = np.frombuffer(file.read(), id_type or ("<u4" if name.endswith("|4") else "<u2"))
    if count not in ("", str(len(ids))):
        raise ValueError(f"{len(ids):,} ids, but its metadata says {count}: truncated, or of another --dtype")
    ends = np.frombuffer(_read_sidecar(url, "index"), "<u8").astype(np.int64)
    if len(ends) and (ends[-1] != len(ids) or (np.diff(ends) < 0).any()):
        raise ValueError("its index does not end at its last id; copy it again")
    has_eos = eos is None or (ids[ends[ends > 0] - 1] == eos).all()
    yield ids if has_eos else np.insert(ids, ends, eos)


def _read_sidecar(url: str, kind: str) -> bytes:
    """The file that datatrove writes next to the ids; b"" if it is missing."""
    try:
        with fsspec.open(f"{url}.{kind}", "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""
