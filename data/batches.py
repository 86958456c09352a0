"""Batches on the device, for the training steps from `start` on and for the evaluation sets.

    for micro_batches in data.batches(steps, start): ...
    for batch in data.evaluation(name): ...

B rows per batch, T tokens per row. A batch names each row's number, position in training, epoch and data set.
"""

import functools
import itertools
from collections.abc import Iterator

from torch.utils.data import DataLoader

from data.encode import tokenizer_fingerprint
from data.mixture import MixedOrder, MixedRows
from data.order import evaluation_order, evaluation_rows
from data.rows import PackedRows


class Data:
    """The rows of a run and the batches of its steps.

    length: training rows, in a mixture those before the first data set repeats; None for streamed text, whose
    end is unknown. evals: name -> rows; a single set is named "". collate: a function batch -> batch, such as
    masking; set it before the first batch. evaluation_collate: the same for evaluation; None: collate."""

    def __init__(self, recipe, accelerator, tokenizer, train: MixedRows, evals: dict[str, PackedRows]):
        self.recipe, self.accelerator, self.tokenizer = recipe, accelerator, tokenizer
        self.train, self.evals = train, evals
        self.collate, self.evaluation_collate = lambda batch: batch, None
        self.length: int | None = train.n_rows
        self.evaluations = {}
        # Computed now: encoding with padding or truncation changes a tokenizer's state.
        self.tokenizer_fingerprint = tokenizer and tokenizer_fingerprint(tokenizer)

    @functools.cached_property
    def fingerprints(self) -> dict:
        """{"tokenizer", "train", "eval": {name: ...}}: each changes with the content that it stands for."""
        evals = {name: rows.fingerprint for name, rows in self.evals.items()}
        return {"tokenizer": self.tokenizer_fingerprint, "train": self.train.fingerprint, "eval": evals}

    def batches(self, steps, start: int) -> Iterator[list[dict]]:
        """The micro-batches of each step from `start` to steps.last - 1, on the device. Ends early, before
        the first step that would lack rows.

        steps: micro_batches(step), per process; rows_before(step), of all processes; last. A batch:
        {"input_ids": int64 [B, T], "position", "epoch", "row", "source": int64 [B], ...}."""
        loader = iter(self.loader(steps.rows_before(start), steps.rows_before(steps.last)))
        for step in range(start, steps.last):
            micro_batches = list(itertools.islice(loader, steps.micro_batches(step)))
            if len(micro_batches) < steps.micro_batches(step):
                return
            yield micro_batches
            self.train.release()

    def loader(self, start: int, stop: int):
        """Batches of the positions start to stop - 1; batch i goes to process i % processes."""
        order = MixedOrder(self.train, start, stop)
        return self._loader(self.train, self.recipe.per_device_train_batch_size, self.collate, order)

    def evaluation(self, name: str = ""):
        """Batches of the rows that `evaluation_rows` chooses, padded with row -1 to whole batches."""
        if name not in self.evaluations:
            drawn = evaluation_rows(len(self.evals[name]), self.recipe.max_eval_samples, self.recipe.seed)
            self.evaluations[name] = self._evaluation_loader(name, drawn)
        return self.evaluations[name]

    def padding(self, name: str = "") -> dict:
        """A batch of nothing but padding, as an evaluation on many processes may end with."""
        return next(iter(self._evaluation_loader(name, [])))

    def _evaluation_loader(self, name: str, drawn: list[int]):
        batch_size, collate = self.recipe.per_device_eval_batch_size, self.evaluation_collate or self.collate
        order = evaluation_order(drawn, batch_size * self.accelerator.num_processes)
        return self._loader(MixedRows(None, {name: self.evals[name]}), batch_size, collate, order)

    def _loader(self, rows, batch_size: int, collate, order):
        # From pinned memory a GPU copies batches while it computes. From other memory each copy would make
        # the host wait until the GPU has done all its work.
        pinned = self.accelerator.device.type not in ("cpu", "mps", "xla")
        loader = DataLoader(rows, batch_size, collate_fn=collate, pin_memory=pinned, sampler=order)
        self.accelerator.dataloader_config.non_blocking = pinned
        return self.accelerator.prepare(loader)
