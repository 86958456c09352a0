"""Sliding-window attention in blocks of queries, each against the keys it can reach: T x window, not T x T.
transformers' own path gives torch a mask [B, 1, T, T] in each sliding layer, and computes what it hides, too.

B rows, T tokens, H heads, D head size; R the reach to either side; N blocks of S queries in a row, each with
K = S + 2 R keys. Rows lie one behind the other with R or more empty places between: all blocks are one view.
"""

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

LOCAL = "local"  # its name with transformers
HIDDEN = torch.finfo(torch.float16).min  # not -inf: what sees padding only must stay finite


def slides(config) -> bool:
    """Whether it has sliding layers, all of one window."""
    layers = getattr(config, "layer_types", None) or ()
    return "sliding_attention" in layers and not getattr(config, "is_heterogeneous", False)


def pays(config, block_size: int) -> bool:
    """Whether rows are so much longer than the window that blocks are clearly faster."""
    return slides(config) and block_size >= 8 * max(config.sliding_window, 64)


def local_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None,
               attention_mask=None, local_size=None, use_vmap=False, device="cpu", **more):  # fmt: skip
    """For a sliding layer float32 [B x N, 1, S, K], to be added to the scores; else what sdpa gets."""
    # Shorter blocks compute less of what is hidden, but a GPU's kernels take 64 queries at a time.
    size = max((local_size or 0) // 2, 32 if torch.device(device).type == "cpu" else 64)
    whole = local_size is None or use_vmap or q_length != kv_length  # no window; one with additions; a cache
    if whole or kv_length <= size:
        of = batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size
        return sdpa_mask(*of, use_vmap=use_vmap, device=device, **more)
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    queries = torch.arange(-(-(kv_length + local_size) // size) * size, device=device).view(-1, size, 1)
    keys = queries[:, :1] + torch.arange(-local_size, size + local_size, device=device)  # [N, 1, K]
    seen = (keys >= 0) & (keys < kv_length)
    queries, keys = queries.clamp(max=kv_length - 1), keys.clamp(0, kv_length - 1)
    seen = seen & mask_function(rows, rows, queries, keys)  # [N, S, K]; [B, N, S, K] with documents
    if attention_mask is not None:
        seen = seen & attention_mask[rows, keys]
    mask = torch.zeros(seen.shape, device=device).masked_fill(~seen, HIDDEN)
    return mask.expand(batch_size, *mask.shape[-3:]).reshape(-1, 1, *mask.shape[-2:])


def local_attention(module, query, key, value, attention_mask, **more):
    """query [B, H, T, D], key and value the same or of fewer heads -> ([B, T, H, D], no weights)."""
    tokens = query.shape[2]
    if attention_mask is None or attention_mask.shape[2] == tokens:  # a layer that sees all, or a short row
        value = value.contiguous()  # a view of what q and k are in, too, would keep all of it for backward
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    size, seen = attention_mask.shape[2:]
    reach, empty = (seen - size) // 2, len(attention_mask) // len(query) * size - tokens

    def line(x, around):  # [B, H, T, D] -> [around + B x N x S + around, H, D]
        rows = F.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, empty)).flatten(0, 1)
        return F.pad(rows, (0, 0, 0, 0, around, around))

    query = line(query, 0).unflatten(0, (-1, size)).transpose(1, 2)  # [B x N, H, S, D]
    key, value = (line(x, reach).unfold(0, seen, size).mT for x in (key, value))  # [B x N, H, K, D]
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask.to(query.dtype), **more)
    return out.flatten(0, 1).unflatten(0, (-1, tokens + empty))[:, :tokens], None


AttentionInterface.register(LOCAL, local_attention)
AttentionMaskInterface.register(LOCAL, local_mask)
