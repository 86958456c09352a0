"""A run that is killed repeatedly ends with the weights and metrics of an uninterrupted run.

    CRASH_KILLS=50 pytest tests/test_crash.py -k sigterm      # the default is a few kills, for CI
"""

import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
from safetensors.torch import load_file

from tests import forked
from tests.runs import PATIENCE, PROJECT, TINY, arguments, environment, kill_family, metrics, write_corpus

KILLS = int(os.environ.get("CRASH_KILLS", 0))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crash")
    write_corpus(folder / "corpus.jsonl", 30)
    return folder


def start(script, flags, processes, log):
    """Fork one process, or start several by torchrun, which also restarts them. `accelerate launch` would
    only add seconds to every kill."""
    if processes == 1:
        return forked.start(PROJECT, script, flags, log)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max_restarts=1"]
    launcher += [f"--nproc_per_node={processes}"]
    # or workers that torchrun starts again may find the addresses of the dead ones (torch 2.13)
    env = environment(processes, ACCELERATE_USE_CPU="true", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    settings = {"env": env, "start_new_session": True}
    with open(log, "a") as out:
        command = [sys.executable, *launcher, script, *arguments(flags)]
        return subprocess.Popen(command, cwd=PROJECT, stdout=out, stderr=out, **settings)


def status(process, seconds=0):
    """The exit status, or None if the process has not ended after this number of seconds."""
    if not isinstance(process, subprocess.Popen):
        process.join(seconds)
        return process.exitcode
    return process.wait(seconds) if seconds else process.poll()


def in_a_save(output_dir):
    return any(name.startswith(".tmp-step-") for name in os.listdir(output_dir / "checkpoints"))


def run_with_interruptions(script, flags, processes, interruptions):
    """Start the run and interrupt it after a random number of steps, repeatedly; then let it end.

    interruptions: "kill"; "kill save", during the next save; "kill start", within 8 s of the start; "term",
    SIGTERM to the started process; "kill worker", the last worker only, after which torchrun restarts all.
    Returns the number of kills during a save.
    """
    moments, in_saves = random.Random(0), 0
    output_dir = flags["output_dir"]
    log = output_dir.parent / "log"
    process = None
    for kind in [*interruptions, None]:
        seen = log.stat().st_size if log.exists() else 0
        if process is None:
            process = start(script, flags, processes, log)

        def steps_done(seen=seen):
            return log.read_bytes()[seen:].count(b"\nstep ")

        if kind is None:
            assert status(process, 1500) == 0, log.read_text()[-4000:]
            return in_saves
        if kind == "kill start":
            time.sleep(moments.uniform(0, 8))
        else:
            steps = moments.randint(1, 50)
            while steps_done() < steps and status(process) is None:
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.05))
        while kind == "kill save" and not in_a_save(output_dir) and status(process) is None:
            time.sleep(0.0005)
        assert status(process) is None, f"ended by itself: {log.read_text()[-4000:]}"
        if kind == "kill worker":
            psutil.Process(process.pid).children()[-1].kill()
            continue
        if kind == "term":
            os.kill(process.pid, signal.SIGTERM)
            assert status(process, PATIENCE) == (143 if processes == 1 else 1), log.read_text()[-4000:]
        else:
            kill_family(process.pid)
            status(process, PATIENCE)
            in_saves += (output_dir / "checkpoints").is_dir() and in_a_save(output_dir)
        process = None


SHAPES = {  # with dropout, so that the random numbers must also resume
    "train_clm.py": "num_hidden_layers=2,hidden_size=32,num_attention_heads=2",
    "train_mlm.py": "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64",
}


def check(workspace, script, processes, interruptions):
    steps = 50 + 50 * len(interruptions)
    model_type = "roberta" if script == "train_mlm.py" else "gpt2"
    common = {
        **TINY, "dataset_name": workspace / "corpus.jsonl", "cache_dir": workspace / "cache",
        "model_type": model_type,
        "config_overrides": SHAPES[script], "prompts": "none", "max_train_steps": steps, "save_steps": 7,
        "eval_steps": 25,
    }  # fmt: skip
    runs = workspace / f"{script}-{processes}"
    runs.mkdir()
    unbroken, broken = (runs / name / "run" for name in ("unbroken", "broken"))
    for folder in (unbroken, broken):
        folder.parent.mkdir()
    flags, log = {**common, "output_dir": unbroken}, unbroken.parent / "log"
    forked.finish(forked.start_all(PROJECT, script, flags, log, processes), log, 1500)
    flags = {**common, "output_dir": broken}
    in_saves = run_with_interruptions(script, flags, processes, interruptions)
    print(f"{script}, {processes} processes: {len(interruptions)} interruptions, {in_saves} in a save")
    assert metrics(broken) == metrics(unbroken)
    last = f"checkpoints/step-{steps:08d}"
    for file in (f"{last}/model.safetensors", f"{last}/state.safetensors", "model.safetensors"):
        expected, tensors = load_file(unbroken / file), load_file(broken / file)
        assert expected.keys() == tensors.keys()
        assert all(expected[name].equal(tensors[name]) for name in expected), file


def kills():
    return [("kill", "kill save", "kill", "kill start", "kill save")[i % 5] for i in range(KILLS)]


def test_resume_after_sigkill_and_sigterm_is_bit_identical(workspace):
    check(workspace, "train_clm.py", 1, kills() or ["kill save", "term"])


@pytest.mark.slow
def test_resume_of_two_processes_after_sigkill_is_bit_identical(workspace):
    """By default only a worker is killed: --max_restarts resumes the run from the newest checkpoint."""
    check(workspace, "train_clm.py", 2, kills() or ["kill worker"])


def test_resume_of_masked_model_after_sigkill_is_bit_identical(workspace):
    check(workspace, "train_mlm.py", 1, kills() or ["kill save"])
