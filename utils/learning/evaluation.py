"""Evaluation: sums over the whole data set, divided once, at the end."""

import math
from collections.abc import Callable, Iterable

import torch

from utils.xla import sync

Totals = dict[str, tuple[float, float]]  # name: (sum, count)


@torch.no_grad()
def sums_over_dataset(
    accelerator,
    model: torch.nn.Module,
    batches: Iterable,
    evaluate: Callable[[dict], dict[str, tuple[torch.Tensor, torch.Tensor]]],
    stopped: Callable[[], int] = lambda: 0,
) -> Totals | None:
    """Adds up what `evaluate(batch)` gives, {name: (sum, count)} of 0-d tensors, over all batches and
    processes: float32 on the device, float64 at the end.

    Padding rows (row == -1) must count as nothing in it; then every sample counts once for any batch size and
    any number of processes. Nothing is read by the host before the end. None if `stopped()` ended it early.
    """
    model.eval()
    sums = []
    for batch in batches:
        found = evaluate(batch)
        sums.append(torch.stack([value.detach().float() for pair in found.values() for value in pair]))
        sync()  # the last batch's graph is that of all others
        if stopped():
            break
    else:
        totals = accelerator.gather(torch.stack(sums))  # [batches x processes, 2 x names]
        model.train()
        totals = totals.cpu().double().sum(0).tolist()
        return {name: (totals[2 * i], totals[2 * i + 1]) for i, name in enumerate(found)}
    model.train()
    return None


def perplexity_metrics(totals: Totals, bytes_per_token: float) -> dict[str, float | None]:
    """totals: "loss/eval", cross-entropy in nats over predicted tokens, and any others, told as their means.
    bytes_per_token: UTF-8 bytes of the text over its tokens. bits_per_byte compares models with different
    tokenizers (Gao et al., "The Pile", 2020, section 3.1).
    """
    loss_sum, tokens = totals["loss/eval"]
    loss = loss_sum / tokens
    metrics = {
        "loss/eval": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss / math.log(2) / bytes_per_token,
        "eval_tokens": int(tokens),
    }
    return metrics | _means(totals, known={"loss/eval"})


def masked_metrics(totals: Totals) -> dict[str, float | None]:
    """totals: "loss/mlm" and "accuracy" over predicted tokens, with pairs "loss/nsp" and "nsp_accuracy" over
    rows, and any others, told as their means. loss/eval is what is trained: both losses, if two.
    """
    (loss_sum, tokens), (correct, _) = totals["loss/mlm"], totals["accuracy"]
    mlm = loss_sum / max(tokens, 1)
    metrics = {
        "loss/eval": mlm, "perplexity": math.exp(min(mlm, 700)), "accuracy": correct / max(tokens, 1),
        "eval_tokens": int(tokens), "loss/mlm": mlm,
    }  # fmt: skip
    pairs = {name: totals.get(name, (0.0, 0.0)) for name in ("loss/nsp", "nsp_accuracy")}
    if pairs["loss/nsp"][1]:
        means = _means(pairs)
        metrics |= {"loss/eval": mlm + means["loss/nsp"]} | means
    return metrics | _means(totals, known={"loss/mlm", "accuracy", *pairs})


def _means(totals, known=()):
    """Means of the names beside the known ones; None of nothing."""
    return {
        name: total / count if count else None for name, (total, count) in totals.items() if name not in known
    }
