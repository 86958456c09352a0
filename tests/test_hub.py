"""Publishing on the Hub, against a Hub on loopback with the real client, over both of its transports.

Programs run in processes of their own, forked (tests/forked.py). Whatever they print and leave is searched
for the token.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests import forked
from tests.hub_server import ADA, TOKEN, Fault, HubServer

PROJECT = Path(__file__).resolve().parent.parent
UPLOAD = "PUT /lfs|POST /xet/v1/xorbs"  # of weights, on either transport
ALWAYS = float("inf")
PRELUDE = """
import json, os, sys, time
from pathlib import Path
from types import SimpleNamespace
from accelerate import Accelerator
from utils.publishing import hub
from utils.publishing.hub import Hub

out = Path(sys.argv[1])
out.mkdir(exist_ok=True)

def open_hub(model_id="ada/model", private=False):
    settings = dict(push_to_hub=True, hub_model_id=model_id, hub_private_repo=private)
    args = SimpleNamespace(output_dir=str(out), eval_only=False, show=0, **settings)
    problems = []
    made = Hub(args, Accelerator(cpu=True), problems)
    if problems:
        raise ValueError(*problems)
    return made

def save(step, size=20_000):
    "What a save leaves: weights in a new file, the rest rewritten in place, each naming its step."
    (out / ".weights").write_bytes(step.to_bytes(4, "big") * (size // 4))
    os.replace(out / ".weights", out / "model.safetensors")
    for name in ("config.json", "metrics.jsonl", "curves.png"):
        (out / name).write_text(f"step {step}")
    (out / "README.md").write_text(f"---\\nlicense: mit\\n---\\nstep {step}\\n")

def tell(what):
    print(">", what, flush=True)

def wait(pushes, *states):
    "Wait for the next event of such a state."
    while True:
        for event in pushes.poll():
            if event["state"] in states:
                return event
        time.sleep(0.02)
"""


@pytest.fixture(params=["lfs", "xet"])
def both(request, tmp_path, hub_port, hub_home):
    with HubServer(tmp_path / "server", hub_port, xet=request.param == "xet", home=hub_home) as hub:
        yield hub


@pytest.fixture
def hub(tmp_path, hub_port, hub_home):
    with HubServer(tmp_path / "server", hub_port, home=hub_home) as hub:
        yield hub


class Program:
    """Python code after PRELUDE in a process of its own; `input()` in it waits for `go`. fresh: not forked,
    so that it also ends as Python does."""

    def __init__(self, hub, folder, code, fresh=False):
        self.hub, self.folder = hub, folder
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
        while len(lines := re.findall(r"^> .*\n", self.output, re.M)) <= self.heard:
            assert self.status is None or self.output.count("\n> ") > self.heard, self.output
            time.sleep(0.02)
        self.heard += 1
        return lines[self.heard - 1]

    heard = 0

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
        assert TOKEN not in self.output
        left = (path for place in (self.folder, self.hub.home) for path in place.rglob("*"))
        kept = [path for path in left if path.is_file() and TOKEN.encode() in path.read_bytes()]
        assert not kept, f"the token is in {kept}"
        return self.output


def steps(hub, repo_id="ada/model"):
    """The steps of the revisions on the server, oldest first; all files of a revision must be of one step."""
    found = []
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
        found.append(of.pop())
    assert found == sorted(found)
    return found


def upload_by_hand(hub, output):
    """Run the command that the program printed."""
    words = shlex.split(re.search(r"^ *(hf upload .*)$", output, re.M)[1])
    words[0] = str(Path(sys.executable).parent / "hf")
    done = subprocess.run(words, env=hub.env(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_revision_is_the_model_of_its_step(both, tmp_path):
    """from_pretrained(revision) gives the very weights of the local save; card and curves belong to them."""
    Program(both, tmp_path, """
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
    pushes = open_hub("model", private=True)
    assert pushes.url == f"{os.environ['HF_ENDPOINT']}/ada/model"
    saved = {}
    for step in (1, 2, 3):
        torch.manual_seed(step)
        sizes = dict(n_layer=1, n_head=2, n_embd=16, vocab_size=50, bos_token_id=0, eos_token_id=0)
        model = GPT2LMHeadModel(GPT2Config(**sizes))
        save(step)
        model.save_pretrained(out)
        os.link(out / "model.safetensors", out / f".kept-{step}")
        records = [{"step": step, "loss/train": 5.0}, {"loss/eval": 1 / step, "loss/eval_stderr": 0.1,
                   "perplexity": None, "note": f"step {step}"}, {"loss/train": 4.0}]
        (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\\n" for record in records))
        pushes.push(step)
        event = wait(pushes, "done")
        saved[event["revision"]] = model.state_dict()
    assert pushes.finish()
    assert pushes.status == "step 3 pushed" and not (out / ".hub").exists()
    rewritten = os.path.samefile(out / ".kept-1", out / ".kept-2")
    assert not rewritten, "save_pretrained rewrites weights in place: a hard link does not freeze them"
    for revision, weights in saved.items():
        loaded = AutoModelForCausalLM.from_pretrained("ada/model", revision=revision).state_dict()
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    """).end()
    commits = both.commits("ada/model")
    titles = [commit["title"] for commit in commits]
    assert titles == ["Step 1, loss/eval 1", "Step 2, loss/eval 0.5", "Step 3, loss/eval 0.3333"]
    for step, commit in enumerate(commits, 1):
        assert all(f"step {step}".encode() in both.read(commit["files"][name])
                   for name in ("README.md", "metrics.jsonl", "curves.png"))
    assert both.repo("ada/model")["private"]
    assert both.uses_xet == any("/xet/v1/xorbs" in entry["line"] for entry in both.log)


def test_newer_snapshots_replace_those_that_wait(both, tmp_path):
    """On a slow network, with files rewritten all the time: whole revisions in order, the last among them."""
    both.faults.append(Fault(UPLOAD, "slow", rate=40_000, times=ALWAYS))
    states = Program(both, tmp_path, """
    pushes = open_hub()
    for step in range(1, 13):
        save(step)
        pushes.push(step)
        time.sleep(0.1)
    assert pushes.finish()
    print([event["state"] for event in pushes.poll()])
    """).end()
    published = steps(both)
    assert published[-1] == 12 and 1 < len(published) < 12
    assert (len(published), 12 - len(published)) == (states.count("done"), states.count("replaced"))


PASSING = {
    "server error": Fault("POST .*/commit/", status=500),
    "rate limit": Fault("POST .*/commit/", status=429, headers={"Retry-After": "3"}),
    "a commit has happened since": Fault("POST .*/commit/", status=412),
    "another commit is in progress": Fault("POST .*/commit/", status=409),
    "connection lost in mid upload": Fault(UPLOAD, "drop", after=4096),
    "connection lost in mid commit": Fault("POST .*/commit/", "drop", after=100),
    "answer to the commit lost": Fault("POST .*/commit/", "lost"),
    "storage away": Fault(UPLOAD, status=503),
    "gateway": Fault("GET .*/tree/", status=502),
}


def test_passing_troubles_lose_nothing(both, tmp_path):
    """One trouble per push: each revision stays whole and arrives, after the wait that is asked for."""
    program = Program(both, tmp_path, f"""
    pushes = open_hub()
    for step in range(1, 1 + {len(PASSING)}):
        input()
        save(step)
        pushes.push(step)
        tell(wait(pushes, "done", "failed"))
    sys.exit(int(not pushes.finish()))
    """)
    for step, (what, fault) in enumerate(PASSING.items(), 1):
        both.faults, began = [replace(fault)], len(both.log)
        program.go()
        assert "'done'" in program.told(), program.output
        assert both.faults[0].times == 0, f"{what} has not happened"
        assert steps(both)[-1] == step, what
        if what == "rate limit":
            refused, again = [e["time"] for e in both.log[began:] if "/commit/" in e["line"]]
            assert again - refused >= 3
    program.end()


NO_WAIT = ["inf", "nan", "-1", "1e300", "1e999", "soon", "Wed, 21 Oct 2026 07:28:00 GMT", ""]


def test_a_wait_that_cannot_be_asked_for_is_not_waited(hub, tmp_path):
    """`Retry-After` of a server gone mad, before training and at a commit: our own backoff does."""
    program = Program(hub, tmp_path, f"""
    for step in range(1, 1 + {len(NO_WAIT)}):
        input()
        pushes = open_hub()
        save(step)
        pushes.push(step)
        pushes.finish()
        tell(pushes.poll()[-1]["state"])
    """)
    for step, asked in enumerate(NO_WAIT, 1):
        mad = {"status": 429, "headers": {"Retry-After": asked}, "times": 1}
        hub.faults = [Fault("whoami", **mad), Fault("POST .*/commit/", **mad)]
        program.go()
        assert program.told() == "> done\n", (asked, program.output)
        assert [fault.times for fault in hub.faults] == [0, 0] and steps(hub)[-1] == step
    program.end()


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
        assert "may not write" in what, what
    assert "hub_model_id" in told("a b") and "hub_model_id" in told("ada/model/x")
    """).end()
    created = sorted(str(p.relative_to(tmp_path / "server/repos/models")) for p in tmp_path.rglob("*.json"))
    assert created == ["ada/model.json", "analytical-engines/model.json", "royal-society/minutes.json"]


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_no_answer_ends_before_any_work(hub, tmp_path, how):
    hub.faults.append(Fault("whoami", "hang", times=ALWAYS))
    program = Program(hub, tmp_path, """
    hub.CHECK_SECONDS = 1
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


def test_token_revoked_during_training(both, tmp_path):
    """Said once; training goes on; nothing is lost: the printed command works with a good token."""
    program = Program(both, tmp_path, """
    pushes = open_hub()
    for step in (1, 2, 3):
        save(step)
        pushes.push(step)
        tell(wait(pushes, "done", "failed"))
        input()
    save(4)
    pushes.push(4)
    sys.exit(int(not pushes.finish()))
    """)
    assert "'done'" in program.told()
    tokens, both.tokens = both.tokens, {}
    program.go(), program.go(), program.go()
    output = program.end(status=1)
    assert output.count("was not published") == 1 and "hf auth login" in output
    both.tokens = tokens
    upload_by_hand(both, output)
    assert steps(both) == [1, 4]


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_server_lost_before_the_last_push(both, tmp_path, how):
    """The wait is bounded, the exit not held up; files are kept, and the printed command works later."""
    program = Program(both, tmp_path, """
    hub.FINISH_SECONDS = 3
    pushes = open_hub()
    save(1)
    pushes.push(1)
    tell(wait(pushes, "done"))
    input()
    save(2)
    pushes.push(2)
    sys.exit(int(not pushes.finish()))
    """, fresh=how == "silent" and both.uses_xet)
    assert "'done'" in program.told()
    if how == "gone":
        both.stop()
    both.faults.append(Fault(UPLOAD, "hang", times=ALWAYS))
    program.go()
    output = program.end(status=1)
    assert "'Step 2' did not reach ada/model" in output
    assert not (tmp_path / "run/.hub").exists()
    both.stop()
    with HubServer(tmp_path / "server", both.port, both.uses_xet, both.home) as again:
        assert steps(again) == [1]
        upload_by_hand(again, output)
        assert steps(again) == [1, 2]


@pytest.mark.parametrize("when", ["upload", "commit"])
def test_killed_during_a_push(both, tmp_path, when):
    """The same program again ends with whole revisions and the last model, and clears what was frozen."""
    code = """
    pushes = open_hub()
    for step in (1, 2):
        save(step)
        pushes.push(step)
        wait(pushes, "done")
    assert not [*(out / ".hub").iterdir()]
    sys.exit(int(not pushes.finish()))
    """
    match = UPLOAD if when == "upload" else "POST .*/commit/"
    both.faults.append(Fault(match, "hang", times=ALWAYS))
    program = Program(both, tmp_path, code)
    program.until(match)
    program.process.kill()
    program.end(status=-9)
    assert (tmp_path / "run/.hub").exists() and steps(both) == []
    both.faults.clear()
    Program(both, tmp_path, code).end()
    assert steps(both) == [1, 2]


def test_the_hubs_own_quota(hub, tmp_path):
    """While the Hub takes no more, the push waits as long as it asks; those that wait are replaced."""
    hub.faults = [Fault("POST .*/commit/", status=429, headers={"Retry-After": "2"}, skip=2)]
    output = Program(hub, tmp_path, """
    pushes = open_hub()
    for step in (1, 2, 3, 4, 5):
        save(step)
        pushes.push(step)
        wait(pushes, "done") if step < 3 else time.sleep(0.2)
    sys.exit(int(not pushes.finish()))
    """).end()
    assert "next try in 2 s" in output and steps(hub) == [1, 2, 3, 5]


def test_a_full_disk_does_not_end_training(hub, tmp_path):
    hub.faults = [Fault("POST .*/commit/", status=503)]
    output = Program(hub, tmp_path, """
    import resource
    pushes = open_hub()
    save(1)
    (out / "large.json").write_bytes(b"x" * 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # as on a full disk, a copy is cut short
    pushes.push(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert wait(pushes, "failed")["push_step"] == 1
    (out / "large.json").unlink()
    save(2)
    pushes.push(2)
    while not pushes.uploading:
        time.sleep(0.02)  # it waits for its second try, and stays when the next one finds no room
    (out / "large.json").write_bytes(b"x" * 100_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    pushes.push(3)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    sys.exit(int(not pushes.finish()))
    """).end(status=1)
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
    wait(pushes, "done")
    for path in out.glob("*s*"):
        path.unlink()
    save(2)
    pushes.push(2)
    sys.exit(int(not pushes.finish()))
    """).end()
    names = {name for name in hub.commits("ada/model")[-1]["files"] if "safetensors" in name}
    assert names == {"model.safetensors", "adapter.safetensors"}


def test_a_model_that_could_not_be_saved_is_not_pushed(hub, tmp_path):
    """An export that fails leaves a mark; the files of the step before would be published as this one's."""
    Program(hub, tmp_path, """
    pushes = open_hub()
    save(1)
    pushes.push(1)
    (out / ".export").mkdir()
    pushes.push(2)
    (out / ".export").rmdir()
    save(3)
    pushes.push(3)
    assert pushes.finish()
    assert {event["push_step"] for event in pushes.poll()} == {1, 3}
    """).end()
    assert steps(hub)[-1] == 3


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


def test_the_printed_command_uploads_what_a_push_does(hub, tmp_path):
    published = ["README.md", "metrics.jsonl", "model.safetensors", "picture.jpg"]
    others = [".lock", ".export-notes/a", "best/model.safetensors", "checkpoints/step-00000001/state.json",
              "nohup.out", "replaced-metrics.jsonl", "run.log", "train_clm/events"]
    output = Program(hub, tmp_path, f"""
    for name in {[*published, *others]}:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("---\\nlicense: mit\\n---\\n" + name)
    pushes = open_hub()
    pushes.push(1)
    assert pushes.finish()
    print(hub.upload_command("ada/by-hand", out))
    """).end()
    upload_by_hand(hub, output)
    for repository in ("ada/model", "ada/by-hand"):
        assert sorted({*hub.commits(repository)[-1]["files"]} - {".gitattributes"}) == published
