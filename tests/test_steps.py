"""Rows, tokens and epochs of each step, compared with counting by hand."""

from types import SimpleNamespace

import pytest

from utils.steps import Steps


def args(**changes):
    return SimpleNamespace(**{
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "block_size": 10,
        "max_train_steps": 0, "num_train_epochs": 2.5, "dataset_name": "x", "seed": 1, **changes,
    })  # fmt: skip


TWO = SimpleNamespace(num_processes=2)


def test_rows_tokens_and_epochs_of_a_constant_batch():
    steps = Steps(args(), TWO, range(100))
    assert steps.last == 250 // 24
    assert [steps.rows_before(s) for s in (0, 1, 10)] == [0, 24, 240]
    assert steps.tokens_before(10) == 2400 and steps.epoch(10) == 2.4
    assert [step for step in range(11) if steps.due(step, 4)] == [0, 4, 8, 10]


def test_once_per_epoch_means_the_exact_end_of_each_epoch():
    """A step has 24 of 100 rows: epochs end in steps 5, 9, 13, ... Rounded steps per epoch would drift."""
    steps = Steps(args(num_train_epochs=10), TWO, range(100))
    ends = [step for step in range(1, steps.last) if 24 * step // 100 > 24 * (step - 1) // 100]
    assert [step for step in range(1, steps.last) if steps.due(step, 0)] == ends
    assert ends == [5, 9, 13, 17, 21, 25, 30, 34, 38]
    assert steps.due(0, 0) and steps.due(steps.last, 0)


def test_rows_and_tokens_follow_a_growing_batch():
    """1, 1, 2, 2, 3, 3, ... micro-batches of 8 rows with 10 tokens."""
    counts = [1 + step // 2 for step in range(40)]
    steps = Steps(args(), TWO, range(100), lambda step: 1 + step // 2)
    rows = [8 * sum(counts[:step]) for step in range(40)]
    assert [steps.rows_before(step) for step in range(40)] == rows
    assert [steps.tokens_before(step) for step in range(40)] == [10 * before for before in rows]
    assert steps.last == max(step for step in range(40) if rows[step] <= 250)


def test_fewer_rows_than_one_step_takes_are_refused():
    with pytest.raises(ValueError, match="has 20 rows of 10 tokens, one step takes 24"):
        Steps(args(), TWO, range(20))
    for rows in (20, 0):
        with pytest.raises(ValueError, match=f"has {rows} rows of 10 tokens, one step"):
            Steps(args(max_train_steps=5), TWO, range(rows))
    with pytest.raises(ValueError, match="epochs: 0.001 epochs of 10000 rows are 10 rows, .* takes 24"):
        Steps(args(num_train_epochs=0.001), TWO, range(10_000))
