"""The losses against brute force in float64, and unchanged by autocast, compile, DDP and FSDP.

Run as a program (twice, from the tests below) it is the worker of the two-process tests.
"""

import copy
import math
import os
import shutil
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from packaging.version import Version
from tokenizers import Tokenizer, models
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    masking_utils,
)

from tests import forked
from tests.test_optim import settings
from utils.learning.fused_head import ChunkSoftmax, CompilerSoftmax, chunk_rows, linear_cross_entropy
from utils.learning.kernels import use_one_kernel_gelu
from utils.learning.losses import (
    CausalLMLoss,
    MaskedLMLoss,
    keytoken_row_weights,
    keytoken_table,
)
from utils.learning.model import to_device
from utils.learning.optim import Means, UpdateGuard, build_optimizer

V, D, T = 211, 16, 24
SMALL = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
SMALL |= {"max_position_embeddings": T + 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
LLAMA = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
GPT2 = {
    "vocab_size": V,
    "n_embd": D,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": T,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def small_model(model_type, auto=AutoModelForCausalLM, **settings):
    """Random weights, scaled up so that logits are of the size of a trained model's; no dropout."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(settings or (GPT2 if model_type == "gpt2" else LLAMA)))
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


needs_a_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++ here")


def problem(rows, dtype=torch.float64, bias=True):
    """hidden, weight, bias, targets with every seventh ignored, token weights of either sign."""
    torch.manual_seed(0)
    targets = torch.randint(V, (rows,))
    targets[::7] = -100
    hidden, weight = torch.randn(rows, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    leaves = [hidden, weight, torch.randn(V, dtype=dtype) if bias else None]
    return (
        [leaf if leaf is None else leaf.requires_grad_() for leaf in leaves],
        targets,
        torch.randn(rows, dtype=dtype),
    )


def brute_force(hidden, weight, bias, targets, token_weights):
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    return (losses * token_weights).sum(), losses, (logits.argmax(1) == targets)


def relative_error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 256, 700])
def test_chunked_cross_entropy_equals_brute_force(rows, bias):
    leaves, targets, weights = problem(rows, bias=bias)
    if rows == 1:
        targets[:] = 3
    loss, losses, correct = linear_cross_entropy(*leaves[:2], targets, weights, leaves[2], with_correct=True)
    grads = torch.autograd.grad(3 * loss, [leaf for leaf in leaves if leaf is not None])
    expected, expected_losses, expected_correct = brute_force(*leaves, targets, weights)
    expected_grads = torch.autograd.grad(3 * expected, [leaf for leaf in leaves if leaf is not None])
    assert not losses.requires_grad and losses.shape == (rows,)
    torch.testing.assert_close([loss, losses, *grads], [expected, expected_losses, *expected_grads])
    assert torch.equal(correct, expected_correct)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_a_compiler)])
def test_the_head_for_the_compiler_equals_the_one_by_hand_and_brute_force(compiled):
    """Compiled by inductor, on the CPU: losses, gradients and which are correct; without gradients, too."""
    torch._dynamo.reset()
    softmax = CompilerSoftmax()
    call = torch.compile(softmax, fullgraph=True, dynamic=False) if compiled else softmax
    for bias in (True,) if compiled else (True, False):  # each compiles for seconds
        leaves, targets, weights = problem(700, bias=bias)
        found = linear_cross_entropy(*leaves[:2], targets, weights, leaves[2], call, with_correct=bias)
        by_hand = linear_cross_entropy(*leaves[:2], targets, weights, leaves[2], with_correct=bias)
        expected = brute_force(*leaves, targets, weights)
        inputs = [leaf for leaf in leaves if leaf is not None]
        grads = [torch.autograd.grad(3 * loss[0], inputs) for loss in (found, by_hand, expected)]
        for losses, others in ((by_hand, grads[1]), (expected, grads[2])):
            torch.testing.assert_close([*found[:2], *grads[0]], [*losses[:2], *others])
        assert (found[2] is None) != bias and (not bias or torch.equal(found[2], by_hand[2]))
    with torch.no_grad():
        again = linear_cross_entropy(*leaves[:2], targets, weights, leaves[2], softmax)
    torch.testing.assert_close(again[:2], [x.detach() for x in found[:2]])


def test_the_head_for_the_compiler_under_autocast_is_as_exact():
    leaves, targets, weights = problem(700, torch.float32)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = brute_force(*exact, targets, weights.double())
    true = [*expected[:2], *torch.autograd.grad(expected[0], exact)]
    with torch.autocast("cpu", torch.bfloat16):
        found, by_hand = (
            linear_cross_entropy(*leaves[:2], targets, weights, leaves[2], softmax)
            for softmax in (CompilerSoftmax(), ChunkSoftmax())
        )
    found, by_hand = ([*one[:2], *torch.autograd.grad(one[0], leaves)] for one in (found, by_hand))
    for ours, theirs, exactly in zip(found, by_hand, true, strict=True):
        assert relative_error(ours, exactly) <= 1.2 * relative_error(theirs, exactly) + 1e-6


def test_the_head_for_the_compiler_takes_chunks_of_one_size_over_all_positions():
    """And gives what the other gives, losses and gradients."""
    lm, rows = small_model("gpt2"), 48  # more than 256 positions, the limit of a chunk
    batch, weights = {"input_ids": torch.randint(V, (rows, T))}, torch.rand(rows)
    sizes, found = {}, []
    for softmax in (ChunkSoftmax(), CompilerSoftmax()):
        model, own = CausalLMLoss(lm), sizes.setdefault(softmax.by_hand, [])
        model.chunk_softmax = softmax
        softmax.register_forward_pre_hook(lambda module, args, own=own: own.append(len(args[0])))
        lm.zero_grad()
        loss, losses = model(batch, weights)
        loss.backward()
        found.append([loss.detach(), losses, gradients(lm)])
    assert sum(sizes[True]) == rows * (T - 1) and len(set(sizes[True])) == 2
    assert sizes[False] == [192] * 6  # rows * T
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def test_a_second_backward_is_refused_not_wrong():
    leaves, targets, weights = problem(9)
    loss, _, _ = linear_cross_entropy(*leaves[:2], targets, weights, leaves[2])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_gradient_work_under_no_grad_and_the_same_losses():
    leaves, targets, weights = problem(300)
    with torch.no_grad():
        loss, losses, _ = linear_cross_entropy(*leaves[:2], targets, weights, leaves[2])
    assert not loss.requires_grad
    expected, expected_losses, _ = brute_force(*leaves, targets, weights)
    torch.testing.assert_close([loss, losses], [expected.detach(), expected_losses.detach()])


def test_huge_logits_stay_finite():
    hidden = torch.full((3, 4), 100.0, requires_grad=True)
    weight = torch.linspace(-30, 30, 5)[:, None].repeat(1, 4)
    loss, losses, _ = linear_cross_entropy(hidden, weight, torch.tensor([0, 2, 4]), torch.ones(3))
    torch.testing.assert_close(losses, torch.tensor([24000.0, 12000.0, 0.0]))
    assert torch.autograd.grad(loss, hidden)[0].isfinite().all()


def test_autocast_is_as_exact_as_the_plain_loss_under_autocast():
    leaves, targets, weights = problem(700, torch.float32)
    weights = weights.abs()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = brute_force(*exact, targets, weights.double())
    expected_grads = torch.autograd.grad(expected[0], exact)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(*leaves[:2], targets, weights, leaves[2])
        plain = brute_force(*leaves, targets, weights)
    found_grads, plain_grads = torch.autograd.grad(found[0], leaves), torch.autograd.grad(plain[0], leaves)
    assert found[1].dtype == torch.float32 and all(grad.dtype == torch.float32 for grad in found_grads)
    for ours, theirs, true in zip(
        [*found[:2], *found_grads], [*plain[:2], *plain_grads], [*expected[:2], *expected_grads], strict=True
    ):
        assert relative_error(ours, true) <= 1.2 * relative_error(theirs, true) + 1e-6


def smoothed(logits, targets):
    """Label smoothing and z-loss, as a script may have them."""
    assert logits.dtype in (torch.float32, torch.float64) and targets.min() >= 0
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    return losses + 1e-2 * logits.logsumexp(1) ** 2


def test_a_loss_of_ones_own_must_give_one_loss_per_token():
    model = CausalLMLoss(small_model("gpt2"), F.cross_entropy)
    with pytest.raises(ValueError, match=r"token_loss: returned \[\] for \[\d+\] targets"):
        model({"input_ids": torch.randint(V, (2, T))})


def test_what_a_loss_of_ones_own_makes_of_ignored_tokens_goes_nowhere():
    """The value and the derivative; those of tokens without a prediction come with target 0."""
    batch = without(masked_batch(), "attention_mask", "token_type_ids", "next_sentence_label")
    batch["slot_labels"][batch["slot_labels"] == 0] = 1

    def nan_at_zero(logits, targets):
        losses = F.cross_entropy(logits, targets, reduction="none")
        return losses + logits[:, 0] * torch.where(targets == 0, math.nan, 0.0)

    lm = small_model("roberta", AutoModelForMaskedLM, **SMALL | {"pad_token_id": 1})
    grads = []
    for token_loss in nan_at_zero, None:
        MaskedLMLoss(lm, token_loss)(batch)["loss_sums"][0].backward()
        grads.append(gradients(lm))
        lm.zero_grad()
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


class Operations(TorchDispatchMode):
    """Their names, and the number of elements of the largest tensor that any of them returns."""

    size, names = 0, frozenset()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.names |= {str(function)}
        sizes = [
            x.untyped_storage().nbytes() // x.element_size()
            for x in torch.utils._pytree.tree_leaves(out)
            if isinstance(x, torch.Tensor)
        ]
        self.size = max(self.size, *sizes, 0)
        return out


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_logits_of_all_rows_never_exist(precision):
    model = CausalLMLoss(small_model("gpt2", **(GPT2 | {"vocab_size": 1000})))
    input_ids = torch.randint(1000, (64, T))
    with Operations() as seen, torch.autocast("cpu", precision, enabled=precision != torch.float32):
        model({"input_ids": input_ids})[0].backward()
    assert seen.size <= chunk_rows("cpu", 1000) * 1024 < 64 * (T - 1) * 1000 / 5


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_step_never_waits_for_the_device_and_attends_causally_without_a_mask(model_type):
    model = CausalLMLoss(small_model(model_type))
    batch = {"input_ids": torch.randint(V, (2, T)), "row": torch.arange(2)}
    with Operations() as seen:
        model(batch)[0].backward()
    assert not [name for name in seen.names if "_local_scalar_dense" in name or "is_nonzero" in name]

    attentions = []

    def record(graph, _):
        attentions.extend(n.kwargs for n in graph.graph.nodes if "scaled_dot_product" in str(n.target))
        return graph

    if not hasattr(masking_utils, "is_torchdynamo_exporting") or Version(torch.__version__) < Version("2.11"):
        pytest.skip("transformers 5.17 makes a mask while it compiles, and with torch 2.9 any: only slower")
    torch._dynamo.reset()
    torch.compile(model, backend=record)(batch)
    assert len(attentions) == 2 and all(a["is_causal"] and a["attn_mask"] is None for a in attentions)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device, GPU=1 pytest")
def test_on_a_gpu_a_whole_step_waits_for_nothing():
    """Loss, gradient, clipping, guard, means and update: torch raises at a wait."""
    accelerator = Accelerator(mixed_precision="bf16")
    model = CausalLMLoss(small_model("gpt2"))
    to_device(model, accelerator)
    model, optimizer = accelerator.prepare(model, build_optimizer(model, settings()))
    guard, means = UpdateGuard(accelerator, optimizer), Means(accelerator, "loss/train")
    batches = [{"input_ids": torch.randint(V, (8, T), device=accelerator.device)} for _ in range(8)]
    try:
        for step, batch in enumerate(batches):
            loss, _ = model(batch)
            accelerator.backward(loss)
            means.add(loss[None], guard.check(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first one builds things
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert guard.read() == [0] * 8 and means.read()["loss/train"] > 0


def test_key_tokens_are_those_of_one_token_and_the_others_are_told(capsys):
    vocabulary = {"[UNK]": 0, "plt": 1, " plt": 2, "pd": 7}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    assert keytoken_table(["plt", "pd", "sk"], words).tolist() == [0, 1, 1, 0, 0, 0, 0, 1]  # ids have gaps
    told = "in use: 'plt', ' plt', 'pd'; ignored, because the tokenizer splits them: ' pd', 'sk', ' sk'\n"
    assert capsys.readouterr().out == f"keytokens  {told}"
    assert keytoken_table([], words).sum() == 0 and capsys.readouterr().out == ""


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_keytoken_loss_equals_the_formula_value_and_gradient(model_type, alpha):
    lm = small_model(model_type).double()
    model = CausalLMLoss(lm)
    input_ids, keytokens = torch.randint(40, (5, T)), [3, 7, 11]
    row_weights = keytoken_row_weights(input_ids, torch.eye(V)[keytokens].sum(0), alpha)
    loss, row_losses = model({"input_ids": input_ids}, row_weights)
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}

    lm.zero_grad()
    losses, weights = [], []
    for row in input_ids:
        logp = lm(row[None]).logits[0].log_softmax(-1)
        losses.append(-sum(logp[t, row[t + 1]] for t in range(T - 1)) / (T - 1))
        weights.append(1 + alpha * sum(row.tolist().count(token) for token in keytokens))
    expected = sum(w * one for w, one in zip(weights, losses, strict=True)) / len(losses)
    expected.backward()
    assert model.splits_head
    torch.testing.assert_close(row_weights.tolist(), [float(w) for w in weights])
    torch.testing.assert_close(
        [loss, row_losses], [expected, torch.stack(losses).detach()], rtol=1e-9, atol=0
    )
    expected_grads = {name: parameter.grad for name, parameter in lm.named_parameters()}
    torch.testing.assert_close(found, expected_grads, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("model_type", ["gemma2", "cohere"])
def test_a_head_with_scaled_or_capped_logits_is_noticed_and_used_whole(model_type):
    with pytest.warns(UserWarning, match="computed from all the logits"):
        model = CausalLMLoss(small_model(model_type))
    input_ids = torch.randint(V, (3, T))
    loss, row_losses = model({"input_ids": input_ids}, torch.ones(3))
    assert not model.splits_head
    torch.testing.assert_close(loss, model.lm(input_ids, labels=input_ids).loss)
    torch.testing.assert_close(loss, row_losses.mean())


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "cohere"])
@pytest.mark.filterwarnings("ignore:.*computed from all the logits")
def test_a_causal_model_trains_a_loss_of_ones_own_and_is_evaluated_by_cross_entropy(model_type):
    lm = small_model(model_type).double()
    model, plain = CausalLMLoss(lm, smoothed), CausalLMLoss(lm)
    model.splits_head = plain.splits_head = model_type != "cohere"  # which is in float32 inside
    batch, row_weights = {"input_ids": torch.randint(V, (5, T))}, torch.rand(5).double()
    loss, row_losses = model(batch, row_weights)
    loss.backward()
    found = gradients(lm)
    lm.zero_grad()
    logits, targets = lm(batch["input_ids"]).logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
    own = F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1).view(5, -1).mean(1)
    expected = (row_weights * (own + 1e-2 * logits.logsumexp(1).square().view(5, -1).mean(1))).mean()
    expected.backward()
    torch.testing.assert_close([loss.double(), found], [expected, gradients(lm)], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(row_losses.double(), plain(batch)[1].double(), rtol=1e-5, atol=0)
    assert all(map(torch.equal, model.eval()(batch, row_weights), plain(batch, row_weights)))


@pytest.mark.parametrize("name", ["roberta", "distilbert"])
@pytest.mark.filterwarnings("ignore:.*computed from all the logits")
def test_a_masked_model_trains_a_loss_of_ones_own_and_is_evaluated_by_cross_entropy(name):
    settings = SMALL | {"pad_token_id": 1}
    if name == "distilbert":
        settings = {"vocab_size": V, "dim": D, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
    lm = small_model(name, AutoModelForMaskedLM, **settings)
    model, plain = MaskedLMLoss(lm, smoothed), MaskedLMLoss(lm)
    assert model.splits_head == (name == "roberta")
    batch = without(masked_batch(), "attention_mask", "token_type_ids", "next_sentence_label")
    loss = model(batch)["loss_sums"][0]
    loss.backward()
    found = gradients(lm)
    lm.zero_grad()
    labels = full_labels(batch)
    predicted = labels != -100
    logits = lm(batch["input_ids"]).logits[predicted]
    expected = F.cross_entropy(logits, labels[predicted], reduction="sum", label_smoothing=0.1)
    expected = expected + 1e-2 * logits.logsumexp(1).square().sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    largest = max(grad.abs().max().item() for grad in found.values())
    torch.testing.assert_close(found, gradients(lm), rtol=1e-5, atol=1e-6 * largest)
    evaluated = plain.eval()(batch)
    assert evaluated["rows"][:, 1].tolist() == predicted.sum(1).tolist()
    torch.testing.assert_close(model.eval()(batch), evaluated, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model_type", "split", "compiled"),
    [
        ("gpt2", True, False), ("gpt2", False, False), ("llama", True, False), ("llama", False, False),
        ("gpt2", True, True), pytest.param("gpt2", False, True, marks=pytest.mark.slow),
        pytest.param("llama", True, True, marks=pytest.mark.slow),
        pytest.param("llama", False, True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_documents_with_positions_of_their_own_do_not_see_each_other(model_type, split, compiled):
    torch._dynamo.reset()
    lm = small_model(model_type).double()
    model = CausalLMLoss(lm)
    model.splits_head = split
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    input_ids, lengths = torch.randint(V, (3, T)), [[T], [5, 19], [1, 8, 15]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])

    def one_by_one(rows):
        logits = [torch.cat([lm(part[None]).logits[0] for part in ids.split(row)])[:-1] for ids, row in rows]
        return torch.stack([F.cross_entropy(x, ids[1:]) for x, (ids, _) in zip(logits, rows, strict=True)])

    close = {"rtol": 1e-9, "atol": 0} if split else {"rtol": 1e-6, "atol": 0}  # whole logits become float32
    apart = one_by_one(list(zip(input_ids, lengths, strict=True)))
    whole = one_by_one([(ids, [T]) for ids in input_ids])
    assert not torch.isclose(apart, whole)[1:].any()
    for _ in range(2):  # either kind of batch leaves no trace for the other
        separate = {"input_ids": input_ids, "position_ids": positions}
        found = call(separate)[1], call({"input_ids": input_ids})[1]
        torch.testing.assert_close(torch.stack(found).double(), torch.stack([apart, whole]).detach(), **close)
        logits = lm(**separate, use_cache=False).logits  # another caller
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), input_ids[:, 1:], reduction="none")
        torch.testing.assert_close(losses.mean(1), apart)


def test_a_forward_that_fails_leaves_transformers_as_it_was():
    lm = small_model("gpt2")
    model = CausalLMLoss(lm)
    input_ids, positions = torch.randint(V, (1, T)), torch.arange(T)[None] % 8
    expected = lm(input_ids=input_ids, position_ids=positions).logits
    with pytest.raises(IndexError):
        model({"input_ids": torch.full((1, T), V)})
    assert torch.equal(lm(input_ids=input_ids, position_ids=positions).logits, expected)


def test_importing_the_losses_changes_nothing_of_transformers():
    """The function is still the one that transformers' own file defines."""
    code = (
        "from transformers import masking_utils; import utils.learning.losses;"
        "print(masking_utils.find_packed_sequence_indices.__code__.co_filename == masking_utils.__file__)"
    )
    result = forked.run_code(code)
    assert result.stdout == "True\n", result.stderr


@pytest.mark.parametrize("split", [True, False])
def test_an_attention_mask_reaches_the_model(split):
    lm = small_model("llama")
    model = CausalLMLoss(lm)
    model.splits_head = split
    input_ids, mask = torch.randint(V, (2, T)), (torch.arange(T) >= torch.tensor([[0], [6]])).long()
    logits = lm(input_ids=input_ids, attention_mask=mask).logits[:, :-1]
    expected = F.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none").mean(1)
    found = model({"input_ids": input_ids, "attention_mask": mask})[1]
    torch.testing.assert_close(found, expected)
    assert not torch.isclose(found, model({"input_ids": input_ids})[1])[1]


class WithLateBias(GPT2LMHeadModel):
    """New, it does what GPT-2 does: the parameters of its own change nothing yet."""

    def __init__(self, config):
        super().__init__(config)
        self.late = torch.nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + self.late
        return out


def test_a_part_of_the_head_that_does_nothing_yet_is_noticed_and_trained():
    lm = WithLateBias(AutoConfig.for_model("gpt2", **GPT2))
    before, random = copy.deepcopy(lm.state_dict()), torch.get_rng_state()
    with pytest.warns(UserWarning, match="computed from all the logits"):
        model = CausalLMLoss(lm)
    assert torch.equal(torch.get_rng_state(), random) and lm.training
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())
    model({"input_ids": torch.randint(V, (2, T))})[0].backward()
    assert lm.late.grad.abs().sum() > 0


def test_the_trial_of_the_head_leaves_its_weights_bit_for_bit():
    for model_type, auto in (("llama", AutoModelForCausalLM), ("esm", AutoModelForMaskedLM)):
        special = {"num_key_value_heads": 2}
        if model_type == "esm":
            special = {"pad_token_id": 1, "mask_token_id": 4}
        lm = auto.from_config(AutoConfig.for_model(model_type, **(SMALL | special)))
        before = copy.deepcopy(lm.state_dict())
        model = (CausalLMLoss if model_type == "llama" else MaskedLMLoss)(lm)
        assert model.splits_head
        assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())


MASKED = {
    "roberta": ("roberta", AutoModelForMaskedLM, {"pad_token_id": 1}),
    "bert": ("bert", AutoModelForMaskedLM, {"pad_token_id": 0}),
    "modernbert": ("modernbert", AutoModelForMaskedLM, {"pad_token_id": 0, "local_attention": 8}),
    "bert-nsp": ("bert", AutoModelForPreTraining, {"pad_token_id": 0}),
    "esm": ("esm", AutoModelForMaskedLM, {"pad_token_id": 1, "mask_token_id": 4}),  # a bias beside its head
}


def masked_batch(rows=6, slots=5):
    torch.manual_seed(1)
    input_ids = torch.randint(5, V, (rows, T))
    attention_mask = (torch.arange(T) < torch.randint(12, T + 1, (rows, 1))).long()
    positions = torch.stack([torch.randperm(12)[:slots].sort().values for _ in range(rows)])
    labels = torch.randint(5, V, (rows, slots))
    labels[torch.arange(slots) >= torch.randint(1, slots + 1, (rows, 1))] = -100  # unequal numbers per row
    return {
        "input_ids": input_ids, "attention_mask": attention_mask,
        "token_type_ids": (torch.arange(T) > 9).long().repeat(rows, 1), "slots": positions,
        "slot_labels": labels, "next_sentence_label": torch.randint(2, (rows,)), "row": torch.arange(rows),
    }  # fmt: skip


def without(batch, *names):
    return {name: value for name, value in batch.items() if name not in names}


def gradients(lm):
    return {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


def full_labels(batch):
    """[B, T], as transformers takes them."""
    return torch.full_like(batch["input_ids"], -100).scatter(1, batch["slots"], batch["slot_labels"])


@pytest.mark.parametrize("name", MASKED)
def test_sparse_head_equals_transformers_full_head_in_every_gradient(name):
    model_type, auto, special = MASKED[name]
    lm = small_model(model_type, auto, **(SMALL | special | {"type_vocab_size": 2}))
    model = MaskedLMLoss(lm)
    batch = masked_batch()
    if model_type in ("modernbert", "esm"):
        batch = without(batch, "token_type_ids")
    if name != "bert-nsp":
        batch = without(batch, "next_sentence_label")
    nsp, full = batch.get("next_sentence_label"), full_labels(batch)
    counts = torch.stack([(full != -100).sum(), *([] if nsp is None else [torch.tensor(len(nsp))])])
    found = model(batch)
    assert found.keys() == {"loss_sums", "right"}
    loss, right = (found["loss_sums"] / counts).sum(), found["right"]
    loss.backward()
    found = gradients(lm)
    lm.zero_grad()
    out = lm(**without(batch, "slots", "slot_labels", "row"), labels=full)
    out.loss.backward()
    assert model.splits_head
    torch.testing.assert_close(loss, out.loss, rtol=1e-5, atol=0)
    logits = out.logits if nsp is None else out.prediction_logits
    assert right == (logits.argmax(-1) == full).sum()
    expected = gradients(lm)
    # The gradient of a key bias is zero but for rounding: hence the tolerance relative to all of them.
    largest = max(grad.abs().max().item() for grad in expected.values())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * largest)
    assert_rows(model.eval()(batch), out, full, nsp)


def assert_rows(found, out, full, nsp):
    """Of each row what transformers' logits give: losses, predictions, right ones; and of the pairs."""
    logits = out.logits if nsp is None else out.prediction_logits
    losses = F.cross_entropy(logits.mT, full, reduction="none").sum(1)
    columns = [losses, (full != -100).sum(1), (logits.argmax(-1) == full).sum(1)]
    if nsp is not None:
        scores = out.seq_relationship_logits
        columns += [F.cross_entropy(scores, nsp, reduction="none"), torch.ones_like(nsp)]
        columns += [scores.argmax(1) == nsp]
    expected = torch.stack([column.detach().float() for column in columns], 1)
    torch.testing.assert_close(found["rows"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["loss_sums"], expected[:, ::3].sum(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", MASKED)
def test_a_masked_step_never_waits_for_the_device(name):
    """Sentence pairs, which are padded, too; rows of the others are full and have no attention mask."""
    model_type, auto, special = MASKED[name]
    model = MaskedLMLoss(small_model(model_type, auto, **(SMALL | special | {"type_vocab_size": 2})))
    batch = masked_batch()
    if model_type != "bert":
        batch = without(batch, "attention_mask", "token_type_ids")
    if name != "bert-nsp":
        batch = without(batch, "next_sentence_label")
    with Operations() as seen:
        model(batch)["loss_sums"].sum().backward()
    assert not [name for name in seen.names if "_local_scalar_dense" in name or "is_nonzero" in name]


def test_a_masked_head_of_another_form_is_used_whole():
    lm = small_model(
        "distilbert", AutoModelForMaskedLM, vocab_size=V, dim=D, n_layers=1, n_heads=2, hidden_dim=32
    )
    with pytest.warns(UserWarning, match="computed from all the logits"):
        model = MaskedLMLoss(lm)
    batch = without(masked_batch(), "attention_mask", "token_type_ids", "next_sentence_label")
    full = full_labels(batch)
    out = lm(batch["input_ids"], labels=full)
    found = model.eval()(batch)
    torch.testing.assert_close(found["loss_sums"][0] / (full != -100).sum(), out.loss)
    assert_rows(found, out, full, None)


def value_and_gradients(model, lm, input_ids, *weights):
    lm.zero_grad()
    loss = model({"input_ids": input_ids, "position": torch.arange(len(input_ids))}, *weights)[0]
    loss.backward()
    return loss.detach(), gradients(lm)


def test_steps_under_compile_are_one_graph_that_is_made_once():
    model = CausalLMLoss(small_model("gpt2"))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled({"input_ids": torch.randint(V, (2, T)), "row": torch.arange(2)}, torch.rand(2))[0].backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(3):
            batch = {"input_ids": torch.randint(V, (2, T)), "row": torch.arange(2) + step}
            compiled(batch, torch.rand(2))[0].backward()


@pytest.mark.parametrize("token_loss", [None, smoothed])
@pytest.mark.parametrize("regional", [True, False])
def test_compile_changes_neither_value_nor_gradient_nor_names(regional, token_loss):
    """The backend traces and differentiates as inductor's front half does, without the C++ compiler."""
    from accelerate.utils import compile_regions

    lm = small_model("gpt2")
    use_one_kernel_gelu(lm)
    model = CausalLMLoss(lm, token_loss)
    names = set(model.state_dict())
    assert names == {"lm." + name for name in lm.state_dict()}  # the loss adds nothing to what is saved
    inputs = torch.randint(V, (16, T)), torch.rand(16)
    expected = value_and_gradients(model, lm, *inputs)
    torch._dynamo.reset()
    if regional:
        compiled = compile_regions(model, backend="aot_eager")
        assert type(compiled.chunk_softmax).__name__ == "OptimizedModule"
    else:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=token_loss is None)
    torch.testing.assert_close(value_and_gradients(compiled, lm, *inputs), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "ddp smoothed", "fsdp2 smoothed"])
def test_two_processes_give_the_gradient_of_one(wrapper):
    run = forked.run("tests.test_losses", [wrapper], processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("gradients agree") == 2


def two_process_worker(wrapper):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    lm = small_model("gpt2")
    token_loss = smoothed if "smoothed" in wrapper else None
    wrapper = wrapper.split()[0]
    expected_model = CausalLMLoss(copy.deepcopy(lm), token_loss)
    model = CausalLMLoss(lm, token_loss)
    torch.manual_seed(0)
    input_ids, weights = torch.randint(V, (32, T)), torch.rand(32)
    _, expected = value_and_gradients(expected_model, expected_model.lm, input_ids, weights)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = dist.init_device_mesh("cpu", (2,))
        for block in lm.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    mine = slice(16 * dist.get_rank(), 16 * dist.get_rank() + 16)
    loss, _ = model({"input_ids": input_ids[mine], "row": torch.arange(16)}, weights[mine])
    loss.backward()
    for name, parameter in lm.named_parameters():
        grad = parameter.grad.full_tensor() if wrapper == "fsdp2" else parameter.grad
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7, msg=name)
    print("gradients agree", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's destructor, holding the GIL, may join a thread that waits for the GIL


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    two_process_worker(sys.argv[1])
