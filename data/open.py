"""From the settings to rows: what is named is opened, checked, and prepared once per machine.

    sources = open_sources(Recipe.of(args, algorithm="bpe"), problems)  # every mistake is a line of problems
    data = prepare(sources, accelerator)                                # data/batches.py
"""

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import torch.distributed as dist

from data.batches import Data
from data.encode import tokenizer_fingerprint
from data.fim import fill_in_middle
from data.kinds import Kind, open_kind
from data.mixture import MixedRows, Mixture, share_problems
from data.pair_rows import PairRows
from data.rows import PackedRows
from data.shards import MANIFEST
from data.sources.corpus import Source
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

    def attempt(function: Callable, *args):
        """function(*args); its ValueError becomes a line of `problems`, and the result None."""
        try:
            return function(*args)
        except ValueError as error:
            problems.append(str(error))

    named, evaluated = _named_sources(recipe, problems)
    train = {name: kind for name, source in named.items() if (kind := attempt(open_kind, source, recipe))}
    evals = {name: kind for name, source in evaluated.items()
             if (kind := attempt(open_kind, source, recipe, named.values()))}  # fmt: skip
    if not evaluated:
        evals = {name: brought for name, kind in train.items() if (brought := attempt(kind.validation))}
    brought = next((kind.tokenizer_name for kind in train.values() if kind.tokenizer_name), None)
    if recipe.streaming and not recipe.tokenizer_name and all(kind.corpus for kind in train.values()):
        problems.append("streaming: set tokenizer_name; `python -m data.tokenizer` trains one on a stream.")
    name, most = recipe.tokenizer_name or brought, recipe.max_train_samples
    tokenizer = attempt(load_tokenizer, name) if name else None
    if tokenizer:
        attempt(fill_in_middle, recipe.fim_rate, recipe.seed, tokenizer)
    if most and (recipe.next_sentence or len(named) > 1):
        problems.append("max_train_samples: not for sentence pairs or a mixture; name a part, "
                        f"{recipe.dataset_name[0]}:train[:{most}].")
    for kind in (*train.values(), *evals.values()):
        problems += [line for line in kind.problems(tokenizer) if line not in problems]
    if recipe.special and len({kind.whole for kind in train.values()}) > 1:
        problems.append("mixture: records have special tokens inside, other rows are shorter and get them "
                        "added: mix records with their like.")
    return Sources(recipe, train, evals, tokenizer)


def _named_sources(recipe: Recipe, problems: list[str]) -> tuple[dict[str, Source], dict[str, Source]]:
    """What is trained on and what is evaluated on, by their names in the log. Of several data sets that are
    trained on each may have a configuration and a column of text of its own, and keywords, NAME=keyword."""
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
    train, streaming = {}, recipe.streaming or recipe.max_train_samples > 0
    for short, name, config, column in zip(shorts, recipe.dataset_name, *each.values(), strict=False):
        keywords = tuple(filter(None, words[short] or words[""]))
        train[short] = Source(name, config, "train", column, keywords, streaming, recipe.keep_duplicates)
    column = each["text_column"][0] if len(recipe.text_column) == 1 else None
    shared = dict(text_column=column, keywords=tuple(words[""]), keep_duplicates=recipe.keep_duplicates)
    names = recipe.eval_dataset_name
    return train, {s: Source(name, **shared) for s, name in zip(short_names(names), names, strict=True)}


def _rows_of_run(recipe: Recipe) -> Sources | None:
    """The rows and the tokenizer of the run to continue; None where the cache has not all of it."""
    of_the_run = recipe.saved and recipe.saved["dataset_name"] == [*recipe.dataset_name]  # not another corpus
    if not of_the_run or recipe.streaming:
        return None
    kind = partial(PairRows, pack=recipe.pack_pairs) if recipe.next_sentence else PackedRows
    cached, shorts, saved = {}, short_names(recipe.dataset_name), recipe.saved["train"]
    try:
        prefix = "pairs" if recipe.next_sentence else "rows"
        for manifest in Path(recipe.cache_dir).glob(f"{prefix}-*/{MANIFEST}"):
            splits = PreparedRows(manifest.parent, recipe.row_size, kind).splits
            cached |= {rows.fingerprint: rows for rows in splits.values()}
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
    recipe, tokenizer, most = sources.recipe, sources.tokenizer, sources.recipe.max_train_samples
    names = ", ".join(map(without_secrets, recipe.dataset_name))
    if sources.prepared:
        accelerator.print(f"data       the rows of this run from {recipe.cache_dir}, {names} is not read")
        return Data(recipe, accelerator, tokenizer, *sources.prepared)
    if tokenizer is None:
        tokenizer = trained_tokenizer(
            *(kind.corpus for kind in sources.train.values()), shares=recipe.mixture or (1.0,),
            vocab_size=recipe.vocab_size, cache_dir=recipe.cache_dir, algorithm=recipe.algorithm,
            model_type=recipe.model_type, fim=recipe.fim_rate > 0,
            read_bytes=most and max(1_000_000, 4 * most * recipe.row_size),
        )  # fmt: skip
    train, evals = {}, {}
    for name, kind in sources.evals.items():
        evals |= _named_sets(name, kind.evaluation(tokenizer))
    evaluated = [kind.corpus for kind in sources.evals.values() if kind.corpus]
    hold_out = [name for name in sources.train if not recipe.eval_dataset_name and name not in sources.evals]
    held_out = {name: sources.train[name].held_out(tokenizer) for name in hold_out if len(sources.train) > 1}
    for name, kind in sources.train.items():
        # What the usual fraction holds out elsewhere it holds out here, too, unless this one brings its own.
        others = [corpus for other, corpus in held_out.items() if other != name and (
            name not in hold_out or sources.train[other].fraction > recipe.validation_fraction)]
        made = kind.training(tokenizer, accelerator, name in hold_out, evaluated + others)
        train[name] = made.pop("train")
        evals |= _named_sets(name, made)
    as_it_is = recipe.streaming or not all(kind.corpus for kind in sources.train.values())
    if recipe.eval_dataset_name and as_it_is:
        accelerator.print(f"data       {names} is trained on as it is, with what of it is evaluated on, too; "
                          "rows prepared from text leave such documents out")
    for rows in train.values() if recipe.pack_pairs else ():
        accelerator.print(f"data       {rows.size:,} sentence pairs in {len(rows):,} rows, "
                          f"{rows.padding:.1%} of them padding")
    _await_all(accelerator)
    first = sources.evals if recipe.eval_dataset_name else sources.train
    evals = {name: evals[name] for name in [*first, *evals]}
    return Data(recipe, accelerator, tokenizer, _together(recipe, train), evals)


def _named_sets(name: str, sets: dict) -> dict:
    """The splits of the evaluation set `name`, by names of their own."""
    names = {split: "" if split == "validation" else split for split in sets}
    return {"-".join(filter(None, (name, names[split]))): rows for split, rows in sets.items()}


def _await_all(accelerator) -> None:
    """Until every machine has its rows. No collective: one that waits for 10 minutes (NCCL) ends the run."""
    if accelerator.num_processes > 1 and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        arrived = store.add("prepared", 1)  # a multiple of the processes when all have
        while store.add("prepared", 0) < arrived + -arrived % accelerator.num_processes:
            time.sleep(0.1)
        accelerator.wait_for_everyone()  # the first one may leave at once, and the store with it
