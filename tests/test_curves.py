"""Curves of normal and damaged logs, compared with the axes of the picture."""

import json
import warnings

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from utils.display.curves import draw_curves


def train_line(step, loss=3.0, **more):
    return {"step": step, "tokens": 1000 * step, "loss/train": loss, "learning_rate": 1e-3 * step} | more


def eval_line(step, loss=2.0, **more):
    return {"step": step, "loss/eval": loss, "loss/eval_stderr": 0.1, "perplexity": 7.4, **more}


def write_run(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


LONG = [train_line(s, 9 / s**0.2) for s in range(1, 5001)]
RUNS = {  # lines, the names of the loss curves
    "5,000 points": (LONG + [eval_line(5000)], "train eval"),
    "an evaluation alone": ([eval_line(1)], "eval"),
    "nothing but nulls": ([train_line(s, None, learning_rate=None) for s in range(60)], "train"),
    "missing keys": ([{"step": 1}, {"loss/train": 3.0}, train_line(2), {"event": "push"}], "train"),
    "key tokens": ([train_line(s, 4.0, **{"loss/train_plain": 3.0}) for s in range(9)], "train_plain"),
    "sentence pairs": ([train_line(s, **{"loss/train_mlm": 2.4, "loss/train_nsp": 0.6}) for s in range(9)]
                       + [eval_line(9, 3.0, **{"loss/mlm": 2.4, "loss/nsp": 0.6})],
                       "train train_mlm train_nsp eval mlm nsp"),
    "two evaluation sets": ([train_line(1), {"step": 1, "loss/eval/a": 2.0, "loss/eval/b": None}],
                            "train eval/a eval/b"),
}  # fmt: skip


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the drawn picture: losses, then the learning rate."""
    axes, save = [], Figure.savefig

    def savefig(figure, *args, **kwargs):
        axes.extend(figure.axes)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return axes


@pytest.mark.parametrize("name", RUNS)
def test_curves_show_losses_and_learning_rate(tmp_path, drawn, name):
    lines, names = RUNS[name]
    write_run(tmp_path, lines)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_curves(tmp_path)
    picture = imread(tmp_path / "curves.png")
    assert picture.shape[1] > 900 and picture.std() > 0.02
    assert [file.name for file in tmp_path.glob(".*")] == []  # no temporary file is left
    loss, rate = drawn
    assert [line.get_label() for line in loss.lines] == names.split()
    for line in loss.lines:
        key = f"loss/{line.get_label()}"
        logged = [(each["step"], each[key]) for each in lines if key in each and "step" in each]
        shown = zip(*(data.tolist() for data in line.get_data()), strict=True)
        assert [(step, None if value != value else value) for step, value in shown] == logged
    assert len(rate.lines[0].get_ydata()) == sum("learning_rate" in line for line in lines)


@pytest.mark.parametrize("lines", ["", "not json\n", '{"step": "a", "loss/train": [1]}\n', '{"step": 1}\n'])
def test_unreadable_log_keeps_the_old_curves(tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_text(lines)
    (tmp_path / "curves.png").write_bytes(b"old")
    with pytest.warns(UserWarning, match="curves.png was not drawn"):
        draw_curves(tmp_path)
    assert (tmp_path / "curves.png").read_bytes() == b"old"
