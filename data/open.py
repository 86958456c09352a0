"""Opens the data sets that the settings of a run name, text or token shards, and checks them before any work.

    train, evals, tokenizer = open_all(args, *sources_of_run(args))
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data.batches.mixture import WINDOW
from data.documents.source import EVALUATED, Corpus, Source, open_corpus
from data.tokens.shards import Shards, find_shards
from data.tokens.tokenizer import load_tokenizer


def open_all(args, sources: dict, eval_sources: dict, n_special: int = 0) -> tuple[dict, dict, object]:
    """(data sets to train on, data sets to evaluate on, tokenizer or None to train one).

    A data set is a Corpus or Shards. To evaluate on it may be None: then documents are held out of the one to
    train on with that name. n_special: tokens that masking puts around a row. ValueError: a line for each
    problem."""
    problems = _setting_problems(args)

    def attempt(function: Callable, *arguments):
        """What the function returns; the message of a ValueError joins the problems, for all to be told."""
        try:
            return function(*arguments)
        except ValueError as error:
            problems.append(str(error))

    if args.eval_only and eval_sources:
        sources = {}  # the training data may be gone
    train = {name: attempt(open_source, source) for name, source in sources.items()}
    if eval_sources:
        evals = {name: attempt(open_source, source, True) for name, source in eval_sources.items()}
    else:
        evals = {name: data and attempt(validation_of, data) for name, data in train.items()}
    opened, opened_evals = ([*filter(None, data_sets.values())] for data_sets in (train, evals))
    tokenizer = attempt(_tokenizer, args, opened + opened_evals)
    problems += _misfits(args, opened, opened_evals, tokenizer, n_special)
    if problems:
        raise ValueError("\n".join(problems))
    return train, evals, tokenizer


def open_source(source: Source, evaluate: bool = False) -> Corpus | Shards:
    """The token shards that the source names, or its text. evaluate: use the split that its name gives, else
    the first of EVALUATED. ValueError: it cannot be opened."""
    if not (shards := find_shards(source.dataset_name, source.split)):
        return open_corpus(source, evaluate)
    if evaluate and shards.split == "train":
        return shards.of(next((split for split in EVALUATED if split in shards.splits), "train"))
    return shards


def validation_of(data: Corpus | Shards) -> Corpus | Shards | None:
    """The split of a training set to evaluate on, None where it has none. `misfits` names shards that lack
    it."""
    if isinstance(data, Shards):
        return data.of("validation" if "validation" in data.splits or data.split == "test" else "test")
    if data.source.split.startswith("train") and "validation" in data.splits:
        return open_corpus(replace(data.source, split="validation"))


def _setting_problems(args) -> list[str]:
    problems, shares, n_sets = [], args.mixture, len(args.dataset_name)
    if not n_sets and not (args.eval_only and args.eval_dataset_name):
        problems.append("dataset_name: none is given; give installed-python, a Hub id, a file or a folder.")
    if len(shares) != n_sets and (shares or n_sets > 1):
        problems.append(f"mixture: {len(shares)} shares for {n_sets} data sets. Quote a glob, or the shell "
                        "makes many names of it: --dataset_name 'texts/*.txt'; a mixture needs a share of "
                        "each: --mixture 0.6 0.4")
    elif wrong := [x for x in shares if not 0 <= x <= 1 or abs(x * WINDOW - round(x * WINDOW)) > 1e-3]:
        problems += [f"mixture: {x} is not a share; give 0, or thousandths such as 0.125." for x in wrong]
    elif shares and sum(round(share * WINDOW) for share in shares) != WINDOW:
        problems.append(f"mixture: the shares sum to {sum(shares):g}, not to 1.")
    if args.max_train_samples and (n_sets > 1 or getattr(args, "next_sentence", False)):
        problems.append("max_train_samples: not for sentence pairs or a mixture; name less text instead "
                        "(user/name:train[:1%] of the Hub), or leave it out.")
    return problems


def _tokenizer(args, data_sets: list):
    """The tokenizer that is named, or that made the shards; None to train one."""
    name = args.tokenizer_name or args.model_name_or_path
    if not name and args.eval_only and Path(args.output_dir, "tokenizer.json").exists():
        name = args.output_dir
    for shards in data_sets:
        if not name and isinstance(shards, Shards):
            name = shards.local(args.cache_dir, []).tokenizer
    return load_tokenizer(name) if name else None


def _misfits(args, train: list, evals: list, tokenizer, n_special: int) -> list[str]:
    """A line for each reason why data sets do not fit the settings, the tokenizer or each other."""
    problems, pairs = [], getattr(args, "next_sentence", False)
    shards, eval_shards = ([data for data in group if isinstance(data, Shards)] for group in (train, evals))
    if train and len(shards) == len(train):
        problems += [f"{setting}: for text, and {', '.join(args.dataset_name)} holds tokens: leave it out, "
                     "or give it to data.prepare."
                     for setting in ("keywords", "text_column") if getattr(args, setting)]
    lines = (data.misfits(tokenizer, args.block_size, pairs) for data in shards + eval_shards)
    problems += dict.fromkeys(itertools.chain.from_iterable(lines))
    if n_special and len({bool(getattr(data, "row_tokens", None)) for data in train + evals}) > 1:
        problems.append("dataset_name: some rows have special tokens inside, others get them added: mix and "
                        "evaluate such rows only with their like.")
    for data, other in itertools.product(shards, eval_shards):  # shards cannot leave out what is evaluated on
        splits = data.split in data.splits and other.split in other.splits
        if splits and data.content == other.content:
            problems.append(f"eval_dataset_name: {other.name}, {other.split}, is what is trained on: name "
                            "other data to evaluate on.")
    return problems
