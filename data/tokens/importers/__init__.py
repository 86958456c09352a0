"""In: token files and sentence pairs of others. Out: token shards, by `python -m data.convert`. An importer
is one file with read(name, dtype, tokenizer) -> Imported, and its endings in TOKEN_FILES of names.py.
"""

import importlib
import os
import re
from collections.abc import Iterator
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
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name):
        hub = f"hf://datasets/{name}"
        with explained(f"{name} (no file here, and on the Hub)", "read"):
            name = hub if not TOKEN_FILES.keys().isdisjoint(map(suffix, list_files(hub)[2])) else name
    endings = {suffix(name), *map(suffix, list_files(name)[2] if is_files(name) else ())}
    module = next((module for ending, module in TOKEN_FILES.items() if ending in endings), "pairs")
    return importlib.import_module(f"data.tokens.importers.{module}").read(name, dtype, tokenizer)
