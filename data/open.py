"""What the settings of a run name: opened, checked, prepared.

    made = make_rows(args, problems, "bpe", n_special=0)     # {"tokenizer", "train", "evals"}: where they are
"""

import itertools
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from data.documents.filters import HoldOut, hold_out_of
from data.documents.names import SUFFIXES
from data.documents.source import Source, data_sets_with
from data.tokens.cache import cache_path
from data.tokens.encode import TokenMaker
from data.tokens.preparation import NO_LIMIT
from data.tokens.sets import DataSet, open_set
from data.tokens.shards import Shards
from data.tokens.tokenizer import load_tokenizer, trained_tokenizer
from utils.io.files import write_json
from utils.io.text import without_secrets

# The settings that shape the rows, where a run has them.
SHAPE = """dataset_name mixture dataset_config_name eval_dataset_name text_column keywords validation_fraction
    block_size max_train_samples seed next_sentence""".split()
CHARACTERS = 8  # of text per token, more than usual: so much is held out for a row


def make_rows(args, problems: list[str], algorithm: str, n_special: int) -> dict:
    """{"shape": settings, "tokenizer_name": of them, "tokenizer": folder or name, "train" and "evals":
    {name: part}}, for args.json; made now or by an earlier run. ValueError: the problems, a line each."""
    shape = {name: getattr(args, name, None) for name in SHAPE} | {"n_special": n_special}
    shape = without_secrets(shape)  # it is written, and a password may change
    if not problems and (earlier := _earlier(args, shape)):
        names = ", ".join(map(without_secrets, args.dataset_name))
        print(f"data       the rows that this run began with: {names} is not read", flush=True)
        return earlier
    run = RunData(args, problems, n_special)
    tokenizer = run.tokenizer_name or run.train_tokenizer(algorithm)
    train, evals = run.prepare(load_tokenizer(tokenizer))
    of_text = (f"{part['folder']}/tokenizer" for part in train.values())
    own = next(filter(os.path.isdir, of_text), tokenizer)
    named = {"tokenizer_name": args.tokenizer_name, "tokenizer": own}
    return {"shape": shape, **named, "train": train, "evals": evals}


def _earlier(args, shape: dict) -> dict | None:
    """What args.json of the run to continue says of its rows, if they are in the cache and whole: then its
    source may have changed, or be gone."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        made = json.loads(Path(args.output_dir, "args.json").read_text())["rows"]
        same = args.resume_from_checkpoint != "none" and made["shape"] == json.loads(json.dumps(shape))
        chosen = args.eval_only or args.tokenizer_name in (None, made["tokenizer_name"])
        folders = {part["folder"] for part in [*made["train"].values(), *made["evals"].values()]}
        if same and chosen and not any(Shards(folder).check() for folder in folders):
            return made


class RunData:
    """The data sets that the settings of a run name, by their names in the log: opened and checked.
    ValueError: the problems, a line each."""

    def __init__(self, args, problems: list[str], n_special: int):
        self.args, self.problems = args, list(problems)
        self.cache_dir, self.size = args.cache_dir, args.block_size - n_special
        self.pairs = getattr(args, "next_sentence", False)
        sources, eval_sources = self._sources()
        only_evals = args.eval_only and eval_sources  # then the training data may be gone
        self.sets = {} if only_evals else self._opened(open_set, sources)
        if eval_sources:
            self.evals = self._opened(partial(open_set, evaluate=True), eval_sources)
        else:
            self.evals = self._opened(DataSet.validation, self.sets)
        # The data sets of which documents are held out.
        self.divided = {} if eval_sources else {n: one for n, one in self.sets.items() if n not in self.evals}
        self.every = [*self.sets.values(), *self.evals.values()]
        self.tokenizer_name = self._tokenizer_name()
        self._check(n_special)
        if self.problems:
            raise ValueError("\n".join(self.problems))

    def _attempt(self, function: Callable, *given):
        try:
            return function(*given)
        except ValueError as error:
            self.problems.append(str(error))

    def _opened(self, function: Callable, named: dict) -> dict[str, DataSet]:
        opened = {name: self._attempt(function, value) for name, value in named.items()}
        return {name: one for name, one in opened.items() if one}

    def _sources(self) -> tuple[dict[str, Source], dict[str, Source]]:
        """What to train on, and what to evaluate on."""
        args = self.args
        if not args.dataset_name and not (args.eval_only and args.eval_dataset_name):
            self.problems.append("dataset_name: none is given; give installed-python, a Hub id, a file or a "
                                 "folder.")
        if len(args.dataset_name) > 1 or args.mixture:
            from data.batches.mixture import share_problems

            self.problems += share_problems(args.mixture, args.dataset_name)
        train = dict(
            keywords=tuple(filter(None, args.keywords)), divide=not args.eval_dataset_name,
            streaming=args.streaming or args.max_train_samples > 0,
        )  # fmt: skip
        evaluate = dict(streaming=args.streaming, divide=False)
        column, config = self._single("text_column"), self._single("dataset_config_name")
        having = data_sets_with(config, [*args.dataset_name, *args.eval_dataset_name]) if config else ()
        return tuple({short: Source(name, config if name in having else None, text_column=column, **own)
                      for short, name in zip(short_names(names), names, strict=True)}
                     for names, own in ((args.dataset_name, train), (args.eval_dataset_name, evaluate)))

    def _single(self, setting: str) -> str | None:
        """The value of a setting that is the same for all data sets."""
        given = [value for value in getattr(self.args, setting) if value != "none"]
        if len(given) > 1:
            self.problems.append(f"{setting}: one for all data sets, not {len(given)}.")
        return given[0] if given else None

    def _tokenizer_name(self) -> str | None:
        """Its name or folder, None to train one."""
        args = self.args
        name = args.tokenizer_name or args.model_name_or_path
        if not name and args.eval_only and Path(args.output_dir, "tokenizer.json").exists():
            name = args.output_dir
        if name:
            return name
        return next(filter(None, (one.tokenizer(self.cache_dir) for one in self.every)), None)

    def _check(self, n_special: int) -> None:
        args, named = self.args, self.tokenizer_name
        tokenizer = self._attempt(load_tokenizer, named) if named else None
        if args.max_train_samples and (self.pairs or len(args.dataset_name) > 1):
            self.problems.append("max_train_samples: not for sentence pairs or a mixture; name less text "
                                 "instead (user/name:train[:1%] of the Hub), or leave it out.")
        if self.sets and all(one.shards for one in self.sets.values()):
            self.problems += [f"{setting}: for text, and {', '.join(args.dataset_name)} holds tokens: leave "
                              "it out, or give it to data.prepare."
                              for setting in ("keywords", "text_column") if any(getattr(args, setting))]
        lines = (line for one in self.every for line in one.misfits(tokenizer, args.block_size, self.pairs))
        self.problems += dict.fromkeys(lines)
        if n_special and len({bool(one.shards and one.shards.row_tokens) for one in self.every}) > 1:
            self.problems.append("dataset_name: some rows have special tokens inside, others get them added: "
                                 "mix and evaluate such rows only with their like.")
        of_shards = [[one for one in some.values() if one.shards] for some in (self.sets, self.evals)]
        for one, other in itertools.product(*of_shards):  # shards cannot leave out what is evaluated on
            splits = one.split in one.shards.splits and other.split in other.shards.splits
            if splits and one.shards.content(one.split) == other.shards.content(other.split):
                self.problems.append(f"eval_dataset_name: {other.name}, {other.split}, is what is trained "
                                     "on: name other data to evaluate on.")

    # ---- Prepare

    def train_tokenizer(self, algorithm: str) -> str:
        """The folder of a tokenizer trained on the text."""
        args, max_rows = self.args, self.args.max_train_samples
        read_bytes = max_rows and max(1_000_000, 4 * max_rows * self.size)
        wanted = dict(vocab_size=args.vocab_size, algorithm=algorithm, model_type=args.model_type)
        wanted |= dict(read_bytes=read_bytes, cache_dir=self.cache_dir)
        return trained_tokenizer([one.corpus for one in self.sets.values()], args.mixture or [1.0], **wanted)

    def prepare(self, tokenizer) -> tuple[dict, dict]:
        """({name: part to train on}, {name: part to evaluate on})."""
        args, maker = self.args, TokenMaker(tokenizer)
        if self.pairs and any(one.corpus for one in self.every):
            from data.tokens.pairs import PairMaker

            maker = PairMaker(tokenizer, self.size, args.seed)
        how = maker, self.size, self.cache_dir
        evals = {name: one.parts(*how, split="validation")["validation"] for name, one in self.evals.items()}
        if args.eval_only and not self.divided:
            return dict(list(evals.items())[:1]), evals
        hold_out = self._hold_out()
        evaluated = [one.corpus for one in self.evals.values() if one.corpus]
        held_out = [hold_out.corpus(one.corpus) for one in self.divided.values() if len(self.sets) > 1]
        train = {}
        for name, one in self.sets.items():
            if name in self.divided:  # one rule holds out the same texts in all of these
                parts = one.parts(*how, "train", hold_out, evaluated, args.max_train_samples)
                evals[name] = parts["validation"]
            else:
                parts = one.parts(*how, "train", None, evaluated + held_out, args.max_train_samples)
            train[name] = parts["train"]
        shards = [one.name for one in self.sets.values() if one.shards]
        if args.eval_dataset_name and shards and evaluated:
            print(f"data       {', '.join(shards)} is trained on as it is, also on what is evaluated on; "
                  "only rows that are prepared from text leave that out", flush=True)
        return train, {name: evals[name] for name in (self.evals if args.eval_dataset_name else self.sets)}

    def _hold_out(self) -> HoldOut:
        """One rule for all data sets that are divided, fixed before the first row is made."""
        args, rules = self.args, [HoldOut(0.0)]
        unread = max(args.max_train_samples * self.size or NO_LIMIT, 1 << 14)
        how = args.validation_fraction, CHARACTERS * self.size, 1 + self.pairs, unread
        for corpus in (one.corpus for one in self.divided.values()):
            path = cache_path(self.cache_dir, "hold-out", [corpus.fingerprint, how]).with_suffix(".json")
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, hold_out_of(corpus, *how).settings)
            fraction, more = json.loads(path.read_text())
            rules.append(HoldOut(fraction, frozenset(more)))
        more = frozenset().union(*(rule.more for rule in rules))
        return HoldOut(max(rule.fraction for rule in rules), more)

    def evaluated(self) -> list:
        """The corpora of the documents that are evaluated on."""
        hold_out = self._hold_out()
        held_out = [hold_out.corpus(one.corpus) for one in self.divided.values()]
        return [one.corpus for one in self.evals.values() if one.corpus] + held_out


def short_names(names: list[str]) -> list[str]:
    """The names of data sets in the log: "" for a single one, else the ends of their full names."""
    if len(names) == 1:
        return [""]
    short, endings = [], "|".join(map(re.escape, SUFFIXES))
    for name in names:
        name = without_secrets(Source(name).dataset_name)
        parts = [part for part in re.split(r"[/\\]", name) if part and not set(part) & set("*?[:")]
        stem = re.sub(rf"({endings})?(\.(gz|bz2|xz|zst))?$", "", (parts or [name])[-1])
        while stem in short:
            stem += "-2"
        short.append(stem)
    return short
