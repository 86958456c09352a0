"""TensorBoard, trackio and Weights & Biases (offline), each with its package: a run that is killed and
continued is one curve in each, read back from what they keep. Steps after the checkpoint are sent twice, with
the same values. What a tracker lost in the kill is not sent again.
"""

import importlib.util
import os
import signal
import struct
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
    """A run killed at step 26 or later, continued from step 20, and what the trackers have of it."""
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
    """Offline there is a file for each part of a run, of one id: what both hold is the same, and the service
    keeps a step once."""
    losses = {}
    files = sorted((folder / "wandb/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and files[0].name == files[1].name
    for file in files:
        for record in records(file):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "loss/train" in items:
                step = int(items["_step"])
                assert losses.setdefault(step, items["loss/train"]) == items["loss/train"]
    assert set(range(21, STEPS + 1)) <= set(losses)


def records(file):
    """The records of a .wandb file: LevelDB's log format, in blocks of 32 KiB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, size, kind = struct.unpack("<IHB", data[at : at + 7]) if left >= 7 else (0, 0, 0)
        if kind == 0:  # the rest of a block is empty
            at += left
            continue
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, whole = Record.FromString(whole), b""
            yield record
