"""Rows of T tokens: the tokens of all documents of a split, one after the other, cut every T tokens.

    rows = PackedRows([np.load("train-00000.npy", mmap_mode="r"), ...], block_size=128)
    rows.ids(np.array([5, 2]))     # uint16 [2, 128]

Rows cross the boundaries of documents and files. What is left at the end, less than a row, is unused. The
files hold tokens, not rows, so they serve any T. B rows per batch, T tokens per row (block_size), n rows.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from data.batches.order import AT_ONCE, epochs_and_rows

Key = tuple[int, int, int, int]  # position in the stream, epoch, row, source; row -1: padding


class PackedRows(Dataset):
    """Rows cut from 1-d arrays of token ids, usually memory-mapped. max_rows: the first so many; 0: all.
    content: changes with the ids. bytes_per_token: UTF-8 bytes of the text / its tokens; nan: unknown."""

    blanks = {"input_ids": 0}  # the value of each column in a row of padding

    def __init__(self, tokens: Sequence[np.ndarray], block_size: int, max_rows: int = 0, content: str = "",
                 bytes_per_token: float = float("nan")):
        self.block_size, self.max_rows, self.content = block_size, max_rows, content
        self.bytes_per_token = bytes_per_token
        self.views = [view for view in _cut(tokens, block_size) if len(view)]  # [*, T] each
        self.first = np.cumsum([0, *map(len, self.views)])  # row of each view

    @property
    def fingerprint(self) -> str:
        """Changes with the content of the rows and with nothing else."""
        return f"{self.content}-{self.block_size}" + f"-{self.max_rows}" * (self.max_rows > 0)

    def __len__(self) -> int:
        whole = int(self.first[-1])
        return min(whole, self.max_rows or whole)

    def ids(self, row: np.ndarray) -> np.ndarray:
        """Row numbers [B] -> rows [B, T]; for -1 any row."""
        if len(self.views) == 1:
            return self.views[0][row]
        row = np.maximum(row, 0)
        view = np.searchsorted(self.first, row, "right") - 1
        inside = row - self.first[view]
        return np.stack([self.views[v][i] for v, i in zip(view.tolist(), inside.tolist(), strict=True)])

    def columns(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of these rows: {name: [B, ...], any integer type}."""
        return {"input_ids": self.ids(row)}

    def keys(self, first: int, last: int, seed: int) -> Iterator[Key]:
        """The keys of the positions first to last - 1: each row once per epoch."""
        for start in range(first, last, AT_ONCE):
            stop = min(start + AT_ONCE, last)
            epoch, row = epochs_and_rows(start, stop, len(self), seed)
            for position, e, r in zip(range(start, stop), epoch.tolist(), row.tolist(), strict=True):
                yield position, e, r, 0

    def epochs(self, position: int) -> dict[str, float]:
        """{data set: passes over it before a position}, where there are several."""
        return {}

    def __getitems__(self, keys: list[Key]) -> dict:
        """{"input_ids": [B, T], other columns of the rows, "position", "epoch", "row", "source": [B]}, int64
        tensors."""
        position, epoch, row, source = np.array(keys, np.int64).T
        batch = {"position": position, "epoch": epoch, "row": row, "source": source}
        batch |= filled(self, row, epoch)
        return {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in batch.items()}


class Order(Sampler):
    """The keys of some rows, for a DataLoader."""

    def __init__(self, rows, first: int, last: int, seed: int):
        self.rows, self.first, self.last, self.seed = rows, first, last, seed

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[Key]:
        return self.rows.keys(self.first, self.last, self.seed)


def filled(rows: PackedRows, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of these rows [B], with blanks in rows numbered -1, as int64."""
    columns = {name: np.array(values, np.int64) for name, values in rows.columns(row, epoch).items()}
    for name in columns.keys() & rows.blanks.keys():
        columns[name][row < 0] = rows.blanks[name]
    return columns


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
