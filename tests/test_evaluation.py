"""Sums over a data set against sums in Python, and the numbers made of them."""

import math

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from utils.learning.evaluation import masked_metrics, perplexity_metrics, sums_over_dataset


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

    found = sums_over_dataset(Accelerator(cpu=True), model, batches, one, lambda: len(seen) - 1 == stop_at)
    assert seen == [(False, False)] * (5 if stop_at is None else stop_at + 1) and model.training
    if stop_at is not None:
        assert found is None
        return
    assert found == {
        "loss/eval": (sum(batch.sum().item() for batch in batches), 35.0),
        "largest": (sum(batch.max().item() for batch in batches), 5.0),
    }


def test_perplexity_bits_per_byte_and_whatever_else_was_evaluated():
    found = perplexity_metrics({"loss/eval": (24.0, 12.0), "entropy": (3.0, 4.0), "none": (0.0, 0.0)}, 3.0)
    assert list(found) == ["loss/eval", "perplexity", "bits_per_byte", "eval_tokens", "entropy", "none"]
    assert found["loss/eval"] == 2 and found["perplexity"] == math.exp(2) and found["eval_tokens"] == 12
    assert 2 ** (3 * 12 * found["bits_per_byte"]) == pytest.approx(math.exp(24))  # of the whole text
    assert found["entropy"] == 0.75 and found["none"] is None
    assert perplexity_metrics({"loss/eval": (9000.0, 2.0)}, 3.0)["perplexity"] == math.inf


def test_masked_metrics_with_and_without_pairs():
    totals = {"loss/mlm": (24.0, 12.0), "accuracy": (3.0, 12.0)}
    masked = {
        "loss/eval": 2.0, "perplexity": math.exp(2), "accuracy": 0.25, "eval_tokens": 12, "loss/mlm": 2.0
    }  # fmt: skip
    assert list(masked_metrics(totals).items()) == list(masked.items())
    assert masked_metrics(totals | {"loss/nsp": (0.0, 0.0), "nsp_accuracy": (0.0, 0.0)}) == masked
    pairs = totals | {"loss/nsp": (4.0, 8.0), "nsp_accuracy": (6.0, 8.0), "mine": (1.0, 2.0)}
    expected = masked | {"loss/eval": 2.5, "loss/nsp": 0.5, "nsp_accuracy": 0.75, "mine": 0.5}
    assert list(masked_metrics(pairs).items()) == list(expected.items())
