"""Several sources in shares: decides from which source, and from which of its rows, each position trains.

    mixture = Mixture((0.6, 0.3, 0.1), seed=0)
    mixture.window(5)     # the source of each of the positions 5,000 to 5,999, int64 [1000]
    mixture.before(5700)  # rows that the positions before 5,700 took from each source, int64 [3]

This is a function of (shares, seed, position) alone. Every source gets its share of each 1,000 positions, in
an order drawn by the seed. Its k-th row is the one it would give at position k if it were trained on alone.
"""

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from data.order import drawn_order

WINDOW = 1000  # positions
CYCLE = 1000  # windows, after which every share, counted in millionths, is met exactly


def share_problems(shares: Sequence[float], names: Sequence[str]) -> list[str]:
    """What is wrong with the shares of these data sets, one line each. A single data set needs none."""
    if len(shares) != len(names) and (shares or len(names) > 1):
        return [f"mixture: {len(shares)} shares for {len(names)} data sets; give one each: --mixture 0.6 0.4 "
                "(a glob in quotes is one data set)"]
    wrong = [share for share in shares if share and not 1e-6 <= share <= 1]
    problems = [f"mixture: {share} is not a share; give 0, or 0.000001 to 1." for share in wrong]
    if shares and not problems and abs(sum(shares) - 1) > 1e-6 * len(shares):
        problems.append(f"mixture: the shares sum to {sum(shares):g}, not to 1.")
    return problems


def window_counts(millionths: np.ndarray) -> np.ndarray:
    """Rows of each source in each window of a cycle, int64 [CYCLE, sources].

    In each window, and in all windows up to it, a source is less than one row away from its share. Fractions
    of rows are scheduled as algorithm PF gives processors to periodic tasks (Baruah, Cohen, Plaxton and
    Varvel, "Proportionate Progress", 1996)."""
    whole, rest = np.divmod(millionths, CYCLE)
    counts, given = np.tile(whole, (CYCLE, 1)), [0] * len(rest)
    # For each row of a source: the window by which it is due, and whether the row after it must wait for a
    # later window. Earlier dues come first.
    due = [[(-(-CYCLE * n // r), CYCLE * n % r == 0) for n in range(1, r + 1)] for r in rest.tolist()]
    for window in range(CYCLE):
        may = [i for i, r in enumerate(rest) if CYCLE * given[i] < r * (window + 1)]
        for i in sorted(may, key=lambda i: due[i][given[i] :])[: rest.sum() // CYCLE]:
            counts[window, i] += 1
            given[i] += 1
    return counts


class Mixture:
    """shares: sum to 1 (see share_problems); a source with share 0 is never used."""

    def __init__(self, shares: Sequence[float], seed: int):
        self.seed, self.millionths = seed, np.array([round(share * WINDOW * CYCLE) for share in shares])
        self.millionths[self.millionths.argmax()] += WINDOW * CYCLE - self.millionths.sum()  # by rounding
        counts = window_counts(self.millionths)
        self.given = np.concatenate([0 * counts[:1], counts.cumsum(0)])  # before each window of a cycle

    def window(self, number: int) -> np.ndarray:
        """The source of each position of a window, int64 [WINDOW]."""
        rows = self.given[number % CYCLE + 1] - self.given[number % CYCLE]
        return np.repeat(np.arange(len(rows)), rows)[drawn_order(WINDOW, self.seed, number)]

    def before(self, position: int) -> np.ndarray:
        """Rows of each source before a position, int64 [sources]."""
        number, inside = divmod(position, WINDOW)
        here = np.bincount(self.window(number)[:inside], minlength=len(self.millionths))
        return number // CYCLE * self.millionths + self.given[number % CYCLE] + here

    def position(self, source: int, row: int) -> int:
        """The position that takes row number `row` of a source, whose share must not be 0."""
        return bisect.bisect_right(range(10**18), row, key=lambda position: self.before(position)[source]) - 1


class MixedOrder(Sampler):
    """Yields (position, epoch, row, source) for positions start, ..., stop - 1 of MixedRows."""

    def __init__(self, rows: "MixedRows", start: int, stop: int):
        self.rows, self.start, self.stop = rows, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        mixture, position = self.rows.mixture, self.start
        orders = [rows.order_from(used, mixture.seed) for rows, used in self.rows.used(position)]
        while position < self.stop:
            number, inside = divmod(position, WINDOW)
            for source in mixture.window(number)[inside : inside + self.stop - position].tolist():
                yield position, *next(orders[source]), source
                position += 1


class MixedRows(Dataset):
    """Rows of one source or several, name -> PackedRows (all of one kind) or StreamedRows. mixture: None for
    evaluation, which has an order of its own."""

    def __init__(self, mixture: Mixture | None, sources: dict):
        self.mixture, self.sources = mixture, sources
        self.streams = {name: rows for name, rows in sources.items() if hasattr(rows, "release")}

    def used(self, position: int) -> list[tuple]:
        """(rows of a source, how many of them come before a position) for each source."""
        return list(zip(self.sources.values(), self.mixture.before(position).tolist(), strict=True))

    @property
    def fingerprint(self) -> str | dict[str, list]:
        if len(self.sources) == 1:
            return next(iter(self.sources.values())).fingerprint
        parts = zip(self.sources.items(), self.mixture.millionths.tolist(), strict=True)
        return {name: [millionths, source.fingerprint] for (name, source), millionths in parts}

    @property
    def n_rows(self) -> int | None:
        """Positions before the first source begins to repeat; None where a stream's length is unknown."""
        sizes = [rows.n_rows if name in self.streams else len(rows) for name, rows in self.sources.items()]
        used = np.flatnonzero(self.mixture.millionths).tolist()
        if len(used) == 1:
            return sizes[used[0]]
        return min(self.mixture.position(i, sizes[i]) for i in used) if all(sizes[i] for i in used) else None

    def __getitems__(self, keys: list[tuple[int, int, int, int]]) -> dict:
        """keys (position, epoch, row, source), row -1: padding -> {"input_ids": [B, T], other columns of the
        rows, "position", "epoch", "row", "source": [B]}, int64 tensors."""
        position, epoch, row, source = np.array(keys, np.int64).T
        batch = {"position": position, "epoch": epoch, "row": row, "source": source}
        for i, rows in enumerate(self.sources.values()):
            at, padding = (source == i).nonzero()[0], row < 0
            for name, values in rows.columns(row[at], epoch[at]).items() if len(at) else ():
                if name not in batch:
                    batch[name] = np.empty((len(keys), *values.shape[1:]), np.int64)
                batch[name][at] = values
                if padding.any() and name in rows.blanks:
                    batch[name][padding] = rows.blanks[name]
        return {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in batch.items()}

    def epochs(self, position: int) -> dict[str, float]:
        """Passes over each of several sources before a position; of streamed text, whole ones only."""
        passes = {}
        for name, (rows, used) in zip(self.sources, self.used(position), strict=True):
            n_rows = rows.n_rows if name in self.streams else max(len(rows), 1)
            passes[name] = used / n_rows if n_rows else rows.state_dict(used)["mark"]["epoch"]
        return passes if len(passes) > 1 else {}

    def release(self) -> None:
        """Tells streams that the rows handed out so far will not be asked for again."""
        for rows in self.streams.values():
            rows.release()

    def state_dict(self, position: int) -> dict | None:
        """What resumes streams after `position` rows of all processes together; None without streams."""
        used = dict(zip(self.sources, self.mixture.before(position).tolist(), strict=True))
        streams = {name: rows.state_dict(used[name]) for name, rows in self.streams.items()}
        return streams | {"seed": self.mixture.seed} if streams else None

    def load_state_dict(self, state: dict | None) -> None:
        """ValueError: the state comes from another stream."""
        for name, rows in self.streams.items() if state else ():
            if state.get("seed") != self.mixture.seed:
                raise ValueError("the stream is not the one this checkpoint was trained on: the seed or the "
                                 "data sets changed. Restore them, or use another --output_dir.")
            rows.load_state_dict(state.get(name, {}))
