"""Curves of training runs, from their metrics.jsonl.

    python -m utils.display.curves output_dir                              redraws output_dir/curves.png
    python -m utils.display.curves run1 run2 --x tokens --output both.png  overlays runs
"""

import argparse
import os
import textwrap
import warnings
from pathlib import Path

import numpy as np

from utils.display.metrics import by_set, read_metrics, read_run
from utils.display.progress import numbers, readable

COLOURS = ["#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#c53030", "#0f8b8d", "#b7791f", "#4a5568"]
DASHES = ["-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1))]  # of evaluation sets
FEW = 40  # up to here a curve shows its points, beyond it is smoothed
BUCKETS = 1000  # across the picture, each drawn by its extremes: no spike is lost, 100k lines stay cheap
PANELS = {
    "learning_rate": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens per second",
    "accuracy": "accuracy",
}  # fmt: skip


def draw_curves(output_dir) -> None:
    """Redraw output_dir/curves.png, atomically. A failure warns: no run ends over it."""
    try:
        draw([output_dir], Path(output_dir) / "curves.png")
    except Exception as error:
        warnings.warn(f"curves.png was not drawn: {type(error).__name__}: {error}", stacklevel=2)


def draw(runs: list, output: Path, x: str = "step"):
    """One picture of one run, or of several overlaid. x: the horizontal axis: step, tokens or seconds."""
    from matplotlib.figure import Figure  # without pyplot there is no global state, and no display is needed

    histories = {Path(run): read_metrics(run) for run in runs}
    if empty := [str(run) for run, lines in histories.items() if not lines]:
        raise ValueError(f"no metrics.jsonl with lines in {', '.join(empty)}: give the output_dir of runs")
    logged = dict.fromkeys(key for lines in histories.values() for line in lines for key in line)
    panels = {key: name for key, name in PANELS.items() if key != "accuracy" or by_set(logged, key)}
    sets = by_set(logged, "loss/eval") | by_set(logged, "accuracy")
    sets = {name and f"/{name}": f"evaluation, {name}".removesuffix(", ") for name in sets}
    alone = len(histories) == 1

    figure = Figure((9.0, 7.0), 110, layout="constrained")
    grid = figure.add_gridspec(2, len(panels), height_ratios=[2, 1])
    loss = figure.add_subplot(grid[0, :])
    axes = {key: figure.add_subplot(grid[1, i]) for i, key in enumerate(panels)}
    visible, names = [], [run.resolve().name for run in histories]
    for i, (run, lines) in enumerate(histories.items()):
        name = names[i] if names.count(names[i]) == 1 else str(run)
        if origin := read_run(run).get("origin"):  # a branch
            name += f", from {origin['run']} at step {origin['step']:,}"
            at = _positions(lines, [origin["step"]], x)
            loss.axvline(*at, color=COLOURS[i % len(COLOURS)], lw=0.9, ls="-.")
        visible += _draw_loss(loss, name, lines, sets, None if alone else i, x)
    for key, axis in axes.items():
        _draw_panel(axis, list(histories.values()), key, sets, x)
        axis.set_title(panels[key], fontsize=9, loc="left")
    if alone:
        loss.set_title(_title(name, lines), fontsize=10, loc="left")
        _mark_events((loss, axes["grad_norm"]), read_run(run).get("resumes", []), lines, x)
    else:  # the dashes of a set are the same for all runs
        for place, label in enumerate(sets.values()):
            loss.plot([], [], lw=1.5, label=label, **_style(place, -1))
    _label_loss(loss, visible, "exp(loss)" if by_set(logged, "loss/nsp") else "perplexity")
    loss.set_xlabel(x, fontsize=9)
    for axis in (loss, *axes.values()):
        axis.set_xlim(loss.get_xlim())
        _tidy(axis, 8 if axis is loss else 4)

    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    os.replace(temporary, output)


def _title(name: str, lines: list[dict]) -> str:
    for line in reversed(lines):
        known = {key: value for key, value in line.items() if value is not None}
        if loss := numbers(known, "loss/eval", ".3f"):
            perplexity = numbers(known, "perplexity", ",.2f")
            title = f"{name}: evaluation loss {loss}" + (f"; perplexity {perplexity}" if perplexity else "")
            return textwrap.fill(title, 110, break_on_hyphens=False, max_lines=2, placeholder=" ...")
    return name


def _style(place: int, number: int | None) -> dict:
    """Of the evaluation set at this place: in the picture of one run a colour of its own, else the run's."""
    colour, dashes = (1 + place, place) if number is None else (number, 1 + place)
    return {"color": COLOURS[colour % len(COLOURS)], "ls": DASHES[dashes % len(DASHES)]}


def _plot(axis, at: np.ndarray, values: np.ndarray, smooth: bool, **style) -> np.ndarray:
    """Few points are marked, many smoothed over a pale curve of them all. Returns what is drawn boldly."""
    if smooth:
        axis.plot(*_thin(at, values), **style | {"lw": 0.6, "alpha": 0.3, "label": ""})
        at, values = _smooth(at, values)
    axis.plot(*_thin(at, values), **{"marker": "o" if len(values) <= FEW else "", **style})
    return values


def _draw_loss(axis, run: str, lines: list[dict], sets: dict, number: int | None, x: str) -> list[np.ndarray]:
    """Returns the values that must be visible. sets: {the end of an evaluation set's keys: its label};
    number: of this run if several are overlaid."""
    alone = number is None
    plain = any("loss/train_plain" in line for line in lines)
    at, train = _series(lines, "loss/train_plain" if plain else "loss/train", x)
    style, smooth = {"color": COLOURS[(number or 0) % len(COLOURS)], "lw": 1.5}, len(train) > FEW
    label = run if not alone else "training, smoothed" if smooth else "training"
    visible = [_plot(axis, at, train, smooth, ms=3, label=label, **style)]
    drawn = [(f"loss/eval{name}", sets[name], _style(place, number)) for place, name in enumerate(sets)]
    if alone and any("loss/nsp" in line for line in lines):
        style = {"color": COLOURS[1], "marker": ""}
        drawn.append(("loss/mlm", "evaluation, masked LM", style | {"ls": ":"}))
        drawn.append(("loss/nsp", "evaluation, next sentence", style | {"ls": "-."}))
    for key, label, style in drawn:
        curve = _series(lines, key, x)
        values = _plot(axis, *curve, False, lw=1.5, ms=4, label=label if alone else "", **style)
        visible.append(values[1:] if smooth and len(values) > 8 else values)  # the first: before any training
    return visible


def _draw_panel(axis, histories: list[list[dict]], key: str, sets: dict, x: str):
    top = 0.0
    for i, lines in enumerate(histories):
        drawn = [(key, {"color": COLOURS[i % len(COLOURS)]})]
        if key == "accuracy":
            number = i if len(histories) > 1 else None
            drawn = [(key + name, _style(place, number)) for place, name in enumerate(sets)]
            drawn.append(("nsp_accuracy", _style(0, number) | {"ls": "-.", "marker": ""}))
        for name, style in drawn:
            at, values = _series(lines, name, x)
            smooth = len(values) > FEW and key != "learning_rate"
            _plot(axis, at, values, smooth, lw=1.2, ms=3, **style)
            if len(finite := values[np.isfinite(values)]):  # spikes may leave the top
                top = max(top, 1.4 * np.percentile(finite, 98) if smooth else 1.1 * finite.max())
    axis.set_ylim(0, 1 if key == "accuracy" else top or 1)


def _mark_events(axes, resumes: list, lines: list[dict], x: str):
    """Dotted lines where the run was resumed, triangles where updates were skipped."""
    skipped = [line["step"] for line in lines if line.get("event") == "skipped_update"]
    for axis in axes:
        for i, at in enumerate(_positions(lines, resumes, x)):
            axis.axvline(at, color="#8a8f98", lw=0.9, ls=":", label="" if i else f"resumed ({len(resumes)})")
        if skipped:
            foot = axis.get_xaxis_transform()  # x in data, y in heights of the axes
            axis.plot(_positions(lines, skipped, x), [0.02] * len(skipped), "^", color="#c53030", ms=5,
                      transform=foot, label=f"skipped updates ({len(skipped)})")  # fmt: skip


def _label_loss(axis, visible: list[np.ndarray], right_label: str):
    """Limits that a steep start cannot flatten; on the right the same scale read as perplexity."""
    if finite := [found for values in visible if len(found := values[np.isfinite(values)])]:
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
    right.set_yticks(np.log(ticks), list(map(_short, ticks)))
    right.set_ylabel(right_label, fontsize=9)
    right.tick_params(labelsize=8)
    right.spines["right"].set_visible(False)
    axis.set_ylabel("loss (nats per token)", fontsize=9)
    columns = 1 + len(axis.get_legend_handles_labels()[1]) // 7
    axis.legend(framealpha=0.8, edgecolor="none", fontsize=8, loc="upper right", ncols=columns)


def _tidy(axis, ticks: int):
    from matplotlib.ticker import MaxNLocator

    for side, number in ((axis.xaxis, ticks), (axis.yaxis, 6)):
        side.set_major_locator(MaxNLocator(number, integer=side is axis.xaxis, steps=[1, 2, 2.5, 5, 10]))
        side.set_major_formatter(_short)
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
    return readable(float(value))


def _series(lines: list[dict], key: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """Where (in units of x) and what; null is NaN, which leaves a gap in the curve."""
    having = [line for line in lines if key in line and "step" in line]
    values = np.array([line[key] for line in having], float)
    return _positions(lines, [line["step"] for line in having], x), values


def _positions(lines: list[dict], steps: list, x: str) -> np.ndarray:
    """Steps in units of x. Evaluation lines have no seconds, old ones no tokens: from training lines."""
    if x == "step":
        return np.array(steps, float)
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
    low, high = (np.where(np.isfinite(values), values, gap) for gap in (np.inf, -np.inf))
    parts = np.array_split(np.arange(len(values)), BUCKETS)
    keep = sorted({i for part in parts for i in (part[low[part].argmin()], part[high[part].argmax()])})
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
        parser.exit(2, f"{error}\n")
    print(output)
