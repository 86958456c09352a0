"""A branch, `--resume_from_checkpoint runs/a/checkpoints/step-N --output_dir runs/b`, says where it began."""

import json
import shutil

import pytest
from matplotlib.figure import Figure

from tests.forked import finish, start
from tests.runs import PROJECT, TINY, metrics, write_corpus
from utils.display import curves
from utils.display.curves import draw_curves
from utils.display.metrics import read_run
from utils.state.folders import run_name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """a: 6 steps; b: branches off after its step 3, and is resumed at its own 5; c: branches off there."""
    folder = tmp_path_factory.mktemp("runs")
    flags = TINY | {"dataset_name": write_corpus(folder / "corpus.jsonl"), "cache_dir": folder / "cache",
                    "prompts": "none", "eval_at_start": False, "save_steps": 1}  # fmt: skip

    def train(name, **changes):
        changes |= {"output_dir": folder / name}
        finish([start(PROJECT, "train_clm.py", flags | changes, folder / "log")], folder / "log")

    train("a", save_steps=3, keep_best=True)
    before = {path: path.read_bytes() for path in (folder / "a").rglob("*") if path.is_file()}
    train("b", resume_from_checkpoint=folder / "a/checkpoints/step-00000003")
    shutil.rmtree(folder / "b/checkpoints/step-00000006")
    train("b")
    (folder / "c").mkdir()
    shutil.copy(folder / "a/metrics.jsonl", folder / "c")  # of an older run there
    train("c", resume_from_checkpoint=folder / "b/checkpoints/step-00000005")
    assert before == {path: path.read_bytes() for path in (folder / "a").rglob("*") if path.is_file()}
    return folder


def test_settings_and_card_name_the_origin_also_after_a_resume(runs):
    for name, origin in {"a": None, "b": {"run": "a", "step": 3}, "c": {"run": "b", "step": 5}}.items():
        assert json.loads((runs / name / "args.json").read_text())["origin"] == origin
        card = (runs / name / "README.md").read_text()
        row = f"| branch of | `{origin['run']}`, after its step {origin['step']} |" if origin else ""
        assert row in card and ("branch of" in card) == bool(origin)
        assert ("best model" in json.loads((runs / name / "summary.json").read_text())) == (name == "a")
    assert [launch["step"] for launch in read_run(runs / "b")["launches"]] == [3, 5]
    assert metrics(runs / "b") == [line for line in metrics(runs / "a") if line["step"] > 3]
    assert metrics(runs / "c") == [line for line in metrics(runs / "a") if line["step"] > 5]


def test_curves_name_where_a_branch_starts(runs, monkeypatch):
    labels, title = [], curves._title

    def named(*words):
        labels.append(title(*words).split(":")[0])
        return labels[-1]

    monkeypatch.setattr(Figure, "legend", lambda self, handles, names, **_: labels.extend(names))
    monkeypatch.setattr(curves, "_title", named)
    resumed = ["resumed (1)"]
    for run, name, more in (("b", "b, from a at step 3", resumed), ("c", "c, from b at step 5", [])):
        draw_curves(runs / run)
        assert labels == [name, "training", "evaluation", *more]
        labels.clear()


def test_the_name_of_a_run_shows_nothing_of_its_path_and_can_be_printed(tmp_path):
    odd = tmp_path / "odd\n\udce4 run"
    assert run_name(odd / "checkpoints" / "step-00000007") == "odd?? run"
    assert run_name(tmp_path / "a copy") == "a copy"
