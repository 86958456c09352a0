"""The metrics of an evaluation, compared with repeated draws of its rows."""

import math

import numpy as np
import pytest
import torch

from utils.learning.losses import masked_metrics


def rows_of(n, seed):
    """Of n rows, float64 [n, 3]: summed loss, predictions, correct ones. More predictions: higher losses."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 20, n)
    losses = counts * (4 + 0.05 * counts + rng.normal(0, 1, n))
    return torch.tensor(np.stack([losses, counts, rng.integers(0, counts + 1)], 1), dtype=torch.float64)


def error(rows):
    return masked_metrics(rows)["loss/eval_stderr"]


def test_metric_without_predictions_is_none():
    rows = torch.cat([rows_of(8, 0), torch.zeros(8, 3)], 1).double()
    results = masked_metrics(rows)
    assert results["loss/nsp"] is results["nsp_accuracy"] is None
    assert results["loss/eval"] == results["loss/mlm"] and results["loss/eval_stderr"] == error(rows[:, :3])
    assert masked_metrics(torch.zeros(4, 3).double())["loss/mlm"] is None
    assert "loss/eval_stderr" not in masked_metrics(rows_of(1, 0))


def test_standard_error_matches_resampled_rows():
    """Compared with 3,000 draws of 300 rows from the same distribution."""
    means = [(rows[:, 0].sum() / rows[:, 1].sum()).item() for rows in (rows_of(300, i) for i in range(3000))]
    errors = [error(rows_of(300, seed)) for seed in range(20)]
    assert np.mean(errors) == pytest.approx(np.std(means, ddof=1), rel=0.05)
    assert np.std(errors) < 0.1 * np.mean(errors)
    rows = rows_of(300, 0)
    assert error(rows[torch.randperm(300)]) == pytest.approx(errors[0], rel=1e-12)
    without = torch.cat([rows, torch.zeros(80, 3)])  # rows without a prediction
    assert error(without) == pytest.approx(errors[0], rel=1e-12)


def test_standard_error_includes_covariance_of_two_losses():
    first, second = rows_of(300, 0), rows_of(300, 1)
    alone, other = error(first), error(second)
    assert error(torch.cat([first, first], 1)) == pytest.approx(2 * alone)
    assert error(torch.cat([first, second], 1)) == pytest.approx(math.hypot(alone, other), rel=0.1)
