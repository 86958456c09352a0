"""train_mlm.py as users run it, masked LM alone and with next-sentence prediction, at 1 and 2 processes.

All are forked (tests/forked.py) but the slow one, launched.
"""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, BertForPreTraining

from data.batches.masking import MaskTokens
from data.batches.order import evaluation_rows
from tests import forked
from tests.runs import TINY, metrics, run, tolerance, write_english

KINDS = {
    "mlm": {"model_type": "roberta"},
    "nsp": {"model_type": "bert", "next_sentence": True, "block_size": 64},
}
SHAPE = (
    "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,hidden_dropout_prob=0,"
    "attention_probs_dropout_prob=0"
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlm")
    write_english(folder / "english.jsonl")
    write_english(folder / "notes.jsonl", part=120)  # whose pairs fill no row
    return folder


def flags(workspace, name, kind="mlm", **changes):
    return {
        **TINY, "save_steps": 1, "save_total_limit": 6, "config_overrides": SHAPE, "keywords": ["none"],
        "dataset_name": str(workspace / ("notes.jsonl" if kind == "nsp" else "english.jsonl")),
        "cache_dir": str(workspace / "cache"),
        "output_dir": str(workspace / name),
        "prompts": ["The value of an object can [MASK].", "Classes [MASK] names."], **KINDS[kind], **changes,
    }  # fmt: skip


def run_all(settings):
    """[(status, stdout, stderr)] of runs with these settings."""
    done = [forked.run("train_mlm.py", one) for one in settings]
    return [(one.returncode, one.stdout, one.stderr) for one in done]


SPLITS = {"4x2": (4, 2), "8x1": (8, 1)}  # micro-batches x rows; the whole runs below are 1x8 and 2 x 1x4


@pytest.fixture(scope="module")
def runs(workspace):
    """Name -> output folder: for both kinds a run with 1 and with 2 processes, and a step split otherwise."""
    default = flags(
        workspace, "modernbert-1", cache_dir=str(workspace / "cache-modernbert"), model_type="modernbert",
        config_overrides="num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64",
    )  # fmt: skip
    settings = {"modernbert-1": default}
    for kind in KINDS:
        settings[f"{kind}-1"] = flags(workspace, f"{kind}-1", kind)
        for split, (accumulation, rows) in SPLITS.items():
            settings[f"{kind}-{split}"] = flags(
                workspace, f"{kind}-{split}", kind, max_train_steps=1, num_warmup_steps=0, max_eval_samples=8,
                gradient_accumulation_steps=accumulation, per_device_train_batch_size=rows,
            )  # fmt: skip
    for status, _, err in run_all(settings.values()):
        assert status == 0, err
    for kind in KINDS:
        name = f"{kind}-2"
        settings[name] = flags(
            workspace, name, kind, per_device_train_batch_size=4, per_device_eval_batch_size=7
        )
        result = forked.run("train_mlm.py", settings[name], processes=2)
        assert result.returncode == 0, result.stderr[-3000:]
    return {name: Path(one["output_dir"]) for name, one in settings.items()}


def first_moments(output_dir):
    """AdamW's first moments and Muon's momenta after one step, in one vector: shares of the gradients."""
    saved = load_file(output_dir / "checkpoints" / "step-00000001" / "state.safetensors")
    names = (name for name in sorted(saved) if name.endswith(("exp_avg", "momentum_buffer")))
    return torch.cat([saved[name].flatten() for name in names])


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_an_update_does_not_depend_on_its_split(runs, kind):
    """Though rows differ in predicted tokens: the same gradients to 1e-6 relative, with pairs and padding."""
    gradients = {split: first_moments(runs[f"{kind}-{split}"]) for split in ("1", "2", *SPLITS)}
    reference = gradients.pop("1")
    assert reference.norm() > 0
    for name, gradient in gradients.items():
        assert (gradient - reference).norm() <= 1e-6 * reference.norm(), name


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_like_one(runs, kind):
    """The same masks therefore, and the same evaluation, also where a batch has rows of padding."""
    one, two = metrics(runs[f"{kind}-1"]), metrics(runs[f"{kind}-2"])
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=tolerance(key)), (key, a, b)


@pytest.mark.slow
def test_launched_on_two_processes_it_is_the_same_run(workspace, runs):
    """By `accelerate launch`, as tests/test_train_clm.py does it with the other script."""
    changes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 7}
    done = run("train_mlm.py", flags(workspace, "launched", "nsp", **changes), processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert metrics(workspace / "launched") == metrics(runs["nsp-2"])


def test_evaluations_compare_whatever_the_rate_of_training(workspace, runs):
    """The same masks at the beginning, where the weights are the same; and other training."""
    changed = flags(workspace, "mlm-15", mlm_probability=0.15)
    ((status, _, err),) = run_all([changed])
    assert status == 0, err
    usual, fewer = metrics(runs["mlm-1"]), metrics(workspace / "mlm-15")
    assert usual[0] == fewer[0] and "loss/mlm" in usual[0]
    assert usual[-1]["loss/mlm"] != fewer[-1]["loss/mlm"]


def evaluation_batch(workspace, kind, n):
    """What the run saw of the validation split, n rows or less, before it is masked."""
    cache, T = workspace / "cache", KINDS[kind].get("block_size", TINY["block_size"])
    file = next(cache.glob(f"{'pairs' if kind == 'nsp' else 'rows'}-*/validation-*.npy"))
    ids, width = torch.from_numpy(np.load(file).astype(np.int64)), T + 3 if kind == "nsp" else T - 2
    rows = ids[: len(ids) // width * width].view(-1, width)
    drawn = torch.tensor(evaluation_rows(len(rows), n))
    numbers = {"position": drawn, "epoch": torch.zeros_like(drawn), "row": drawn}
    if kind == "mlm":
        return numbers | {"input_ids": rows[drawn]}
    end_of_a, length, label = rows[drawn, T:, None].unbind(1)
    places = torch.arange(T)
    real, second = (places < length).long(), (places >= end_of_a).long()
    return numbers | {"input_ids": rows[drawn, :T], "attention_mask": real, "token_type_ids": real * second,
                      "next_sentence_label": label[:, 0]}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_equals_the_losses_of_transformers_own_heads(workspace, runs, kind):
    folder = runs[f"{kind}-1"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = MaskTokens(tokenizer, 0.15)(evaluation_batch(workspace, kind, 50))
    batch = {name: column for name, column in batch.items() if name not in ("position", "epoch", "row")}
    slots, slot_labels = batch.pop("slots"), batch.pop("slot_labels")
    labels = torch.full_like(batch["input_ids"], -100)
    for row, (places, targets) in enumerate(zip(slots, slot_labels, strict=True)):
        labels[row, places[targets != -100]] = targets[targets != -100]
    line = [line for line in metrics(folder) if "loss/eval" in line][-1]
    assert line["eval_tokens"] == (labels != -100).sum()
    if kind == "mlm":
        out = AutoModelForMaskedLM.from_pretrained(folder).eval()(**batch, labels=labels)
        logits, expected = out.logits, out.loss.item()
        assert line["loss/eval"] == line["loss/mlm"]
    else:
        out = BertForPreTraining.from_pretrained(folder).eval()(**batch, labels=labels)
        logits, expected = out.prediction_logits, out.loss.item()
        nsp = F.cross_entropy(out.seq_relationship_logits, batch["next_sentence_label"]).item()
        assert line["loss/nsp"] == pytest.approx(nsp, rel=1e-5)
        correct = out.seq_relationship_logits.argmax(1) == batch["next_sentence_label"]
        assert line["nsp_accuracy"] == pytest.approx(correct.float().mean().item())
    assert line["loss/eval"] == pytest.approx(expected, rel=1e-5)
    pairs = [(F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1),
              (labels != -100).sum(1))]  # fmt: skip
    if kind == "nsp":
        one = F.cross_entropy(out.seq_relationship_logits, batch["next_sentence_label"], reduction="none")
        pairs.append((one, torch.ones_like(one)))
    moves = sum((n - n.sum() / d.sum() * d) / d.sum() for n, d in pairs).detach()
    error = (len(moves) / (len(moves) - 1) * moves.square().sum()).sqrt().item()
    assert line["loss/eval_stderr"] == pytest.approx(error, rel=1e-4)
    predicted = labels != -100
    accuracy = (logits.argmax(-1) == labels)[predicted].float().mean().item()
    assert line["accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_a_checkpoint_loads_with_both_heads(runs):
    """As the AMD article loads its own; its configuration is that of the model for users."""
    checkpoint = runs["nsp-1"] / "checkpoints" / "step-00000006"
    model, found = BertForPreTraining.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(found.values()), found
    whole = BertForPreTraining.from_pretrained(runs["nsp-1"]).state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    assert (checkpoint / "config.json").read_text() == (runs["nsp-1"] / "config.json").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_configuration_and_tokenizer_agree(runs, kind):
    config, tokenizer = (AutoConfig.from_pretrained(runs[f"{kind}-1"]),
                         AutoTokenizer.from_pretrained(runs[f"{kind}-1"]))  # fmt: skip
    assert config.vocab_size == len(tokenizer)
    assert config.pad_token_id == tokenizer.pad_token_id
    block_size = KINDS[kind].get("block_size", TINY["block_size"])
    assert tokenizer.model_max_length == block_size
    saved = json.loads((runs[f"{kind}-1"] / "tokenizer.json").read_text())
    assert saved["padding"] is None and saved["truncation"] is None  # the samples leave nothing in it
    if kind == "mlm":
        assert config.max_position_embeddings == block_size + tokenizer.pad_token_id + 1
    else:
        assert config.type_vocab_size == 2 and config.max_position_embeddings == block_size


def test_resuming_and_evaluating_again_change_nothing(workspace, runs):
    """A run continued from step 3 leaves the same lines and weights, so its masks are the same; two
    evaluations without training in between give the identical number, two processes the same to 1e-6."""
    resumed, again, finished = [], [], []
    for kind in KINDS:
        shutil.copytree(runs[f"{kind}-1"], workspace / f"{kind}-resumed")
        for step in (4, 5, 6):
            shutil.rmtree(workspace / f"{kind}-resumed" / "checkpoints" / f"step-0000000{step}")
        resumed.append(flags(workspace, f"{kind}-resumed", kind))
        again += [flags(workspace, f"{kind}-1", kind, eval_only=True)] * 2
        finished.append(flags(workspace, f"{kind}-1", kind))
    results = run_all(resumed + again + finished)
    assert [status for status, _, _ in results] == [0] * 8, results
    for i, kind in enumerate(KINDS):
        whole = metrics(runs[f"{kind}-1"])
        assert metrics(workspace / f"{kind}-resumed") == whole
        weights = load_file(workspace / f"{kind}-resumed" / "model.safetensors")
        for name, value in load_file(runs[f"{kind}-1"] / "model.safetensors").items():
            assert torch.equal(value, weights[name]), name
        first, second = (json.loads(out.splitlines()[-1]) for _, out, _ in results[2 + 2 * i : 4 + 2 * i])
        line = [line for line in whole if "loss/eval" in line][-1]
        assert first == second == {key: value for key, value in line.items() if key not in ("step", "tokens")}
        assert "finished" in results[6 + i][1]
        on_two = again[2 * i] | {"per_device_eval_batch_size": 7}
        on_two = json.loads(forked.run("train_mlm.py", on_two, processes=2).stdout.splitlines()[-1])
        assert on_two == pytest.approx(first, rel=1e-6)


def test_the_fill_mask_pipeline_loads_the_output_folder_in_a_fresh_process(runs):
    code = """
import sys
from transformers import pipeline
for folder in sys.argv[1:]:
    fill = pipeline("fill-mask", model=folder)
    print([guess["token_str"] for guess in fill(f"It is {fill.tokenizer.mask_token}.", top_k=5)])
"""
    folders = [str(runs[f"{kind}-1"]) for kind in (*KINDS, "modernbert")]
    result = forked.run_code(code, folders, folder="/")
    assert result.returncode == 0, result.stderr[-2000:]
    assert [len(eval(line)) for line in result.stdout.strip().splitlines()] == [5, 5, 5]
    assert "warning" not in result.stderr.lower()


def test_next_sentence_is_learned(workspace):
    """On held-out documents B is told apart, where the sentences of a document share a subject, a word."""
    rng = random.Random(0)
    with open(workspace / "subjects.jsonl", "w") as out:
        for _ in range(400):
            words = [rng.choice("cats dogs mice bees fish birds cows ants".split())] * 4 + ["of", "and"]
            text = " ".join("It " + " ".join(rng.choices(words, k=5)) + "." for _ in range(12))
            out.write(json.dumps({"text": text}) + "\n")
    settings = flags(
        workspace, "subjects", "nsp", dataset_name=str(workspace / "subjects.jsonl"), block_size=32,
        vocab_size=100, max_train_steps=300, num_warmup_steps=20, eval_steps=300, save_steps=300,
        learning_rate=2e-3, per_device_train_batch_size=32, max_eval_samples=0, validation_fraction=0.2,
        adam_beta2=0.99, optimizer_type="adamw", mlm_probability=0.15,
        config_overrides=SHAPE.replace("hidden_size=32", "hidden_size=64"),
    )  # fmt: skip
    [(status, _, err)] = run_all([settings])
    assert status == 0, err
    line = [line for line in metrics(workspace / "subjects") if "loss/eval" in line][-1]
    assert line["nsp_accuracy"] > 0.7, line
