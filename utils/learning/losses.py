"""Losses as modules around a transformers model, so that DDP, FSDP and compile see one forward with the loss
inside.

The vocabulary projection and its cross-entropy run together in chunks of rows, and the gradients of both are
formed in the forward pass, chunk by chunk: the logits of more than one chunk never exist, in any precision.

B rows, T tokens per row, K prediction slots per row, N = B x T or B x K flattened, V vocabulary, D width.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from transformers import masking_utils

IGNORED = -100  # transformers' label for "no prediction here"
ROW_STRIDE = 64  # elements; rows that start on a cache line (CPU) and on a tensor-core tile (GPU)


def chunk_rows(device_type, vocab_size):
    """Rows of logits that exist at a time.

    On a CPU 256 is the fastest that was measured (V 50257, D 256: 512 rows gained nothing in float32, 1024
    lost a third) and it keeps the buffer small. An accelerator needs matrices that fill it: 1 GiB of float32
    logits, which is 5120 rows at V 50257.
    """
    if device_type == "cpu":
        return 256
    return max(256, 2**30 // (4 * vocab_size) // 256 * 256)


# transformers looks in each forward whether positions start again in a row (packed sequences), which waits
# for the device; torch.compile takes it for granted, which costs the causal kernel. Ours never start again.
masking_utils.find_packed_sequence_indices = lambda position_ids: None


class ChunkSoftmax(nn.Module):
    """Loss of one chunk of logits, and their gradient written over them.

    A module without parameters only so that accelerate's regional compilation, which compiles the children of
    the model one by one, makes a single kernel of it.
    """

    def forward(self, logits, scratch, bias, targets, weights, with_gradient, with_correct):
        """logits [C, V], targets [C] (valid ids), weights [C] -> losses [C], correct [C], bias gradient."""
        if scratch is None:  # float32 logits are worked on in place; XLA has no buffers to reuse
            x = logits if logits.dtype == weights.dtype else logits.to(weights.dtype)
        else:
            x = scratch.copy_(logits)
        if bias is not None:
            x.add_(bias)
        targets, weights = targets[:, None], weights[:, None]
        correct = x.argmax(1) == targets[:, 0] if with_correct else None
        # By hand, because torch.softmax on a CPU takes 3.5 times as long as these passes.
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


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, token_weights, chunk_softmax, with_gradient, with_correct
    ):
        (rows, _), vocab_size = hidden.shape, weight.shape[0]
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        exact = torch.promote_types(dtype, torch.float32)  # softmax, losses and the sums over chunks
        step = min(rows, chunk_rows(kind, vocab_size))
        buffer = scratch = None
        if kind != "xla" and not torch.compiler.is_compiling():
            stride = -(-vocab_size // ROW_STRIDE) * ROW_STRIDE
            buffer = hidden.new_empty((step, stride), dtype=dtype)[:, :vocab_size]
            scratch = (
                hidden.new_empty((step, stride), dtype=exact)[:, :vocab_size] if dtype != exact else None
            )
        with torch.autocast(kind, enabled=False):
            h, w = hidden.to(dtype), weight.to(dtype)
            valid = targets != IGNORED
            safe_targets = targets.where(valid, 0)
            weights = token_weights.to(exact) * valid
            d_weight = torch.zeros_like(weight, dtype=exact) if with_gradient else None
            d_bias = torch.zeros_like(bias, dtype=exact) if with_gradient and bias is not None else None
            losses, corrects, d_hidden = [], [], []
            for start in range(0, rows, step):
                part = slice(start, min(start + step, rows))
                if buffer is None:
                    logits = h[part] @ w.t()
                else:
                    logits = torch.mm(h[part], w.t(), out=buffer[: part.stop - start])
                loss, correct, d_bias_part = chunk_softmax(
                    logits,
                    None if scratch is None else scratch[: part.stop - start],
                    bias,
                    safe_targets[part],
                    weights[part],
                    with_gradient,
                    with_correct,
                )  # from here on `logits` holds the gradient of the logits
                losses.append(loss)
                corrects.append(correct)
                if with_gradient:
                    d_hidden.append((logits @ w).to(hidden.dtype))
                    if dtype == exact:
                        d_weight.addmm_(logits.t(), h[part])
                    else:
                        d_weight.add_(logits.t() @ h[part])
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
        # In place: a second V x D array at the moment when every activation is alive would set the peak.
        return (
            d_hidden.mul_(grad_loss_sum),
            d_weight.mul_(grad_loss_sum).to(dtype),
            None if d_bias is None else d_bias.mul_(grad_loss_sum).to(bias_dtype),
            None,
            None,
            None,
            None,
            None,
        )


def linear_cross_entropy(
    hidden, weight, targets, token_weights, bias=None, chunk_softmax=None, with_correct=False
):
    """Cross-entropy of `hidden @ weight.T + bias` without the [N, V] logits.

    hidden [N, D], weight [V, D], bias [V] or None, targets [N] with -100 for "not predicted", token_weights
    [N].
    Returns (sum over rows of token_weights * loss, a scalar with gradients for hidden, weight and bias;
    losses [N], detached, 0 where not predicted; correct [N] bool or None: the target is the most likely id).

    Matrix products run in autocast's type where autocast is on, softmax and sums in float32. The gradients
    are made in the forward pass and scaled in place by backward, so one backward only: no retain_graph, no
    second derivatives, and token_weights are constants.
    """
    return _LinearCrossEntropy.apply(
        hidden,
        weight,
        bias,
        targets,
        token_weights,
        ChunkSoftmax() if chunk_softmax is None else chunk_softmax,
        torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad),
        with_correct,
    )


class CausalLMLoss(nn.Module):
    """A causal language model with its loss. Build it around a model on the CPU, before anything wraps or
    moves it.

    Rows are full, so no attention mask is made. A model whose head is more than one linear layer (scaled or
    capped logits, several heads) is found by comparing both ways on eight tokens; its own logits are used
    then, with a warning.
    """

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        self._no_split_modules = lm._no_split_modules  # FSDP's units: the blocks
        self.chunk_softmax = ChunkSoftmax()
        self.splits_head = _same_logits(lm, lambda ids: self._head()(self._hidden(ids)))

    def _hidden(self, input_ids):
        return self.lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state

    def _head(self):  # looked up at every call: a second reference would appear in the state dict
        return self.lm.get_output_embeddings()

    def forward(self, input_ids, row_weights=None, return_logits=False):
        """input_ids int64 [B, T]; row_weights [B] or None for ones.

        Returns (loss, row_losses): row_losses [B] is the mean cross-entropy over the T - 1 predicted tokens
        of each row, detached; loss is the mean over rows of row_weights * row_losses, a scalar with gradient.
        With return_logits the logits [B, T, V] instead, for a loss of your own.
        """
        if return_logits:
            return self.lm(input_ids=input_ids, use_cache=False).logits
        rows, predicted = input_ids.shape[0], input_ids.shape[1] - 1
        targets = input_ids[:, 1:].reshape(-1)
        if row_weights is None:
            row_weights = torch.ones(rows, device=input_ids.device)
        token_weights = row_weights[:, None].expand(rows, predicted).reshape(-1)
        if self.splits_head:
            hidden, head = self._hidden(input_ids)[:, :-1].flatten(0, 1), self._head()
            loss_sum, losses, _ = linear_cross_entropy(
                hidden, head.weight, targets, token_weights, head.bias, self.chunk_softmax
            )
        else:
            logits = self.lm(input_ids=input_ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            losses = F.cross_entropy(logits.float(), targets, reduction="none")
            loss_sum = (losses * token_weights).sum()
        return loss_sum / (rows * predicted), losses.detach().view(rows, predicted).mean(1)


class MaskedLMLoss(nn.Module):
    """A masked language model (RoBERTa, BERT and ModernBERT, BertForPreTraining with next sentence) with its
    losses.

    Only the prediction slots pass the head: their hidden states are gathered first and projected after. Build
    it on the CPU like CausalLMLoss; a head of another form is found and used whole, with a warning.
    """

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        self._no_split_modules = lm._no_split_modules  # FSDP's units: the blocks
        self.chunk_softmax = ChunkSoftmax()
        self.splits_head = _same_logits(
            lm, lambda ids: self._head()(self._transform(lm.base_model(input_ids=ids).last_hidden_state))
        )

    def _head(self):
        return self.lm.get_output_embeddings()

    def _transform(self, hidden):
        if hasattr(self.lm, "lm_head"):  # RoBERTa and its descendants
            return self.lm.lm_head.layer_norm(F.gelu(self.lm.lm_head.dense(hidden)))
        if hasattr(self.lm, "head"):  # ModernBERT
            return self.lm.head(hidden)
        return self.lm.cls.predictions.transform(hidden)  # BERT and its descendants

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, slots=None, slot_labels=None,
                next_sentence_label=None):  # fmt: skip
        """input_ids, attention_mask, token_type_ids int64 [B, T]; slots int64 [B, K], the positions to
        predict; slot_labels int64 [B, K], -100 for an empty slot; next_sentence_label int64 [B], 0 = B
        follows A, 1 = random, -100 = not counted.

        Returns sums as 0-d tensors, to be divided once by the caller: mlm_loss_sum (with gradient),
        mlm_correct, mlm_tokens, and with next_sentence_label nsp_loss_sum (with gradient), nsp_correct,
        nsp_rows.
        """
        plain_sdpa = self.lm.config.model_type == "bert" and self.lm.config._attn_implementation == "sdpa"
        if attention_mask is not None and plain_sdpa:
            # As [B, T] transformers waits for the device, to see whether it is all ones.
            attention_mask = attention_mask[:, None, None, :].bool()
        masks = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        inputs = {"input_ids": input_ids} | {name: mask for name, mask in masks.items() if mask is not None}
        labels = slot_labels.reshape(-1)
        if self.splits_head:
            out = self.lm.base_model(**inputs)
            hidden, head = _gather_slots(out.last_hidden_state, slots), self._head()
            loss_sum, _, correct = linear_cross_entropy(
                self._transform(hidden),
                head.weight,
                labels,
                torch.ones_like(labels, dtype=torch.float32),
                head.bias,
                self.chunk_softmax,
                with_correct=True,
            )
        else:
            out = self.lm(**inputs)
            logits = _gather_slots(_logits(out), slots).float()
            loss_sum = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
            correct = (logits.argmax(1) == labels) & (labels != IGNORED)
        sums = {
            "mlm_loss_sum": loss_sum, "mlm_correct": correct.sum(), "mlm_tokens": (labels != IGNORED).sum()
        }  # fmt: skip
        if next_sentence_label is not None:
            if self.splits_head:
                scores = self.lm.cls.seq_relationship(out.pooler_output).float()
            else:
                scores = out.seq_relationship_logits.float()
            counted = next_sentence_label != IGNORED
            sums["nsp_loss_sum"] = F.cross_entropy(
                scores, next_sentence_label, ignore_index=IGNORED, reduction="sum"
            )
            sums["nsp_correct"] = ((scores.argmax(1) == next_sentence_label) & counted).sum()
            sums["nsp_rows"] = counted.sum()
        return sums


def _logits(out):
    return out["logits" if "logits" in out else "prediction_logits"]


def _gather_slots(x, slots):
    """x [B, T, D], slots [B, K] -> [B x K, D]."""
    return x.gather(1, slots[:, :, None].expand(-1, -1, x.shape[2])).flatten(0, 1)


@torch.no_grad()
def _same_logits(lm, logits_by_parts):
    """Whether `logits_by_parts(ids)` gives the logits of `lm`, tried on eight tokens.

    What enters the head is multiplied by 1000 on both ways: a new model's logits are too small for a soft
    cap to touch them.
    """
    ids = torch.arange(8, device=next(lm.parameters()).device)[None] % lm.config.vocab_size
    training = lm.training
    lm.eval()
    hook = lm.get_output_embeddings().register_forward_pre_hook(lambda head, args: (1000 * args[0],))
    expected = _logits(lm(input_ids=ids)).float()
    try:
        found = logits_by_parts(ids).float()
        same = found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-3)
    except (AttributeError, TypeError):  # no such parts
        same = False
    hook.remove()
    lm.train(training)
    if not same:
        warnings.warn(
            f"{type(lm).__name__}: the head is not a plain linear layer on the hidden states, so the loss is "
            "computed from all the logits: slower and with more memory.",
            stacklevel=3,
        )
    return same


def keytoken_table(keytoken_ids, vocab_size, device=None):
    """float32 [V], 1 at the key tokens: B x T look-ups count any number of them."""
    table = torch.zeros(vocab_size)
    table[list(keytoken_ids)] = 1.0
    return table.to(device)


def keytoken_row_weights(input_ids, table, alpha):
    """input_ids [B, T], table from keytoken_table -> [B]: 1 + alpha * (occurrences of key tokens in the row).

    With alpha 1 the weights of the key-token loss of the Hugging Face course, chapter 7.6; with alpha 0 ones.
    """
    return 1.0 + alpha * table[input_ids].sum(1)
