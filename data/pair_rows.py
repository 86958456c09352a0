"""Sentence pairs as rows: one to a row with padding, or as many as fit; also those that others have saved."""

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np

from data.cache import build_once
from data.encode import id_count
from data.order import drawn_order
from data.rows import PackedRows
from data.sources.files import is_saved

PACKING = 1  # part of the fingerprint of packed rows: raise it when shared_rows gives others
COLUMNS = ("input_ids", "token_type_ids", "attention_mask", "next_sentence_label")  # of saved pairs


class PairRows(PackedRows):
    """Pairs of rows [n, T + 3]: token ids, then spans: where A ends, where the row ends, the label.

    pack: a row holds as many pairs as fit, instead of one and padding; M: pairs of the fullest row."""

    # Attention to all: for attention to none kernels may give NaN.
    blanks = {"input_ids": 0, "token_type_ids": 0, "attention_mask": 1, "next_sentence_label": -100,
              "pair": -1}  # fmt: skip

    def __init__(self, tokens, block_size: int, *more, pack: bool = False, **named):
        super().__init__(tokens, block_size + 3, *more, **named)
        self.block_size, self.pack = block_size, pack
        self.spans = np.concatenate([view[:, -3:] for view in self.views] or [np.empty((0, 3), np.uint16)])

    def at(self, row: np.ndarray) -> np.ndarray:
        """The token ids of these pairs [B] -> [B, T]."""
        return super().at(row)[..., :-3]

    @cached_property
    def members(self) -> np.ndarray:
        """The pairs of each packed row, -1 for none [rows, M]: made when asked for, as many files are only
        opened to see whether they are those of a run."""
        return shared_rows(self.spans[:, 1], self.block_size)

    def __len__(self) -> int:
        return len(self.members) if self.pack else self.size

    @property
    def fingerprint(self) -> str:
        return super().fingerprint + f"-packed-{PACKING}" * self.pack

    @property
    def padding(self) -> float:
        """Share of the tokens."""
        return 1 - self.spans[:, 1].sum() / len(self) / self.block_size

    @staticmethod
    def align(sources: Iterable["PairRows"]) -> None:
        """One M for all of them."""
        most = max(rows.members.shape[1] for rows in sources)
        for rows in sources:
            missing = most - rows.members.shape[1]
            rows.members = np.pad(rows.members, ((0, 0), (0, missing)), constant_values=-1)

    def take(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """As PackedRows, with token_type_ids, attention_mask [B, T]: 1 in the first pair of a row, 2 in the
        second, ..., 0 in padding; next_sentence_label [B]. Packed, also position_ids [B, T], from 0 on in
        each pair, and of each pair [B, M]: pair, its number (-1: none), pair_start, next_sentence_label."""
        pair = self.members[row] if self.pack else row[:, None]
        end_of_a, length, label = np.moveaxis(self.spans[pair].astype(np.int64), 2, 0)  # [B, M]
        place = np.arange(self.block_size)
        if not self.pack:
            real = place < length
            columns = {"token_type_ids": real & (place >= end_of_a), "attention_mask": real}
            return super().take(row, epoch) | columns | {"next_sentence_label": label[:, 0]}
        label, length = np.where(pair < 0, -100, label), np.where(pair < 0, 0, length)
        each, ends = np.arange(len(row))[:, None], length.cumsum(1)
        nth = (place >= ends[:, :, None]).sum(1)  # [B, T], M at the padding
        real, nth = nth < pair.shape[1], np.minimum(nth, pair.shape[1] - 1)
        position = np.where(real, place - (ends - length)[each, nth], 0)
        ids = self.at(pair.ravel()).reshape(*pair.shape, -1)  # [B, M, T]
        return {
            "input_ids": np.where(real, ids[each, nth, position], 0), "position_ids": position,
            "token_type_ids": real & (position >= end_of_a[each, nth]),
            "attention_mask": np.where(real, nth + 1, 0), "pair": pair,
            "pair_start": np.where(pair < 0, 0, ends - length), "next_sentence_label": label,
        }  # fmt: skip


def shared_rows(lengths: np.ndarray, room: int) -> np.ndarray:
    """Which of n pairs share a row of `room` tokens: int32 [rows, M] of their numbers, -1 for none. Row after
    row takes the longest pair that leaves no room or what another one fills, else the longest that fits."""
    waiting, rows = [[] for _ in range(room + 1)], []
    for pair in drawn_order(len(lengths), 0, 0).tolist():  # not numpy's: a run goes on with these rows
        waiting[lengths[pair]].append(pair)
    there = sum(1 << length for length, pairs in enumerate(waiting) if pairs)  # a bit for each length
    filled_by = sum(1 << room - length for length, pairs in enumerate(waiting) if pairs or not length)
    while there:
        rows.append([])
        left = room
        while fits := there & ((2 << left) - 1):
            exact = fits & (filled_by >> room - left)
            length = (exact or fits).bit_length() - 1
            rows[-1].append(waiting[length].pop())
            left -= length
            if not waiting[length]:
                there ^= 1 << length
                filled_by ^= 1 << room - length
    members = np.full((len(rows), max(map(len, rows), default=1)), -1, np.int32)
    for number, row in enumerate(rows):
        members[number, : len(row)] = row
    return members


def holds_pairs(name: str) -> bool:
    """Whether it is a folder of such a data set, by its description."""
    first = next(iter(sorted(Path(name).glob("**/dataset_info.json"))), None) if is_saved(name) else None
    features = json.loads(first.read_text()).get("features") if first else None
    return {*COLUMNS} <= {*(features or ())}


class SavedPairs:
    """The splits of such a data set, whose rows are not masked, and of one length."""

    def __init__(self, name: str, cache_dir: str):
        import datasets  # not at the top: 85 MB and half a second

        saved = datasets.load_from_disk(name)
        self.name, self.cache_dir = name, cache_dir
        self.splits = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        self.block_size = len(self.splits["train"][0]["input_ids"])

    def problems(self, block_size: int, tokenizer) -> list[str]:
        """What does not fit, a line each."""
        lines = []
        if block_size != self.block_size:
            lines.append(f"block_size: {block_size}, but pairs of {self.name} have {self.block_size} tokens: "
                         f"set --block_size {self.block_size}.")
        first = max(map(max, self.splits["train"][:1000]["input_ids"]))
        if tokenizer is not None and first >= (known := id_count(tokenizer)):
            lines.append(f"tokenizer_name: ids of {self.name} go up to {first} or further, the tokenizer "
                         f"knows {known}: name the one that made them.")
        return lines

    def rows(self, split: str, pack: bool) -> PairRows:
        """As PairRows, which are made once in the cache."""
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
        return PairRows([pairs.reshape(-1)], T, content=dataset._fingerprint, pack=pack)
