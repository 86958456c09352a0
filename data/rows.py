"""Rows of T tokens: the tokens of all documents of a split, one after the other, cut every T tokens.

    rows = PackedRows([np.load("train-00000.npy", mmap_mode="r"), ...], block_size=128)
    rows.__getitems__([(0, 0, 5), (1, 0, 2)])["input_ids"]     # int64 [2, 128]

Rows cross the boundaries of documents and files. What is left at the end, less than a row, is unused. The
files hold tokens, not rows, so they serve any T. B rows per batch, T tokens per row (block_size), n rows.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from data.order import epochs_and_rows

AT_ONCE = 4096  # rows whose places are computed at once


class PackedRows:
    """Rows cut from 1-d arrays of token ids, usually memory-mapped. most: the first so many rows; 0: all.
    content: changes with the ids. bytes_per_token: UTF-8 bytes of the text / its tokens; 0: unknown."""

    blanks = {"input_ids": 0}  # the value of each column in a row of padding

    def __init__(self, tokens: Sequence[np.ndarray], block_size: int, most: int = 0, content: str = "",
                 bytes_per_token: float = 0.0):
        self.block_size, self.most, self.content = block_size, most, content
        self.bytes_per_token = bytes_per_token
        self.views = [view for view in _cut(tokens, block_size) if len(view)]  # [*, T] each
        self.first = np.cumsum([0, *map(len, self.views)])  # row of each view
        all_rows = int(self.first[-1])
        self.size = min(all_rows, most or all_rows)

    @property
    def n_rows(self) -> int:
        return len(self)

    @property
    def rows(self) -> np.ndarray:
        """All of them, [n, T]."""
        return self.at(np.arange(self.size))

    @property
    def fingerprint(self) -> str:
        """Changes with the content of the rows and with nothing else."""
        return f"{self.content}-{self.block_size}" + f"-{self.most}" * (self.most > 0)

    def __len__(self) -> int:
        return self.size

    def at(self, row: np.ndarray) -> np.ndarray:
        """Row numbers [B] -> rows [B, T]; for -1 any row."""
        if len(self.views) == 1:
            return self.views[0][row]
        row = np.maximum(row, 0)
        view = np.searchsorted(self.first, row, "right") - 1
        inside = row - self.first[view]
        return np.stack([self.views[v][i] for v, i in zip(view.tolist(), inside.tolist(), strict=True)])

    def take(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of these rows: {name: [B, ...], any integer type}."""
        return {"input_ids": self.at(row)}

    def walk(self, first: int, seed: int) -> Iterator[tuple[int, int]]:
        """(epoch, row) of the uses first, first + 1, ... of these rows: each row once per epoch."""
        assert len(self), "no row to train on"
        for start in itertools.count(first, AT_ONCE):
            epoch, row = epochs_and_rows(start, start + AT_ONCE, len(self), seed)
            yield from zip(epoch.tolist(), row.tolist(), strict=True)

    def __getitems__(self, keys: list[tuple[int, int, int]]) -> dict:
        """(position, epoch, row) each -> {"input_ids": int64 [B, T], "position", "epoch", "row", "source":
        int64 [B]}. Row -1 is padding."""
        position, epoch, row = np.array(keys, np.int64).reshape(-1, 3).T
        columns = self.take(row, epoch)
        if (padding := row < 0).any():
            for name in columns.keys() & self.blanks.keys():
                columns[name][padding] = self.blanks[name]
        source = np.zeros_like(row)
        return as_batch(columns | {"position": position, "epoch": epoch, "row": row, "source": source})


def _cut(tokens: Sequence[np.ndarray], T: int) -> Iterator[np.ndarray]:
    """The rows of the concatenated arrays: [n, T] of those inside one array, [1, T] of each that crosses into
    the next arrays."""
    rest = []  # pieces of the row that is not complete yet
    for ids in tokens:
        missing = -sum(map(len, rest)) % T
        rest.append(np.asarray(ids[:missing]))
        if missing <= len(ids):
            if missing:
                yield np.concatenate(rest)[None]
            whole = (len(ids) - missing) // T * T
            yield np.asarray(ids[missing : missing + whole]).reshape(-1, T)  # a memmap is slow to index
            rest = [np.asarray(ids[missing + whole :])]


def as_batch(columns: dict[str, np.ndarray]) -> dict:
    """The columns as int64 tensors."""
    import torch  # not at the top: making rows needs none

    whole = {name: np.ascontiguousarray(column, np.int64) for name, column in columns.items()}
    return {name: torch.from_numpy(column) for name, column in whole.items()}
