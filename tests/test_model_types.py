"""Architectures beside GPT-2 and BERT: trained as transformers trains them, or refused in a line."""

import json

import pytest
import torch
import transformers

import train_clm
import train_mlm
from data.tokenizer import train_tokenizer
from tests import forked
from tests.benchmarks.model_types import T, compare, overrides
from tests.runs import TINY, write_corpus
from tests.shard_data import make_texts
from utils.learning.configuration import configure, meta_model
from utils.learning.model import build_model, model_problems
from utils.learning.overrides import in_proportion, setting


@pytest.fixture(scope="module")
def texts():
    return make_texts(60)


def tokenizer_for(mapping, model_type, texts):
    return train_tokenizer(texts, "bpe" if mapping == "causal" else "unigram", 400, model_type)


@pytest.mark.parametrize(
    ("mapping", "model_type", "more"),
    [
        ("causal", "mixtral", {"output_router_logits": True}),  # an auxiliary loss, in training alone
        pytest.param("causal", "jetmoe", {"output_router_logits": True},  # its weight has another name
                     marks=pytest.mark.skipif(transformers.__version__ < "5.18", reason="gives no loss")),
        ("causal", "camembert", {}),  # positions after the pad id
        ("causal", "xlm", {}),  # left to right by a setting of its own
        ("causal", "modernbert-decoder", {}),  # cannot be without a pad id, GPT-2's tokenizer is
        ("causal", "gemma4_text", {}),  # settings by layer
        ("causal", "jamba", {}),  # linear attention beside attention
        ("masked", "esm", {}),  # a bias outside its projection
        ("masked", "luke", {}),  # parts that are not for text
        ("masked", "xmod", {}),  # adapters by language
    ],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_transformers(mapping, model_type, more, texts, tmp_path):
    """At weights with noise on them: a bias that is still 0 would hide that nothing trains it."""
    tokenizer = tokenizer_for(mapping, model_type, texts)
    settings = json.dumps(overrides(model_type) | more)
    assert model_problems(mapping, model_type, settings, None, T) == []  # before there is a tokenizer
    torch.manual_seed(0)
    build_model(mapping, model_type, settings, None, T, tokenizer).save_pretrained(tmp_path)
    compare(mapping, tmp_path, tokenizer)


@pytest.mark.parametrize("model_type", "llama qwen3 mistral gpt_neox opt mamba bert roberta".split())
def test_other_types_are_as_small_as_the_default_one(model_type, texts):
    """Without a word about sizes: those that are not named keep the type's own proportions."""
    mapping, script = ("masked", train_mlm) if "bert" in model_type else ("causal", train_clm)
    tokenizer = tokenizer_for(mapping, model_type, texts)
    of = mapping, model_type, script.SMALL, None, T, tokenizer
    assert model_problems(*of) == []
    lm = build_model(*of)
    assert setting(lm.config, "hidden_size") == 128 and lm.num_parameters() < 3e6
    lm(input_ids=torch.ones(2, T, dtype=torch.long)).logits.mean().backward()


@pytest.mark.parametrize(
    ("model_type", "chosen", "expected"),
    [
        ("mistral", {"hidden_size": 256, "num_attention_heads": 8},
         {"intermediate_size": 896, "num_key_value_heads": 2}),
        ("qwen3", {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 64},
         {"intermediate_size": 688, "num_key_value_heads": 4}),
        ("opt", {"hidden_size": 128}, {"ffn_dim": 512}),
        ("llama", {"hidden_size": 128, "intermediate_size": 300}, {}),
        ("gpt2", {"n_embd": 128, "n_head": 4}, {}),
        ("bert", {"hidden_size": 768}, {}),
    ],
)  # fmt: skip
def test_sizes_that_are_not_chosen_keep_their_proportion(model_type, chosen, expected):
    default = transformers.AutoConfig.for_model(model_type)
    found = in_proportion(default, chosen)
    assert found == expected and not found.keys() & chosen.keys()


@pytest.mark.parametrize("model_type", ["qwen3", "opt"])
def test_another_type_just_trains_beside_the_defaults(model_type, tmp_path):
    flags = {name: value for name, value in TINY.items() if name != "config_overrides"}
    flags |= {"dataset_name": write_corpus(tmp_path / "corpus.jsonl", 20), "max_train_steps": 2,
              "num_warmup_steps": 0, "cache_dir": tmp_path / "cache", "output_dir": tmp_path / "run",
              "eval_at_start": False, "save_steps": 2, "eval_steps": 2}  # fmt: skip
    done = forked.run("train_clm.py", {**flags, "model_type": model_type})
    assert done.returncode == 0 and "loss/eval" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("model_type", "sizes", "fit"),
    [
        ("deepseek_v3", "hidden_size=64,num_attention_heads=2", True),  # 5.9 B where the others stay
        ("axk1", "hidden_size=64,num_attention_heads=2", True),
        ("qwen3_moe", "num_attention_heads=4,num_key_value_heads=3", False),
        ("youtu", "hidden_size=64,num_hidden_layers=2,head_dim=18", False),
        ("gptj", "hidden_size=128,num_hidden_layers=2,num_attention_heads=4", False),
    ],
)
def test_sizes_that_do_not_fit_are_told_before_the_start(model_type, sizes, fit):
    """By a forward pass on the meta device."""
    config, problems = configure("causal", model_type, sizes, None, T, None)
    assert len(problems) == (not fit), problems
    if problems:
        assert problems[0].startswith(f"config_overrides, {sizes!r}: "), problems
    else:
        assert meta_model("causal", config).num_parameters() < 2e8


@pytest.mark.parametrize(
    ("mapping", "model_type", "reason"),
    [
        ("causal", "bart", "an encoder-decoder"),
        ("masked", "mvp", "an encoder-decoder"),
        ("causal", "trocr", "attends to an encoder"),
        ("causal", "gemma3", "for more than text; its text part: gemma3_text"),
        ("causal", "gemma4_assistant", "made of text_config"),
        ("causal", "cpmant", "attends in both directions"),
        ("causal", "t5", "no causal language model of this type"),
    ],
)
def test_what_needs_more_than_text_is_refused_by_its_property(mapping, model_type, reason):
    (problem,) = model_problems(mapping, model_type, "", None, T)
    assert problem.startswith(f"model_type, '{model_type}': ") and reason in problem


def test_what_text_does_not_reach_is_not_waited_for(texts):
    """DDP would wait for the gradients of FNet's pooler."""
    tokenizer = tokenizer_for("masked", "fnet", texts)
    lm = build_model("masked", "fnet", json.dumps(overrides("fnet")), None, T, tokenizer)
    frozen = {name for name, parameter in lm.named_parameters() if not parameter.requires_grad}
    assert frozen == {"fnet.pooler.dense.weight", "fnet.pooler.dense.bias"}
    assert all(parameter.grad is None for parameter in lm.parameters()) and lm.training


def test_types_of_each_kind_go_through_the_scripts():
    """Three steps on one and two processes, killed and resumed: the whole table is made in the same way."""
    done = forked.run("tests.benchmarks.model_types", ["--types", "mamba,fnet,bart"])
    assert done.stdout.splitlines()[-2:] == [
        "causal: 1 ok, 1 refused, 0 failed", "masked: 1 ok, 1 refused, 0 failed",
    ], done.stdout + done.stderr  # fmt: skip


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "blt"])
def test_a_saved_model_generates_though_transformers_cache_does_not_fit_it(model_type, texts, tmp_path):
    """Without an attention layer in so few, and where their number has no usual name."""
    sizes = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4"
    sizes = json.dumps(overrides(model_type)) if model_type == "blt" else sizes
    tokenizer = tokenizer_for("causal", model_type, texts)
    build_model("causal", model_type, sizes, None, T, tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipe = transformers.pipeline("text-generation", str(tmp_path))
    assert pipe("import os", max_new_tokens=4)[0]["generated_text"].startswith("import os")
