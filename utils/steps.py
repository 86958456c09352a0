"""The arithmetic of rows and steps: which rows a step takes, and how many steps a run has.

Steps count from 0. Step s, on all processes together, takes the rows from rows_before(s) up to
rows_before(s + 1) of the endless stream of training rows.
"""

from collections.abc import Callable

from accelerate import PartialState
from accelerate.utils import set_seed


class Steps:
    """The steps of one run. ValueError if there are too few rows for one step.

    rows: the training rows. last: the number of steps. micro_batches: a function step -> micro-batches per
    process, for a batch size that grows; by default gradient_accumulation_steps."""

    def __init__(self, args, accelerator, rows, micro_batches: Callable[[int], int] | None = None):
        self.rows, self._seed, self._row_tokens = rows, args.seed, args.block_size
        self.micro_batches = micro_batches or (lambda step: args.gradient_accumulation_steps)
        self._constant = micro_batches is None
        self._rows_per_micro_batch = args.per_device_train_batch_size * accelerator.num_processes
        self._sums = [0]  # rows before each step, extended on demand
        first, self.last = self.rows_before(1), args.max_train_steps
        if len(rows) < first:
            fits = max(1, len(rows) * args.per_device_train_batch_size // first)
            raise ValueError(f"dataset_name: the text has {len(rows)} rows of {args.block_size} tokens, one "
                             f"step takes {first}. Take more text, lower block_size, or give "
                             f"--per_device_train_batch_size {fits}.")
        if not self.last:
            total_rows = int(len(rows) * args.num_train_epochs)
            while self.rows_before(self.last + 1) <= total_rows:
                self.last += 1
            if self.last < 1:
                rows_text = f"{args.num_train_epochs:g} epochs of {len(rows)} rows are {total_rows} rows"
                raise ValueError(f"num_train_epochs: {rows_text}, and one step takes {first}. Give more "
                                 "epochs, or max_train_steps.")

    def seed(self, step: int) -> None:
        """Makes random numbers, such as those of dropout, a function of (seed, step, process)."""
        set_seed((self._seed * 1_000_003 + step * 4099 + PartialState().process_index) % 2**32)

    def rows_before(self, step: int) -> int:
        """Rows that all processes together take before `step`."""
        if self._constant:
            return step * self._rows_per_micro_batch * self.micro_batches(0)
        while len(self._sums) <= step:
            newest = len(self._sums) - 1
            self._sums.append(self._sums[newest] + self._rows_per_micro_batch * self.micro_batches(newest))
        return self._sums[step]

    def tokens_before(self, step: int) -> int:
        """Tokens that all processes together take before `step`, padding included."""
        return self.rows_before(step) * self._row_tokens

    def epoch(self, step: int) -> float:
        """Passes over the rows before `step`."""
        return self.rows_before(step) / len(self.rows)

    def epochs(self, step: int) -> dict[str, float]:
        """{dataset: passes over its rows before `step`} for a mixture; {} for a single dataset."""
        return self.rows.epochs(self.rows_before(step)) if hasattr(self.rows, "epochs") else {}

    def due(self, step: int, every: int) -> bool:
        """True at step 0, at the last step and every `every` steps; if `every` is 0, after each pass over the
        rows."""
        if step in (0, self.last):
            return True
        if every:
            return step % every == 0
        passes_before, passes = (self.rows_before(s) // len(self.rows) for s in (step - 1, step))
        return passes > passes_before
