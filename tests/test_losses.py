"""The losses and their gradients against brute force in float64 and against transformers' own heads."""

import copy
import math
import shutil

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

from tests.test_optim import settings
from utils.learning.fused_head import ChunkSoftmax, CompilerSoftmax, chunk_rows, linear_cross_entropy
from utils.learning.kernels import use_one_kernel_gelu
from utils.learning.losses import CausalLMLoss, MaskedLMLoss, keytoken_row_weights, keytoken_table
from utils.learning.model import to_device
from utils.learning.optim import Means, UpdateGuard, build_optimizer

V, D, T = 211, 16, 24
SMALL = {
    "vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": T + 2, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": None,
}  # fmt: skip
LLAMA = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": V, "n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": T, "bos_token_id": 0}
GPT2 |= {"eos_token_id": 0}


def make_model(model_type, auto=AutoModelForCausalLM, **settings):
    """Random weights, scaled up so that logits are of the size of a trained model's; no dropout."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(settings or (GPT2 if model_type == "gpt2" else LLAMA)))
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


needs_a_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++ here")


def random_problem(rows, dtype=torch.float64, bias=True):
    """Returns ([hidden, weight, bias], targets with every seventh ignored, token weights of both signs)."""
    torch.manual_seed(0)
    targets = torch.randint(V, (rows,))
    targets[::7] = -100 if rows > 1 else 3
    hidden, weight = torch.randn(rows, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    leaves = [hidden, weight, *([torch.randn(V, dtype=dtype)] if bias else [])]
    return [leaf.requires_grad_() for leaf in leaves], targets, torch.randn(rows, dtype=dtype)


def brute_force(leaves, targets, token_weights):
    """Returns (weighted sum, losses, correct), computed from all logits at once."""
    logits = F.linear(*leaves)
    losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    return (losses * token_weights).sum(), losses, (logits.argmax(1) == targets)


def chunked_loss(softmax, leaves, targets, token_weights, with_correct=True):
    hidden, weight, bias = [*leaves, None][:3]
    return linear_cross_entropy(hidden, weight, targets, token_weights, bias, softmax, with_correct)


def relative_error(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


KINDS = [(kind, rows, bias) for kind in ("by hand", "compiler") for rows in (1, 256, 700) for bias in (1, 0)]
KINDS.append(pytest.param("compiled", 700, 1, marks=needs_a_compiler))


@pytest.mark.parametrize("kind, rows, bias", KINDS)
def test_chunked_loss_equals_brute_force(kind, rows, bias):
    """Losses, gradients and correct predictions; losses also without gradients. compiled: by inductor."""
    torch._dynamo.reset()
    softmax = ChunkSoftmax() if kind == "by hand" else CompilerSoftmax()
    softmax = torch.compile(softmax, fullgraph=True, dynamic=False) if kind == "compiled" else softmax
    leaves, targets, weights = random_problem(rows, bias=bias)
    loss, losses, correct = chunked_loss(softmax, leaves, targets, weights)
    grads = torch.autograd.grad(3 * loss, leaves)
    expected, expected_losses, expected_correct = brute_force(leaves, targets, weights)
    expected_grads = torch.autograd.grad(3 * expected, leaves)
    assert not losses.requires_grad and losses.shape == (rows,)
    torch.testing.assert_close([loss, losses, *grads], [expected, expected_losses, *expected_grads])
    assert torch.equal(correct, expected_correct)
    if kind != "compiled":  # compiling a second graph would take seconds
        with torch.no_grad():
            loss, losses, correct = chunked_loss(softmax, leaves, targets, weights, with_correct=False)
        assert not loss.requires_grad and correct is None
        torch.testing.assert_close([loss, losses], [expected.detach(), expected_losses.detach()])


@pytest.mark.parametrize("softmax", [ChunkSoftmax(), CompilerSoftmax()], ids=["by hand", "compiler"])
def test_chunked_loss_under_autocast_is_as_exact_as_a_plain_loss(softmax):
    leaves, targets, weights = random_problem(700, torch.float32)
    weights = weights.abs()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        ours = chunked_loss(softmax, leaves, targets, weights)[:2]
        plain = brute_force(leaves, targets, weights)[:2]
    expected = brute_force(exact, targets, weights.double())[:2]
    ours, plain, expected = (
        [*losses, *torch.autograd.grad(losses[0], inputs)]
        for losses, inputs in ((ours, leaves), (plain, leaves), (expected, exact))
    )
    assert all(tensor.dtype == torch.float32 for tensor in ours[1:])
    for tensor, other, true in zip(ours, plain, expected, strict=True):
        assert relative_error(tensor, true) <= 1.2 * relative_error(other, true) + 1e-6


def test_a_second_backward_is_refused():
    loss, _, _ = chunked_loss(ChunkSoftmax(), *random_problem(9))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_huge_logits_stay_finite():
    hidden = torch.full((3, 4), 100.0, requires_grad=True)
    weight = torch.linspace(-30, 30, 5)[:, None].repeat(1, 4)
    loss, losses, _ = linear_cross_entropy(hidden, weight, torch.tensor([0, 2, 4]), torch.ones(3))
    torch.testing.assert_close(losses, torch.tensor([24000.0, 12000.0, 0.0]))
    assert torch.autograd.grad(loss, hidden)[0].isfinite().all()


def smoothed(logits, targets):
    """A token_loss with label smoothing and z-loss."""
    assert logits.dtype in (torch.float32, torch.float64) and targets.min() >= 0
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    return losses + 1e-2 * logits.logsumexp(1) ** 2


def test_an_edited_loss_without_a_loss_per_token_is_refused():
    model = CausalLMLoss(make_model("gpt2"), F.cross_entropy)
    with pytest.raises(ValueError, match=r"token_loss: returned shape \[\] for \[\d+\] targets"):
        model({"input_ids": torch.randint(V, (2, T))})


def test_ignored_tokens_have_no_gradient():
    """Ignored tokens reach token_loss with target 0, where this one has the value and derivative NaN."""
    batch = make_masked_batch()
    batch["slot_labels"][batch["slot_labels"] == 0] = 1

    def nan_at_zero(logits, targets):
        losses = F.cross_entropy(logits, targets, reduction="none")
        return losses + logits[:, 0] * torch.where(targets == 0, math.nan, 0.0)

    lm = make_model("roberta", AutoModelForMaskedLM, **SMALL | {"pad_token_id": 1})
    grads = []
    for token_loss in nan_at_zero, None:
        MaskedLMLoss(lm, token_loss)(batch)["loss_sums"][0].backward()
        grads.append(copy_gradients(lm))
        lm.zero_grad()
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


class Operations(TorchDispatchMode):
    """Records the names of operations and the number of elements of the largest tensor that one returns."""

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
    model = CausalLMLoss(make_model("gpt2", **(GPT2 | {"vocab_size": 1000})))
    input_ids = torch.randint(1000, (64, T))
    with Operations() as seen, torch.autocast("cpu", precision, enabled=precision != torch.float32):
        model({"input_ids": input_ids})[0].backward()
    assert seen.size <= chunk_rows("cpu", 1000) * 1024 < 64 * (T - 1) * 1000 / 5


@pytest.mark.parametrize("name", ["gpt2", "llama", "roberta", "bert", "modernbert", "bert-nsp", "esm"])
def test_a_step_never_waits_for_the_device(name):
    """Covers loss, gradient, clipping, guard and means. Sentence pairs are padded, other rows are full."""
    if name in MASKED:
        model = MaskedLMLoss(make_masked_model(name))
        batch = make_masked_batch(name, padded=name.startswith("bert"))
    else:
        model, batch = CausalLMLoss(make_model(name)), {"input_ids": torch.randint(V, (2, T))}
    accelerator = Accelerator(cpu=True)
    guard = UpdateGuard(accelerator, build_optimizer(model, settings()))
    means = Means(accelerator, "loss/train")
    with Operations() as seen:
        losses = model(batch)
        loss = losses["loss_sums"].sum() if name in MASKED else losses[0]
        loss.backward()
        means.add(loss[None], guard.check(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
    assert not [name for name in seen.names if "_local_scalar_dense" in name or "is_nonzero" in name]
    assert guard.read() == [0] and means.read() == {"loss/train": loss.item()}


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_attention_is_causal_without_a_mask(model_type):
    model, attentions = CausalLMLoss(make_model(model_type)), []

    def record(graph, _):
        attentions.extend(n.kwargs for n in graph.graph.nodes if "scaled_dot_product" in str(n.target))
        return graph

    if not hasattr(masking_utils, "is_torchdynamo_exporting") or Version(torch.__version__) < Version("2.11"):
        pytest.skip("transformers 5.17 makes a mask while it compiles, and with torch 2.9 any: only slower")
    torch._dynamo.reset()
    torch.compile(model, backend=record)({"input_ids": torch.randint(V, (2, T)), "row": torch.arange(2)})
    assert len(attentions) == 2 and all(a["is_causal"] and a["attn_mask"] is None for a in attentions)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device, GPU=1 pytest")
def test_a_step_on_a_gpu_never_synchronizes():
    """Covers loss, gradient, clipping, guard, means and update. torch raises at a synchronization."""
    accelerator = Accelerator(mixed_precision="bf16")
    model = CausalLMLoss(make_model("gpt2"))
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
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step synchronizes
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert guard.read() == [0] * 8 and means.read()["loss/train"] > 0


def test_key_tokens_of_several_tokens_are_ignored_and_named(capsys):
    vocabulary = {"[UNK]": 0, "plt": 1, " plt": 2, "pd": 7}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    assert keytoken_table(["plt", "pd", "sk"], words).tolist() == [0, 1, 1, 0, 0, 0, 0, 1]  # ids have gaps
    message = "in use: 'plt', ' plt', 'pd'; ignored, because the tokenizer splits them: ' pd', 'sk', ' sk'\n"
    assert capsys.readouterr().out == f"keytokens  {message}"
    assert keytoken_table([], words).sum() == 0 and capsys.readouterr().out == ""


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_keytoken_loss_and_gradient_equal_the_formula(model_type, alpha):
    lm = make_model(model_type).double()
    before = copy.deepcopy(lm.state_dict())
    model = CausalLMLoss(lm)  # its trial of the head changes no weight
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())
    input_ids, keytokens = torch.randint(40, (5, T)), [3, 7, 11]
    row_weights = keytoken_row_weights(input_ids, torch.eye(V)[keytokens].sum(0), alpha)
    loss, row_losses = model({"input_ids": input_ids}, row_weights)
    loss.backward()
    grads = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}

    lm.zero_grad()
    losses, weights = [], []
    for row in input_ids:
        logp = lm(row[None]).logits[0].log_softmax(-1)
        losses.append(-sum(logp[t, row[t + 1]] for t in range(T - 1)) / (T - 1))
        weights.append(1 + alpha * sum(row.tolist().count(token) for token in keytokens))
    expected = sum(w * row_loss for w, row_loss in zip(weights, losses, strict=True)) / len(losses)
    expected.backward()
    assert model.splits_head
    torch.testing.assert_close(row_weights.tolist(), [float(w) for w in weights])
    torch.testing.assert_close(
        [loss, row_losses], [expected, torch.stack(losses).detach()], rtol=1e-9, atol=0
    )
    expected_grads = {name: parameter.grad for name, parameter in lm.named_parameters()}
    torch.testing.assert_close(grads, expected_grads, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("model_type", ["gemma2", "cohere"])
def test_a_model_with_scaled_or_capped_logits_keeps_its_own_head(model_type):
    with pytest.warns(UserWarning, match="computed from all the logits"):
        model = CausalLMLoss(make_model(model_type))
    input_ids = torch.randint(V, (3, T))
    loss, row_losses = model({"input_ids": input_ids}, torch.ones(3))
    assert not model.splits_head
    torch.testing.assert_close(loss, model.lm(input_ids, labels=input_ids).loss)
    torch.testing.assert_close(loss, row_losses.mean())


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "cohere"])
@pytest.mark.filterwarnings("ignore:.*computed from all the logits")
def test_a_causal_model_trains_an_edited_loss_and_is_evaluated_by_cross_entropy(model_type):
    lm = make_model(model_type).double()
    model, plain = CausalLMLoss(lm, smoothed), CausalLMLoss(lm)
    model.splits_head = plain.splits_head = model_type != "cohere"  # Cohere scales its logits in float32
    batch, row_weights = {"input_ids": torch.randint(V, (5, T))}, torch.rand(5).double()
    loss, row_losses = model(batch, row_weights)
    loss.backward()
    grads = copy_gradients(lm)
    lm.zero_grad()
    logits, targets = lm(batch["input_ids"]).logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
    token_losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    token_losses = token_losses + 1e-2 * logits.logsumexp(1).square()
    expected = (row_weights * token_losses.view(5, -1).mean(1)).mean()
    expected.backward()
    torch.testing.assert_close([loss.double(), grads], [expected, copy_gradients(lm)], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(row_losses.double(), plain(batch)[1].double(), rtol=1e-5, atol=0)
    assert all(map(torch.equal, model.eval()(batch, row_weights), plain(batch, row_weights)))


@pytest.mark.parametrize(
    ("model_type", "split", "compiled"),
    [
        ("gpt2", True, False), ("gpt2", False, False), ("llama", True, False), ("llama", False, False),
        ("gpt2", True, True), pytest.param("gpt2", False, True, marks=pytest.mark.slow),
        pytest.param("llama", True, True, marks=pytest.mark.slow),
        pytest.param("llama", False, True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_documents_with_separate_positions_do_not_attend_to_each_other(model_type, split, compiled):
    torch._dynamo.reset()
    lm = make_model(model_type).double()
    model = CausalLMLoss(lm)
    model.splits_head = split
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    input_ids, lengths = torch.randint(V, (3, T)), [[T], [5, 19], [1, 8, 15]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])

    def one_by_one(rows):
        logits = [torch.cat([lm(part[None]).logits[0] for part in ids.split(row)])[:-1] for ids, row in rows]
        return torch.stack([F.cross_entropy(x, ids[1:]) for x, (ids, _) in zip(logits, rows, strict=True)])

    close = {"rtol": 1e-9, "atol": 0} if split else {"rtol": 1e-6, "atol": 0}  # full logits are float32
    by_document = one_by_one(list(zip(input_ids, lengths, strict=True)))
    by_row = one_by_one([(ids, [T]) for ids in input_ids])
    assert not torch.isclose(by_document, by_row)[1:].any()
    for _ in range(2):  # neither kind of batch affects the other
        separate = {"input_ids": input_ids, "position_ids": positions}
        row_losses = [call(separate)[1].double(), call({"input_ids": input_ids})[1].double()]
        torch.testing.assert_close(row_losses, [by_document.detach(), by_row.detach()], **close)
        logits = lm(**separate, use_cache=False).logits  # transformers' own forward
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), input_ids[:, 1:], reduction="none")
        torch.testing.assert_close(losses.mean(1), by_document)


@pytest.mark.parametrize("split", [True, False])
def test_an_attention_mask_reaches_the_model(split):
    lm = make_model("llama")
    model = CausalLMLoss(lm)
    model.splits_head = split
    input_ids, mask = torch.randint(V, (2, T)), (torch.arange(T) >= torch.tensor([[0], [6]])).long()
    logits = lm(input_ids=input_ids, attention_mask=mask).logits[:, :-1]
    expected = F.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none").mean(1)
    row_losses = model({"input_ids": input_ids, "attention_mask": mask})[1]
    torch.testing.assert_close(row_losses, expected)
    assert not torch.isclose(row_losses, model({"input_ids": input_ids})[1])[1]


class WithLateBias(GPT2LMHeadModel):
    """GPT-2 with a bias of the logits that starts at zero."""

    def __init__(self, config):
        super().__init__(config)
        self.late = torch.nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + self.late
        return out


def test_a_parameter_of_the_head_that_is_still_zero_is_trained():
    lm = WithLateBias(AutoConfig.for_model("gpt2", **GPT2))
    before, random = copy.deepcopy(lm.state_dict()), torch.get_rng_state()
    with pytest.warns(UserWarning, match="computed from all the logits"):
        model = CausalLMLoss(lm)
    assert torch.equal(torch.get_rng_state(), random) and lm.training
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())
    model({"input_ids": torch.randint(V, (2, T))})[0].backward()
    assert lm.late.grad.abs().sum() > 0


MASKED = {
    "roberta": ("roberta", AutoModelForMaskedLM, {"pad_token_id": 1}),
    "bert": ("bert", AutoModelForMaskedLM, {"pad_token_id": 0}),
    "modernbert": ("modernbert", AutoModelForMaskedLM, {"pad_token_id": 0, "local_attention": 8}),
    "bert-nsp": ("bert", AutoModelForPreTraining, {"pad_token_id": 0}),
    "esm": ("esm", AutoModelForMaskedLM, {"pad_token_id": 1, "mask_token_id": 4}),  # a separate bias
    "distilbert": ("distilbert", AutoModelForMaskedLM, {"hidden_dim": 32}),  # its head cannot be split off
}


def make_masked_model(name):
    model_type, auto, special = MASKED[name]
    return make_model(model_type, auto, **(SMALL | special | {"type_vocab_size": 2}))


def make_masked_batch(name=None, padded=False, rows=6, slots=5):
    """A batch for a model of MASKED. padded: with attention mask and token types."""
    torch.manual_seed(1)
    input_ids = torch.randint(5, V, (rows, T))
    attention_mask = (torch.arange(T) < torch.randint(12, T + 1, (rows, 1))).long()
    positions = torch.stack([torch.randperm(12)[:slots].sort().values for _ in range(rows)])
    labels = torch.randint(5, V, (rows, slots))
    labels[torch.arange(slots) >= torch.randint(1, slots + 1, (rows, 1))] = -100  # unequal numbers per row
    batch = {"input_ids": input_ids, "slots": positions, "slot_labels": labels, "row": torch.arange(rows)}
    if padded:
        batch |= {"attention_mask": attention_mask}
    if padded and name not in ("modernbert", "esm", "distilbert"):
        batch |= {"token_type_ids": (torch.arange(T) > 9).long().repeat(rows, 1)}
    if name == "bert-nsp":
        batch |= {"next_sentence_label": torch.randint(2, (rows,))}
    return batch


def without(batch, *names):
    return {name: value for name, value in batch.items() if name not in names}


def copy_gradients(lm):
    return {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


def make_full_labels(batch):
    """Labels as transformers takes them, [B, T]."""
    return torch.full_like(batch["input_ids"], -100).scatter(1, batch["slots"], batch["slot_labels"])


@pytest.mark.parametrize(("name", "token_loss"), [
    *((name, None) for name in MASKED), ("roberta", smoothed), ("distilbert", smoothed),
    ("bert-nsp", smoothed),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*computed from all the logits")
def test_masked_loss_and_gradients_equal_transformers_full_head(name, token_loss):
    """An edited loss is trained, but evaluation is by cross-entropy."""
    lm, batch = make_masked_model(name), make_masked_batch(name, padded=True)
    before = copy.deepcopy(lm.state_dict())
    model = MaskedLMLoss(lm, token_loss)  # its trial of the head changes no weight
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())
    nsp, full = batch.get("next_sentence_label"), make_full_labels(batch)
    counts = torch.stack([(full != -100).sum(), *([] if nsp is None else [torch.tensor(len(nsp))])])
    result = model(batch)
    assert result.keys() == {"loss_sums", "correct"}
    loss, right = (result["loss_sums"] / counts).sum(), result["correct"]
    loss.backward()
    grads = copy_gradients(lm)
    lm.zero_grad()
    out, predicted = lm(**without(batch, "slots", "slot_labels", "row"), labels=full), full != -100
    logits = out.logits if nsp is None else out.prediction_logits
    expected_loss = out.loss
    if token_loss:
        expected_loss = F.cross_entropy(logits[predicted], full[predicted], label_smoothing=0.1)
        expected_loss = expected_loss + 1e-2 * logits[predicted].logsumexp(1).square().mean()
        expected_loss += 0 if nsp is None else F.cross_entropy(out.seq_relationship_logits, nsp)
    expected_loss.backward()
    assert model.splits_head == (name != "distilbert")
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    assert right == (logits.argmax(-1) == full).sum()
    expected = copy_gradients(lm)
    # The gradient of a key bias is zero up to rounding, so the tolerance is relative to the largest one.
    largest = max(grad.abs().max().item() for grad in expected.values())
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-6 * largest)
    assert_rows(model.eval()(batch), out, full, nsp)


def assert_rows(result, out, full, nsp):
    """Compares summed losses, predictions and correct ones of each row with those of transformers' logits."""
    logits = out.logits if nsp is None else out.prediction_logits
    losses = F.cross_entropy(logits.mT, full, reduction="none").sum(1)
    columns = [losses, (full != -100).sum(1), (logits.argmax(-1) == full).sum(1)]
    if nsp is not None:
        scores = out.seq_relationship_logits
        columns += [F.cross_entropy(scores, nsp, reduction="none"), torch.ones_like(nsp)]
        columns += [scores.argmax(1) == nsp]
    expected = torch.stack([column.detach().float() for column in columns], 1)
    torch.testing.assert_close(result["rows"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result["loss_sums"], expected[:, ::3].sum(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("token_loss", [None, smoothed])
def test_the_compiled_loss_is_one_graph_with_the_value_and_gradients_of_eager(token_loss):
    """aot_eager traces and differentiates as inductor does, without the C++ compiler."""
    lm = make_model("gpt2")
    use_one_kernel_gelu(lm)
    model = CausalLMLoss(lm, token_loss)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=token_loss is None)
    for step in range(3):
        batch = {"input_ids": torch.randint(V, (16, T)), "row": torch.arange(16) + step}
        weights = torch.rand(16)
        results = []
        for loss_model in (model, compiled):
            lm.zero_grad()
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                loss = loss_model(batch, weights)[0]
                loss.backward()
            results.append([loss.detach(), copy_gradients(lm)])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)

