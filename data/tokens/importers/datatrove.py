"""Tokenized files of datatrove (its DocumentTokenizer): `x.ds` has the ids of all documents, uint16 or
uint32, `x.ds.index` where each document ends (uint64), `x.ds.metadata` the tokenizer's name, the number of
tokens and the bytes of an id. Several tasks write several files, which are taken in the order of their names.
"""

from collections.abc import Iterator

import fsspec
import numpy as np

from data.tokens.importers import Imported, split_urls

AT_ONCE = 1 << 24  # ids


def read(name: str, dtype: str | None, tokenizer) -> Imported:
    """The tokenizer's EOS is put behind each document where datatrove has not (its option eos_token)."""
    splits, eos = split_urls(name, (".ds",)), tokenizer.eos_token_id
    return Imported({split: _ids(urls, dtype, eos) for split, urls in splits.items()})


def _ids(urls: list[str], dtype: str | None, eos: int | None) -> Iterator[np.ndarray]:
    for url in urls:
        size, tokens = _metadata(url)
        kind = dtype or {2: "uint16", 4: "uint32"}[size or 2]
        with fsspec.open(url, "rb") as file:
            ids = np.frombuffer(file.read(), kind)
        if tokens is not None and tokens != len(ids):
            raise ValueError(f"{url}: {len(ids):,} ids of type {kind}, but its metadata says {tokens:,}: "
                             "truncated, or of another --dtype.")
        ends = _index(url)
        if ends is None or eos is None or not len(ends):
            yield ids
            continue
        if ends[-1] != len(ids) or (np.diff(ends) < 0).any():
            raise ValueError(f"{url}: its index does not end at its last id; copy it again.")
        if (ids[ends[ends > 0] - 1] == eos).all():
            yield ids
        else:
            yield np.insert(ids, ends, eos)


def _metadata(url: str) -> tuple[int | None, int | None]:
    """(bytes of an id, number of ids); None where there is no such file."""
    try:
        with fsspec.open(f"{url}.metadata", "r") as file:
            name, count, *_ = [*file.read().splitlines(), "", ""]
    except FileNotFoundError:
        return None, None
    size = name.rpartition("|")[2]
    return (int(size) if size in ("2", "4") else None), (int(count) if count.isdigit() else None)


def _index(url: str) -> np.ndarray | None:
    try:
        with fsspec.open(f"{url}.index", "rb") as file:
            return np.frombuffer(file.read(), "<u8").astype(np.int64)
    except FileNotFoundError:
        return None
