"""train_clm.py publishing on a Hub on loopback: every claim with the real script, client and HTTP.

Runs are forked (tests/forked.py); a process of its own that publishes, to its end, is in test_hub.py.
"""

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests import forked
from tests.hub_server import TOKEN, Fault, HubServer
from tests.runs import PROJECT, TINY, metrics, write_corpus

REPO = "ada/tiny"
ALWAYS = float("inf")
SECOND_COMMIT = {"match": f"POST .*/{REPO}/commit/main", "skip": 1, "times": ALWAYS}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture
def hub(tmp_path, hub_port, hub_home):
    with HubServer(tmp_path / "server", hub_port, True, hub_home) as hub:  # Xet, as by default
        yield hub


def settings(corpus, folder, **changes):
    """Of the output folder folder/tiny."""
    return {**TINY, "dataset_name": corpus, "cache_dir": corpus.parent / "cache", "push_to_hub": True,
            "output_dir": folder / "tiny", **changes}  # fmt: skip


def environment(hub, token=TOKEN):
    return hub.env(token=token) | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def start(hub, corpus, folder, token=TOKEN, processes=1, picture=False, **changes):
    """The processes of the script on the output folder folder/tiny, and where they write."""
    folder.mkdir(exist_ok=True)
    log = Path(tempfile.mkstemp(dir=folder, prefix="log-")[1])
    flags, env = settings(corpus, folder, **changes), environment(hub, token)
    return forked.start_all(PROJECT, "train_clm.py", flags, log, processes, env=env, picture=picture), log


def running(started):
    """AssertionError with what it printed if it has ended."""
    processes, log = started
    assert all(process.is_alive() for process in processes), log.read_text()
    return True


def kill(started):
    for process in started[0]:
        process.kill()


def end(started, status, *folders):
    """What it printed; neither that nor what it left may hold the token."""
    processes, log = started
    for process in processes:
        process.join(200)
    output, statuses = log.read_text(), [process.exitcode for process in processes]
    kill(started)
    assert statuses == [status] * len(processes), output
    return without_token(output, *folders)


def without_token(output, *folders):
    assert TOKEN not in output
    for folder in folders:
        assert not [p for p in folder.rglob("*") if p.is_file() and TOKEN.encode() in p.read_bytes()]
    return output


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def published(hub, folder):
    """The steps of the revisions; each must load, and its card, log and curves be of its step."""
    steps = []
    for commit in hub.commits(REPO):
        here = folder / commit["oid"]
        here.mkdir(parents=True)
        for name, entry in commit["files"].items():
            (here / name).write_bytes(hub.read(entry))
        AutoModelForCausalLM.from_pretrained(here)
        steps.append(int(re.match(r"Step (\d+), loss/eval [\d.]+, perplexity [\d.]+$", commit["title"])[1]))
        assert f"| optimizer steps | {steps[-1]:,} |" in (here / "README.md").read_text()
        assert metrics(here)[-1]["step"] == steps[-1] and (here / "curves.png").stat().st_size > 1000
        assert json.loads((here / "args.json").read_text())
    assert steps == sorted(steps)
    return steps


def test_every_save_is_a_revision(hub, corpus, tmp_path):
    end(start(hub, corpus, tmp_path, picture=True), 0, tmp_path)
    assert published(hub, tmp_path / "revisions")[-1] == 6
    assert newest_weights(hub) == sha256(tmp_path / "tiny/model.safetensors")
    lines = [json.loads(line) for line in (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()]
    done = [line["revision"] for line in lines if line.get("event") == "push" and line["state"] == "done"]
    assert done == [commit["oid"] for commit in hub.commits(REPO)]


@pytest.mark.parametrize("processes", [1, 2])
def test_without_a_token_nothing_begins(hub, corpus, tmp_path, processes):
    """Exit status 2 and one message, on all processes, before data are prepared or a folder is made."""
    output = end(start(hub, corpus, tmp_path, None, processes, cache_dir=tmp_path / "cache"), 2)
    assert "hf auth login" in output and "Traceback" not in output
    assert not (tmp_path / "cache").exists() and not (tmp_path / "tiny").exists()


@pytest.mark.parametrize("why", ["revoked", "gone"])
def test_the_last_push_fails(hub, corpus, tmp_path, why):
    """Training finishes; a stop signal shortens the wait for a server that is gone; status 1; the printed
    command works later."""
    what = {"kind": "drop"} if why == "gone" else {"status": 401}
    hub.faults.append(Fault(**SECOND_COMMIT, **what))
    started = start(hub, corpus, tmp_path, picture=True)
    if why == "gone":
        while commits_tried(hub) < 4:  # the first, and three tries of the newest save: the run is over
            assert running(started)
            time.sleep(0.02)
        os.kill(started[0][0].pid, signal.SIGTERM)
    output = end(started, 1, tmp_path / "tiny")
    assert metrics(tmp_path / "tiny")[-1]["step"] == 6
    assert ("hf auth login" in output) == (why == "revoked")
    hub.faults.clear()
    words = shlex.split(re.search(r"^ *(hf upload .*)$", output, re.M)[1])
    words[0] = str(Path(sys.executable).parent / "hf")
    subprocess.run(words, env=hub.env(), check=True, timeout=180)
    assert published(hub, tmp_path / "revisions") == [0, 6]
    assert newest_weights(hub) == sha256(tmp_path / "tiny/model.safetensors")


def test_shards_go_to_a_data_set_repository_and_are_trained_from(hub, corpus, tmp_path):
    """The repository is made, private; a passing fault is waited out; the finished one is left alone."""

    def tool(module, *flags):
        flags = ["--dataset_name", corpus, *flags]
        done = forked.run(f"data.{module}", flags, env=environment(hub))
        assert done.returncode == 0 and TOKEN not in done.stdout + done.stderr, done.stderr
        return done.stdout

    tool("tokens.tokenizer", "--vocab_size", "400", "--output_dir", tmp_path / "words")
    hub.faults.append(Fault("POST .*/datasets/ada/rows/commit/main", status=500, times=1))
    prepare = ["--tokenizer_name", tmp_path / "words", "--validation_fraction", "0.1",
               "--output_dir", "hf://datasets/ada/rows"]  # fmt: skip
    tool("prepare", *prepare)
    commits = hub.commits("ada/rows", kind="datasets")
    files = set(commits[-1]["files"])
    assert "manifest.json" in files and not any(name.startswith("progress/") for name in files)
    assert "is finished" in tool("prepare", *prepare)
    assert len(hub.commits("ada/rows", kind="datasets")) == len(commits)
    shards = {"dataset_name": "hf://datasets/ada/rows", "push_to_hub": False, "cache_dir": tmp_path / "cache"}
    end(start(hub, corpus, tmp_path, **shards), 0, tmp_path)
    assert metrics(tmp_path / "tiny")[-1]["step"] == 6


def test_one_of_two_processes_publishes(hub, corpus, tmp_path):
    end(start(hub, corpus, tmp_path, processes=2, picture=True, per_device_train_batch_size=4), 0, tmp_path)
    assert published(hub, tmp_path / "revisions")[-1] == 6
    assert newest_weights(hub) == sha256(tmp_path / "tiny/model.safetensors")


@pytest.mark.parametrize("kind", ["slow", "hang"])
def test_a_stop_signal_waits_for_the_push_but_not_for_ever(hub, corpus, tmp_path, kind):
    """What was saved at the stop arrives; from a server that does not answer, the command is printed."""
    hub.faults.append(Fault(f"POST .*/{REPO}/commit/main", kind=kind, rate=5e3, times=ALWAYS))
    started = start(hub, corpus, tmp_path, max_train_steps=100_000, eval_steps=1000, save_steps=20)
    while not any("/commit/main" in entry["line"] for entry in hub.log):
        assert running(started)
        time.sleep(0.02)
    os.kill(started[0][0].pid, signal.SIGTERM)
    output = end(started, 128 + signal.SIGTERM, tmp_path / "tiny")
    if kind == "hang":
        assert "did not reach" in output and "hf upload ada/tiny" in output
        return
    step = int(re.search(r"Stopped at step (\d+)", output)[1])
    assert output.splitlines()[-1].startswith("Published: http")
    commits = hub.commits(REPO)
    assert re.match(rf"Step {step}\b", commits[-1]["title"])
    assert newest_weights(hub) == sha256(tmp_path / "tiny/model.safetensors")


def test_published_is_said_of_what_has_arrived_and_the_same_command_brings_the_rest(hub, corpus, tmp_path):
    hub.faults.append(Fault(f"POST .*/{REPO}/commit/main", status=403, times=ALWAYS))
    output = end(start(hub, corpus, tmp_path), 1, tmp_path / "tiny")
    assert "did not reach" in output and "Published" not in output and not hub.commits(REPO)
    hub.faults.clear()
    output = end(start(hub, corpus, tmp_path), 0, tmp_path / "tiny")
    assert "this run is finished" in output and "Published: http" in output.splitlines()[-1]
    assert newest_weights(hub) == sha256(tmp_path / "tiny/model.safetensors")


def test_killed_during_a_push(hub, corpus, tmp_path):
    """The same command again ends with whole revisions in order, the final model last."""
    hub.faults.append(Fault(**SECOND_COMMIT, kind="hang"))
    started = start(hub, corpus, tmp_path, picture=True)
    while commits_tried(hub) < 2:
        assert running(started)
        time.sleep(0.02)
    kill(started)
    end(started, -signal.SIGKILL, tmp_path / "tiny")
    hub.faults.clear()
    end(start(hub, corpus, tmp_path, picture=True), 0, tmp_path / "tiny")
    assert published(hub, tmp_path / "revisions")[-1] == 6
    assert newest_weights(hub) == sha256(tmp_path / "tiny/model.safetensors")


def test_evaluation_and_a_look_at_rows_ask_no_hub(hub, corpus, tmp_path):
    end(start(hub, corpus, tmp_path, push_to_hub=False), 0)
    for what in ({"eval_only": True}, {"show": 1}):
        end(start(hub, corpus, tmp_path, hub_model_id="ada/other", **what), 0)
    assert not hub.log


def newest_weights(hub):
    return hub.commits(REPO)[-1]["files"]["model.safetensors"]["sha256"]


def commits_tried(hub):
    return sum("/commit/main" in entry["line"] for entry in hub.log)
