"""FSDP2 by fsdp.yaml and hsdp.yaml on CPU processes (fsdp_on_cpu.py), compared with one process.

The runs are forked (tests/forked.py) with the environment that `accelerate launch` sets; a slow one launches.
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
    """Run by `accelerate launch` with fsdp.yaml."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *CONFIG, SCRIPT, "train_clm"]
    return subprocess.run([*command, *arguments(flags)], cwd=PROJECT, env=environment(2), capture_output=True,
                          text=True, timeout=runs.PATIENCE)  # fmt: skip


def sharded(flags, *words, script="train_clm"):
    """Run on two forked processes with the environment of fsdp.yaml."""
    env = fsdp_environment(2, *words)
    assert env["ACCELERATE_USE_FSDP"] == "true"
    return forked.run(SCRIPT, [script, *arguments(flags)], 2, env=env)


def assert_same_run(a, b):
    runs.assert_same_metrics(a, b, 2e-5)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with `whole`, a run of one process, and `cut`, the same run sharded over two."""
    folder = tmp_path_factory.mktemp("fsdp")
    write_corpus(folder / "corpus.jsonl")
    done = forked.run("train_clm.py", settings(folder, "whole"))
    assert done.returncode == 0, done.stderr[-3000:]
    two = sharded(settings(folder, "cut", per_device_train_batch_size=4))
    assert two.returncode == 0, two.stderr[-3000:]
    assert "2 processes (FSDP)" in two.stdout
    return folder


def test_sharded_run_equals_one_process(workspace):
    """With key-token weights, clipping by the norm over all shards, tied weights and evaluation."""
    assert_same_run(workspace / "whole", workspace / "cut")


NEW = hasattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint")


@pytest.mark.skipif(not NEW, reason="accelerate's compilation of blocks under FSDP needs a newer torch")
def test_compiled_sharded_run_equals_eager(workspace):
    flags = settings(workspace, "compiled", per_device_train_batch_size=4)
    done = sharded(flags, "--dynamo_backend", "aot_eager")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled with aot_eager" in done.stdout and "warning: " not in done.stdout
    assert_same_run(workspace / "compiled", workspace / "cut")


@pytest.mark.parametrize("kind", ["modernbert", "roberta"])
def test_masked_models_keep_tied_embeddings_when_sharded(workspace, kind):
    """transformers lists the embeddings as an FSDP unit, which would separate them from the head."""
    shape = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64"
    flags = {"model_type": kind, "config_overrides": shape, "gradient_accumulation_steps": 1}
    flags["config_overrides"] += ",hidden_dropout_prob=0,attention_probs_dropout_prob=0" * (kind == "roberta")
    single, double = (settings(workspace, f"{kind}-{n}", per_device_train_batch_size=8 // n, **flags)
                for n in (1, 2))  # fmt: skip
    for each in (single, double):
        del each["keytokens"], each["keywords"]
    alone, both = forked.run("train_mlm.py", single), sharded(double, script="train_mlm")
    assert alone.returncode == both.returncode == 0, (alone.stderr + both.stderr)[-3000:]
    assert_same_run(single["output_dir"], double["output_dir"])


def test_losses_are_not_rounded_to_bfloat16(workspace):
    """In bfloat16, with eight bits, each row's loss between 4 and 8 would be a multiple of 1/32."""
    flags = settings(workspace, "bfloat16", per_device_train_batch_size=4, max_train_steps=2)
    done = sharded(flags, "--mixed_precision", "bf16")
    assert done.returncode == 0, done.stderr[-3000:]
    [exact, rounded] = (metrics(workspace / name)[0] for name in ("whole", "bfloat16"))
    rows = rounded["eval_tokens"] / (TINY["block_size"] - 1)
    assert 4 < rounded["loss/eval"] < 8 and rounded["loss/eval"] * rows * 32 % 1
    assert rounded["loss/eval"] == pytest.approx(exact["loss/eval"], rel=1e-4)


def test_hsdp_run_equals_one_process(workspace):
    """Two replicas of two shards. One process resumes the run, too."""
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
def test_launched_sharded_run_equals_forked(workspace):
    done = launched(settings(workspace, "launched", per_device_train_batch_size=4))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 processes (FSDP)" in done.stdout
    assert_same_run(workspace / "launched", workspace / "cut")


def test_sharded_run_saves_a_complete_model(workspace):
    single, sharded_weights = (load_file(workspace / name / "model.safetensors") for name in ("whole", "cut"))
    assert single.keys() == sharded_weights.keys()
    for name in single:
        # Muon's iteration amplifies rounding errors in small gradients to the size of other updates.
        torch.testing.assert_close(sharded_weights[name], single[name], rtol=1e-3, atol=2e-4)
    lm = AutoModelForCausalLM.from_pretrained(workspace / "cut")
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert torch.equal(lm.lm_head.weight, sharded_weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("target", ["sharded", "one process", "two processes"])
def test_sharded_checkpoint_resumes_on_any_layout(workspace, target):
    rows = 8 if target == "one process" else 4
    flags = settings(workspace, target.replace(" ", "-"), per_device_train_batch_size=rows)
    shutil.copytree(workspace / "cut", flags["output_dir"])
    shutil.rmtree(flags["output_dir"] / "checkpoints" / "step-00000006")
    shards = (flags["output_dir"] / "checkpoints/step-00000003").glob("model-*-of-00002.safetensors")
    assert len([*shards]) == 2
    if target == "sharded":
        done = sharded(flags)
    else:
        done = forked.run("train_clm.py", flags, processes=1 if target == "one process" else 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(workspace / "cut", flags["output_dir"])
