"""What computes attention: a setting of both scripts that changes no loss, or is refused with its reason."""

import json
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from tests import forked
from tests.runs import TINY, metrics, write_corpus
from tests.test_model import BERT, GPT2, tokenizer
from utils.learning.losses import CausalLMLoss, MaskedLMLoss
from utils.learning.model import MODEL_CLASSES, _without_attention, build_model, model_problems

NO_DROPOUT = ",resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
SHAPES = {
    "gpt2": ("causal", GPT2 + NO_DROPOUT),
    "modernbert": ("masked", BERT + ",local_attention=8"),
    "bert": ("masked", BERT + ",hidden_dropout_prob=0,attention_probs_dropout_prob=0"),
}


def losses(model_type, attention, T=24):
    """The loss and its gradients; of a masked model one row in two is padded."""
    kind, overrides = SHAPES[model_type]
    torch.manual_seed(0)
    lm = build_model(kind, model_type, overrides, None, T, tokenizer(), attention)
    ids = torch.randint(6, 50, (2, T))
    if kind == "causal":
        loss = CausalLMLoss(lm)({"input_ids": ids})[0]
    else:
        mask = torch.ones_like(ids)
        mask[1, T // 2 :] = 0
        slots = torch.arange(0, T // 2, 3).expand(2, -1)
        batch = {"input_ids": ids, "attention_mask": mask, "slots": slots, "slot_labels": slots + 6}
        loss = MaskedLMLoss(lm)(batch)["mlm_loss_sum"] / slots.numel()
    loss.backward()
    return loss.item(), [p.grad for p in lm.parameters() if p.requires_grad], lm.config._attn_implementation


@pytest.mark.parametrize("model_type", SHAPES)
def test_losses_and_gradients_are_the_same_by_each(model_type):
    loss, gradients, named = losses(model_type, "sdpa")
    assert named == "sdpa" and losses(model_type, "auto")[0] == loss  # exactly what transformers takes
    other, theirs, named = losses(model_type, "eager")
    assert named == "eager" and abs(other - loss) < 1e-5
    for mine, other in zip(gradients, theirs, strict=True):
        assert (mine - other).abs().max() < 1e-5


def test_a_model_without_sdpa_gets_what_transformers_takes():
    assert build_model("causal", "bloom", "n_layer=1,hidden_size=32,n_head=2", None, 8, tokenizer()).config \
        ._attn_implementation == "eager"  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "attention", "device", "precision", "reason"),
    [
        ("gpt2", "spda", "cpu", "no", "unknown, give one of auto, eager, sdpa"),
        ("bloom", "sdpa", "cuda", "bf16", "transformers' bloom cannot"),
        ("bloom", "flash_attention_2", "cuda", "bf16", "transformers' bloom cannot"),
        ("bert", "flex_attention", "cpu", "no", "cannot train on cpu"),
        ("bert", "flex_attention", "xla", "no", "cannot train on xla"),
        ("bert", "flex_attention", "cuda", "no", "it has no dropout, which config_overrides has to set to 0"),
        ("llama", "flex_attention", "cuda", "no", ""),
        ("gpt2", "flash_attention_2", "cpu", "bf16", "cannot train on cpu"),
        ("gpt2", "flash_attention_2", "cuda", "bf16", "the package flash-attn is not installed"),
        ("bloom", "eager", "cpu", "no", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_reason(
    model_type, attention, device, precision, reason, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    config = AutoConfig.for_model(model_type)
    kind = "masked" if model_type == "bert" else "causal"
    made = MODEL_CLASSES[kind]._model_mapping[type(config)]
    found = _without_attention(attention, made, config, device)
    assert found.startswith(reason) and bool(found) == bool(reason)
    if device == "cpu" and reason:
        (problem,) = model_problems(kind, model_type, "", None, 8, attn_implementation=attention)
        assert problem == f"attn_implementation, {attention!r}: {found}; auto takes what can"


def test_flash_attention_is_refused_in_float32(monkeypatch):
    monkeypatch.setattr("utils.learning.model.is_flash_attn_2_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    config = AutoConfig.for_model("gpt2")
    made = MODEL_CLASSES["causal"]._model_mapping[type(config)]
    refused = "needs --mixed_precision bf16 or fp16 of the launcher"
    assert _without_attention("flash_attention_2", made, config, "cuda") == refused
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert _without_attention("flash_attention_2", made, config, "cuda") == ""


def test_the_head_is_split_though_the_attention_cannot_run_where_the_model_is_built():
    lm = build_model(*SHAPES["modernbert"][:1], "modernbert", BERT, None, 16, tokenizer(), "flex_attention")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MaskedLMLoss(lm).splits_head
    assert lm.config._attn_implementation == "flex_attention"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attention")
    corpus = write_corpus(folder / "corpus.jsonl")
    return {**TINY, "dataset_name": corpus, "cache_dir": folder / "cache", "output_dir": folder / "run",
            "max_train_steps": 3, "eval_at_start": False}  # fmt: skip


@pytest.mark.parametrize("script", ["train_clm.py", "train_mlm.py"])
def test_a_run_says_what_is_used_and_saves_what_transformers_loads(script, flags, tmp_path):
    mine = {**flags, "output_dir": tmp_path}
    made = AutoModelForCausalLM
    if script == "train_mlm.py":
        mine |= {"config_overrides": BERT + ",local_attention=8", "prompts": ["none"]}
        made = AutoModelForMaskedLM
    done = forked.run(script, {**mine, "attn_implementation": "eager"})
    assert done.returncode == 0 and "parameters, attention: eager\n" in done.stdout
    record = json.loads((tmp_path / "args.json").read_text())
    assert (record["attention"], record["settings"]["attn_implementation"]) == ("eager", "eager")
    assert "attn" not in "".join(key for key in json.loads((tmp_path / "config.json").read_text())
                                 if "implementation" in key)  # fmt: skip
    assert made.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_a_run_goes_on_with_another(flags):
    first = forked.run("train_clm.py", {**flags, "attn_implementation": "eager", "max_train_steps": 3,
                                        "lr_scheduler_type": "constant"})  # fmt: skip
    more = forked.run("train_clm.py", {**flags, "max_train_steps": 4, "lr_scheduler_type": "constant"})
    assert first.returncode == more.returncode == 0, more.stderr
    assert "attention: sdpa\n" in more.stdout and metrics(flags["output_dir"])[-1]["step"] == 4


def test_a_script_refuses_and_writes_nothing(flags, tmp_path):
    folder = tmp_path / "run"
    done = forked.run("train_mlm.py", {"output_dir": folder, "attn_implementation": "flex_attention"})
    assert done.returncode == 2 and not folder.exists()
    assert "attn_implementation, 'flex_attention': cannot train on cpu; auto" in done.stderr
