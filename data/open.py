"""From the settings to rows: what is named is opened, checked, and prepared once per machine.

    sources = open_sources(Recipe.of(args, algorithm="bpe"), problems)     # every mistake is a line of
    problems data = prepare(sources, accelerator)                                   # data/batches.py
"""

import itertools
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from data.batches import Data
from data.encode import token_dtype, tokenizer_fingerprint
from data.fim import fill_in_middle
from data.kinds import Kind, Text, open_kind
from data.mixture import MixedRows, Mixture, share_problems
from data.pair_rows import PairRows
from data.rows import PackedRows
from data.shards import MANIFEST
from data.sources.corpus import Source
from data.streams import StreamedRows
from data.text import PreparedRows, trained_tokenizer
from data.tokenizer import load_tokenizer
from utils.io.secrets import without_secrets


@dataclass(frozen=True)
class Recipe:
    """Everything between the settings and the rows. The names are those of the settings."""

    dataset_name: tuple[str, ...]
    mixture: tuple[float, ...] = ()
    dataset_config_name: tuple[str, ...] = ()  # one for all, or one for each
    eval_dataset_name: tuple[str, ...] = ()
    text_column: tuple[str, ...] = ()  # likewise
    keywords: tuple[str, ...] = ()
    keep_duplicates: bool = False
    validation_fraction: float = 0.03
    tokenizer_name: str | None = None
    vocab_size: int = 4096
    algorithm: str = "bpe"
    model_type: str = "gpt2"
    block_size: int = 128
    fim_rate: float = 0.0  # fill-in-the-middle: share of the documents
    special: int = 0  # tokens that collate adds to a row: rows hold so many fewer than block_size
    next_sentence: bool = False  # rows are sentence pairs
    pack_pairs: bool = False  # as many to a row as fit
    streaming: bool = False
    stream_gb: float = 4.0
    cache_dir: str = "cache"
    output_dir: str = ""
    saved: dict | None = field(default=None, hash=False)  # name and fingerprints of a run's data, to continue
    seed: int = 42
    max_train_samples: int = 0
    max_eval_samples: int = 0
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 32

    def __post_init__(self):
        """Lists become tuples, what may be several becomes one of those; without pairs none are packed."""
        for name in ("dataset_name", "mixture", "dataset_config_name", "eval_dataset_name", "text_column",
                     "keywords"):  # fmt: skip
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        object.__setattr__(self, "pack_pairs", self.pack_pairs and self.next_sentence)

    @classmethod
    def of(cls, args, **more) -> "Recipe":
        """From the settings of the same names, and `more`."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names} | more)

    @property
    def row_size(self) -> int:
        return self.block_size - self.special


@dataclass
class Sources:
    """What a recipe names, opened: nothing is prepared yet."""

    recipe: Recipe
    train: dict[str, Kind] = field(default_factory=dict)
    evals: dict[str, Kind] = field(default_factory=dict)  # without: a part of what is trained on
    tokenizer: object = None  # None: to be trained
    prepared: tuple | None = None  # training rows and evals of a run to continue, from the cache


def open_sources(recipe: Recipe, problems: list[str]) -> Sources:
    """Opens data and tokenizer. Each mistake is appended to `problems` as a line.

    A run that continues asks for none of them where the cache has the rows that it was trained on."""
    if not recipe.dataset_name:
        problems.append("dataset_name: none is given; give installed-python, a Hub id, a file or a folder.")
        return Sources(recipe)
    problems += (wrong := share_problems(recipe.mixture, recipe.dataset_name))
    if not wrong and (kept := _rows_of_run(recipe)):
        return kept
    sources, most = Sources(recipe), recipe.max_train_samples

    def attempt(function: Callable, *args):
        """function(*args); its ValueError becomes a line of `problems`, and the result None."""
        try:
            return function(*args)
        except ValueError as error:
            problems.append(str(error))

    named, other = _named_sources(recipe, problems)
    for short, source in named.items():
        streaming = recipe.streaming or most > 0
        if kind := attempt(open_kind, replace(source, streaming=streaming), recipe):
            sources.train[short] = kind
    names = recipe.eval_dataset_name
    for name, short in zip(names, short_names(names), strict=True):
        if kind := attempt(open_kind, replace(other, dataset_name=name), recipe, named.values()):
            sources.evals[short] = kind
    for short, kind in () if names else sources.train.items():
        if brought := attempt(kind.validation):
            sources.evals[short] = brought
    kinds = [*sources.train.values(), *sources.evals.values()]
    made = [kind for kind in sources.train.values() if not isinstance(kind, Text)]
    brought = next(filter(None, (kind.tokenizer_name for kind in made)), None)
    if recipe.streaming and not recipe.tokenizer_name and not made:
        problems.append("streaming: set tokenizer_name; `python -m data.tokenizer` trains one on a stream.")
    if tokenizer_name := recipe.tokenizer_name or brought:
        sources.tokenizer = attempt(load_tokenizer, tokenizer_name)
    if recipe.fim_rate and sources.tokenizer:
        attempt(fill_in_middle, recipe.fim_rate, recipe.seed, sources.tokenizer)
    if most and (recipe.next_sentence or len(named) > 1):
        problems.append("max_train_samples: not for sentence pairs or a mixture; name a part, "
                        f"{recipe.dataset_name[0]}:train[:{most}].")
    for kind in kinds:
        problems += [line for line in kind.problems(sources.tokenizer) if line not in problems]
    if recipe.special and len({kind.whole for kind in sources.train.values()}) > 1:
        problems.append("mixture: records have special tokens inside, other rows are shorter and get them "
                        "added: mix records with their like.")
    return sources


def _named_sources(recipe: Recipe, problems: list[str]) -> tuple[dict[str, Source], Source]:
    """What is trained on, by its name in the log, and what its evaluation sets have in common. Of several
    data sets each may have a configuration and a column of text of its own, and keywords, NAME=keyword."""
    shorts, each = short_names(recipe.dataset_name), {}
    for setting in ("dataset_config_name", "text_column"):
        given = [None if value == "none" else value for value in getattr(recipe, setting)] or [None]
        if len(given) not in (1, len(shorts)):
            problems.append(f"{setting}: {len(given)} for {len(shorts)} data sets, give one, or as many.")
        each[setting] = given * len(shorts)
    words = {name: [] for name in ["", *shorts]}
    for word in recipe.keywords:
        name, _, own = word.partition("=")
        words[name if name in words else ""].append(own if name and name in words else word)
    named = {}
    for short, name, config, column in zip(shorts, recipe.dataset_name, *each.values(), strict=False):
        keywords = tuple(filter(None, words[short] or words[""]))
        named[short] = Source(name, config, "train", column, keywords, keep_duplicates=recipe.keep_duplicates)
    column = each["text_column"][0] if len(recipe.text_column) == 1 else None
    return named, replace(named[shorts[0]], dataset_name="", dataset_config_name=None, text_column=column,
                          keywords=tuple(words[""]))


def _rows_of_run(recipe: Recipe) -> Sources | None:
    """The rows and the tokenizer of the run to continue; None where the cache has not all of it."""
    of_the_run = recipe.saved and recipe.saved["dataset_name"] == [*recipe.dataset_name]  # not another corpus
    if not of_the_run or recipe.streaming:
        return None
    kind = partial(PairRows, pack=recipe.pack_pairs) if recipe.next_sentence else PackedRows
    cached, shorts, saved = {}, short_names(recipe.dataset_name), recipe.saved["train"]
    try:
        for folder in Path(recipe.cache_dir).glob("pairs-*" if recipe.next_sentence else "rows-*"):
            if (folder / MANIFEST).exists():
                most = json.loads((folder / MANIFEST).read_text())["settings"].get("most", 0)
                rows = PreparedRows(folder, recipe.row_size, most // recipe.row_size, kind)
                cached |= {rows.fingerprint: rows for rows in rows.splits.values()}
        train = {short: cached[saved[short][1] if len(shorts) > 1 else saved] for short in shorts}
        evals = {name: cached[fingerprint] for name, fingerprint in recipe.saved["eval"].items()}
        tokenizer = load_tokenizer(recipe.output_dir)
    except (KeyError, TypeError, ValueError, OSError):  # TypeError: of another number of data sets
        return None
    if tokenizer_fingerprint(tokenizer) != recipe.saved["tokenizer"]:
        return None
    return Sources(recipe, tokenizer=tokenizer, prepared=(_together(recipe, train), evals))


def _together(recipe: Recipe, train: dict) -> MixedRows:
    """The rows of all data sets in their shares; of one all of it."""
    if recipe.pack_pairs and len(train) > 1:
        PairRows.align(train.values())
    return MixedRows(Mixture(recipe.mixture if len(train) > 1 else (1.0,), recipe.seed), train)


def short_names(names: tuple[str, ...]) -> list[str]:
    """How the log tells evaluation sets apart: one is "", several are called by the ends of their names."""
    if len(names) == 1:
        return [""]
    short = []
    for name in names:
        name = without_secrets(Source(name).dataset_name).removesuffix("?***")
        parts = [part for part in re.split(r"[/\\]", name) if part and not set(part) & set("*?[:")]
        ending = r"(\.(jsonl|json|csv|txt|parquet|bin|tfrecord))?(\.(gz|bz2|xz|zst))?$"
        stem = re.sub(ending, "", (parts or [name])[-1])
        numbered = (f"{stem}-{number}" for number in itertools.count(2))
        short.append(next(found for found in itertools.chain([stem], numbered) if found not in short))
    return short


def prepare(sources: Sources, accelerator) -> Data:
    """The tokenizer trained if none is named, rows prepared once per machine, or opened as a stream. Of a
    mixture each data set is prepared as if it were alone. Raises ValueError where there is no row."""
    recipe, tokenizer = sources.recipe, sources.tokenizer
    told = ", ".join(map(without_secrets, recipe.dataset_name))
    if sources.prepared:
        accelerator.print(f"data       the rows of this run from {recipe.cache_dir}, {told} is not read")
        return Data(recipe, accelerator, tokenizer, *sources.prepared)
    if tokenizer is None:
        tokenizer = _train_tokenizer(sources)
    evals = {}
    for name, kind in sources.evals.items():
        evals |= _named_sets(name, kind.evaluation(tokenizer))
    train = {}
    for name, made in _training_rows(sources, tokenizer, accelerator).items():
        train[name] = made.pop("train")
        evals |= _named_sets(name, made)
    mixed = [name for name, kind in sources.train.items() if recipe.streaming or not isinstance(kind, Text)]
    if recipe.eval_dataset_name and mixed:
        accelerator.print(f"data       {told} is trained on as it is, with what of "
                          "it is evaluated on, too; rows prepared from text leave such documents out")
    for rows in train.values() if recipe.pack_pairs else ():
        accelerator.print(f"data       {rows.size:,} sentence pairs in {len(rows):,} rows, "
                          f"{rows.padding:.1%} of them padding")
    _check_ring(recipe, train.values(), tokenizer, accelerator.num_processes)
    _await_all(accelerator)
    first = [*(sources.evals if recipe.eval_dataset_name else sources.train)]
    evals = {name: evals[name] for name in [*first, *evals]}
    return Data(recipe, accelerator, tokenizer, _together(recipe, train), evals)


def _train_tokenizer(sources: Sources):
    recipe, most = sources.recipe, sources.recipe.max_train_samples
    return trained_tokenizer(
        *(kind.corpus for kind in sources.train.values()), shares=recipe.mixture or (1.0,),
        vocab_size=recipe.vocab_size, cache_dir=recipe.cache_dir, algorithm=recipe.algorithm,
        model_type=recipe.model_type, fim=recipe.fim_rate > 0,
        read_bytes=most and max(1_000_000, 4 * most * recipe.row_size),
    )  # fmt: skip


def _named_sets(name: str, sets: dict) -> dict:
    """The splits of the evaluation set `name`, by names of their own."""
    names = {split: "" if split == "validation" else split for split in sets}
    return {"-".join(filter(None, (name, names[split]))): rows for split, rows in sets.items()}


def _training_rows(sources: Sources, tokenizer, accelerator) -> dict[str, dict]:
    """What Kind.training makes of each data set. Documents that one holds out no other one trains on."""
    recipe, evaluated = sources.recipe, [*sources.evals.values()]
    machine = accelerator.local_process_index, _processes_here(accelerator)
    hold_out = {name for name in sources.train if not recipe.eval_dataset_name and name not in sources.evals}
    beyond = {}
    if len(sources.train) > 1:
        beyond = {name: sources.train[name].held_beyond(tokenizer) for name in hold_out}
    return {
        name: kind.training(tokenizer, machine, name in hold_out, evaluated,
                            sum((hashes for other, hashes in beyond.items() if other != name), []))
        for name, kind in sources.train.items()
    }  # fmt: skip


def _processes_here(accelerator) -> int:
    """Of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))


def _check_ring(recipe: Recipe, train, tokenizer, processes: int) -> None:
    """ValueError where a stream's ring is too small for what processes take at once."""
    for rows in train:
        if isinstance(rows, StreamedRows):
            at_once = 2 * rows.source.size + 2 * recipe.per_device_train_batch_size * processes
            least = at_once * recipe.row_size * token_dtype(tokenizer).itemsize / 1e9
            if recipe.stream_gb < least:
                raise ValueError(f"stream_gb: must be {least:.3g} or greater for rows of {recipe.block_size} "
                                 f"tokens and {processes} processes, is {recipe.stream_gb:g}.")


def _await_all(accelerator) -> None:
    """Until every machine has its rows. No collective: one that waits for 10 minutes (NCCL) ends the run."""
    if accelerator.num_processes > 1 and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        arrived = store.add("prepared", 1)  # a multiple of the processes when all have
        while store.add("prepared", 0) < arrived + -arrived % accelerator.num_processes:
            time.sleep(0.1)
        accelerator.wait_for_everyone()  # the first one may leave at once, and the store with it
