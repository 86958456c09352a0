"""Draws output_dir/curves.png from metrics.jsonl, at every evaluation."""

import warnings
from pathlib import Path

import numpy as np

from utils.display.metrics import read_metrics
from utils.io.files import replacing


def draw_curves(output_dir) -> None:
    """Redraws output_dir/curves.png atomically: all losses on a logarithmic scale, below them the learning
    rate. A failure is a warning: it does not end the run."""
    run = Path(output_dir)
    try:
        lines = [line for line in read_metrics(run) if "step" in line]
        losses = dict.fromkeys(key for line in lines for key in line if key.startswith("loss/"))
        if not losses:
            raise ValueError(f"no losses in {run}/metrics.jsonl")
        from matplotlib.figure import Figure  # unlike pyplot it needs no display
        from matplotlib.ticker import LogFormatter, MaxNLocator

        figure = Figure((9.0, 6.0), 110, layout="constrained")
        loss, rate = figure.subplots(2, sharex=True, height_ratios=[3, 1])
        for key in losses:
            hidden = key == "loss/train" and "loss/train_plain" in losses  # plain: unweighted
            if not hidden and "stderr" not in key:
                _plot(loss, lines, key)
        _plot(rate, lines, "learning_rate")
        loss.set_yscale("log")
        loss.yaxis.set_major_formatter(LogFormatter())
        loss.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
        loss.legend()
        loss.set_title(run.resolve().name)
        loss.set_ylabel("loss (nats per token)")
        rate.set_ylabel("learning rate")
        rate.set_xlabel("step")
        rate.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        with replacing(run / "curves.png") as temporary:
            figure.savefig(temporary, format="png")
    except Exception as error:
        warnings.warn(f"curves.png was not drawn: {type(error).__name__}: {error}", stacklevel=2)


def _plot(axis, lines: list[dict], key: str) -> None:
    """Draws training metrics as a thin line, evaluations as points. null is a gap."""
    points = [(line["step"], line[key]) for line in lines if key in line]
    steps, values = np.array(points, float).reshape(-1, 2).T
    style = dict(lw=0.8) if "train" in key or key == "learning_rate" else dict(marker="o", ms=3.5)
    axis.plot(steps, values, label=key.removeprefix("loss/"), **style)
