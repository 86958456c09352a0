"""What a model that knows only how often each token occurs would score: the number that training has to beat.

    python -m tests.benchmarks.unigram cache/rows-*/ --rows 512
"""

import argparse
import math
from pathlib import Path

import numpy as np

from data.batches.order import evaluation_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="prepared token files")
    parser.add_argument("--block_size", type=int, default=128)
    parser.add_argument("--rows", type=int, default=0, help="validation rows, max_eval_samples; 0: all")
    args = parser.parse_args()
    for folder in args.folders:
        train, validation = (np.concatenate([np.load(file) for file in sorted(folder.glob(f"{split}-*.npy"))])
                             for split in ("train", "validation"))  # fmt: skip
        train, validation = (ids[: len(ids) // args.block_size * args.block_size].reshape(-1, args.block_size)
                             for ids in (train, validation))  # fmt: skip
        rows = evaluation_rows(len(validation), args.rows)
        predicted = validation[rows, 1:].ravel()  # the tokens that evaluation predicts
        size = int(max(train.max(), validation.max())) + 1
        counts = np.bincount(np.asarray(train).ravel(), minlength=size) + 1  # add-one smoothing
        loss = -np.log(counts / counts.sum())[predicted].mean()
        most = np.bincount(predicted).max() / len(predicted)
        print(f"{folder}: loss {loss:.4f}, perplexity {math.exp(loss):.1f} on {len(predicted):,} tokens; "
              f"always guessing the most frequent token is right {most:.1%} of the time")  # fmt: skip


if __name__ == "__main__":
    main()
