"""Rows of T tokens: the tokens of all documents of a split are concatenated and cut every T tokens.

    rows = PackedRows([np.load("train-00000.npy", mmap_mode="r"), ...], block_size=128)
    rows.ids(np.array([5, 2]))     # uint16 [2, 128]

Rows cross the boundaries of documents and files. An incomplete last row is not used. The files hold tokens,
not rows, so they serve any T. B rows per batch, T tokens per row (block_size).
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from data.batches.order import endless_order

RowKey = tuple[int, int, int, int]  # position in the stream, epoch, row, source; row -1: padding


class PackedRows(Dataset):
    """Rows cut from 1-d arrays of token ids, usually memory-mapped. max_rows: only the first; 0: all.
    content: a digest of the ids. bytes_per_token: UTF-8 bytes of the text / its tokens; nan: unknown."""

    padding_values = {"input_ids": 0}  # of each column in rows numbered -1
    extra_columns = 0  # numbers stored after the T ids of each row

    def __init__(self, tokens: Sequence[np.ndarray], block_size: int, max_rows: int = 0, content: str = "",
                 bytes_per_token: float = float("nan")):
        self.block_size, self.max_rows, self.content = block_size, max_rows, content
        self.width, self.bytes_per_token = block_size + self.extra_columns, bytes_per_token
        self.tokens = [np.asarray(ids) for ids in tokens]  # views, as np.memmap indexes slowly
        self.starts = np.cumsum([0, *map(len, tokens)]).tolist()  # the first token of each array; the total

    @property
    def fingerprint(self) -> str:
        """Changes only with the content of the rows."""
        return f"{self.content}-{self.block_size}" + f"-{self.max_rows}" * (self.max_rows > 0)

    def __len__(self) -> int:
        n_rows = self.starts[-1] // self.width
        return min(n_rows, self.max_rows or n_rows)

    def ids(self, row: np.ndarray) -> np.ndarray:
        """Row numbers [B] -> rows [B, T + extra_columns]; -1 -> any row."""
        rows = np.empty((len(row), self.width), np.result_type(*self.tokens))
        for ids, start in zip(rows, (np.maximum(row, 0) * self.width).tolist(), strict=True):
            number, done = bisect_right(self.starts, start) - 1, 0
            while done < self.width:
                part = self.tokens[number][start + done - self.starts[number] :][: self.width - done]
                ids[done : done + len(part)] = part
                done, number = done + len(part), number + 1
        return rows

    def columns(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of these rows: {name: [B, ...], integers or bool}."""
        return {"input_ids": self.ids(row)}

    def keys(self, first: int, last: int, seed: int) -> Iterator[RowKey]:
        """The keys of the positions first to last - 1; each epoch has every row once."""
        rows = endless_order(len(self), first, seed)
        for position in range(first, last):
            yield position, *next(rows), 0

    def epochs(self, position: int) -> dict[str, float]:
        """{dataset: passes over it before a position} of a mixture; {} of a single dataset."""
        return {}

    def __getitems__(self, keys: list[RowKey]) -> dict:
        """A batch: int64 tensors input_ids [B, T], other columns, and position, epoch, row and source [B]."""
        return batch_of(keys, [self])


class PairRows(PackedRows):
    """Sentence pairs A B. A row has T + 3 numbers: T token ids, where A ends, where B ends, the label."""

    padding_values = {"input_ids": 0, "token_type_ids": 0, "next_sentence_label": -100}
    padding_values |= {"attention_mask": 1}  # attention to no token at all can give NaN
    extra_columns = 3

    def columns(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """input_ids, token_type_ids, attention_mask [B, T], next_sentence_label [B] (0: B follows A)."""
        ids = self.ids(row)
        end_of_a, end_of_b, label = np.moveaxis(ids[:, -3:].astype(np.int64), 1, 0)[:, :, None]  # [B, 1] each
        position = np.arange(self.block_size)
        in_pair = position < end_of_b
        return {"input_ids": ids[:, :-3], "token_type_ids": in_pair & (position >= end_of_a),
                "attention_mask": in_pair, "next_sentence_label": label[:, 0]}


class Order(Sampler):
    """Sampler of a DataLoader: the keys of the positions first to last - 1."""

    def __init__(self, rows, first: int, last: int, seed: int):
        self.rows, self.first, self.last, self.seed = rows, first, last, seed

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[RowKey]:
        return self.rows.keys(self.first, self.last, self.seed)


def batch_of(keys: list[RowKey], sources: Iterable[PackedRows]) -> dict:
    """The columns of these rows, int64 tensors [B, ...], with padding_values in rows numbered -1."""
    position, epoch, row, source = np.array(keys, np.int64).T
    batch = {"position": position, "epoch": epoch, "row": row, "source": source}
    for number, rows in enumerate(sources):
        at = np.flatnonzero(source == number)
        for name, values in rows.columns(row[at], epoch[at]).items() if len(at) else ():
            column = batch.setdefault(name, np.empty((len(keys), *values.shape[1:]), np.int64))
            column[at] = values
            if name in rows.padding_values:
                column[at[row[at] < 0]] = rows.padding_values[name]
    return {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in batch.items()}
