"""From the settings to rows: opens and checks what they name, then prepares it once per machine.

    sources = open_sources(Recipe.of(args, algorithm="bpe"), problems)  # each mistake: one line in problems
    data = prepare(sources, accelerator)                                # data/batches.py
"""

import itertools
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import torch.distributed as dist

from data.batches import Data
from data.encode import token_dtype, tokenizer_fingerprint
from data.fim import fill_in_middle
from data.groups import Groups
from data.kinds import Kind, open_kind
from data.mixture import MixedRows, Mixture, share_problems
from data.pair_rows import PairRows
from data.rows import PackedRows
from data.shards import MANIFEST, content_of
from data.sources.corpus import Source
from data.streams import StreamedRows
from data.text import PreparedRows, trained_tokenizer
from data.tokenizer import load_tokenizer
from utils.io.secrets import without_secrets

SEVERAL = "dataset_name", "mixture", "dataset_config_name", "eval_dataset_name", "text_column", "keywords"


@dataclass(frozen=True)
class Recipe:
    """The settings that shape the rows, by their names in TrainArgs, and what the script adds to them."""

    dataset_name: tuple[str, ...]
    mixture: tuple[float, ...] = ()
    dataset_config_name: tuple[str, ...] = ()  # one for all data sets, or one each
    eval_dataset_name: tuple[str, ...] = ()
    text_column: tuple[str, ...] = ()  # one for all data sets, or one each
    keywords: tuple[str, ...] = ()
    keep_duplicates: bool = False
    validation_fraction: float = 0.03
    tokenizer_name: str | None = None
    vocab_size: int = 4096
    algorithm: str = "bpe"
    model_type: str = "gpt2"
    block_size: int = 128
    fim_rate: float = 0.0  # share of the documents that are cut to fill in the middle
    n_special: int = 0  # tokens that collate adds; stored rows are so much shorter than block_size
    next_sentence: bool = False  # rows are sentence pairs
    pack_pairs: bool = False  # as many pairs to a row as fit
    streaming: bool = False
    stream_gb: float = 4.0
    cache_dir: str = "cache"
    output_dir: str = ""
    saved: dict | None = field(default=None, hash=False)  # names, fingerprints of the data of a run to resume
    seed: int = 42
    max_train_samples: int = 0
    max_eval_samples: int = 0
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    per_device_eval_batch_size: int = 32

    def __post_init__(self):
        """Makes tuples of lists and of single names."""
        for name in SEVERAL:
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))

    @classmethod
    def of(cls, args, **more) -> "Recipe":
        """Takes the settings of the same names from args, and the rest from `more`."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names} | more)

    @property
    def row_size(self) -> int:
        return self.block_size - self.n_special


@dataclass
class Sources:
    """What a recipe names, opened but not yet prepared."""

    recipe: Recipe
    train: dict[str, Kind] = field(default_factory=dict)
    evals: dict[str, Kind] = field(default_factory=dict)  # empty: hold out a part of the training data
    tokenizer: object = None  # None: train one
    prepared: tuple | None = None  # of a run that resumes: its training rows and evals, from the cache


def open_sources(recipe: Recipe, problems: list[str]) -> Sources:
    """Opens data and tokenizer, and appends one line to `problems` for each mistake.

    Resuming opens neither if the cache has the run's rows."""
    if not recipe.dataset_name:
        problems.append("dataset_name: none is given; give installed-python, a Hub id, a file or a folder.")
        return Sources(recipe)
    problems += (wrong_shares := share_problems(recipe.mixture, recipe.dataset_name))
    if not wrong_shares and (resumed := _rows_of_run(recipe)):
        return resumed

    def attempt(function: Callable, *args):
        """function(*args), or None after a ValueError, which is appended to `problems`."""
        try:
            return function(*args)
        except ValueError as error:
            problems.append(str(error))

    def open_all(sources: dict[str, Source], *trained) -> dict[str, Kind]:
        opened = {name: attempt(open_kind, source, recipe, *trained) for name, source in sources.items()}
        return {name: kind for name, kind in opened.items() if kind}

    named, evaluated = _named_sources(recipe, problems)
    train, evals = open_all(named), open_all(evaluated, named.values())
    if not evaluated:
        evals = {name: own for name, kind in train.items() if (own := attempt(kind.validation))}
    if recipe.streaming and not recipe.tokenizer_name and all(kind.corpus for kind in train.values()):
        problems.append("streaming: set tokenizer_name; `python -m data.tokenizer` trains one on a stream.")
    names = [recipe.tokenizer_name, *(kind.tokenizer_name for kind in train.values())]
    name, max_rows = next(filter(None, names), None), recipe.max_train_samples
    tokenizer = attempt(load_tokenizer, name) if name else None
    if tokenizer:
        attempt(fill_in_middle, recipe.fim_rate, recipe.seed, tokenizer)
    if max_rows and (recipe.next_sentence or len(named) > 1):
        text = next((f"{kind.name}:train[:{max_rows}]" for kind in train.values() if kind.corpus), None)
        remedy = f"name a part of the text instead, {text}" if text else "leave it out"
        problems.append(f"max_train_samples: not for sentence pairs or a mixture; {remedy}.")
    for kind in (*train.values(), *evals.values()):
        problems += [line for line in kind.problems(tokenizer) if line not in problems]
    if recipe.n_special and len({bool(kind.row_tokens) for kind in train.values()}) > 1:
        problems.append("mixture: records have special tokens inside, other rows get them added: mix records "
                        "only with records.")
    return Sources(recipe, train, evals, tokenizer)


def _named_sources(recipe: Recipe, problems: list[str]) -> tuple[dict[str, Source], dict[str, Source]]:
    """The sources to train on and to evaluate on, by their names in the log. Each of several training data
    sets may have its own configuration, text column, and keywords (NAME=keyword)."""
    shorts, each = short_names(recipe.dataset_name), {}
    for setting in ("dataset_config_name", "text_column"):
        given = [None if value == "none" else value for value in getattr(recipe, setting)] or [None]
        if len(given) not in (1, len(shorts)):
            problems.append(f"{setting}: {len(given)} for {len(shorts)} data sets; give one, or one each.")
        each[setting] = given * len(shorts)
    words = {name: [] for name in ["", *shorts]}
    for word in recipe.keywords:
        name, _, own = word.partition("=")
        words[name if name in words else ""].append(own if name and name in words else word)
    train, streaming = {}, recipe.streaming or recipe.max_train_samples > 0
    alike = dict(keep_duplicates=recipe.keep_duplicates, divide=not recipe.eval_dataset_name)
    for short, name, config, column in zip(shorts, recipe.dataset_name, *each.values(), strict=False):
        keywords = tuple(filter(None, words[short] or words[""]))
        train[short] = Source(name, config, "train", column, keywords, streaming, **alike)
    column = each["text_column"][0] if len(recipe.text_column) == 1 else None
    alike |= dict(text_column=column, keywords=tuple(words[""]), streaming=recipe.streaming)
    names = recipe.eval_dataset_name
    return train, {s: Source(name, **alike) for s, name in zip(short_names(names), names, strict=True)}


def _rows_of_run(recipe: Recipe) -> Sources | None:
    """The rows and tokenizer of the run to resume; None where the cache lacks any of them."""
    same_names = recipe.saved and recipe.saved["dataset_name"] == [*recipe.dataset_name]
    if not same_names or recipe.streaming:
        return None
    shorts, saved = short_names(recipe.dataset_name), recipe.saved["train"]
    cached = _cached_rows(recipe, str(recipe.saved))
    try:
        train = {short: cached[saved[short][1] if len(shorts) > 1 else saved] for short in shorts}
        evals = {name: cached[fingerprint] for name, fingerprint in recipe.saved["eval"].items()}
        tokenizer = load_tokenizer(recipe.output_dir)
    except (KeyError, TypeError, ValueError, OSError):  # TypeError: there are more or fewer data sets
        return None
    if tokenizer_fingerprint(tokenizer) != recipe.saved["tokenizer"]:
        return None
    return Sources(recipe, tokenizer=tokenizer, prepared=(_mixed(recipe, train), evals))


def _cached_rows(recipe: Recipe, fingerprints: str) -> dict[str, PackedRows]:
    """{fingerprint: rows} of the folders in the cache whose content is in these fingerprints."""
    kind = partial(PairRows, pack=recipe.pack_pairs) if recipe.next_sentence else PackedRows
    prefix, cached = "pairs" if recipe.next_sentence else "rows", {}
    for manifest in Path(recipe.cache_dir).glob(f"{prefix}-*/{MANIFEST}"):
        with suppress(AttributeError, KeyError, TypeError, ValueError, OSError):  # a broken folder
            splits = json.loads(manifest.read_text())["splits"].values()
            if any(content_of(split["files"]) in fingerprints for split in splits):
                splits = PreparedRows(manifest.parent, recipe.row_size, kind).splits
                cached |= {rows.fingerprint: rows for rows in splits.values()}
    return cached


def _mixed(recipe: Recipe, train: dict) -> MixedRows:
    """The rows of all data sets in their shares; of a single one all rows."""
    if recipe.pack_pairs and len(train) > 1:
        PairRows.align(train.values())
    return MixedRows(Mixture(recipe.mixture if len(train) > 1 else (1.0,), recipe.seed), train)


def short_names(names: tuple[str, ...]) -> list[str]:
    """The names of data sets in the log: "" for a single one, else the ends of their full names."""
    if len(names) == 1:
        return [""]
    short = []
    for name in names:
        name = re.sub(r"\?(\*\*\*|dtype=\w*)$", "", without_secrets(Source(name).dataset_name))
        parts = [part for part in re.split(r"[/\\]", name) if part and not set(part) & set("*?[:")]
        ending = r"(\.(jsonl|json|csv|txt|parquet|bin|tfrecord))?(\.(gz|bz2|xz|zst))?$"
        stem = re.sub(ending, "", (parts or [name])[-1])
        numbered = (f"{stem}-{number}" for number in itertools.count(2))
        short.append(next(name for name in itertools.chain([stem], numbered) if name not in short))
    return short


def prepare(sources: Sources, accelerator) -> Data:
    """Trains a tokenizer if none is named. Prepares the rows once per machine, or opens them as a stream.

    Each data set of a mixture is prepared as if it were alone. ValueError where there is no row."""
    recipe, tokenizer, max_rows = sources.recipe, sources.tokenizer, sources.recipe.max_train_samples
    names = ", ".join(map(without_secrets, recipe.dataset_name))
    if sources.prepared:
        accelerator.print(f"data       the rows of this run from {recipe.cache_dir}, {names} is not read")
        return Data(recipe, accelerator, tokenizer, *sources.prepared)
    if tokenizer is None:
        read_bytes = max_rows and max(1_000_000, 4 * max_rows * recipe.row_size)
        wanted = dict(vocab_size=recipe.vocab_size, algorithm=recipe.algorithm, model_type=recipe.model_type)
        wanted |= dict(fim=recipe.fim_rate > 0, read_bytes=read_bytes, cache_dir=recipe.cache_dir)
        corpora, shares = [kind.corpus for kind in sources.train.values()], recipe.mixture or (1.0,)
        tokenizer = trained_tokenizer(*corpora, shares=shares, **wanted)
    train, evals = {}, {}
    for name, kind in sources.evals.items():
        evals |= _named_sets(name, kind.evaluation(tokenizer))
    evaluated = [kind.corpus for kind in sources.evals.values() if kind.corpus]
    hold_out = [name for name in sources.train if not recipe.eval_dataset_name and name not in sources.evals]
    held_out = {name: sources.train[name].held_out() for name in hold_out if len(sources.train) > 1}
    for (name, kind), share in zip(sources.train.items(), recipe.mixture or (1.0,), strict=True):
        # Equal fractions hold out the same texts everywhere. Other sets matter only where this one holds out
        # nothing, or their fraction was raised.
        others = [corpus for other, corpus in held_out.items() if other != name and (
            name not in hold_out or sources.train[other].fraction > recipe.validation_fraction)]
        rows = kind.training(tokenizer, share, name in hold_out, evaluated + others)
        train[name] = rows.pop("train")
        evals |= _named_sets(name, rows)
    as_it_is = recipe.streaming or not all(kind.corpus for kind in sources.train.values())
    if recipe.eval_dataset_name and as_it_is:
        accelerator.print(f"data       {names} is trained on as it is, also on what is evaluated on; only "
                          "rows that are prepared from text leave that out")
    _start_streams(train, recipe, token_dtype(tokenizer).itemsize, accelerator)
    for rows in filter(len, train.values() if recipe.pack_pairs else ()):
        accelerator.print(f"data       {len(rows.spans):,} sentence pairs in {len(rows):,} rows, "
                          f"{rows.padding:.1%} of them padding")
    _await_all(accelerator)
    first = sources.evals if recipe.eval_dataset_name else sources.train
    evals = {name: evals[name] for name in [*first, *evals]}
    return Data(recipe, accelerator, tokenizer, _mixed(recipe, train), evals)


def _start_streams(train: dict, recipe: Recipe, token_bytes: int, accelerator) -> None:
    """Puts rows of streams, which share stream_gb, in the place of Groups. ValueError: it is less than all
    processes need at once."""
    groups = {name: rows for name, rows in train.items() if isinstance(rows, Groups)}
    processes, row_bytes = accelerator.num_processes, recipe.row_size * token_bytes
    step = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps * processes
    each = 2 * row_bytes * (step + max((source.size for source in groups.values()), default=0))
    if groups and recipe.stream_gb < (least := len(groups) * each / 1e9):
        raise ValueError(f"stream_gb: must be {least:.3g} or greater for rows of {recipe.block_size} tokens, "
                         f"{processes} processes and {len(groups)} streams, is {recipe.stream_gb:g}.")
    here = accelerator.local_process_index, int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    for name, source in groups.items():
        max_bytes = int(recipe.stream_gb * 1e9 / len(groups))
        train[name] = StreamedRows(source, recipe.cache_dir, max_bytes, *here)


def _named_sets(name: str, sets: dict) -> dict:
    """The splits of the evaluation set `name`, by their names in the log."""
    names = {split: [name, split] if split != "validation" else [name] for split in sets}
    return {"-".join(filter(None, names[split])): rows for split, rows in sets.items()}


def _await_all(accelerator) -> None:
    """Waits until every machine has its rows; not by a collective, which NCCL ends after 10 minutes."""
    if accelerator.num_processes > 1 and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        arrived = store.add("prepared", 1)  # a multiple of num_processes once all have arrived
        while store.add("prepared", 0) < arrived + -arrived % accelerator.num_processes:
            time.sleep(0.1)
        accelerator.wait_for_everyone()  # the store ends with process 0, which must not leave early
