"""FSDP2 through accelerate, fsdp.yaml and hsdp.yaml, on CPU processes (fsdp_on_cpu.py), against one process.

The runs are forked (tests/forked.py) with what the launcher hands on; a slow one is launched.
"""

import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import forked, runs
from tests.runs import PROJECT, TINY, arguments, environment, fsdp_environment, metrics, write_corpus


def settings(workspace, name, **changes):
    return TINY | {
        "dataset_name": workspace / "corpus.jsonl", "cache_dir": workspace / "cache", "prompts": "none",
        "output_dir": workspace / name, "gradient_accumulation_steps": 2,
        "keytokens": ["import", "self"], **changes,
    }  # fmt: skip


CONFIG = ["--config_file", "accelerate_configs/fsdp.yaml", "--num_processes", "2", "--mixed_precision", "no"]
SCRIPT = "tests/fsdp_on_cpu.py"


def launched(flags):
    """Under fsdp.yaml."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *CONFIG, SCRIPT, "train_clm"]
    return subprocess.run([*command, *arguments(flags)], cwd=PROJECT, env=environment(2), capture_output=True,
                          text=True, timeout=runs.PATIENCE)  # fmt: skip


def sharded(flags, *words, script="train_clm"):
    """The same, forked."""
    env = fsdp_environment(2, *words)
    assert env["ACCELERATE_USE_FSDP"] == "true"
    return forked.run(SCRIPT, [script, *arguments(flags)], 2, env=env)


def assert_same_run(a, b):
    for x, y in zip(metrics(a), metrics(b), strict=True):
        assert x.keys() == y.keys()
        for key in x:
            assert x[key] == pytest.approx(y[key], rel=runs.tolerance(key, 2e-5)), (x, y)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Holds `whole`, a run of one process, and `cut`, the same run sharded over two."""
    folder = tmp_path_factory.mktemp("fsdp")
    write_corpus(folder / "corpus.jsonl")
    one = forked.run("train_clm.py", settings(folder, "whole"))
    assert one.returncode == 0, one.stderr[-3000:]
    two = sharded(settings(folder, "cut", per_device_train_batch_size=4))
    assert two.returncode == 0, two.stderr[-3000:]
    assert "2 processes (FSDP)" in two.stdout
    return folder


def test_trains_evaluates_and_clips_like_one_process(workspace):
    """Key-token weights, clipping by the norm over all shards, tied weights, evaluation."""
    assert_same_run(workspace / "whole", workspace / "cut")


NEW = hasattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint")


@pytest.mark.skipif(not NEW, reason="accelerate's compilation of blocks under FSDP needs a newer torch")
def test_compiled_by_blocks_it_is_the_same_run(workspace):
    flags = settings(workspace, "compiled", per_device_train_batch_size=4)
    done = sharded(flags, "--dynamo_backend", "aot_eager")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled with aot_eager" in done.stdout and "warning: " not in done.stdout
    assert_same_run(workspace / "compiled", workspace / "cut")


@pytest.mark.parametrize("kind", ["modernbert", "roberta"])
def test_masked_models_share_the_table_of_their_head_with_the_embeddings(workspace, kind):
    """transformers names the embeddings as a unit, which FSDP would part from the head."""
    shape = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64"
    flags = {"model_type": kind, "config_overrides": shape, "gradient_accumulation_steps": 1}
    flags["config_overrides"] += ",hidden_dropout_prob=0,attention_probs_dropout_prob=0" * (kind == "roberta")
    one, two = (settings(workspace, f"{kind}-{n}", per_device_train_batch_size=8 // n, **flags)
                for n in (1, 2))  # fmt: skip
    for each in (one, two):
        del each["keytokens"], each["keywords"]
    alone, both = forked.run("train_mlm.py", one), sharded(two, script="train_mlm")
    assert alone.returncode == both.returncode == 0, (alone.stderr + both.stderr)[-3000:]
    assert_same_run(one["output_dir"], two["output_dir"])


def test_in_bfloat16_losses_are_not_rounded_to_it(workspace):
    """It would have eight bits: between 4 and 8 each row's loss would be a multiple of 1/32."""
    flags = settings(workspace, "bfloat16", per_device_train_batch_size=4, max_train_steps=2)
    done = sharded(flags, "--mixed_precision", "bf16")
    assert done.returncode == 0, done.stderr[-3000:]
    [whole, rounded] = (metrics(workspace / name)[0] for name in ("whole", "bfloat16"))
    rows = rounded["eval_tokens"] / (TINY["block_size"] - 1)
    assert 4 < rounded["loss/eval"] < 8 and rounded["loss/eval"] * rows * 32 % 1
    assert rounded["loss/eval"] == pytest.approx(whole["loss/eval"], rel=1e-4)


def test_replicas_of_shards_are_the_same_run(workspace):
    """HSDP: two replicas of two shards; and one process continues it."""
    flags = settings(workspace, "replicas", per_device_train_batch_size=2)
    words = ["--num_machines", "1", "--parallelism_config_dp_shard_size", "2", "--mixed_precision", "no"]
    env = fsdp_environment(4, *words, yaml="hsdp")
    done = forked.run(SCRIPT, ["train_clm", *arguments(flags)], 4, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(workspace / "whole", workspace / "replicas")
    shutil.rmtree(flags["output_dir"] / "checkpoints" / "step-00000006")
    shards = (flags["output_dir"] / "checkpoints/step-00000003").glob("model-*-of-00004.safetensors")
    assert len([*shards]) == 2
    alone = forked.run("train_clm.py", flags | {"per_device_train_batch_size": 8})
    assert alone.returncode == 0, alone.stderr[-3000:]
    assert_same_run(workspace / "whole", workspace / "replicas")


@pytest.mark.slow
def test_launched_it_is_the_same_run(workspace):
    done = launched(settings(workspace, "launched", per_device_train_batch_size=4))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 processes (FSDP)" in done.stdout
    assert_same_run(workspace / "launched", workspace / "cut")


def test_the_saved_model_is_complete_and_loads(workspace):
    whole, cut = (load_file(workspace / name / "model.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    for name in whole:
        # Muon's iteration makes as much of what rounding leaves in a gradient as of the gradient.
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-3, atol=2e-4)
    lm = AutoModelForCausalLM.from_pretrained(workspace / "cut")
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert torch.equal(lm.lm_head.weight, cut["model.embed_tokens.weight"])


@pytest.mark.parametrize("how", ["sharded", "one process", "two processes"])
def test_a_sharded_checkpoint_continues_anywhere(workspace, how):
    rows = 8 if how == "one process" else 4
    flags = settings(workspace, how.replace(" ", "-"), per_device_train_batch_size=rows)
    shutil.copytree(workspace / "cut", flags["output_dir"])
    shutil.rmtree(flags["output_dir"] / "checkpoints" / "step-00000006")
    shards = (flags["output_dir"] / "checkpoints/step-00000003").glob("model-*-of-00002.safetensors")
    assert len([*shards]) == 2
    if how == "sharded":
        done = sharded(flags)
    else:
        done = forked.run("train_clm.py", flags, processes=1 if how == "one process" else 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(workspace / "cut", flags["output_dir"])
