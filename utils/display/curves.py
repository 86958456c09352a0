"""Curves of training runs, from their metrics.jsonl.

    python -m utils.display.curves output_dir                              redraws output_dir/curves.png
    python -m utils.display.curves run1 run2 --x tokens --output both.png  overlays runs
"""

import argparse
import os
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np

from utils.display.metrics import by_set, read_metrics, read_run
from utils.display.progress import numbers

COLOURS = ["#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#c53030", "#0f8b8d", "#b7791f", "#4a5568"]
DASHES = ["-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1))]  # of evaluation sets
FEW = 40  # up to here a curve shows its points, beyond it is smoothed
BUCKETS = 1000  # across the picture, each drawn by its extremes: no spike is lost, 100k lines stay cheap
PANELS = {
    "learning_rate": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens per second",
    "accuracy": "accuracy",
}  # fmt: skip


def draw_curves(output_dir) -> bool:
    """Redraw output_dir/curves.png from metrics.jsonl, atomically. A failure warns: no run ends over it."""
    try:
        draw([output_dir], Path(output_dir) / "curves.png")
        return True
    except Exception as error:
        warnings.warn(f"curves.png was not drawn: {type(error).__name__}: {error}", stacklevel=2)
        return False


def draw(runs: list, output: Path, x: str = "step", size=(9.0, 7.0), dpi: int = 110):
    """One picture of one run, or of several overlaid. x: the horizontal axis: step, tokens or seconds."""
    # a Figure without pyplot has no global state and needs no display, as suits a training process
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    histories = {Path(run): read_metrics(run) for run in runs}
    if empty := [str(run) for run, lines in histories.items() if not lines]:
        raise ValueError(f"no metrics.jsonl with lines in {', '.join(empty)}: give the output_dir of runs")
    logged = dict.fromkeys(key for lines in histories.values() for line in lines for key in line)
    panels = {key: name for key, name in PANELS.items() if key != "accuracy" or by_set(logged, key)}
    sets = list(by_set(logged, "loss/eval") | by_set(logged, "accuracy"))
    alone = len(histories) == 1

    figure = Figure(size, dpi, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, len(panels), height_ratios=[2, 1])
    loss = figure.add_subplot(grid[0, :])
    axes = {key: figure.add_subplot(grid[1, i]) for i, key in enumerate(panels)}
    visible = []
    for i, (run, lines) in enumerate(histories.items()):
        visible += _draw_loss(loss, run.resolve().name, lines, sets, None if alone else i, x)
    for key, axis in axes.items():
        _draw_panel(axis, list(histories.values()), key, sets, x)
        axis.set_title(panels[key], fontsize=9, loc="left")
    if alone:
        run, lines = next(iter(histories.items()))
        loss.set_title(_title(run, lines), fontsize=10, loc="left")
        _mark_events((loss, axes["grad_norm"]), read_run(run).get("resumes", []), lines, x)
    elif sets != [""]:  # whose dashes are the same for all runs
        for i, name in enumerate(sets):
            loss.plot([], [], lw=1.5, label=_label(name), **_style(i, -1))
    _label_loss(loss, visible, "exp(loss)" if by_set(logged, "loss/nsp") else "perplexity")
    loss.set_xlabel(x, fontsize=9)
    for axis in (loss, *axes.values()):
        axis.set_xlim(loss.get_xlim())
        _tidy(axis, 8 if axis is loss else 3)

    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    canvas.print_figure(temporary, format="png")
    os.replace(temporary, output)


def _title(run: Path, lines: list[dict]) -> str:
    for line in reversed(lines):
        known = {key: value for key, value in line.items() if value is not None}
        if loss := numbers(known, "loss/eval", ".3f"):
            perplexity = numbers(known, "perplexity", ",.2f")
            perplexity = f"; perplexity {perplexity}" if perplexity else ""
            title = f"{run.resolve().name}: evaluation loss {loss}{perplexity}"
            return textwrap.fill(title, 110, break_on_hyphens=False, max_lines=2, placeholder=" ...")
    return run.resolve().name


def _key(metric: str, name: str) -> str:
    return f"{metric}/{name}" if name else metric


def _label(name: str) -> str:
    return f"evaluation, {name}" if name else "evaluation"


def _style(place: int, number: int | None) -> dict:
    """Of the evaluation set at this place: in the picture of one run a colour of its own, else the run's."""
    if number is None:
        return {"color": COLOURS[(1 + place) % len(COLOURS)], "ls": DASHES[place % len(DASHES)]}
    return {"color": COLOURS[number % len(COLOURS)], "ls": DASHES[(1 + place) % len(DASHES)]}


def _draw_loss(axis, run: str, lines: list[dict], sets: list[str], number: int | None, x: str) -> list:
    """Training loss, raw and smoothed, and evaluation loss. number: of this run if overlaid, None if alone.

    Returns the values that must be visible, arrays.
    """
    alone = number is None
    colour = COLOURS[0 if alone else number % len(COLOURS)]
    plain = any("loss/train_plain" in line for line in lines)
    at, train = _series(lines, "loss/train_plain" if plain else "loss/train", x)
    few = len(train) <= FEW
    if not few:
        axis.plot(*_thin(at, train), color=colour, lw=0.6, alpha=0.3)
        at, train = _smooth(at, train)
    label = run if not alone else "training" if few else "training, smoothed"
    axis.plot(at, train, color=colour, lw=1.5, marker="o" if few else "", ms=3, label=label)
    visible = [train]
    drawn = [(_key("loss/eval", name), _label(name), _style(i, number)) for i, name in enumerate(sets)]
    if alone and any("loss/nsp" in line for line in lines):
        drawn.append(("loss/mlm", "evaluation, masked LM", {"color": COLOURS[1], "ls": ":"}))
        drawn.append(("loss/nsp", "evaluation, next sentence", {"color": COLOURS[1], "ls": "-."}))
    for key, label, style in drawn:
        at, values = _series(lines, key, x)
        if len(values):
            marker = "o" if key.startswith("loss/eval") and len(values) <= FEW else ""
            axis.plot(*_thin(at, values), lw=1.5, marker=marker, ms=4, label=label if alone else "", **style)
            visible.append(values)
    return visible


def _draw_panel(axis, histories: list[list[dict]], key: str, sets: list[str], x: str):
    drawn = [(lines, key, {"color": COLOURS[i % len(COLOURS)]}) for i, lines in enumerate(histories)]
    if key == "accuracy":
        drawn = []
        for number, lines in enumerate(histories) if len(histories) > 1 else [(None, histories[0])]:
            drawn += [(lines, _key(key, name), _style(i, number)) for i, name in enumerate(sets)]
            drawn.append((lines, "nsp_accuracy", {**_style(0, number), "ls": "-."}))
    top = 0.0
    for lines, name, style in drawn:
        at, values = _series(lines, name, x)
        finite = values[np.isfinite(values)]
        marker = "o" if len(values) <= FEW and name != "nsp_accuracy" else ""
        if len(values) > FEW and key != "learning_rate":
            axis.plot(*_thin(at, values), lw=0.6, alpha=0.3, **style)
            axis.plot(*_smooth(at, values), lw=1.2, **style)
            top = max(top, 1.4 * np.percentile(finite, 98) if len(finite) else 0)  # spikes may leave the top
        else:
            axis.plot(*_thin(at, values), lw=1.2, marker=marker, ms=3, **style)
            top = max(top, 1.1 * finite.max(initial=0))
    axis.set_ylim(0, 1 if key == "accuracy" else top or 1)


def _mark_events(axes, resumes: list, lines: list[dict], x: str):
    """Dotted lines where the run was resumed, triangles where updates were skipped."""
    skipped = np.array([line["step"] for line in lines if line.get("event") == "skipped_update"], float)
    for axis in axes:
        for i, at in enumerate(_positions(lines, np.array(resumes, float), x)):
            label = "" if i else f"resumed ({len(resumes)})"
            axis.axvline(at, color="#8a8f98", lw=0.9, ls=":", label=label)
        if len(skipped):
            foot = axis.get_xaxis_transform()  # x in data, y in heights of the axes
            axis.plot(_positions(lines, skipped, x), np.full(len(skipped), 0.02), "^", color="#c53030", ms=5,
                      transform=foot, label=f"skipped updates ({len(skipped)})")


def _label_loss(axis, visible: list[np.ndarray], right_label: str):
    """Limits that a steep start cannot flatten; on the right the same scale read as perplexity."""
    finite = [values[np.isfinite(values)] for values in visible]
    finite = [values for values in finite if len(values)]
    if finite:
        low = min(values.min() for values in finite)
        high = max(np.percentile(values, 97) if len(values) > FEW else values.max() for values in finite)
        pad = 0.06 * (high - low) or 0.1
        axis.set_ylim(low - pad, high + pad)
    low, high = np.exp(np.clip(axis.get_ylim(), -5, 50))
    finer = (1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    for digits in (*finer, np.arange(1, 10, 0.5), np.arange(1, 10, 0.05)):
        ticks = [tick for e in range(-3, 22) for d in digits if low <= (tick := d * 10.0**e) <= high]
        if len(ticks) >= 4:  # the roundest numbers that make a scale
            break
    ticks = ticks[:: len(ticks) // 10 + 1]
    right = axis.secondary_yaxis("right")
    right.set_yticks(np.log(ticks), [f"{tick:,.4g}" if tick < 1000 else _short(tick) for tick in ticks])
    right.set_ylabel(right_label, fontsize=9)
    right.tick_params(labelsize=8)
    right.spines["right"].set_visible(False)
    axis.set_ylabel("loss (nats per token)", fontsize=9)
    columns = 1 + len(axis.get_legend_handles_labels()[1]) // 7
    axis.legend(framealpha=0.8, edgecolor="none", fontsize=8, loc="upper right", ncols=columns)


def _tidy(axis, ticks: int):
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(ticks, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axis.xaxis.set_major_formatter(FuncFormatter(_short))
    axis.yaxis.set_major_formatter(FuncFormatter(_short))
    axis.grid(alpha=0.25, lw=0.5)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _short(value: float, _=None) -> str:
    """5e-4, 0.25, 3.5, 1,500, 20k, 3M"""
    if 0 < abs(value) < 0.01:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    for least, size, unit in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.4g}{unit}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _series(lines: list[dict], key: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """Where (in units of x) and what; null is NaN, which leaves a gap in the curve."""
    having = [line for line in lines if key in line and "step" in line]
    values = np.array([np.nan if line[key] is None else line[key] for line in having], float)
    return _positions(lines, np.array([line["step"] for line in having], float), x), values


def _positions(lines: list[dict], steps: np.ndarray, x: str) -> np.ndarray:
    """Steps in units of x. Evaluation lines have only a step: tokens and seconds come from training lines."""
    if x == "step":
        return steps
    known = [(line["step"], line[x]) for line in lines if line.get(x) is not None and "step" in line]
    return np.interp(steps, *np.array([(0, 0), *known], float).T) if known else np.full(len(steps), np.nan)


def _smooth(at: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At up to BUCKETS places: mean of the middle half of the neighbouring 2 % of points, without spikes."""
    half = max(3, len(values) // 100)
    places = np.unique(np.linspace(0, len(values) - 1, BUCKETS).astype(int))
    means = []
    for place in places:
        reach = min(half, place)  # short at the start, where the loss falls steeply; one-sided at the end
        near = values[place - reach : place + reach + 1]
        near = np.sort(near[np.isfinite(near)])
        middle = near[len(near) // 4 : len(near) - len(near) // 4]
        means.append(middle.mean() if len(middle) else np.nan)
    return at[places], np.array(means)


def _thin(at: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest point of each bucket, in order: looks the same as all of them."""
    if len(values) <= 2 * BUCKETS:
        return at, values
    keep = []
    for part in np.array_split(np.arange(len(values)), BUCKETS):
        part = part[np.isfinite(values[part])] if np.isfinite(values[part]).any() else part[:1]
        keep += {part[values[part].argmin()], part[values[part].argmax()]}
    keep = np.sort(keep)
    return at[keep], values[keep]


if __name__ == "__main__":
    show = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show)
    parser.add_argument("runs", nargs="+", metavar="output_dir")
    parser.add_argument("--output", type=Path, help="default: curves.png in the run, compare.png for several")
    parser.add_argument("--x", choices=["step", "tokens", "seconds"], default="step", help="horizontal axis")
    args = parser.parse_args()
    several = len(args.runs) > 1
    output = args.output or (Path("compare.png") if several else Path(args.runs[0]) / "curves.png")
    try:
        draw(args.runs, output, args.x)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(output)
