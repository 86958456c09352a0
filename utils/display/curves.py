"""The curves of a run's metrics.jsonl: output_dir/curves.png, drawn anew at every evaluation."""

import textwrap
import warnings
from pathlib import Path

import numpy as np

from utils.display.metrics import by_set, read_metrics, read_run
from utils.display.progress import format_metric, readable
from utils.io.files import replacing

COLOURS = ["#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#c53030", "#0f8b8d", "#b7791f", "#4a5568"]
DASHES = [(0, (6, 1, 1, 1, 1, 1)), "--", "-.", ":"]  # of evaluation sets, the second comes first
FEW = 40  # a curve of at most so many points shows them; a longer one is smoothed
PALE = 0.3  # opacity of the curve of all points behind the smoothed one
PANELS = {"learning_rate": "learning rate", "grad_norm": "gradient norm"}
PANELS |= {"tokens_per_second": "tokens per second"}
STYLE = {
    "font.size": 8, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.labelsize": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "grid.linewidth": 0.5, "lines.linewidth": 1.4, "lines.markersize": 3.5, "legend.frameon": False,
}  # fmt: skip


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
    from matplotlib.ticker import EngFormatter

    logged = dict.fromkeys(key for line in lines for key in line)
    evals = []  # (label, key of the loss, key of the accuracy)
    for name in by_set(logged, "loss/eval"):
        label, suffix = (f"evaluation, {name}", f"/{name}") if name else ("evaluation", "")
        evals.append((label, f"loss/eval{suffix}", f"accuracy{suffix}"))
    if "loss/nsp" in logged:
        evals += [("masked LM", "loss/mlm", ""), ("next sentence", "loss/nsp", "nsp_accuracy")]
    panels = PANELS | ({"accuracy": "accuracy"} if by_set(logged, "accuracy") else {})
    axes = figure.subplot_mosaic([["loss"] * len(panels), list(panels)], height_ratios=[2, 1])
    loss, name, state = axes["loss"], run.resolve().name, read_run(run)
    if origin := state.get("origin"):  # a branch
        name += f", from {origin['run']} at step {origin['step']:,}"
        loss.axvline(origin["step"], color=COLOURS[0], ls="-.")
    train = "loss/train_plain" if "loss/train_plain" in logged else "loss/train"
    _plot(loss, lines, train, noisy=True, label="training", color=COLOURS[0])
    for key in PANELS:
        _plot(axes[key], lines, key, noisy=key != "learning_rate", color=COLOURS[0])
    for place, (label, loss_key, accuracy_key) in enumerate(evals, start=1):
        style = {"ls": DASHES[place % len(DASHES)], "color": COLOURS[place % len(COLOURS)]}
        _plot(loss, lines, loss_key, label=label, **style)
        if "accuracy" in axes:
            _plot(axes["accuracy"], lines, accuracy_key, **style)
    for key, axis in axes.items():
        axis.set_xlim(loss.get_xlim())
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.yaxis.set_major_formatter(lambda value, _: readable(value))
        if key != "loss":
            axis.set_title(panels[key])
            high = np.percentile(_values(axis.lines), 98, method="higher")  # spikes may be cut off
            axis.set_ylim(0, 1 if key == "accuracy" else 1.2 * high or 1)
    _scale_loss(loss, "exp(loss)" if "loss/nsp" in logged else "perplexity")
    loss.set_xlabel("step")
    loss.set_title(_title(name, lines))
    _mark_events((loss, axes["grad_norm"]), state["resumes"], lines)
    handles, labels = loss.get_legend_handles_labels()
    columns = 140 // (10 + max(map(len, labels))) or 1
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _title(name: str, lines: list[dict]) -> str:
    last = next((line for line in reversed(lines) if by_set(line, "loss/eval")), {})
    if loss := format_metric(last, "loss/eval", ".3f"):
        name += f": evaluation loss {loss}"
    if perplexity := format_metric(last, "perplexity", ",.2f"):
        name += f"; perplexity {perplexity}"
    return textwrap.fill(name, 110, break_on_hyphens=False, max_lines=2, placeholder=" ...")


def _plot(axis, lines: list[dict], key: str, noisy: bool = False, **style) -> None:
    """Marks few points, and smooths many noisy ones, over a pale curve of all points. null is a gap."""
    points = [(line["step"], line[key]) for line in lines if key in line and "step" in line]
    at, values = np.array(points, float).reshape(-1, 2).T
    if len(values) <= FEW:
        style["marker"] = "o"
    elif noisy and np.isfinite(values).any():
        axis.plot(at, values, lw=0.6, alpha=PALE, color=style["color"])
        at, values = _smooth(at, values)
    axis.plot(at, values, **style)


def _values(lines) -> np.ndarray:
    values = np.concatenate([line.get_ydata() for line in lines])
    return values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)


def _smooth(at: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At up to 500 positions the mean of the middle half of the nearest 2 % of points."""
    half, stride, known = max(3, len(values) // 100), 1 + len(values) // 500, np.isfinite(values)
    filled = np.interp(np.arange(len(values)), np.flatnonzero(known), values[known])
    filled = np.pad(filled, (half, 0), "reflect", reflect_type="odd")  # continues the slope
    filled = np.pad(filled, (0, half), "reflect")
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(filled, 2 * half + 1)[::stride])
    means = windows[:, half // 2 : -(half // 2)].mean(axis=1)
    return at[::stride], np.where(known[::stride], means, np.nan)


def _mark_events(axes, resumes: list, lines: list[dict]) -> None:
    """Draws dotted lines where the run was resumed, triangles where updates were skipped."""
    skipped = [line["step"] for line in lines if line.get("event") == "skipped_update"]
    for axis in axes:
        for i, at in enumerate(resumes):
            axis.axvline(at, color="#8a8f98", lw=0.9, ls=":", label="" if i else f"resumed ({len(resumes)})")
        if skipped:
            style = {"color": "#c53030", "ms": 5, "label": f"skipped updates ({len(skipped)})"}
            bottom = axis.get_xaxis_transform()  # x in data, y as a share of the height
            axis.plot(skipped, [0.02] * len(skipped), "^", transform=bottom, **style)


def _scale_loss(axis, right_label: str) -> None:
    """Sets limits that a steep start does not stretch, and on the right the same scale as perplexity."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    values = _values(line for line in axis.lines if line.get_alpha() != PALE)
    low, high = values.min(), np.percentile(values, 97, method="higher")
    pad = 0.06 * (high - low) or 0.1
    axis.set_ylim(low - pad, high + pad)
    axis.set_ylabel("loss (nats per token)")
    if axis.get_ylim()[1] < 30:  # else the run has diverged
        low, high = np.exp(axis.get_ylim())
        locator = LogLocator(subs=(1, 2, 5)) if high > 10 * low else MaxNLocator(6)
        ticks = [tick for tick in locator.tick_values(low, high) if low <= tick <= high]
        right = axis.secondary_yaxis("right")
        right.set_yticks(np.log(ticks), [readable(tick) for tick in ticks])
        right.set_ylabel(right_label)
