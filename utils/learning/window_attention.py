"""Attention with a sliding window, or with documents kept apart, by torch's flash attention, without masks:
transformers' own code makes torch a mask [B, 1, T, T] in each sliding layer and computes hidden scores too.
CUDA and ROCm, in half precision; everything else goes to sdpa.

B rows, T tokens, H heads, D head size.
"""

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

WINDOW = "window"  # its name in transformers; with "flash" in it transformers would look for a package


def window_mask(**options):
    """What `window_attention` gets: None for a sliding layer on whole rows; `starts` for documents that are
    kept apart; else, such as with padding, the mask of sdpa."""
    rows, length, device = options["batch_size"], options["q_length"], options["device"]
    # transformers sets allow_... if nothing, such as documents, was added to the mask.
    plain = options.get("allow_is_causal_skip", True) or options.get("allow_is_bidirectional_skip")
    mixed = torch.is_autocast_enabled(torch.device(device).type)
    extra = options["attention_mask"] is not None or options["use_vmap"] or length != options["kv_length"]
    if not mixed or extra or plain and options.get("local_size") is None:
        return sdpa_mask(**options)
    if plain:
        return None
    row = torch.arange(rows, device=device)[:, None]
    places = torch.arange(1, length, device=device)
    return document_starts(~options["mask_function"](row, row, places, places - 1))


def document_starts(begins):
    """begins, bool [B, T - 1]: whether a document begins at the second token of a row, ... -> where n
    documents begin in the B x T tokens, and the end: int32 [n + 1, 1, 1, 1], as transformers passes on only
    masks of four dimensions. n is padded to a power of two, as each one is a graph. Waits for the device."""
    begins = F.pad(begins, (1, 0), value=True).flatten()
    first = begins.nonzero()[:, 0]
    length = max(64, 1 << len(first).bit_length())
    return F.pad(first, (0, length - len(first)), value=len(begins)).int()[:, None, None, None]


def window_attention(
    module, query, key, value, attention_mask, sliding_window=None, dropout=0.0, scaling=None, is_causal=None,
    **more,
):
    """query [B, H, T, D], key and value the same, or with fewer heads -> ([B, T, H, D], None)."""
    kind, (rows, _, tokens, _) = query.device.type, query.shape
    documents = attention_mask is not None and attention_mask.dtype == torch.int32
    windows = attention_mask is None and sliding_window is not None
    if not (documents or windows) or not torch.is_autocast_enabled(kind):
        more |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    lines = [x.to(torch.get_autocast_dtype(kind)).transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    if documents:
        starts = attention_mask.flatten()
    else:
        starts = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=query.device)
    causal = module.is_causal if is_causal is None else is_causal
    reach = None if sliding_window is None else sliding_window - 1
    window = dict(window_size_left=reach, window_size_right=0 if causal else reach)
    out = _kernel(*lines, starts, starts, tokens, tokens, dropout, causal, False, scale=scaling, **window)[0]
    return out.unflatten(0, (rows, tokens)), None


_kernel = torch.ops.aten._flash_attention_forward  # [rows x tokens, H, D], starts of rows, longest row, ...
AttentionInterface.register(WINDOW, window_attention)
AttentionMaskInterface.register(WINDOW, window_mask)
