"""Ids one after the other, in .bin files, little-endian:

    nanoGPT                  ids and nothing else, uint16 unless --dtype names another type
    llm.c, modded-nanogpt    256 int32 (magic, version, number of tokens), then the ids
"""

import os
from collections.abc import Iterator

import fsspec
import numpy as np

from data.documents.files import PACKED
from data.tokens.importers import Imported, split_urls

DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, type of an id
AT_ONCE = 1 << 24  # ids


def read(name: str, dtype: str | None, tokenizer) -> Imported:
    splits = split_urls(name, (".bin",))
    return Imported({split: _ids(urls, dtype) for split, urls in splits.items()})


def _ids(urls: list[str], dtype: str | None) -> Iterator[np.ndarray]:
    for url in urls:
        try:
            yield from _file(url, DTYPES.get(dtype))
        except ValueError as error:
            raise ValueError(f"{url}: {error}.") from error


def _file(url: str, named: str | None) -> Iterator[np.ndarray]:
    with fsspec.open(url, "rb") as file:
        size = os.path.getsize(url) if "://" not in url else file.size
        start = file.read(1024)
        head = np.frombuffer(start[: len(start) // 4 * 4], "<i4")
        version, kind = HEADERS.get(int(head[0]) if len(head) else 0, (None, named or "<u2"))
        if version is None:
            _check_headerless(start, head, named)
        tokens, rest = divmod(size - 1024 * (version is not None), np.dtype(kind).itemsize)
        if rest or tokens <= 0 or version and tokens != head[2]:
            expected = f", but its header says {head[2]:,} tokens" if version and len(head) > 2 else ""
            raise ValueError(f"truncated: {size:,} bytes{expected}")
        if version not in (None, head[1]):
            raise ValueError(f"version {head[1]} of magic {head[0]}, but only {version} is supported")
        file.seek(1024 if version else 0)
        while data := file.read(AT_ONCE * np.dtype(kind).itemsize):
            yield np.frombuffer(data, kind)


def _check_headerless(start: bytes, head: np.ndarray, named: str | None) -> None:
    """ValueError where the first bytes are not token ids of the named type. head: the same as int32."""
    long = len(head) > 32
    text = len(start) > 64 and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start)
    if text or start.startswith((b"\x93NUMPY", b"PK\x03\x04", *PACKED)):
        raise ValueError("text, an array or a compressed file under this name, not token ids")
    if len(head) == 256 and not head[4:].any():  # no tokens begin with so many zeros
        raise ValueError(f"a header with magic {head[0]}; supported are {', '.join(map(str, HEADERS))}")
    int64 = long and named in (None, "<u4", "<i4") and not head[1::2].any()
    if int64 or long and named is None and ((head >= 0) & (head < 1 << 20)).all():  # rare in uint16
        likely = "int64" if int64 else "uint32"
        raise ValueError(f"ids look like {likely}: give --dtype {likely}, or --dtype uint16 if they are not")
