"""What the settings of a run name: opened, checked, prepared.

    made = RunData(args, problems, "bpe", n_special=0).make()     # {"tokenizer", "train", "evals"}: where
"""

import itertools
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from data.documents.filters import HoldOut, few_to_hold_out
from data.documents.source import Source
from data.tokens.cache import build_once
from data.tokens.encode import tokenizer_fingerprint
from data.tokens.preparation import NO_LIMIT, TokenMaker
from data.tokens.sets import is_whole, open_set
from data.tokens.tokenizer import load_tokenizer, trained_tokenizer
from utils.io.secrets import without_secrets

# The settings that shape the rows, where a run has them.
SHAPE = """dataset_name mixture dataset_config_name eval_dataset_name text_column keywords validation_fraction
    block_size max_train_samples seed next_sentence""".split()
CHARACTERS = 8  # of text per token, more than usual: so much is held out for a row


def record(args, fingerprint: str) -> Path:
    """Where it is noted what the rows of a run are made of."""
    name = re.sub(r"[^0-9a-f]+", "-", fingerprint)[:200]
    return Path(os.path.expanduser(args.cache_dir), f"run-{name}.json")


class RunData:
    """What the settings of a run name, opened, checked and prepared."""

    def __init__(self, args, problems: list[str], algorithm: str, n_special: int):
        self.args, self.found_problems, self.algorithm = args, problems, algorithm
        self.cache_dir, self.size = os.path.expanduser(args.cache_dir), args.block_size - n_special
        self.pairs, self.adds = getattr(args, "next_sentence", False), n_special
        shape = {name: getattr(args, name, None) for name in SHAPE} | {"n_special": n_special}
        self.shape = without_secrets(shape)  # it is written, and a password may change
        self.sources, self.eval_sources = {}, {}  # by their names in the log

    def make(self) -> dict:
        """{"shape": settings, "tokenizer": folder or name, "train" and "evals": {name: part}}, made now or by
        an earlier run. ValueError: the problems, a line each."""
        args = self.args
        if not self.found_problems and (earlier := self._earlier()):
            names = ", ".join(map(without_secrets, args.dataset_name))
            print(f"data       the rows of this run from {args.cache_dir}, {names} is not read", flush=True)
            return earlier
        sets, evals, tokenizer = self._open()
        if self.found_problems:
            raise ValueError("\n".join(self.found_problems))
        if tokenizer is None:
            tokenizer = self._train_tokenizer(sets)
        train, evals = self._prepare(sets, evals, load_tokenizer(tokenizer))
        of_text = [part["folder"] for part in train.values() if os.path.isdir(f"{part['folder']}/tokenizer")]
        own = f"{of_text[0]}/tokenizer" if of_text else tokenizer
        return {"shape": self.shape, "tokenizer": own, "train": train, "evals": evals}

    def evaluated(self) -> list:
        """The corpora of the documents that are evaluated on. ValueError: the problems, a line each."""
        sets, evals, _ = self._open()
        if self.found_problems:
            raise ValueError("\n".join(self.found_problems))
        without = [one.corpus for one in self._without(sets, evals).values()]
        hold_out = self._hold_out(without)
        return [one.corpus for one in evals.values() if one.corpus] + [*map(hold_out.corpus, without)]

    def _without(self, sets: dict, evals: dict) -> dict:
        """The data sets of which documents are held out."""
        return {} if self.args.eval_dataset_name else {n: one for n, one in sets.items() if n not in evals}

    def _earlier(self) -> dict | None:
        """What the run to continue was made of, if the cache has all of it whole."""
        args = self.args
        if getattr(args, "resume_from_checkpoint", "auto") == "none":
            return None
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            run = json.loads(Path(os.path.expanduser(args.output_dir), "args.json").read_text())
            made = json.loads(record(args, run["rows"]).read_text())
            same = made["shape"] == json.loads(json.dumps(self.shape))
            parts = [*made["train"].values(), *made["evals"].values()]
            chosen = not args.tokenizer_name or args.eval_only or (
                tokenizer_fingerprint(load_tokenizer(args.tokenizer_name))
                == tokenizer_fingerprint(load_tokenizer(made["tokenizer"])))
            if same and chosen and all(map(is_whole, parts)):
                return made

    # ---- Open and check

    def _open(self) -> tuple[dict, dict, str | None]:
        """(data sets to train on, to evaluate on, the tokenizer's name or None to train one)."""
        args, problems = self.args, self.found_problems
        self._name_sources()

        def attempt(function: Callable, *given):
            try:
                return function(*given)
            except ValueError as error:
                problems.append(str(error))

        sets = {name: attempt(open_set, source) for name, source in self.sources.items()}
        sets = {name: one for name, one in sets.items() if one}
        trained = list(self.sources.values())
        if self.eval_sources:
            evals = {name: attempt(open_set, source, trained) for name, source in self.eval_sources.items()}
        else:
            evals = {name: attempt(one.validation) for name, one in sets.items()}
        evals = {name: one for name, one in evals.items() if one}
        named = self._tokenizer_name([*sets.values(), *evals.values()])
        tokenizer = attempt(load_tokenizer, named) if named else None
        every = [*sets.values(), *evals.values()]
        if args.streaming and not named and not args.max_train_samples and sets:
            problems.append("streaming: set tokenizer_name, or max_train_samples to train one on the "
                            "beginning; `python -m data.tokens.tokenizer` trains one.")
        if args.max_train_samples and (self.pairs or len(self.sources) > 1):
            problems.append("max_train_samples: not for sentence pairs or a mixture; name a part of the text "
                            "instead, NAME:train[:1000], or leave it out.")
        for line in (line for one in every for line in one.problems(tokenizer, args.block_size, self.pairs)):
            problems += [line] if line not in problems else []
        if self.adds and len({bool(one.row_tokens) for one in every}) > 1:
            problems.append("dataset_name: some rows have special tokens inside, others get them added: mix "
                            "and evaluate such rows only with their like.")
        self._check_same(sets, evals)
        return sets, evals, named

    def _name_sources(self) -> None:
        """self.sources and self.eval_sources, by their names in the log."""
        args, problems = self.args, self.found_problems
        if not args.dataset_name:
            problems.append("dataset_name: none is given; give installed-python, a Hub id, a file or a "
                            "folder.")
        if len(args.dataset_name) > 1 or args.mixture:
            from data.batches.mixture import share_problems

            problems += share_problems(args.mixture, args.dataset_name)
        values = []
        for setting in ("dataset_config_name", "text_column"):
            given = [value for value in getattr(args, setting) if value != "none"]
            if len(given) > 1:
                problems.append(f"{setting}: one for all data sets, not {len(given)}.")
            values.append(given[0] if given else None)
        config, column = values
        how = dict(text_column=column, keywords=tuple(word for word in args.keywords if word))
        streaming, names = args.streaming or args.max_train_samples > 0, args.dataset_name
        how |= dict(divide=not args.eval_dataset_name)
        self.sources = {short: Source(name, config, streaming=streaming, **how)
                        for short, name in zip(short_names(names), names, strict=True)}
        names = args.eval_dataset_name
        how |= dict(streaming=args.streaming, divide=False)
        self.eval_sources = {short: Source(name, **how)
                             for short, name in zip(short_names(names), names, strict=True)}

    def _tokenizer_name(self, sets: list) -> str | None:
        args = self.args
        name, output_dir = args.tokenizer_name or args.model_name_or_path, os.path.expanduser(args.output_dir)
        if not name and args.eval_only and Path(output_dir, "tokenizer.json").exists():
            name = output_dir
        if name:
            return os.path.expanduser(name)
        remote = [one for one in sets if one.corpus is None and not one.tokenizer_name]
        if remote:
            return f"{remote[0].shards.local(self.cache_dir, []).folder.root}/tokenizer"
        return next((one.tokenizer_name for one in sets if one.tokenizer_name), None)

    def _check_same(self, sets: dict, evals: dict) -> None:
        """Shards cannot leave out what is evaluated on: the same split of the same ids is refused."""
        for one in (one for one in sets.values() if one.corpus is None):
            for other in (other for other in evals.values() if other.corpus is None):
                both = one.split in one.shards.splits and other.split in other.shards.splits
                if both and one.shards.content(one.split) == other.shards.content(other.split):
                    self.found_problems.append(f"eval_dataset_name: {other.name}, {other.split}, is what is "
                                               "trained on: name other data to evaluate on.")

    # ---- Prepare

    def _train_tokenizer(self, sets: dict) -> str:
        """The folder of a tokenizer trained on the text."""
        args, max_rows = self.args, self.args.max_train_samples
        read_bytes = max_rows and max(1_000_000, 4 * max_rows * self.size)
        wanted = dict(vocab_size=args.vocab_size, algorithm=self.algorithm, model_type=args.model_type)
        wanted |= dict(read_bytes=read_bytes, cache_dir=self.cache_dir)
        return trained_tokenizer([one.corpus for one in sets.values()], args.mixture or [1.0], **wanted)

    def _prepare(self, sets: dict, evals: dict, tokenizer) -> tuple[dict, dict]:
        """({name: part to train on}, {name: part to evaluate on})."""
        args, maker = self.args, TokenMaker(tokenizer)
        if self.pairs and any(one.corpus for one in [*sets.values(), *evals.values()]):
            from data.tokens.pairs import PairMaker

            maker = PairMaker(tokenizer, self.size, args.seed)
        how = maker, self.size, self.cache_dir
        made = {name: one.evaluation(*how) for name, one in evals.items()}
        without = self._without(sets, evals)
        if args.eval_only and not without:
            return dict(list(made.items())[:1]), made
        hold_out = self._hold_out([one.corpus for one in without.values()])
        evaluated = [one.corpus for one in evals.values() if one.corpus]
        held_out = {name: hold_out.corpus(one.corpus) for name, one in without.items() if len(sets) > 1}
        train = {}
        for name, one in sets.items():
            # The same rule holds out the same texts in all sets that it is applied to.
            others = [] if name in without else list(held_out.values())
            rule = hold_out if name in without else None
            parts = one.train(*how, rule, evaluated + others, args.max_train_samples)
            train[name] = parts.pop("train")
            if name in without:
                made[name] = parts["validation"]
        shards = [one.name for one in sets.values() if one.corpus is None]
        if args.eval_dataset_name and shards and evaluated:
            print(f"data       {', '.join(shards)} is trained on as it is, also on what is evaluated on; "
                  "only rows "
                  "that are prepared from text leave that out", flush=True)
        return train, {name: made[name] for name in (evals if args.eval_dataset_name else sets)}

    def _hold_out(self, corpora: list) -> HoldOut:
        """One rule for all data sets that have no validation split, fixed before the first row is made."""
        args, few = self.args, []
        wanted, unread = CHARACTERS * self.size, max(args.max_train_samples * self.size or NO_LIMIT, 1 << 14)
        how = args.seed, args.validation_fraction, wanted, 1 + self.pairs, unread
        for corpus in corpora:

            def build(folder: Path, corpus=corpus) -> None:
                (folder / "few.json").write_text(json.dumps(few_to_hold_out(corpus, *how)))

            folder = build_once(self.cache_dir, "held-out", [corpus.fingerprint, how], build)
            few += json.loads((folder / "few.json").read_text())
        return HoldOut(args.seed, args.validation_fraction, frozenset(few))


def short_names(names: list[str]) -> list[str]:
    """The names of data sets in the log: "" for a single one, else the ends of their full names."""
    if len(names) == 1:
        return [""]
    short = []
    for name in names:
        name = without_secrets(Source(name).dataset_name)
        parts = [part for part in re.split(r"[/\\]", name) if part and not set(part) & set("*?[:")]
        ending = r"(\.(jsonl|ndjson|jsonlines|json|csv|tsv|txt|parquet))?(\.(gz|bz2|xz|zst))?$"
        stem = re.sub(ending, "", (parts or [name])[-1])
        numbered = (f"{stem}-{number}" for number in itertools.count(2))
        short.append(next(name for name in itertools.chain([stem], numbered) if name not in short))
    return short
