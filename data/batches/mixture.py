"""Several data sets in shares: decides from which one, and from which of its rows, each position trains.

    shares = Shares([0.6, 0.3, 0.1], seed=0)
    shares.window(5)     # the data set of each of the positions 5,000 to 5,999, int64 [1000]
    shares.before(5700)  # rows that the positions before 5,700 took from each, int64 [3]

This is a function of (shares, seed, position) alone. Every data set gets exactly its share of each 1,000
positions, in an order drawn by the seed. Its k-th row is the one it would give at position k if it were
trained on alone. A single data set needs nothing of this.
"""

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from data.batches.order import AT_ONCE, drawn_order, epochs_and_rows
from data.batches.rows import Key, PackedRows, filled

WINDOW = 1000  # positions; shares are thousandths


def share_problems(shares: Sequence[float], names: Sequence[str]) -> list[str]:
    """What is wrong with the shares of these data sets, one line each."""
    if len(shares) != len(names):
        return [f"mixture: {len(shares)} shares for {len(names)} data sets; give one each: --mixture 0.6 0.4 "
                "(a glob in quotes is one data set)"]
    wrong = [share for share in shares
             if not 0 <= share <= 1 or abs(share * WINDOW - round(share * WINDOW)) > 1e-3]
    problems = [f"mixture: {share} is not a share; give 0, or thousandths such as 0.125." for share in wrong]
    if not problems and sum(round(share * WINDOW) for share in shares) != WINDOW:
        problems.append(f"mixture: the shares sum to {sum(shares):g}, not to 1.")
    return problems


class Shares:
    def __init__(self, shares: Sequence[float], seed: int):
        """shares: as share_problems wants them; a data set with share 0 is never used."""
        self.seed, self.counts = seed, np.array([round(share * WINDOW) for share in shares])  # of a window

    def window(self, number: int) -> np.ndarray:
        """The data set of each position of a window, int64 [WINDOW]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)[drawn_order(WINDOW, self.seed, number)]

    def before(self, position: int) -> np.ndarray:
        """Rows of each data set before a position, int64 [data sets]."""
        number, inside = divmod(position, WINDOW)
        return number * self.counts + np.bincount(self.window(number)[:inside], minlength=len(self.counts))

    def position(self, source: int, row: int) -> int:
        """The position that takes row number `row` of a data set, whose share must not be 0."""
        return bisect.bisect_right(range(10**18), row, key=lambda position: self.before(position)[source]) - 1


class Mixed(Dataset):
    """The rows of several data sets, name -> rows of one kind, as one endless stream of rows."""

    bytes_per_token = float("nan")

    def __init__(self, shares: Sequence[float], seed: int, sources: dict[str, PackedRows]):
        self.shares, self.sources = Shares(shares, seed), sources

    @property
    def fingerprint(self) -> str:
        parts = zip(self.sources.values(), self.shares.counts.tolist(), strict=True)
        return " ".join(f"{count}x{rows.fingerprint}" for rows, count in parts)

    def __len__(self) -> int:
        """Positions before the first data set begins to repeat."""
        sizes, used = [*map(len, self.sources.values())], np.flatnonzero(self.shares.counts).tolist()
        if len(used) == 1:
            return sizes[used[0]]
        return min(self.shares.position(i, sizes[i]) for i in used)

    def keys(self, first: int, last: int, seed: int) -> Iterator[Key]:
        """The keys of the positions first to last - 1; source: the number of the data set."""
        used = zip(self.sources.values(), self.shares.before(first).tolist(), strict=True)
        orders, position = [_order(rows, start, seed) for rows, start in used], first
        while position < last:
            number, inside = divmod(position, WINDOW)
            for source in self.shares.window(number)[inside : inside + last - position].tolist():
                yield position, *next(orders[source]), source
                position += 1

    def epochs(self, position: int) -> dict[str, float]:
        """{data set: passes over it before a position}."""
        used = zip(self.sources.items(), self.shares.before(position).tolist(), strict=True)
        return {name: taken / max(len(rows), 1) for (name, rows), taken in used}

    def columns(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """Of rows of the first data set."""
        return next(iter(self.sources.values())).columns(row, epoch)

    def __getitems__(self, keys: list[Key]) -> dict:
        """As PackedRows."""
        position, epoch, row, source = np.array(keys, np.int64).T
        batch = {"position": position, "epoch": epoch, "row": row, "source": source}
        for i, rows in enumerate(self.sources.values()):
            at = (source == i).nonzero()[0]
            for name, values in filled(rows, row[at], epoch[at]).items() if len(at) else ():
                batch.setdefault(name, np.empty((len(keys), *values.shape[1:]), np.int64))[at] = values
        return {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in batch.items()}


def _order(rows: PackedRows, first: int, seed: int) -> Iterator[tuple[int, int]]:
    """(epoch, row) of the samples first, first + 1, ... of a data set."""
    while True:
        epoch, row = epochs_and_rows(first, first + AT_ONCE, len(rows), seed)
        yield from zip(epoch.tolist(), row.tolist(), strict=True)
        first += AT_ONCE
