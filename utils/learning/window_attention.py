"""Attention with a sliding window, by torch's flash attention, without masks: transformers' own code makes
torch a mask [B, 1, T, T] in each sliding layer and computes hidden scores too. CUDA and ROCm, in half
precision; everything else, such as padding or documents that are kept apart, goes to sdpa.

B rows, T tokens, H heads, D head size.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

WINDOW = "window"  # its name in transformers; with "flash" in it transformers would look for a package


def window_mask(**options):
    """What `window_attention` gets: None for a sliding layer on whole rows, else the mask of sdpa."""
    # transformers sets allow_... if nothing, such as documents, was added to the mask.
    plain = options.get("allow_is_causal_skip", True) or options.get("allow_is_bidirectional_skip")
    mixed = torch.is_autocast_enabled(torch.device(options["device"]).type)
    extra = options["attention_mask"] is not None or options["use_vmap"]
    whole = plain and mixed and not extra and options["q_length"] == options["kv_length"]
    return None if whole and options.get("local_size") is not None else sdpa_mask(**options)


def window_attention(
    module, query, key, value, attention_mask, sliding_window=None, dropout=0.0, scaling=None, is_causal=None,
    **more,
):
    """query [B, H, T, D], key and value the same, or with fewer heads -> ([B, T, H, D], None)."""
    kind, (rows, _, tokens, _) = query.device.type, query.shape
    if attention_mask is not None or sliding_window is None or not torch.is_autocast_enabled(kind):
        more |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    lines = [x.to(torch.get_autocast_dtype(kind)).transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    starts = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=query.device)
    causal = module.is_causal if is_causal is None else is_causal
    reach = sliding_window - 1
    window = dict(window_size_left=reach, window_size_right=0 if causal else reach)
    out = _kernel(*lines, starts, starts, tokens, tokens, dropout, causal, False, scale=scaling, **window)[0]
    return out.unflatten(0, (rows, tokens)), None


_kernel = torch.ops.aten._flash_attention_forward  # [rows x tokens, H, D], starts of rows, longest row, ...
AttentionInterface.register(WINDOW, window_attention)
AttentionMaskInterface.register(WINDOW, window_mask)
