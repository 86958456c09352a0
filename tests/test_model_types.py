"""Architectures beside GPT-2 and BERT: trained as transformers trains them, or refused in a line."""

import json

import pytest
import torch
import transformers

from data.tokenizer import train_tokenizer
from tests import forked
from tests.benchmarks.model_types import T, compare, overrides
from tests.shard_data import make_texts
from utils.learning.model import build_model, model_problems


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
