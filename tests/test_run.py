"""The run's object stays what it is: everything about a run that never touches the model's update."""

import ast
import subprocess
import sys

import pytest

from tests.forked import run_code
from tests.runs import PROJECT, TINY, arguments, environment, metrics, write_corpus


def test_the_run_does_not_become_a_trainer():
    """No backward, no optimizer step, no zero_grad, no clipping, no schedule: they stand in the scripts."""
    parts = "run resume tasks display/report publishing/publication state/edit_check"
    trees = [ast.parse((PROJECT / f"utils/{part}.py").read_text()) for part in parts.split()]
    called = [node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = {function.attr for function in called if isinstance(function, ast.Attribute)}
    assert not calls & {"backward", "step", "zero_grad", "clip_grad_norm_", "no_sync", "prepare", "end_step"}
    for script in ("train_clm.py", "train_mlm.py"):
        written = (PROJECT / script).read_text()
        for verb in ("accelerator.backward(", "optimizer.step()", "optimizer.zero_grad()", "schedule.step()",
                     "clip_grad_norm_(", "guard.check(", "run.seed_step()", "Accelerator("):  # fmt: skip
            assert written.count(verb) == 1, (script, verb)


def test_imports_never_run_back_up():
    """utils/io imports nothing of the project; data nothing else of utils, utils nothing of data, neither a
    script; the rooms of utils build on each other."""
    rooms = ["io", "xla", "devices", "learning", "state", "display", "publishing"]
    for path in [*PROJECT.glob("data/**/*.py"), *PROJECT.glob("utils/**/*.py")]:
        here = path.relative_to(PROJECT).parts
        names = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            assert parts[0] not in ("train_clm", "train_mlm"), (path, name)
            if parts[0] in ("data", "utils"):
                assert parts[0] == here[0] or parts[:2] == ["utils", "io"], (path, name)
            if parts[0] == "utils" and here[0] == "utils" and len(here) == 3 and here[1] in rooms:
                assert parts[1] in rooms[: rooms.index(here[1]) + 1], (path, name)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_main_that_leaves_by_itself_has_the_status_that_it_says(processes):
    code = """
import sys
sys.path.insert(0, ".")
from utils.entry import entry_point

@entry_point
def main():
    if sys.argv[1] == "full":
        with open("/dev/full", "w") as file:
            file.write("x")
    sys.exit({"nothing": None, "seven": 7, "told": "told"}[sys.argv[1]])

main()
"""
    for word, status in {"nothing": 0, "seven": 7, "told": 1, "full": 1}.items():
        done = run_code(code, [word], processes)
        assert (done.returncode, "told" in done.stderr) == (status, word == "told")
    assert "no space is left; make room and run the same command again" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failure_of_two_processes_loses_no_checkpoint_that_is_being_written(tmp_path):
    code = """
import sys, time
import torch
from accelerate import Accelerator
from utils.entry import entry_point
from utils.state import checkpoint
from utils.state.preemption import StopSignals

def slow_seal(*given, seal=checkpoint.seal, **more):
    time.sleep(2)
    seal(*given, **more)

@entry_point
def main():
    accelerator, checkpoint.seal = Accelerator(cpu=True), slow_seal
    StopSignals(accelerator)  # the launcher stops the others, once one has failed
    checkpoints = checkpoint.Checkpoints(accelerator, sys.argv[1])
    checkpoints.save(1, accelerator.prepare(torch.nn.Linear(2, 2)), {}, {})
    raise RuntimeError("the update of step 2 fails")

main()
"""
    (tmp_path / "fails.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, str(tmp_path / "fails.py"), str(tmp_path)]
    env = environment(2, PYTHONPATH=str(PROJECT))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "the update of step 2 fails" in done.stderr, done.stderr
    assert (tmp_path / "checkpoints/step-00000001").is_dir()


def test_an_evaluation_may_end_the_run_before_its_first_step(tmp_path):
    code = """
from unittest import mock
import train_clm

class Run(train_clm.Run):
    evaluated = property(lambda self: lambda record: True, lambda self, given: None)

with mock.patch("train_clm.Run", Run):
    train_clm.main()
"""
    flags = TINY | {"dataset_name": write_corpus(tmp_path / "corpus.jsonl"), "output_dir": tmp_path / "run",
                    "cache_dir": tmp_path / "cache"}  # fmt: skip
    done = run_code(code, arguments(flags))
    assert done.returncode == 0 and "Ended at step 0 of 6" in done.stdout, done.stderr[-3000:]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0]
    assert "Training has not finished" not in (tmp_path / "run/README.md").read_text()
    assert "this run is finished, 0 steps" in run_code(code, arguments(flags)).stdout
