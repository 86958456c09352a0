"""Losses as modules around a transformers model, so that DDP, FSDP and compile see one forward with the loss.

B rows, T tokens per row, K prediction slots per row, N = B x T or B x K flattened, V vocabulary, D width.
"""

import contextlib
import math
import os
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from utils.learning.fused_head import IGNORED, ChunkSoftmax, linear_cross_entropy
from utils.learning.kernels import in_forward, skip_search_for_documents

MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


@contextlib.contextmanager
def eval_mode(*modules):
    """Modules in eval mode; afterwards what was in training mode trains again, and nothing else."""
    training = [part for module in modules for part in module.modules() if part.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


class ModelLoss(nn.Module):
    """What both losses share: a transformers model and its inputs, run in two parts, base model and head.

    Build it around a model on the CPU, before anything wraps or moves it. If the head does more than a
    projection (scaled or capped logits, several heads), the model's own logits are used, with a warning.
    token_loss: None for cross-entropy, or a function (logits [N, V] float32, targets [N]) -> losses [N] that
    is trained instead, on the logits of all tokens at once. Those without a prediction get logits of 0 and
    target 0, and count nothing. In eval mode both modules return cross-entropy."""

    options = {}  # for every call of the model

    def __init__(self, lm, token_loss=None):
        super().__init__()
        skip_search_for_documents()  # in _run
        self.lm, self.token_loss = lm, token_loss
        tables = {type(part).__name__ for part in lm.modules() for child in part.children()
                  if isinstance(child, nn.Embedding)}  # fmt: skip
        # FSDP's units: the blocks. Encoders name their embeddings, too, whose table is the head's as well.
        self._no_split_modules = [name for name in lm._no_split_modules or () if name not in tables]
        self.chunk_softmax = ChunkSoftmax()
        self.splits_head = self._split_gives_same_logits()

    def model_inputs(self, batch):
        """The part of a batch that the transformers model gets."""
        inputs = {name: batch[name] for name in MODEL_INPUTS if batch.get(name) is not None}
        sdpa = self.lm.config._attn_implementation == "sdpa"
        if "attention_mask" in inputs and sdpa and self.lm.config.model_type == "bert":
            # With a mask [B, T] transformers waits for the device, to see whether it is all ones.
            inputs["attention_mask"] = inputs["attention_mask"][:, None, None, :].bool()
        return inputs

    def _run(self, part, batch):
        """`part`, the model or its base, on a batch."""
        inputs = self.model_inputs(batch)
        in_forward.rows_in_order = "position_ids" not in inputs
        try:
            return part(**inputs, **self.options)
        finally:
            in_forward.rows_in_order = False

    def _transform(self, hidden):
        """The layers between the base model and the vocabulary projection."""
        return hidden

    def _projection(self):  # not an attribute, which would be a second entry in the state dict
        """weight [V, D], bias [V] or None."""
        head = self.lm.get_output_embeddings()
        outer = getattr(self.lm, "lm_head", None)  # ESM's adds a bias to a projection without one
        return head.weight, getattr(outer, "bias", None) if head.bias is None else head.bias

    def _cross_entropy(self, batch, pick, targets, weights, with_correct=False, keep=False):
        """pick: takes from [B, T, D or V] the [N, D or V] that predict the targets [N]; weights [N]. Returns
        the model's output (with a split head only if `keep`: [B, T, D] is freed before the logits are made)
        and, like `linear_cross_entropy`, (weighted sum of losses, losses [N], correct [N])."""
        token_loss = self.token_loss if self.training else None
        if self.splits_head and token_loss is None:
            out, (weight, bias) = self._run(self.lm.base_model, batch), self._projection()
            hidden = self._transform(pick(out.last_hidden_state))
            out = out if keep else None
            return out, *linear_cross_entropy(
                hidden, weight, targets, weights, bias, self.chunk_softmax, with_correct
            )
        out, valid = self._run(self.lm, batch), targets != IGNORED
        logits = pick(_logits(out)).float()
        losses = trained = F.cross_entropy(logits, targets, reduction="none")
        if token_loss is not None:
            with torch.autocast(logits.device.type, enabled=False):
                trained = token_loss(logits.masked_fill(~valid[:, None], 0), targets.where(valid, 0))
            if trained.shape != targets.shape:
                shapes = f"{list(trained.shape)} for {list(targets.shape)} targets"
                raise ValueError(f"token_loss: returned {shapes}, not a loss for each")
            trained = trained.where(valid, 0)
        correct = (logits.argmax(1) == targets) & valid if with_correct else None
        return out, (trained * weights).sum(), losses, correct

    def _router_loss_weight(self):
        """The weight of the loss that balances a mixture's experts in training; 0 if there is none."""
        has_loss = getattr(self.lm.config, "output_router_logits", False)
        names = "router_aux_loss_coef", "aux_loss_coef"
        return next((getattr(self.lm, name) for name in names if has_loss and hasattr(self.lm, name)), 0.0)

    @torch.no_grad()
    def _split_gives_same_logits(self):
        """Tries on eight tokens whether base model, transform and projection give the model's own logits.

        Meanwhile the head's parameters have noise, as initial biases of 0 and scales of 1 make no difference.
        And the projection's input is once multiplied by 1000, as small logits pass a soft cap unchanged."""
        lm, generator = self.lm, torch.Generator().manual_seed(0)
        if self._router_loss_weight() or not isinstance(lm.get_output_embeddings(), nn.Module):
            return False  # the router's loss comes only with the model's own logits
        ids = torch.arange(8, device=next(lm.parameters()).device)[None] % lm.config.vocab_size
        batch = {"input_ids": ids}
        base = set(lm.base_model.parameters())
        saved = [(parameter, parameter.clone()) for parameter in lm.parameters() if parameter not in base]
        scale, same = 1, True
        hook = lm.get_output_embeddings().register_forward_pre_hook(lambda head, args: (scale * args[0],))
        try:
            for parameter, _ in saved:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter))
            with eval_mode(lm):
                for scale in (1, 1000):  # noqa: B007  the hook reads it
                    expected = _logits(self._run(lm, batch)).float()
                    hidden = self._transform(self._run(lm.base_model, batch).last_hidden_state)
                    found = F.linear(scale * hidden, *self._projection()).float()
                    same = same and found.shape == expected.shape
                    same = same and (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        except Exception:  # it has other parts or shapes
            same = False
        finally:
            hook.remove()
            for parameter, value in saved:
                parameter.copy_(value)
        if not same:
            what = f"{type(lm).__name__}: the head is not a plain linear layer on the hidden states"
            cost = "the loss is computed from all the logits: slower and with more memory."
            warnings.warn(f"{what}, so {cost}", stacklevel=3)
        return bool(same)


class CausalLMLoss(ModelLoss):
    """A causal language model with its loss. Rows are full, so there is no attention mask."""

    options = {"use_cache": False}

    def forward(self, batch, row_weights=None):
        """batch: input_ids int64 [B, T] and the other inputs of `model_inputs`; row_weights [B], or None for
        ones.

        Returns (loss, row_losses). row_losses [B], detached: each row's mean cross-entropy over T - 1
        predictions. loss, a scalar: the mean of row_weights * row_losses, in training those of token_loss."""
        input_ids = batch["input_ids"]
        rows, predicted = input_ids.shape[0], input_ids.shape[1] - 1
        targets, positions = input_ids[:, 1:], predicted
        if not self.chunk_softmax.by_hand and not (self.training and self.token_loss):  # equal chunks
            targets, positions = F.pad(targets, (0, 1), value=IGNORED), predicted + 1
        if row_weights is None:
            row_weights = torch.ones(rows, device=input_ids.device)
        token_weights = row_weights[:, None].expand(rows, positions).reshape(-1)
        out, loss_sum, losses, _ = self._cross_entropy(
            batch, lambda x: x[:, :positions].flatten(0, 1), targets.reshape(-1), token_weights
        )
        if self.training and (weight := self._router_loss_weight()):
            loss_sum = loss_sum + rows * predicted * weight * out.aux_loss
        return loss_sum / (rows * predicted), losses.detach().view(rows, -1).sum(1) / predicted


class MaskedLMLoss(ModelLoss):
    """A masked language model (RoBERTa, BERT, ModernBERT, BertForPreTraining with next sentence) with its
    losses. Only the prediction slots pass the head. The next-sentence loss is always cross-entropy."""

    def _transform(self, hidden):
        if hasattr(self.lm, "lm_head"):  # RoBERTa and its descendants
            return self.lm.lm_head.layer_norm(F.gelu(self.lm.lm_head.dense(hidden)))
        if hasattr(self.lm, "head"):  # ModernBERT
            return self.lm.head(hidden)
        return self.lm.cls.predictions.transform(hidden)  # BERT and its descendants

    def forward(self, batch):
        """batch: input_ids int64 [B, T] and the other inputs of `model_inputs`; slots int64 [B, K], the
        positions to predict; slot_labels int64 [B, K], -100 for an empty slot; optional next_sentence_label
        int64 [B]: 0 if B follows A, 1 if B is random, -100 if it does not count.

        Returns {"loss_sums": [1], with next_sentence_label [2], sums over predictions, with gradient: of
        masked tokens (in training those of token_loss, if given) and of next sentences; "right": a scalar,
        the masked tokens that are predicted correctly}. In eval mode also "rows", float32 [B, 3 or 6]: of
        each row the summed cross-entropy, the predictions and the right ones among them, of masked tokens and
        then of next sentences."""
        slots, labels = batch["slots"], batch["slot_labels"].reshape(-1)
        weights, keep = torch.ones_like(labels, dtype=torch.float32), "next_sentence_label" in batch
        out, loss_sum, losses, correct = self._cross_entropy(
            batch, lambda x: _gather_slots(x, slots), labels, weights, True, keep
        )
        sums, columns = [loss_sum], [losses, labels != IGNORED, correct]
        if keep:
            targets = batch["next_sentence_label"]
            scores = self.lm.cls.seq_relationship(out.pooler_output) if self.splits_head else out[1]
            nsp_losses = F.cross_entropy(scores.float(), targets, reduction="none")
            sums.append(nsp_losses.sum())
            columns += [nsp_losses, targets != IGNORED, scores.argmax(1) == targets]
        found = {"loss_sums": torch.stack(sums), "right": correct.sum()}
        if self.training:
            return found
        rows = [column.detach().view(len(slots), -1).sum(1, dtype=torch.float32) for column in columns]
        return found | {"rows": torch.stack(rows, 1)}


def masked_metrics(sums):
    """sums: float64 [rows, 3 or 6] of an evaluation, "rows" of MaskedLMLoss -> the metrics that are logged. A
    mean is None if nothing counts. Perplexity is of hidden tokens alone.

    loss/eval_stderr is the standard error of loss/eval for rows drawn anew from the same kind of text. A mean
    is a quotient of two sums over rows, so this is the error of a ratio estimator (Cochran, "Sampling
    Techniques", 1977, chapter 6), without the correction for a finite set."""
    metrics, means, effects = {}, [], 0
    for part, loss, accuracy in zip(
        sums.split(3, dim=1), ("loss/mlm", "loss/nsp"), ("accuracy", "nsp_accuracy"), strict=False
    ):
        loss_sum, count, right = part.sum(0).tolist()
        metrics |= {loss: None, accuracy: None}
        if count:
            metrics |= {loss: loss_sum / count, accuracy: right / count}
            means.append(loss_sum / count)
            effects = effects + (part[:, 0] - part[:, 1] * means[-1]) / count
    record = {"loss/eval": sum(means)}
    if (rows := int((sums[:, 1::3].sum(1) > 0).sum())) > 1:
        record["loss/eval_stderr"] = math.sqrt(rows / (rows - 1) * effects.square().sum())
    record["perplexity"] = math.exp(min(metrics["loss/mlm"] or 0, 700))
    return record | {"eval_tokens": int(sums[:, 1].sum())} | metrics


def _logits(out):
    return out["logits" if "logits" in out else "prediction_logits"]


def _gather_slots(x, slots):
    """x [B, T, D], slots [B, K] -> [B x K, D]."""
    if x.device.type == "xla":  # a product of matrices, which a TPU does better than gather and scatter
        slots = (slots[:, :, None] == torch.arange(x.shape[1], device=x.device)).to(x.dtype)  # [B, K, T]
        return (slots @ x).flatten(0, 1)
    return x.gather(1, slots[:, :, None].expand(-1, -1, x.shape[2])).flatten(0, 1)


def keytoken_table(keytokens, tokenizer, device=None):
    """float32 [V], 1 at the key tokens, bare and after a space: one lookup per token counts any number of
    them. Those that are not one token of the tokenizer are printed and left out. V: the largest id + 1."""
    table, used, split = torch.zeros(max(tokenizer.get_vocab().values()) + 1), {}, {}
    for word in keytokens:
        for spelling in (word.strip(), " " + word.strip()):
            ids = tokenizer(spelling, add_special_tokens=False)["input_ids"]
            if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
                table[ids], used[spelling] = 1.0, None
            else:
                split[spelling] = None
    if split and os.environ.get("RANK", "0") == "0":
        kept, lost = (", ".join(map(repr, some)) or "none" for some in (used, split))
        print(f"keytokens  in use: {kept}; ignored, because the tokenizer splits them: {lost}")
    return table.to(device)


def keytoken_row_weights(input_ids, table, alpha):
    """input_ids [B, T], table from keytoken_table -> [B]: 1 + alpha * (occurrences of key tokens in the row).
    Alpha 1: the weights of the Hugging Face course, chapter 7.6."""
    return 1.0 + alpha * table[input_ids].sum(1)
