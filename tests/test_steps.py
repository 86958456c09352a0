"""The row arithmetic against counting by hand."""

from types import SimpleNamespace

import pytest

from utils.steps import Steps


def args(**changes):
    return SimpleNamespace(**{
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "block_size": 10,
        "max_train_steps": 0, "num_train_epochs": 2.5, "dataset_name": "x", "seed": 1, **changes,
    })  # fmt: skip


TWO = SimpleNamespace(num_processes=2)


def test_a_constant_batch():
    steps = Steps(args(), TWO, range(100))
    assert steps.last == 250 // 24
    assert [steps.rows_before(s) for s in (0, 1, 10)] == [0, 24, 240]
    assert steps.tokens_before(10) == 2400 and steps.epoch(10) == 2.4
    assert [step for step in range(11) if steps.due(step, 4)] == [0, 4, 8, 10]


def test_once_per_epoch_is_at_the_end_of_each_exactly():
    """24 rows a step of 100: rows 96, 120; 192, 216; ..., where steps per epoch, rounded, would drift."""
    steps = Steps(args(num_train_epochs=10), TWO, range(100))
    ends = [step for step in range(1, steps.last) if 24 * step // 100 > 24 * (step - 1) // 100]
    assert [step for step in range(1, steps.last) if steps.due(step, 0)] == ends
    assert ends == [5, 9, 13, 17, 21, 25, 30, 34, 38]
    assert steps.due(0, 0) and steps.due(steps.last, 0)


def test_a_batch_that_grows_is_one_function():
    """1, 1, 2, 2, 3, 3, ... micro-batches of 8 rows, 10 tokens each: everything follows."""
    counts = [1 + step // 2 for step in range(40)]
    steps = Steps(args(), TWO, range(100), lambda step: 1 + step // 2)
    rows = [8 * sum(counts[:step]) for step in range(40)]
    assert [steps.rows_before(step) for step in range(40)] == rows
    assert [steps.tokens_before(step) for step in range(40)] == [10 * before for before in rows]
    assert steps.last == max(step for step in range(40) if rows[step] <= 250)


def test_too_few_rows_are_the_users_mistake():
    with pytest.raises(ValueError, match="rows of 10 tokens: it gives 20, and one step takes 24"):
        Steps(args(), TWO, range(20))
    for rows in (20, 0):
        with pytest.raises(ValueError, match=f"gives {rows}, and"):
            Steps(args(max_train_steps=5), TWO, range(rows))
    with pytest.raises(ValueError, match="num_train_epochs: 0.001 of 10000 rows are 10, .* takes 24"):
        Steps(args(num_train_epochs=0.001), TWO, range(10_000))
