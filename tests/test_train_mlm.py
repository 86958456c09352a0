"""train_mlm.py on one and two forked processes, as masked LM alone and with next-sentence prediction."""

import json
import random
import re
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
from tests.runs import TINY, assert_same_metrics, first_moments, metrics, write_english

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
    write_english(folder / "notes.jsonl", part=120)  # short, so that pairs do not fill a row
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
    """Run each of the settings. Returns [(status, stdout, stderr)]."""
    done = [forked.run("train_mlm.py", flags) for flags in settings]
    return [(each.returncode, each.stdout, each.stderr) for each in done]


SPLITS = {"4x2": (4, 2), "8x1": (8, 1)}  # micro-batches x rows; the complete runs are 1x8 and 2 x 1x4


@pytest.fixture(scope="module")
def runs(workspace):
    """{name: output folder} of both kinds: runs on 1 and 2 processes, and one step in micro-batches."""
    settings = {}
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
    return {name: Path(flags["output_dir"]) for name, flags in settings.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_does_not_depend_on_micro_batches_or_processes(runs, kind):
    """Although rows differ in the number of predictions: equal to 1e-6 relative, with pairs and padding."""
    gradients = {split: first_moments(runs[f"{kind}-{split}"]) for split in ("1", "2", *SPLITS)}
    reference = gradients.pop("1")
    assert reference.norm() > 0
    for name, gradient in gradients.items():
        assert (gradient - reference).norm() <= 1e-6 * reference.norm(), name


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_equal_one(runs, kind):
    """Including masks, and the evaluation, whose last batch has padding rows."""
    assert_same_metrics(runs[f"{kind}-1"], runs[f"{kind}-2"])


def test_evaluation_masks_do_not_depend_on_mlm_probability(workspace, runs):
    """With equal weights at step 0 the evaluations are equal. Training differs."""
    changed = flags(workspace, "mlm-15", mlm_probability=0.15)
    ((status, _, err),) = run_all([changed])
    assert status == 0, err
    usual, fewer = metrics(runs["mlm-1"]), metrics(workspace / "mlm-15")
    assert usual[0] == fewer[0] and "loss/mlm" in usual[0]
    assert usual[-1]["loss/mlm"] != fewer[-1]["loss/mlm"]


def evaluation_batch(workspace, kind, n):
    """The rows of the validation split that the run evaluates, at most n, before masking."""
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
def test_evaluation_equals_transformers_heads(workspace, runs, kind):
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
        is_next = batch["next_sentence_label"]
        pair_losses = F.cross_entropy(out.seq_relationship_logits, is_next, reduction="none")
        pairs.append((pair_losses, torch.ones_like(pair_losses)))
    moves = sum((n - n.sum() / d.sum() * d) / d.sum() for n, d in pairs).detach()
    error = (len(moves) / (len(moves) - 1) * moves.square().sum()).sqrt().item()
    assert line["loss/eval_stderr"] == pytest.approx(error, rel=1e-4)
    predicted = labels != -100
    accuracy = (logits.argmax(-1) == labels)[predicted].float().mean().item()
    assert line["accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_checkpoint_loads_with_both_heads(runs):
    """With BertForPreTraining, as in the AMD article. Its configuration is that of the exported model."""
    checkpoint = runs["nsp-1"] / "checkpoints" / "step-00000006"
    model, loading = BertForPreTraining.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(loading.values()), loading
    exported = BertForPreTraining.from_pretrained(runs["nsp-1"]).state_dict()
    assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())
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
    assert saved["padding"] is None and saved["truncation"] is None  # the samples do not change it
    if kind == "mlm":
        assert config.max_position_embeddings == block_size + tokenizer.pad_token_id + 1
    else:
        assert config.type_vocab_size == 2 and config.max_position_embeddings == block_size


def test_resume_and_repeated_evaluation_are_identical(workspace, runs):
    """A run resumed from step 3 leaves the same metrics and weights, so its masks are the same. Repeated
    evaluations are identical, on two processes equal to 1e-6."""
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
        lines = metrics(runs[f"{kind}-1"])
        assert metrics(workspace / f"{kind}-resumed") == lines
        weights = load_file(workspace / f"{kind}-resumed" / "model.safetensors")
        for name, value in load_file(runs[f"{kind}-1"] / "model.safetensors").items():
            assert torch.equal(value, weights[name]), name
        first, second = (json.loads(out.splitlines()[-1]) for _, out, _ in results[2 + 2 * i : 4 + 2 * i])
        line = [line for line in lines if "loss/eval" in line][-1]
        assert first == second == {key: value for key, value in line.items() if key not in ("step", "tokens")}
        assert "finished" in results[6 + i][1]
        on_two = again[2 * i] | {"per_device_eval_batch_size": 7}
        on_two = json.loads(forked.run("train_mlm.py", on_two, processes=2).stdout.splitlines()[-1])
        assert on_two == pytest.approx(first, rel=1e-6)


def test_snippets_of_a_sentence_pair_card_run(runs, capsys):
    """tests/test_saved_models.py runs the cards of other models."""
    card = (runs["nsp-1"] / "README.md").read_text()
    fill, next_sentence = re.findall(r"```python\n(.*?)```", card, re.S)
    exec(fill, {})
    assert "token_str" in capsys.readouterr().out
    exec(next_sentence, {})
    assert sum(json.loads(capsys.readouterr().out)[0]) == pytest.approx(1)


def test_next_sentence_is_learned(workspace):
    """Sentences of a document share a word: on held-out text the model recognizes the true next sentence."""
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
