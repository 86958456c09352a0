"""Parameter groups, learning-rate schedules against formulas, and the guard that skips bad updates."""

import json
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForPreTraining

from tests import forked
from utils.learning.muon import MuonAdamW
from utils.learning.optim import (
    Means,
    UpdateGuard,
    build_optimizer,
    build_schedule,
    describe_groups,
    parameter_groups,
)

SMALL = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = SMALL | {"intermediate_size": 32, "num_key_value_heads": 2}
MODELS = {
    "gpt2": (AutoModelForCausalLM, {"vocab_size": 99, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "llama": (AutoModelForCausalLM, LLAMA),
    "bert": (AutoModelForPreTraining, SMALL | {"intermediate_size": 32}),
    "roberta": (AutoModelForMaskedLM, SMALL | {"intermediate_size": 32}),
    "modernbert": (AutoModelForMaskedLM, SMALL | {"intermediate_size": 32, "pad_token_id": 0}),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_biases_and_norms_do_not_decay_and_each_parameter_is_in_one_group(model_type):
    auto, settings = MODELS[model_type]
    model = auto.from_config(AutoConfig.for_model(model_type, **settings))
    decayed, plain = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0
    both = [id(p) for p in decayed["params"] + plain["params"]]
    assert len({*both}) == len(both)
    expected = {}  # names of norms: ln_*, *norm*, LayerNorm
    for name, _ in model.named_parameters():
        norm = any(part.startswith("ln_") or "norm" in part.lower() for part in name.split("."))
        expected[name] = not norm and not name.endswith("bias")
    decays = {id(p): True for p in decayed["params"]} | {id(p): False for p in plain["params"]}
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == expected
    assert {True, False} == set(expected.values())


def settings(**changes):
    """The settings of a script for optimizer and schedule."""
    usual = dict(optimizer_type="adamw", learning_rate=1e-3, muon_learning_rate=0.0, weight_decay=0.1)
    usual |= dict(adam_beta2=0.95, lr_scheduler_type="linear", num_warmup_steps=4)
    usual |= dict(lr_scheduler_kwargs=None)
    return SimpleNamespace(**usual | changes)


def make_schedule(last, **changes):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3.0)
    return build_schedule(optimizer, settings(**changes), last)


def learning_rates(schedule, steps):
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return rates


def test_the_printed_groups_hold_all_parameters():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **MODELS["gpt2"][1]))
    lines = describe_groups(build_optimizer(model, settings()))
    numbers = [int(line.split(", ")[3].split()[0].replace(",", "")) for line in lines]
    assert sum(numbers) == model.num_parameters() and "weight decay 0.1: 10 tensors" in lines[0]
    [line] = describe_groups(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    assert line.startswith("SGD, ")
    of_muon = settings(optimizer_type="muon", muon_learning_rate=0.02, lr_scheduler_type="cosine")
    muon = build_optimizer(model, of_muon)
    build_schedule(muon, of_muon, 8)  # warmup: the rate is 0 now
    muon = describe_groups(muon)
    named = [line.partition(": ")[0] for line in muon]
    assert named == [
        "AdamW, learning rate 0.001, weight decay 0.1", "AdamW, learning rate 0.001, weight decay 0",
        "Muon, learning rate 0.02, weight decay 0.1",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [4, 0.2])  # steps, or a fraction of them
def test_schedules_count_optimizer_steps_warm_up_and_end_at_zero(kind, warmup):
    schedule = make_schedule(20, lr_scheduler_type=kind, num_warmup_steps=warmup)
    done = [(step - 4) / 16 for step in range(4, 20)]
    fall = [1 - x if kind == "linear" else (1 + math.cos(math.pi * x)) / 2 for x in done]
    assert learning_rates(schedule, 20) == pytest.approx([0, 0.75, 1.5, 2.25] + [3 * x for x in fall])
    assert schedule.get_last_lr()[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("kind", "options", "expected"), [
    ("cosine_with_min_lr", "min_lr_rate=0.1", {30: 0.3}),
    ("polynomial", "power=2,lr_end=0.3", {30: 0.3}),
    ("warmup_stable_decay", '{"num_decay_steps": 6, "min_lr_ratio": 0.1}', {24: 3, 27: 1.65, 30: 0.3}),
    ("warmup_stable_decay", "num_decay_steps=0.2,decay_type=1-sqrt",  # Haegele et al., 2024, 2405.18392
     {24: 3} | {24 + i: 3 * (1 - math.sqrt(i / 6)) for i in range(1, 7)}),
])  # fmt: skip
def test_schedules_take_the_options_of_transformers(kind, options, expected):
    rates = learning_rates(make_schedule(30, lr_scheduler_type=kind, lr_scheduler_kwargs=options), 31)
    assert max(rates) == rates[4] == 3
    assert {step: rates[step] for step in expected} == pytest.approx(expected)


def make_gradients(count, bad=(), factor=math.nan):
    """Gradients of a weight [5, 3] and a bias [5] for each update; `bad` ones are multiplied by factor."""
    generator = torch.Generator().manual_seed(0)
    updates = []
    for i in range(count):
        grads = [torch.randn(5, 3, generator=generator), torch.randn(5, generator=generator)]
        updates.append([grad * factor for grad in grads] if i in bad else grads)
    return updates


def add_empty_group(optimizer):
    """As if an edit had removed all weights of the first group."""
    optimizer.param_groups.insert(0, optimizer.param_groups[0] | {"params": []})
    return optimizer


OPTIMIZERS = {
    "fused": lambda model: [build_optimizer(model, settings(learning_rate=0.1))],
    "not fused": lambda model: [torch.optim.AdamW(model.parameters(), 0.1, fused=False)],
    "two fused": lambda model: [torch.optim.AdamW([p], 0.1, fused=True) for p in model.parameters()],
    "torch's muon": lambda model: [
        torch.optim.Muon([model.weight], 0.1), torch.optim.AdamW([model.bias], 0.1, fused=True)],
    "our muon": lambda model: [MuonAdamW([
        {"params": [model.weight], "momentum": 0.95, "weight_decay": 0.1}, {"params": [model.bias]}],
        lr=0.1, fused=True)],
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)],
    "empty group": lambda model: [add_empty_group(o) for o in OPTIMIZERS["fused"](model)],
}  # fmt: skip


def train(updates, kind, resume_at=None, bare=False):
    """Returns (weights, optimizer states, skip flags, guard) after these updates, clipped at norm 1."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 5)
    inner = OPTIMIZERS[kind](model)
    optimizers = inner if bare else [accelerator.prepare(optimizer) for optimizer in inner]
    guard = UpdateGuard(accelerator, *optimizers)
    flags = []
    for i, grads in enumerate(updates):
        if i == resume_at:
            state = guard.state_dict()
            guard = UpdateGuard(accelerator, *optimizers)
            guard.load_state_dict(state)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad.clone()
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        skipped = guard.check(norm)
        assert skipped.shape == () and (torch.equal(guard.norm, norm) or norm.isnan())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if i % 7 == 6:
            flags += guard.read()
    states = [optimizer.state_dict()["state"] for optimizer in inner]
    return list(model.parameters()), states, flags + guard.read(), guard


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("factor", [math.nan, math.inf, 1000.0])
def test_only_updates_that_are_not_finite_are_skipped_without_a_trace(kind, factor, bare):
    """Weights, moments and step counts are those of a run without them, also after a resume between two."""
    bad = (11, 12) if kind == "our muon" else (0, 4, 11, 12)  # Muon's momentum rises at each call
    updates = make_gradients(13, bad, factor)
    bad = () if math.isfinite(factor) else bad
    weights, state, flags, guard = train(updates, kind, resume_at=12, bare=bare)
    rest = [grads for i, grads in enumerate(updates) if i not in bad]
    expected_weights, expected_state, no_flags, _ = train(rest, kind, bare=bare)
    assert flags == [int(i in bad) for i in range(13)] and no_flags == [0] * len(rest)
    assert (guard.consecutive, guard.updates) == (2 * bool(bad), 13)
    moments = [moments for optimizer_state in state for moments in optimizer_state.values()]
    assert all(each["step"] == len(rest) for each in moments if "step" in each)
    assert all(map(torch.equal, weights, expected_weights))
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["fused", "not fused", "momentum"])
def test_bad_updates_are_skipped_under_a_gradient_scaler(kind):
    """accelerate allows fp16 on GPUs only, but its optimizer and torch's scaler also run on a CPU."""
    Accelerator(cpu=True)

    def run(updates):
        torch.manual_seed(0)
        model, scaler = nn.Linear(3, 5), torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = AcceleratedOptimizer(*OPTIMIZERS[kind](model), scaler=scaler)
        guard = UpdateGuard(SimpleNamespace(scaler=scaler, device="cpu"), optimizer)
        for grads in updates:
            scaler.scale(torch.zeros(()))  # as accelerator.backward does; this initializes the scale
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad * scaler.get_scale()
            scaler.unscale_(optimizer.optimizer)
            guard.check(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()], optimizer.state_dict()["state"], guard.read()

    updates = make_gradients(30, bad=(6,), factor=math.inf)
    weights, state, flags = run(updates)
    expected_weights, expected_state, _ = run([grads for i, grads in enumerate(updates) if i != 6])
    assert flags == [int(i == 6) for i in range(30)]
    torch.testing.assert_close([weights, state], [expected_weights, expected_state])


def test_several_optimizers_are_refused_under_a_gradient_scaler():
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="fp16 allows one optimizer"):
        UpdateGuard(SimpleNamespace(scaler=scaler), *OPTIMIZERS["two fused"](nn.Linear(3, 5)))


@pytest.mark.parametrize("resumed", [False, True])
def test_twenty_skipped_updates_in_a_row_end_the_run(resumed):
    """The error names the steps, also after a resume between them."""
    guard, copy = (UpdateGuard(Accelerator(cpu=True), *OPTIMIZERS["fused"](nn.Linear(3, 5))) for _ in "ab")
    guard.check(torch.tensor(1.0))
    for step in range(20):
        if step == 7:
            state = guard.state_dict()
            assert state == guard.state_dict() == json.loads(json.dumps(state))  # without side effect
            copy.load_state_dict(state)
            guard = copy if resumed else guard
        if step == 19:
            assert guard.read() == [0] + [1] * 19
        guard.check(torch.tensor(math.inf))
    with pytest.raises(RuntimeError, match="20 updates in a row, of steps 2 to 21, were skipped"):
        guard.read()


def test_means_leave_out_skipped_steps_bit_for_bit():
    """Compared with sums of numpy in float32, in the order of the losses."""
    means = Means(Accelerator(cpu=True), "loss/train", "loss/train_plain")
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):  # read() resets the sums
        sums = np.zeros(3, dtype=np.float32)
        for step in range(7):
            losses, skipped = torch.rand(2, generator=generator), step in (2, 3)
            means.add(losses * math.nan if skipped else losses, torch.tensor(float(skipped)))
            if not skipped:
                sums += np.append(losses.numpy(), np.float32(1))
            assert means.state_dict() == means.state_dict()  # without side effect
        read = means.read(grad_norm=torch.tensor(0.5))
        weighted, plain, steps = sums.tolist()
        assert steps == 5
        assert read == {"loss/train": weighted / 5, "loss/train_plain": plain / 5, "grad_norm": 0.5}
        assert list(read) == ["loss/train", "loss/train_plain", "grad_norm"]
    means.add(torch.tensor([math.nan, 1.0]), torch.tensor(1.0))
    assert means.read() == {"loss/train": None, "loss/train_plain": None}


def test_means_of_another_number_of_losses_are_refused():
    accelerator = Accelerator(cpu=True)
    means = Means(accelerator, "loss/train", "z")
    for losses in (torch.ones(1), torch.tensor(1.0)):  # one loss would get two names
        with pytest.raises(ValueError, match=r"shape \[1?\], expected one for each of loss/train, z"):
            means.add(losses, torch.tensor(0.0))
    with pytest.raises(ValueError, match="has loss/train, steps; this run needs loss/train, z, steps"):
        means.load_state_dict(Means(accelerator, "loss/train").state_dict())


def test_means_survive_a_resume_on_any_number_of_processes():
    """Two processes with different losses save; one, two and three processes resume."""
    run = forked.run("tests.test_optim", [], processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("means")]
    assert len(lines) == 2 and lines[0] == lines[1]
    saved = json.loads(lines[0].removeprefix("means"))
    assert saved == {"loss/train": [3.0, 6.0], "loss/train_plain": [1.0, 1.0], "steps": [2.0, 2.0]}
    alone = Means(Accelerator(cpu=True), "loss/train", "loss/train_plain")
    alone.load_state_dict(saved)
    assert alone.read() == EXPECTED
    three = []
    for index in range(3):
        means = Means(Accelerator(cpu=True), "loss/train", "loss/train_plain")
        means.accelerator = SimpleNamespace(process_index=index, num_processes=3, device="cpu")
        means.load_state_dict(saved)
        three.append(means._sums)
    assert sum(three).tolist() == [sum(column) for column in saved.values()]


EXPECTED = {"loss/train": 2.25, "loss/train_plain": 0.5}


def two_process_worker():
    accelerator = Accelerator(cpu=True)
    means, again = (Means(accelerator, "loss/train", "loss/train_plain") for _ in range(2))
    for step in (1.0, 2.0):  # losses 1 and 2 on one process, 2 and 4 on the other
        means.add(torch.tensor([step * (1 + accelerator.process_index), 0.5]), torch.tensor(0.0))
    saved = means.state_dict()
    again.load_state_dict(saved)
    norm = torch.tensor(1.0 + accelerator.process_index)
    for restored in (means, again):
        assert restored.read(grad_norm=norm) == EXPECTED | {"grad_norm": 1.5}
    print(f"means{json.dumps(saved)}\n", end="", flush=True)
    accelerator.wait_for_everyone()
    os._exit(0)  # gloo's destructor, holding the GIL, may join a thread that waits for the GIL


if __name__ == "__main__":
    two_process_worker()
