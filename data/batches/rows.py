"""Rows of T tokens: the tokens of all documents of a split, one after the other, cut every T tokens.

    rows = PackedRows([np.load("train-00000.npy", mmap_mode="r"), ...], block_size=128)
    rows.ids(np.array([5, 2]))     # uint16 [2, 128]

Rows cross the boundaries of documents and files. What is left at the end, less than a row, is unused. The
files hold tokens, not rows, so they serve any T. B rows per batch, T tokens per row (block_size), n rows.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from data.batches.order import endless_order

RowKey = tuple[int, int, int, int]  # position in the stream, epoch, row, source; row -1: padding


class PackedRows(Dataset):
    """Rows cut from 1-d arrays of token ids, usually memory-mapped. max_rows: the first so many; 0: all.
    content: changes with the ids. bytes_per_token: UTF-8 bytes of the text / its tokens; nan: unknown."""

    blanks = {"input_ids": 0}  # the value of each column in a row of padding
    more = 0  # numbers that stand behind the T ids of each row

    def __init__(self, tokens: Sequence[np.ndarray], block_size: int, max_rows: int = 0, content: str = "",
                 bytes_per_token: float = float("nan")):
        self.block_size, self.max_rows, self.content = block_size, max_rows, content
        self.width, self.bytes_per_token = block_size + self.more, bytes_per_token
        self.tokens = [np.asarray(ids) for ids in tokens]  # a memmap is slow to index
        self.ends = np.cumsum([0, *map(len, tokens)]).tolist()  # token number at the end of each array

    @property
    def fingerprint(self) -> str:
        """Changes with the content of the rows and with nothing else."""
        return f"{self.content}-{self.block_size}" + f"-{self.max_rows}" * (self.max_rows > 0)

    def __len__(self) -> int:
        whole = self.ends[-1] // self.width
        return min(whole, self.max_rows or whole)

    def ids(self, row: np.ndarray) -> np.ndarray:
        """Row numbers [B] -> rows [B, T]; for -1 any row."""
        rows = np.empty((len(row), self.width), np.result_type(*self.tokens))
        for ids, start in zip(rows, (np.maximum(row, 0) * self.width).tolist(), strict=True):
            number, done = bisect_right(self.ends, start) - 1, 0
            while done < self.width:
                part = self.tokens[number][start + done - self.ends[number] :][: self.width - done]
                ids[done : done + len(part)] = part
                done, number = done + len(part), number + 1
        return rows

    def columns(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of these rows: {name: [B, ...], any integer type}."""
        return {"input_ids": self.ids(row)}

    def keys(self, first: int, last: int, seed: int) -> Iterator[RowKey]:
        """The keys of the positions first to last - 1: each row once per epoch."""
        rows = endless_order(len(self), first, seed)
        for position in range(first, last):
            yield position, *next(rows), 0

    def epochs(self, position: int) -> dict[str, float]:
        """{data set: passes over it before a position}, where there are several."""
        return {}

    def __getitems__(self, keys: list[RowKey]) -> dict:
        """{"input_ids": [B, T], other columns of the rows, "position", "epoch", "row", "source": [B]}, int64
        tensors."""
        return batch_of(keys, [self])


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


class Order(Sampler):
    """The keys of some rows, for a DataLoader."""

    def __init__(self, rows, first: int, last: int, seed: int):
        self.rows, self.first, self.last, self.seed = rows, first, last, seed

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[RowKey]:
        return self.rows.keys(self.first, self.last, self.seed)


def batch_of(keys: list[RowKey], sources: Iterable[PackedRows]) -> dict:
    """The columns of these rows, int64 tensors [B, ...], with blanks in rows numbered -1."""
    position, epoch, row, source = np.array(keys, np.int64).T
    batch = {"position": position, "epoch": epoch, "row": row, "source": source}
    for number, rows in enumerate(sources):
        at = np.flatnonzero(source == number)
        for name, values in rows.columns(row[at], epoch[at]).items() if len(at) else ():
            column = batch.setdefault(name, np.empty((len(keys), *values.shape[1:]), np.int64))
            column[at] = values
            if name in rows.blanks:
                column[at[row[at] < 0]] = rows.blanks[name]
    return {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in batch.items()}
