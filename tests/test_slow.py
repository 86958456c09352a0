"""The lines on slow first steps."""

import threading

import torch

from tests import forked
from tests.runs import TINY, write_corpus
from utils.display import slow


def test_a_step_on_busy_cores_is_told(monkeypatch):
    assert slow.why_slow(slow.NOTICED / 2) is None
    monkeypatch.setattr(slow, "GRANTED", 0.0)
    assert slow.why_slow(1e4) is None
    monkeypatch.setattr(slow, "GRANTED", 1e9)
    assert "busy cores (load" in slow.why_slow(1e4)


def test_a_first_step_that_takes_long_is_told_until_it_ends(monkeypatch):
    monkeypatch.setattr(slow, "FIRST", 0.01)
    monkeypatch.setattr(slow, "AGAIN", 0.01)
    said, twice = [], threading.Event()

    def say(line):
        said.append(line)
        if len(said) == 2:
            twice.set()

    steps = slow.FirstSteps(torch.device("cpu"), say)
    steps.begin()
    assert twice.wait(600) and said[0].startswith("step       the first one has taken 0 s so far")
    steps.end(1)
    for thread in threading.enumerate():
        if getattr(thread, "_target", None) == steps._wait:
            thread.join()
    count = len(said)
    steps.begin()
    steps.end(1)
    assert len(said) == count


def test_a_model_without_its_kernels_is_told_but_for_the_default(tmp_path):
    flags = TINY | {
        "dataset_name": write_corpus(tmp_path / "corpus.jsonl"), "output_dir": tmp_path / "run",
        "cache_dir": tmp_path / "cache", "max_train_steps": 2,
    }  # fmt: skip
    done = forked.run("train_clm.py", flags)
    assert done.returncode == 0 and "falling back" not in done.stderr, done.stderr
    flags |= {"model_type": "mamba", "output_dir": tmp_path / "mamba",
              "config_overrides": "hidden_size=32,num_hidden_layers=1,state_size=4"}  # fmt: skip
    done = forked.run("train_clm.py", flags)
    assert done.returncode == 0, done.stderr
    before, first = done.stdout.index("time       roughly "), done.stdout.index("step 2/2")
    assert before < first
    assert "falling back to its reference PyTorch implementation because `mamba_ssm`" in done.stderr
