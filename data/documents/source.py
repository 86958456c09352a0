"""Opens a source of text: installed Python packages, files, a Hub dataset or a save_to_disk folder.

    corpus = open_corpus(Source("installed-python"))  # or "user/name", "texts/*.jsonl", "s3://bucket/texts"
    for document in corpus.documents():
        document[corpus.text_column]                  # str; any other type is counted as unreadable

Readers are installed.py, files.py and library.py (the datasets library). A name may end in ":" and a split,
written as in that library: "texts/:test", "user/name:train[:1%]".
"""

import argparse
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from data.documents import files, installed
from data.documents.names import SUFFIXES, digest, is_files, is_saved
from utils.io.text import without_secrets
from utils.io.urls import explained

SLICE = r"[a-zA-Z]\w*(?:\[-?\d*%?:-?\d*%?\])?"  # train[:1%]
WITH_SPLIT = re.compile(rf"(.+):({SLICE}(?:\+{SLICE})*)")
TITLE = re.compile(r" ?= [^=\n]+ = ?\r?\n?\Z")  # " = Title = "; headings inside an article have more "="
EVALUATED = ("validation", "test", "train")  # splits to evaluate on: the first that the source has
Unit = Callable[[], Iterable[dict]]  # reads the rows of a part of the source, usually a file


@dataclass
class Source:
    """What to read. A split at the end of the name is cut off, and replaces `split` if that is "train"."""

    dataset_name: str  # installed-python, installed-docs, a file, folder, glob or URL, a Hub id
    dataset_config_name: str | None = None
    split: str = "train"
    text_column: str | None = None  # None: content or text
    keywords: tuple[str, ...] = ()  # use only documents that contain one of these; (): all
    streaming: bool = False  # read a Hub dataset over the network, without downloading it first
    divide: bool = True  # divide a single text file into documents, so that some can be held out

    def __post_init__(self):
        match = WITH_SPLIT.fullmatch(self.dataset_name)
        if match and not os.path.exists(self.dataset_name):
            self.dataset_name = match[1]
            self.split = match[2] if self.split == "train" else self.split
        self.dataset_name = os.path.expanduser(self.dataset_name)

    @property
    def name(self) -> str:
        """Its name for messages, without credentials."""
        return without_secrets(self.dataset_name)


@dataclass
class Corpus:
    """A re-iterable stream of documents in a fixed order."""

    source: Source
    text_column: str
    fingerprint: str  # part of cache keys; changes if the documents may have changed
    units: list[Unit]
    splits: Collection[str] = ("train",)  # all splits of the source

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def keywords(self) -> list[str]:
        return sorted(set(self.source.keywords))

    def documents(self, unit: int | None = None) -> Iterator[dict]:
        """The documents of all units, or of one, each as {column: value}."""
        return read_units(self.units if unit is None else [self.units[unit]])

    __iter__ = documents


def read_units(units: list[Unit]) -> Iterator[dict]:
    return itertools.chain.from_iterable(unit() for unit in units)


def open_corpus(source: Source, evaluate: bool = False) -> Corpus:
    """Opens a source and reads its first rows. ValueError, with the remedy, if it cannot be read.

    evaluate: if the split is train, use the first of EVALUATED that the source has."""
    splits, local = splits_of(source), is_local(source)
    if evaluate and source.split == "train":
        source = replace(source, split=next((split for split in EVALUATED if split in splits), "train"))
    name, split = source.name, source.split
    parts = re.sub(r"\[.*?\]", "", split).split("+")
    if missing := {*parts} - {*splits}:
        raise ValueError(f"dataset_name {name!r} has no split {min(missing)!r}, only "
                         f"{', '.join(splits)}; name one of them: {name}:{[*splits][0]}")
    if [split] != parts and local:
        raise ValueError(f"dataset_name {name!r}: only datasets of the Hub have parts and sums of splits "
                         f"such as {split!r}; name one split, or fewer files")
    if source.dataset_config_name and local:
        raise ValueError(f"dataset_config_name: {source.dataset_config_name} is for a dataset of the Hub, "
                         f"not for {name}; leave it out (with a preset give `none`)")
    fingerprint, units = _find_reader(source).open_units(source)
    column, wikitext = _choose_text_column(source, units)
    if wikitext:
        units = [partial(read_articles, partial(read_units, units))]
    fingerprint = digest(fingerprint, column, sorted(set(source.keywords)))
    return Corpus(source, column, fingerprint, units, splits)


def _choose_text_column(source: Source, units: list[Unit]) -> tuple[str, bool]:
    """(text column, whether each row is a line of WikiText), as the first rows show."""
    name, setting = source.name, source.text_column
    candidates = [setting] if setting else ["content", "text"]
    has_text, text = {}, ""  # has_text: {column: whether a row has a string in it}
    with explained(f"dataset_name {name!r}", "read", (OSError,)):
        for row in itertools.islice(read_units(units), 100):
            for column, value in row.items():
                has_text[column] = has_text.get(column, False) or isinstance(value, str)
            texts = (row[column] for column in candidates if isinstance(row.get(column), str))
            if text := next((text for text in texts if text.strip()), ""):
                break
    if setting != "file":  # files.py adds this column to rows without text
        has_text.pop("file", None)
    if not has_text:
        raise ValueError(f"dataset_name {name!r} holds no readable documents: it has no valid rows")
    present = [column for column in candidates if column in has_text]
    if not present and "input_ids" in has_text:
        raise ValueError(f"dataset_name {name} holds token ids: run `python -m data.convert {name} tokens/ "
                         "--tokenizer_name ...` once, and name tokens/ here.")
    if not present:
        lacks = f"no column {setting!r}" if setting else "no column content or text"
        raise ValueError(f"{name} has {lacks}; choose --text_column from: {', '.join(has_text)}")
    column = next((column for column in present if has_text[column]), present[0])
    if len(present) > 1:
        other = present[1 - present.index(column)]
        print(f"data       {name}: reads column {column}; to read {other}: --text_column {other}", flush=True)
    return column, [*has_text] == ["text"] and bool(TITLE.match(text))


def read_articles(read_lines: Unit) -> Iterator[dict]:
    """Joins rows, each a line of WikiText, into articles, which begin with a title after a blank line. A row
    without text becomes a document of its own, which is counted as unreadable."""
    article, blank = [], True
    for line in (row.get("text") for row in read_lines()):
        if not isinstance(line, str):
            yield {"text": None}
            continue
        if blank and TITLE.match(line) and "".join(article).strip():
            yield {"text": "".join(article)}
            article = []
        blank = not line.strip()
        article.append(line if line.endswith("\n") else line + "\n")
    if article:
        yield {"text": "".join(article)}


def splits_of(source: Source) -> Collection[str]:
    """The names of its splits. ValueError: there is no such source."""
    return _find_reader(source).splits(source)


def is_local(source: Source) -> bool:
    """False for a dataset of the Hub: only these have configurations."""
    return _find_reader(source) in (files, installed) or is_saved(source.dataset_name)


def set_configuration(config: str, sources: list[Source]) -> None:
    """Gives the configuration to the only dataset of the Hub, or to those of several that have it. If none
    has it, all of them get it, or all sources if none is of the Hub, so that opening them fails."""
    chosen = remote = [source for source in sources if not is_local(source)]
    if len({source.dataset_name for source in remote}) > 1:
        from data.documents import library

        chosen = [source for source in remote if config in library.configurations(source)]
    for source in chosen or remote or sources:
        source.dataset_config_name = config


def by_short_names(sources: list[Source]) -> dict[str, Source]:
    """The sources by their names in the log: "" for a single one, else the ends of their paths."""
    if len(sources) == 1:
        return {"": sources[0]}
    named, endings = {}, "|".join(map(re.escape, SUFFIXES))
    for source in sources:
        parts = [part for part in re.split(r"[/\\]", source.name) if part and not set(part) & set("*?[:")]
        stem = re.sub(rf"({endings})?(\.(gz|bz2|xz|zst))?$", "", (parts or [source.name])[-1])
        while stem in named:
            stem += "-2"
        named[stem] = source
    return named


def _find_reader(source: Source):
    """The module that reads this source. Each has splits(source) and open_units(source)."""
    if source.dataset_name in installed.INSTALLED:
        return installed
    if is_files(source.dataset_name):
        return files
    from data.documents import library  # not at the top: datasets takes 85 MB and half a second

    return library


def add_source_flags(add: Callable) -> None:
    """Adds the flags that source_of reads. add: add_argument of the parser."""
    add("--dataset_name", default="installed-python",
        help="Hub id (streamed), files, folder, installed-python, ...")
    add("--streaming", nargs="?", const="true", type=_always_streams, help=argparse.SUPPRESS)
    add("--dataset_config_name")
    add("--split", default="train", help="default: train")
    add("--text_column", help="default: content or text, whichever the source has")
    add("--keywords", nargs="*", default=[], help="keep documents that contain one of these (default: all)")


def _always_streams(value: str):
    raise argparse.ArgumentTypeError("leave it out: datasets of the Hub are always streamed here")


def source_of(args) -> Source:
    """The source that these flags name. A dataset of the Hub is streamed."""
    return Source(args.dataset_name, args.dataset_config_name, args.split, args.text_column,
                  tuple(args.keywords), streaming=True)


def check_numbers(args, **least: float) -> list[str]:
    """An error message for each argument that is below its `least` value, 2**63 or more, or no number."""
    return [f"{name}: must be {low:g} or greater, and less than 2**63, is {value}."
            for name, low in least.items() if not low <= (value := getattr(args, name)) < 2**63]
