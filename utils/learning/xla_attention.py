"""Attention on XLA: torch_xla's flash attention (Pallas) on a TPU where possible, else torch's SDPA.

Shapes: B rows, H heads, T tokens, D head size.
"""

import importlib.util

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from utils.devices import is_tpu, xla_precision

DROPOUTS = "attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"  # fields of configurations


def use_xla_attention() -> None:
    """In bfloat16 runs, registers xla_attention as "sdpa" for all models."""
    if xla_precision() == "bf16":
        AttentionInterface.register("sdpa", xla_attention)


def has_kernel() -> bool:
    return is_tpu() and importlib.util.find_spec("jax") is not None


def kernel_takes(tokens: int, head_size: int) -> bool:
    """True if there is a kernel and it takes T (128, 256, 512 or n x 1,024) and D (<= 128 or n x 128)."""
    divided = tokens in (128, 256, 512) or tokens % 1024 == 0
    return has_kernel() and divided and (head_size <= 128 or head_size % 128 == 0)


def xla_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
                  position_bias=None, **more):  # fmt: skip
    """query [B, H, T, D], key and value the same or with fewer heads -> ([B, T, H, D], None)."""
    # torch_xla 2.9: autocast casts the inputs of torch's attention on CUDA and CPU, but not on XLA. With
    # float32 QK-norm (Qwen3, OLMo 2, Gemma 3) query and key have another dtype than value.
    query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
    tokens, head_size = query.shape[2:]
    unmasked = attention_mask is None and position_bias is None and key.shape[2] == tokens
    if dropout or not unmasked or value.shape[3] != head_size or not kernel_takes(tokens, head_size):
        options = dict(dropout=dropout, scaling=scaling, is_causal=is_causal, position_bias=position_bias)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options, **more)
    groups = query.shape[1] // key.shape[1]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scale = head_size**-0.5 if scaling is None else scaling
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    out = flash_kernel()(query, key, value, causal=causal, sm_scale=scale)
    return out.transpose(1, 2).contiguous(), None


def flash_kernel():
    from torch_xla.experimental.custom_kernel import flash_attention

    return flash_attention


def attention_name(config, args) -> str:
    """The name of the attention kernel, for the start-up lines."""
    name, heads = config._attn_implementation, getattr(config, "num_attention_heads", None)
    if name != "sdpa" or xla_precision() != "bf16" or not heads or getattr(args, "next_sentence", False):
        return name
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    flash = kernel_takes(args.block_size, head_size) and not any(getattr(config, x, 0) for x in DROPOUTS)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return "flash (Pallas)" + ", sdpa in sliding windows" * slides if flash else name
