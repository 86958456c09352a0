"""The cost model against what processes really take."""

import json
import re
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import train_clm
from tests import forked
from utils.display.plan import describe, estimate

MEASURE = """
# The highest resident memory of two real updates, above that of a process that has made a tiny one.
import json, sys
from types import SimpleNamespace
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from utils.learning.losses import CausalLMLoss
from utils.learning.kernels import use_one_kernel_gelu
from utils.learning.optim import build_optimizer

def update(config, rows, block_size, accumulation, bf16, times):
    lm = AutoModelForCausalLM.from_config(config)
    use_one_kernel_gelu(lm)
    model = CausalLMLoss(lm).train()
    args = dict(optimizer_type="adamw", learning_rate=1e-3, weight_decay=0.1, adam_beta2=0.95)
    optimizer = build_optimizer(model, SimpleNamespace(**args))
    for _ in range(times):
        for _ in range(accumulation):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss, _ = model({"input_ids": torch.randint(config.vocab_size, (rows, block_size))})
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

torch.set_num_threads(1)
shape, rows, block_size, accumulation, bf16 = json.loads(sys.argv[1])
update(AutoConfig.for_model("gpt2", n_layer=1, n_embd=64, n_head=1, vocab_size=300), 2, 16, 1, bf16, 1)
before = resident("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM starts anew
update(AutoConfig.for_model("gpt2", **shape), rows, block_size, accumulation, bf16, 2)
print(resident("VmHWM") - before)
"""
SHAPE = {"n_layer": 4, "n_embd": 256, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CASES = {  # shape, rows, block size, accumulation, bf16
    "activations": [{**SHAPE, "vocab_size": 8192}, 32, 128, 1, False],
    "vocabulary": [{**SHAPE, "vocab_size": 50257}, 8, 128, 1, False],
    "accumulation": [{**SHAPE, "vocab_size": 8192}, 16, 128, 2, False],
}


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", CASES)
def test_the_estimated_peak_is_the_measured_one(case):
    """What glibc and Linux keep of freed blocks differs from run to run, and only adds: hence the least."""
    runs = [forked.run_code(MEASURE, [json.dumps(CASES[case])]) for _ in range(3)]
    assert [result.returncode for result in runs] == [0, 0, 0], runs[0].stderr[-2000:]
    measured = min(int(result.stdout) for result in runs)
    shape, rows, block_size, accumulation, bf16 = CASES[case]
    config = AutoConfig.for_model("gpt2", **shape)
    plan = estimate(config, rows, block_size, accumulation=accumulation, bf16=bf16)
    assert plan["peak"] == pytest.approx(measured, rel=0.20)


@pytest.mark.parametrize("model_type, kind", [
    ("gpt2", "causal"), ("llama", "causal"), ("gpt_neox", "causal"), ("roberta", "masked"),
    ("bert", "pretraining"), ("modernbert", "masked"),
])  # fmt: skip
def test_other_models_are_planned_by_running_them_without_data(model_type, kind):
    """Parameters are those of the model as built; neither it nor the random state is touched."""
    config = AutoConfig.for_model(model_type, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                  intermediate_size=128, vocab_size=500, pad_token_id=0)  # fmt: skip
    before = torch.get_rng_state()
    plan = estimate(config, 4, 32, kind=kind, predicted=1.0 if kind == "causal" else 0.15)
    assert torch.equal(torch.get_rng_state(), before)
    if kind == "causal":
        assert plan["parameters"] == AutoModelForCausalLM.from_config(config).num_parameters()
    assert plan["weights"] == 4 * plan["parameters"] and plan["optimizer"] == 8 * plan["parameters"]
    more = estimate(config, 8, 32, kind=kind, predicted=1.0 if kind == "causal" else 0.15)
    assert more["activations"] == pytest.approx(2 * plan["activations"], rel=0.05)


def test_ddp_and_fsdp_send_what_theory_says_and_fsdp_divides_what_it_shards():
    """Ring all-reduce: each of n sends 2 (n-1)/n of the gradients' bytes. FSDP: (n-1)/n of the weights' bytes
    for each gathering and the one scattering, ZeRO (arXiv 1910.02054), section 7. Muon under DDP: (n-1)/n of
    its updates; under FSDP an n-th of that, to who iterates and back."""
    config = AutoConfig.for_model("gpt2", n_layer=2, n_embd=64, n_head=4, vocab_size=500)
    alone = estimate(config, 4, 32)
    ddp = estimate(config, 4, 32, devices=8, accumulation=3)
    fsdp = estimate(config, 4, 32, devices=8, accumulation=3, sharding="fsdp")
    parameters = alone["parameters"]
    assert alone["sent_per_update"] == 0
    assert ddp["sent_per_update"] == 2 * 7 / 8 * 4 * parameters
    lm = AutoModelForCausalLM.from_config(config)
    blocks = sum(p.numel() for p in lm.transformer.h.parameters())
    gathered = 3 * (2 * blocks + parameters - blocks)  # a block in either pass, the rest once
    assert fsdp["sent_per_update"] == 7 / 8 * 4 * (gathered + parameters)
    matrices = sum(p.numel() for p in lm.transformer.h.parameters() if p.ndim == 2)
    for sharding, of, share in (("ddp", ddp, 1), ("fsdp", fsdp, 2 / 8)):
        muon = estimate(config, 4, 32, devices=8, accumulation=3, sharding=sharding, optimizer="muon")
        assert muon["sent_per_update"] == of["sent_per_update"] + share * 7 / 8 * 4 * matrices
        assert muon["optimizer"] == of["optimizer"] - 4 * matrices * of["weights"] / (4 * parameters)
    for part in ("weights", "gradients", "optimizer"):
        assert ddp[part] == alone[part] == 8 * fsdp[part]
    assert ddp["tokens_per_update"] == 4 * 32 * 3 * 8


def test_the_table_gives_time_at_a_rate():
    config = AutoConfig.for_model("gpt2", n_layer=2, n_embd=64, n_head=4, vocab_size=500)
    plan = estimate(config, 4, 32)
    table = describe(plan, rate=plan["flops_per_token"] * 1000, tokens=3.6e6)
    rows = {line[:18].strip(): line[18:].split()[0] for line in table.splitlines()}
    assert rows["tokens per second"] == "1,000" and rows["hours"] == "1.0"
    assert rows["seconds per update"] == "0.128"


def test_the_command_plans_a_run_on_devices_that_are_not_here():
    options = ["--config_overrides", "n_layer=2,n_embd=64,n_head=4", "--devices", "8"]
    options += ["--device_name", "NVIDIA H100", "--tokens", "1e9"]
    result = forked.run("utils.display.plan", options)
    assert result.returncode == 0 and "tokens per second" in result.stdout and "hours" in result.stdout
    scripts_own = ["--model_type", train_clm.TrainArgs.model_type, "--block_size", "128"]
    scripts_own += ["--config_overrides", f"{train_clm.LFM2},vocab_size=4096"]
    result = forked.run("utils.display.plan", scripts_own)  # 1.3 M: docs/learning.md
    assert result.returncode == 0 and re.search(r"parameters +1\.3 M", result.stdout), result.stderr
    result = forked.run("utils.display.plan", ["--model_type", "gtp2"])
    assert result.returncode == 2 and "gtp2" in result.stderr and "Traceback" not in result.stderr
