"""All row arithmetic: which rows a step takes, how many steps there are, what was seen before a step.

Steps count from 0: on all processes together, step s takes the rows rows_before(s) to rows_before(s + 1) of
the endless stream of training rows.
"""

from collections.abc import Callable


class Steps:
    """The steps of one run. ValueError if there are too few rows for one step.

    Two functions of the step: micro_batches per process, if a batch grows (else gradient_accumulation_steps),
    and row_tokens, if rows are shortened (else block_size)."""

    def __init__(self, args, accelerator, rows: int | None, micro_batches: Callable[[int], int] | None = None,
                 row_tokens: Callable[[int], int] | None = None):
        self.rows = rows  # of one epoch; None for a stream
        self.micro_batches = micro_batches or (lambda step: args.gradient_accumulation_steps)
        self._row_tokens = row_tokens or (lambda step: args.block_size)
        self._constant = micro_batches is None and row_tokens is None
        self._rows_each = args.per_device_train_batch_size * accelerator.num_processes
        self._sums = [(0, 0)]  # rows and tokens before each step, extended on demand
        first, self.last = self.rows_before(1), args.max_train_steps
        if not self.last:
            wanted = int(rows * args.num_train_epochs)
            while self.rows_before(self.last + 1) <= wanted:
                self.last += 1
        if rows is not None and rows < first:
            raise ValueError(f"dataset_name: too few rows of {args.block_size} tokens: it gives {rows}, and "
                             f"one step takes {first}. Take more text, or lower block_size, "
                             "per_device_train_batch_size or gradient_accumulation_steps.")
        if self.last < 1:
            raise ValueError(f"num_train_epochs: {args.num_train_epochs:g} of {rows} rows are {wanted}, and "
                             f"one step takes {first}. Give more epochs, or max_train_steps.")
        self.per_epoch = max(1, (rows or 0) // first)

    def rows_before(self, step: int) -> int:
        """Rows that all processes together take before `step`."""
        return self._before(step)[0]

    def tokens_before(self, step: int) -> int:
        """Tokens of these rows, padding included."""
        return self._before(step)[1]

    def epoch(self, step: int) -> float | None:
        """Passes over the rows before `step`; None for a stream."""
        return self.rows_before(step) / self.rows if self.rows else None

    def every(self, steps: int) -> int:
        """`steps`; if 0, an epoch's steps at the first batch size."""
        return steps or self.per_epoch

    def count(self, steps: float) -> int:
        """`steps`; if it is below 1, this share of all steps."""
        return int(steps * (self.last if steps < 1 else 1))

    def _before(self, step):
        if self._constant:
            rows = step * self._rows_each * self.micro_batches(0)
            return rows, rows * self._row_tokens(0)
        while len(self._sums) <= step:
            now, (rows, tokens) = len(self._sums) - 1, self._sums[-1]
            new = self._rows_each * self.micro_batches(now)
            self._sums.append((rows + new, tokens + new * self._row_tokens(now)))
        return self._sums[step]
