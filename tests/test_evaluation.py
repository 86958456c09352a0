"""The numbers made of an evaluation's rows, against sums in Python and draws of other rows."""

import math

import numpy as np
import pytest
import torch

from utils.learning.losses import masked_metrics


def rows_of(n, seed, *more):
    """float64 [n, 3]: summed losses, larger where there are more predictions, their number, right ones."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 20, n)
    losses = counts * (4 + 0.05 * counts + rng.normal(0, 1, n))
    return torch.tensor(np.stack([losses, counts, rng.integers(0, counts + 1)], 1), dtype=torch.float64)


def error(rows):
    return masked_metrics(rows)["loss/eval_stderr"]


@pytest.mark.parametrize("pairs", [False, True])
def test_sums_are_divided_once(pairs):
    rows = rows_of(40, 0)
    if pairs:
        rows = torch.cat([rows, torch.tensor([[0.5, 1, 1], [2.5, 1, 0], [0, 0, 0], [1, 1, 1]] * 10)], 1)
    sums = [sum(float(row[i]) for row in rows) for i in range(rows.shape[1])]
    found = masked_metrics(rows)
    expected = {"loss/mlm": sums[0] / sums[1], "accuracy": sums[2] / sums[1], "eval_tokens": sums[1]}
    expected |= {"loss/eval": sums[0] / sums[1], "perplexity": math.exp(sums[0] / sums[1])}
    if pairs:
        expected |= {"loss/nsp": 4 / 3, "nsp_accuracy": 2 / 3, "loss/eval": expected["loss/eval"] + 4 / 3}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert found.keys() == expected.keys() | {"loss/eval_stderr"}
    assert isinstance(found["eval_tokens"], int)


def test_what_nothing_counts_for_has_no_mean():
    rows = torch.cat([rows_of(8, 0), torch.zeros(8, 3)], 1).double()
    found = masked_metrics(rows)
    assert found["loss/nsp"] is found["nsp_accuracy"] is None
    assert found["loss/eval"] == found["loss/mlm"] and found["loss/eval_stderr"] == error(rows[:, :3])
    assert masked_metrics(torch.zeros(4, 3).double())["loss/mlm"] is None


def test_the_standard_error_is_that_of_drawing_the_rows_again():
    """Against 3,000 draws of 300 rows from the distribution they come from."""
    means = [(rows[:, 0].sum() / rows[:, 1].sum()).item() for rows in (rows_of(300, i) for i in range(3000))]
    found = [error(rows_of(300, seed)) for seed in range(20)]
    assert np.mean(found) == pytest.approx(np.std(means, ddof=1), rel=0.05)
    assert np.std(found) < 0.1 * np.mean(found)
    rows = rows_of(300, 0)
    assert error(rows[torch.randperm(300)]) == pytest.approx(found[0], rel=1e-12)
    without = torch.cat([rows, torch.zeros(80, 3)])  # rows without a prediction
    assert error(without) == pytest.approx(found[0], rel=1e-12)


def test_the_standard_error_of_equal_counts_is_that_of_a_mean_and_of_one_row_there_is_none():
    rows = rows_of(64, 1)
    rows[:, 1] = 7
    assert error(rows) == pytest.approx((rows[:, 0] / 7).std().item() / 8, rel=1e-12)
    assert "loss/eval_stderr" not in masked_metrics(rows[:1])


def test_the_standard_error_of_two_losses_of_the_same_rows_knows_that_they_go_together():
    first, second = rows_of(300, 0), rows_of(300, 1)
    alone, other = error(first), error(second)
    assert error(torch.cat([first, first], 1)) == pytest.approx(2 * alone)
    assert error(torch.cat([first, second], 1)) == pytest.approx(math.hypot(alone, other), rel=0.1)
