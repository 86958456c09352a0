"""Sliding-window attention in blocks of queries with the keys in their window: T x window scores, not T x T.
transformers' own code gives torch a mask [B, 1, T, T] in each sliding layer and computes the hidden scores
too.

B rows, T tokens, H heads, D head size; R the reach to either side; N blocks of S queries in a row, each with
K = S + 2 R keys. Rows are concatenated with R or more empty places between, so that all blocks are one view.
"""

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

LOCAL = "local"  # its name in transformers
WINDOW = "window"  # name of the kernel below; with "flash" in it transformers would look for a package
HIDDEN = torch.finfo(torch.float16).min  # not -inf: a query that sees only padding must stay finite


def slides(config) -> bool:
    """Whether the model has sliding layers, all with the same window."""
    layers = getattr(config, "layer_types", None) or ()
    return "sliding_attention" in layers and not getattr(config, "is_heterogeneous", False)


def local_mask(**options):
    """The mask to add to the scores: of a sliding layer float32 [B x N, 1, S, K], else what sdpa gets.
    options: those that transformers gives to sdpa_mask."""
    length, reach, device = options["kv_length"], options.get("local_size"), options["device"]
    # Shorter blocks compute fewer hidden scores, but a GPU's kernels take 64 queries at a time.
    size = max((reach or 0) // 2, 32 if torch.device(device).type == "cpu" else 64)
    whole = reach is None or options["use_vmap"] or options["q_length"] != length  # extra masks, or a cache
    if whole or length <= size:
        return sdpa_mask(**options)
    rows = torch.arange(options["batch_size"], device=device)[:, None, None, None]
    queries = torch.arange(-(-(length + reach) // size) * size, device=device).view(-1, size, 1)
    keys = queries[:, :1] + torch.arange(-reach, size + reach, device=device)  # [N, 1, K]
    seen = (keys >= 0) & (keys < length)
    queries, keys = queries.clamp(max=length - 1), keys.clamp(0, length - 1)
    # [N, S, K]; with documents [B, N, S, K]
    seen = seen & options["mask_function"](rows, rows, queries, keys)
    if options["attention_mask"] is not None:
        seen = seen & options["attention_mask"][rows, keys]
    mask = torch.zeros(seen.shape, device=device).masked_fill(~seen, HIDDEN)
    return mask.expand(options["batch_size"], *mask.shape[-3:]).reshape(-1, 1, *mask.shape[-2:])


def local_attention(module, query, key, value, attention_mask, **more):
    """query [B, H, T, D], key and value the same, or with fewer heads -> ([B, T, H, D], None)."""
    tokens = query.shape[2]
    if attention_mask is None or attention_mask.shape[2] == tokens:  # a layer without window, or a short row
        value = value.contiguous()  # a view would keep queries and keys alive for backward
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


def pair_starts(pair, pair_start, real):
    """The same for sentence pairs. pair, pair_start [B, M]: see PairRows.columns; real, bool [B, T]: False at
    the padding, which is a document too."""
    end = real.sum(1, keepdim=True)  # where the padding begins
    of_row = torch.cat([0 * end, torch.where(pair < 0, end, pair_start), end], 1)
    rows = torch.arange(len(real) + 1, device=real.device) * real.shape[1]
    starts = torch.cat([(of_row + rows[:-1, None]).flatten(), rows[-1:]])
    return starts.int()[:, None, None, None]


def window_attention(
    module, query, key, value, attention_mask, sliding_window=None, dropout=0.0, scaling=None, is_causal=None,
    **more,
):
    """The same as local_attention by torch's flash attention, which takes a window and documents, and needs
    neither masks nor blocks. CUDA and ROCm, in half precision."""
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
AttentionInterface.register(LOCAL, local_attention)
AttentionMaskInterface.register(LOCAL, local_mask)
