"""Sentence pairs as rows: one pair to a row, with padding."""

import numpy as np

from data.batches.rows import PackedRows


class PairRows(PackedRows):
    """Pairs from rows [n, T + 3]: token ids, then the span: where A ends, where B ends, the label."""

    blanks = {"input_ids": 0, "token_type_ids": 0, "next_sentence_label": -100}
    blanks |= {"attention_mask": 1}  # all of a blank row: where all is masked, kernels may give NaN
    more = 3

    def columns(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """input_ids, token_type_ids, attention_mask [B, T], next_sentence_label [B] (0: B follows A)."""
        whole = self.ids(row)
        end_of_a, length, label = np.moveaxis(whole[:, -3:].astype(np.int64), 1, 0)[:, :, None]  # [B, 1] each
        place = np.arange(self.block_size)
        real = place < length
        return {"input_ids": whole[:, :-3], "token_type_ids": real & (place >= end_of_a),
                "attention_mask": real, "next_sentence_label": label[:, 0]}
