"""The saved model's files: readable by whoever may read their neighbours, replaced whole; and a full disk."""

import json
import os
import resource
import stat
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests import forked
from tests.runs import PROJECT, TINY, metrics, write_corpus
from utils.io.mistakes import RunFailed
from utils.learning.losses import CausalLMLoss
from utils.publishing.export import save_model

FACTS = {
    "step": 1, "last": 2, "tokens": 8, "seconds": 1.0, "parameters": 100, "results": {},
    "pipeline_tag": "text-generation", "model_type": "gpt2",
    "settings": {"dataset_name": ["text"], "prompts": []},
    "launch": {"processes": 1, "device": "cpu", "precision": "float32", "attention": "sdpa",
               "compiler": "no"},
}  # fmt: skip


def save(tiny, folder, step=1):
    accelerator, lm, tokenizer = tiny
    args = SimpleNamespace(output_dir=str(folder), push_to_hub=False, hub_model_id=None)
    save_model(args, accelerator, CausalLMLoss(lm), tokenizer, FACTS | {"step": step})


@pytest.fixture
def tiny():
    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<s>")
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 2, "bos_token_id": 0, "eos_token_id": 0}
    return Accelerator(cpu=True), GPT2LMHeadModel(GPT2Config(**sizes)), tokenizer


def test_all_files_have_the_mode_that_the_umask_gives(tiny, tmp_path):
    """safetensors writes files that only their owner may read: nobody else could load the model."""
    for mask, mode in ((0o022, 0o644), (0o007, 0o660)):
        before = os.umask(mask)
        try:
            save(tiny, tmp_path)
        finally:
            os.umask(before)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        assert "model.safetensors" in modes and set(modes.values()) == {mode}, modes
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in tiny[1].state_dict().items())


def test_a_tokenizer_of_several_templates_is_saved_each_time(tiny, tmp_path):
    tiny[2].chat_template = templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    for step in (1, 2):
        save(tiny, tmp_path, step)
    assert all(path.is_file() for path in tmp_path.iterdir())
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template == templates


def test_a_full_disk_costs_one_export_and_not_the_model_before(tiny, tmp_path, caplog):
    """Whichever file finds no room, of safetensors, tokenizers or Python; after the last step it is an error.
    The empty folder that is left says that the files are not those of the newest save."""

    def files():
        return {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    save(tiny, tmp_path)
    before, wte = files(), tiny[1].transformer.wte.weight
    with torch.no_grad():
        wte.fill_(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 300, 1000, len(before["model.safetensors"]) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # every larger file: EFBIG
        try:
            save(tiny, tmp_path)
            with pytest.raises(RunFailed, match="^the last model was not saved: .*File too large.*make room"):
                save(tiny, tmp_path, step=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert files() == before and not [*(tmp_path / ".export").iterdir()]
        assert f"the model was not saved in {tmp_path}: " in caplog.text and "File too large" in caplog.text
        caplog.clear()
    save(tiny, tmp_path, step=2)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).transformer.wte.weight.eq(1).all()
    assert not (tmp_path / ".export").exists()


def test_a_card_that_cannot_be_written_is_a_save_that_failed(tiny, tmp_path, caplog):
    (tmp_path / "README.md").mkdir()
    save(tiny, tmp_path)
    assert "Is a directory" in caplog.text and (tmp_path / ".export").exists()


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    return TINY | {"dataset_name": write_corpus(folder / "corpus.jsonl"), "cache_dir": folder / "cache"}


def fill_disk(output_dir):
    """Where the model is written first, config.json finds no space left, until `.export` is gone."""
    full = output_dir.with_name("full")
    full.mkdir(parents=True, exist_ok=True)
    if not (full / "config.json").is_symlink():
        (full / "config.json").symlink_to("/dev/full")
    output_dir.mkdir(exist_ok=True)
    while not (output_dir / ".export").is_symlink():
        with suppress(FileExistsError):  # a model is being saved
            (output_dir / ".export").symlink_to(full)
    return output_dir / ".export"


def assert_saved(output_dir, step):
    weights = load_file(output_dir / f"checkpoints/step-{step:08d}/model.safetensors")
    found = load_file(output_dir / "model.safetensors")
    assert found and all(torch.equal(value, weights[name]) for name, value in found.items())
    assert f"| optimizer steps | {step:,} |" in (output_dir / "README.md").read_text()


def test_training_goes_on_and_a_later_save_has_the_model(flags, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    flags = flags | {"output_dir": run, "max_train_steps": 150, "eval_steps": 150}
    process = forked.start(PROJECT, "train_clm.py", flags, log)
    while not (run / "model.safetensors").exists():
        assert process.is_alive(), log.read_text()
        time.sleep(0.01)
    full = fill_disk(run)
    forked.wait_for(process, log, f"the model was not saved in {run}: [Errno 28] No space left on device")
    full.unlink()
    forked.finish([process], log)
    assert_saved(run, 150)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_last_model_that_found_no_room_is_saved_by_the_same_command(flags, processes, tmp_path):
    """Without training again; until then it fails again. So does the first one, before any step."""
    flags = flags | {"per_device_train_batch_size": 8 // processes}
    line = "\nerror: the {} model was not saved: [Errno 28] No space left on device; make room"
    run = tmp_path / "run"
    full = fill_disk(run)
    done = forked.run("train_clm.py", flags | {"output_dir": run}, processes)
    assert done.returncode == 1 and done.stderr.count(line.format("first")) == 1, done.stderr
    assert "Traceback" not in done.stderr and "step 1/6" not in done.stdout
    full.unlink()
    done = forked.run("train_clm.py", flags | {"output_dir": run}, processes)
    assert done.returncode == 0, done.stderr
    whole, args = metrics(run), json.loads((run / "args.json").read_text())
    (run / "args.json").write_text(json.dumps(args | {"finished": None}))  # as if its last save had failed
    for name in ("model.safetensors", "README.md"):
        (run / name).unlink()
    full = fill_disk(run)
    for _ in range(2):
        done = forked.run("train_clm.py", flags | {"output_dir": run}, processes)
        assert done.returncode == 1 and done.stderr.count("was not saved in") == 1, done.stderr
        assert done.stderr.count(line.format("last")) == 1 and "Traceback" not in done.stderr
        assert not (run / "model.safetensors").exists() and not (run / "README.md").exists()
    full.unlink()
    done = forked.run("train_clm.py", flags | {"output_dir": run}, processes)
    assert done.returncode == 0 and "step 6/6" not in done.stdout, done.stderr
    assert_saved(run, 6)
    assert metrics(run) == whole
    done = forked.run("train_clm.py", flags | {"output_dir": run}, processes)
    assert done.returncode == 0 and "this run is finished" in done.stdout
