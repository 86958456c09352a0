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

from accelerate import PartialState
from torch.utils.data import DataLoader

from data.batches.order import evaluation_order, evaluation_rows
from data.batches.rows import Order, PackedRows
from data.open import make_rows
from data.tokens.sets import rows_of
from data.tokens.tokenizer import load_tokenizer


def load_rows(args, algorithm: str = "bpe", n_special: int = 0) -> tuple:
    """(tokenizer, rows, {name: rows to evaluate on}); a single evaluation set is named "".

    Call it on the first process of each machine first: it prepares them in cache_dir, where the others find
    them. algorithm: of a tokenizer to be trained. n_special: tokens that masking puts around a row.
    ValueError with one line for each problem, before any work, or where a split has no row.

    rows: len(rows), rows.fingerprint, rows.columns(row, epoch), rows.epochs(position); of those to evaluate
    on also bytes_per_token, nan where it is unknown. With eval_only the rows may be those to evaluate on."""
    silent = contextlib.redirect_stdout(io.StringIO())  # what happens is told once
    with contextlib.nullcontext() if PartialState().is_local_main_process else silent:
        made = make_rows(args, [], algorithm, n_special)
    tokenizer = load_tokenizer(made["tokenizer"])
    tokenizer.model_max_length = args.block_size  # saved with it
    train = {name: rows_of(part) for name, part in made["train"].items()}
    evals = {name: rows_of(part) for name, part in made["evals"].items()}
    if len(train) > 1:
        from data.batches.mixture import Mixed

        rows = Mixed(args.mixture, args.seed, train)
    else:
        rows = next(iter(train.values()))
    rows.prepared = made  # for args.json: a resume finds its rows by it
    return tokenizer, rows, evals


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
    collate = collate or (lambda batch: batch)
    return DataLoader(rows, batch_size, sampler=order, collate_fn=collate, pin_memory=_pinned())


def _pinned() -> bool:
    """From pinned memory a GPU copies batches while it computes. From other memory each copy would make the
    host wait until the GPU has done all its work."""
    return PartialState().device.type not in ("cpu", "mps", "xla")
