"""Groups on real models, schedules against their formula, the guard against runs without the bad update."""

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
from tests.launches import launches
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
def test_no_bias_and_no_norm_decays_and_every_parameter_is_there_once(model_type):
    auto, settings = MODELS[model_type]
    model = auto.from_config(AutoConfig.for_model(model_type, **settings))
    decayed, plain = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0
    both = [id(p) for p in decayed["params"] + plain["params"]]
    assert len({*both}) == len(both)
    expected = {}  # by names as each model writes them: norms are ln_*, *norm*, LayerNorm
    for name, _ in model.named_parameters():
        norm = any(part.startswith("ln_") or "norm" in part.lower() for part in name.split("."))
        expected[name] = not norm and not name.endswith("bias")
    found = {id(p): True for p in decayed["params"]} | {id(p): False for p in plain["params"]}
    assert {name: found[id(p)] for name, p in model.named_parameters()} == expected
    assert {True, False} == set(expected.values())


def settings(**changes):
    """Of a script, those of the optimizer and its schedule."""
    usual = dict(optimizer_type="adamw", learning_rate=1e-3, muon_learning_rate=0.0, weight_decay=0.1)
    usual |= dict(adam_beta2=0.95, lr_scheduler_type="linear", num_warmup_steps=4)
    usual |= dict(lr_scheduler_kwargs=None)
    return SimpleNamespace(**usual | changes)


def schedule_of(last, **changes):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3.0)
    return build_schedule(optimizer, settings(**changes), last)


def rates_of(schedule, steps):
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return rates


def test_the_printed_groups_add_up():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **MODELS["gpt2"][1]))
    lines = describe_groups(build_optimizer(model, settings()))
    numbers = [int(line.split(", ")[3].split()[0].replace(",", "")) for line in lines]
    assert sum(numbers) == model.num_parameters() and "weight decay 0.1: 10 tensors" in lines[0]
    [line] = describe_groups(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    assert line.startswith("optimizer  SGD, ")
    of_muon = settings(optimizer_type="muon", muon_learning_rate=0.02, lr_scheduler_type="cosine")
    muon = build_optimizer(model, of_muon)
    build_schedule(muon, of_muon, 8)  # now at a rate of 0
    muon = describe_groups(muon)
    named = [line.partition(": ")[0].split(maxsplit=1)[1] for line in muon]
    assert named == [
        "AdamW, learning rate 0.001, weight decay 0.1", "AdamW, learning rate 0.001, weight decay 0",
        "Muon, learning rate 0.02, weight decay 0.1",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [4, 0.2])  # steps, or a share
def test_schedules_count_optimizer_steps_warm_up_and_end_at_zero(kind, warmup):
    schedule = schedule_of(20, lr_scheduler_type=kind, num_warmup_steps=warmup)
    done = [(step - 4) / 16 for step in range(4, 20)]
    fall = [1 - x if kind == "linear" else (1 + math.cos(math.pi * x)) / 2 for x in done]
    assert rates_of(schedule, 20) == pytest.approx([0, 0.75, 1.5, 2.25] + [3 * x for x in fall])
    assert schedule.get_last_lr()[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("kind", "options", "expected"), [
    ("cosine_with_min_lr", "min_lr_rate=0.1", {30: 0.3}),
    ("polynomial", "power=2,lr_end=0.3", {30: 0.3}),
    ("warmup_stable_decay", '{"num_decay_steps": 6, "min_lr_ratio": 0.1}', {24: 3, 27: 1.65, 30: 0.3}),
    ("warmup_stable_decay", "num_decay_steps=0.2,decay_type=1-sqrt",  # Haegele et al., 2024, 2405.18392
     {24: 3} | {24 + i: 3 * (1 - math.sqrt(i / 6)) for i in range(1, 7)}),
])  # fmt: skip
def test_schedules_take_the_options_of_transformers(kind, options, expected):
    rates = rates_of(schedule_of(30, lr_scheduler_type=kind, lr_scheduler_kwargs=options), 31)
    assert max(rates) == rates[4] == 3
    assert {step: rates[step] for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "options"), [
    *[(kind, None) for kind in "linear cosine polynomial inverse_sqrt constant constant_with_warmup".split()],
    ("warmup_stable_decay", "num_decay_steps=0.2"), ("cosine_with_min_lr", "min_lr_rate=0.1"),
])  # fmt: skip
def test_every_schedule_begins_at_zero_and_reaches_the_last_step(kind, options):
    """Whatever warm-up is of the run, also when the run is resumed at its last step."""
    for last in (1, 2, 20):
        for warmup in sorted({0, 1, last - 1, last} - ({last - 1, last} if "decay" in kind else set())):
            changes = dict(lr_scheduler_type=kind, lr_scheduler_kwargs=options, num_warmup_steps=warmup)
            first, second = (schedule_of(last, **changes) for _ in range(2))
            rates = rates_of(first, last)
            assert all(0 <= rate <= 3 for rate in rates), (kind, last, warmup)
            if warmup and kind != "constant":
                assert rates[:warmup] == pytest.approx([3 * step / warmup for step in range(warmup)])
            second.load_state_dict(first.state_dict())
            assert second.last_epoch == last


@pytest.mark.parametrize("changes", [
    {"num_warmup_steps": 11}, {"num_warmup_steps": -1},
    {"num_warmup_steps": 9, "lr_scheduler_type": "warmup_stable_decay",
     "lr_scheduler_kwargs": "num_decay_steps=0.2"},
])  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused_by_name(changes):
    with pytest.raises(ValueError, match="num_warmup_steps: .* as the run has 10 steps"):
        schedule_of(10, **changes)


def gradients(count, bad=(), factor=math.nan):
    """One gradient per update, for a weight [5, 3] and a bias [5]; the bad ones multiplied by `factor`."""
    generator = torch.Generator().manual_seed(0)
    all_of_them = []
    for i in range(count):
        grads = [torch.randn(5, 3, generator=generator), torch.randn(5, generator=generator)]
        all_of_them.append([grad * factor for grad in grads] if i in bad else grads)
    return all_of_them


def with_an_empty_group(optimizer):
    """As where an edit takes all weights of the first group out."""
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
    "empty group": lambda model: [with_an_empty_group(o) for o in OPTIMIZERS["fused"](model)],
}  # fmt: skip


def train(updates, kind, resume_at=None, bare=False):
    """Weights, optimizer states, flags and guard after these updates through accelerate, clipped at 1."""
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
        judged = guard.check(norm)
        assert judged.shape == () and (torch.equal(guard.norm, norm) or norm.isnan())
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
def test_an_update_that_is_not_finite_is_as_if_it_had_not_been_and_no_other(kind, factor, bare):
    """Weights, moments, step counts; also where the run is saved and resumed between two of them."""
    bad = (11, 12) if kind == "our muon" else (0, 4, 11, 12)  # its momentum rises at each call
    updates = gradients(13, bad, factor)
    bad = () if math.isfinite(factor) else bad
    weights, state, flags, guard = train(updates, kind, resume_at=12, bare=bare)
    rest = [grads for i, grads in enumerate(updates) if i not in bad]
    expected_weights, expected_state, no_flags, _ = train(rest, kind, bare=bare)
    assert flags == [int(i in bad) for i in range(13)] and no_flags == [0] * len(rest)
    assert (guard.consecutive, guard.updates) == (2 * bool(bad), 13)
    steps = [moments["step"] for one in state for moments in one.values() if "step" in moments]
    assert all(step == len(rest) for step in steps)
    assert all(map(torch.equal, weights, expected_weights))
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["fused", "not fused", "momentum"])
def test_under_a_gradient_scaler_bad_updates_are_skipped_too(kind):
    """fp16 needs a GPU in accelerate; its optimizer and torch's scaler do the same on a CPU."""
    Accelerator(cpu=True)

    def run(updates):
        torch.manual_seed(0)
        model, scaler = nn.Linear(3, 5), torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = AcceleratedOptimizer(*OPTIMIZERS[kind](model), scaler=scaler)
        guard = UpdateGuard(SimpleNamespace(scaler=scaler, device="cpu"), optimizer)
        for grads in updates:
            scaler.scale(torch.zeros(()))  # as accelerator.backward does; the scale is made lazily
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad * scaler.get_scale()
            scaler.unscale_(optimizer.optimizer)
            guard.check(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()], optimizer.state_dict()["state"], guard.read()

    updates = gradients(30, bad=(6,), factor=math.inf)
    weights, state, flags = run(updates)
    expected_weights, expected_state, _ = run([grads for i, grads in enumerate(updates) if i != 6])
    assert flags == [int(i == 6) for i in range(30)]
    torch.testing.assert_close([weights, state], [expected_weights, expected_state])


def test_several_optimizers_are_refused_under_a_gradient_scaler():
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="fp16 allows one optimizer"):
        UpdateGuard(SimpleNamespace(scaler=scaler), *OPTIMIZERS["two fused"](nn.Linear(3, 5)))


class Host(torch.utils._python_dispatch.TorchDispatchMode):
    names = frozenset()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names |= {str(function)}
        return function(*args, **(kwargs or {}))

    def waited(self):
        return any("_local_scalar_dense" in name or "is_nonzero" in name for name in self.names)


def test_guard_and_means_do_not_wait_for_the_device_between_reads():
    accelerator = Accelerator(cpu=True)
    fused = OPTIMIZERS["two fused"](nn.Linear(3, 5)) + OPTIMIZERS["fused"](nn.Linear(3, 5))
    guard, means = UpdateGuard(accelerator, *fused), Means(accelerator, "loss/train")
    with Host() as seen:
        for norm in torch.rand(30):
            means.add(torch.ones(1), guard.check(norm))
    assert not seen.waited()
    assert guard.read() == [0] * 30 and means.read() == {"loss/train": 1.0}


@pytest.mark.parametrize("resumed", [False, True])
def test_it_gives_up_after_twenty_skipped_updates_in_a_row(resumed):
    """And says which steps these were, also after a resume between them."""
    guard, more = (UpdateGuard(Accelerator(cpu=True), *OPTIMIZERS["fused"](nn.Linear(3, 5))) for _ in "ab")
    guard.check(torch.tensor(1.0))
    for step in range(20):
        if step == 7:
            state = guard.state_dict()
            assert state == guard.state_dict() == json.loads(json.dumps(state))  # it changes nothing
            more.load_state_dict(state)
            guard = more if resumed else guard
        if step == 19:
            assert guard.read() == [0] + [1] * 19
        guard.check(torch.tensor(math.inf))
    with pytest.raises(RuntimeError, match="20 updates in a row, of steps 2 to 21, were skipped"):
        guard.read()


def test_means_are_those_of_the_steps_that_were_not_skipped_bit_for_bit():
    """Against numpy in float32, in the order in which losses come."""
    means = Means(Accelerator(cpu=True), "loss/train", "loss/train_plain")
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):  # reading starts anew
        sums = np.zeros(3, dtype=np.float32)
        for step in range(7):
            losses, skipped = torch.rand(2, generator=generator), step in (2, 3)
            means.add(losses, torch.tensor(float(skipped)))
            if not skipped:
                sums += np.append(losses.numpy(), np.float32(1))
            assert means.state_dict() == means.state_dict()  # it changes nothing
        read = means.read(grad_norm=torch.tensor(0.5))
        weighted, plain, steps = sums.tolist()
        assert steps == 5
        assert read == {"loss/train": weighted / 5, "loss/train_plain": plain / 5, "grad_norm": 0.5}
        assert list(read) == ["loss/train", "loss/train_plain", "grad_norm"]


def test_a_skipped_nan_leaves_no_trace_and_means_of_no_step_are_none():
    means = Means(Accelerator(cpu=True), "loss/train", "loss/train_mlm")
    means.add(torch.tensor([math.nan, 1.0]), torch.tensor(1.0))
    assert means.read() == {"loss/train": None, "loss/train_mlm": None}
    means.add(torch.tensor([2.0, 1.0], requires_grad=True), torch.tensor(0.0))
    assert means.read() == {"loss/train": 2.0, "loss/train_mlm": 1.0}


def test_means_of_other_losses_are_refused():
    accelerator = Accelerator(cpu=True)
    means = Means(accelerator, "loss/train", "z")
    for losses in (torch.ones(1), torch.tensor(1.0)):  # else one loss would be told under two names
        with pytest.raises(ValueError, match=r"losses of shape \[1?\] for loss/train, z"):
            means.add(losses, torch.tensor(0.0))
    with pytest.raises(ValueError, match="of loss/train, steps there, of loss/train, z, steps now"):
        means.load_state_dict(Means(accelerator, "loss/train").state_dict())


def test_means_survive_a_resume_on_any_number_of_processes():
    """Two processes that differ save; one, two and three go on."""
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
        one = Means(Accelerator(cpu=True), "loss/train", "loss/train_plain")
        one.accelerator = SimpleNamespace(process_index=index, num_processes=3, device="cpu")
        one.load_state_dict(saved)
        three.append(one._sums)
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
    for one in (means, again):
        assert one.read(grad_norm=norm) == EXPECTED | {"grad_norm": 1.5}
    print(f"means{json.dumps(saved)}\n", end="", flush=True)
    accelerator.wait_for_everyone()
    os._exit(0)  # gloo's destructor, holding the GIL, may join a thread that waits for the GIL


def test_the_end_of_a_step_takes_as_many_calls_for_any_number_of_layers():
    """Clipping, guard, means, Muon and AdamW, schedule: on a GPU the host starts each of them."""

    def calls(layers):
        config = AutoConfig.for_model("gpt2", n_layer=layers, n_embd=16, n_head=2, vocab_size=32)
        lm, accelerator = AutoModelForCausalLM.from_config(config), Accelerator(cpu=True)
        args = settings(optimizer_type="muon", lr_scheduler_type="cosine")
        optimizer = build_optimizer(lm, args)
        schedule, means = build_schedule(optimizer, args, 10), Means(accelerator, "loss/train")
        optimizer = accelerator.prepare(optimizer)
        guard = UpdateGuard(accelerator, optimizer)
        loss = torch.ones(1)

        def end():
            means.add(loss, guard.check(accelerator.clip_grad_norm_(lm.parameters(), 1.0)))
            optimizer.step()
            schedule.step()

        for _ in range(2):
            for weight in lm.parameters():
                weight.grad = torch.ones_like(weight)
            made = launches(end)
        return made

    assert calls(1) == calls(5) < 200


if __name__ == "__main__":
    two_process_worker()
