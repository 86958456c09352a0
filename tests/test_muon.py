"""Muon for hidden matrices and AdamW for the rest, compared with torch.optim.Muon and torch.optim.AdamW."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from tests import forked
from tests.runs import TINY, arguments, metrics, write_corpus
from tests.test_optim import settings
from utils.learning import muon
from utils.learning.muon import MuonAdamW, hidden_matrices, orthogonalize
from utils.learning.optim import build_optimizer

SHAPES = [(8, 8), (8, 24), (24, 8), (8, 24), (5, 7)]


def parameters():
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in [*SHAPES, (8,)]]


def optimizer_of(weights):
    matrices = {"params": weights[:-1], "momentum": 0.95, "lr": 0.01, "weight_decay": 0.1}
    return MuonAdamW([{"params": weights[-1:]}, matrices], lr=0.01, fused=True)


def polar_express(update, *_):
    """Polar Express (arXiv 2505.16932) for one matrix, in float32."""
    x = update.T if len(update) > update.shape[1] else update
    x = x / (x.norm() * 1.02)
    for a, b, c in muon.COEFFICIENTS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if len(update) > update.shape[1] else x


@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_muon_is_torchs_muon_with_polar_express_and_normuon(at_once, monkeypatch):
    """torch iterates one matrix at a time; NorMuon (arXiv 2510.05491) is written out here."""
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", polar_express)
    monkeypatch.setitem(muon.PRECISION, "cpu", torch.float32)
    monkeypatch.setattr(muon, "AT_ONCE", at_once)
    monkeypatch.setattr(muon, "WARM_UP", 5)
    weights, reference = parameters(), parameters()
    ours = optimizer_of(weights)
    steps = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    matrices = torch.optim.Muon(steps, 1.0, weight_decay=0, adjust_lr_fn="match_rms_adamw")
    others = torch.optim.AdamW(reference[-1:], 0.01, fused=True)
    squares = [torch.full((shape[0], 1), 1 / max(shape)) for shape in SHAPES]
    for seed in range(10):
        torch.manual_seed(seed)
        for a, b in zip(weights, reference, strict=True):
            a.grad = torch.randn_like(a) * torch.arange(1, len(a) + 1).view(-1, *[1] * (a.ndim - 1))
            b.grad = a.grad.clone()
        for step, b in zip(steps, reference, strict=False):
            step.data.zero_()
            step.grad = b.grad
        matrices.param_groups[0]["momentum"] = 0.85 + 0.1 * min(seed / 5, 1)
        for optimizer in (ours, matrices, others):
            optimizer.step()
        for i, (b, step) in enumerate(zip(reference, steps, strict=False)):
            update = -step.data / (0.2 * max(step.shape) ** 0.5)
            squares[i] = 0.95 * squares[i] + 0.05 * update.square().mean(1, keepdim=True)
            b.data = b.data * (1 - 0.01 * 0.1) - 0.01 * 0.2 * update / squares[i].sqrt()
        for a, b in zip(weights, reference, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_orthogonalization_keeps_singular_vectors_and_brings_values_near_one():
    torch.manual_seed(0)
    matrices = torch.randn(3, 20, 50)
    u, s, v = torch.linalg.svd(orthogonalize(matrices), full_matrices=False)
    assert 0.85 < s.min() and s.max() < 1.15
    vectors, _ = torch.linalg.qr(torch.randn(20, 20))
    small = torch.logspace(-2.6, 0, 20) * vectors  # singular values from 0.0025 to 1
    s = torch.linalg.svdvals(orthogonalize(small[None]))
    assert 0.8 < s.min() and s.max() < 1.2
    u0, _, v0 = torch.linalg.svd(matrices, full_matrices=False)
    alike = (u0.mT @ orthogonalize(matrices) @ v0.mT).abs()  # diagonal if the vectors are equal
    assert (alike - torch.diag_embed(alike.diagonal(dim1=1, dim2=2))).max() < 1e-3
    s = torch.linalg.svdvals(orthogonalize(matrices.bfloat16()).float())
    assert 0.8 < s.min() and s.max() < 1.2
    rank_one = orthogonalize(torch.ones(1, 64, 64).bfloat16())
    assert rank_one.float().sum().item() == pytest.approx(64, rel=0.15)


@pytest.mark.parametrize("kind, sizes", [
    ("gpt2", dict(n_layer=2, n_embd=32, n_head=2)),
    ("llama", dict(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2)),
    # The hidden size equals the vocabulary size.
    ("llama", dict(num_hidden_layers=2, hidden_size=100, intermediate_size=48, num_attention_heads=2)),
    ("roberta", dict(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2)),
    ("modernbert", dict(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2)),
    ("mixtral", dict(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2,
                     num_key_value_heads=2, num_local_experts=3)),
    ("mamba", dict(num_hidden_layers=2, hidden_size=32, state_size=4)),
])
def test_muon_gets_every_hidden_matrix_and_nothing_else(kind, sizes):
    config = AutoConfig.for_model(kind, vocab_size=100, pad_token_id=1, bos_token_id=0, eos_token_id=2,
                                  cls_token_id=0, sep_token_id=2, **sizes)
    masked = kind in ("roberta", "modernbert")
    lm = (AutoModelForMaskedLM if masked else AutoModelForCausalLM).from_config(config)
    outside = {p for m in (lm.get_input_embeddings(), lm.get_output_embeddings()) for p in m.parameters()}
    matrices = hidden_matrices(lm)
    assert matrices and not matrices & outside
    names = [name for name, parameter in lm.named_parameters() if parameter in matrices]
    head = {"roberta": ["lm_head.dense.weight"], "modernbert": ["head.dense.weight"]}.get(kind, [])
    within = [n for n, p in lm.named_parameters() if (".0." in n or ".1." in n) and (
        p.ndim == 2 and "A_log" not in n or ".experts." in n)]
    expected = within + head
    assert names == expected
    optimizer = build_optimizer(lm, settings(optimizer_type="muon", muon_learning_rate=2e-2))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) and set(held) == set(lm.parameters())
    [group] = [group for group in optimizer.param_groups if "momentum" in group]
    assert set(group["params"]) == matrices and group["lr"] == 2e-2


FLOAT32 = """
import sys
import torch
from utils.learning import muon
muon.PRECISION["cpu"] = torch.float32
import train_clm
train_clm.main()
"""


def test_four_processes_sharing_muon_have_the_losses_of_one(tmp_path):
    """For 30 steps, with the iteration in float32."""
    flags = TINY | {
        "dataset_name": write_corpus(tmp_path / "c.jsonl"), "cache_dir": tmp_path / "cache",
        "optimizer_type": "muon", "max_train_steps": 30, "save_steps": 30, "eval_steps": 30,
    }  # fmt: skip
    losses = []
    for processes in (1, 4):
        split = {"output_dir": tmp_path / str(processes), "per_device_train_batch_size": 8 // processes}
        done = forked.run_code(FLOAT32, arguments(flags | split), processes)
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append([line["loss/train"] for line in metrics(split["output_dir"]) if "loss/train" in line])
    assert len(losses[0]) == 30 and losses[0] == pytest.approx(losses[1], rel=1e-5)
