"""Publishing on the Hub: the real client and a Hub on loopback (tests/hub_server.py), over LFS and Xet.

Programs and runs are forked processes (tests/forked.py). The tests search all their output and files for the
token.
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
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests import forked
from tests.data_runs import save_tokenizer
from tests.hub_server import ADA, TOKEN, Fault, HubServer
from tests.runs import PROJECT, TINY, metrics, write_corpus

UPLOAD, COMMIT = "PUT /lfs|POST /xet/v1/xorbs", "POST .*/commit/"  # of weights, on either transport
ALWAYS = float("inf")
REPO = "ada/tiny"  # of the runs
PRELUDE = """
import json, os, sys, time
from pathlib import Path
from types import SimpleNamespace
from accelerate import Accelerator
from utils.publishing import hub

out = Path(sys.argv[1])
out.mkdir(exist_ok=True)

def open_hub(model_id="ada/model", private=False):
    settings = dict(push_to_hub=True, hub_model_id=model_id, hub_private_repo=private)
    return hub.Hub(SimpleNamespace(output_dir=str(out), **settings), Accelerator(cpu=True))

def save(step):
    "Write files as a save does: weights in a new file, the rest in place. Each file contains its step."
    (out / ".weights").write_bytes(step.to_bytes(4, "big") * 5000)
    os.replace(out / ".weights", out / "model.safetensors")
    for name in ("config.json", "metrics.jsonl", "curves.png"):
        (out / name).write_text(f"step {step}")
    (out / "README.md").write_text(f"---\\nlicense: mit\\n---\\nstep {step}\\n")

def push(step):
    save(step)
    pushes.push(step)

def report(what):
    print(">", what, flush=True)
"""


@pytest.fixture(params=["lfs", "xet"])
def both(request, tmp_path, hub_port, hub_home):
    with HubServer(tmp_path / "server", hub_port, xet=request.param == "xet", home=hub_home) as hub:
        yield hub


@pytest.fixture
def hub(tmp_path, hub_port, hub_home):
    with HubServer(tmp_path / "server", hub_port, home=hub_home) as hub:
        yield hub


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


class Program:
    """A process that runs PRELUDE and then `code`; `input()` in it waits for `go`. fresh: started as a new
    Python instead of forked, so that its exit is Python's."""

    def __init__(self, hub, folder, code, fresh=False):
        self.hub, self.folder, self.lines_read = hub, folder, 0
        place = Path(tempfile.mkdtemp(dir=folder))
        script, stdin, self.log = place / "program.py", place / "stdin", place / "log"
        script.write_text(PRELUDE + textwrap.dedent(code))
        os.mkfifo(stdin)
        self.stdin = os.open(stdin, os.O_RDWR)
        env, words = hub.env(), [str(folder / "run")]
        if not fresh:
            self.process = forked.start(PROJECT, str(script), words, self.log, env=env, stdin=stdin)
            return
        with open(self.log, "w") as log, open(stdin) as read:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *words], cwd=PROJECT, env=env | {"PYTHONPATH": str(PROJECT)},
                stdin=read, stdout=log, stderr=log,
            )

    @property
    def output(self):
        return self.log.read_text()

    @property
    def status(self):
        """The exit status, or None while the program runs."""
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def go(self):
        os.write(self.stdin, b"\n")

    def next_report(self):
        """What the program passes to `report` next."""
        while len(lines := re.findall(r"^> (.*)\n", self.output, re.M)) <= self.lines_read:
            assert self.status is None or self.output.count("\n> ") > self.lines_read, self.output
            time.sleep(0.02)
        self.lines_read += 1
        return lines[self.lines_read - 1]

    def until(self, request):
        """Wait until the server has received a request that matches."""
        while not any(re.search(request, entry["line"]) for entry in self.hub.log):
            assert self.status is None, self.output
            time.sleep(0.02)

    def end(self, status=0):
        deadline = time.monotonic() + 180
        while self.status is None and time.monotonic() < deadline:
            time.sleep(0.02)
        os.close(self.stdin)
        ended = self.status
        self.process.kill()
        assert ended == status, self.output
        return without_token(self.output, self.folder, self.hub.home)


def without_token(output, *folders):
    left = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert TOKEN not in output and not [path for path in left if TOKEN.encode() in path.read_bytes()]
    return output


def steps(hub, repo_id="ada/model"):
    """The steps of the commits on the server, oldest first. All files of a commit must have the same step."""
    steps = []
    for commit in hub.commits(repo_id):
        file_steps = set()
        for name, entry in commit["files"].items():
            content = hub.read(entry)
            if name == "model.safetensors":
                assert content == content[:4] * 5000
                file_steps.add(int.from_bytes(content[:4], "big"))
            elif name != ".gitattributes":
                file_steps.add(int(re.search(rb"step (\d+)", content)[1]))
        assert len(file_steps) == 1, f"revision {commit['title']} mixes steps {file_steps}"
        steps.append(file_steps.pop())
    assert steps == sorted(steps)
    return steps


def upload_by_hand(hub, output):
    """Run the upload command that was printed."""
    words = shlex.split(re.search(r"^ *(hf upload .*)$", output, re.M)[1])
    words[0] = str(Path(sys.executable).parent / "hf")
    done = subprocess.run(words, env=hub.env(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- Pushes of the Hub class


TEMPORARY = {
    "server error": Fault(COMMIT, status=500),
    "rate limit": Fault(COMMIT, status=429, headers={"Retry-After": "1"}),
    "absurd rate limit": Fault(COMMIT, status=429, headers={"Retry-After": "1e999"}),
    "outdated parent commit": Fault(COMMIT, status=412),
    "concurrent commit": Fault(COMMIT, status=409),
    "connection lost during upload": Fault(UPLOAD, "drop", after=4096),
    "connection lost during commit": Fault(COMMIT, "drop", after=100),
    "answer to the commit lost": Fault(COMMIT, "lost"),
    "storage unavailable": Fault(UPLOAD, status=503),
    "gateway": Fault("GET .*/tree/", status=502),
}


def test_last_save_arrives_after_temporary_faults(both, tmp_path):
    program = Program(both, tmp_path, f"""
    pushes = open_hub()
    for step in range(1, 1 + {len(TEMPORARY)}):
        input()
        push(step)
        report(pushes.finish(step))
    """)
    for step, (what, fault) in enumerate(TEMPORARY.items(), 1):
        both.faults = [replace(fault)]
        program.go()
        assert program.next_report() == "True", (what, program.output)
        assert both.faults[0].times == 0, f"{what}: no request met the fault"
        assert steps(both)[-1] == step, what
    program.end()


# Requests that hang; how; exit status of the program (after 1 the printed command is run); steps that arrive.
HANGS = {
    "late": (UPLOAD, {"seconds": 1}, 0, [1, 3]),
    "silent": (UPLOAD, {}, 0, [3]),
    "silent commit": (COMMIT, {}, 0, [3]),
    "silent to the end": (UPLOAD, {"times": ALWAYS}, 1, [3]),
}


@pytest.mark.parametrize("match, fault, status, arrive", HANGS.values(), ids=HANGS)
def test_last_save_arrives_after_a_hanging_push(
    both, tmp_path, match, fault, status, arrive
):
    """If the server never answers, the exit of Python does not wait for it."""
    both.faults.append(Fault(match, "hang", **fault))
    program = Program(both, tmp_path, f"""
    hub.TIMEOUT, hub.FINISH_SECONDS = 1, {3 if status else 600}
    pushes = open_hub()
    push(1)
    input()
    push(2)
    push(3)
    sys.exit(int(not pushes.finish(3)))
    """, fresh=bool(status))
    program.until(match)
    program.go()
    output = program.end(status)
    if status:
        assert "'Step 3' did not reach ada/model" in output and not (tmp_path / "run/.hub").exists()
        both.faults.clear()
        upload_by_hand(both, output)
    assert steps(both)[-len(arrive):] == arrive and 2 not in steps(both)


def test_full_disk_during_push_does_not_end_training(hub, tmp_path):
    output = Program(hub, tmp_path, """
    import resource
    hub.FINISH_SECONDS = 3
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    pushes = open_hub()
    for step in (1, 2, 3):
        (out / "large.json").write_bytes(b"x" * (10 if step == 2 else 100_000))
        (out / "large.json").write_text((out / "large.json").read_text() + f"step {step}")
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # as on a full disk: half a copy
        push(step)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        while pushes.thread.is_alive():
            time.sleep(0.02)
        report(pushes.status)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    sys.exit(int(not pushes.finish(3)))
    """).end(status=1)
    assert re.findall("^> (.*)", output, re.M) == ["step 1 not pushed", "step 2 pushed", "step 3 not pushed"]
    assert "'Step 3' did not reach ada/model" in output and steps(hub) == [2]


def test_stale_weight_files_are_deleted_from_the_repository(hub, tmp_path):
    """A single file replaces shards: no revision has both."""
    Program(hub, tmp_path, """
    pushes = open_hub()
    for i in (1, 2):
        (out / f"model-0000{i}-of-00002.safetensors").write_bytes(b"half")
    (out / "model.safetensors.index.json").write_text("{}")
    (out / "adapter.safetensors").write_bytes(b"not ours")
    pushes.push(1)
    assert pushes.finish(1)
    for path in out.glob("*s*"):
        path.unlink()
    push(2)
    sys.exit(int(not pushes.finish(2)))
    """).end()
    names = {name for name in hub.commits("ada/model")[-1]["files"] if "safetensors" in name}
    assert names == {"model.safetensors", "adapter.safetensors"}


def test_failed_export_is_not_pushed(hub, tmp_path):
    """Or files of an older step would be published as this step's. The folder .export marks the failure."""
    Program(hub, tmp_path, """
    pushes = open_hub()
    push(1)
    assert pushes.finish(1)
    (out / ".export").mkdir()
    pushes.push(2)
    assert pushes.finish(2)
    (out / ".export").rmdir()
    push(3)
    assert pushes.finish(3)
    """).end()
    assert [commit["title"] for commit in hub.commits("ada/model")] == ["Step 1", "Step 3"]


def test_printed_upload_command_uploads_the_same_files(hub, tmp_path):
    published = ["README.md", "metrics.jsonl", "model.safetensors", "picture.jpg"]
    others = [".lock", ".export-notes/a", "best/model.safetensors", "checkpoints/step-00000001/state.json",
              "nohup.out", "replaced-metrics.jsonl", "run.log", "train_clm/events", "train_clm.py"]
    output = Program(hub, tmp_path, f"""
    for name in {[*published, *others]}:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("---\\nlicense: mit\\n---\\n" + name)
    pushes = open_hub()
    pushes.push(1)
    assert pushes.finish(1)
    print(pushes.command().replace("ada/model", "ada/by-hand"))
    """).end()
    upload_by_hand(hub, output)
    for repository in ("ada/model", "ada/by-hand"):
        assert sorted({*hub.commits(repository)[-1]["files"]} - {".gitattributes"}) == published


def test_bad_token_or_repository_name_is_refused_at_the_start(hub, tmp_path):
    """Each gives one ValueError with the problem and the remedy, and creates no repository."""
    hub.tokens["hf_reader"] = {**ADA, "role": "read"}
    hub.create("royal-society/minutes")
    Program(hub, tmp_path, """
    good = os.environ["HF_TOKEN"]
    def outcome(model_id, token=good):
        os.environ["HF_TOKEN"] = token
        try:
            return open_hub(model_id).repo_id
        except ValueError as error:
            return str(error)

    assert outcome("model") == outcome("ada/model") == "ada/model"
    assert outcome("analytical-engines/model") == "analytical-engines/model"
    for what in [outcome("model", ""), outcome("model", "hf_revoked"), outcome("model", "hf_reader")]:
        assert "hf auth login" in what and "HF_TOKEN" in what, what
    for what in [outcome("babbage/model"), outcome("royal-society/minutes"), outcome("royal-society/new")]:
        assert "don't have the rights" in what, what
    assert "hub_model_id" in outcome("a b") and "hub_model_id" in outcome("ada/model/x")
    """).end()
    created = {"ada/model", "analytical-engines/model", "royal-society/minutes"}
    assert {name for _, name in hub.repos} == created


@pytest.mark.parametrize("server", ["gone", "silent"])
def test_unreachable_hub_is_refused_at_the_start(hub, tmp_path, server):
    hub.faults.append(Fault("repos/create", "hang", times=ALWAYS))
    program = Program(hub, tmp_path, """
    hub.START_TIMEOUT = 1
    input()
    try:
        open_hub("model")
    except ValueError as error:
        print(error)
    """)
    if server == "gone":
        hub.stop()
    program.go()
    assert "train without push_to_hub" in program.end()


# ---- Runs of train_clm.py


def start(hub, corpus, folder, token=TOKEN, processes=1, picture=False, **changes):
    """Start train_clm.py with output folder folder/tiny. Returns its processes and their log."""
    folder.mkdir(exist_ok=True)
    log = Path(tempfile.mkstemp(dir=folder, prefix="log-")[1])
    flags = {**TINY, "dataset_name": corpus, "cache_dir": corpus.parent / "cache", "push_to_hub": True,
             "hub_private_repo": True, "output_dir": folder / "tiny", **changes}  # fmt: skip
    env = hub.env(token=token) | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return forked.start_all(PROJECT, "train_clm.py", flags, log, processes, env=env, picture=picture), log


def end(started, status, *folders):
    """Wait for the processes. Returns their output. It and the files in `folders` must not have the token."""
    processes, log = started
    for process in processes:
        process.join(200)
    output, statuses = log.read_text(), [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert statuses == [status] * len(processes), output
    return without_token(output, *folders)


def published(hub, folder):
    """The steps of the commits. Each model must load and have the card, metrics and curves of its step. The
    last commit must have the weights in folder/tiny."""
    steps = []
    for commit in hub.commits(REPO):
        revision = folder / "revisions" / commit["oid"]
        revision.mkdir(parents=True)
        for name, entry in commit["files"].items():
            (revision / name).write_bytes(hub.read(entry))
        AutoModelForCausalLM.from_pretrained(revision)
        steps.append(int(re.match(r"Step (\d+), loss/eval [\d.]+, perplexity [\d.]+$", commit["title"])[1]))
        assert f"| optimizer steps | {steps[-1]:,} |" in (revision / "README.md").read_text()
        assert metrics(revision)[-1]["step"] == steps[-1] and (revision / "curves.png").stat().st_size > 1000
        assert json.loads((revision / "args.json").read_text())
    weights = hashlib.sha256((folder / "tiny/model.safetensors").read_bytes()).hexdigest()
    assert hub.commits(REPO)[-1]["files"]["model.safetensors"]["sha256"] == weights
    assert steps == sorted(steps)
    return steps


@pytest.mark.parametrize("processes", [1, 2])
def test_first_and_last_save_are_published(both, corpus, tmp_path, processes):
    """The end of the output names the model's page and no upload command."""
    rows = {"per_device_train_batch_size": 8 // processes}
    output = end(start(both, corpus, tmp_path, processes=processes, picture=True, **rows), 0, tmp_path)
    assert "Published: http" in output and "  evaluate  " in output and "hf upload" not in output
    arrived = published(both, tmp_path)
    assert (arrived[0], arrived[-1]) == (0, 6) and not (tmp_path / "tiny/.hub").exists()
    assert both.repo(REPO)["private"]
    assert both.uses_xet == any("/xet/v1/xorbs" in entry["line"] for entry in both.log)


@pytest.mark.parametrize("processes", [1, 2])
def test_run_without_token_is_refused_at_the_start(hub, corpus, tmp_path, processes):
    """Status 2 and one message on all processes, before data are prepared or a folder is created."""
    output = end(start(hub, corpus, tmp_path, None, processes, cache_dir=tmp_path / "cache"), 2)
    assert "hf auth login" in output and "Traceback" not in output
    assert not (tmp_path / "cache").exists() and not (tmp_path / "tiny").exists()


STOPPED = {"max_train_steps": 100_000, "eval_steps": 1000, "save_steps": 20}
TERM, KILL = signal.SIGTERM, signal.SIGKILL
# Requests that meet the fault; the fault; a signal after that many requests, or at the end of the run; exit
# status; how the last save arrives: by the printed command, by running again, or by itself.
FAULTS = {
    "revoked": (COMMIT, {"status": 401, "skip": 1}, None, 1, "command"),
    "gone": (COMMIT, {"kind": "drop", "skip": 1}, ("over", TERM), 1, "command"),
    "refused": (COMMIT, {"status": 403}, None, 1, "again"),
    "killed in an upload": (UPLOAD, {"kind": "hang"}, (1, KILL), -KILL, "again"),
    "killed in a commit": (COMMIT, {"kind": "hang", "skip": 1}, (2, KILL), -KILL, "again"),
    "stopped, late": (COMMIT, {"kind": "hang", "seconds": 1}, (1, TERM), 128 + TERM, ""),
    "stopped, silent": (COMMIT, {"kind": "hang"}, (1, TERM), 128 + TERM, "command"),
}


@pytest.mark.parametrize("match, fault, when, status, remedy", FAULTS.values(), ids=FAULTS)
def test_run_publishes_its_last_save_or_prints_the_command(
    both, corpus, tmp_path, match, fault, when, status, remedy
):  # fmt: skip
    both.faults.append(Fault(match, times=ALWAYS, **fault))
    stops = status == 128 + TERM
    started = start(both, corpus, tmp_path, picture=True, **(STOPPED if stops else {}))
    [process], log = started
    while when:
        requests = sum(bool(re.search(match, entry["line"])) for entry in both.log)
        if "hub        pushing" in log.read_text() if when[0] == "over" else requests >= when[0]:
            os.kill(process.pid, when[1])
            break
        assert process.is_alive(), log.read_text()
        time.sleep(0.02)
    output = end(started, status, tmp_path / "tiny")
    last = int(re.search(r"Stopped at step (\d+)", output)[1]) if stops else 6
    assert ("did not reach" in output) == (remedy == "command" or status == 1)
    assert ("Published: http" in output) == (remedy == "") and output.count("was not published") <= 2
    both.faults.clear()
    if remedy == "command":
        upload_by_hand(both, output)
    elif remedy == "again":
        output = end(start(both, corpus, tmp_path, picture=True), 0, tmp_path / "tiny")
        assert "Published: http" in output.splitlines()[-1]
    assert published(both, tmp_path)[-1] == last


def test_eval_only_and_show_do_not_contact_the_hub(hub, corpus, tmp_path):
    end(start(hub, corpus, tmp_path, push_to_hub=False), 0)
    for what in ({"eval_only": True}, {"show": 1}):
        end(start(hub, corpus, tmp_path, hub_model_id="ada/other", **what), 0)
    assert not hub.log


# ---- Data on the Hub


def data_tool(hub, module, *words):
    """Run a module of data/ against the Hub."""
    done = forked.run(f"data.{module}", [*words], env=hub.env() | {"OMP_NUM_THREADS": "1"})
    assert TOKEN not in done.stdout + done.stderr
    return done


def test_shards_are_written_to_the_hub_and_read_back(hub, corpus, tmp_path):
    """After a fault the same command resumes. A finished preparation is left unchanged."""
    save_tokenizer(tmp_path / "words")
    hub.create("ada/rows", "datasets")
    hub.faults.append(Fault("POST .*/datasets/ada/rows/commit/main", status=500, skip=1))
    prepare = ["prepare", "--dataset_name", corpus, "--tokenizer_name", tmp_path / "words",
               "--validation_fraction", "0.1", "--output_dir", "hf://datasets/ada/rows"]  # fmt: skip
    failed = data_tool(hub, *prepare)
    assert failed.returncode == 1 and "Run the same command again" in failed.stderr, failed.stderr
    assert data_tool(hub, *prepare).returncode == 0
    commits = hub.commits("ada/rows", kind="datasets")
    files = set(commits[-1]["files"])
    assert "manifest.json" in files and not any(name.startswith("progress/") for name in files)
    assert "is finished" in data_tool(hub, *prepare).stdout
    assert len(hub.commits("ada/rows", kind="datasets")) == len(commits)
    shards = {"dataset_name": "hf://datasets/ada/rows", "push_to_hub": False, "cache_dir": tmp_path / "cache"}
    end(start(hub, corpus, tmp_path, **shards), 0, tmp_path)
    assert metrics(tmp_path / "tiny")[-1]["step"] == 6


def test_convert_reads_from_the_hub(hub, tmp_path):
    """tests/test_presets.py reads datasets of text from the Hub."""
    tokenizer = save_tokenizer(tmp_path / "words")
    hub.put("ada/tokens", {"train.bin": bytes([0, 0, 1, 0] * 400), "val.bin": bytes(100)}, "datasets")
    folder = PROJECT / "tests/tfrecords"
    records = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.tfrecord")}
    hub.put("ada/records", records, "datasets")
    card = "configs:\n" + "".join(f"- {{config_name: {name}, data_files: {name}/*}}\n" for name in "ab")
    configurations = {f"{name}/train.parquet": b"PAR1" for name in "ab"}
    hub.put("ada/several", {"README.md": f"---\n{card}---\n".encode(), **configurations}, "datasets")
    for name, dtype, expected in (
        ("ada/tokens", ["--dtype", "uint16"], {"train": 800, "validation": 50}),
        ("ada/records", [], {"train": 40 * 32, "validation": 8 * 32, "test": 32}),
    ):
        output_dir = tmp_path / name
        done = data_tool(hub, "convert", name, output_dir, "--tokenizer_name", tokenizer, *dtype)
        assert done.returncode == 0, done.stderr
        splits = json.loads((output_dir / "manifest.json").read_text())["splits"]
        assert {split: content["tokens"] for split, content in splits.items()} == expected
    for name in ("ada/nothing", "ada/records:train", "ada/several"):
        done = data_tool(hub, "convert", name, tmp_path / "none", "--tokenizer_name", tokenizer)
        assert done.returncode == 2 and name.split(":")[0] in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_missing_data_set_is_one_message(hub, corpus, tmp_path):
    changes = {"dataset_name": "ada/missing", "push_to_hub": False, "cache_dir": tmp_path / "cache"}
    output = end(start(hub, corpus, tmp_path, **changes), 2, tmp_path)
    assert "ada/missing" in output and "Traceback" not in output
