"""Decides which documents are trained on (keywords, exact duplicates, hold-out), and counts the others."""

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
FEW = 1000  # documents; in fewer, the share with a low hash would vary too much
NAMED = 3  # unreadable documents that are named
REASONS = {  # {count of documents that are not used: its text in the printed line}
    "unreadable": "unreadable", "empty": "empty", "filtered": "without a keyword", "duplicate": "duplicate",
    "evaluated": "evaluated", "validation": "held out",
}


@dataclass
class Accounting:
    """Counts of a split: read = unreadable + empty + filtered + duplicate + evaluated + validation + used."""

    read: int = 0  # documents
    unreadable: int = 0  # not text: None, not a string, not UTF-8
    empty: int = 0  # only white space
    filtered: int = 0  # without any of the keywords
    duplicate: int = 0  # same text as an earlier document
    evaluated: int = 0  # same text as a document of the evaluation data
    validation: int = 0  # held out; counted again as read and used in the validation split
    used: int = 0
    bytes: int = 0  # UTF-8, of the used documents
    tokens: int = 0  # with one EOS per document
    tokens_dropped: int = 0  # of sentence pairs: cut off to fit into rows
    seconds: float = 0.0
    unreadable_names: list[str] = field(default_factory=list)  # of the first NAMED

    def record(self) -> dict:
        """The counts as in a manifest, which calls `used` "kept"."""
        return {"kept" if name == "used" else name: n for name, n in asdict(self).items()}

    @classmethod
    def from_record(cls, record: dict) -> "Accounting":
        return cls(**{"used" if name == "kept" else name: n for name, n in record.items()})

    def hold_out(self, validation: "Accounting", size: int) -> None:
        """Moves a used document of `size` bytes to the counts of the validation split."""
        self.used -= 1
        self.validation += 1
        self.bytes -= size
        validation.read += 1
        validation.used += 1
        validation.bytes += size

    def __add__(self, other: "Accounting") -> "Accounting":
        sums = {name: n + getattr(other, name) for name, n in asdict(self).items()}
        sums |= {"seconds": round(sums["seconds"], 3), "unreadable_names": sums["unreadable_names"][:NAMED]}
        return Accounting(**sums)

    def line(self) -> str:
        """The counts that are not 0, in one line."""
        counts = [f"{self.used:,} of {self.read:,} documents"]
        counts += [f"{n:,} {reason}" for name, reason in REASONS.items() if (n := getattr(self, name))]
        counts += [f"{self.tokens:,} tokens"] if self.tokens else []
        counts += [f"{self.tokens_dropped:,} of them dropped"] if self.tokens_dropped else []
        counts += [f"{self.tokens / self.seconds:,.0f} tokens/s"] if self.tokens and self.seconds else []
        return ", ".join(counts)


def filter_rows(rows: Iterable[dict], corpus: Corpus, counts: Accounting) -> Iterator[tuple[str, int, int]]:
    """(text, its hash, UTF-8 bytes) of each row that is text and contains a keyword, if there are keywords.
    Counts all rows. ValueError: a row lacks the text column.

    The hashes have 64 bits: among 100 million texts, any two share one with a probability of 3 in 10,000."""
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
            source = document.get("file") or text is not None and f"document {counts.read:,}"
            names, name = counts.unreadable_names, f"{source} ({_describe_value(text, column)})"
            if source and name not in names and len(names) < NAMED:
                names.append(name)
            continue
        if not text or text.isspace():
            counts.empty += 1
        elif keywords and not any(keyword in text for keyword in keywords):
            counts.filtered += 1
        else:
            hashed = hashlib.blake2b(data, digest_size=8).digest()
            yield text, int.from_bytes(hashed, "little"), len(data)


def _describe_value(value, column: str) -> str:
    """What a column holds instead of text."""
    if value is None or isinstance(value, str):
        return f"column {column}: null, or not UTF-8"
    kind = str(value) if type(value).__module__.startswith("pyarrow") else type(value).__name__
    return f"column {column}: {kind}"


def drop_seen(documents: Iterable[tuple], counts: Accounting, seen: set[int], evaluated=()) -> Iterator:
    """Drops documents whose hash is in `evaluated` or `seen`, and adds the hashes of the others to `seen`."""
    for text, number, size in documents:
        if number in evaluated:
            counts.evaluated += 1
        elif number in seen:
            counts.duplicate += 1
        else:
            seen.add(number)
            counts.used += 1
            counts.bytes += size
            yield text, number, size


def clean_documents(corpus: Corpus, counts: Accounting) -> Iterator[tuple[str, int, int]]:
    """(text, its hash, UTF-8 bytes) of the documents of a corpus in order, filtered, without duplicates."""
    return drop_seen(filter_rows(corpus.documents(), corpus, counts), counts, set())


# ---- Hold-out


@dataclass(frozen=True)
class HoldOut:
    """Chooses the validation documents of all datasets of a run: those with hash_fraction below `fraction`,
    and those whose hash is in `hashes`. The choice depends on content alone, not on seed or order."""

    fraction: float
    hashes: frozenset[int] = frozenset()

    def __call__(self, text: str, number: int) -> bool:
        """Whether to hold out the document with this text and hash."""
        return number in self.hashes or hash_fraction(text) < self.fraction

    @property
    def settings(self) -> list:
        return [self.fraction, sorted(self.hashes)]

    def select(self, corpus: Corpus) -> Corpus:
        """The documents of a corpus that are held out."""

        def read_held_out():
            for text, number, _ in clean_documents(corpus, Accounting()):
                if self(text, number):
                    yield {corpus.text_column: text}

        fingerprint = digest(corpus.fingerprint, corpus.keywords, self.settings)
        return replace(corpus, units=[read_held_out], fingerprint=fingerprint)


def hash_fraction(text: str) -> float:
    """A hash of the text as a number from 0 to 1."""
    hashed = hashlib.blake2b(text.encode(), digest_size=8, key=b"validation").digest()
    return int.from_bytes(hashed, "little") / 2**64


def choose_hold_out(corpus: Corpus, fraction: float, min_chars: int, min_documents: int,
                    max_chars: float = float("inf")) -> HoldOut:
    """The HoldOut of one corpus. With FEW documents or more it has `fraction` alone. Of fewer it takes that
    fraction, rounded up, or as many as have min_chars in min_documents, but at most half. max_chars: how much
    text the run will read; later documents are held out by `fraction`."""
    documents, complete = [], True  # (hash_fraction, characters, hash) of each
    for text, number, _ in clean_documents(corpus, Accounting()):
        documents.append((hash_fraction(text), len(text), number))
        max_chars -= len(text)
        if len(documents) == FEW:
            return HoldOut(fraction)
        if max_chars <= 0 and len(documents) > 1:
            complete = False
            break
    documents.sort()
    share = sum(place < fraction for place, *_ in documents)
    if complete:
        share = min(math.ceil(round(fraction * len(documents), 9)), max(len(documents) - 1, 0))
    sums = itertools.accumulate(characters for _, characters, _ in documents)
    enough = min(max(min_documents, 1 + sum(total < min_chars for total in sums)), len(documents) // 2)
    if enough > share:
        print(f"data       validation_fraction {fraction:g} of the {len(documents)} documents of "
              f"{corpus.name} is less than a row; {enough} are held out instead", flush=True)
    hashes = frozenset(number for *_, number in documents[: max(share, enough)])
    return HoldOut(0.0 if complete else fraction, hashes)


def show_progress(documents: Iterable, description: str) -> Iterator:
    """Yields the same documents and counts them on stderr: with a bar in a terminal, else with lines."""
    options = {"leave": False} if sys.stderr.isatty() else {
        "bar_format": "{desc}: {n_fmt} documents, {rate_fmt}\n",
        "mininterval": SECONDS_BETWEEN_LINES, "miniters": 1, "delay": SECONDS_BETWEEN_LINES}
    yield from tqdm(documents, description, unit=" documents", **options)
