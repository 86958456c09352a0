"""What a model that knows only how often each token occurs would score: the number that training has to beat.

    python -m tests.benchmarks.unigram cache/rows-*/ --rows 512
"""

import argparse
import math
from pathlib import Path

import numpy as np

from data.order import evaluation_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="prepared rows: train.npy and validation.npy")
    parser.add_argument("--rows", type=int, default=0, help="validation rows, max_eval_samples; 0: all")
    parser.add_argument("--seed", type=int, default=42, help="of the run")
    args = parser.parse_args()
    for folder in args.folders:
        train = np.load(folder / "train.npy", mmap_mode="r")
        validation = np.load(folder / "validation.npy", mmap_mode="r")
        rows = evaluation_rows(len(validation), args.rows, args.seed)
        predicted = validation[rows, 1:].ravel()  # the tokens that evaluation predicts
        size = int(max(train.max(), validation.max())) + 1
        counts = np.bincount(np.asarray(train).ravel(), minlength=size) + 1  # add-one smoothing
        loss = -np.log(counts / counts.sum())[predicted].mean()
        most = np.bincount(predicted).max() / len(predicted)
        print(f"{folder}: loss {loss:.4f}, perplexity {math.exp(loss):.1f} on {len(predicted):,} tokens; "
              f"always guessing the most frequent token is right {most:.1%} of the time")  # fmt: skip


if __name__ == "__main__":
    main()
