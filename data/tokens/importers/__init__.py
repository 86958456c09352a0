"""In: token files and sentence pairs of others. Out: token shards, by `python -m data.convert`. An importer
is one file with read(name, dtype, tokenizer) -> Imported, and its endings in TOKEN_FILES of names.py.
"""

import importlib
import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from data.documents.names import TOKEN_FILES, is_files, list_files, suffix
from utils.io.urls import explained


@dataclass
class Imported:
    """The ids of some splits. splits: {split: arrays [n], or [n, T] of rows that bring their special tokens,
    or [n, T + 3] of pairs}, each read when it is asked for."""

    splits: dict[str, Iterator[np.ndarray]]
    width: int = 1  # of rows; 1: the ids are cut into rows when they are trained on
    pairs: bool = False


def read(name: str, dtype: str | None, tokenizer) -> Imported:
    """The ids of a source, by its importer. Where no file ending tells, it is a data set of pairs."""
    where, looking = name, nullcontext()
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name):
        where = f"hf://datasets/{name}"
        looking = explained(f"{name} (no file here, and on the Hub)", "read")
    with looking:
        endings = {suffix(where), *map(suffix, list_files(where)[2] if is_files(where) else ())}
    module = next((module for ending, module in TOKEN_FILES.items() if ending in endings), "pairs")
    importer = importlib.import_module(f"data.tokens.importers.{module}")
    return importer.read(name if module == "pairs" else where, dtype, tokenizer)
