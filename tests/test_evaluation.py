"""Sums over a data set against sums in Python, and the numbers made of them."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from data.order import evaluation_rows
from utils.learning.evaluation import (
    Total,
    evaluation_metrics,
    standard_error,
    sums_over_dataset,
)


def evaluate(batch):
    return {"loss/eval": (batch.sum(), torch.tensor(len(batch))), "largest": (batch.max(), torch.ones(()))}


@pytest.mark.parametrize("stop_at", [None, 0, 2])
def test_sums_and_counts_are_added_per_name_in_eval_mode_without_gradients(stop_at):
    torch.manual_seed(0)
    batches, model = torch.rand(5, 7).requires_grad_().unbind(), nn.Dropout()
    seen = []

    def one(batch):
        seen.append((model.training, torch.is_grad_enabled()))
        return evaluate(batch)

    found = sums_over_dataset(Accelerator(cpu=True), [model], batches, one, lambda: len(seen) - 1 == stop_at)
    assert seen == [(False, False)] * (5 if stop_at is None else stop_at + 1) and model.training
    if stop_at is not None:
        assert found is None
        return
    assert {name: total[:2] for name, total in found.items()} == {
        "loss/eval": (pytest.approx(sum(batch.sum().item() for batch in batches), rel=1e-7), 35.0),
        "largest": (pytest.approx(sum(batch.max().item() for batch in batches), rel=1e-7), 5.0),
    }
    assert standard_error(found["loss/eval"]) is None  # rows are not known one by one


def rows_of(n, seed):
    """Sums and counts of n rows, float32, with more of one where there is more of the other, then padding."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 20, n)
    sums = counts * (4 + 0.05 * counts + rng.normal(0, 1, n))
    return torch.tensor(np.pad([sums, counts], ((0, 0), (0, -n % 8))), dtype=torch.float32)


def total_of(rows) -> Total:
    batches = rows.unflatten(1, (-1, 8)).unbind(1)
    evaluated = sums_over_dataset(Accelerator(cpu=True), [nn.Identity()], batches, lambda batch: {"": batch})
    return evaluated[""]


def test_the_standard_error_is_that_of_drawing_the_rows_again():
    """Against 3,000 draws of 300 rows from the distribution they come from; and it ignores padding."""
    sums, counts = torch.stack([rows_of(300, seed) for seed in range(3000)]).double().sum(2).T
    spread = (sums / counts).std().item()
    found = [standard_error(total_of(rows_of(300, seed))) for seed in range(20)]
    assert np.mean(found) == pytest.approx(spread, rel=0.05) and np.std(found) < 0.1 * spread
    rows = rows_of(300, 0)
    padded = torch.nn.functional.pad(rows, (0, 80))
    assert standard_error(total_of(padded)) == pytest.approx(found[0], rel=1e-12)
    assert standard_error(total_of(rows[:, torch.randperm(304)])) == pytest.approx(found[0], rel=1e-12)


def test_the_standard_error_of_equal_counts_is_that_of_a_mean_and_of_one_row_there_is_none():
    rows = rows_of(64, 1)
    rows[1] = 7
    expected = (rows[0].double() / 7).std().item() / 8
    assert standard_error(total_of(rows)) == pytest.approx(expected, rel=1e-12)
    assert standard_error(total_of(torch.nn.functional.pad(rows[:, :1], (0, 7)))) is None
    assert standard_error(Total(0.0, 0.0, torch.zeros(8), torch.zeros(8))) is None


def test_the_standard_error_of_two_losses_of_the_same_rows_knows_that_they_go_together():
    first, second = total_of(rows_of(300, 0)), total_of(rows_of(300, 1))
    alone, other = standard_error(first), standard_error(second)
    assert standard_error(first, first) == pytest.approx(2 * alone)
    assert standard_error(first, second) == pytest.approx(math.hypot(alone, other), rel=0.1)
    pairs = {"loss/mlm": first, "loss/nsp": second}
    assert evaluation_metrics(pairs, PAIRS, 1.0)["loss/eval_stderr"] == standard_error(first, second)
    assert evaluation_metrics({"loss/eval": first}, ("loss/eval",), 1.0)["loss/eval_stderr"] == alone


PAIRS = ("loss/mlm", "loss/nsp")


LOSSES = Path(__file__).with_name("row_losses.npy")  # see the test


def test_a_sample_of_rows_estimates_the_whole_set_where_its_first_rows_do_not():
    """Losses of the installed-python validation rows after 300 steps of train_clm.py, float16 in the file:
    20 seeds' samples of 512 rows, which the first 512 rows are not."""
    losses = np.load(LOSSES).astype(np.float64)
    whole, estimates, errors = losses.mean(), [], []
    for seed in range(20):
        rows = torch.tensor(losses[evaluation_rows(len(losses), 512, seed)])
        total = Total(rows.sum().item(), 512.0, rows, torch.ones(512))
        estimates.append(total.sum / total.count)
        errors.append(standard_error(total))
    assert np.mean(estimates) == pytest.approx(whole, rel=0.01)
    assert np.sum(np.abs(np.array(estimates) - whole) < 2 * np.array(errors)) >= 18
    assert abs(losses[:512].mean() - whole) > 3 * np.mean(errors)


def metrics(losses, bytes_per_token=0.0, **totals):
    """totals: by names with underscores for slashes."""
    totals = {name.replace("loss_", "loss/"): Total(*total) for name, total in totals.items()}
    return evaluation_metrics(totals, losses, bytes_per_token)


def test_perplexity_bits_per_byte_and_whatever_else_was_evaluated():
    found = metrics(("loss/eval",), 3.0, loss_eval=(24.0, 12.0), entropy=(3.0, 4.0), none=(0.0, 0.0))
    assert list(found) == ["loss/eval", "perplexity", "bits_per_byte", "eval_tokens", "entropy", "none"]
    assert found["loss/eval"] == 2 and found["perplexity"] == math.exp(2) and found["eval_tokens"] == 12
    assert 2 ** (3 * 12 * found["bits_per_byte"]) == pytest.approx(math.exp(24))  # of the whole text
    assert found["entropy"] == 0.75 and found["none"] is None
    assert metrics(("loss/eval",), 3.0, loss_eval=(9000.0, 2.0))["perplexity"] == math.inf
    with pytest.raises(ValueError, match="evaluate: returns no loss/eval"):
        metrics(("loss/eval",), entropy=(3.0, 4.0))


def test_masked_metrics_with_and_without_pairs():
    totals = {"loss_mlm": (24.0, 12.0), "accuracy": (3.0, 12.0)}
    masked = {
        "loss/eval": 2.0, "perplexity": math.exp(2), "eval_tokens": 12, "loss/mlm": 2.0, "accuracy": 0.25
    }  # fmt: skip
    assert metrics(PAIRS, **totals) == masked
    nothing = metrics(PAIRS, **totals, loss_nsp=(0.0, 0.0), nsp_accuracy=(0.0, 0.0))
    assert nothing == masked | {"loss/nsp": None, "nsp_accuracy": None}
    pairs = metrics(PAIRS, **totals, loss_nsp=(4.0, 8.0), nsp_accuracy=(6.0, 8.0), mine=(1.0, 2.0))
    assert pairs == masked | {"loss/eval": 2.5, "loss/nsp": 0.5, "nsp_accuracy": 0.75, "mine": 0.5}
