"""In: token files and sentence pairs of others. Out: token shards, by `python -m data.convert`. An importer
is one file with read(name, dtype, tokenizer) -> Imported, and a line of KINDS.
"""

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data.documents import names as files

# Module, endings of its files, and what it reads, in words.
KINDS = {
    "tfrecord": ((".tfrecord", ".tfrecords"), "TFRecord files"),
    "flat": ((".bin",), "of nanoGPT, llm.c or modded-nanogpt"),
    "datatrove": ((".ds",), "of datatrove"),
    "pairs": ((), "sentence pairs or rows of a data set"),
}


@dataclass
class Imported:
    """The ids of some splits. splits: {split: arrays [n], or [n, T] of rows that bring their special tokens,
    or [n, T + 3] of pairs}, each read when it is asked for."""

    splits: dict[str, Iterator[np.ndarray]]
    width: int = 1  # of rows; 1: the ids are cut into rows when they are trained on
    pairs: bool = False


def kind_of(name: str) -> str | None:
    """What kind of token files the name selects, in words, where it selects no text; None for none."""
    endings = {ending: words for _, (some, words) in KINDS.items() for ending in some}
    if (ending := os.path.splitext(name)[1]) in endings:
        return endings[ending]
    if files.suffix(name) in files.SUFFIXES or not files.is_files(name):
        return None
    found = {files.suffix(path) for path in files.list_files(name)[2]}
    if found.isdisjoint(files.SUFFIXES):
        return next((words for ending, words in endings.items() if ending in found), None)


def find(name: str):
    """The importer's module for this source, the last one where no file ending tells."""
    words = kind_of(name)
    for module, (_, own) in KINDS.items():
        if own == words:
            return importlib.import_module(f"data.tokens.importers.{module}")
    return importlib.import_module("data.tokens.importers.pairs")


def split_urls(name: str, endings: tuple[str, ...]) -> dict[str, list[str]]:
    """{split: sorted paths or URLs} of the files with these endings; splits by the words in their names."""
    found, base, paths = files.list_files(name)
    paths = sorted(path for path in paths if os.path.splitext(path)[1] in endings)
    if not paths:
        raise ValueError(f"{name}: no file that ends in {', '.join(endings)}")
    inside = {path: path.removeprefix(base).lstrip("/") for path in paths}
    splits = files.splits_by_words(name, paths, inside)
    return {split: [path if "://" not in name else found.unstrip_protocol(path) for path in some]
            for split, some in splits.items() if some}
