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
            if stopped():
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


def evaluation_metrics(totals: Totals, losses: tuple, bytes_per_token: float) -> dict[str, float | None]:
    """What is logged of these totals: what follows from the losses, and all means (None if nothing counts).

    losses: those whose means add up to the loss that is trained; the first one is cross-entropy in nats over
    predicted tokens. bytes_per_token: UTF-8 bytes of the text over its tokens, 0 if unknown. bits_per_byte
    can be compared between tokenizers (Gao et al., "The Pile", 2020, section 3.1)."""
    if losses[0] not in totals:
        raise ValueError(f"evaluate: returns no {losses[0]}; other metrics go beside it")
    trained = [totals[name] for name in losses if name in totals and totals[name].count]
    metrics = {"loss/eval": sum(total.sum / total.count for total in trained)}
    if (error := standard_error(*trained)) is not None:
        metrics["loss/eval_stderr"] = error
    tokens = totals[losses[0]].count
    loss = totals[losses[0]].sum / max(tokens, 1)
    metrics["perplexity"] = math.exp(loss) if loss < 700 else math.inf
    if losses == ("loss/eval",):  # of all the text, not of hidden tokens
        metrics["bits_per_byte"] = loss / math.log(2) / (bytes_per_token or math.nan)
    metrics["eval_tokens"] = int(tokens)
    means = {name: total.sum / total.count if total.count else None for name, total in totals.items()}
    return metrics | means
