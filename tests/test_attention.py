"""Attention with windows but without masks, which a GPU gets by itself where a model slides:
losses and gradients are those of transformers' own."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.masking_utils import sdpa_mask

from tests.test_model import BERT, build
from utils.learning import window_attention
from utils.learning.losses import MaskedLMLoss
from utils.learning.model import window_pays


def sliding(model_type="modernbert", reach=4, **settings):
    """A model of two sliding layers and one that sees all, with a reach of so many tokens."""
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    shape |= {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    window = {"local_attention": 2 * reach}
    if model_type != "modernbert":
        window = {"sliding_window": reach + 1, "head_dim": 8}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **shape, **window, layer_types=layers, **settings)
    model = (AutoModelForMaskedLM if model_type == "modernbert" else AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # as large as a trained one's, or all attend alike
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model


def by_definition(query, key, value, starts, _, most, __, dropout, is_causal, debug, scale, window_size_left,
                  window_size_right):  # fmt: skip
    """What torch documents of its kernel, which no CPU has: lines [tokens, H, D] that hold documents, each
    seeing itself, and of that so many tokens before and after. None: all of them."""
    assert dropout == 0 and not debug and starts.dtype == torch.int32 and query.dtype == torch.bfloat16
    assert starts[0] == 0 and starts[-1] == len(query)
    outs = []
    for begin, end in itertools.pairwise(starts.tolist()):
        assert 0 <= end - begin <= most
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        place = torch.arange(end - begin)
        ahead = place[None] - place[:, None]
        left, right = (most if reach is None else reach for reach in (window_size_left, window_size_right))
        seen = (ahead >= -left) & (ahead <= (0 if is_causal else right))
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs), None


WINDOWED = [("modernbert", {}), ("ministral", {"num_key_value_heads": 2})]


needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_a_gpu)])


@pytest.fixture
def kernel(device, monkeypatch):
    """On a CPU the kernel by its definition. Lists the masks that sdpa gets."""
    if device == "cpu":
        monkeypatch.setattr(window_attention, "_kernel", by_definition)
    masks = []
    monkeypatch.setattr(
        window_attention, "sdpa_mask", lambda *a, **k: masks.append(k) or sdpa_mask(*a, **k)
    )
    return masks


def assert_window_is_sdpa(lm, loss, device):
    """Losses and gradients in bfloat16."""
    found = []
    for name in ("sdpa", "window"):
        lm.set_attn_implementation(name)
        lm.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            out = loss()
        out.float().logsumexp(-1).mean().backward()
        gradients = (p.grad for p in lm.parameters() if p.grad is not None)
        found.append([out.detach().float(), *gradients])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 0.06 * max(other.abs().max(), 1e-3)


@ON_BOTH
@pytest.mark.parametrize("model_type, settings", WINDOWED)
@pytest.mark.parametrize("T", [3, 40, 130])
def test_windows_without_masks_give_sdpas_logits_and_gradients(T, model_type, settings, device, kernel):
    """A padded row gets a mask, and so do the layers that see all of it."""
    model = sliding(model_type, reach=2, **settings).to(device)
    ids = torch.randint(1, 64, (3, T), device=device)
    padding = {"attention_mask": (torch.arange(T) < T - 1).long().repeat(3, 1).to(device)}
    for more in [{}, padding]:
        kernel.clear()
        assert_window_is_sdpa(model, lambda more=more: model(input_ids=ids, **more).logits, device)
        assert any(mask.get("local_size") is not None for mask in kernel) == bool(more)


@pytest.mark.parametrize(
    ("model_type", "device", "precision", "expected"),
    [
        ("modernbert", "cuda", "bf16", True), ("ministral", "cuda", "fp16", True),
        ("modernbert", "cuda", "no", False),  # the kernel is one for half precision
        ("modernbert", "cpu", "bf16", False), ("modernbert", "xla", "bf16", False),
        ("bert", "cuda", "bf16", False), ("gpt2", "cuda", "bf16", False), ("bloom", "cuda", "bf16", False),
        ("llama4_text", "cuda", "bf16", False),  # attends in chunks
    ],
)  # fmt: skip
def test_it_is_taken_where_a_model_slides_and_the_device_can(
    model_type, device, precision, expected, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    kind = "masked" if "bert" in model_type else "causal"
    config = sliding(model_type).config if model_type in ("modernbert", "ministral") else \
        AutoConfig.for_model(model_type)  # fmt: skip
    assert window_pays(kind, config, device) == expected


@pytest.mark.filterwarnings("error:.*computed from all the logits")
def test_a_model_for_a_gpu_is_built_on_a_cpu_and_saved_without_the_name(monkeypatch, tmp_path):
    """The head is split, and what is saved loads in plain transformers."""
    monkeypatch.setattr("utils.learning.model.window_pays", lambda kind, config: True)
    lm = build("masked", "modernbert", BERT, 16)
    assert lm.config._attn_implementation == "window" and MaskedLMLoss(lm).splits_head
    lm.save_pretrained(tmp_path)
    assert "window" not in (tmp_path / "config.json").read_text()
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
