"""Masked-LM batches: chooses the tokens to predict and what replaces them.

15 % of a row's ordinary tokens are predicted; of these, 80 % become the mask token, 10 % a random token, and
10 % stay (BERT, section 3.1). A counter-based generator with the key (seed, epoch, row) makes all draws for a
row, so masks change with the epoch, but not with processes, workers, batch size or a resume.

B rows, T tokens per row, K prediction slots per row.
"""

import math

import numpy as np
import torch


def special_ids(tokenizer) -> list[int]:
    added = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    return sorted({*added, *tokenizer.all_special_ids})


class MaskTokens:
    """collate_fn for batches of PackedRows and PairRows: input_ids [B, T]; position, epoch, row [B]; ...

    Returns masked input_ids, `slots` int64 [B, K] (the positions to predict) and `slot_labels` int64 [B, K]
    (the tokens that were there; -100 in empty slots). K, the largest number of predictions of a row, is the
    same in all batches. Rows numbered -1 are padding and not masked.

    PackedRows become `<s> row </s>`, two tokens longer, as a fill-mask pipeline encodes a sentence, unless
    they have tokenizer.model_max_length tokens: such rows contain their special tokens.

    ValueError: mlm_probability is not between 0 and 1, or the tokenizer has no mask token."""

    def __init__(self, tokenizer, mlm_probability: float = 0.15, seed: int = 0):
        names = ("mask_token", "cls_token", "sep_token", "pad_token")
        if missing := [name for name in names if getattr(tokenizer, name) is None]:
            raise ValueError(f"tokenizer_name {tokenizer.name_or_path!r} has no {', '.join(missing)}, which "
                             "masked LM needs; choose a BERT or RoBERTa tokenizer, or give none to train one")
        self.mlm_probability, self.seed = mlm_probability, seed % 2**63
        if not 0 < mlm_probability < 1:
            raise ValueError(f"mlm_probability {mlm_probability}: must lie between 0 and 1, usually 0.15")
        self.max_length, self.mask_id = tokenizer.model_max_length, tokenizer.mask_token_id
        self.ends = tokenizer.cls_token_id, tokenizer.sep_token_id
        special = special_ids(tokenizer)
        known = np.unique([*tokenizer.get_vocab().values(), *special])  # sorted; ids may have gaps
        self.is_special = np.isin(np.arange(known[-1] + 1), special)
        self.replacements = np.setdiff1d(known, special)  # random tokens are drawn from these

    def __call__(self, batch: dict) -> dict:
        columns = {name: column.numpy() for name, column in batch.items()}
        ids, rows, attention = columns["input_ids"], columns["row"], columns.get("attention_mask")
        eligible = (rows >= 0)[:, None] & ~self.is_special[ids]  # [B, T]
        if attention is not None:
            eligible &= attention > 0
        ids, slots, labels = self.mask(ids, eligible, rows, columns["epoch"])
        if attention is None and ids.shape[1] != self.max_length:
            ids = np.pad(ids, ((0, 0), (1, 1)), constant_values=((0, 0), self.ends))
            slots = slots + 1
        masked = {"input_ids": ids, "slots": slots, "slot_labels": labels}
        return batch | {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in masked.items()}

    def order(self, ids: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """ids [B, T], draws float64 [B, T] in [0, 1) -> draws [B, T]: tokens with the lowest are predicted. A
        subclass may give several tokens the same draw: these are chosen together, from left to right."""
        return draws

    def mask(self, ids, eligible, rows, epochs):
        """ids, eligible [B, T]; rows, epochs [B] -> masked ids [B, T], slots, slot labels [B, K]."""
        B, T = ids.shape
        K = math.ceil(self.mlm_probability * T - 1e-9)
        draws = np.empty((B, 3 * T + 1))
        for draw, row, epoch in zip(draws, rows.tolist(), epochs.tolist(), strict=True):
            generator = np.random.Philox(key=[self.seed, epoch], counter=[0, 0, 0, max(row, 0)])
            np.random.Generator(generator).random(out=draw)
        order, actions, tokens = draws[:, 1:].reshape(B, 3, T).transpose(1, 0, 2)  # [B, T] each
        # The number of predictions is rounded up or down at random: the mean is right for short rows, too.
        counts = np.floor(self.mlm_probability * eligible.sum(1) + draws[:, 0]).astype(int)
        order = np.where(eligible, self.order(ids, order), 2.0)  # eligible positions come first
        slots = np.argsort(order, axis=1, kind="stable")[:, :K]
        used = np.arange(K) < counts[:, None]
        originals, actions, tokens = (np.take_along_axis(x, slots, axis=1) for x in (ids, actions, tokens))
        random_ids = self.replacements[(tokens * len(self.replacements)).astype(int)]
        inputs = np.where(actions < 0.8, self.mask_id, np.where(actions < 0.9, random_ids, originals))
        masked = ids.copy()
        np.put_along_axis(masked, slots, np.where(used, inputs, originals), axis=1)
        return masked, np.where(used, slots, 0), np.where(used, originals, -100)
