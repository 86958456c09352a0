"""Readers of token files and sentence pairs of other projects, for data/convert.py."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass
class Imported:
    """The token ids of each split, as arrays that are read one at a time: [n] where rows may be cut anywhere,
    [n, T] of rows with their special tokens, or [n, T + 3] of sentence pairs (PairRows)."""

    splits: dict[str, Iterator[np.ndarray]]
    width: int = 1  # of the rows: T or T + 3; 1: rows may be cut anywhere
    pairs: bool = False
