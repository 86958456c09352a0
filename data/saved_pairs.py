"""Sentence pairs that others have prepared: a `save_to_disk` data set with the columns of BERT's pretraining,
input_ids, token_type_ids, attention_mask and next_sentence_label, of rows of one length.

They become PairRows in the cache, once; masks are drawn by this project, so rows must not be masked.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np

from data.cache import build_once
from data.encode import id_count
from data.pair_rows import PairRows
from data.sources import files

COLUMNS = ("input_ids", "token_type_ids", "attention_mask", "next_sentence_label")


def holds_pairs(name: str) -> bool:
    """Whether it is a folder of such a data set, by its description."""
    if not files.is_saved(name):
        return False
    first = next(iter(sorted(Path(name).glob("**/dataset_info.json"))), None)
    features = json.loads(first.read_text()).get("features") if first else None
    return {*COLUMNS} <= {*(features or ())}


class SavedPairs:
    """The splits of such a data set. ValueError where rows differ in length."""

    def __init__(self, name: str, cache_dir: str):
        import datasets  # not at the top: 85 MB and half a second

        saved = datasets.load_from_disk(name)
        self.name = name
        self.splits = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        self.block_size = len(self.splits["train"][0]["input_ids"])
        self.cache_dir = cache_dir

    def problems(self, block_size: int, tokenizer) -> list[str]:
        """What does not fit, a line each."""
        lines = []
        if block_size != self.block_size:
            lines.append(f"block_size: {block_size}, but pairs of {self.name} have {self.block_size} tokens: "
                         f"set --block_size {self.block_size}.")
        if tokenizer is not None:
            first = max(map(max, self.splits["train"][:1000]["input_ids"]))
            if first >= id_count(tokenizer):
                lines.append(f"tokenizer_name: ids of {self.name} go up to {first} or further, the tokenizer "
                             f"knows {id_count(tokenizer)}: name the one that made them.")
        return lines

    def rows(self, split: str, pack: bool) -> PairRows:
        dataset, T = self.splits[split], self.block_size

        def build(folder: Path) -> None:
            arrays = [np.empty((0, T + 3), np.uint32)]
            for part in dataset.with_format("numpy").iter(batch_size=10_000):
                ids, types, real, label = (np.asarray(part[name]) for name in COLUMNS)
                if ids.ndim != 2 or ids.shape[1] != T:
                    raise ValueError(f"dataset_name: pairs of {self.name}, {split}, differ in length.")
                length = real.sum(1)
                spans = np.stack([length - (types * real).sum(1), length, label.reshape(-1)], 1)
                arrays.append(np.concatenate([ids, spans], 1).astype(np.uint32))
            np.save(folder / "pairs.npy", np.concatenate(arrays))

        folder = build_once(self.cache_dir, "saved", [dataset._fingerprint, T], build)
        pairs = np.load(folder / "pairs.npy", mmap_mode="r")
        return partial(PairRows, pack=pack)([pairs.reshape(-1)], T, content=dataset._fingerprint)
