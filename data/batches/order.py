"""The order of rows: a function of (seed, epoch, position) alone.

Training reads one endless sequence of positions: position p is row permutation(seed, epoch)[p % n] with epoch
= p // n. Nothing is stored, so a run resumes at any position at once, with any number of processes.
"""

from collections.abc import Iterator

import numpy as np

AT_ONCE = 4096  # positions that are computed at once
ROUNDS = 6  # four suffice for pseudo-randomness (Luby and Rackoff, 1988); two more cost nothing here
EVALUATION = 2**64 - 1  # the epoch whose permutation draws evaluation rows; training never reaches it


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer (Steele et al., 2014), uint64 -> uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """permutation(seed, epoch) of range(n) at these positions: int64 in [0, n) -> int64, in O(1) memory.

    A Feistel network over the smallest even number of bits that holds n - 1, applied again to results outside
    range(n) (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002)."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    rounds = np.uint64(0x9E3779B97F4A7C15) * np.arange(1, ROUNDS + 1, dtype=np.uint64)
    keys = _mix(_mix(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch) + rounds)

    def encrypt(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return left << half | right

    rows = encrypt(positions.astype(np.uint64))
    while (outside := rows >= n).any():
        rows[outside] = encrypt(rows[outside])
    return rows.astype(np.int64)


def drawn_order(n: int, seed: int, number: int) -> np.ndarray:
    """A permutation of range(n) from (seed, number): all of it, faster than with `permuted`."""
    key = _mix(_mix(np.array([seed % 2**64], np.uint64)) + np.uint64(number))
    return _mix(key + np.arange(n, dtype=np.uint64)).argsort(kind="stable")


def epochs_and_rows(start: int, stop: int, n_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(epoch, row) of the positions start, ..., stop - 1 over `n_rows` rows, int64 each."""
    epoch, row = np.divmod(np.arange(start, stop), n_rows)
    for e in np.unique(epoch).tolist():
        row[epoch == e] = permuted(row[epoch == e], n_rows, seed, e)
    return epoch, row


def endless_order(n_rows: int, first: int, seed: int) -> Iterator[tuple[int, int]]:
    """(epoch, row) of the positions first, first + 1, ... over `n_rows` rows."""
    while True:
        epoch, row = epochs_and_rows(first, first + AT_ONCE, n_rows, seed)
        yield from zip(epoch.tolist(), row.tolist(), strict=True)
        first += AT_ONCE


def evaluation_rows(n_rows: int, max_rows: int) -> list[int]:
    """The sorted numbers of max_rows rows (0: all), drawn at random, as neighbours may be of one document. A
    smaller sample is part of a larger one."""
    if not 0 < max_rows < n_rows:
        return list(range(n_rows))
    return sorted(permuted(np.arange(max_rows), n_rows, 0, EVALUATION).tolist())


def evaluation_order(rows: list[int], multiple: int) -> list[tuple[int, int, int, int]]:
    """The keys of these rows, padded with row -1 to a multiple of `multiple`. A row's position is its number,
    so that its mask is the same in any sample."""
    size = max(1, -(-len(rows) // multiple)) * multiple
    return [(row, 0, row, 0) for row in rows] + [(-1, 0, -1, 0)] * (size - len(rows))
