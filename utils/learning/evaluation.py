"""Evaluation: sums over the whole data set, divided once at the end."""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from utils.learning.compiled import compilations
from utils.xla import sync


class Total(NamedTuple):
    sum: float
    count: float
    row_sums: torch.Tensor | None = None  # float64 [rows], the parts of `sum`; None if they are unknown
    row_counts: torch.Tensor | None = None  # float64 [rows], 0 for padding


Totals = dict[str, Total]


@contextlib.contextmanager
def eval_mode(*modules):
    """Modules in eval mode; afterwards what was in training mode trains again, and nothing else."""
    training = [part for module in modules for part in module.modules() if part.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@torch.no_grad()
def sums_over_dataset(
    accelerator, modules: Iterable[torch.nn.Module], batches: Iterable, evaluate: Callable[[dict], dict],
    stopped: Callable[[], int] = lambda: 0,
) -> Totals | None:
    """Sums over all batches and processes of what `evaluate(batch)` returns, {name: (sums, counts)}, both [B]
    or both 0-d. The modules are in eval mode meanwhile. None if `stopped()` ended it early.

    The sums are made in float64 at the end, and the host reads nothing before. evaluate must count padding
    rows (row == -1) as 0: then every sample counts once, however rows are divided."""
    values = []
    compilations.first_evaluation()
    with eval_mode(*modules):
        for batch in batches:
            pairs = evaluate(batch)
            parts = [value.detach().float().reshape(-1) for pair in pairs.values() for value in pair]
            values.append(torch.cat(parts))
            sync()  # so that all batches have the same graph
            if early := stopped():
                break
    if early:
        return None
    values = accelerator.gather(torch.stack(values))  # [batches x processes, all values]
    columns = iter(values.cpu().double().split([len(part) for part in parts], dim=1))
    totals = {}
    for name, pair in pairs.items():
        sums, counts = next(columns).flatten(), next(columns).flatten()
        rows = (sums, counts) if all(value.ndim for value in pair) else ()
        totals[name] = Total(sums.sum().item(), counts.sum().item(), *rows)
    return totals


def standard_error(*totals: Total) -> float | None:
    """The standard error of the sum of these totals' means, for rows drawn anew from the same kind of text.
    None if single rows are not known, or fewer than two.

    A mean is a quotient of two sums over rows, so this is the error of a ratio estimator (Cochran, "Sampling
    Techniques", 1977, chapter 6), without the correction for a finite set."""
    if any(total.row_sums is None or not total.count for total in totals):
        return None
    rows = int((sum(total.row_counts for total in totals) > 0).sum())
    effects = sum((t.row_sums - t.sum / t.count * t.row_counts) / t.count for t in totals)  # 0 for padding
    return math.sqrt(rows / (rows - 1) * effects.square().sum()) if rows > 1 else None


def perplexity_metrics(totals: Totals, bytes_per_token: float) -> dict[str, float | None]:
    """totals: "loss/eval", cross-entropy in nats over predicted tokens, and any others, whose means are
    returned. bytes_per_token: UTF-8 bytes of the text over its tokens, 0 if unknown. bits_per_byte can be
    compared between tokenizers (Gao et al., "The Pile", 2020, section 3.1)."""
    if "loss/eval" not in totals:
        raise ValueError("evaluate: returns no loss/eval, which perplexity needs; other metrics go beside it")
    total = Total(*totals["loss/eval"])
    loss = total.sum / total.count
    metrics = {"loss/eval": loss, **_errors(total), "perplexity": math.exp(loss) if loss < 700 else math.inf}
    metrics["bits_per_byte"] = loss / math.log(2) / (bytes_per_token or math.nan)
    metrics["eval_tokens"] = int(total.count)
    return metrics | _means(totals, known={"loss/eval"})


def masked_metrics(totals: Totals) -> dict[str, float | None]:
    """totals: "loss/mlm" and "accuracy" over predicted tokens, with pairs also "loss/nsp" and "nsp_accuracy"
    over rows, and any others, whose means are returned. loss/eval is the loss that is trained."""
    if missing := {"loss/mlm", "accuracy"} - totals.keys():
        raise ValueError(f"evaluate: returns no {min(missing)}; other metrics go beside it")
    total = Total(*totals["loss/mlm"])
    tokens = max(total.count, 1)
    mlm = total.sum / tokens
    metrics = {"loss/eval": mlm, **_errors(total), "perplexity": math.exp(min(mlm, 700))}
    metrics["accuracy"] = totals["accuracy"][0] / tokens
    metrics |= {"eval_tokens": int(total.count), "loss/mlm": mlm}
    pairs = {name: totals.get(name, (0.0, 0.0)) for name in ("loss/nsp", "nsp_accuracy")}
    if pairs["loss/nsp"][1]:
        means = _means(pairs)
        metrics |= {"loss/eval": mlm + means["loss/nsp"]} | means | _errors(total, Total(*pairs["loss/nsp"]))
    return metrics | _means(totals, known={"loss/mlm", "accuracy", *pairs})


def _errors(*totals):
    error = standard_error(*totals)
    return {} if error is None else {"loss/eval_stderr": error}


def _means(totals, known=()):
    """The means of all but the known names; None if the count is 0."""
    others = [(name, total) for name, total in totals.items() if name not in known]
    return {name: total / count if count else None for name, (total, count, *_) in others}
