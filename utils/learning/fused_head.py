"""The vocabulary projection and cross-entropy in chunks of rows: only one chunk's logits exist at a time.

N rows (predicted tokens), C rows in a chunk, V vocabulary, D width.
"""

import functools

import torch
from torch import nn

IGNORED = -100  # transformers' label for "no prediction here"
ROW_STRIDE = 64  # elements; each row of logits starts on a cache line (CPU) and a tensor-core tile (GPU)


def chunk_rows(device_type, vocab_size):
    """Rows per chunk. On a CPU 256 was the fastest (V 50257, D 256: 1024 was a third slower). A GPU needs
    large matrices to be busy: 1 GiB of float32 logits, 5120 rows at V 50257. On a TPU all rows are one chunk,
    as chunks would move 3.6 times the bytes."""
    if device_type == "xla":
        return 2**31
    return 256 if device_type == "cpu" else max(256, 2**30 // (4 * vocab_size) // 256 * 256)


class ChunkSoftmax(nn.Module):
    """The loss of a chunk of logits, which are overwritten by their gradient; for eager mode."""

    for_compiler = False

    def forward(self, logits, scratch, bias, targets, weights, with_gradient, with_correct):
        """logits [C, V], targets [C] (valid ids), weights [C] -> losses [C], correct [C], bias gradient."""
        # Without a scratch buffer float32 logits are changed in place. XLA cannot reuse buffers.
        x = logits.to(weights.dtype) if scratch is None else scratch.copy_(logits)
        if bias is not None:
            x.add_(bias)
        targets, weights = targets[:, None], weights[:, None]
        correct = x.argmax(1) == targets[:, 0] if with_correct else None
        # On a CPU torch.softmax takes 3.5 times as long.
        x.sub_(x.amax(1, keepdim=True))
        at_target = x.gather(1, targets)
        total = x.exp_().sum(1, keepdim=True)
        losses = (total.log() - at_target)[:, 0]
        if not with_gradient:
            return losses, correct, None
        x.mul_(weights / total).scatter_add_(1, targets, -weights)
        if x is not logits:
            logits.copy_(x)
        return losses, correct, None if bias is None else x.sum(0)


class CompilerSoftmax(nn.Module):
    """The same loss for the compiler. On a GPU it becomes one kernel, which reads the logits once for the
    losses (online softmax) and once for the gradient. Chunks of equal sizes need only one graph. So that they
    are equal, the rows include the last position of each sequence, with weight 0."""

    for_compiler = True

    def forward(self, logits, scratch, bias, targets, weights, with_gradient, with_correct):
        x = logits.to(weights.dtype)
        x = x if bias is None else x + bias
        targets, weights = targets[:, None], weights[:, None]
        correct = x.argmax(1) == targets[:, 0] if with_correct else None
        hit, top = torch.arange(x.shape[1], device=x.device) == targets, x.amax(1, keepdim=True)
        total = top + (x - top).exp().sum(1, keepdim=True).log()
        losses = (total - x.where(hit, 0).sum(1, keepdim=True))[:, 0]  # gather would be a kernel of its own
        if not with_gradient:
            return losses, correct, None
        logits.copy_(((x - total).exp() - hit.to(x.dtype)) * weights)
        return losses, correct, None if bias is None else logits.sum(0, dtype=x.dtype)


def _chunk_size(rows, max_size, equal):
    """Rows per chunk, at most max_size. equal: chunks of equal sizes, unless that doubles their number."""
    chunks = -(-rows // max_size)
    if equal:
        chunks = next((n for n in range(chunks, 2 * chunks) if rows % n == 0), chunks)
        return -(-rows // chunks)
    return min(rows, max_size)


def _add_product(total, a, b):
    """total += a @ b, accumulated in the type of `total`, and within the matrix product if possible."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif not torch.compiler.is_compiling() and _can_accumulate(total.dtype, a.dtype, a.device.type):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


@functools.cache
def _can_accumulate(dtype, product_dtype, device_type):
    """Tests whether addmm adds a product of product_dtype matrices to a matrix of `dtype`: CPUs cannot."""
    ones = torch.ones(16, 16, dtype=product_dtype, device=device_type)
    total = torch.ones(16, 16, device=device_type)
    try:
        return bool((torch.addmm(total, ones, ones, out_dtype=dtype, out=total) == 17).all())
    except (RuntimeError, TypeError):
        return False


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, token_weights, softmax, with_gradient, with_correct):
        rows, vocab_size, kind = len(hidden), len(weight), hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        exact = torch.promote_types(dtype, torch.float32)  # for softmax, losses and sums over chunks
        step = _chunk_size(rows, chunk_rows(kind, vocab_size), equal=softmax.for_compiler)
        buffer = scratch = None
        if kind != "xla" and not torch.compiler.is_compiling():
            stride = -(-vocab_size // ROW_STRIDE) * ROW_STRIDE
            buffer = hidden.new_empty((step, stride), dtype=dtype)
            buffer[:, vocab_size:] = 0  # bfloat16 products on Intel's AMX read these, too (torch 2.13)
            buffer = buffer[:, :vocab_size]
            if dtype != exact and not softmax.for_compiler:
                scratch = hidden.new_empty((step, stride), dtype=exact)[:, :vocab_size]
        with torch.autocast(kind, enabled=False):
            h, w, valid = hidden.to(dtype), weight.to(dtype), targets != IGNORED
            weights = token_weights.to(exact) * valid
            d_weight = torch.zeros_like(weight, dtype=exact) if with_gradient else None
            d_bias = torch.zeros_like(bias, dtype=exact) if with_gradient and bias is not None else None
            losses, corrects, d_hidden = [], [], []
            for start in range(0, rows, step):
                part = slice(start, start + step)
                logits = torch.mm(h[part], w.t(), out=None if buffer is None else buffer[: rows - start])
                scratch_part = None if scratch is None else scratch[: rows - start]
                # It replaces the logits by their gradient.
                loss, correct, d_bias_part = softmax(
                    logits, scratch_part, bias, targets[part].where(valid[part], 0), weights[part],
                    with_gradient, with_correct,
                )  # fmt: skip
                losses.append(loss)
                corrects.append(correct)
                if with_gradient:
                    d_hidden.append((logits @ w).to(hidden.dtype))
                    _add_product(d_weight, logits.t(), h[part])
                    if bias is not None:
                        d_bias.add_(d_bias_part)
            losses = torch.cat(losses).where(valid, 0)
            correct = (torch.cat(corrects) & valid) if with_correct else None
            loss_sum = (losses * weights).sum()
        if with_gradient:
            ctx.save_for_backward(torch.cat(d_hidden), d_weight, d_bias)
            ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(losses, *([correct] if with_correct else []))
        return loss_sum, losses, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss_sum, *_):
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        dtype, bias_dtype = ctx.dtypes
        # In place: all activations are in memory now, and a second V x D array would raise the peak.
        d_bias = None if d_bias is None else d_bias.mul_(grad_loss_sum).to(bias_dtype)
        return d_hidden.mul_(grad_loss_sum), d_weight.mul_(grad_loss_sum).to(dtype), d_bias, *[None] * 5


def linear_cross_entropy(hidden, weight, targets, token_weights, bias=None, softmax=None, with_correct=False):
    """Cross-entropy of `hidden @ weight.T + bias`; the [N, V] logits never exist at once.

    hidden [N, D], weight [V, D], bias [V] or None, targets [N] with -100 to ignore a row, token_weights [N].
    Returns (the sum over rows of token_weights * loss, with gradients for hidden, weight and bias; losses
    [N], detached, 0 for ignored rows; correct, bool [N] or None: the target has the largest logit).

    Matrix products run in autocast's type if autocast is on, softmax and sums in float32. The forward pass
    computes the gradients, and backward scales them in place. So backward runs once, without retain_graph or
    second derivatives, and token_weights are constants."""
    trained = any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    with_gradient = trained and torch.is_grad_enabled()
    softmax = ChunkSoftmax() if softmax is None else softmax
    options = softmax, with_gradient, with_correct
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, token_weights, *options)
