"""A run that is killed again and again ends with the weights and the lines of one that was left alone.

    CRASH_KILLS=50 pytest tests/test_crash.py -k one_process      # the default is a few kills, for CI
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

from tests.runs import PROJECT, TINY, arguments, environment, metrics, write_corpus

KILLS = int(os.environ.get("CRASH_KILLS", 0))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crash")
    write_corpus(folder / "corpus.jsonl", 30)
    return folder


def start(script, flags, processes, log):
    """Without `accelerate launch` in between, which would only add its start to every kill."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max_restarts=1"]
    launcher += [f"--nproc_per_node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), script, *arguments(flags)]
    # or workers that torchrun starts again may find the addresses of the dead ones (torch 2.13)
    env = environment(processes, ACCELERATE_USE_CPU="true", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    settings = {"env": env, "start_new_session": True}
    return subprocess.Popen(command, cwd=PROJECT, stdout=log, stderr=log, **settings)


def kill_all(process):
    """SIGKILL to the launcher and all below it; torchrun's workers are not in its process group."""
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(family[1:])
    process.wait()


def in_a_save(output_dir):
    return any(name.startswith(".tmp-step-") for name in os.listdir(output_dir / "checkpoints"))


def run_with_interruptions(script, flags, processes, interruptions):
    """Start, interrupt after a random number of steps, start again; at last to the end.

    interruptions: "kill"; "kill save", in the next save; "kill start", within 8 s of the start; "term",
    SIGTERM to what was launched; "kill worker", the last process only, and torchrun starts all of them again
    by itself. Returns how many met a save.
    """
    moments, in_saves = random.Random(0), 0
    output_dir = flags["output_dir"]
    log = output_dir.parent / "log"
    process = None
    for kind in [*interruptions, None]:
        seen = log.stat().st_size if log.exists() else 0
        if process is None:
            with open(log, "a") as out:
                process = start(script, flags, processes, out)

        def steps_done(seen=seen):
            return log.read_bytes()[seen:].count(b"\nstep ")

        if kind is None:
            assert process.wait(1500) == 0, log.read_text()[-4000:]
            return in_saves
        if kind == "kill start":
            time.sleep(moments.uniform(0, 8))
        else:
            steps = moments.randint(1, 50)
            while steps_done() < steps and process.poll() is None:
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.05))
        while kind == "kill save" and not in_a_save(output_dir) and process.poll() is None:
            time.sleep(0.0005)
        assert process.poll() is None, f"ended by itself: {log.read_text()[-4000:]}"
        if kind == "kill worker":
            psutil.Process(process.pid).children()[-1].kill()
            continue
        if kind == "term":
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == (143 if processes == 1 else 1), log.read_text()[-4000:]
        else:
            kill_all(process)
            in_saves += (output_dir / "checkpoints").is_dir() and in_a_save(output_dir)
        process = None


SHAPES = {  # with dropout, as the models come: random numbers have to go on as well
    "train_clm.py": "n_layer=2,n_embd=32,n_head=2",
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
    run_with_interruptions(script, {**common, "output_dir": unbroken}, processes, [])
    flags = {**common, "output_dir": broken}
    in_saves = run_with_interruptions(script, flags, processes, interruptions)
    print(f"{script}, {processes} processes: {len(interruptions)} interruptions, {in_saves} in a save")
    assert metrics(broken) == metrics(unbroken)
    last = f"checkpoints/step-{steps:08d}"
    for file in (f"{last}/model.safetensors", f"{last}/optimizer.safetensors", "model.safetensors"):
        expected, found = load_file(unbroken / file), load_file(broken / file)
        assert expected.keys() == found.keys()
        assert all(expected[name].equal(found[name]) for name in expected), file


def kills():
    return [("kill", "kill save", "kill", "kill start", "kill save")[i % 5] for i in range(KILLS)]


def test_one_process_killed_and_stopped(workspace):
    check(workspace, "train_clm.py", 1, kills() or ["kill save", "term"])


def test_two_processes_killed(workspace):
    """One worker alone, too: the launcher's --max_restarts brings the run back from the newest checkpoint."""
    check(workspace, "train_clm.py", 2, kills() or ["kill worker"])


def test_masked_language_model_killed(workspace):
    check(workspace, "train_mlm.py", 1, kills() or ["kill save"])
