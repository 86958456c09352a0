"""Attention on a TPU: inputs and outputs of the flash kernel, with plain softmax attention in its place."""

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from utils.learning import xla_attention

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64)
SIZES |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=1, max_position_embeddings=300, head_dim=8)
GEMMA = dict(num_key_value_heads=2, query_pre_attn_scalar=2, sliding_window=8, final_logit_softcapping=None)
WINDOWS = ["sliding_attention", "full_attention"]


def softmax_attention(calls):
    def attend(query, key, value, causal, sm_scale):
        assert {x.dtype for x in (query, key, value)} == {torch.bfloat16}
        assert query.shape == key.shape == value.shape  # [B, H, T, D]
        calls.append(causal)
        scores = query.float() @ key.float().mT * sm_scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future & causal, -torch.inf)
        return (scores.softmax(-1) @ value.float()).to(query.dtype)

    return attend


@pytest.mark.parametrize(
    ("model_type", "sizes", "tokens", "change", "causal"),
    [
        ("gpt2", dict(attn_pdrop=0), 128, None, [True] * 2),
        ("llama", dict(num_key_value_heads=2), 256, None, [True] * 2),  # grouped-query attention
        # Gemma has its own scale, and sliding windows do not use the kernel.
        ("gemma3_text", GEMMA | dict(layer_types=WINDOWS), 128, None, [True]),
        ("roberta", dict(attention_probs_dropout_prob=0), 128, None, [False] * 2),
        ("roberta", dict(attention_probs_dropout_prob=0), 128, "padding", []),
        ("roberta", dict(attention_probs_dropout_prob=0.1), 128, "training", []),  # the kernel has no dropout
        ("llama", dict(num_key_value_heads=2), 130, None, []),  # the kernel's blocks have 128 tokens
    ],
)  # fmt: skip
def test_flash_attention_on_xla_gives_the_logits_and_gradients_of_sdpa(
    model_type, sizes, tokens, change, causal, monkeypatch
):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | sizes)
    kind = AutoModelForMaskedLM if model_type == "roberta" else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="sdpa").train(change == "training")
    with torch.no_grad():
        for weight in model.parameters():  # as large as in a trained model, or attention is uniform
            weight.mul_(4 if weight.ndim > 1 else 1)
    ids = torch.randint(2, 64, (2, tokens))
    inputs = {"input_ids": ids}
    if change == "padding":
        inputs["attention_mask"] = (torch.arange(tokens) < tokens - 2).long().repeat(2, 1)

    def run():
        torch.manual_seed(0)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**inputs).logits
        logits.float().logsumexp(-1).mean().backward()
        return [logits.detach().float(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected, calls = run(), []
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", xla_attention.xla_attention)
    monkeypatch.setattr(xla_attention, "has_kernel", lambda: True)
    monkeypatch.setattr(xla_attention, "flash_kernel", lambda: softmax_attention(calls))
    results = run()
    assert calls == causal
    for result, reference in zip(results, expected, strict=True):
        assert (result - reference).abs().max() <= 0.06 * max(reference.abs().max(), 1e-3)
