"""Rows of tokens for training and evaluation, wherever they come from: text, token shards, or a stream of
either.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, default_collate

from data.order import SampleOrder, evaluation_order, keep_batch
from data.packing import PackedRows, build_once, prepare_rows
from data.shards import check_shards, open_shards
from data.streams import ShardSource, StreamingRows, TextSource


@dataclass
class Rows:
    train: PackedRows | ShardSource | TextSource  # the latter two are read while training
    eval: PackedRows
    eval_bytes_per_token: float  # UTF-8 bytes of the validation documents / their tokens, EOS included
    length: int | None  # training rows; None where only the end of the stream would tell


def rows_from_text(
    corpus, tokenizer, *, block_size, keywords, validation_fraction, eval_corpus, seed, cache_dir,
    streaming=False, max_eval_rows=0,
) -> Rows:  # fmt: skip
    """Prepared once and memory-mapped, or with `streaming` tokenized on the way.

    Of a stream max_eval_rows are set aside for evaluation, from the documents that are not trained on. Raises
    ValueError where either split has no row.
    """
    if not streaming:
        made = prepare_rows(
            corpus, tokenizer, block_size=block_size, keywords=keywords, eval_corpus=eval_corpus, seed=seed,
            validation_fraction=validation_fraction, cache_dir=cache_dir,
        )  # fmt: skip
        return Rows(made.train, made.eval, made.eval_bytes_per_token, len(made.train))
    options = {"block_size": block_size, "keywords": keywords, "validation_seed": seed}
    fraction = 0.0 if eval_corpus else validation_fraction
    train = TextSource(corpus, tokenizer, validation_fraction=fraction, **options)
    held_out = TextSource(
        eval_corpus or corpus, tokenizer, split="train" if eval_corpus else "validation", shuffle_rows=0,
        validation_fraction=fraction, **options,
    )  # fmt: skip

    def build(folder: Path) -> None:
        blocks, rows = held_out.blocks(64), []
        while sum(map(len, rows)) < max_eval_rows and (block := next(blocks, None)):
            rows.append(block[0])
        if not rows:
            raise ValueError(f"dataset_name: no validation row in {corpus.name}; raise validation_fraction.")
        np.save(folder / "validation.npy", np.concatenate(rows)[:max_eval_rows])

    kept = PackedRows(
        build_once(cache_dir, "stream", [held_out.fingerprint, max_eval_rows], build) / "validation.npy"
    )
    text = tokenizer.batch_decode(kept.rows.tolist(), clean_up_tokenization_spaces=False)
    return Rows(train, kept, sum(len(row.encode()) for row in text) / kept.rows.size, None)


def rows_from_shards(url, tokenizer, *, block_size, cache_dir, streaming=False) -> Rows:
    """Rows that `python -m data.prepare` made. Raises ValueError where they do not fit tokenizer or
    block_size.
    """
    validation = check_shards(url, block_size, tokenizer)["accounting"]["validation"]
    kept = open_shards(url, "validation", cache_dir=cache_dir)
    if streaming:
        train = ShardSource(url, "train")
        length = train.n_rows
    else:
        train = open_shards(url, "train", cache_dir=cache_dir)
        length = len(train)
    return Rows(train, kept, validation["bytes"] / max(validation["tokens"], 1), length)


def training_loader(
    accelerator, rows: Rows, batch_size: int, seed: int, start: int, stop: int,
    stream_state: dict | None = None, collate: Callable[[dict], dict] = keep_batch,
):  # fmt: skip
    """Batches {"input_ids": int64 [B, T], "row": [B], "epoch": [B]} of positions start to stop; see
    data/order.py.

    collate: batch -> batch, for example masking. Returns the loader and, where rows are streamed, the stream,
    whose state_dict(position) belongs to the checkpoint (stream_state when resuming).
    """
    if isinstance(rows.train, PackedRows):
        order = SampleOrder(len(rows.train), seed, start, stop)
        return _packed_loader(accelerator, rows.train, batch_size, order, collate), None
    stream = StreamingRows(
        rows.train, batch_size=batch_size, seed=seed, start=start, stop=stop,
        process_index=accelerator.process_index, num_processes=accelerator.num_processes,
    )  # fmt: skip
    if stream_state:
        stream.load_state_dict(stream_state)
    pinned = _pins_memory(accelerator)
    loader = DataLoader(
        stream, batch_size, collate_fn=CollateRows(collate), drop_last=True, pin_memory=pinned
    )
    # The stream gives this process its own rows, so accelerate must not divide them again: one process of
    # one.
    loader = prepare_data_loader(
        loader, accelerator.device, num_processes=1, process_index=0, put_on_device=True, non_blocking=pinned
    )
    return loader, stream


def evaluation_loader(accelerator, rows: Rows, batch_size: int, max_rows: int = 0, collate=keep_batch):
    """Every validation row once (the first max_rows, if that is not 0), then rows marked -1 up to whole
    batches.
    """
    n = min(len(rows.eval), max_rows or len(rows.eval))
    order = evaluation_order(n, batch_size * accelerator.num_processes)
    return _packed_loader(accelerator, rows.eval, batch_size, order, collate)


def _packed_loader(accelerator, rows: PackedRows, batch_size: int, order, collate):
    pinned = accelerator.dataloader_config.non_blocking = _pins_memory(accelerator)
    return accelerator.prepare(
        DataLoader(rows, batch_size, sampler=order, collate_fn=collate, pin_memory=pinned)
    )


def _pins_memory(accelerator) -> bool:
    """Whether batches are copied from pinned memory, while the device computes: to a GPU. From other memory
    each copy would make the host wait for all that the GPU has been given to do.
    """
    return accelerator.device.type not in ("cpu", "mps", "xla")


class CollateRows:
    """Single rows to a batch, then `collate` (a class, because workers need to pickle it)."""

    def __init__(self, collate):
        self.collate = collate

    def __call__(self, rows: list[dict]) -> dict:
        return self.collate(default_collate(rows))
