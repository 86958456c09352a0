"""A data set that a run names, as token shards on this machine: text, which is prepared in the cache, or
shards.

    one = open_set(Source("texts/"))                  # ValueError: it cannot be opened
    parts = one.parts(maker, 128, "cache")            # {"train": part}
    rows_of(parts["train"])

A part is where rows are: {"folder", "split", "size", "max_rows"}, plain values that can be saved.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from data.batches.rows import PackedRows
from data.documents.filters import Accounting, HoldOut
from data.documents.source import EVALUATED, Corpus, Source, evaluation_source, open_corpus
from data.tokens.cache import cache_path
from data.tokens.encode import TokenMaker, tokenizer_fingerprint
from data.tokens.preparation import Preparation
from data.tokens.shards import MANIFEST, Shards, find_shards
from data.tokens.tokenizer import no_text
from utils.io.urls import Folder


def rows_of(part: dict) -> PackedRows:
    return Shards(part["folder"]).rows(part["split"], part["size"], part["max_rows"])


@dataclass
class DataSet:
    """Documents of a corpus, or token shards, of which one split is used; the other of the two is None."""

    name: str
    corpus: Corpus | None = None
    shards: Shards | None = None
    split: str = "train"  # of the shards

    def validation(self) -> "DataSet | None":
        """What it has to be evaluated on; shards that have none are named in `misfits`."""
        if self.shards:
            own = "validation" if "validation" in self.shards.splits or self.split == "test" else "test"
            return replace(self, split=own)
        if self.corpus.source.split.startswith("train") and "validation" in self.corpus.splits:
            return replace(self, corpus=open_corpus(replace(self.corpus.source, split="validation")))

    def misfits(self, tokenizer, T: int, pairs: bool) -> list[str]:
        """What of shards does not fit the settings, one line each."""
        if not (shards := self.shards):
            return []
        lines, size, have = [], shards.row_tokens, shards.with_rows(T)
        if pairs and not shards.pairs:
            lines.append("next_sentence: token shards have no sentences; name text or sentence pairs.")
        if shards.pairs and not pairs:
            lines.append(f"dataset_name: {self.name} holds sentence pairs: use train_mlm.py with "
                         "--next_sentence true.")
        if size and T != size:
            lines.append(f"block_size: {T}, but rows of {self.name} have {size} tokens: set --block_size "
                         f"{size}.")
        if self.split not in have:
            remedy = "lower block_size or name other data"
            if self.split != "train":
                remedy = "set eval_dataset_name, or make it again with --validation_fraction 0.05"
            lines.append(f"{self.name} has no row of {size or T} tokens for {self.split}, only for "
                         f"{', '.join(have) or 'none'}: {remedy}.")
        if tokenizer is not None and shards.manifest["tokenizer"] != tokenizer_fingerprint(tokenizer):
            lines.append(f"tokenizer_name: not the tokenizer that made {self.name}: use "
                         f"{self.name}/tokenizer.")
        return lines

    def parts(self, maker: TokenMaker, size: int, cache_dir, split: str = "train",
              hold_out: HoldOut | None = None, evaluated=(), max_rows: int = 0) -> dict[str, dict]:
        """{split: part}, of text with "validation" where documents are held out. See prepare_text."""
        if not self.shards:
            return prepare_text(self.corpus, maker, size, cache_dir, split, hold_out, evaluated, max_rows)
        entries = self.shards.entries(self.split, max_rows * max(size, self.shards.width))
        folder = self.shards.local(cache_dir, entries).folder.root
        return {split: dict(folder=folder, split=self.split, size=size, max_rows=max_rows)}

    def tokenizer(self, cache_dir) -> str | None:
        """The folder of the tokenizer that made the shards."""
        return self.shards and f"{self.shards.local(cache_dir, []).folder.root}/tokenizer"


def open_set(source: Source, evaluate: bool = False) -> DataSet:
    """evaluate: use the split that its name gives, else the first of EVALUATED. ValueError: it cannot be
    opened."""
    if shards := find_shards(source.dataset_name):
        split = source.split
        if evaluate and split == "train":
            split = next((split for split in EVALUATED if split in shards.splits), "train")
        return DataSet(shards.url, None, shards, split)
    corpus = open_corpus(evaluation_source(source) if evaluate else source)
    return DataSet(corpus.name, corpus)


def prepare_text(corpus: Corpus, maker: TokenMaker, size: int, cache_dir, split: str = "train",
                 hold_out: HoldOut | None = None, evaluated=(), max_rows: int = 0) -> dict[str, dict]:
    """{split: part} of a corpus, made by one process and kept in the cache.

    split: what the documents are for. evaluated: corpora whose documents are not trained on. max_rows: take
    the first rows of `size` tokens and read little more; 0: all. ValueError where a split gets no row."""
    preparation = Preparation(None, {split: corpus}, maker, hold_out, evaluated, max_rows * size)
    folder = str(cache_path(cache_dir, maker.cache, preparation.settings))
    preparation.folder = Folder(folder)
    if Path(folder, MANIFEST).exists():
        print(f"data       {corpus.name}: rows from {folder}", flush=True)
    shards = Shards(folder, preparation.make())
    for name in [split, *["validation"] * (hold_out is not None)]:
        if name not in shards.with_rows(size):
            raise ValueError(_no_row(shards, name, corpus, maker, size, hold_out))
    return {name: dict(folder=folder, split=name, size=size, max_rows=max_rows if name == split else 0)
            for name in shards.splits}


def _no_row(shards: Shards, split: str, corpus: Corpus, maker, size: int, hold_out: HoldOut | None) -> str:
    """Why a split has no row, and the remedy."""
    accounts = {name: Accounting(**account) for name, account in shards.manifest["accounting"].items()}
    account, train = accounts.get(split, Accounting()), accounts.get("train", Accounting())
    if not train.kept + train.validation + train.evaluated + account.kept:
        return no_text(corpus, train if train.read else account)
    found = f"column {corpus.text_column}, has {account.kept:,} documents"
    message = f"the {split} split of {corpus.name}, {found}"
    if maker.no_row:
        return f"next_sentence: {message}, {maker.no_row}"
    remedy = "lower block_size or take more text"
    if split == "train" and train.evaluated and not train.kept:
        remedy = "all of its documents are in the evaluation data: name other data to train or evaluate on"
    elif hold_out and train.kept + train.validation == 1 and account.kept == 0:
        remedy = "one document cannot be divided: name other text to evaluate on, --eval_dataset_name FILE"
    elif hold_out and split == "validation":
        remedy += ", raise validation_fraction or set eval_dataset_name"
    return f"block_size {size}: {message}, {account.tokens:,} tokens, not one whole row; {remedy}"
