"""The exported model: file modes, complete files only, and a full disk."""

import json
import stat
import time
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file

from tests import forked
from tests.runs import PROJECT, TINY, arguments, metrics, write_corpus


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    return TINY | {"dataset_name": write_corpus(folder / "corpus.jsonl"), "cache_dir": folder / "cache"}


def fill_disk(output_dir):
    """Make the disk full for `.export`/config.json, which is written first, until the link is deleted."""
    full = output_dir.with_name("full")
    full.mkdir(parents=True, exist_ok=True)
    if not (full / "config.json").is_symlink():
        (full / "config.json").symlink_to("/dev/full")
    output_dir.mkdir(exist_ok=True)
    while not (output_dir / ".export").is_symlink():
        with suppress(FileExistsError):  # a model is being saved
            (output_dir / ".export").symlink_to(full)
    return output_dir / ".export"


WITH_UMASK = """
import os, runpy, sys
os.umask(int(sys.argv.pop(1), 8))
sys.argv[0] = "train_clm.py"
runpy.run_path("train_clm.py", run_name="__main__")
"""


@pytest.mark.parametrize("mask, mode", [("022", 0o644), ("007", 0o660)])
def test_exported_files_follow_the_umask(flags, tmp_path, mask, mode):
    """safetensors alone would write files that only their owner can read."""
    words = arguments(flags | {"output_dir": tmp_path / "run", "max_train_steps": 2})
    done = forked.run_code(WITH_UMASK, [mask, *words])
    assert done.returncode == 0, done.stderr
    modes = {path.name: stat.S_IMODE(path.stat().st_mode)
             for path in (tmp_path / "run").iterdir() if path.is_file()}  # fmt: skip
    assert "model.safetensors" in modes and set(modes.values()) == {mode}, modes


def assert_saved(output_dir, step):
    weights = load_file(output_dir / f"checkpoints/step-{step:08d}/model.safetensors")
    exported = load_file(output_dir / "model.safetensors")
    assert exported and all(torch.equal(value, weights[name]) for name, value in exported.items())
    assert f"| optimizer steps | {step:,} |" in (output_dir / "README.md").read_text()


def test_full_disk_during_export_does_not_end_training(flags, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    flags = flags | {"output_dir": run, "max_train_steps": 150, "eval_steps": 150}
    process = forked.start(PROJECT, "train_clm.py", flags, log)
    while not (run / "model.safetensors").exists():
        assert process.is_alive(), log.read_text()
        time.sleep(0.01)
    full = fill_disk(run)
    forked.wait_for(process, log, f"the model was not saved in {run}: [Errno 28] No space left on device")
    assert load_file(run / "model.safetensors")  # the model of an earlier save
    full.unlink()
    forked.finish([process], log)
    assert_saved(run, 150)
    assert not (run / ".export").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_same_command_saves_a_model_that_did_not_fit_on_disk(flags, processes, tmp_path):
    """Without training again. A run whose first model does not fit ends before step 1."""
    flags = flags | {"per_device_train_batch_size": 8 // processes}
    line = "\nerror: the {} model was not saved: [Errno 28] No space left on device; make room"
    run = tmp_path / "run"
    full = fill_disk(run)
    done = forked.run("train_clm.py", flags | {"output_dir": run}, processes)
    assert done.returncode == 1 and done.stderr.count(line.format("first")) == 1, done.stderr
    assert "Traceback" not in done.stderr and "step 1/6" not in done.stdout
    full.unlink()
    done = forked.run("train_clm.py", flags | {"output_dir": run}, processes)
    assert done.returncode == 0, done.stderr
    lines, args = metrics(run), json.loads((run / "args.json").read_text())
    (run / "args.json").write_text(json.dumps(args | {"finished": None}))  # as if its last save had failed
    for name in ("model.safetensors", "README.md"):
        (run / name).unlink()
    full = fill_disk(run)
    for _ in range(2):
        done = forked.run("train_clm.py", flags | {"output_dir": run}, processes)
        assert done.returncode == 1 and done.stderr.count("was not saved in") == 1, done.stderr
        assert done.stderr.count(line.format("last")) == 1 and "Traceback" not in done.stderr
        assert not (run / "model.safetensors").exists() and not (run / "README.md").exists()
    full.unlink()
    done = forked.run("train_clm.py", flags | {"output_dir": run}, processes)
    assert done.returncode == 0 and "step 6/6" not in done.stdout, done.stderr
    assert_saved(run, 6)
    assert metrics(run) == lines
    done = forked.run("train_clm.py", flags | {"output_dir": run}, processes)
    assert done.returncode == 0 and "this run is finished" in done.stdout
