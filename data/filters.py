"""Decides which documents are trained on (keywords, exact duplicates, validation split), and counts all."""

import hashlib
import sys
from array import array
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10  # of progress, where the output is not a terminal


@dataclass
class Accounting:
    """Counts of one preparation. read = unreadable + empty + filtered + duplicate + evaluated + validation +
    kept; kept duplicates count twice."""

    read: int = 0  # documents
    unreadable: int = 0  # not text: None, not a string, not UTF-8
    empty: int = 0  # nothing but white space
    filtered: int = 0  # without any of the keywords
    duplicate: int = 0  # same text as an earlier document, whether kept or not
    evaluated: int = 0  # same text as a document of the evaluation data
    validation: int = 0  # held out of this split: counted in the validation split's own account
    kept: int = 0
    bytes: int = 0  # UTF-8, of the kept documents
    tokens: int = 0  # with one EOS per document
    tokens_dropped: int = 0  # cut off from sentence pairs
    seconds: float = 0.0

    def hold_out(self, account: "Accounting", size: int) -> None:
        """Moves a kept document of `size` bytes to the validation split's account."""
        self.kept, self.validation, self.bytes = self.kept - 1, self.validation + 1, self.bytes - size
        account.read, account.kept, account.bytes = account.read + 1, account.kept + 1, account.bytes + size

    def __add__(self, other: "Accounting") -> "Accounting":
        return Accounting(**{name: round(n + getattr(other, name), 3) for name, n in asdict(self).items()})

    def line(self) -> str:
        """What is not 0, in one line."""
        words = [f"{self.kept:,} of {self.read:,} documents"]
        left_out = "unreadable", "empty", "filtered", "duplicate", "evaluated", "validation"
        words += [f"{value:,} {name}" for name in left_out if (value := getattr(self, name))]
        words += [f"{self.tokens:,} tokens"] if self.tokens else []
        words += [f"{self.tokens_dropped:,} of them dropped"] if self.tokens_dropped else []
        words += [f"{self.tokens / self.seconds:,.0f} tokens/s"] if self.tokens and self.seconds else []
        return ", ".join(words)


class SeenHashes:
    """A set of 64-bit numbers in sorted arrays, by their first 16 bits. One of ten million takes 12
    bytes, in a Python set about 80.

    At 100 million documents the chance that any two different texts share a hash is 3 in 10,000."""

    def __init__(self):
        self.sorted = defaultdict(partial(array, "Q"))

    def add(self, number: int) -> bool:
        """Returns False where it was there already."""
        if number in self:
            return False
        insort(self.sorted[number >> 48], number)
        return True

    def __contains__(self, number: int) -> bool:
        numbers = self.sorted.get(number >> 48, ())
        place = bisect_left(numbers, number)
        return place < len(numbers) and numbers[place] == number


def readable(rows: Iterable[dict], corpus, counts: Accounting) -> Iterator[tuple[dict, int, int]]:
    """(document, hash of its text, UTF-8 bytes) of the rows that are text and hold a keyword, where there are
    keywords. All rows are counted. ValueError where the text column is missing."""
    keywords, column = corpus.keywords, corpus.text_column
    for document in rows:
        counts.read += 1
        text = document.get(column)
        if column not in document and {"content", "text"} & document.keys():
            raise ValueError(f"{corpus.name}: document {counts.read:,} has no column {column!r}, but "
                             f"{', '.join(document)}: name files that have the same column, by a glob")
        if not isinstance(text, str):
            counts.unreadable += 1
        elif not text or text.isspace():
            counts.empty += 1
        elif keywords and not any(keyword in text for keyword in keywords):
            counts.filtered += 1
        else:
            try:
                data = text.encode()
            except UnicodeEncodeError:  # lone surrogates: JSON escapes, or bytes that were not UTF-8
                counts.unreadable += 1
                continue
            digest = hashlib.blake2b(data, digest_size=8).digest()
            yield document, int.from_bytes(digest, "little"), len(data)


def is_wanted(number: int, size: int, counts: Accounting, seen, evaluated, keep_duplicates: bool) -> bool:
    """Whether to train on a document with this hash and size: not if it is evaluated on, nor if it was seen
    before, unless duplicates are kept. Counts it and adds it to `seen`."""
    if number in evaluated:
        counts.evaluated += 1
        return False
    new = seen.add(number)
    counts.duplicate += not new
    if wanted := new or keep_duplicates:
        counts.kept += 1
        counts.bytes += size
    return wanted


def clean_documents(corpus, counts: Accounting, seen: SeenHashes | None = None) -> Iterator[dict]:
    """The documents of a Corpus to train on, in order. seen: hashes of earlier documents."""
    seen = SeenHashes() if seen is None else seen
    for document, number, size in readable(corpus.documents(), corpus, counts):
        if is_wanted(number, size, counts, seen, (), corpus.source.keep_duplicates):
            yield document


class Facts(NamedTuple):
    """What others need to know of a chunk."""

    read: int  # documents
    last: bool  # of its unit
    hashes: np.ndarray  # of its texts, uint64


class Chunk:
    """The documents of one chunk: (document, hash of its text, bytes) each. Where it ends depends on its own
    text alone, before duplicates are left out, so every machine cuts the same chunks."""

    def __init__(self, documents: Iterator[dict], corpus, max_bytes: int):
        self.documents, self.corpus, self.max_bytes = documents, corpus, max_bytes
        self.counts, self.hashes, self.size, self.last = Accounting(), array("Q"), 0, False

    def __iter__(self) -> Iterator[tuple[dict, int, int]]:
        documents = readable(self.documents, self.corpus, self.counts)
        while self.size < self.max_bytes and not self.last:
            if document := next(documents, None):
                self.hashes.append(document[1])
                self.size += document[2]
                yield document
            self.last = document is None

    def skip_rest(self) -> None:
        for _ in self:
            pass


def drawn_place(text: str, seed: int) -> float:
    """A number from 0 to 1, a function of (text, seed) alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little") / 2**64


def in_validation(text: str, seed: int, fraction: float) -> bool:
    """Whether a document belongs to the validation split. It then does at every larger fraction, too."""
    return drawn_place(text, seed) < fraction


def show_progress(documents: Iterable, what: str) -> Iterator:
    """The same documents, counted on stderr: by a bar, or by lines where stderr is not a terminal."""
    shown = {"bar_format": "{desc}: {n_fmt} documents, {rate_fmt}\n",
             "mininterval": SECONDS_BETWEEN_LINES, "miniters": 1, "delay": SECONDS_BETWEEN_LINES}
    if sys.stderr.isatty():
        shown = {"leave": False}
    yield from tqdm(documents, what, unit=" documents", **shown)
