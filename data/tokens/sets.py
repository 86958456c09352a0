"""A data set that a run names, as token shards on this machine: text, which is prepared in the cache, or
shards.

    one = open_set(Source("texts/"))                  # ValueError: it cannot be opened
    one.problems(tokenizer, 128, pairs=False)         # what does not fit the settings, one line each
    parts = one.train(maker, ...)                     # {"train": part, "validation": what is held out}
    rows_of(parts["train"])

A part is where rows are: {"folder", "split", "size", "max_rows"}, plain values that can be saved.
"""

import copy
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from data.batches.rows import PackedRows
from data.documents.filters import Accounting, HoldOut
from data.documents.source import EVALUATED, Corpus, Source, evaluation_source, open_corpus
from data.tokens import importers
from data.tokens.cache import cache_folder, make_once
from data.tokens.encode import tokenizer_fingerprint
from data.tokens.preparation import Preparation, TokenMaker
from data.tokens.shards import MANIFEST, Shards, find_shards
from data.tokens.tokenizer import no_text
from utils.io.secrets import without_secrets
from utils.io.urls import Folder


def rows_of(part: dict) -> PackedRows:
    return Shards(part["folder"]).rows(part["split"], part["size"], part["max_rows"])


def is_whole(part: dict) -> bool:
    """Whether its files are there, by their checksums."""
    try:
        shards = Shards(part["folder"])
        tokens = part["max_rows"] * max(part["size"], shards.width)
        return not shards.check(shards.entries(part["split"], tokens))
    except (OSError, ValueError, KeyError):
        return False


def open_set(source: Source, trained: Iterable[Source] | None = None) -> "TextSet | ShardSet":
    """trained: for an evaluation set, the sources that are trained on. ValueError: it cannot be opened."""
    if shards := find_shards(source.dataset_name):
        return ShardSet(source, shards, evaluated=trained is not None)
    if kind := importers.kind_of(source.dataset_name):
        name = without_secrets(source.dataset_name)
        raise ValueError(f"dataset_name {name} holds token ids ({kind}): run `python -m data.convert {name} "
                         "tokens/ --tokenizer_name gpt2` once, with the tokenizer that made them, and name "
                         "tokens/ here.")
    return TextSet(source if trained is None else evaluation_source(source, trained))


class TextSet:
    """Anything that data/documents reads."""

    row_tokens = tokenizer_name = None

    def __init__(self, source: Source):
        self.corpus = open_corpus(source)
        self.name = self.corpus.name

    def validation(self) -> "TextSet | None":
        if self.corpus.source.split.startswith("train") and "validation" in self.corpus.splits:
            return TextSet(replace(self.corpus.source, split="validation"))

    def problems(self, tokenizer, T: int, pairs: bool) -> list[str]:
        return []

    def train(self, maker: TokenMaker, size: int, cache_dir, hold_out: HoldOut | None,
              evaluated: list[Corpus], max_rows: int) -> dict[str, dict]:
        """{"train": part}, with "validation" where documents are held out. Documents of the corpora
        `evaluated` are not trained on."""
        how = dict(hold_out=hold_out, evaluated=evaluated, max_rows=max_rows)
        return prepare_text(self.corpus, maker, size, cache_dir, **how)

    def evaluation(self, maker: TokenMaker, size: int, cache_dir) -> dict:
        return prepare_text(self.corpus, maker, size, cache_dir, split="validation")["validation"]


class ShardSet:
    """Token shards. evaluated: an evaluation set, of which the split that its name gives is used, else the
    first of EVALUATED that has a row."""

    corpus = None

    def __init__(self, source: Source, shards: Shards, evaluated: bool):
        self.shards, self.name, self.split = shards, shards.url, source.split
        self.row_tokens = shards.row_tokens
        self.tokenizer_name = f"{shards.folder.root}/tokenizer" if shards.folder.local else None
        if evaluated and source.split == "train":
            self.split = next((split for split in EVALUATED if split in shards.splits), "train")

    def validation(self) -> "ShardSet":
        own = copy.copy(self)
        own.split = "validation" if "validation" in self.shards.splits or self.split == "test" else "test"
        return own

    def problems(self, tokenizer, T: int, pairs: bool) -> list[str]:
        lines, shards, size = [], self.shards, self.row_tokens
        if pairs and not shards.pairs:
            lines.append("next_sentence: token shards have no sentences; name text or sentence pairs.")
        if shards.pairs and not pairs:
            lines.append(f"dataset_name: {self.name} holds sentence pairs: use train_mlm.py with "
                         "--next_sentence true.")
        if size and T != size:
            lines.append(f"block_size: {T}, but rows of {self.name} have {size} tokens: set --block_size "
                         f"{size}.")
        if self.split not in (have := shards.with_rows(T)):
            remedy = "lower block_size or name other data"
            remedy = remedy if self.split == "train" else "set eval_dataset_name"
            lines.append(f"{self.name} has no row of {size or T} tokens for {self.split}, only for "
                         f"{', '.join(have) or 'none'}: {remedy}.")
        if tokenizer is not None and shards.manifest["tokenizer"] != tokenizer_fingerprint(tokenizer):
            lines.append(f"tokenizer_name: not the tokenizer that made {self.name}: use "
                         f"{self.name}/tokenizer.")
        return lines

    def train(self, maker, size: int, cache_dir, hold_out, evaluated, max_rows: int) -> dict[str, dict]:
        return {"train": self._part(size, cache_dir, max_rows)}

    def evaluation(self, maker, size: int, cache_dir) -> dict:
        return self._part(size, cache_dir)

    def _part(self, size: int, cache_dir, max_rows: int = 0) -> dict:
        entries = self.shards.entries(self.split, max_rows * max(size, self.shards.width))
        local = self.shards.local(cache_dir, entries)
        return dict(folder=local.folder.root, split=self.split, size=size, max_rows=max_rows)


# ---- Text in the cache


def prepare_text(corpus: Corpus, maker: TokenMaker, size: int, cache_dir, split: str = "train",
                 hold_out: HoldOut | None = None, evaluated=(), max_rows: int = 0) -> dict[str, dict]:
    """{split: part} of a corpus, made by one process and kept in the cache.

    split: what the documents are for. max_rows: take the first rows of `size` tokens and read little more; 0:
    all. ValueError where a split gets no row; the folder made for it is deleted."""
    preparation = Preparation(None, {split: corpus}, maker, hold_out, evaluated, max_rows * size)
    folder = cache_folder(cache_dir, maker.cache, preparation.settings)
    preparation.folder = Folder(folder)
    made = make_once(folder, partial(_is_whole, folder), partial(_run, preparation, folder))
    shards = Shards(folder)
    for name in [split, *["validation"] * (hold_out is not None)]:
        if name not in shards.with_rows(size):
            if made:
                shutil.rmtree(folder, ignore_errors=True)
            raise ValueError(_no_row(shards, name, corpus, maker, size, hold_out))
    return {name: dict(folder=str(folder), split=name, size=size, max_rows=max_rows if name == split else 0)
            for name in shards.splits}


def _is_whole(folder: Path) -> bool:
    return (folder / MANIFEST).exists() and not _problem(folder)


def _problem(folder: Path) -> str:
    try:
        return Shards(folder).check()
    except ValueError as error:
        return str(error)


def _run(preparation: Preparation, folder: Path) -> None:
    if (folder / MANIFEST).exists():
        print(f"data       {_problem(folder)}: all of it is prepared again", flush=True)
        shutil.rmtree(folder)
    limit = f"; read only for the first {preparation.max_tokens:,} tokens" if preparation.max_tokens else ""
    for split, account in preparation.make()["accounting"].items():
        account = Accounting(**account)
        reached = split in preparation.corpora and account.tokens >= preparation.max_tokens
        print(f"data       {split}: {account.line()}{limit if reached else ''}", flush=True)
        if account.unreadable_names:
            print(f"data       not text: {', '.join(account.unreadable_names)}", flush=True)
        if account.evaluated > account.kept:
            print(f"data       {account.evaluated:,} of {account.read:,} documents are evaluated on and "
                  "therefore "
                  "not trained on", flush=True)


def _no_row(shards: Shards, split: str, corpus: Corpus, maker, size: int, hold_out: HoldOut | None) -> str:
    """Why a split has no row, and the remedy."""
    accounts = {name: Accounting(**account) for name, account in shards.manifest["accounting"].items()}
    account, train = accounts.get(split, Accounting()), accounts.get("train", Accounting())
    kept = f"{account.kept:,} documents"
    documents = f"the {split} split of {corpus.name}, column {corpus.text_column}, has {kept}"
    remedy = "lower block_size or take more text"
    if not train.kept + train.validation + train.evaluated + account.kept:
        return no_text(corpus, train if train.read else account)
    if maker.no_row:
        return f"next_sentence: {documents}, {maker.no_row}"
    if split == "train" and train.evaluated and not train.kept:
        remedy = "all of its documents are in the evaluation data: name other data to train or evaluate on"
    elif hold_out and train.kept + train.validation == 1 and train.tokens >= size:
        remedy = "one document cannot be split: name validation data, or cut it into several files"
    elif split == "validation" and hold_out:
        fraction = f"raise validation_fraction ({hold_out.fraction:.3g})"
        remedy = f"{fraction}, lower block_size or name validation data"
    return f"block_size {size}: {documents}, {account.tokens:,} tokens, not one whole row; {remedy}"
