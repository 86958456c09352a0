"""train_clm.py publishing on a Hub on loopback: every claim with the real script, client and HTTP.

Runs are forked (tests/forked.py); a process of its own that publishes, to its end, is in test_hub.py.
"""

import hashlib
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import xxhash
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


def test_without_a_token_nothing_begins(hub, corpus, tmp_path):
    """Exit status 2 and one message, before data are prepared or a folder is made."""
    output = end(start(hub, corpus, tmp_path, token=None, cache_dir=tmp_path / "cache"), 2)
    assert "hf auth login" in output and "Traceback" not in output
    assert not (tmp_path / "cache").exists() and not (tmp_path / "tiny").exists()


@pytest.mark.parametrize("why", ["revoked", "gone"])
def test_the_last_push_fails(hub, corpus, tmp_path, why):
    """Training finishes and waits no longer than hub_timeout; status 1; the printed command works later."""
    what = {"kind": "drop"} if why == "gone" else {"status": 401}
    hub.faults.append(Fault(**SECOND_COMMIT, **what))
    output = end(start(hub, corpus, tmp_path, picture=True, hub_timeout=2), 1, tmp_path / "tiny")
    assert metrics(tmp_path / "tiny")[-1]["step"] == 6
    assert ("hf auth login" in output) == (why == "revoked")
    hub.faults.clear()
    words = shlex.split(re.search(r"^ *(hf upload .*)$", output, re.M)[1])
    words[0] = str(Path(sys.executable).parent / "hf")
    subprocess.run(words, env=hub.env(), check=True, timeout=180)
    assert published(hub, tmp_path / "revisions") == [3, 6]
    assert newest_weights(hub) == sha256(tmp_path / "tiny/model.safetensors")


def test_shards_go_to_a_data_set_repository_and_are_trained_from(hub, corpus, tmp_path):
    """The repository is made, private; a passing fault is waited out; the finished one is left alone."""

    def tool(module, *flags):
        flags = ["--dataset_name", corpus, *flags]
        done = forked.run(f"data.{module}", flags, env=environment(hub))
        assert done.returncode == 0 and TOKEN not in done.stdout + done.stderr, done.stderr
        return done.stdout

    tool("tokenizer", "--vocab_size", "400", "--output_dir", tmp_path / "words")
    hub.faults.append(Fault("POST .*/datasets/ada/rows/commit/main", status=500, times=1))
    prepare = ["--tokenizer_name", tmp_path / "words", "--validation_fraction", "0.1",
               "--output_dir", "hf://datasets/ada/rows"]  # fmt: skip
    tool("prepare", *prepare)
    files = set(hub.commits("ada/rows", kind="datasets")[-1]["files"])
    assert "manifest.json" in files and not any(name.startswith("progress/") for name in files)
    assert "nothing to do" in tool("prepare", *prepare)
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
    commits = hub.commits(REPO)
    assert re.match(rf"Step {step}\b", commits[-1]["title"])
    assert newest_weights(hub) == sha256(tmp_path / "tiny/model.safetensors")


def test_killed_during_a_push(hub, corpus, tmp_path):
    """The same command again ends with whole revisions in order, the final model last."""
    hub.faults.append(Fault(**SECOND_COMMIT, kind="hang"))
    started = start(hub, corpus, tmp_path, picture=True)
    while sum("/commit/main" in entry["line"] for entry in hub.log) < 2:
        assert running(started)
        time.sleep(0.02)
    kill(started)
    end(started, -signal.SIGKILL, tmp_path / "tiny")
    hub.faults.clear()
    end(start(hub, corpus, tmp_path, picture=True), 0, tmp_path / "tiny")
    assert published(hub, tmp_path / "revisions")[-1] == 6
    assert newest_weights(hub) == sha256(tmp_path / "tiny/model.safetensors")


def test_a_run_goes_on_on_another_machine(hub, corpus, tmp_path):
    """A machine dies; the same command on an empty folder ends bit-identical to an undisturbed run;
    with pushes of the model or without, the URL is one place."""
    longer = {"max_train_steps": 60, "save_steps": 10, "eval_steps": 20, "logging_steps": 5}
    hub.faults.append(Fault(f"POST .*/{REPO}/commit/checkpoints", kind="hang", skip=1, times=ALWAYS))
    whole = start(hub, corpus, tmp_path / "whole", push_to_hub=False, **longer)
    dies = start(hub, corpus, tmp_path / "dies", checkpoint_url=f"hf://{REPO}", **longer)
    while not hub.commits(REPO, "checkpoints"):
        assert running(dies)
        time.sleep(0.02)
    kill(dies)
    end(dies, -signal.SIGKILL)
    end(whole, 0)
    assert state_steps(hub)[-1] < 60
    hub.faults.clear()
    url = {"checkpoint_url": f"hf://{REPO}", "push_to_hub": False}
    output = end(start(hub, corpus, tmp_path / "goes_on", **url, **longer), 0, tmp_path)
    assert re.search(rf"continues  step \d+, from hf://{REPO}\n", output)
    one, other = tmp_path / "whole/tiny", tmp_path / "goes_on/tiny"
    assert metrics(one) == metrics(other)
    assert all(sha256(one / name) == sha256(other / name) for name in ("model.safetensors", "tokenizer.json"))
    assert state_steps(hub)[-1] == 60


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def test_a_training_state_on_the_hub_runs_no_code_and_evaluation_makes_no_repository(hub, corpus, tmp_path):
    """Whoever may write there may plant pickles, with a manifest that fits: the run reads its tensors."""
    end(start(hub, corpus, tmp_path / "one", checkpoint_url=f"hf://{REPO}"), 0)
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Bomb(marker)))
    marker.unlink()
    files = hub.commits(REPO, "checkpoints")[-1]["files"]
    (name,) = [name for name in files if name.endswith("/manifest.json")]
    manifest = json.loads(hub.read(files[name]))
    bomb, planted = pickle.dumps(Bomb(marker)), {}
    for plant in (".metadata", "__0_0.distcp", "optimizer.pt", "optimizer.bin", "pytorch_model.bin",
                  "random_states_0.pkl", "rng_state_0.pth", "model/.metadata"):  # fmt: skip
        planted[plant] = bomb
        manifest["files"][plant] = {"bytes": len(bomb), "xxh3_128": xxhash.xxh3_128_hexdigest(bomb)}
    del manifest["checksum"]
    text = json.dumps(manifest, sort_keys=True).encode()
    planted["manifest.json"] = json.dumps(manifest | {"checksum": xxhash.xxh3_128_hexdigest(text)}).encode()
    changes = [(name.replace("manifest.json", plant), content) for plant, content in planted.items()]
    hub.commit(REPO, "models", "checkpoints", "planted", changes)
    there = tmp_path / "two/tiny"
    output = end(start(hub, corpus, there.parent, checkpoint_url=f"hf://{REPO}"), 0)
    assert "this run is finished" in output and not marker.exists()
    assert (there / name).with_name("optimizer.pt").read_bytes() == bomb  # it was there to be read

    asked = len(hub.log)
    output = end(start(hub, corpus, tmp_path / "one", eval_only=True, hub_model_id="ada/other"), 0)
    assert json.loads(output.splitlines()[-1])["loss/eval"] and not hub.log[asked:]


def newest_weights(hub):
    return hub.commits(REPO)[-1]["files"]["model.safetensors"]["sha256"]


def state_steps(hub):
    """The steps of the training states pushed; each revision of that branch holds one."""
    found = []
    for commit in hub.commits(REPO, "checkpoints"):
        (name,) = {name.split("/")[1] for name in commit["files"] if name.startswith("checkpoints/")}
        found.append(int(name.removeprefix("step-")))
    return found
