"""All row arithmetic: which rows a step takes, how many steps there are, what was seen before a step.

Steps count from 0: on all processes together, step s takes the rows rows_before(s) to rows_before(s + 1) of
the endless stream of training rows.
"""

from collections.abc import Callable

from accelerate import PartialState
from accelerate.utils import set_seed


class Steps:
    """The steps of one run. ValueError if there are too few rows for one step.

    rows: what is trained on. last: the number of steps. micro_batches: per process, a function of the step,
    if a batch grows (else gradient_accumulation_steps)."""

    def __init__(self, args, accelerator, rows, micro_batches: Callable[[int], int] | None = None):
        self.rows, self._seed, self._row_tokens = rows, args.seed, args.block_size
        self.micro_batches = micro_batches or (lambda step: args.gradient_accumulation_steps)
        self._constant = micro_batches is None
        self._rows_each = args.per_device_train_batch_size * accelerator.num_processes
        self._sums = [0]  # rows before each step, extended on demand
        first, self.last = self.rows_before(1), args.max_train_steps
        if len(rows) < first:
            fits = max(1, len(rows) * args.per_device_train_batch_size // first)
            raise ValueError(f"dataset_name: too few rows of {args.block_size} tokens: it gives {len(rows)}, "
                             f"and one step takes {first}. Take more text, or lower block_size or "
                             f"per_device_train_batch_size: it may be {fits}.")
        if not self.last:
            wanted = int(len(rows) * args.num_train_epochs)
            while self.rows_before(self.last + 1) <= wanted:
                self.last += 1
            if self.last < 1:
                part = f"{args.num_train_epochs:g} of {len(rows)} rows are {wanted}"
                raise ValueError(f"num_train_epochs: {part}, and one step takes {first}. Give more epochs, "
                                 "or max_train_steps.")

    def seed(self, step: int) -> None:
        """Makes random numbers, those of dropout and of the script's own, a function of (seed, step,
        process)."""
        set_seed((self._seed * 1_000_003 + step * 4099 + PartialState().process_index) % 2**32)

    def rows_before(self, step: int) -> int:
        """Rows that all processes together take before `step`."""
        if self._constant:
            return step * self._rows_each * self.micro_batches(0)
        while len(self._sums) <= step:
            newest = len(self._sums) - 1
            self._sums.append(self._sums[newest] + self._rows_each * self.micro_batches(newest))
        return self._sums[step]

    def tokens_before(self, step: int) -> int:
        """Tokens of these rows, padding included."""
        return self.rows_before(step) * self._row_tokens

    def epoch(self, step: int) -> float:
        """Passes over the rows before `step`."""
        return self.rows_before(step) / len(self.rows)

    def epochs(self, step: int) -> dict[str, float]:
        """The same for each data set of a mixture by its name; {} without one."""
        return self.rows.epochs(self.rows_before(step)) if hasattr(self.rows, "epochs") else {}

    def due(self, step: int, every: int) -> bool:
        """Whether something is due after `step` steps: at 0, at the last, every `every` steps; for 0 at the
        end of each pass over the rows."""
        if step in (0, self.last):
            return True
        if every:
            return step % every == 0
        before, now = (self.rows_before(s) // len(self.rows) for s in (step - 1, step))
        return now > before
