"""Decides which documents are trained on (keywords, exact duplicates, hold-out), and counts all."""

import hashlib
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace

from tqdm import tqdm

from data.documents.names import digest
from data.documents.source import Corpus

SECONDS_BETWEEN_LINES = 10  # of progress, where the output is not a terminal
FEW = 1000  # documents: of fewer the share that is held out would be left too much to chance
NAMED = 3  # unreadable documents


@dataclass
class Accounting:
    """Counts of one preparation. read = unreadable + empty + filtered + duplicate + evaluated + validation +
    kept."""

    read: int = 0  # documents
    unreadable: int = 0  # not text: None, not a string, not UTF-8
    empty: int = 0  # nothing but white space
    filtered: int = 0  # without any of the keywords
    duplicate: int = 0  # same text as an earlier document
    evaluated: int = 0  # same text as a document of the evaluation data
    validation: int = 0  # held out of this split: counted in the validation split's own account
    kept: int = 0
    bytes: int = 0  # UTF-8, of the kept documents
    tokens: int = 0  # with one EOS per document
    tokens_dropped: int = 0  # cut off from sentence pairs
    seconds: float = 0.0
    unreadable_names: list[str] = field(default_factory=list)  # of the first NAMED

    def hold_out(self, account: "Accounting", size: int) -> None:
        """Moves a kept document of `size` bytes to the validation split's account."""
        self.kept, self.validation, self.bytes = self.kept - 1, self.validation + 1, self.bytes - size
        account.read, account.kept, account.bytes = account.read + 1, account.kept + 1, account.bytes + size

    def __add__(self, other: "Accounting") -> "Accounting":
        sums = {name: n + getattr(other, name) for name, n in asdict(self).items()}
        sums |= {"seconds": round(sums["seconds"], 3), "unreadable_names": sums["unreadable_names"][:NAMED]}
        return Accounting(**sums)

    def line(self) -> str:
        """What is not 0, in one line."""
        words = [f"{self.kept:,} of {self.read:,} documents"]
        left_out = "unreadable", "empty", "filtered", "duplicate", "evaluated", "validation"
        words += [f"{value:,} {name}" for name in left_out if (value := getattr(self, name))]
        words += [f"{self.tokens:,} tokens"] if self.tokens else []
        words += [f"{self.tokens_dropped:,} of them dropped"] if self.tokens_dropped else []
        words += [f"{self.tokens / self.seconds:,.0f} tokens/s"] if self.tokens and self.seconds else []
        return ", ".join(words)


def readable(rows: Iterable[dict], corpus: Corpus, counts: Accounting) -> Iterator[tuple[str, int, int]]:
    """(text, its hash, UTF-8 bytes) of the rows that are text and hold a keyword, where there are keywords.
    All rows are counted. ValueError where the text column is missing.

    At 100 million documents the chance that any two different texts share a hash is 3 in 10,000."""
    keywords, column = corpus.keywords, corpus.text_column
    for document in rows:
        counts.read += 1
        text = document.get(column)
        if column not in document and {"content", "text"} & document.keys():
            raise ValueError(f"{corpus.name}: document {counts.read:,} has no column {column!r}, but "
                             f"{', '.join(document)}: name files that have the same column, by a glob")
        try:
            data = text.encode()
        except (AttributeError, UnicodeEncodeError):  # no string; lone surrogates, as JSON can escape them
            counts.unreadable += 1
            where = document.get("file") or text is not None and f"document {counts.read:,}"
            names, named = counts.unreadable_names, f"{where} ({_described(text, column)})"
            if where and named not in names and len(names) < NAMED:
                names.append(named)
            continue
        if not text or text.isspace():
            counts.empty += 1
        elif keywords and not any(keyword in text for keyword in keywords):
            counts.filtered += 1
        else:
            hashed = hashlib.blake2b(data, digest_size=8).digest()
            yield text, int.from_bytes(hashed, "little"), len(data)


def _described(value, column: str) -> str:
    """What a column holds instead of text."""
    if value is None or isinstance(value, str):
        return f"column {column}: null, or not UTF-8"
    kind = str(value) if type(value).__module__.startswith("pyarrow") else type(value).__name__
    return f"column {column}: {kind}"


def trainable(documents: Iterable[tuple], counts: Accounting, seen: set[int], evaluated=()) -> Iterator:
    """Those of `readable` to train on: not evaluated on, nor seen before. `seen` gets their hashes."""
    for text, number, size in documents:
        if number in evaluated:
            counts.evaluated += 1
        elif number in seen:
            counts.duplicate += 1
        else:
            seen.add(number)
            counts.kept += 1
            counts.bytes += size
            yield text, number, size


def clean_documents(corpus: Corpus, counts: Accounting) -> Iterator[tuple[str, int, int]]:
    """(text, its hash, bytes) of each document of a corpus to train on, in order."""
    return trainable(readable(corpus.documents(), corpus, counts), counts, set())


# ---- Hold-out


@dataclass(frozen=True)
class HoldOut:
    """Which documents are for validation, in all data sets of a run: those whose content draws a place below
    `fraction`, and those in `more`, by their hashes. Fixed before the first row is made, the same for every
    seed."""

    fraction: float
    more: frozenset[int] = frozenset()

    def __call__(self, text: str, number: int) -> bool:
        return number in self.more or drawn_place(text) < self.fraction

    @property
    def settings(self) -> list:
        return [self.fraction, sorted(self.more)]

    def corpus(self, corpus: Corpus) -> Corpus:
        """The documents of a corpus that are held out."""

        def read_held_out():
            for text, number, _ in clean_documents(corpus, Accounting()):
                if self(text, number):
                    yield {corpus.text_column: text}

        fingerprint = digest(corpus.fingerprint, corpus.keywords, self.settings)
        return replace(corpus, units=[read_held_out], fingerprint=fingerprint)


def drawn_place(text: str) -> float:
    """A number from 0 to 1, a function of the text alone."""
    drawn = hashlib.blake2b(text.encode(), digest_size=8, key=b"validation").digest()
    return int.from_bytes(drawn, "little") / 2**64


def hold_out_of(corpus: Corpus, fraction: float, size: int, least: int,
                unread: float = float("inf")) -> HoldOut:
    """The rule for one corpus. Of FEW documents and more: all places below `fraction`. Of fewer documents,
    which are all counted: exactly `fraction` of them, rounded up, or more until these have `size` characters
    in `least` documents, at most half. unread: characters that will be read; what follows is not counted."""
    drawn, counted = [], True  # (place, characters, hash) of each document
    for text, number, _ in clean_documents(corpus, Accounting()):
        drawn.append((drawn_place(text), len(text), number))
        unread -= len(text)
        if len(drawn) == FEW:
            return HoldOut(fraction)
        if unread <= 0 and len(drawn) > 1:
            counted = False
            break
    drawn.sort()
    share = sum(place < fraction for place, *_ in drawn)
    if counted:
        share = min(math.ceil(round(fraction * len(drawn), 9)), max(len(drawn) - 1, 0))
    sums = itertools.accumulate(characters for _, characters, _ in drawn)
    enough = min(max(least, 1 + sum(total < size for total in sums)), len(drawn) // 2)
    if enough > share:
        print(f"data       validation_fraction {fraction:g} of the {len(drawn)} documents of {corpus.name} "
              f"fills no row; {enough} held out instead", flush=True)
    lowest = frozenset(number for *_, number in drawn[: max(share, enough)])
    return HoldOut(0.0 if counted else fraction, lowest)


def show_progress(documents: Iterable, what: str) -> Iterator:
    """The same documents, counted on stderr: by a bar, or by lines where stderr is not a terminal."""
    shown = {"bar_format": "{desc}: {n_fmt} documents, {rate_fmt}\n",
             "mininterval": SECONDS_BETWEEN_LINES, "miniters": 1, "delay": SECONDS_BETWEEN_LINES}
    if sys.stderr.isatty():
        shown = {"leave": False}
    yield from tqdm(documents, what, unit=" documents", **shown)
