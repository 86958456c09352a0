"""Other architectures have the losses and gradients of transformers, or are refused in one line."""

import json

import pytest
import torch
import transformers

from tests import forked
from tests.benchmarks.model_types import T, compare, overrides
from tests.runs import TINY, metrics, write_corpus
from tests.test_model import build, settings, tokenizer
from utils.learning.model import check_model

SMALL = "hidden_size=64,num_hidden_layers=2,intermediate_size=64,num_attention_heads=2"


@pytest.mark.parametrize(
    ("mapping", "model_type", "more"),
    [
        ("causal", "mixtral", {"output_router_logits": True}),  # an auxiliary loss in training
        pytest.param("causal", "jetmoe", {"output_router_logits": True},  # its weight has another name
                     marks=pytest.mark.skipif(transformers.__version__ < "5.18", reason="gives no loss")),
        ("causal", "camembert", {}),  # positions after the pad id
        ("causal", "xlm", {}),  # causal by a setting
        ("causal", "gemma4_text", {}),  # settings for each layer
        ("causal", "jamba", {}),  # Mamba and attention layers
        ("causal", "bart", {}),  # cross-attention is frozen
        ("masked", "esm", {}),  # a bias outside its projection
        ("masked", "luke", {}),  # parameters for entities
    ],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_transformers(mapping, model_type, more, tmp_path):
    """compare() adds noise to the weights: a bias of 0 would hide that it gets no gradient."""
    words, sizes = tokenizer(words=400), json.dumps(overrides(model_type) | more)
    assert check_model(settings(model_type, sizes, T), mapping) == []  # before there is a tokenizer
    torch.manual_seed(0)
    build(mapping, model_type, sizes, T, words=words).save_pretrained(tmp_path)
    compare(mapping, tmp_path, words)


@pytest.mark.parametrize(
    ("mapping", "model_type", "sizes", "reason"),
    [
        ("causal", "llama", SMALL + ",num_key_value_heads=4", ".*num_key_value_heads is 4"),
        ("causal", "lfm2", SMALL, ".*num_key_value_heads is 8"),
        ("causal", "youtu", SMALL + ",head_dim=18", ".*size"),
        ("causal", "gptj", "n_embd=128,n_layer=2,n_head=4", ".*size"),
        ("pretraining", "roberta", SMALL, "has no next-sentence head; choose bert"),
    ],
)
def test_sizes_and_heads_that_do_not_fit_are_refused_with_their_reason(mapping, model_type, sizes, reason):
    with pytest.raises(ValueError, match=f"model_type, '{model_type}': {reason}"):
        build(mapping, model_type, sizes, T, words=tokenizer(words=400))


@pytest.mark.parametrize(
    ("mapping", "model_type", "reason"),
    [
        ("causal", "gemma3", "for more than text; its text part: gemma3_text"),
        ("causal", "gemma4_assistant", "it has text_config, so"),
        ("causal", "t5", "no causal language model of this type"),
        ("masked", "bart", "an encoder-decoder"),
        ("causal", "cpmant", "a token sees the next one"),
        ("masked", "reformer", "cannot be trained on token ids alone"),
    ],
)
def test_models_not_made_for_text_alone_are_refused_with_their_reason(mapping, model_type, reason):
    sizes = json.dumps(overrides(model_type)) if model_type in ("cpmant", "reformer") else ""
    of = settings(model_type, sizes, T)
    problems = check_model(of, mapping)
    if not problems:  # only a built model shows it
        with pytest.raises(ValueError) as error:
            build(mapping, model_type, sizes, T, words=tokenizer(words=400))
        problems = [str(error.value)]
    assert len(problems) == 1 and problems[0].startswith(f"model_type, '{model_type}': "), problems
    assert reason in problems[0] and "\n" not in problems[0]


def test_parameters_that_text_does_not_reach_do_not_stop_two_processes(tmp_path):
    """FNet has the same losses on two processes as on one."""
    flags = TINY | {
        "dataset_name": write_corpus(tmp_path / "corpus.jsonl", 12), "cache_dir": tmp_path / "cache",
        "model_type": "fnet", "config_overrides": json.dumps(overrides("fnet")), "max_train_steps": 3,
        "optimizer_type": "adamw", "prompts": "none",
    }  # fmt: skip
    del flags["keywords"]
    losses = []
    for processes in (1, 2):
        rows = {"per_device_train_batch_size": 8 // processes, "output_dir": tmp_path / str(processes)}
        done = forked.run("train_mlm.py", flags | rows, processes)
        assert done.returncode == 0, done.stderr[-2000:]
        losses.append([line["loss/train"] for line in metrics(rows["output_dir"]) if "loss/train" in line])
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-5)
