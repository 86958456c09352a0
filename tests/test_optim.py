"""Groups on real models, schedules against their formula, the guard against runs without the bad update."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForPreTraining

from utils.learning.optim import (
    UpdateGuard,
    build_optimizer,
    build_schedule,
    describe_groups,
    parameter_groups,
    skipped_updates,
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
    assert len({id(p) for p in decayed["params"] + plain["params"]}) == len(decayed["params"]) + len(
        plain["params"]
    )
    expected = {}  # by names as each model writes them: norms are ln_*, *norm*, LayerNorm
    for name, _ in model.named_parameters():
        norm = any(part.startswith("ln_") or "norm" in part.lower() for part in name.split("."))
        expected[name] = not norm and not name.endswith("bias")
    found = {id(p): True for p in decayed["params"]} | {id(p): False for p in plain["params"]}
    assert {name: found[id(p)] for name, p in model.named_parameters()} == expected
    assert {True, False} == set(expected.values())


def test_the_printed_groups_add_up():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **MODELS["gpt2"][1]))
    lines = describe_groups(build_optimizer(model, 1e-3, 0.1)).splitlines()
    numbers = [int(line.split(", ")[1].split()[0].replace(",", "")) for line in lines]
    assert sum(numbers) == model.num_parameters() and "weight decay 0.1: 10 tensors" in lines[0]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_schedules_count_optimizer_steps_warm_up_and_end_at_zero(kind):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3.0)
    schedule = build_schedule(optimizer, kind, num_warmup_steps=4, max_train_steps=20)
    rates = []
    for _ in range(20):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    done = [(step - 4) / 16 for step in range(4, 20)]
    fall = [1 - x if kind == "linear" else (1 + math.cos(math.pi * x)) / 2 for x in done]
    assert rates == pytest.approx([0, 0.75, 1.5, 2.25] + [3 * x for x in fall])
    assert schedule.get_last_lr()[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("lineer", 0, 10), "lr_scheduler_type"), (("linear", 11, 10), "num_warmup_steps")],
)
def test_a_schedule_that_cannot_be_is_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        build_schedule(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), *arguments)


def gradients(count, bad=(), factor=math.nan):
    """One gradient per update, for a weight [5, 3] and a bias [5]; the bad ones multiplied by `factor`."""
    generator = torch.Generator().manual_seed(0)
    all_of_them = []
    for i in range(count):
        grads = [torch.randn(5, 3, generator=generator), torch.randn(5, generator=generator)]
        all_of_them.append([grad * factor for grad in grads] if i in bad else grads)
    return all_of_them


def train(updates, fused, outlier_factor=0.0, stop_and_resume_at=None):
    """Weights, optimizer state, flags and guard after these updates through accelerate, clipped at 1."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 5)
    inner = build_optimizer(model, 0.1, 0.1)
    if not fused:
        inner = torch.optim.AdamW(inner.param_groups, fused=False)
    optimizer = accelerator.prepare(inner)
    guard = UpdateGuard(accelerator, optimizer, outlier_factor)
    flags = []
    for i, grads in enumerate(updates):
        if i == stop_and_resume_at:
            state = guard.state_dict()
            guard = UpdateGuard(accelerator, optimizer, outlier_factor)
            guard.load_state_dict(state)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad.clone()
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        judged = guard.judge(norm)
        assert judged.shape == () and (torch.equal(guard.norm, norm) or norm.isnan())
        optimizer.step()
        optimizer.zero_grad()
        if i % 7 == 6:
            flags += guard.read()
    return list(model.parameters()), inner.state_dict()["state"], flags + guard.read(), guard


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_bad_update_leaves_weights_moments_and_step_count_as_if_it_had_not_been(fused, factor):
    bad = (0, 4, 11, 12)
    weights, state, flags, guard = train(gradients(13, bad, factor), fused)
    without = [grads for i, grads in enumerate(gradients(13)) if i not in bad]
    expected_weights, expected_state, no_flags, _ = train(without, fused)
    assert flags == [int(i in bad) for i in range(13)] and no_flags == [0] * 9
    assert guard.consecutive == 2
    assert state[0]["step"] == 9
    for found, expected in zip(weights, expected_weights, strict=True):
        assert torch.equal(found, expected)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


def test_outliers_are_skipped_after_a_warmup_also_across_save_and_load():
    updates = gradients(140, bad=(30, 31, 45, 130), factor=1000.0)
    expected, mean, accepted = [], 0.0, 0
    for grads in updates:  # the rule once more, in Python numbers
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
        outlier = accepted >= UpdateGuard.WARMUP and norm > 5 * mean
        if not outlier:
            accepted += 1
            mean += (norm - mean) / min(accepted, UpdateGuard.HORIZON)
        expected.append(int(outlier))
    assert [i for i, outlier in enumerate(expected) if outlier] == [30, 31, 45, 130]
    weights, state, flags, guard = train(updates, True, outlier_factor=5.0)
    assert flags == expected and float(guard.mean) == pytest.approx(mean, rel=1e-5)
    resumed = train(updates, True, outlier_factor=5.0, stop_and_resume_at=33)
    assert resumed[2] == flags
    torch.testing.assert_close(resumed[:2], (weights, state), rtol=0, atol=0)


def test_without_a_factor_only_what_is_not_finite_is_skipped():
    assert train(gradients(40, bad=(30,), factor=1000.0), True)[2] == [0] * 40


@pytest.mark.parametrize("outlier_factor", [0.0, 5.0])
def test_under_a_gradient_scaler_bad_updates_are_skipped_too(outlier_factor):
    """fp16 needs a GPU in accelerate; its optimizer and torch's scaler do the same on a CPU."""
    Accelerator(cpu=True)

    def run(updates):
        torch.manual_seed(0)
        model, scaler = nn.Linear(3, 5), torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = AcceleratedOptimizer(build_optimizer(model, 0.1, 0.1), scaler=scaler)
        guard = UpdateGuard(SimpleNamespace(scaler=scaler), optimizer, outlier_factor)
        for grads in updates:
            scaler.scale(torch.zeros(()))  # as accelerator.backward does; the scale is made lazily
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad * scaler.get_scale()
            scaler.unscale_(optimizer.optimizer)
            guard.judge(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()], optimizer.state_dict()["state"], guard.read()

    updates = gradients(30, bad=(6,), factor=math.inf)
    if outlier_factor:
        updates[25] = [1000 * grad for grad in updates[25]]
    bad = [6, 25] if outlier_factor else [6]
    weights, state, flags = run(updates)
    expected_weights, expected_state, _ = run([grads for i, grads in enumerate(updates) if i not in bad])
    assert flags == [int(i in bad) for i in range(30)]
    torch.testing.assert_close([weights, state], [expected_weights, expected_state])


def test_the_guard_does_not_wait_for_the_device_between_reads():
    class Host(torch.utils._python_dispatch.TorchDispatchMode):
        names = frozenset()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names |= {str(function)}
            return function(*args, **(kwargs or {}))

    accelerator = Accelerator(cpu=True)
    guard = UpdateGuard(accelerator, build_optimizer(nn.Linear(3, 5), 0.1, 0.1), outlier_factor=3.0)
    with Host() as seen:
        for norm in torch.rand(30):
            guard.judge(norm)
    assert not any("_local_scalar_dense" in name or "is_nonzero" in name for name in seen.names)
    assert guard.read() == [0] * 30


def test_skipped_updates_are_told_with_their_step_and_samples():
    assert skipped_updates([0, 1, 0, 1], step=40, rows_per_step=8) == [
        {"step": 38, "event": "skipped_update", "positions": [296, 304]},
        {"step": 40, "event": "skipped_update", "positions": [312, 320]},
    ]
