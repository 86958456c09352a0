"""Loss modules around a transformers model, so that DDP, FSDP and compile see one forward with the loss.

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
    """Sets modules to eval mode, and afterwards returns each submodule to the mode that it had."""
    training = [part for module in modules for part in module.modules() if part.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


class ModelLoss(nn.Module):
    """The base class of both losses. It runs the transformers model in two parts, base model and head.

    Build it around a model on the CPU, before the model is moved or wrapped. If the head does more than a
    projection (scaled or capped logits, several heads), the model's own logits are used, with a warning.
    token_loss: None for cross-entropy, or a function (logits [N, V] float32, targets [N]) -> losses [N] that
    training uses instead, on the logits of all tokens at once. It gets logits 0 and target 0 at ignored
    positions, whose losses are dropped. In eval mode the loss is always cross-entropy."""

    options = {}  # of each forward pass of the model

    def __init__(self, lm, token_loss=None):
        super().__init__()
        skip_search_for_documents()  # takes effect in _run
        self.lm, self.token_loss = lm, token_loss
        tables = {type(part).__name__ for part in lm.modules() for child in part.children()
                  if isinstance(child, nn.Embedding)}  # fmt: skip
        # FSDP wraps these blocks, but not the embeddings that encoders list: their table is also the head's.
        self._no_split_modules = [name for name in lm._no_split_modules or () if name not in tables]
        self.chunk_softmax = ChunkSoftmax()
        self.splits_head = self._split_gives_same_logits()

    def model_inputs(self, batch):
        """The columns of a batch that the transformers model takes."""
        inputs = {name: batch[name] for name in MODEL_INPUTS if batch.get(name) is not None}
        sdpa = self.lm.config._attn_implementation == "sdpa"
        if "attention_mask" in inputs and sdpa and self.lm.config.model_type == "bert":
            # For a mask [B, T] transformers waits for the device, to check whether it is all ones.
            inputs["attention_mask"] = inputs["attention_mask"][:, None, None, :].bool()
        return inputs

    def _run(self, part, batch):
        """Runs `part`, the model or its base model, on a batch."""
        inputs = self.model_inputs(batch)
        in_forward.rows_in_order = "position_ids" not in inputs
        try:
            return part(**inputs, **self.options)
        finally:
            in_forward.rows_in_order = False

    def _transform(self, hidden):
        """The layers between the base model and the vocabulary projection."""
        return hidden

    def _projection(self):  # an attribute would be a second entry in the state dict
        """(weight [V, D], bias [V] or None) of the vocabulary projection."""
        head = self.lm.get_output_embeddings()
        outer = getattr(self.lm, "lm_head", None)  # ESM's lm_head adds the bias outside of the projection
        return head.weight, getattr(outer, "bias", None) if head.bias is None else head.bias

    def _cross_entropy(self, batch, pick, targets, weights, with_correct=False, keep=False):
        """(model output, then what linear_cross_entropy returns). pick: a function [B, T, D or V] ->
        [N, D or V] that selects the predictions of targets [N]. A split head frees the output before it
        computes logits, unless `keep`, and returns None for it."""
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
                raise ValueError(f"token_loss: returned shape {shapes}, not one loss per target")
            trained = trained.where(valid, 0)
        correct = (logits.argmax(1) == targets) & valid if with_correct else None
        return out, (trained * weights).sum(), losses, correct

    def _router_loss_weight(self):
        """The weight of the load-balancing loss of a mixture of experts; 0 if there is none."""
        has_loss = getattr(self.lm.config, "output_router_logits", False)
        names = "router_aux_loss_coef", "aux_loss_coef"
        return next((getattr(self.lm, name) for name in names if has_loss and hasattr(self.lm, name)), 0.0)

    @torch.no_grad()
    def _split_gives_same_logits(self):
        """Tests on eight tokens whether base model, transform and projection give the model's own logits.

        Noise is added to the head's parameters, as initial biases of 0 and scales of 1 would have no effect.
        A second test multiplies the projection's input by 1000, as a soft cap hardly changes small logits."""
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
                    logits = F.linear(scale * hidden, *self._projection()).float()
                    same = same and logits.shape == expected.shape
                    same = same and (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
        except Exception:  # the model has other parts or shapes
            same = False
        finally:
            hook.remove()
            for parameter, value in saved:
                parameter.copy_(value)
        if not same:
            cause = f"{type(lm).__name__}: the head is not a plain linear layer on the hidden states"
            cost = "the loss is computed from all the logits: slower and with more memory."
            warnings.warn(f"{cause}, so {cost}", stacklevel=3)
        return bool(same)


class CausalLMLoss(ModelLoss):
    """A causal language model with its loss. Rows are full, so it needs no attention mask."""

    options = {"use_cache": False}

    def forward(self, batch, row_weights=None):
        """batch: input_ids int64 [B, T] and optional columns of MODEL_INPUTS. row_weights: [B]; None: all 1.

        Returns (loss, row_losses). row_losses [B], detached: each row's mean cross-entropy over its T - 1
        predictions. loss, scalar: the mean of row_weights * row_losses, in training by token_loss if any."""
        input_ids = batch["input_ids"]
        rows, predicted = input_ids.shape[0], input_ids.shape[1] - 1
        targets, positions = input_ids[:, 1:], predicted
        if self.chunk_softmax.for_compiler and not (self.training and self.token_loss):  # equal chunks
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
    losses. Only the masked positions pass the head. The next-sentence loss is always cross-entropy."""

    def _transform(self, hidden):
        if hasattr(self.lm, "lm_head"):  # RoBERTa and its descendants
            return self.lm.lm_head.layer_norm(F.gelu(self.lm.lm_head.dense(hidden)))
        if hasattr(self.lm, "head"):  # ModernBERT
            return self.lm.head(hidden)
        return self.lm.cls.predictions.transform(hidden)  # BERT and its descendants

    def forward(self, batch):
        """batch: input_ids int64 [B, T] and optional columns of MODEL_INPUTS; slots int64 [B, K], the
        positions to predict; slot_labels int64 [B, K], -100 for an empty slot; optional next_sentence_label
        int64 [B]: 0 if sentence B follows A, 1 if B is random, -100 to ignore the row.

        Returns a dict. "loss_sums" [1], or [2] with next_sentence_label: the losses of masked tokens (in
        training by token_loss, if any) and of next sentences, each summed over predictions, with gradient.
        "correct", a scalar: the masked tokens predicted correctly. In eval mode also "rows", float32
        [B, 3 or 6]: for each row its summed cross-entropy, its number of predictions and how many were
        correct, for masked tokens and then for the next sentence."""
        slots, labels = batch["slots"], batch["slot_labels"].reshape(-1)
        weights, keep = torch.ones_like(labels, dtype=torch.float32), "next_sentence_label" in batch
        out, loss_sum, losses, correct = self._cross_entropy(
            batch, lambda x: _gather_slots(x, slots), labels, weights, True, keep
        )
        sums, columns = [loss_sum], [losses, labels != IGNORED, correct]
        if keep:
            targets = batch["next_sentence_label"]
            pooled = getattr(out, "pooler_output", None)  # of the base model; else out is the full model's
            scores = out[1] if pooled is None else self.lm.cls.seq_relationship(pooled)
            nsp_losses = F.cross_entropy(scores.float(), targets, reduction="none")
            sums.append(nsp_losses.sum())
            columns += [nsp_losses, targets != IGNORED, scores.argmax(1) == targets]
        result = {"loss_sums": torch.stack(sums), "correct": correct.sum()}
        if self.training:
            return result
        rows = [column.detach().view(len(slots), -1).sum(1, dtype=torch.float32) for column in columns]
        return result | {"rows": torch.stack(rows, 1)}


def masked_metrics(sums):
    """The metrics of an evaluation. sums: float64 [rows, 3 or 6], the "rows" of MaskedLMLoss. A mean over no
    predictions is None. The perplexity is that of masked tokens alone.

    loss/eval_stderr is the standard error of loss/eval over random draws of rows from the same kind of text.
    A mean loss is a quotient of two sums over rows, so this is the error of a ratio estimator (Cochran,
    "Sampling Techniques", 1977, chapter 6), without the correction for a finite set."""
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
    if x.device.type == "xla":  # a matrix product is faster on a TPU than gather and scatter
        slots = (slots[:, :, None] == torch.arange(x.shape[1], device=x.device)).to(x.dtype)  # [B, K, T]
        return (slots @ x).flatten(0, 1)
    return x.gather(1, slots[:, :, None].expand(-1, -1, x.shape[2])).flatten(0, 1)


def keytoken_table(keytokens, tokenizer, device=None):
    """float32 [V], V the largest id + 1: 1 at the ids of key tokens, bare and after a space, else 0. Prints
    the key tokens that the tokenizer splits, and ignores them."""
    table, used, split = torch.zeros(max(tokenizer.get_vocab().values()) + 1), {}, {}
    for word in keytokens:
        for spelling in (word.strip(), " " + word.strip()):
            ids = tokenizer(spelling, add_special_tokens=False)["input_ids"]
            if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
                table[ids], used[spelling] = 1.0, None
            else:
                split[spelling] = None
    if split and os.environ.get("RANK", "0") == "0":
        in_use, ignored = (", ".join(map(repr, words)) or "none" for words in (used, split))
        print(f"keytokens  in use: {in_use}; ignored, because the tokenizer splits them: {ignored}")
    return table.to(device)


def keytoken_row_weights(input_ids, table, alpha):
    """input_ids [B, T], table of keytoken_table -> row weights [B]: 1 + alpha * occurrences of key tokens.
    alpha 1 gives the weights of the Hugging Face course, chapter 7.6."""
    return 1.0 + alpha * table[input_ids].sum(1)
