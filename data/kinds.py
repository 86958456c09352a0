"""What can be trained and evaluated on: text, token shards, token files of other projects. One class for
each; a new kind is one more in KINDS.

    kind = open_kind(Source("texts/"), recipe)       # ValueError: it cannot be opened
    kind.problems(tokenizer)                         # what does not fit the settings, a line each
    kind.training(tokenizer, ...)["train"]           # rows; with them rows for validation, if it sets some
    aside kind.evaluation(tokenizer)[""]                   # rows to evaluate on
"""

from dataclasses import replace
from functools import partial

from data.ahead import ShardGroups, TextGroups
from data.encode import Encoder
from data.fim import fill_in_middle
from data.foreign import ForeignRows, is_foreign
from data.pair_rows import SavedPairs, holds_pairs
from data.pairs import prepare_pairs
from data.shards import check_shards, fetch_tokenizer, open_shards, read_manifest, split_entry
from data.sources.corpus import Source, evaluation_source, has_split, load_corpus
from data.streams import StreamedRows
from data.text import held_out_share, prepare_evaluation, prepare_rows

TEXT_GROUP, SHARD_GROUP = 1 << 13, 1 << 16  # rows of a stream that are shuffled together


class Kind:
    """source: what is named; recipe: the settings (data/open.py)."""

    whole = False  # rows have their special tokens inside
    tokenizer_name: str | None = None  # that it brings

    def __init__(self, source: Source, recipe):
        self.source, self.recipe, self.name = source, recipe, source.dataset_name

    @staticmethod
    def claims(source: Source) -> bool:
        """Whether it is of this kind."""
        raise NotImplementedError

    def validation(self) -> "Kind | None":
        """The evaluation data that it brings; None: some of the training data is to be held out."""
        raise NotImplementedError

    def problems(self, tokenizer) -> list[str]:
        return []

    def training(self, tokenizer, machine: tuple[int, int], hold_out: bool, evaluated: list["Kind"],
                 held_elsewhere=()) -> dict:
        """{"train": rows}, and where documents are held out {"validation": rows, ...}. machine: (this
        process, of so many on this machine). evaluated: what is evaluated on beside it; held_elsewhere:
        hashes of documents."""
        raise NotImplementedError

    def evaluation(self, tokenizer) -> dict:
        """{"validation": rows, and "fim": the same text, all of it cut}"""
        raise NotImplementedError


class Text(Kind):
    """Anything data/sources reads."""

    def __init__(self, source: Source, recipe):
        super().__init__(source, recipe)
        self.corpus = load_corpus(source)
        self.shape = {"block_size": recipe.row_size, "cache_dir": recipe.cache_dir}

    @staticmethod
    def claims(source: Source) -> bool:
        return True

    def validation(self) -> "Text | None":
        if self.corpus.source.split.startswith("train") and has_split(self.source, "validation"):
            return Text(replace(self.source, split="validation"), self.recipe)
        return None

    def held_beyond(self, tokenizer) -> list[int]:
        """Hashes of documents that are held out though the seed does not choose them, as there are few."""
        recipe = self.recipe
        if recipe.streaming or recipe.next_sentence:
            return []
        share = recipe.validation_fraction, recipe.seed, recipe.cache_dir
        return held_out_share(self.corpus, tokenizer, recipe.row_size, *share)[1]

    def training(self, tokenizer, machine, hold_out, evaluated, held_elsewhere=()) -> dict:
        recipe = self.recipe
        if recipe.streaming:
            return self._stream(tokenizer, machine, recipe.validation_fraction * hold_out)
        make = partial(prepare_rows, fim=self._fim(tokenizer), max_rows=recipe.max_train_samples)
        if recipe.next_sentence:
            make = partial(prepare_pairs, pack=recipe.pack_pairs)
        texts = [kind.corpus for kind in evaluated if isinstance(kind, Text)]
        fraction = recipe.validation_fraction if hold_out else None
        return make(self.corpus, tokenizer, validation_fraction=fraction, evaluated=texts,
                    held_elsewhere=held_elsewhere, seed=recipe.seed, **self.shape).splits  # fmt: skip

    def _stream(self, tokenizer, machine, fraction: float) -> dict:
        recipe, held_out = self.recipe, (self.recipe.seed, fraction)
        fim = self._fim(tokenizer)
        groups = TextGroups(self.corpus, Encoder.of(tokenizer), recipe.row_size, TEXT_GROUP, held_out, fim)
        rows = {"train": StreamedRows(groups, recipe.cache_dir, int(recipe.stream_gb * 1e9), *machine)}
        if fraction:
            rows |= prepare_evaluation(self.corpus, tokenizer, held_out=held_out, fim=fim,
                                       max_rows=recipe.max_eval_samples, **self.shape).splits  # fmt: skip
        return rows

    def evaluation(self, tokenizer) -> dict:
        recipe = self.recipe
        if recipe.next_sentence:
            return prepare_pairs(self.corpus, tokenizer, validation_fraction=None, seed=recipe.seed,
                                 pack=recipe.pack_pairs, split="validation", **self.shape).splits  # fmt: skip
        most = recipe.max_eval_samples if recipe.streaming else 0
        fim = self._fim(tokenizer)
        splits = prepare_evaluation(self.corpus, tokenizer, fim=fim, max_rows=most, **self.shape).splits
        return splits

    def _fim(self, tokenizer):
        return fill_in_middle(self.recipe.fim_rate, self.recipe.seed, tokenizer)


class Made(Kind):
    """Rows that were made before."""

    split = ""  # that is evaluated on; "": validation, or without any all

    def validation(self) -> "Made":
        own = type(self)(self.source, self.recipe)
        own.split = "validation"
        return own

    def problems(self, tokenizer) -> list[str]:
        lines = []
        if self.recipe.fim_rate:
            lines.append("fim_rate: rows of shards are as they were made; leave it out, and give it to "
                         "`python -m data.prepare`.")
        if self.recipe.next_sentence:
            lines.append("next_sentence: shards hold rows without sentences, name text or saved pairs.")
        return lines


class Shards(Made):
    """Of `python -m data.prepare`."""

    def __init__(self, source: Source, recipe):
        super().__init__(source, recipe)
        self.manifest = check_shards(self.name)
        self.tokenizer_name = fetch_tokenizer(self.name, recipe.cache_dir)

    @staticmethod
    def claims(source: Source) -> bool:
        return source.split == "train" and read_manifest(source.dataset_name) is not None

    def problems(self, tokenizer) -> list[str]:
        lines = super().problems(tokenizer)
        try:
            check_shards(self.name, tokenizer)
            split_entry(self.manifest, self.name, self.split or "train", self.recipe.row_size)
        except ValueError as error:
            lines.append(str(error))
        return lines

    def training(self, tokenizer, machine, hold_out, evaluated, held_elsewhere=()) -> dict:
        recipe = self.recipe
        if not recipe.streaming:
            return {"train": self._rows("train", recipe.max_train_samples)}
        entries = split_entry(self.manifest, self.name, "train", recipe.row_size)["files"]
        groups = ShardGroups(self.name, entries, recipe.row_size, SHARD_GROUP)
        return {"train": StreamedRows(groups, recipe.cache_dir, int(recipe.stream_gb * 1e9), *machine)}

    def evaluation(self, tokenizer) -> dict:
        held_out = self.manifest["splits"].get("validation", {"tokens": 0})["tokens"] >= self.recipe.row_size
        return {"validation": self._rows(self.split or ("validation" if held_out else "train"))}

    def _rows(self, split: str, most: int = 0):
        recipe = self.recipe
        return open_shards(self.name, split, recipe.row_size, cache_dir=recipe.cache_dir, max_rows=most)


class TokenFiles(Made):
    """Of nanoGPT, llm.c, or TensorFlow."""

    def __init__(self, source: Source, recipe):
        super().__init__(source, recipe)
        self.files = ForeignRows(self.name, recipe.cache_dir)
        self.whole = self.files.block_size is not None

    @staticmethod
    def claims(source: Source) -> bool:
        return source.split == "train" and is_foreign(source.dataset_name)

    def problems(self, tokenizer) -> list[str]:
        lines, recipe = super().problems(tokenizer), self.recipe
        if tokenizer is None and not recipe.tokenizer_name:
            lines.append(f"tokenizer_name: {self.name} brings none, name the one that made it (often gpt2).")
        if self.split and self.split not in self.files.accounts:
            lines.append(f"{self.name} has no rows for {self.split}: set eval_dataset_name.")
        return lines + self.files.problems(recipe.block_size, recipe.special, tokenizer)

    def training(self, tokenizer, machine, hold_out, evaluated, held_elsewhere=()) -> dict:
        return {"train": self.files.rows("train", self.recipe.row_size, self.recipe.max_train_samples)}

    def evaluation(self, tokenizer) -> dict:
        split = self.split or ("validation" if "validation" in self.files.accounts else "train")
        return {"validation": self.files.rows(split, self.recipe.row_size)}


class Pairs(Made):
    """Sentence pairs that others have prepared."""

    def __init__(self, source: Source, recipe):
        super().__init__(source, recipe)
        self.saved = SavedPairs(self.name, recipe.cache_dir)

    @staticmethod
    def claims(source: Source) -> bool:
        return source.split == "train" and holds_pairs(source.dataset_name)

    def validation(self) -> "Made | None":
        return super().validation() if "validation" in self.saved.splits else None

    def problems(self, tokenizer) -> list[str]:
        lines, recipe = self.saved.problems(self.recipe.block_size, tokenizer), self.recipe
        if not recipe.next_sentence:
            lines.append(f"dataset_name: {self.name} holds sentence pairs: set --next_sentence true, of "
                         "train_mlm.py.")
        if not recipe.tokenizer_name:
            lines.append(f"tokenizer_name: {self.name} brings none, name the one that made it.")
        if not recipe.eval_dataset_name and "validation" not in self.saved.splits:
            lines.append(f"eval_dataset_name: {self.name} has no split validation, name a data set.")
        return lines

    def training(self, tokenizer, machine, hold_out, evaluated, held_elsewhere=()) -> dict:
        return {"train": self.saved.rows("train", self.recipe.pack_pairs)}

    def evaluation(self, tokenizer) -> dict:
        split = self.split or ("validation" if "validation" in self.saved.splits else "train")
        return {"validation": self.saved.rows(split, self.recipe.pack_pairs)}


KINDS = (Shards, TokenFiles, Pairs, Text)


def open_kind(source: Source, recipe, trained=None) -> Kind:
    """ValueError where it cannot be opened. trained: of an evaluation set, the sources that are trained
    on."""
    kind = next(kind for kind in KINDS if kind.claims(source))
    if kind is Text and trained is not None:
        source = evaluation_source(source, trained)
    return kind(source, recipe)
