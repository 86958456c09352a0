"""Rows that never lie on this disk as a whole: `--streaming`, from token shards or straight from text.

    rows = StreamingRows(ShardSource(url), batch_size=B, seed=0, process_index=p, num_processes=P)
    loader = DataLoader(rows, batch_size=B)

The order is one endless stream of positions, a function of the seed alone. Position k is in batch k // B,
batch b goes to process b % P. Each row of the source comes once per epoch, the next epoch follows in the same
batch.

What it costs: every process reads the whole source and keeps its share. Of shards that is the download (about
2 bytes per token) and decoding at 100 to 300 M tokens/s. Of text it is tokenizing too, so that all processes
together train on what one of them tokenizes, 0.5 to 1.5 M tokens/s and core: beyond that, prepare shards.
"""

import hashlib
import heapq
import itertools
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from data.cache import RowFile, build_once
from data.filters import Accounting, clean_documents, in_validation
from data.mixture import MixedRows
from data.order import CHUNK, epochs_and_rows, permuted
from data.packing import PackedRows, token_dtype, tokenize_documents, tokenizer_fingerprint
from data.shards import check_shards, read_shard, split_entry
from data.sources.storage import Folder

SHUFFLED = 4  # shards whose rows are shuffled together
MARKS = 64  # windows whose beginnings are remembered, for resuming a text stream


class Window(NamedTuple):
    """A stretch of the stream, shuffled within itself."""

    first: int  # position
    epoch: int
    row_ids: np.ndarray  # int64 [n]: rows of the source, in the order of the stream
    load: Callable[[np.ndarray], np.ndarray]  # int64 [m], indices into row_ids -> uint16 or uint32 [m, T]
    mark: tuple[int, ...] = ()  # where the source takes up the stream at `first` again


def shuffled(n: int, seed: int, epoch: int, window: int) -> np.ndarray:
    return permuted(np.arange(n), n, seed + 0x9E3779B97F4A7C15 * (window + 1), epoch)


class ShardSource:
    """Token shards for training. Shards are shuffled, then the rows of SHUFFLED consecutive ones too; a
    process holds its share of two such groups and a shard. Raises ValueError like check_shards."""

    def __init__(self, url: str):
        manifest = check_shards(url)
        entry = split_entry(manifest, url, "train")
        self.folder, self.block_size, self.dtype = Folder(url), manifest["block_size"], manifest["dtype"]
        self.shards, self.n_rows = entry["shards"], entry["rows"]
        self.sizes = np.array([shard["rows"] for shard in self.shards])
        self.first = self.sizes.cumsum() - self.sizes  # row of each
        content = [SHUFFLED, *(shard["sha256"] for shard in self.shards)]
        self.fingerprint = hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    def windows(self, position: int, seed: int, mark: tuple[int, ...]) -> Iterator[Window]:
        """Windows from the one that holds `position` on, endlessly."""
        for epoch in itertools.count(position // self.n_rows):
            first, count = epoch * self.n_rows, len(self.shards)
            order = permuted(np.arange(count), count, seed, epoch)
            for window, at in enumerate(range(0, count, SHUFFLED)):
                members = order[at : at + SHUFFLED]
                n = int(self.sizes[members].sum())
                if first + n > position:
                    row_ids = np.concatenate([self.first[m] + np.arange(self.sizes[m]) for m in members])
                    row_ids = row_ids[shuffled(n, seed, epoch, window)]
                    yield Window(first, epoch, row_ids, partial(self._read, members, row_ids))
                first += n

    def _read(self, members, row_ids, chosen) -> np.ndarray:
        rows = np.empty((len(chosen), self.block_size), self.dtype)
        for m in members:
            inside = row_ids[chosen] - self.first[m]
            here = (0 <= inside) & (inside < self.sizes[m])
            if here.any():
                rows[here] = read_shard(self.folder, self.shards[m], self.block_size)[inside[here]]
        return rows


class TextSource:
    """A corpus, filtered, tokenized and packed on the fly: the rows of data.prepare and prepare_rows, in
    order, for training then shuffled within `shuffle_rows` consecutive ones; 0 where only `blocks` are read.
    A resumed run reads the epoch again up to where it was, without tokenizing. ValueError: no row in it."""

    n_rows = None  # only the end of the corpus tells

    def __init__(self, corpus, tokenizer, *, block_size: int, validation_fraction: float = 0.0,
                 validation_seed: int = 0, split: str = "train", shuffle_rows: int = 8192, fim=None):
        self.corpus, self.tokenizer, self.block_size = corpus, tokenizer, block_size
        self.validation, self.split = (validation_seed, validation_fraction), split
        self.shuffle_rows, self.fim = shuffle_rows, fim
        content = [corpus.fingerprint, corpus.text_column, tokenizer_fingerprint(tokenizer), block_size,
                   corpus.keywords, self.validation, split, shuffle_rows, *([fim] if fim else [])]
        self.fingerprint = hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    def windows(self, position: int, seed: int, mark: tuple[int, ...]) -> Iterator[Window]:
        """Windows from the one that `mark` names on, endlessly; those before `position` come too."""
        first, epoch, row, document, offset = mark or (0, 0, 0, 0, 0)
        while True:
            for rows, next_document, next_offset in self.blocks(self.shuffle_rows, document, offset):
                order = shuffled(len(rows), seed, epoch, row // self.shuffle_rows)
                begin = epoch, row, document, offset
                yield Window(first, epoch, row + order, rows[order].__getitem__, begin)
                first, row = first + len(rows), row + len(rows)
                document, offset = next_document, next_offset
            if row == 0:
                raise ValueError(f"dataset_name: {self.corpus.name} gives no row of {self.block_size} tokens "
                                 f"for {self.split}. Take more text, a smaller block_size or other keywords.")
            epoch, row, document, offset = epoch + 1, 0, 0, 0

    def blocks(self, size: int, document: int = 0, offset: int = 0):
        """One epoch from token `offset` of `document` (its number in the source) on: rows [size, T], the last
        time [1 to size, T], and the document and offset where the next row begins."""
        counts = Accounting()

        def documents() -> Iterator[tuple[str, int]]:
            for found in clean_documents(self.corpus, counts):
                text, number = found[self.corpus.text_column], counts.read - 1
                held_out = in_validation(text, *self.validation)
                if number >= document and held_out == (self.split == "validation"):
                    yield self.fim(text) if self.fim else text, number

        T, full, dtype = self.block_size, size * self.block_size, token_dtype(self.tokenizer)
        waiting = array(dtype.char)  # less than `full` tokens: every block ends in the document that follows
        for ids, number in tokenize_documents(documents(), self.tokenizer, self.fim):
            waiting.frombytes(ids[offset:].tobytes())
            for end in range(full, len(waiting) + 1, full):
                rows = np.array(waiting[end - full : end], dtype).reshape(size, T)
                yield rows, number, len(ids) - (len(waiting) - end)
            del waiting[: len(waiting) - len(waiting) % full]
            offset = 0
        if len(waiting) >= T:
            yield np.array(waiting[: len(waiting) - len(waiting) % T], dtype).reshape(-1, T), 0, 0


class MappedSource:
    """Rows that lie on this disk among streams, in the order that they have by themselves."""

    def __init__(self, rows: PackedRows):
        self.rows, self.n_rows, self.fingerprint = rows, rows.n_rows, rows.fingerprint

    def windows(self, position: int, seed: int, mark: tuple[int, ...]) -> Iterator[Window]:
        """Windows from the one that holds `position` on, endlessly."""
        for first in itertools.count(position // CHUNK * CHUNK, CHUNK):
            epochs, rows = epochs_and_rows(first, first + CHUNK, self.n_rows, seed)
            for epoch in np.unique(epochs).tolist():
                at = (epochs == epoch).nonzero()[0]
                yield Window(first + int(at[0]), epoch, rows[at],
                             lambda chosen, row_ids=rows[at]: self.rows.take(row_ids[chosen])["input_ids"])


def first_rows(source: TextSource, most: int, cache_dir: str) -> PackedRows:
    """The first rows of a stream, kept in the cache: of its first held-out documents, as a draw from all of
    them would have to read all of it before the first step."""

    def build(folder: Path) -> None:
        file = RowFile(folder / "validation.npy", source.block_size, token_dtype(source.tokenizer))
        for rows, _, _ in source.blocks(64):
            file.write(rows[: most - file.rows])
            if file.rows == most:
                break
        file.close()
        if not file.rows:
            raise ValueError(f"dataset_name: no validation row in {source.corpus.name}; "
                             "raise validation_fraction.")

    rows = PackedRows(build_once(cache_dir, "stream", [source.fingerprint, most], build) / "validation.npy")
    texts = source.tokenizer.batch_decode(rows.rows.tolist(), clean_up_tokenization_spaces=False)
    rows.bytes_per_token = sum(len(text.encode()) for text in texts) / rows.rows.size
    return rows


class StreamingRows(IterableDataset):
    """Yields {"input_ids": int64 [T], "position", "epoch", "row": int}, for a DataLoader of this batch_size;
    of MixedRows in the order of their positions, and "source", the number of the one that a row is of.

    start, stop: positions (rows of all processes), start a multiple of batch_size x num_processes."""

    start = 0

    def __init__(self, rows: ShardSource | TextSource | MixedRows, *, batch_size: int, seed: int,
                 process_index: int = 0, num_processes: int = 1, stop: float = math.inf):
        self.mixture = rows.mixture if isinstance(rows, MixedRows) else None
        self.sources = [*rows.sources.values()] if self.mixture else [rows]
        self.seed, self.batch_size, self.stop = seed, batch_size, stop
        self.process_index, self.num_processes = process_index, num_processes
        # Marks of the windows of each source: those to begin with ([]: the stream's first), and since then.
        self.begun: list[list[int]] = [[] for _ in self.sources]
        self.marks: list[deque[list[int]]] = [deque(maxlen=MARKS) for _ in self.sources]

    def uses(self, position: int) -> list[int]:
        """Rows of each source before a position."""
        return self.mixture.before(position).tolist() if self.mixture else [position]

    def state_dict(self, position: int) -> dict[str, Any] | list[dict[str, Any]]:
        """What resumes the stream at `position` (rows consumed so far by all processes together), of a
        mixture a list."""
        states = []
        for uses, source, begun, marks in zip(self.uses(position), self.sources, self.begun, self.marks,
                                            strict=True):
            mark = max((mark for mark in marks.copy() if mark[0] < max(uses, 1)), default=begun)
            states.append({"position": uses, "mark": mark, "source": source.fingerprint, "seed": self.seed})
        return states if self.mixture else states[0]

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """`start` is to be set. Raises ValueError when a source is not the one that the state comes from."""
        states = state if self.mixture else [state]
        found = [(source.fingerprint, self.seed) for source in self.sources]
        if found != [(state["source"], state["seed"]) for state in states]:
            raise ValueError("the stream is not the one this checkpoint was trained on: its source, its "
                             "settings or the seed changed. Restore them, or use another --output_dir.")
        self.begun = [list(state["mark"]) for state in states]
        for marks in self.marks:
            marks.clear()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        assert self.start % (self.batch_size * self.num_processes) == 0, self.start
        assert get_worker_info() is None, "each worker would yield all rows"
        used = self.mixture.millionths if self.mixture else [1]
        return heapq.merge(*map(self._rows, np.flatnonzero(used).tolist()), key=lambda row: row["position"])

    def _rows(self, number: int) -> Iterator[dict[str, Any]]:
        """Those of a source."""
        for epoch, positions, row_ids, rows in _one_ahead(self._shares(number)):
            for position, row, ids in zip(positions.tolist(), row_ids.tolist(), rows, strict=True):
                tokens = torch.from_numpy(ids.astype(np.int64))
                found = {"input_ids": tokens, "position": position, "epoch": epoch, "row": row}
                yield found | ({"source": number} if self.mixture else {})

    def _shares(self, number: int) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """(epoch, positions [m], rows' ids [m], rows [m, T]) of each window of a source for this process."""
        begin = self.uses(self.start)[number], self.seed, tuple(self.begun[number])
        for window in self.sources[number].windows(*begin):
            first, n = window.first, len(window.row_ids)
            positions = (self.mixture.positions(number, first, n, self.stop) if self.mixture
                         else first + np.arange(n))
            if not len(positions) or positions[0] >= self.stop:
                return
            if window.mark:
                self.marks[number].append([first, *window.mark])
            mine = positions // self.batch_size % self.num_processes == self.process_index
            chosen = np.flatnonzero(mine & (self.start <= positions) & (positions < self.stop))
            if len(chosen):
                yield window.epoch, positions[chosen], window.row_ids[chosen], window.load(chosen)


def _one_ahead(items: Iterator) -> Iterator:
    """The same items, each made in a thread while the one before it is in use."""
    pool = ThreadPoolExecutor(1)
    try:
        upcoming = pool.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = pool.submit(next, items, None)
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
