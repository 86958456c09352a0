"""What can be trained and evaluated on: text, and token ids that are in files already.

    kind = open_kind(Source("texts/"), recipe)       # ValueError: it cannot be opened
    kind.problems(tokenizer)                         # what does not fit the settings, one line each
    kind.training(tokenizer, ...)["train"]           # rows; other entries are held-out rows for evaluation
    kind.evaluation(tokenizer)["validation"]         # rows to evaluate on

Another format of token files is one more function in open_kind, which returns a TokenSet.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, partial

from data.encode import Encoder
from data.fim import fill_in_middle
from data.groups import shard_groups, text_groups
from data.pair_rows import open_saved_pairs
from data.pairs import PairMaker
from data.preparation import TokenMaker
from data.rows import PackedRows
from data.shards import open_shards
from data.sources.corpus import Corpus, Source, evaluation_source, load_corpus
from data.text import PreparedRows, held_out_of, prepare_rows, stored_share
from data.token_files import open_token_files
from data.token_set import TokenSet

TEXT_GROUP, SHARD_GROUP = 1 << 13, 1 << 16  # rows of a stream that are shuffled together


class Kind:
    """source: the data set's name and how to read it; recipe: the settings (data/open.py)."""

    corpus: Corpus | None = None  # of a kind that is text
    row_tokens: int | None = None  # fixed row length, with special tokens; None: any
    tokenizer_name: str | None = None  # of the tokenizer that comes with the data

    def __init__(self, source: Source, recipe):
        self.source, self.recipe, self.name = source, recipe, source.dataset_name

    def validation(self) -> "Kind | None":
        """The evaluation data that comes with it; None: hold out some of the training data."""

    def problems(self, tokenizer) -> list[str]:
        return []

    def training(self, tokenizer, share: float, hold_out: bool, evaluated: list[Corpus]) -> dict:
        """{"train": rows, or Groups to stream}, with {"validation": rows, ...} where documents are held out.
        share: of the mixture. Documents of the corpora `evaluated` are not trained on."""

    def evaluation(self, tokenizer) -> dict:
        """{"validation": rows}, with {"fim": rows of the same text, all of it cut} where fim_rate is set."""


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
        recipe = self.recipe
        if recipe.streaming:
            return recipe.validation_fraction
        of_row = recipe.row_size, recipe.max_train_samples, 1 + recipe.next_sentence
        return stored_share(self.corpus, recipe.cache_dir, recipe.seed, recipe.validation_fraction, *of_row)

    def held_out(self) -> Corpus:
        return held_out_of(self.corpus, self.recipe.seed, self.fraction)

    def training(self, tokenizer, share: float, hold_out: bool, evaluated: list[Corpus]) -> dict:
        recipe, corpus, fraction = self.recipe, self.corpus, self.fraction if hold_out else None
        if not recipe.streaming:
            max_rows = recipe.max_train_samples
            held_out = dict(validation_fraction=fraction, evaluated=evaluated)
            return self.prepared(corpus, tokenizer, max_rows=max_rows, **held_out).splits
        held_out = recipe.seed, fraction or 0.0
        fim = fill_in_middle(recipe.fim_rate, recipe.seed, tokenizer)
        groups = text_groups(corpus, Encoder.of(tokenizer), recipe.row_size, TEXT_GROUP, held_out, fim)
        rows = {"train": groups}
        if fraction:
            held_out, max_rows = held_out_of(corpus, *held_out), recipe.max_eval_samples
            rows |= self.prepared(held_out, tokenizer, split="validation", max_rows=max_rows).splits
        return rows

    def evaluation(self, tokenizer) -> dict:
        max_rows = self.recipe.max_eval_samples if self.recipe.streaming else 0
        return self.prepared(self.corpus, tokenizer, split="validation", max_rows=max_rows).splits

    def prepared(self, corpus: Corpus, tokenizer, **settings) -> PreparedRows:
        recipe, size = self.recipe, self.recipe.row_size
        if recipe.next_sentence:
            maker = PairMaker(tokenizer, size, recipe.seed, recipe.pack_pairs)
        else:
            maker = TokenMaker(tokenizer, fill_in_middle(recipe.fim_rate, recipe.seed, tokenizer))
        settings |= dict(seed=recipe.seed, cache_dir=recipe.cache_dir)
        return prepare_rows(corpus, maker, block_size=size, **settings)


class Tokens(Kind):
    """Token ids that are in files already. evaluated: for an evaluation set, of which the split that its name
    gives is used, else the first of validation, train and test."""

    def __init__(self, source: Source, recipe, tokens: TokenSet, evaluated: bool):
        super().__init__(source, recipe)
        self.tokens, self.split = tokens, source.split
        self.row_tokens, self.tokenizer_name = tokens.row_tokens, tokens.tokenizer_name
        if evaluated and source.split == "train":
            have = tokens.with_rows(recipe.row_size)
            self.split = next((split for split in ("validation", "train", "test") if split in have), "train")

    def validation(self) -> "Tokens":
        own = copy.copy(self)
        own.split = "validation" if self.split != "validation" else "test"
        return own

    def problems(self, tokenizer) -> list[str]:
        lines, recipe, name, size = [], self.recipe, self.name, self.row_tokens
        pairs = self.tokens.kind is not PackedRows
        if recipe.fim_rate:
            lines.append("fim_rate: prepared tokens cannot be cut; leave it out here, and give it to "
                         "`python -m data.prepare`.")
        if recipe.next_sentence and not pairs:
            lines.append("next_sentence: token files have no sentences; name text or saved sentence pairs.")
        if pairs and not recipe.next_sentence:
            lines.append(f"dataset_name: {name} holds sentence pairs: use train_mlm.py with "
                         "--next_sentence true.")
        if size and recipe.block_size != size:
            lines.append(f"block_size: {recipe.block_size}, but rows of {name} have {size} tokens: "
                         f"set --block_size {size}.")
        if tokenizer is None and not recipe.tokenizer_name and not self.tokenizer_name:
            lines.append(f"tokenizer_name: {name} has none; name the one that made it (often gpt2).")
        return lines + self.tokens.problems(tokenizer, self.split, recipe.row_size)

    def training(self, tokenizer, share: float, hold_out: bool, evaluated: list[Corpus]) -> dict:
        recipe, size, shards = self.recipe, self.recipe.row_size, self.tokens.splits[self.split].shards
        if recipe.streaming and shards:
            return {"train": shard_groups(self.name, shards, size, SHARD_GROUP)}
        return {"train": self.tokens.rows(self.split, size, recipe.max_train_samples, used=share > 0)}

    def evaluation(self, tokenizer) -> dict:
        return {"validation": self.tokens.rows(self.split, self.recipe.row_size)}


def open_kind(source: Source, recipe, trained: Iterable[Source] | None = None) -> Kind:
    """trained: for an evaluation set, the sources that are trained on. ValueError: it cannot be opened."""
    for open_tokens in (open_shards, open_token_files, partial(open_saved_pairs, pack=recipe.pack_pairs)):
        if tokens := open_tokens(source.dataset_name, recipe.cache_dir):
            return Tokens(source, recipe, tokens, evaluated=trained is not None)
    return Text(source if trained is None else evaluation_source(source, trained), recipe)
