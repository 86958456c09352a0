"""Several data sets in shares: decides from which one, and from which of its rows, each position trains.

This is a function of (shares, seed, position) alone. Every data set gets exactly its share of each 1,000
positions, in an order drawn by the seed. Its k-th row is the one it would give at position k if it were
trained on alone. A single data set needs nothing of this.
"""

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Dataset

from data.batches.order import drawn_order, endless_order
from data.batches.rows import PackedRows, RowKey, batch_of

WINDOW = 1000  # positions; shares are thousandths


class Mixed(Dataset):
    """The rows of several data sets, name -> rows of one kind, as one endless stream of rows. shares:
    thousandths that sum to 1; a data set with share 0 is never used."""

    bytes_per_token = float("nan")

    def __init__(self, shares: Sequence[float], seed: int, sources: dict[str, PackedRows]):
        self.seed, self.sources = seed, sources
        self.counts = np.array([round(share * WINDOW) for share in shares])  # of each data set in a window

    def window(self, number: int) -> np.ndarray:
        """The data set of each position of a window, int64 [WINDOW]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)[drawn_order(WINDOW, self.seed, number)]

    def before(self, position: int) -> np.ndarray:
        """Rows of each data set before a position, int64 [data sets]."""
        number, inside = divmod(position, WINDOW)
        return number * self.counts + np.bincount(self.window(number)[:inside], minlength=len(self.counts))

    @property
    def fingerprint(self) -> str:
        parts = zip(self.sources.values(), self.counts.tolist(), strict=True)
        return " ".join(f"{count}x{rows.fingerprint}" for rows, count in parts)

    def __len__(self) -> int:
        """Positions before the first data set begins to repeat."""
        sizes = {i: len(rows) for i, rows in enumerate(self.sources.values()) if self.counts[i]}
        if len(sizes) == 1:
            return min(sizes.values())
        return min(bisect.bisect_right(range(10**18), size, key=lambda position: self.before(position)[i]) - 1
                   for i, size in sizes.items())

    def keys(self, first: int, last: int, seed: int) -> Iterator[RowKey]:
        """The keys of the positions first to last - 1; source: the number of the data set."""
        used = zip(self.sources.values(), self.before(first).tolist(), strict=True)
        orders, position = [endless_order(len(rows), start, seed) for rows, start in used], first
        while position < last:
            number, inside = divmod(position, WINDOW)
            for source in self.window(number)[inside : inside + last - position].tolist():
                yield position, *next(orders[source]), source
                position += 1

    def epochs(self, position: int) -> dict[str, float]:
        """{data set: passes over it before a position}."""
        used = zip(self.sources.items(), self.before(position).tolist(), strict=True)
        return {name: taken / max(len(rows), 1) for (name, rows), taken in used}

    def columns(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """Of rows of the first data set."""
        return next(iter(self.sources.values())).columns(row, epoch)

    def __getitems__(self, keys: list[RowKey]) -> dict:
        """As PackedRows."""
        return batch_of(keys, self.sources.values())
