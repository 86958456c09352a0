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
from data.mixture import MixedRows, Mixture
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

        T, full = self.block_size, size * self.block_size
        held, arrived = deque(), 0  # (document, tokens delivered of it, tokens that wait), and how many wait
        for ids, number in tokenize_documents(documents(), self.tokenizer, self.fim):
            held.append((number, offset, ids[offset:]))
            arrived, offset = arrived + len(ids) - offset, 0
            if arrived < full:
                continue
            stream = np.concatenate([ids for _, _, ids in held])
            for start in range(0, arrived - full + 1, full):
                used = full
                while len(held) > 1 and used >= len(held[0][2]):
                    used -= len(held.popleft()[2])
                number, delivered, ids = held[0]
                held[0] = number, delivered + used, ids[used:]
                yield stream[start : start + full].reshape(size, T), number, delivered + used
            arrived %= full
        if arrived >= T:
            stream = np.concatenate([ids for _, _, ids in held])
            yield stream[: arrived - arrived % T].reshape(-1, T), 0, 0


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
                yield Window(first + int(at[0]), epoch, rows[at], partial(self._take, rows[at]))

    def _take(self, row_ids, chosen) -> np.ndarray:
        return self.rows.take(row_ids[chosen])["input_ids"]


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
    """Yields {"input_ids": int64 [T], "position", "epoch", "row": int}, for a DataLoader of this batch_size.

    start, stop: positions (rows of all processes), start a multiple of batch_size x num_processes. mixture,
    number: positions are those of a mixture of which this is a source; rows say its number as "source"."""

    def __init__(self, source: ShardSource | TextSource | MappedSource, *, batch_size: int, seed: int,
                 process_index: int = 0, num_processes: int = 1, start: int = 0, stop: float = math.inf,
                 mixture: Mixture | None = None, number: int = 0):
        self.source, self.seed, self.batch_size = source, seed, batch_size
        self.process_index, self.num_processes = process_index, num_processes
        self.start, self.stop, self.mixture, self.number = start, stop, mixture, number
        self.mark: list[int] = []  # of the window to begin with; [] = the beginning of the stream
        self.marks: deque[list[int]] = deque(maxlen=MARKS)  # of the windows since then

    def uses(self, position: int) -> int:
        """Rows of this source before a position."""
        return int(self.mixture.before(position)[self.number]) if self.mixture else position

    def state_dict(self, position: int) -> dict[str, Any]:
        """What resumes the stream at `position` (rows consumed so far by all processes together)."""
        uses = self.uses(position)
        mark = max((mark for mark in self.marks.copy() if mark[0] < max(uses, 1)), default=self.mark)
        return {"position": uses, "mark": mark, "source": self.source.fingerprint, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the source is not the one the state comes from."""
        if (state["source"], state["seed"]) != (self.source.fingerprint, self.seed):
            raise ValueError("the stream is not the one this checkpoint was trained on: its source, its "
                             "settings or the seed changed. Restore them, or use another --output_dir.")
        self.start, self.mark = state["position"], list(state["mark"])
        self.marks.clear()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        assert self.start % (self.batch_size * self.num_processes) == 0, self.start
        assert get_worker_info() is None, "each worker would yield all rows"
        for epoch, positions, row_ids, rows in _one_ahead(self._shares()):
            for position, row, ids in zip(positions.tolist(), row_ids.tolist(), rows, strict=True):
                tokens = torch.from_numpy(ids.astype(np.int64))
                found = {"input_ids": tokens, "position": position, "epoch": epoch, "row": row}
                yield found | ({"source": self.number} if self.mixture else {})

    def _shares(self) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """(epoch, positions [m], rows' ids [m], rows [m, T]) of each window for this process."""
        for window in self.source.windows(self.uses(self.start), self.seed, tuple(self.mark)):
            first, n = window.first, len(window.row_ids)
            positions = (self.mixture.positions(self.number, first, n, self.stop) if self.mixture
                         else first + np.arange(n))
            if not len(positions) or positions[0] >= self.stop:
                return
            if window.mark:
                self.marks.append([first, *window.mark])
            mine = positions // self.batch_size % self.num_processes == self.process_index
            chosen = np.flatnonzero(mine & (self.start <= positions) & (positions < self.stop))
            if len(chosen):
                yield window.epoch, positions[chosen], window.row_ids[chosen], window.load(chosen)


class MixedStreams(IterableDataset):
    """Rows of the sources of a mixture as StreamingRows yields them, in the order of the positions."""

    start, stop = 0, math.inf

    def __init__(self, rows: MixedRows, **settings):
        self.streams = [StreamingRows(source, mixture=rows.mixture, number=number, **settings)
                        for number, source in enumerate(rows.sources.values())]

    def state_dict(self, position: int) -> list[dict[str, Any]]:
        return [stream.state_dict(position) for stream in self.streams]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """ValueError as of StreamingRows. `start` is to be set."""
        for stream, state in zip(self.streams, states, strict=True):
            stream.load_state_dict(state)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        used = [stream for stream in self.streams if stream.mixture.millionths[stream.number]]
        for stream in used:
            stream.start, stream.stop = self.start, self.stop
        return heapq.merge(*used, key=lambda row: row["position"])


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
