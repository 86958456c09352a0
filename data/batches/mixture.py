"""Mixes several datasets: (shares, seed, position in the stream) decide a row and its dataset.

A dataset gets exactly its share of each 1,000 positions, in an order that the seed draws. The k-th row taken
from a dataset is the row that it gives at position k when it is used alone.
"""

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Dataset

from data.batches.order import drawn_order, endless_order
from data.batches.rows import PackedRows, RowKey, batch_of

WINDOW = 1000  # positions; shares are multiples of 1 / WINDOW


class Mixed(Dataset):
    """One endless stream of the rows of several datasets. sources: {name: rows}, all of one class. shares:
    multiples of 0.001 that sum to 1; a dataset with share 0 is only evaluated."""

    bytes_per_token = float("nan")  # datasets differ

    def __init__(self, shares: Sequence[float], seed: int, sources: dict[str, PackedRows]):
        self.seed, self.sources = seed, sources
        self.counts = np.array([round(share * WINDOW) for share in shares])  # of each dataset in a window

    def window(self, number: int) -> np.ndarray:
        """The dataset of each position of a window, int64 [WINDOW]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)[drawn_order(WINDOW, self.seed, number)]

    def before(self, position: int) -> np.ndarray:
        """The number of rows of each dataset before a position, int64 [datasets]."""
        number, inside = divmod(position, WINDOW)
        return number * self.counts + np.bincount(self.window(number)[:inside], minlength=len(self.counts))

    @property
    def fingerprint(self) -> str:
        parts = zip(self.sources.values(), self.counts.tolist(), strict=True)
        return " ".join(f"{count}x{rows.fingerprint}" for rows, count in parts)

    def __len__(self) -> int:
        """The number of positions before one of the datasets repeats."""
        sizes = {i: len(rows) for i, rows in enumerate(self.sources.values()) if self.counts[i]}
        if len(sizes) == 1:
            return min(sizes.values())
        return min(bisect.bisect_right(range(10**18), size, key=lambda position: self.before(position)[i]) - 1
                   for i, size in sizes.items())

    def keys(self, first: int, last: int, seed: int) -> Iterator[RowKey]:
        """Yields the RowKey of each position in [first, last). seed: of the order of rows in a dataset."""
        starts = zip(self.sources.values(), self.before(first).tolist(), strict=True)
        orders, position = [endless_order(len(rows), start, seed) for rows, start in starts], first
        while position < last:
            number, inside = divmod(position, WINDOW)
            for source in self.window(number)[inside : inside + last - position].tolist():
                yield position, *next(orders[source]), source
                position += 1

    def epochs(self, position: int) -> dict[str, float]:
        """{dataset: passes over it before a position}."""
        counts = zip(self.sources.items(), self.before(position).tolist(), strict=True)
        return {name: count / max(len(rows), 1) for (name, rows), count in counts}

    def columns(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of rows `row` in epochs `epoch` of the first dataset, not of the mixture."""
        return next(iter(self.sources.values())).columns(row, epoch)

    def __getitems__(self, keys: list[RowKey]) -> dict:
        """The batch of these keys, as PackedRows gives it."""
        return batch_of(keys, self.sources.values())
