"""Where text comes from: the Python on this machine, the Hub, local or remote files, a save_to_disk folder.

    corpus = load_corpus(Source("installed-python"))  # or "user/name", "texts/*.jsonl", "s3://bucket/texts"
    for document in corpus:
        document[corpus.text_column]                  # str, or None where it could not be read as text

installed.py, files.py and library.py say how their content becomes documents. Where rows are lines of text
and the first is a heading " = Title = " (WikiText), the lines of one article make one document. After a name
":" and a split as the datasets library spells it: "user/name:train[:1%]", "texts/:train[:1000]+test[10:20]".
"""

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from data.sources import files, installed
from utils.io.retry import retried
from utils.io.secrets import without_secrets
from utils.io.urls import explained

PART = r"[a-zA-Z]\w*(?:\[-?\d*%?:-?\d*%?\])?"
WITH_SPLIT = re.compile(rf"(.+):({PART}(?:\+{PART})*)")


@dataclass(frozen=True)
class Source:
    """What to read and how. It travels whole, from the settings of a run to its rows."""

    dataset_name: str  # installed-python, installed-docs, a file, folder, glob or URL, a Hub id
    dataset_config_name: str | None = None
    split: str = "train"
    text_column: str | None = None  # None: content or text
    keywords: tuple[str, ...] = ()  # documents must hold one; (): all
    streaming: bool = False  # read a Hub data set while it downloads
    keep_duplicates: bool = False  # documents with the text of an earlier one


@dataclass
class Corpus:
    """A re-iterable stream of documents in a fixed order. It pickles."""

    source: Source
    text_column: str
    fingerprint: str  # changes when the documents may have changed; part of cache keys
    rows: Callable[[], Iterable[dict]]  # all of them
    pieces: list[Callable[[], Iterable[dict]]] = field(default_factory=list)  # in turn; none: rows

    @property
    def name(self) -> str:
        return without_secrets(self.source.dataset_name)

    @property
    def keywords(self) -> list[str]:
        return sorted(set(self.source.keywords))

    @property
    def units(self) -> int:
        """What can be read apart from the rest, on another machine: files, usually."""
        return len(self.pieces) or 1

    def documents(self, start: int = 0, unit: int | None = None) -> Iterator[dict]:
        """One dict of columns per document, of all or of one unit, from number `start` on (those before are
        read, too); the text is None where it could not be read. The source is opened again when it fails for
        a passing reason."""
        rows = self.rows if unit is None or not self.pieces else self.pieces[unit]
        return retried(lambda n: itertools.islice(rows(), n, None), f"reading {self.name}", start)

    __iter__ = documents


def add_source_flags(add: Callable) -> None:
    """The flags of a tool that reads a source; add: add_argument of its parser."""
    add("--dataset_name", default="installed-python", help="Hub id, files, folder, installed-python, ...")
    add("--dataset_config_name")
    add("--split", default="train", help="default: train")
    add("--text_column", help="default: content or text, whichever the source has")
    add("--keep_duplicates", action="store_true", help="also documents with the text of an earlier one")
    add("--keywords", nargs="*", default=[], help="keep documents that contain one of these (default: all)")


def source_of(args, streaming: bool) -> Source:
    """What those flags name."""
    named = args.dataset_name, args.dataset_config_name, args.split, args.text_column
    return Source(*named, tuple(args.keywords), streaming, args.keep_duplicates)


def check_numbers(args, **least: float) -> list[str]:
    """A line for each of these numbers that is too small, too large or none at all."""
    return [f"{name}: must be {low:g} or greater, and less than 2**63, is {value}."
            for name, low in least.items() if not low <= (value := getattr(args, name)) < 2**63]


def load_corpus(source: Source) -> Corpus:
    """Open a source of text; only its beginning is read. ValueError, with the remedy, where it cannot be."""
    source = with_split(source)
    name, split = source.dataset_name, source.split
    if not has_split(source, split):
        raise ValueError(f"dataset_name {name!r} has no split {split!r}; name another data set or split")
    fingerprint, pieces = _open(source)
    rows = partial(_all_rows, pieces)
    columns, column, first_text = _columns(source, rows)
    if columns == ["text"] and isinstance(first_text, str) and files.TITLE.match(first_text):
        rows, pieces = partial(_article_rows, rows), []
    what = fingerprint, column, sorted(set(source.keywords)), source.keep_duplicates
    return Corpus(source, column, files.digest(*what), rows, pieces if len(pieces) > 1 else [])


def evaluation_source(source: Source, trained: Iterable[Source]) -> Source:
    """An evaluation set. It has the configuration that training uses of the same data set. Without a split in
    its name it is the split train, or where there is none, validation or test."""
    named = with_split(source)
    configs = (other.dataset_config_name for other in map(with_split, trained)
               if other.dataset_name == named.dataset_name)
    named = replace(named, dataset_config_name=next(configs, source.dataset_config_name))
    splits = ("train", "validation", "test") if named.split == "train" else (named.split,)
    return replace(named, split=next((s for s in splits if has_split(named, s)), splits[0]))


def has_split(source: Source, split: str) -> bool:
    """Whether load_corpus finds this split; ValueError where the source itself is not found."""
    source = with_split(source)
    return all(_reader(source).has_split(source, name) for name in _names(split))


def with_split(source: Source) -> Source:
    """The split that stands in the name at its place, where no other is asked for."""
    found = WITH_SPLIT.fullmatch(source.dataset_name)
    if not found or os.path.exists(source.dataset_name):
        return source
    return replace(source, dataset_name=found[1], split=found[2] if source.split == "train" else source.split)


def _open(source: Source):
    """(fingerprint, units). Of parts of splits only their rows are read; all are counted, by reading them,
    for shares and for places from the end. A Hub data set that does not stream has parts itself."""
    open_units, split, names = _reader(source).open_units, source.split, _names(source.split)
    hub = _reader(source) not in (files, installed) and not files.is_saved(source.dataset_name)
    if [split] == names or hub and not source.streaming:
        return open_units(source)
    from datasets import ReadInstruction

    opened = {name: open_units(replace(source, split=name)) for name in names}
    rows = {name: partial(_all_rows, units) for name, (_, units) in opened.items()}
    counted = re.search("[%-]", split)
    sizes = {name: sum(1 for _ in rows[name]()) if counted else sys.maxsize for name in names}
    parts = [(rows[part.splitname], part.from_, part.to)
             for part in ReadInstruction.from_spec(split).to_absolute(sizes)]
    return files.digest(split, [fingerprint for fingerprint, _ in opened.values()]), [partial(_parts, parts)]


def _all_rows(units) -> Iterator[dict]:
    return itertools.chain.from_iterable(unit() for unit in units)


def _names(split: str) -> list[str]:
    """The splits that "train[:1%]+test" takes parts of."""
    return re.sub(r"\[.*?\]", "", split).split("+")


def _parts(parts) -> Iterator[dict]:
    for rows, start, stop in parts:
        yield from itertools.islice(rows(), start, max(start, stop))


def _reader(source: Source):
    """The module for this kind of source. It offers has_split, and open_units: (fingerprint, [unit]), where
    each unit() gives rows that can be read apart from the others, and all give them in order."""
    if source.dataset_name in installed.INSTALLED:
        return installed
    if files.is_files(source.dataset_name):
        return files
    from data.sources import library  # not at the top: datasets takes 85 MB and half a second

    return library


def _columns(source: Source, rows) -> tuple[list[str], str, str | None]:
    """The columns of the first rows, the one that holds the text, and the text of the last row looked at."""
    name, asked = source.dataset_name, source.text_column
    columns, text, wanted = {}, None, [asked] if asked else ["content", "text"]
    with explained(f"dataset_name {name!r}", "read", (OSError,)):
        for row in itertools.islice(rows(), 100):
            columns.update(dict.fromkeys(row))
            text = row.get("text")
            if set(wanted) & set(columns) and (len(columns) > 1 or isinstance(text, str) and text.strip()):
                break
    found = next((column for column in wanted if column in columns), None)
    if not columns:
        raise ValueError(f"dataset_name {name!r} holds no readable documents; name a source that has some")
    if found is None:
        has = f"no column {asked!r}" if asked else "neither a column content nor text"
        raise ValueError(f"{name} has {has}; give --text_column one that holds text: {', '.join(columns)}")
    return list(columns), found, text


def _article_rows(rows) -> Iterator[dict]:
    return files.articles(row.get("text") for row in rows())
