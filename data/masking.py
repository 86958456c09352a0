"""Masked-LM batches: which tokens of a row are hidden and what stands in their place.

15 % of a row's ordinary tokens are predicted; of those 80 % become the mask token, 10 % a random token and
10 % stay (BERT, section 3.1). All draws for a row come from one counter-based generator keyed by (seed,
epoch, row): masks change every epoch, and neither processes, workers, batch size nor a resume change them.

B rows, T tokens per row, K prediction slots per row.
"""
import math

import numpy as np
import torch


def special_ids(tokenizer) -> list[int]:
    added = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    return sorted({*added, *tokenizer.all_special_ids})


class MaskTokens:
    """collate_fn for batches of PackedRows and PairRows: {"input_ids" [B, T], "row" [B], "epoch" [B], ...}.

    Returns the inputs of the model: input_ids with masks applied, `slots` int64 [B, K] (the positions to
    predict) and `slot_labels` int64 [B, K] (the hidden tokens; -100 in empty slots), and untouched what
    sentence pairs bring (attention_mask, token_type_ids, next_sentence_label). K is the same for every batch,
    so that shapes are static and the vocabulary is projected on K positions per row instead of T; it is the
    largest number of predictions a row can ask for, so none is ever dropped. Rows numbered -1 (padding of the
    last evaluation batch) have no predictions.

    Packed rows carry no attention mask: every position is text. They are wrapped as `<s> row </s>`, the form
    in which a fill-mask pipeline will hand its sentence to the model, and come out two tokens longer.
    """

    def __init__(self, tokenizer, mlm_probability: float = 0.15, seed: int = 0):
        names = ("mask_token", "cls_token", "sep_token", "pad_token")
        missing = [name for name in names if getattr(tokenizer, name) is None]
        if missing:
            raise ValueError(f"tokenizer_name {tokenizer.name_or_path!r} has no {', '.join(missing)}: masked "
                             "LM needs them; choose a RoBERTa or BERT tokenizer, or let the script train one")
        if not 0 < mlm_probability < 1:
            raise ValueError(f"mlm_probability {mlm_probability}: must lie between 0 and 1, usually 0.15")
        special = special_ids(tokenizer)
        self.mlm_probability, self.seed = mlm_probability, seed % 2**63
        self.mask_id, self.cls_id, self.sep_id = (tokenizer.mask_token_id, tokenizer.cls_token_id,
                                                  tokenizer.sep_token_id)
        self.is_special = np.zeros(max(len(tokenizer), *special) + 1, dtype=bool)
        self.is_special[special] = True
        self.replacements = np.setdiff1d(np.arange(len(tokenizer)), special)  # random tokens come from here

    def __call__(self, batch: dict) -> dict:
        batch = dict(batch)
        rows, epochs = batch.pop("row").numpy(), batch.pop("epoch").numpy()
        ids = batch["input_ids"].numpy()                                     # [B, T]
        real = (rows >= 0)[:, None] & ~self.is_special[ids]
        if "attention_mask" in batch:
            real &= batch["attention_mask"].numpy() > 0
        ids, slots, labels = self.mask(ids, real, rows, epochs)
        if "attention_mask" not in batch:
            ids = np.pad(ids, ((0, 0), (1, 1)), constant_values=((0, 0), (self.cls_id, self.sep_id)))
            slots = slots + 1
        return batch | {name: torch.from_numpy(np.ascontiguousarray(array))
                        for name, array in (("input_ids", ids), ("slots", slots), ("slot_labels", labels))}

    def mask(self, ids, eligible, rows, epochs):
        """ids, eligible [B, T]; rows, epochs [B] -> masked ids [B, T], slots [B, K], slot labels [B, K]."""
        B, T = ids.shape
        K = math.ceil(self.mlm_probability * T - 1e-9)
        draws = np.empty((B, 3 * T + 1))
        for draw, row, epoch in zip(draws, rows.tolist(), epochs.tolist(), strict=True):
            key, counter = [self.seed, epoch], [0, 0, 0, max(row, 0)]
            np.random.Generator(np.random.Philox(key=key, counter=counter)).random(out=draw)
        which, how, what = draws[:, 1:].reshape(B, 3, T).transpose(1, 0, 2)  # [B, T] each

        # Rounded up or down at random so that the share is mlm_probability for short rows too, not 15 of 128.
        counts = np.floor(self.mlm_probability * eligible.sum(1) + draws[:, 0]).astype(int)
        slots = np.argsort(np.where(eligible, which, 2.0), axis=1)[:, :K]    # eligible positions come first
        used = np.arange(K) < counts[:, None]
        originals, how, what = (np.take_along_axis(x, slots, axis=1) for x in (ids, how, what))
        random_ids = self.replacements[(what * len(self.replacements)).astype(int)]
        hidden = np.where(how < 0.8, self.mask_id, np.where(how < 0.9, random_ids, originals))

        masked = ids.copy()
        np.put_along_axis(masked, slots, np.where(used, hidden, originals), axis=1)
        return masked, np.where(used, slots, 0), np.where(used, originals, -100)
