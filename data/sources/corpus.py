"""Where text comes from: the Python on this machine, the Hub, local or remote files, a save_to_disk folder.

    corpus = load_corpus(Source("installed-python"))  # or "user/name", "texts/*.jsonl", "s3://bucket/texts"
    for document in corpus:
        document[corpus.text_column]                  # str, or None where it could not be read as text

installed.py, files.py and library.py say how their content becomes documents. Where rows are lines of text
and the first is a heading " = Title = " (WikiText), the lines of one article make one document.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from data.sources import files, installed
from data.sources.storage import explained, printable, retried


@dataclass(frozen=True)
class Source:
    """What to read and how. It travels whole, from the settings of a run to its rows."""

    dataset_name: str  # installed-python, installed-docs, a file, folder, glob or URL, a Hub id
    dataset_config_name: str | None = None
    split: str = "train"
    text_column: str | None = None  # None: content or text
    keywords: tuple[str, ...] = ()  # documents must hold one; (): all
    streaming: bool = False  # read a Hub data set while it downloads


@dataclass
class Corpus:
    """A re-iterable stream of documents in a fixed order. It pickles, for dataloader workers."""

    source: Source
    text_column: str
    fingerprint: str  # changes when the content may have changed; part of cache keys
    columns: list[str]
    rows: Callable[[], Iterable[dict]]

    @property
    def name(self) -> str:
        return printable(self.source.dataset_name)

    @property
    def keywords(self) -> list[str]:
        return sorted(set(self.source.keywords))

    def documents(self, start: int = 0) -> Iterator[dict]:
        """One dict of columns per document, from number `start` on (those before are read, too); the text is
        None where it could not be read. The source is opened again when it fails for a passing reason."""
        return retried(lambda n: itertools.islice(self.rows(), n, None), f"reading {self.name}", start)

    __iter__ = documents


def add_source_flags(add: Callable) -> None:
    """The flags of a tool that reads a source; add: add_argument of its parser."""
    add("--dataset_name", default="installed-python", help="Hub id, files, folder, installed-python, ...")
    add("--dataset_config_name")
    add("--split", default="train", help="default: train")
    add("--text_column", help="default: content or text, whichever the source has")
    add("--keywords", nargs="*", default=[], help="keep documents that contain one of these (default: all)")


def source_of(args, streaming: bool) -> Source:
    """What those flags name."""
    named = args.dataset_name, args.dataset_config_name, args.split, args.text_column
    return Source(*named, tuple(args.keywords), streaming)


def check_numbers(args, **least: float) -> list[str]:
    """A line for each of these numbers that is too small, too large or none at all."""
    return [f"{name}: must be {low:g} or greater, and less than 2**63, is {value}."
            for name, low in least.items() if not low <= (value := getattr(args, name)) < 2**63]


def load_corpus(source: Source) -> Corpus:
    """Open a source of text; only its beginning is read. ValueError, with the remedy, where it cannot be."""
    name, split = source.dataset_name, source.split
    if not has_split(source, split):
        raise ValueError(f"dataset_name {name!r} has no split {split!r}; name another data set or split")
    fingerprint, rows = _reader(source).open_rows(source)
    columns, column, first_text = _columns(source, rows)
    if columns == ["text"] and isinstance(first_text, str) and files.TITLE.match(first_text):
        rows = partial(_article_rows, rows)
    return Corpus(source, column, fingerprint, columns, rows)


def has_split(source: Source, split: str) -> bool:
    """Whether load_corpus finds this split; ValueError where the source itself is not found."""
    return _reader(source).has_split(source, split)


def _reader(source: Source):
    """The module for this kind of source. It offers has_split, and open_rows: (fingerprint, rows())."""
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
        raise ValueError(f"{name} has {has}; give --text_column one of its columns: {', '.join(columns)}")
    return list(columns), found, text


def _article_rows(rows) -> Iterator[dict]:
    return files.articles(row.get("text") for row in rows())
