"""Milestones: complete or absent, the weights of their step, on the disk and on the Hub, whatever dies.

    MILESTONE_KILLS=20 pytest tests/test_milestones.py -k under_kills     # the default is a few kills, for CI
"""

import functools
import hashlib
import json
import os
import random
import time

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers import PreTrainedTokenizerFast as Fast

from tests.forked import finish, run_code, start, start_all
from tests.hub_server import TOKEN, Fault, HubServer
from tests.runs import PROJECT, TINY, environment, write_corpus
from utils.io.files import verify_checksums
from utils.learning.losses import CausalLMLoss
from utils.publishing.export import keep_milestone, list_milestones, milestone_steps
from utils.state.folders import set_aside_newer, step_of

KILLS = os.environ.get("MILESTONE_KILLS")
REPO = "ada/tiny"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("milestones")
    corpus = write_corpus(folder / "corpus.jsonl")
    once = {"eval_at_start": False, "eval_steps": 1000}
    return TINY | once | {"dataset_name": corpus, "cache_dir": folder / "cache", "prompts": "none"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def inode(milestone) -> int:
    return (milestone / "model.safetensors").stat().st_ino


def weights_of_checkpoint(path) -> dict:
    return {name.removeprefix("lm."): value for name, value in load_file(path / "model.safetensors").items()}


def assert_the_weights(lm, expected: dict):
    found = lm.state_dict()
    assert expected and all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.fixture
def server(tmp_path, hub_port, hub_home):
    return functools.partial(HubServer, tmp_path / "server", hub_port, home=hub_home)


def clients(hub, processes=1) -> dict:
    env = hub.env()
    env = {name: value for name, value in env.items() if name.startswith("HF_") or name == "NO_PROXY"}
    return environment(processes, **env | {"HF_HUB_OFFLINE": "0"})


# What a kill meets, in turn, as the milestone of a step is made or pushed; and what the Hub does meanwhile.
MOMENTS = ("written", "complete", "pushed", "later")
COMMIT, TAG = f"POST .*/{REPO}/commit/milestones", f"POST .*/{REPO}/tag/"
FAULTS = (
    Fault(COMMIT, status=503), Fault(TAG, kind="lost"), Fault(COMMIT, kind="wrong", times=2),
    Fault("PUT /lfs|POST /xet/v1/xorbs", kind="drop", after=100), Fault(TAG, status=503),
    Fault(f"GET .*/{REPO}/tree/step-", kind="drop"), Fault(COMMIT, kind="lost"),
)  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
def test_under_kills_and_faults_of_the_hub_none_is_missing_or_wrong(flags, processes, server, tmp_path):
    """Each loads, here and from its revision, with the weights that an undisturbed run had at this step."""
    steps = [5 * (i + 1) for i in range(int(KILLS or 4 // processes))]
    flags = flags | {"max_train_steps": steps[-1] + 3, "per_device_train_batch_size": 8 // processes}
    whole, log = tmp_path / "whole", tmp_path / "log"
    every_step = {"save_steps": 1, "save_total_limit": 1000, "output_dir": whole}
    finish(start_all(PROJECT, "train_clm.py", flags | every_step, log, processes), log)

    run = tmp_path / "tiny"
    flags |= {"output_dir": run, "save_steps": 7, "milestones": steps, "push_to_hub": True}
    moments, inodes = random.Random(0), {}
    with server(xet=processes == 2) as hub:
        env = clients(hub, processes)
        for i, step in enumerate(steps):
            hub.faults = [Fault(**vars(FAULTS[(2 * i + j) % len(FAULTS)])) for j in range(2)]
            running = start_all(PROJECT, "train_clm.py", flags, log, processes, env=env)
            moment, seen = MOMENTS[i % len(MOMENTS)], len(hub.log)
            made = run / "milestones" / f"step-{step}"
            there = {
                "written": lambda made=made: made.exists() or made.with_name(f".tmp-{made.name}").exists(),
                "pushed": lambda seen=seen: any("/milestones" in entry["line"] for entry in hub.log[seen:]),
            }.get(moment, made.exists)
            while not there():
                assert all(process.is_alive() for process in running), log.read_text()[-3000:]
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.3) if moment == "later" else 0)
            for process in running:
                process.kill()
            for process in running:
                process.join()
            for path in list_milestones(run):
                assert verify_checksums(path) == ""
                inodes.setdefault(path, inode(path))
        hub.faults = [Fault(**vars(fault)) for fault in FAULTS[:3]]
        finish(start_all(PROJECT, "train_clm.py", flags, log, processes, env=env), log)

        made = {step_of(path): path for path in list_milestones(run)}
        assert list(made) == steps
        assert sorted(os.listdir(run / "milestones")) == sorted(path.name for path in made.values())
        for step, path in made.items():
            expected = weights_of_checkpoint(whole / f"checkpoints/step-{step:08d}")
            assert_the_weights(AutoModelForCausalLM.from_pretrained(path), expected)
            AutoTokenizer.from_pretrained(path)
        assert {path: inode(path) for path in inodes} == inodes  # not rewritten

        assert TOKEN not in log.read_text()
        tags = hub.tags(REPO)
        assert tags.keys() == {path.name for path in made.values()}
        for tag, files in tags.items():
            manifest = json.loads(hub.read(files["manifest.json"]))
            names = {*manifest["files"], "manifest.json", ".gitattributes"}
            assert files.keys() == names and f"step-{manifest['step']}" == tag
            for name, entry in manifest["files"].items():
                content = hub.read(files[name])
                assert (sha256(content), len(content)) == (entry["sha256"], entry["bytes"])
                assert content == (run / "milestones" / tag / name).read_bytes()
        if processes == 2:
            return
        code = (
            "import sys\nfrom safetensors.torch import save_file\n"
            "from transformers import AutoModelForCausalLM\n"
            "for step in sys.argv[2:]:\n"
            f"    lm = AutoModelForCausalLM.from_pretrained('{REPO}', revision=f'step-{{step}}')\n"
            "    save_file({n: v.clone() for n, v in lm.state_dict().items()}, f'{sys.argv[1]}/{step}')\n"
        )
        done = run_code(code, [tmp_path, *steps], env=env)
        assert done.returncode == 0, done.stderr
        for step in steps:
            found = load_file(tmp_path / str(step))
            expected = weights_of_checkpoint(whole / f"checkpoints/step-{step:08d}")
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_never_reaches_the_hub_is_told_at_the_end_and_made_good_by_the_next_start(
    flags, server, tmp_path
):
    """A revision that cannot be right is not there; training goes on to its end; the exit status is 1."""
    run, log = tmp_path / "tiny", tmp_path / "log"
    flags = flags | {"output_dir": run, "milestones": [2, 4], "push_to_hub": True, "hub_timeout": 2}
    with server(xet=True) as hub:
        hub.put(REPO, {"model.safetensors": b"of another run"})
        hub.faults = [Fault(COMMIT, kind="wrong", times=float("inf"))]
        ended = start(PROJECT, "train_clm.py", flags, log, env=clients(hub))
        ended.join(120)
        assert ended.exitcode == 1 and hub.tags(REPO) == {}, log.read_text()[-2000:]
        for step in (2, 4):
            assert f"'Milestone step-{step}' did not reach {REPO}" in log.read_text()
        assert "arrived with another hash" in log.read_text() and "steps             6" in log.read_text()
        hub.faults = []
        finish([start(PROJECT, "train_clm.py", flags, log, env=clients(hub))], log)
        assert hub.tags(REPO).keys() == {"step-2", "step-4"}
        commits = len(hub.commits(REPO, "milestones"))
        finish([start(PROJECT, "train_clm.py", flags, log, env=clients(hub))], log)
        assert len(hub.commits(REPO, "milestones")) == commits  # what is there is left alone


def test_a_run_that_begins_anew_has_only_its_own(flags, server, tmp_path):
    """Those of the old one stay, as replaced-*, and lend no revision: a tag is moved to the new one's,
    whatever the network does meanwhile."""
    run, log = tmp_path / "tiny", tmp_path / "log"
    flags = flags | {"output_dir": run, "milestones": "log", "push_to_hub": True}
    faults = [Fault(f"DELETE .*/{REPO}/tag/step-2", kind="lost"), Fault(f"POST .*/{REPO}/tag/", status=503)]
    with server() as hub:
        env = clients(hub)
        finish([start(PROJECT, "train_clm.py", flags, log, env=env)], log)
        old = hub.tags(REPO)
        assert old.keys() == {"step-1", "step-2", "step-4"}
        anew = {"resume_from_checkpoint": "none", "learning_rate": 1e-4, "milestones": [2, 3]}
        hub.faults = faults
        finish([start(PROJECT, "train_clm.py", flags | anew, log, env=env)], log)
        assert not any(fault.times for fault in faults)
        new = hub.tags(REPO)
        assert new.keys() == {"step-1", "step-2", "step-3", "step-4"}
        for tag, files in new.items():
            made = run / "milestones" / (tag if tag in ("step-2", "step-3") else f"replaced-{tag}")
            assert hub.read(files["manifest.json"]) == (made / "manifest.json").read_bytes()
    old, new = (tags["step-2"]["model.safetensors"]["sha256"] for tags in (old, new))
    names = {"step-2", "step-3", "replaced-step-1", "replaced-step-2", "replaced-step-4"}
    assert set(os.listdir(run / "milestones")) == names
    read = {name: sha256((run / "milestones" / name / "model.safetensors").read_bytes()) for name in names}
    assert (read["replaced-step-2"], read["step-2"]) == (old, new) and old != new


@pytest.fixture(scope="module")
def tiny():
    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    tokenizer = Fast(tokenizer_object=words, eos_token="<s>")
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 2, "bos_token_id": 0, "eos_token_id": 0}
    return Accelerator(cpu=True), CausalLMLoss(GPT2LMHeadModel(GPT2Config(**sizes))), tokenizer


def test_one_made_again_comes_back_untouched_and_another_is_set_aside(tiny, tmp_path):
    accelerator, model, tokenizer = tiny
    folder = tmp_path / "milestones"

    def keep(step):
        with torch.no_grad():
            model.lm.transformer.wte.weight.fill_(step)
        keep_milestone(accelerator, model, tokenizer, tmp_path, step)
        return inode(folder / f"step-{step}")

    made = {step: keep(step) for step in (1, 2, 10)}
    assert [step_of(path) for path in list_milestones(tmp_path)] == [1, 2, 10]
    (folder / ".tmp-step-2").mkdir()
    (folder / ".tmp-step-2/manifest.json").touch()  # of a killed run
    set_aside_newer(list_milestones(tmp_path), 1)  # as a run that goes on from step 1
    assert {path.name for path in folder.glob("*step*")} == {
        "step-1", "replaced-step-2", "replaced-step-10", ".tmp-step-2"
    }  # fmt: skip
    assert keep(1) == made[1] and keep(2) == made[2]
    (folder / "replaced-step-10" / "config.json").write_text("{}")  # damaged
    assert keep(10) != made[10]
    with torch.no_grad():
        model.lm.transformer.wte.weight.fill_(7)
    keep_milestone(accelerator, model, tokenizer, tmp_path, 2)
    assert inode(folder / "replaced-step-2") == made[2]
    names = {"step-1", "step-2", "step-10", "replaced-step-2", "replaced-step-10"}
    assert {path.name for path in folder.iterdir()} == names
    assert [verify_checksums(path) for path in list_milestones(tmp_path)] == ["", "", ""]
    assert AutoModelForCausalLM.from_pretrained(folder / "step-2").transformer.wte.weight.eq(7).all()


def test_the_steps_that_are_meant():
    saves = [*range(300, 1500, 300), 1500]
    powers = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
    assert milestone_steps(["log"], 1500, saves) == powers | {600, 900, 1200, 1500}
    assert milestone_steps(["log"], 100, [50, 100]) == {1, 2, 4, 8, 16, 32, 64}
    assert milestone_steps(["100", 20, "100"], 100) == {20, 100} and milestone_steps([], 5) == set()
    for wrong in (["0"], ["many"], ["log", "4"], ["101"], ["-1"], ["1.5"], ["²"]):
        with pytest.raises(ValueError, match=r"milestones: .*: give log, or steps from 1 to 100, or none"):
            milestone_steps(wrong, 100)
