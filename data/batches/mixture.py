"""Mixes several data sets: the data set and row of a position are a function of (shares, seed, position).

A data set gets exactly its share of each 1,000 positions, in an order that the seed draws. Its k-th row in
the mixture is the row that it would give at position k without the others.
"""

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Dataset

from data.batches.order import drawn_order, endless_order
from data.batches.rows import PackedRows, RowKey, batch_of

WINDOW = 1000  # positions; shares are thousandths


class Mixed(Dataset):
    """One endless stream of the rows of several data sets. sources: {name: rows}, all of one class. shares:
    thousandths that sum to 1; a data set with share 0 is only evaluated."""

    bytes_per_token = float("nan")

    def __init__(self, shares: Sequence[float], seed: int, sources: dict[str, PackedRows]):
        self.seed, self.sources = seed, sources
        self.counts = np.array([round(share * WINDOW) for share in shares])  # of each data set in a window

    def window(self, number: int) -> np.ndarray:
        """The data set of each position of a window, int64 [WINDOW]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)[drawn_order(WINDOW, self.seed, number)]

    def before(self, position: int) -> np.ndarray:
        """The number of rows of each data set before a position, int64 [data sets]."""
        number, inside = divmod(position, WINDOW)
        return number * self.counts + np.bincount(self.window(number)[:inside], minlength=len(self.counts))

    @property
    def fingerprint(self) -> str:
        parts = zip(self.sources.values(), self.counts.tolist(), strict=True)
        return " ".join(f"{count}x{rows.fingerprint}" for rows, count in parts)

    def __len__(self) -> int:
        """The number of positions before one of the data sets repeats."""
        sizes = {i: len(rows) for i, rows in enumerate(self.sources.values()) if self.counts[i]}
        if len(sizes) == 1:
            return min(sizes.values())
        return min(bisect.bisect_right(range(10**18), size, key=lambda position: self.before(position)[i]) - 1
                   for i, size in sizes.items())

    def keys(self, first: int, last: int, seed: int) -> Iterator[RowKey]:
        """The keys of the positions first to last - 1; source: the number of the data set."""
        starts = zip(self.sources.values(), self.before(first).tolist(), strict=True)
        orders, position = [endless_order(len(rows), start, seed) for rows, start in starts], first
        while position < last:
            number, inside = divmod(position, WINDOW)
            for source in self.window(number)[inside : inside + last - position].tolist():
                yield position, *next(orders[source]), source
                position += 1

    def epochs(self, position: int) -> dict[str, float]:
        """{data set: passes over it before a position}."""
        counts = zip(self.sources.items(), self.before(position).tolist(), strict=True)
        return {name: count / max(len(rows), 1) for (name, rows), count in counts}

    def columns(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of these rows of the first data set."""
        return next(iter(self.sources.values())).columns(row, epoch)

    def __getitems__(self, keys: list[RowKey]) -> dict:
        """The batch of these keys, as PackedRows gives it."""
        return batch_of(keys, self.sources.values())
