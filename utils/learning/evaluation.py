"""Evaluation: sums over the whole data set, divided once, at the end."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from utils.xla import sync


class Total(NamedTuple):
    sum: float
    count: float
    row_sums: torch.Tensor | None = None  # float64 [rows], what `sum` adds up; None where only that is known
    row_counts: torch.Tensor | None = None  # 0 of padding


Totals = dict[str, Total]


@torch.no_grad()
def sums_over_dataset(accelerator, modules: Iterable[torch.nn.Module], batches: Iterable,
                      evaluate: Callable[[dict], dict[str, tuple[torch.Tensor, torch.Tensor]]],
                      stopped: Callable[[], int] = lambda: 0) -> Totals | None:  # fmt: skip
    """Adds up what `evaluate(batch)` gives, {name: (sums, counts)}, both [B] or both 0-d, over all batches
    and processes: in float64, at the end; before, the host reads nothing. None if `stopped()` ended it early.
    Meanwhile the modules are in eval mode.

    Padding rows (row == -1) must count as nothing in it; then every sample counts once, however divided."""
    training, values = [module for module in modules if module.training], []
    for module in training:
        module.eval()
    for batch in batches:
        found = evaluate(batch)
        parts = [value.detach().float().reshape(-1) for pair in found.values() for value in pair]
        values.append(torch.cat(parts))
        sync()  # the last batch's graph is that of all others
        if early := stopped():
            break
    for module in training:
        module.train()
    if early:
        return None
    values = accelerator.gather(torch.stack(values))  # [batches x processes, all values]
    columns = iter(values.cpu().double().split([len(part) for part in parts], dim=1))
    totals = {}
    for name, pair in found.items():
        sums, counts = next(columns).flatten(), next(columns).flatten()
        rows = (sums, counts) if all(value.ndim for value in pair) else ()
        totals[name] = Total(sums.sum().item(), counts.sum().item(), *rows)
    return totals


def standard_error(*totals: Total) -> float | None:
    """Of the sum of these totals' means, were the rows drawn again from text like theirs; None where they are
    not known one by one, or are fewer than two.

    A mean is a quotient of sums over rows, so each row counts with what it moves it by (ratio estimator:
    Cochran, "Sampling Techniques", 1977, chapter 6). Without the correction for a finite set."""
    if any(total.row_sums is None or not total.count for total in totals):
        return None
    rows = int((sum(total.row_counts for total in totals) > 0).sum())
    moves = sum((t.row_sums - t.sum / t.count * t.row_counts) / t.count for t in totals)  # 0 of padding
    return math.sqrt(rows / (rows - 1) * moves.square().sum()) if rows > 1 else None


def perplexity_metrics(totals: Totals, bytes_per_token: float) -> dict[str, float | None]:
    """totals: "loss/eval", cross-entropy in nats over predicted tokens, and any others, told as their means.
    bytes_per_token: UTF-8 bytes of the text over its tokens, 0 if unknown. bits_per_byte compares models with
    different tokenizers (Gao et al., "The Pile", 2020, section 3.1)."""
    if "loss/eval" not in totals:
        raise ValueError("evaluate: gives no loss/eval, of which perplexity is made; others go beside it")
    total = Total(*totals["loss/eval"])
    loss = total.sum / total.count
    metrics = {
        "loss/eval": loss, **_errors(total), "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss / math.log(2) / (bytes_per_token or math.nan), "eval_tokens": int(total.count),
    }  # fmt: skip
    return metrics | _means(totals, known={"loss/eval"})


def masked_metrics(totals: Totals) -> dict[str, float | None]:
    """totals: "loss/mlm" and "accuracy" over predicted tokens, with pairs "loss/nsp" and "nsp_accuracy" over
    rows, and any others, told as their means. loss/eval is what is trained: both losses, if two."""
    if missing := {"loss/mlm", "accuracy"} - totals.keys():
        raise ValueError(f"evaluate: gives no {min(missing)}; others go beside it")
    total = Total(*totals["loss/mlm"])
    tokens = max(total.count, 1)
    mlm = total.sum / tokens
    metrics = {
        "loss/eval": mlm, **_errors(total), "perplexity": math.exp(min(mlm, 700)),
        "accuracy": totals["accuracy"][0] / tokens, "eval_tokens": int(total.count), "loss/mlm": mlm,
    }  # fmt: skip
    pairs = {name: totals.get(name, (0.0, 0.0)) for name in ("loss/nsp", "nsp_accuracy")}
    if pairs["loss/nsp"][1]:
        means = _means(pairs)
        metrics |= {"loss/eval": mlm + means["loss/nsp"]} | means | _errors(total, Total(*pairs["loss/nsp"]))
    return metrics | _means(totals, known={"loss/mlm", "accuracy", *pairs})


def _errors(*totals):
    error = standard_error(*totals)
    return {} if error is None else {"loss/eval_stderr": error}


def _means(totals, known=()):
    """Means of the names beside the known ones; None of nothing."""
    others = [(name, total) for name, total in totals.items() if name not in known]
    return {name: total / count if count else None for name, (total, count, *_) in others}
