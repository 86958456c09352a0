"""Curves of real and damaged logs, read back from the picture's own axes."""

import json
import math
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from tests.runs import PROJECT
from utils.display import curves
from utils.display.curves import draw_curves
from utils.display.metrics import Metrics


def train_line(step, loss=3.0, **more):
    return {
        "step": step, "tokens": 1000 * step, "seconds": 0.1 * step, "loss/train": loss, "learning_rate": 1e-3,
        "grad_norm": 1.0, "tokens_per_second": 1e4, "mfu": None, "skipped_updates": 0, **more,
    }  # fmt: skip


def begin(folder, step=0):
    """The metrics of a run that begins or continues at `step`."""
    args = SimpleNamespace(output_dir=str(folder), resume_from_checkpoint="auto")
    metrics = Metrics(args, step, True)
    metrics.start(step, {}, "rows", {}, {})
    return metrics


def write_run(folder, lines):
    metrics = begin(folder)
    for line in lines:
        metrics.write(line)
    return folder


def eval_line(step, loss=2.0, **more):
    return {"step": step, "loss/eval": loss, "perplexity": 7.4, "bits_per_byte": 1.0, **more}


def sets_line(step, **losses):
    """One evaluation of several sets."""
    line = {"step": step}
    for name, loss in losses.items():
        line |= {f"loss/eval/{name}": loss, f"accuracy/{name}": loss and 1 / loss}
        line[f"perplexity/{name}"] = loss and math.exp(loss)
    return line


RUNS = {
    "five points": [train_line(s, 5 / s) for s in range(1, 6)] + [eval_line(5)],
    "5,000 points": [train_line(s, 9 / s**0.2) for s in range(1, 5001)] + [eval_line(5000)],
    "one point": [train_line(1)],
    "an evaluation alone": [eval_line(1)],
    "nothing but nulls": [train_line(s, None, grad_norm=None, tokens_per_second=None) for s in range(60)],
    "missing keys": [{"step": 1}, {"loss/train": 3.0}, {"step": 2, "loss/train": 3.0}, {"event": "other"}],
    "constant loss": [train_line(s, 3.0) for s in range(100)],
    "huge loss": [train_line(s, 10.0**s) for s in range(1, 60)] + [eval_line(60, 1e4, perplexity=None)],
    "masked LM": [train_line(s, 3.0) for s in range(100)]
    + [eval_line(99, 3.0, **{"accuracy": 0.4, "loss/mlm": 2.4, "loss/nsp": 0.6, "nsp_accuracy": 0.7})],
    "three evaluation sets": [train_line(s, 9 / s**0.2) for s in range(1, 101)]
    + [sets_line(s, wiki=9 / s**0.2, books=9.5 / s**0.2, code=None) for s in (50, 100)],
}


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_log_gives_a_picture(tmp_path, name):
    write_run(tmp_path, RUNS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_curves(tmp_path)
    picture = imread(tmp_path / "curves.png")
    assert picture.shape[1] > 900 and picture.std() > 0.02
    assert [file.name for file in tmp_path.glob(".*")] == []  # no temporary file is left


@pytest.mark.parametrize("lines", ["", "not json\n", '{"step": "a", "loss/train": [1]}\n'])
def test_a_log_that_cannot_be_drawn_costs_a_warning_and_keeps_the_old_picture(tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_text(lines)
    (tmp_path / "curves.png").write_bytes(b"old")
    with pytest.warns(UserWarning, match="curves.png was not drawn"):
        draw_curves(tmp_path)
    assert (tmp_path / "curves.png").read_bytes() == b"old"


def test_drawing_leaves_no_trace_in_pyplot(tmp_path):
    """No window system is asked for, no figure is kept: a training process may do this a thousand times."""
    write_run(tmp_path, RUNS["five points"])
    code = f"""
import sys
from utils.display.curves import draw_curves
draw_curves({str(tmp_path)!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=PROJECT, check=True)


def test_the_smoothed_curve_follows_the_loss_and_ignores_spikes():
    steps = np.arange(5000)
    loss = 2 + 7 * np.exp(-steps / 800)
    noisy = loss + 0.2 * np.random.default_rng(0).normal(size=5000)
    noisy[::97] = 50
    noisy[3000:3050] = np.nan
    at, smooth = curves._smooth(steps, noisy)
    assert len(at) <= 500 and np.nanmax(np.abs(smooth - loss[at])[10:]) < 0.15
    assert set(at[np.isnan(smooth)]) == {step for step in at if 3000 <= step < 3050} != set()  # a gap


def test_the_right_axis_has_the_perplexity_of_the_loss(tmp_path, drawn):
    write_run(tmp_path, RUNS["five points"])
    draw_curves(tmp_path)
    right = drawn[0].child_axes[0]
    for place, label in zip(right.get_yticks(), right.get_yticklabels(), strict=True):
        assert math.exp(place) == pytest.approx(float(label.get_text()), rel=0.01)


def test_the_two_losses_of_pairs_are_drawn_and_no_perplexity_of_their_sum(tmp_path, drawn):
    record = {"loss/mlm": 4.0, "loss/nsp": 0.7, "loss/eval": 4.7, "accuracy": 0.2, "nsp_accuracy": 0.5}
    trained = {"loss/train": 5.0, "loss/train_mlm": 4.2, "loss/train_nsp": 0.8}
    lines = [{"step": step} | trained | record for step in (0, 5, 10)]
    write_run(tmp_path, lines)
    draw_curves(tmp_path)
    loss, *below = drawn
    named = {line.get_label(): line.get_ydata().tolist() for line in loss.lines}
    assert named["training: next sentence"] == [0.8] * 3 and named["training: masked tokens"] == [4.2] * 3
    assert named["evaluation: next sentence"] == [0.7] * 3 and named["evaluation: masked tokens"] == [4.0] * 3
    assert {"accuracy", "nsp accuracy"} <= {axis.get_title(loc="left") for axis in below}
    assert not loss.child_axes


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the pictures drawn since: loss, learning rate, ..."""
    axes, save = [], Figure.savefig

    def savefig(figure, *args, **kwargs):
        axes.extend(figure.axes)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return axes


def test_each_evaluation_set_has_a_curve_of_its_own(tmp_path, drawn):
    """In loss and accuracy, told apart by colour; the title has the last values of each."""
    write_run(tmp_path / "run", RUNS["three evaluation sets"])
    draw_curves(tmp_path / "run")
    loss, accuracy = drawn[0], drawn[4]
    lines = {line.get_label(): line for line in loss.lines if line.get_label().startswith("evaluation")}
    assert list(lines) == [f"evaluation, {name}" for name in ("wiki", "books", "code")]
    colours = [line.get_color() for line in lines.values()]
    assert len(set(colours)) == 3 and colours == [line.get_color() for line in accuracy.lines[:3]]
    assert lines["evaluation, books"].get_ydata()[-1] == pytest.approx(9.5 / 100**0.2)
    assert accuracy.lines[1].get_ydata()[-1] == pytest.approx(100**0.2 / 9.5)
    title = loss.get_title(loc="left")
    assert title == ("run: evaluation loss wiki 3.583, books 3.782, code -; perplexity "
                     "wiki 35.98, books 43.90, code -")  # fmt: skip


@pytest.mark.parametrize("steps", [20, 1000])
def test_the_loss_before_any_training_flattens_no_long_curve(tmp_path, drawn, steps):
    lines = [eval_line(0, 9.2)] + [train_line(s, 2 + 4 / s**0.3) for s in range(1, steps + 1)]
    write_run(tmp_path, lines + [eval_line(s, 3.0) for s in range(steps // 4, steps + 1, steps // 4)])
    draw_curves(tmp_path)
    assert (drawn[0].get_ylim()[1] > 9.2) == (steps == 20)


def test_a_title_of_many_sets_is_cut(tmp_path, drawn):
    write_run(tmp_path, [sets_line(1, **{f"an-evaluation-set-{i}": 3.0 for i in range(20)})])
    draw_curves(tmp_path)
    lines = drawn[0].get_title(loc="left").splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= 110 and lines[1].endswith("...")


def test_a_log_of_100k_lines_is_smoothed_to_few_points(tmp_path, drawn):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 100_001):
            file.write(json.dumps(train_line(step, 9 / step**0.1)) + "\n")
    draw_curves(tmp_path)
    assert max(len(line.get_xdata()) for line in drawn[0].lines if line.get_alpha() is None) <= 500
