"""The curves of a run's metrics.jsonl: output_dir/curves.png, drawn anew at every evaluation."""

import math
import textwrap
import warnings
from pathlib import Path

import numpy as np

from utils.display.metrics import by_set, newest, read_metrics
from utils.display.progress import format_metric, readable
from utils.io.files import replacing

COLOURS = ["#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#c53030", "#0f8b8d", "#b7791f", "#4a5568"]
PARTS = [("mlm", "masked tokens", COLOURS[-2]), ("nsp", "next sentence", COLOURS[-1])]
PANELS = ["learning_rate", "grad_norm", "tokens_per_second"]  # below the loss
FEW = 40  # a curve of at most so many points shows them; a longer one of training is smoothed
STYLE = {"font.size": 8, "axes.titlelocation": "left", "axes.spines.top": False, "axes.grid": True,
         "grid.alpha": 0.25, "legend.frameon": False}  # fmt: skip


def draw_curves(output_dir) -> None:
    """Redraws output_dir/curves.png atomically. A failure is a warning: it ends no run."""
    run = Path(output_dir)
    try:
        if not (lines := read_metrics(run)):
            raise ValueError(f"no metrics.jsonl with lines in {run}")
        import matplotlib
        from matplotlib.figure import Figure  # unlike pyplot it needs no display

        with matplotlib.rc_context(STYLE), replacing(run / "curves.png") as temporary:
            figure = Figure((9.0, 7.0), 110, layout="constrained")
            _fill(figure, run, lines)
            figure.savefig(temporary, format="png")
    except Exception as error:
        warnings.warn(f"curves.png was not drawn: {type(error).__name__}: {error}", stacklevel=2)


def _fill(figure, run: Path, lines: list[dict]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    logged = dict.fromkeys(key for line in lines for key in line)
    shares = [key for key in ("accuracy", "nsp_accuracy") if by_set(logged, key)]
    below, parts = PANELS + shares, PARTS if by_set(logged, "loss/nsp") else []
    axes = figure.subplot_mosaic([["loss"] * len(below), below], height_ratios=[2, 1])
    loss = axes["loss"]
    train = "loss/train_plain" if "loss/train_plain" in logged else "loss/train"
    _plot(loss, lines, train, COLOURS[0], label="training", smooth=True)
    for key, part, colour in parts:  # loss/train and loss/eval are their sums
        _plot(loss, lines, f"loss/train_{key}", colour, label=f"training: {part}", smooth=True)
    for key in PANELS:
        _plot(axes[key], lines, key, COLOURS[0], smooth=key != "learning_rate")
    for number, name in enumerate(by_set(logged, "loss/eval"), start=1):
        suffix, colour = f"/{name}" if name else "", COLOURS[number % len(COLOURS)]
        label = f"evaluation, {name}" if name else "evaluation"
        _plot(loss, lines, f"loss/eval{suffix}", colour, label=label)
        for key, part, colour in parts:
            _plot(loss, lines, f"loss/{key}{suffix}", colour, "--", f"{label}: {part}")
        for key in shares:
            _plot(axes[key], lines, f"{key}{suffix}", colour)
    for key in shares:
        _plot(axes[key], lines, f"{key}/train", COLOURS[0], smooth=True)
    for key, axis in axes.items():
        axis.set_title(key.replace("_", " "))
        axis.set_xlim(loss.get_xlim())
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.yaxis.set_major_formatter(lambda value, _: readable(value))
        _set_limits(axis, from_zero=axis is not loss)
    loss.set_title(_title(run.resolve().name, lines))
    loss.set_xlabel("step")
    loss.set_ylabel("loss (nats per token)")
    if loss.get_ylim()[1] < 30 and not parts:  # else it has diverged, or is a sum
        right, (low, high) = loss.secondary_yaxis("right"), loss.get_ylim()
        round_ones = [digit * 10**power for power in range(14) for digit in (1, 2, 5)]
        right.set_yticks([math.log(n) for n in round_ones if low <= math.log(n) <= high])
        right.yaxis.set_major_formatter(lambda value, _: readable(round(math.exp(value))))
        right.set_ylabel("perplexity")
    handles, labels = loss.get_legend_handles_labels()
    columns = 140 // (10 + max(map(len, labels))) or 1
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _plot(axis, lines: list[dict], key: str, colour: str, dash: str = "-", label: str = "",
          smooth: bool = False) -> None:
    """Marks few points, and smooths many noisy ones, over a pale curve of all points. null is a gap."""
    points = [(line["step"], line[key]) for line in lines if key in line and "step" in line]
    steps, values = np.array(points, float).reshape(-1, 2).T
    marker = "o" if len(values) <= FEW else ""
    if smooth and not marker:
        axis.plot(steps, values, lw=0.6, alpha=0.3, color=colour)
        steps, values = _smooth(steps, values)
    axis.plot(steps, values, dash, color=colour, marker=marker, ms=3.5, label=label)


def _smooth(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At up to 500 points the median of the 2 % of points around."""
    half, places = max(3, len(values) // 100), range(0, len(values), 1 + len(values) // 500)
    medians = np.full(len(places), np.nan)
    for i, place in enumerate(places):
        if np.isfinite(values[place]):
            medians[i] = np.nanmedian(values[max(0, place - half) : place + half + 1])
    return steps[places], medians


def _set_limits(axis, from_zero: bool) -> None:
    """Neither a steep start nor a spike may flatten the rest."""
    values = np.concatenate([line.get_ydata() for line in axis.lines])
    values = values[np.isfinite(values)]
    if len(values):
        low, high = 0 if from_zero else values.min(), np.percentile(values, 97, method="higher")
        margin = 0.06 * (high - low) or 0.1
        axis.set_ylim(low - margin, high + margin)


def _title(name: str, lines: list[dict]) -> str:
    last, _ = newest(lines, "loss/eval")
    if loss := format_metric(last, "loss/eval", ".3f"):
        name += f": evaluation loss {loss}"
    if perplexity := format_metric(last, "perplexity", ",.2f"):
        name += f"; perplexity{' of masked tokens' * bool(by_set(last, 'loss/nsp'))} {perplexity}"
    return textwrap.fill(name, 110, break_on_hyphens=False, max_lines=2, placeholder=" ...")
