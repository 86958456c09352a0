"""TensorBoard, trackio and Weights & Biases (offline): a run that is killed and resumed is one curve in each.

Steps after the checkpoint are sent twice, with the same values. Values that a tracker lost in the kill are
not sent again.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.runs import PATIENCE, PROJECT, TINY, arguments, environment, write_corpus

PACKAGES = "tensorboard", "trackio", "wandb"
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
NEEDED = f"tests/trackers/requirements.txt: {', '.join(MISSING)}"
pytestmark = pytest.mark.skipif(bool(MISSING), reason=NEEDED)
STEPS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the trackers' files of a run that was killed after step 26 and resumed from step 20."""
    folder = tmp_path_factory.mktemp("trackers")
    (folder / "wandb").mkdir()
    flags = {**TINY, "dataset_name": write_corpus(folder / "corpus.jsonl"), "max_train_steps": STEPS,
             "save_steps": 10, "eval_steps": 10, "cache_dir": folder / "cache", "output_dir": folder / "run",
             "report_to": [*PACKAGES], "prompts": ["none"]}  # fmt: skip
    line = [sys.executable, "train_clm.py", *arguments(flags)]
    places = {"WANDB_DIR": str(folder / "wandb"), "TRACKIO_DIR": str(folder / "trackio")}
    env, log = environment(WANDB_MODE="offline", **places), folder / "log"
    with open(log, "w") as out:
        process = subprocess.Popen(line, cwd=PROJECT, env=env, stdout=out, stderr=out, start_new_session=True)
        until = time.time() + PATIENCE
        while "step 26/" not in log.read_text() and process.poll() is None and time.time() < until:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, log.read_text()[-3000:]
        done = subprocess.run(line, cwd=PROJECT, env=env, stdout=out, stderr=out)
    assert done.returncode == 0, log.read_text()[-3000:]
    return folder


def test_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run/train_clm"), size_guidance={"scalars": 0})
    events.Reload()
    steps = [event.step for event in events.Scalars("loss/train")]
    assert steps == sorted(set(steps)) and steps[-20:] == list(range(21, STEPS + 1))
    assert [event.step for event in events.Scalars("loss/eval")][-2:] == [30, 40]


def test_trackio(folder, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("train_clm")
    logged = SQLiteStorage.get_logs("train_clm", run)
    for metric, since in ("loss/train", range(21, STEPS + 1)), ("loss/eval", (30, 40)):
        values = {}
        for line in logged:
            if metric in line:
                assert values.setdefault(line["step"], line[metric]) == line[metric]
        assert set(since) <= set(values), metric
    on = {line["step"]: line["tokens"] for line in logged if "loss/eval" in line}  # another axis
    assert on == {step: step * 8 * 32 for step in on}
    config = SQLiteStorage.get_run_config("train_clm", run)
    assert config["max_train_steps"] == STEPS and config["report_to"] == str([*PACKAGES])


def test_wandb(folder):
    """Offline there is a file for each part of a run, of one id: the service joins them."""
    files = sorted((folder / "wandb/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and files[0].name == files[1].name and all(file.stat().st_size for file in files)
