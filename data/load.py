"""From the settings of a run to its rows and their batches.

    tokenizer, rows, eval_rows = load_rows(args)
    batches = accelerator.prepare(train_loader(rows, args, first, last))      # rows of [B, T]
    eval_batches = accelerator.prepare(eval_loader(eval_rows[""], args))

B rows per micro-batch, T tokens per row (block_size). A batch is a dict of the rows' columns, such as
input_ids int64 [B, T], and for each row [B] its position in the stream, epoch, row number and source (the
number of its dataset).
"""

import contextlib
import io
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from accelerate import PartialState
from torch.utils.data import DataLoader

from data.batches.mixture import WINDOW, Mixed
from data.batches.order import evaluation_order, evaluation_rows
from data.batches.rows import Order, PackedRows
from data.documents.source import EVALUATED, Corpus, Source, by_short_names, open_corpus, set_configuration
from data.prepare import prepare_all
from data.tokens.shards import Shards, find_shards
from data.tokens.tokenizer import find_or_train_tokenizer, load_tokenizer
from utils.io.text import without_secrets

# The settings that decide what the rows are. train_clm.py has no next_sentence.
ROW_SETTINGS = """dataset_name mixture dataset_config_name eval_dataset_name text_column keywords
    validation_fraction block_size max_train_samples seed next_sentence""".split()


def load_rows(args, algorithm: str = "bpe", n_special: int = 0) -> tuple:
    """Returns (tokenizer, training rows, {name: evaluation rows}); a single evaluation set has the name "".

    Call it on the first process of each machine first: that process prepares the rows in cache_dir, and the
    others find them there. algorithm: bpe or unigram, if a tokenizer is trained. n_special: the number of
    special tokens that masking adds to each row. ValueError before any work, with a line for each problem;
    or later, if a split has too little text for a row.

    Rows have len(rows), rows.fingerprint, rows.columns(row, epoch), rows.epochs(position). Evaluation rows
    also have bytes_per_token, nan if unknown. With eval_only the training rows may be evaluation rows."""
    shape = {name: getattr(args, name, None) for name in ROW_SETTINGS} | {"n_special": n_special}
    shape = without_secrets(shape)  # it is saved in args.json; a run may continue with another password
    silent = contextlib.redirect_stdout(io.StringIO())  # one process per machine prints
    with contextlib.nullcontext() if PartialState().is_local_main_process else silent:
        prepared = _rows_of_run(args, shape) or _prepare_rows(args, shape, algorithm, n_special)
    tokenizer = load_tokenizer(prepared["tokenizer"])
    tokenizer.model_max_length = args.block_size  # saved with the model
    T = args.block_size - n_special
    train, evals = ({name: Shards(**place) for name, place in prepared[group].items()}
                    for group in ("train", "evals"))
    sources = {name: shards.rows(T, args.max_train_samples) for name, shards in train.items()}
    rows = Mixed(args.mixture, args.seed, sources) if len(sources) > 1 else next(iter(sources.values()))
    rows.prepared = prepared
    return tokenizer, rows, {name: shards.rows(T) for name, shards in evals.items()}


def _rows_of_run(args, shape: dict) -> dict | None:
    """Where the rows of the run in output_dir are, from its args.json; None if there is no such run, its rows
    are damaged or the settings ask for others. With them a run continues even if its dataset is gone."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        prepared = json.loads(Path(args.output_dir, "args.json").read_text())["rows"]
        same_shape = prepared["shape"] == json.loads(json.dumps(shape))
        same_tokenizer = args.eval_only or args.tokenizer_name in (None, prepared["tokenizer_name"])
        if args.resume_from_checkpoint == "none" or not same_shape or not same_tokenizer:
            return None
        places = [*prepared["train"].values(), *prepared["evals"].values()]
        folders = {place["folder"]: Shards(**place) for place in places}
        if prepared["tokenizer"] and not any(shards.check() for shards in folders.values()):
            names = ", ".join(map(without_secrets, args.dataset_name + args.eval_dataset_name))
            print(f"data       using the rows of this run's first start; {names} is not read again",
                  flush=True)
            return prepared


def _prepare_rows(args, shape: dict, algorithm: str, n_special: int) -> dict:
    """Prepares the rows, or finds them in the cache. Returns where they are, for args.json."""
    train, evals, tokenizer = open_all(args, n_special)
    if tokenizer is None:
        max_tokens = args.max_train_samples * (args.block_size - n_special)
        read_bytes = max_tokens and max(1_000_000, 4 * max_tokens)
        settings = dict(vocab_size=args.vocab_size, algorithm=algorithm, model_type=args.model_type)
        settings |= dict(cache_dir=args.cache_dir, read_bytes=read_bytes)
        tokenizer = find_or_train_tokenizer([*train.values()], args.mixture or [1.0], **settings)
    train, evals = prepare_all(args, train, evals, tokenizer, n_special)
    folders = (shards.tokenizer for shards in train.values())
    prepared = {"shape": shape, "tokenizer_name": args.tokenizer_name,
                "tokenizer": next(filter(os.path.isdir, folders), tokenizer.name_or_path)}
    for group, data_sets in (("train", train), ("evals", evals)):
        prepared[group] = {name: shards.place for name, shards in data_sets.items()}
    return prepared


def train_loader(rows, args, first: int = 0, last: int | None = None, collate=None) -> DataLoader:
    """Batches of the positions first to last - 1 of the endless stream of rows; last=None: one pass over the
    rows. accelerator.prepare then gives batch i to process i % processes."""
    order = Order(rows, first, first + len(rows) if last is None else last, args.seed)
    return _make_loader(rows, args.per_device_train_batch_size, order, collate)


def eval_loader(rows: PackedRows, args, collate=None) -> DataLoader:
    """Batches of all rows, or of max_eval_samples rows, the same ones for every seed. The last batches are
    padded with rows numbered -1, so that all processes get equally many full batches."""
    row_numbers = evaluation_rows(len(rows), args.max_eval_samples)
    batch_size = args.per_device_eval_batch_size
    order = evaluation_order(row_numbers, batch_size * PartialState().num_processes)
    return _make_loader(rows, batch_size, order, collate)


def _make_loader(rows, batch_size: int, order, collate) -> DataLoader:
    # From pinned memory a GPU copies batches while it computes. From pageable memory each copy would make
    # the host wait until the GPU is idle.
    pin_memory = PartialState().device.type not in ("cpu", "mps", "xla")
    collate = collate or (lambda batch: batch)
    return DataLoader(rows, batch_size, sampler=order, collate_fn=collate, pin_memory=pin_memory)


# ---- The datasets of a run, opened and checked before any work


def open_all(args, n_special: int = 0) -> tuple[dict, dict, object]:
    """Returns ({name: training set}, {name: evaluation set}, tokenizer), the tokenizer None if one must be
    trained.

    A dataset is a Corpus (text) or Shards (tokens). An evaluation set that is None will be held out of the
    training set of the same name. ValueError with a line for each problem."""
    problems = _check_settings(args)

    def attempt(function: Callable, *arguments):
        """Calls the function. If it raises ValueError, notes the message, so that the user sees them all."""
        try:
            return function(*arguments)
        except ValueError as error:
            problems.append(str(error))

    sources, eval_sources = _choose_sources(args)
    if args.eval_only and eval_sources:
        sources = {}  # the training data is not read, and may be gone
    train = {name: attempt(open_source, source) for name, source in sources.items()}
    if eval_sources:
        evals = {name: attempt(open_source, source, True) for name, source in eval_sources.items()}
    else:
        evals = {name: data and attempt(open_validation, data) for name, data in train.items()}
    opened, opened_evals = ([*filter(None, data_sets.values())] for data_sets in (train, evals))
    tokenizer = attempt(_choose_tokenizer, args, opened + opened_evals)
    problems += _find_misfits(args, opened, opened_evals, tokenizer, n_special)
    if problems:
        raise ValueError("\n".join(problems))
    return train, evals, tokenizer


def _choose_sources(args) -> tuple[dict[str, Source], dict[str, Source]]:
    """Returns the training data and the evaluation data of a run, both as {name in the log: Source}."""
    train = [Source(name, text_column=args.text_column, keywords=tuple(filter(None, args.keywords)),
                    streaming=args.streaming or args.max_train_samples > 0,  # then only the beginning is read
                    divide=not args.eval_dataset_name) for name in args.dataset_name]
    evals = [Source(name, text_column=args.text_column, streaming=args.streaming, divide=False)
             for name in args.eval_dataset_name]
    if args.dataset_config_name:
        set_configuration(args.dataset_config_name, train + evals)
    return by_short_names(train), by_short_names(evals)


def open_source(source: Source, evaluate: bool = False) -> Corpus | Shards:
    """Opens token shards or text. evaluate: if the name of the source gives no split, use the first of
    EVALUATED that the source has. ValueError if it cannot be opened."""
    if not (shards := find_shards(source.dataset_name, source.split)):
        return open_corpus(source, evaluate)
    if evaluate and shards.split == "train":
        return shards.with_split(next((split for split in EVALUATED if split in shards.splits), "train"))
    return shards


def open_validation(data: Corpus | Shards) -> Corpus | Shards | None:
    """The validation split of a training set; None for text without one. For token shards without one the
    split is not checked here: `Shards.find_misfits` reports it."""
    if isinstance(data, Shards):
        only_test = "test" in data.splits and "validation" not in data.splits and data.split != "test"
        return data.with_split("test" if only_test else "validation")
    if data.source.split.startswith("train") and "validation" in data.splits:
        return open_corpus(replace(data.source, split="validation"))


def _check_settings(args) -> list[str]:
    problems, shares, n_sets = [], args.mixture, len(args.dataset_name)
    if not n_sets and not (args.eval_only and args.eval_dataset_name):
        problems.append("dataset_name: none is given; give installed-python, a Hub id, a file or a folder.")
    if len(shares) != n_sets and (shares or n_sets > 1):
        problems.append(f"mixture: {len(shares)} shares for {n_sets} datasets; give a share of each, such "
                        "as --mixture 0.6 0.4. If you named files by a glob, quote it: 'texts/*.txt'.")
    elif wrong := [x for x in shares if not 0 <= x <= 1 or abs(x * WINDOW - round(x * WINDOW)) > 1e-3]:
        problems += [f"mixture: {x} is not a share; give thousandths, such as 0.125, or 0." for x in wrong]
    elif shares and sum(round(share * WINDOW) for share in shares) != WINDOW:
        problems.append(f"mixture: the shares sum to {sum(shares):g}, not to 1.")
    if args.max_train_samples and (n_sets > 1 or getattr(args, "next_sentence", False)):
        problems.append("max_train_samples: does not work with sentence pairs or a mixture; leave it out, or "
                        "name less text instead (user/name:train[:1%] of the Hub).")
    return problems


def _choose_tokenizer(args, data_sets: list):
    """The tokenizer that the settings name, else the one that made the token shards, else None."""
    name = args.tokenizer_name or args.model_name_or_path
    if not name and args.eval_only and Path(args.output_dir, "tokenizer.json").exists():
        name = args.output_dir
    for shards in data_sets:
        if not name and isinstance(shards, Shards):
            name = shards.local(args.cache_dir, []).tokenizer
    return load_tokenizer(name) if name else None


def _find_misfits(args, train: list, evals: list, tokenizer, n_special: int) -> list[str]:
    """Says, a line each, why datasets do not fit the settings, the tokenizer or each other."""
    problems, pairs = [], getattr(args, "next_sentence", False)
    shards, eval_shards = ([data for data in group if isinstance(data, Shards)] for group in (train, evals))
    if train and len(shards) == len(train):
        problems += [f"{setting}: works on text only, and {', '.join(args.dataset_name)} holds tokens: leave "
                     "it out, or give it to data.prepare."
                     for setting in ("keywords", "text_column") if getattr(args, setting)]
    lines = (data.find_misfits(tokenizer, args.block_size, pairs) for data in shards + eval_shards)
    problems += dict.fromkeys(itertools.chain.from_iterable(lines))
    if n_special and len({bool(getattr(data, "row_tokens", None)) for data in train + evals}) > 1:
        problems.append("dataset_name: the rows of some datasets already hold special tokens, those of "
                        "others do not: train and evaluate on datasets of one kind.")
    # Documents of an evaluation set are left out of training text, but cannot be left out of token shards.
    for data, other in itertools.product(shards, eval_shards):
        splits = data.split in data.splits and other.split in other.splits
        if splits and data.content == other.content:
            problems.append(f"eval_dataset_name: {other.name}, {other.split}, is also the training data: "
                            "name other data to evaluate on.")
    return problems
