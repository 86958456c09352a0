"""From the settings of a run to its rows and their batches.

    tokenizer, rows, eval_rows = load_rows(args)
    batches = accelerator.prepare(train_loader(rows, args, first, last))      # rows of [B, T]
    eval_batches = accelerator.prepare(eval_loader(eval_rows[""], args))

B rows per micro-batch, T tokens per row (block_size). A batch has the columns of its rows, input_ids int64
[B, T] among them, and of each row [B] its position in the stream, epoch, row and source, the number of its
data set.
"""

import contextlib
import io
import json
import os
from pathlib import Path

from accelerate import PartialState
from torch.utils.data import DataLoader

from data.batches.mixture import Mixed
from data.batches.order import evaluation_order, evaluation_rows
from data.batches.rows import Order, PackedRows
from data.documents.source import sources_of_run
from data.open import open_all
from data.prepare import prepare_all
from data.tokens.shards import Shards
from data.tokens.tokenizer import load_tokenizer, trained_tokenizer
from utils.io.text import without_secrets

# The settings that shape the rows, where a run has them.
SHAPE = """dataset_name mixture dataset_config_name eval_dataset_name text_column keywords validation_fraction
    block_size max_train_samples seed next_sentence""".split()


def load_rows(args, algorithm: str = "bpe", n_special: int = 0) -> tuple:
    """(tokenizer, rows, {name: rows to evaluate on}); a single evaluation set is named "".

    Call it on the first process of each machine first: it prepares them in cache_dir, where the others find
    them. algorithm: of a tokenizer to be trained. n_special: tokens that masking puts around a row.
    ValueError with one line for each problem, before any work, or where a split has no row.

    rows: len(rows), rows.fingerprint, rows.columns(row, epoch), rows.epochs(position); of those to evaluate
    on also bytes_per_token, nan where it is unknown. With eval_only the rows may be those to evaluate on."""
    shape = {name: getattr(args, name, None) for name in SHAPE} | {"n_special": n_special}
    shape = without_secrets(shape)  # it is written, and a password may change
    silent = contextlib.redirect_stdout(io.StringIO())  # what happens is told once
    with contextlib.nullcontext() if PartialState().is_local_main_process else silent:
        prepared = _rows_of_run(args, shape) or _prepare(args, shape, algorithm, n_special)
    tokenizer = load_tokenizer(prepared["tokenizer"])
    tokenizer.model_max_length = args.block_size  # saved with it
    T = args.block_size - n_special
    train, evals = ({name: Shards(**place) for name, place in prepared[group].items()}
                    for group in ("train", "evals"))
    sources = {name: shards.rows(T, args.max_train_samples) for name, shards in train.items()}
    rows = Mixed(args.mixture, args.seed, sources) if len(sources) > 1 else next(iter(sources.values()))
    rows.prepared = prepared
    return tokenizer, rows, {name: shards.rows(T) for name, shards in evals.items()}


def _rows_of_run(args, shape: dict) -> dict | None:
    """What args.json of the run to continue says of its rows, if they are whole: then their source may have
    changed, or be gone."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        prepared = json.loads(Path(args.output_dir, "args.json").read_text())["rows"]
        same = args.resume_from_checkpoint != "none" and prepared["shape"] == json.loads(json.dumps(shape))
        if not same or not (args.eval_only or args.tokenizer_name in (None, prepared["tokenizer_name"])):
            return None
        places = [*prepared["train"].values(), *prepared["evals"].values()]
        folders = {place["folder"]: Shards(**place) for place in places}
        if prepared["tokenizer"] and not any(shards.check() for shards in folders.values()):
            names = ", ".join(map(without_secrets, args.dataset_name))
            print(f"data       the rows that this run began with: {names} is not read", flush=True)
            return prepared


def _prepare(args, shape: dict, algorithm: str, n_special: int) -> dict:
    """The same of rows that are prepared now, or found in the cache. ValueError: the user's mistakes, a line
    each."""
    sources, eval_sources = sources_of_run(args)
    train, evals, tokenizer = open_all(args, sources, eval_sources, n_special)
    if tokenizer is None:
        first_rows = args.max_train_samples * (args.block_size - n_special)
        read_bytes = first_rows and max(1_000_000, 4 * first_rows)
        settings = dict(vocab_size=args.vocab_size, algorithm=algorithm, model_type=args.model_type)
        settings |= dict(cache_dir=args.cache_dir, read_bytes=read_bytes)
        tokenizer = trained_tokenizer([*train.values()], args.mixture or [1.0], **settings)
    train, evals = prepare_all(args, train, evals, tokenizer, n_special)
    folders = (shards.tokenizer for shards in train.values())
    prepared = {"shape": shape, "tokenizer_name": args.tokenizer_name,
                "tokenizer": next(filter(os.path.isdir, folders), tokenizer.name_or_path)}
    for group, data_sets in (("train", train), ("evals", evals)):
        prepared[group] = {name: shards.place for name, shards in data_sets.items()}
    return prepared


def train_loader(rows, args, first: int = 0, last: int | None = None, collate=None) -> DataLoader:
    """Batches of the positions first to last - 1 of the endless order, last: None for one pass over the rows.
    Prepared, batch i goes to process i % processes."""
    order = Order(rows, first, first + len(rows) if last is None else last, args.seed)
    return _loader(rows, args.per_device_train_batch_size, order, collate)


def eval_loader(rows: PackedRows, args, collate=None) -> DataLoader:
    """Batches of all rows, or of max_eval_samples of them, the same for every seed, filled up with row -1 to
    whole batches on all processes."""
    drawn = evaluation_rows(len(rows), args.max_eval_samples)
    batch_size = args.per_device_eval_batch_size
    order = evaluation_order(drawn, batch_size * PartialState().num_processes)
    return _loader(rows, batch_size, order, collate)


def _loader(rows, batch_size: int, order, collate) -> DataLoader:
    # From pinned memory a GPU copies batches while it computes. From other memory each copy would make the
    # host wait until the GPU has done all its work.
    pinned = PartialState().device.type not in ("cpu", "mps", "xla")
    collate = collate or (lambda batch: batch)
    return DataLoader(rows, batch_size, sampler=order, collate_fn=collate, pin_memory=pinned)
