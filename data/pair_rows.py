"""Sentence pairs as rows: one to a row with padding, or as many as fit. Also pairs that others have saved."""

import json
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from data.cache import build_once
from data.order import drawn_order
from data.rows import PackedRows
from data.sources.files import is_saved
from data.token_set import Split, TokenSet

PACKING = 1  # part of the fingerprint of packed rows: raise it when shared_rows packs differently
COLUMNS = ("input_ids", "token_type_ids", "attention_mask", "next_sentence_label")  # of saved pairs


class PairRows(PackedRows):
    """Pairs from rows [n, T + 3]: token ids, then the span: where A ends, where B ends, the label.

    pack: as many pairs to a row as fit, instead of one and padding. M: the pairs of the fullest row."""

    blanks = {"input_ids": 0, "token_type_ids": 0, "next_sentence_label": -100, "pair": -1}
    blanks |= {"attention_mask": 1}  # all of a blank row: where all is masked, kernels may give NaN

    def __init__(self, tokens, block_size: int, *more, pack: bool = False, **named):
        super().__init__(tokens, block_size + 3, *more, **named)
        self.block_size, self.pack = block_size, pack
        self.spans = np.concatenate([view[:, -3:] for view in self.views] or [np.empty((0, 3), np.uint16)])

    def ids(self, row: np.ndarray) -> np.ndarray:
        """The token ids of these pairs [B] -> [B, T]."""
        return super().ids(row)[..., :-3]

    @cached_property
    def members(self) -> np.ndarray:
        """The pairs of each packed row [rows, M], -1 for none. Computed only when used: a run that resumes
        opens many files just to compare fingerprints."""
        return shared_rows(self.spans[:, 1], self.block_size)

    def __len__(self) -> int:
        return len(self.members) if self.pack else super().__len__()

    @property
    def fingerprint(self) -> str:
        return super().fingerprint + f"-packed-{PACKING}" * self.pack

    @property
    def padding(self) -> float:
        """The share of the tokens that is padding."""
        return 1 - self.spans[:, 1].sum() / len(self) / self.block_size

    @staticmethod
    def align(sources: Iterable["PairRows"]) -> None:
        """Gives all sources of a mixture the same M."""
        M = max(rows.members.shape[1] for rows in sources)
        for rows in sources:
            missing = M - rows.members.shape[1]
            rows.members = np.pad(rows.members, ((0, 0), (0, missing)), constant_values=-1)

    def columns(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """As PackedRows, with token_type_ids and attention_mask [B, T] (1 in a row's first pair, 2 in its
        second, ..., 0 in padding) and next_sentence_label [B]. Packed, also position_ids [B, T], from 0 in
        each pair, and for each pair [B, M] its number `pair` (-1: none), pair_start, next_sentence_label."""
        pair = self.members[row] if self.pack else row[:, None]
        end_of_a, length, label = np.moveaxis(self.spans[pair].astype(np.int64), 2, 0)  # [B, M]
        place = np.arange(self.block_size)
        if not self.pack:
            real = place < length
            columns = {"token_type_ids": real & (place >= end_of_a), "attention_mask": real}
            return super().columns(row, epoch) | columns | {"next_sentence_label": label[:, 0]}
        label, length = np.where(pair < 0, -100, label), np.where(pair < 0, 0, length)
        each, ends = np.arange(len(row))[:, None], length.cumsum(1)
        nth = (place >= ends[:, :, None]).sum(1)  # [B, T], M at the padding
        real, nth = nth < pair.shape[1], np.minimum(nth, pair.shape[1] - 1)
        position = np.where(real, place - (ends - length)[each, nth], 0)
        ids = self.ids(pair.ravel()).reshape(*pair.shape, -1)  # [B, M, T]
        return {
            "input_ids": np.where(real, ids[each, nth, position], 0),
            "position_ids": position,
            "token_type_ids": real & (position >= end_of_a[each, nth]),
            "attention_mask": np.where(real, nth + 1, 0),
            "pair": pair,
            "pair_start": np.where(pair < 0, 0, ends - length),
            "next_sentence_label": label,
        }


def shared_rows(lengths: np.ndarray, room: int) -> np.ndarray:
    """The numbers of the pairs that share each row of `room` tokens, int32 [rows, M], -1: none. A row takes
    the longest pair after which it is full or one more pair fills it, else the longest that fits."""
    waiting, rows = [[] for _ in range(room + 1)], []
    for pair in drawn_order(len(lengths), 0, 0).tolist():  # not numpy's, which may change under a run
        waiting[lengths[pair]].append(pair)
    lengths_left = sum(1 << length for length, pairs in enumerate(waiting) if pairs)  # one bit each
    filled_by = sum(1 << room - length for length, pairs in enumerate(waiting) if pairs or not length)
    while lengths_left:
        rows.append([])
        left = room
        while fits := lengths_left & ((2 << left) - 1):
            exact = fits & (filled_by >> room - left)
            length = (exact or fits).bit_length() - 1
            rows[-1].append(waiting[length].pop())
            left -= length
            if not waiting[length]:
                lengths_left ^= 1 << length
                filled_by ^= 1 << room - length
    members = np.full((len(rows), max(map(len, rows), default=1)), -1, np.int32)
    for number, row in enumerate(rows):
        members[number, : len(row)] = row
    return members


def holds_pairs(name: str) -> bool:
    """Whether it is a save_to_disk folder whose description has the columns of pairs."""
    first = next(iter(sorted(Path(name).glob("**/dataset_info.json"))), None) if is_saved(name) else None
    features = json.loads(first.read_text()).get("features") if first else None
    return {*COLUMNS} <= {*(features or ())}


def open_saved_pairs(name: str, cache_dir, pack: bool = False) -> TokenSet | None:
    """The sentence pairs of such a folder, converted once into the cache; None where it holds none."""
    if not holds_pairs(name):
        return None
    import datasets  # not at the top: 85 MB and half a second

    saved, splits, T = datasets.load_from_disk(name), {}, 0
    saved = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    for split, pairs in ((split, pairs) for split, pairs in saved.items() if len(pairs)):
        seen = pairs[:1000]["input_ids"]
        T = T or len(seen[0])
        opened, largest = partial(_converted, pairs, T, cache_dir), max(map(max, seen))
        splits[split] = Split(len(pairs) * T, pairs._fingerprint, opened, largest=largest)
    return TokenSet(name, splits, partial(PairRows, pack=pack), row_tokens=T)


def _converted(dataset, T: int, cache_dir, _) -> tuple[list[np.ndarray], str]:
    """Pairs as the rows [n x (T + 3)] of PairRows, and their content."""

    def build(folder: Path) -> None:
        arrays = [np.empty((0, T + 3), np.uint32)]
        for part in dataset.with_format("numpy").iter(batch_size=10_000):
            ids, types, real, label = (np.asarray(part[name]) for name in COLUMNS)
            if ids.ndim != 2 or ids.shape[1] != T:
                raise ValueError(f"dataset_name: sentence pairs differ in length, all must have {T} tokens.")
            length = real.sum(1)
            spans = np.stack([length - (types * real).sum(1), length, label.reshape(-1)], 1)
            arrays.append(np.concatenate([ids, spans], 1).astype(np.uint32))
        np.save(folder / "pairs.npy", np.concatenate(arrays))

    folder = build_once(cache_dir, "saved", [dataset._fingerprint, T], build)
    return [np.load(folder / "pairs.npy", mmap_mode="r").reshape(-1)], dataset._fingerprint
