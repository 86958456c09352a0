"""What can be trained and evaluated on: text, token shards, token files of other projects, saved pairs. A new
kind is one more class, in KINDS.

    kind = open_kind(Source("texts/"), recipe)       # ValueError: it cannot be opened
    kind.problems(tokenizer)                         # what does not fit the settings, one line each
    kind.training(tokenizer, ...)["train"]           # rows; other entries are held-out rows for evaluation
    kind.evaluation(tokenizer)["validation"]         # rows to evaluate on
"""

import copy
import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cached_property

from data.encode import Encoder, id_count, token_dtype
from data.factory import TokenMaker
from data.fim import fill_in_middle
from data.foreign import ForeignRows, is_foreign
from data.groups import Groups, shard_groups, text_groups
from data.pair_rows import holds_pairs, load_pairs, saved_rows
from data.pairs import PairMaker
from data.shards import check_shards, entries_of, fetch_tokenizer, open_shards, read_manifest
from data.sources.corpus import Corpus, Source, evaluation_source, load_corpus
from data.streams import StreamedRows
from data.text import PreparedRows, held_out_of, prepare_rows, share_to_hold_out

TEXT_GROUP, SHARD_GROUP = 1 << 13, 1 << 16  # rows of a stream that are shuffled together


class Kind:
    """source: the data set's name and how to read it; recipe: the settings (data/open.py)."""

    corpus: Corpus | None = None  # of a kind that is text
    row_tokens: int | None = None  # where rows cannot be cut anew and bring their special tokens
    tokenizer_name: str | None = None  # of the tokenizer that comes with the data

    def __init__(self, source: Source, recipe):
        self.source, self.recipe, self.name = source, recipe, source.dataset_name

    def validation(self) -> "Kind | None":
        """The evaluation data that comes with it; None: hold out some of the training data."""

    def problems(self, tokenizer) -> list[str]:
        return []

    def training(self, tokenizer, accelerator, hold_out: bool, evaluated: list[Corpus]) -> dict:
        """{"train": rows}, with {"validation": rows, ...} where documents are held out. Documents of the
        corpora `evaluated` are not trained on."""

    def evaluation(self, tokenizer) -> dict:
        """{"validation": rows}, with {"fim": rows of the same text, all of it cut} where fim_rate is set."""

    def streamed(self, groups: Groups, tokenizer, accelerator) -> dict:
        """{"train": rows of a stream}. ValueError: stream_gb is less than all processes need at once."""
        recipe, processes = self.recipe, accelerator.num_processes
        step = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps * processes
        rows_at_once = 2 * groups.size + 2 * step
        least = rows_at_once * recipe.row_size * token_dtype(tokenizer).itemsize / 1e9
        if recipe.stream_gb < least:
            raise ValueError(f"stream_gb: must be {least:.3g} or greater for rows of {recipe.block_size} "
                             f"tokens and {processes} processes, is {recipe.stream_gb:g}.")
        here = accelerator.local_process_index, int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        return {"train": StreamedRows(groups, recipe.cache_dir, int(recipe.stream_gb * 1e9), *here)}


class Text(Kind):
    """Anything that data/sources reads."""

    def __init__(self, source: Source, recipe):
        super().__init__(source, recipe)
        self.corpus = load_corpus(source)

    def validation(self) -> "Text | None":
        if self.corpus.source.split.startswith("train") and "validation" in self.corpus.splits:
            return Text(replace(self.source, split="validation"), self.recipe)

    @cached_property
    def fraction(self) -> float:
        """The share of the documents to hold out: validation_fraction, or more where documents are few."""
        recipe, share = self.recipe, self.recipe.validation_fraction
        of_row = recipe.row_size, recipe.max_train_samples, 1 + recipe.next_sentence
        return share if recipe.streaming else share_to_hold_out(self.corpus, recipe.seed, share, *of_row)

    def held_out(self) -> Corpus:
        return held_out_of(self.corpus, self.recipe.seed, self.fraction)

    def training(self, tokenizer, accelerator, hold_out: bool, evaluated: list[Corpus]) -> dict:
        recipe, corpus, fraction = self.recipe, self.corpus, self.fraction if hold_out else None
        if not recipe.streaming:
            most = recipe.max_train_samples
            held_out = dict(validation_fraction=fraction, evaluated=evaluated)
            return self.prepared(corpus, tokenizer, max_rows=most, **held_out).splits
        held_out = recipe.seed, fraction or 0.0
        fim = fill_in_middle(recipe.fim_rate, recipe.seed, tokenizer)
        groups = text_groups(corpus, Encoder.of(tokenizer), recipe.row_size, TEXT_GROUP, held_out, fim)
        rows = self.streamed(groups, tokenizer, accelerator)
        if fraction:
            held_out, most = held_out_of(corpus, *held_out), recipe.max_eval_samples
            rows |= self.prepared(held_out, tokenizer, split="validation", max_rows=most).splits
        return rows

    def evaluation(self, tokenizer) -> dict:
        most = self.recipe.max_eval_samples if self.recipe.streaming else 0
        return self.prepared(self.corpus, tokenizer, split="validation", max_rows=most).splits

    def prepared(self, corpus: Corpus, tokenizer, **settings) -> PreparedRows:
        recipe, size = self.recipe, self.recipe.row_size
        if recipe.next_sentence:
            maker = PairMaker(tokenizer, size, recipe.seed, recipe.pack_pairs)
        else:
            maker = TokenMaker(tokenizer, fill_in_middle(recipe.fim_rate, recipe.seed, tokenizer))
        settings |= dict(seed=recipe.seed, cache_dir=recipe.cache_dir)
        return prepare_rows(corpus, maker, block_size=size, **settings)


class Made(Kind):
    """Rows that were made before."""

    pairs = False  # rows are sentence pairs
    splits: Collection[str] = ()  # those with at least one row
    split = ""  # to evaluate on; "": validation, or train where there is none

    def rows(self, split: str, most: int = 0):
        """Map-style rows of a split. most: the first so many; 0: all."""

    def validation(self) -> "Made | None":
        own = copy.copy(self)
        own.split = "validation"
        return own

    def problems(self, tokenizer) -> list[str]:
        lines, recipe, size = [], self.recipe, self.row_tokens
        if recipe.fim_rate:
            lines.append("fim_rate: prepared tokens cannot be cut; leave it out here, and give it to "
                         "`python -m data.prepare`.")
        if recipe.next_sentence and not self.pairs:
            lines.append("next_sentence: token files have no sentences; name text or saved sentence pairs.")
        if size and recipe.block_size != size:
            lines.append(f"block_size: {recipe.block_size}, but rows of {self.name} have {size} tokens: "
                         f"set --block_size {size}.")
        if tokenizer is None and not recipe.tokenizer_name and not self.tokenizer_name:
            lines.append(f"tokenizer_name: {self.name} has none; name the one that made it (often gpt2).")
        return lines

    def training(self, tokenizer, accelerator, hold_out: bool, evaluated: list[Corpus]) -> dict:
        return {"train": self.rows("train", self.recipe.max_train_samples)}

    def evaluation(self, tokenizer) -> dict:
        usual = "validation" if "validation" in self.splits else "train"
        return {"validation": self.rows(self.split or usual)}


class Shards(Made):
    """The output of `python -m data.prepare`."""

    def __init__(self, source: Source, recipe):
        super().__init__(source, recipe)
        self.manifest, size = check_shards(self.name), recipe.row_size
        self.splits = [split for split, entry in self.manifest["splits"].items() if entry["tokens"] >= size]
        self.tokenizer_name = fetch_tokenizer(self.name, recipe.cache_dir)

    def problems(self, tokenizer) -> list[str]:
        lines = super().problems(tokenizer)
        try:
            check_shards(self.name, tokenizer)
            entries_of(self.manifest, self.name, self.split or "train", self.recipe.row_size)
        except ValueError as error:
            lines.append(str(error))
        return lines

    def training(self, tokenizer, accelerator, hold_out: bool, evaluated: list[Corpus]) -> dict:
        if not self.recipe.streaming:
            return super().training(tokenizer, accelerator, hold_out, evaluated)
        entries = entries_of(self.manifest, self.name, "train", self.recipe.row_size)
        groups = shard_groups(self.name, entries, self.recipe.row_size, SHARD_GROUP)
        return self.streamed(groups, tokenizer, accelerator)

    def rows(self, split: str, most: int = 0):
        recipe = self.recipe
        return open_shards(self.name, split, recipe.row_size, cache_dir=recipe.cache_dir, max_rows=most)


class TokenFiles(Made):
    """Token files of nanoGPT, llm.c or TensorFlow."""

    def __init__(self, source: Source, recipe):
        super().__init__(source, recipe)
        self.files = ForeignRows(self.name, recipe.cache_dir)
        self.splits, self.row_tokens = self.files.accounts, self.files.block_size

    def problems(self, tokenizer) -> list[str]:
        lines = super().problems(tokenizer)
        if self.split and self.split not in self.splits:
            lines.append(f"{self.name} has no rows for {self.split}: set eval_dataset_name.")
        return lines + self.files.problems(self.row_tokens or self.recipe.row_size, tokenizer)

    def rows(self, split: str, most: int = 0):
        return self.files.rows(split, self.recipe.row_size, most)


class Pairs(Made):
    """Sentence pairs that another program has saved."""

    pairs = True

    def __init__(self, source: Source, recipe):
        super().__init__(source, recipe)
        self.splits = load_pairs(self.name)
        self.row_tokens = len(self.splits["train"][0]["input_ids"])

    def validation(self) -> "Made | None":
        return super().validation() if "validation" in self.splits else None

    def problems(self, tokenizer) -> list[str]:
        lines, recipe = super().problems(tokenizer), self.recipe
        largest = max(map(max, self.splits["train"][:1000]["input_ids"]))
        if tokenizer is not None and largest >= (known := id_count(tokenizer)):
            lines.append(f"tokenizer_name: {self.name} has ids up to {largest} or more, but the tokenizer "
                         f"has only {known}: name the one that made it.")
        if not recipe.next_sentence:
            lines.append(f"dataset_name: {self.name} holds sentence pairs: use train_mlm.py with "
                         "--next_sentence true.")
        if not recipe.eval_dataset_name and "validation" not in self.splits:
            lines.append(f"eval_dataset_name: {self.name} has no split validation; name a data set.")
        return lines

    def rows(self, split: str, most: int = 0):
        recipe = self.recipe
        return saved_rows(self.splits[split], self.row_tokens, recipe.pack_pairs, recipe.cache_dir)


KINDS = {Shards: read_manifest, TokenFiles: is_foreign, Pairs: holds_pairs}  # kind: does it claim this name?


def open_kind(source: Source, recipe, trained: Iterable[Source] | None = None) -> Kind:
    """trained: for an evaluation set, the sources that are trained on. ValueError: it cannot be opened."""
    for kind, claims in KINDS.items() if source.split == "train" else ():  # text alone has other splits
        if claims(source.dataset_name):
            return kind(source, recipe)
    return Text(source if trained is None else evaluation_source(source, trained), recipe)
