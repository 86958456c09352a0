"""Sentence pairs several to a row against one to a row and padding: forward, losses and backward of BERT.

    python -m tests.benchmarks.packed_pairs                          # rows of 128, 32 % of them padding
    python -m tests.benchmarks.packed_pairs --width 768 --rounds 1   # BERT base's width

Both take the same pairs, masks and weights through this project's rows, masks and losses, as many tokens a
step, each in a process of its own, in turn; packed rows are --longer times as long. The losses are the means
over all pairs.
"""

import math
import tempfile
from pathlib import Path

from tests.benchmarks.measure import Clock, T, compared, print_table

SHAPE = {"vocab_size": 8192, "layers": 4, "width": 256, "pairs": 400, "longer": 2}


def pairs_file(folder: str, number: int, vocab_size: int, width: int) -> Path:
    """Pairs of 50 to T tokens in rows of `width`, of which padded ones use the first T."""
    import numpy as np

    rng, path = np.random.default_rng(0), Path(folder, "pairs.npy")
    rows = np.zeros((number, width + 3), np.uint16)
    for row in rows:
        length = rng.integers(50, T + 1)
        row[:length] = rng.integers(5, vocab_size, length)
        row[width:] = rng.integers(10, length - 10), length, rng.integers(2)
    np.save(path, rows)
    return path


def contender(name: str, args) -> dict:
    import torch
    from transformers import BertTokenizerFast, set_seed

    from data.masking import MaskTokens
    from data.pair_rows import PairRows
    from tests.shard_data import batch_of, packed
    from utils.learning.losses import MaskedLMLoss
    from utils.learning.model import build_model

    set_seed(0)
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    words = {word: i for i, word in enumerate([*special, *map(str, range(args.vocab_size - 5))])}
    tokenizer = BertTokenizerFast(vocab=words)
    shape = f"num_hidden_layers={args.layers},hidden_size={args.width},num_attention_heads={args.width // 64}"
    shape += f",intermediate_size={4 * args.width},hidden_dropout_prob=0,attention_probs_dropout_prob=0"
    width = args.longer * T
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MaskedLMLoss(build_model("pretraining", "bert", shape, None, width, tokenizer)).to(device)
    mask, totals = MaskTokens(tokenizer, 0.15), {}
    with tempfile.TemporaryDirectory() as folder:
        rows = packed(pairs_file(folder, args.pairs, args.vocab_size, width), PairRows, pack=name == "packed")
        at_once = 8 // args.longer if name == "packed" else 8  # rows of so many tokens
        clock = Clock()
        for start in range(0, len(rows), at_once):
            keys = [(i, 0, i) for i in range(start, min(start + at_once, len(rows)))]
            batch = mask(batch_of(rows, keys))
            if name == "padded":
                cut = dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), T)
                cut |= dict.fromkeys(("slots", "slot_labels"), math.ceil(0.15 * T))  # those of rows of T
                batch |= {column: batch[column][:, :size].contiguous() for column, size in cut.items()}
            if start == 4 * at_once:  # the first ones warm up
                clock.start()
            sums = model({column: value.to(device) for column, value in batch.items()})
            (sums["mlm_loss_sum"] + sums["nsp_loss_sum"]).backward()
            model.zero_grad()
            if start >= 4 * at_once:
                clock.step()
            for key, value in sums.items():
                totals[key] = totals.get(key, 0) + value.detach().double().sum().item()
    steps = -(-len(rows) // at_once)
    return clock.report(args.pairs / steps) | {
        "padding": 100 * (1 - rows.spans[:, 1].sum() / len(rows) / (width if name == "packed" else T)),
        "mlm": totals["mlm_loss_sum"] / totals["mlm_tokens"],
        "nsp": totals["nsp_loss_sum"] / totals["nsp_rows"],
    }  # fmt: skip


def main():
    args, lines = compared(__doc__, contender, ("padded", "packed"), SHAPE, rounds=3)
    print_table(
        f"BERT {args.layers} x {args.width}, vocabulary {args.vocab_size}, {args.pairs} pairs of 50 to {T} "
        f"tokens, 8 rows of {T} or {8 // args.longer} of {args.longer * T} a step, medians of {args.rounds} "
        "runs in turn",
        lines,
        {"tokens_per_second": "pairs/s", "padding": "padding, %", "mlm": "masked loss",
         "nsp": "next-sentence loss"},
        {"tokens_per_second": "rate ratio", "cpu_per_step": "CPU per step ratio"},
        args.append,
    )  # fmt: skip


if __name__ == "__main__":
    main()
