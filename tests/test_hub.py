"""Publishing on the Hub, against a Hub on loopback with the real client, over both of its transports.

Programs and runs are processes of their own, forked (tests/forked.py). Whatever they print and leave is
searched for the token.
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
    "What a save leaves: weights in a new file, the rest rewritten in place, each naming its step."
    (out / ".weights").write_bytes(step.to_bytes(4, "big") * 5000)
    os.replace(out / ".weights", out / "model.safetensors")
    for name in ("config.json", "metrics.jsonl", "curves.png"):
        (out / name).write_text(f"step {step}")
    (out / "README.md").write_text(f"---\\nlicense: mit\\n---\\nstep {step}\\n")

def push(step):
    save(step)
    pushes.push(step)

def tell(what):
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
    """Python code after PRELUDE in a process of its own; `input()` in it waits for `go`. fresh: not forked,
    so that it also ends as Python does."""

    def __init__(self, hub, folder, code, fresh=False):
        self.hub, self.folder, self.heard = hub, folder, 0
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
        """None while it runs."""
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def go(self):
        os.write(self.stdin, b"\n")

    def told(self):
        """What it passes to `tell` next."""
        while len(lines := re.findall(r"^> (.*)\n", self.output, re.M)) <= self.heard:
            assert self.status is None or self.output.count("\n> ") > self.heard, self.output
            time.sleep(0.02)
        self.heard += 1
        return lines[self.heard - 1]

    def until(self, request):
        """Wait until the server has seen a request that matches."""
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
    """The steps of the revisions on the server, oldest first; all files of a revision must be of one step."""
    steps = []
    for commit in hub.commits(repo_id):
        of = set()
        for name, entry in commit["files"].items():
            content = hub.read(entry)
            if name == "model.safetensors":
                assert content == content[:4] * 5000
                of.add(int.from_bytes(content[:4], "big"))
            elif name != ".gitattributes":
                of.add(int(re.search(rb"step (\d+)", content)[1]))
        assert len(of) == 1, f"revision {commit['title']} mixes steps {of}"
        steps.append(of.pop())
    assert steps == sorted(steps)
    return steps


def upload_by_hand(hub, output):
    """Run the command that was printed."""
    words = shlex.split(re.search(r"^ *(hf upload .*)$", output, re.M)[1])
    words[0] = str(Path(sys.executable).parent / "hf")
    done = subprocess.run(words, env=hub.env(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- The thread and its pushes


PASSING = {
    "server error": Fault(COMMIT, status=500),
    "rate limit": Fault(COMMIT, status=429, headers={"Retry-After": "1"}),
    "rate limit of a server gone mad": Fault(COMMIT, status=429, headers={"Retry-After": "1e999"}),
    "a commit has happened since": Fault(COMMIT, status=412),
    "another commit is in progress": Fault(COMMIT, status=409),
    "connection lost in mid upload": Fault(UPLOAD, "drop", after=4096),
    "connection lost in mid commit": Fault(COMMIT, "drop", after=100),
    "answer to the commit lost": Fault(COMMIT, "lost"),
    "storage away": Fault(UPLOAD, status=503),
    "gateway": Fault("GET .*/tree/", status=502),
}


def test_the_last_save_arrives_after_each_fault_that_passes(both, tmp_path):
    program = Program(both, tmp_path, f"""
    pushes = open_hub()
    for step in range(1, 1 + {len(PASSING)}):
        input()
        push(step)
        tell(pushes.finish(step))
    """)
    for step, (what, fault) in enumerate(PASSING.items(), 1):
        both.faults = [replace(fault)]
        program.go()
        assert program.told() == "True", (what, program.output)
        assert both.faults[0].times == 0, f"{what} has not happened"
        assert steps(both)[-1] == step, what
    program.end()


HANGS = {"late": (UPLOAD, 1.0, [1, 3]), "silent": (UPLOAD, ALWAYS, [3]), "commit": (COMMIT, ALWAYS, [3])}


@pytest.mark.parametrize("match, seconds, arrive", HANGS.values(), ids=HANGS)
def test_two_saves_come_while_a_push_hangs_and_the_last_one_arrives(both, tmp_path, match, seconds, arrive):
    both.faults.append(Fault(match, "hang", seconds=seconds))
    program = Program(both, tmp_path, """
    hub.TIMEOUT = 1
    pushes = open_hub()
    push(1)
    input()
    push(2)
    push(3)
    sys.exit(int(not pushes.finish(3)))
    """)
    program.until(match)
    program.go()
    program.end()
    assert steps(both)[-len(arrive):] == arrive and 2 not in steps(both)


def test_a_silent_server_does_not_hold_up_the_exit(both, tmp_path):
    """The printed command uploads the files later."""
    program = Program(both, tmp_path, """
    hub.FINISH_SECONDS = 3
    pushes = open_hub()
    push(1)
    assert pushes.finish(1)
    tell("pushed")
    input()
    push(2)
    push(3)
    sys.exit(int(not pushes.finish(3)))
    """, fresh=True)
    assert program.told() == "pushed"
    both.faults.append(Fault(UPLOAD, "hang", times=ALWAYS))
    program.go()
    output = program.end(status=1)
    assert "'Step 3' did not reach ada/model" in output and not (tmp_path / "run/.hub").exists()
    both.faults.clear()
    upload_by_hand(both, output)
    assert steps(both) == [1, 3]


def test_a_full_disk_does_not_end_training(hub, tmp_path):
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
        tell(pushes.status)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    sys.exit(int(not pushes.finish(3)))
    """).end(status=1)
    assert re.findall("^> (.*)", output, re.M) == ["step 1 not pushed", "step 2 pushed", "step 3 not pushed"]
    assert "'Step 3' did not reach ada/model" in output and steps(hub) == [2]


def test_weights_that_are_no_more_leave_the_repository(hub, tmp_path):
    """One file where there were shards: no revision holds both."""
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


def test_a_model_that_could_not_be_saved_is_not_pushed(hub, tmp_path):
    """An export that fails leaves a mark; the files of the step before would be published as this one's."""
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


def test_the_printed_command_uploads_what_a_push_does(hub, tmp_path):
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


def test_bad_accounts_and_names_end_before_any_work(hub, tmp_path):
    """One ValueError each, naming what is wrong and the remedy; only the repository asked for is created."""
    hub.tokens["hf_reader"] = {**ADA, "role": "read"}
    hub.create("royal-society/minutes")
    Program(hub, tmp_path, """
    good = os.environ["HF_TOKEN"]
    def told(model_id, token=good):
        os.environ["HF_TOKEN"] = token
        try:
            return open_hub(model_id).repo_id
        except ValueError as error:
            return str(error)

    assert told("model") == told("ada/model") == "ada/model"
    assert told("analytical-engines/model") == "analytical-engines/model"
    for what in [told("model", ""), told("model", "hf_revoked"), told("model", "hf_reader")]:
        assert "hf auth login" in what and "HF_TOKEN" in what, what
    for what in [told("babbage/model"), told("royal-society/minutes"), told("royal-society/new")]:
        assert "don't have the rights" in what, what
    assert "hub_model_id" in told("a b") and "hub_model_id" in told("ada/model/x")
    """).end()
    created = {"ada/model", "analytical-engines/model", "royal-society/minutes"}
    assert {name for _, name in hub.repos} == created


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_no_answer_ends_before_any_work(hub, tmp_path, how):
    hub.faults.append(Fault("repos/create", "hang", times=ALWAYS))
    program = Program(hub, tmp_path, """
    hub.START_TIMEOUT = 1
    input()
    try:
        open_hub("model")
    except ValueError as error:
        print(error)
    """)
    if how == "gone":
        hub.stop()
    program.go()
    assert "train without push_to_hub" in program.end()


# ---- Runs of train_clm.py


def start(hub, corpus, folder, token=TOKEN, processes=1, picture=False, **changes):
    """The processes of the script on the output folder folder/tiny, and where they write."""
    folder.mkdir(exist_ok=True)
    log = Path(tempfile.mkstemp(dir=folder, prefix="log-")[1])
    flags = {**TINY, "dataset_name": corpus, "cache_dir": corpus.parent / "cache", "push_to_hub": True,
             "hub_private_repo": True, "output_dir": folder / "tiny", **changes}  # fmt: skip
    env = hub.env(token=token) | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return forked.start_all(PROJECT, "train_clm.py", flags, log, processes, env=env, picture=picture), log


def end(started, status, *folders):
    """What it printed; neither that nor what it left may hold the token."""
    processes, log = started
    for process in processes:
        process.join(200)
    output, statuses = log.read_text(), [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert statuses == [status] * len(processes), output
    return without_token(output, *folders)


def published(hub, folder):
    """The steps of the revisions; each must load, and its card, log and curves be of its step. The last one
    has the weights in folder/tiny."""
    steps = []
    for commit in hub.commits(REPO):
        here = folder / "revisions" / commit["oid"]
        here.mkdir(parents=True)
        for name, entry in commit["files"].items():
            (here / name).write_bytes(hub.read(entry))
        AutoModelForCausalLM.from_pretrained(here)
        steps.append(int(re.match(r"Step (\d+), loss/eval [\d.]+, perplexity [\d.]+$", commit["title"])[1]))
        assert f"| optimizer steps | {steps[-1]:,} |" in (here / "README.md").read_text()
        assert metrics(here)[-1]["step"] == steps[-1] and (here / "curves.png").stat().st_size > 1000
        assert json.loads((here / "args.json").read_text())
    weights = hashlib.sha256((folder / "tiny/model.safetensors").read_bytes()).hexdigest()
    assert hub.commits(REPO)[-1]["files"]["model.safetensors"]["sha256"] == weights
    assert steps == sorted(steps)
    return steps


@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_and_the_last_save_are_revisions(both, corpus, tmp_path, processes):
    """The end of the run says where the model is, and not how to upload it."""
    rows = {"per_device_train_batch_size": 8 // processes}
    output = end(start(both, corpus, tmp_path, processes=processes, picture=True, **rows), 0, tmp_path)
    assert "Published: http" in output and "  evaluate  " in output and "hf upload" not in output
    arrived = published(both, tmp_path)
    assert (arrived[0], arrived[-1]) == (0, 6) and not (tmp_path / "tiny/.hub").exists()
    assert both.repo(REPO)["private"]
    assert both.uses_xet == any("/xet/v1/xorbs" in entry["line"] for entry in both.log)


@pytest.mark.parametrize("processes", [1, 2])
def test_without_a_token_nothing_begins(hub, corpus, tmp_path, processes):
    """Exit status 2 and one message, on all processes, before data are prepared or a folder is made."""
    output = end(start(hub, corpus, tmp_path, None, processes, cache_dir=tmp_path / "cache"), 2)
    assert "hf auth login" in output and "Traceback" not in output
    assert not (tmp_path / "cache").exists() and not (tmp_path / "tiny").exists()


STOPPED = {"max_train_steps": 100_000, "eval_steps": 1000, "save_steps": 20}
TERM, KILL = signal.SIGTERM, signal.SIGKILL
# Requests, and what happens to them; a signal after so many of them, or when the run is over; status; remedy.
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
def test_a_run_ends_and_its_last_save_arrives_or_a_command_is_printed(
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


def test_evaluation_and_a_look_at_rows_ask_no_hub(hub, corpus, tmp_path):
    end(start(hub, corpus, tmp_path, push_to_hub=False), 0)
    for what in ({"eval_only": True}, {"show": 1}):
        end(start(hub, corpus, tmp_path, hub_model_id="ada/other", **what), 0)
    assert not hub.log


# ---- Data on the Hub


def test_shards_go_to_a_data_set_repository_and_are_trained_from(hub, corpus, tmp_path):
    """After a fault the same command resumes; what is finished is left alone."""

    def tool(module, *flags):
        env = hub.env() | {"OMP_NUM_THREADS": "1"}
        done = forked.run(f"data.{module}", ["--dataset_name", corpus, *flags], env=env)
        assert TOKEN not in done.stdout + done.stderr
        return done

    assert tool("tokens.tokenizer", "--vocab_size", "400", "--output_dir", tmp_path / "words").returncode == 0
    hub.create("ada/rows", "datasets")
    hub.faults.append(Fault("POST .*/datasets/ada/rows/commit/main", status=500, skip=1))
    prepare = ["--tokenizer_name", tmp_path / "words", "--validation_fraction", "0.1",
               "--output_dir", "hf://datasets/ada/rows"]  # fmt: skip
    failed = tool("prepare", *prepare)
    assert failed.returncode == 1 and "Run the same command again" in failed.stderr, failed.stderr
    assert tool("prepare", *prepare).returncode == 0
    commits = hub.commits("ada/rows", kind="datasets")
    files = set(commits[-1]["files"])
    assert "manifest.json" in files and not any(name.startswith("progress/") for name in files)
    assert "is finished" in tool("prepare", *prepare).stdout
    assert len(hub.commits("ada/rows", kind="datasets")) == len(commits)
    shards = {"dataset_name": "hf://datasets/ada/rows", "push_to_hub": False, "cache_dir": tmp_path / "cache"}
    end(start(hub, corpus, tmp_path, **shards), 0, tmp_path)
    assert metrics(tmp_path / "tiny")[-1]["step"] == 6


def test_data_sets_and_tokenizers_load_from_the_hub(hub, tmp_path):
    """Through the real libraries: named splits, streamed and not, a tokenizer, a name that is not there."""
    lines = [f'{{"text": "document {i}"}}\n'.encode() for i in range(5)]
    files = {"data/train.jsonl": b"".join(lines), "data/validation.jsonl": lines[0]}
    hub.put("ada/text", files, "datasets")
    hub.put("ada/tokens", {"train.bin": bytes([0, 0, 1, 0] * 400), "val.bin": bytes(100)}, "datasets")
    records = PROJECT / "tests/tfrecords"
    shards = {str(path.relative_to(records)): path.read_bytes() for path in records.rglob("*.tfrecord")}
    hub.put("ada/records", shards, "datasets")
    configurations = {f"{name}/train.parquet": b"PAR1" for name in "ab"}
    card = "configs:\n" + "".join(f"- {{config_name: {name}, data_files: {name}/*}}\n" for name in "ab")
    hub.put("ada/several", {"README.md": f"---\n{card}---\n".encode(), **configurations}, "datasets")
    Program(hub, tmp_path, """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from data.documents.source import Source, open_corpus, splits_of
    from data.tokens.tokenizer import load_tokenizer

    texts = [f"document {i}" for i in range(5)]
    for streaming in (False, True):
        corpus = open_corpus(Source("ada/text", streaming=streaming))
        assert [document[corpus.text_column] for document in corpus] == texts
    assert {*corpus.splits} == {*splits_of(Source("ada/text"))} == {"train", "validation"}
    try:
        open_corpus(Source("ada/missing"))
        raise SystemExit("found a data set that is not there")
    except ValueError as error:
        assert "ada/missing" in str(error)
    words = Tokenizer(models.WordLevel({"document": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[UNK]")
    words.push_to_hub("ada/words")
    assert load_tokenizer("ada/words").encode("document") == [0]
    from data import convert
    from data.tokens.shards import Shards

    convert.main(["ada/tokens", str(out / "tokens"), "--tokenizer_name", "ada/words", "--dtype", "uint16"])
    splits = Shards(out / "tokens").splits
    assert {name: split["tokens"] for name, split in splits.items()} == {"train": 800, "validation": 50}
    many = {"document": 0, "[UNK]": 1, **{str(i): i for i in range(2, 400)}}
    many = Tokenizer(models.WordLevel(many, unk_token="[UNK]"))
    many = PreTrainedTokenizerFast(tokenizer_object=many, unk_token="[UNK]", eos_token="[UNK]")
    many.push_to_hub("ada/many")
    convert.main(["ada/records", str(out / "records"), "--tokenizer_name", "ada/many"])
    splits = Shards(out / "records").splits
    assert {name: split["tokens"] // 32 for name, split in splits.items()} == {
        "train": 40, "validation": 8, "test": 1}
    import contextlib, io
    for name in ("ada/nothing", "ada/records:train", "ada/several"):
        with contextlib.redirect_stderr(io.StringIO()) as told:
            try:
                convert.main([name, str(out / "no"), "--tokenizer_name", "ada/many"])
            except SystemExit as end:
                assert end.code == 2, (end.code, told.getvalue())
        assert "Traceback" not in told.getvalue() and name.split(":")[0] in told.getvalue(), told.getvalue()
    """).end()
