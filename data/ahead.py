"""Streaming: a process of its own reads and tokenizes ahead of training, and leaves rows in a ring of files.

    cache_dir/stream-<run>-<source>/group-00000012.npy    rows [n, T], in the order of the source
                                    group-00000012.json   which positions of the stream these are: it is whole
                                    taken-3               the group that process 3 of this machine is at

One producer for each machine and source, which all processes of the machine read. It gets its Job on stdin,
and ends with its parent. Groups that all processes have passed are deleted, so the disk never holds more than
the setting stream_gb says. What ends a producer stands in failed.json, and ends the run with that message.
"""

import itertools
import os
import pickle
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.encode import Encoder, tokenize_documents
from data.files import read_tokens
from data.filters import Accounting, clean_documents, in_validation
from data.sources.corpus import Corpus
from utils.io.files import write_json
from utils.io.secrets import without_secrets
from utils.io.urls import Folder

FAILED = "failed.json"
PAUSE = 0.02  # seconds between looks at the disk


@dataclass(frozen=True)
class Mark:
    """Where a group begins: its number, its first position in the stream, the epoch, its first row in it; and
    of text the document, and the token of it, that this row begins with."""

    group: int = 0
    first: int = 0
    epoch: int = 0
    row: int = 0
    document: int = 0
    offset: int = 0


@dataclass
class TextGroups:
    """A corpus as rows: those of prepare_rows, in order, `size` at a time. A resumed stream reads the epoch
    again up to where it was, without tokenizing. ValueError: no row in it."""

    corpus: Corpus
    encoder: Encoder
    block_size: int
    size: int  # rows of a group
    held_out: tuple[int, float] = (0, 0.0)  # seed, share of the documents that are for validation
    fim: Any = None

    @property
    def name(self) -> str:
        return self.corpus.name

    def epoch(self, document: int, offset: int) -> Iterator[tuple[np.ndarray, int, int]]:
        """From token `offset` of `document` (its number in the source) on: rows [size, T], the last time
        fewer, and the document and offset where the next row begins."""
        T, full, dtype = self.block_size, self.size * self.block_size, np.dtype(self.encoder.dtype)
        waiting = array(dtype.char)  # less than `full` tokens
        for ids, number in tokenize_documents(self._documents(document), self.encoder, self.fim):
            waiting.frombytes(ids[offset:].tobytes())
            for end in range(full, len(waiting) + 1, full):
                rows = np.array(waiting[end - full : end], dtype).reshape(-1, T)
                yield rows, number, len(ids) - (len(waiting) - end)
            del waiting[: len(waiting) - len(waiting) % full]
            offset = 0
        if len(waiting) >= T:
            yield np.array(waiting[: len(waiting) // T * T], dtype).reshape(-1, T), 0, 0

    def _documents(self, first: int) -> Iterator[tuple[str, int]]:
        counts = Accounting()
        for document in clean_documents(self.corpus, counts):
            text, number = document[self.corpus.text_column], counts.read - 1
            if number >= first and not in_validation(text, *self.held_out):
                yield self.fim(text) if self.fim else text, number

    def groups(self, mark: Mark) -> Iterator[tuple[Mark, np.ndarray]]:
        """Groups from this mark on, endlessly."""
        group, first, row, document, offset = mark.group, mark.first, mark.row, mark.document, mark.offset
        for epoch in itertools.count(mark.epoch):
            for rows, next_document, next_offset in self.epoch(document, offset):
                yield Mark(group, first, epoch, row, document, offset), rows
                group, first, row = group + 1, first + len(rows), row + len(rows)
                document, offset = next_document, next_offset
            if row == 0:
                raise ValueError(f"dataset_name: {self.corpus.name} gives no row of {self.block_size} tokens "
                                 "to train on. Take more text, a smaller block_size or other keywords.")
            row = document = offset = 0


@dataclass
class ShardGroups:
    """Token shards at a URL as rows, in order, `size` at a time; entries: of the manifest."""

    url: str
    entries: list[dict[str, Any]]
    block_size: int
    size: int

    @property
    def name(self) -> str:
        return without_secrets(self.url)

    @property
    def n_rows(self) -> int:
        return sum(entry["tokens"] for entry in self.entries) // self.block_size

    def groups(self, mark: Mark) -> Iterator[tuple[Mark, np.ndarray]]:
        """Groups from this mark on, endlessly."""
        group, first, start = mark.group, mark.first, mark.row
        for epoch in itertools.count(mark.epoch):
            for rows in self._epoch(start):
                yield Mark(group, first, epoch, start), rows
                group, first, start = group + 1, first + len(rows), start + len(rows)
            start = 0

    def _epoch(self, row: int) -> Iterator[np.ndarray]:
        skip, folder, T = row * self.block_size, Folder(self.url), self.block_size
        waiting = []
        for entry in self.entries:
            if skip >= entry["tokens"]:
                skip -= entry["tokens"]
                continue
            waiting.append(read_tokens(folder, entry)[skip:])
            skip, full = 0, self.size * T
            if sum(map(len, waiting)) >= full:
                ids = np.concatenate(waiting)
                end = len(ids) // full * full
                yield from ids[:end].reshape(-1, self.size, T)
                waiting = [ids[end:]]
        ids = np.concatenate([*waiting, np.empty(0, np.uint16)]) if len(waiting) != 1 else waiting[0]
        if len(ids) >= T:
            yield ids[: len(ids) // T * T].reshape(-1, T)


@dataclass
class Job:
    """What a producer does. most: bytes of the ring; processes: how many of this machine read it."""

    source: TextGroups | ShardGroups
    mark: Mark
    most: int
    processes: int


def produce(folder: Path, job: Job) -> None:
    """Fills the ring, for ever."""
    sizes: dict[int, int] = {}  # bytes of the groups that lie there
    for mark, rows in job.source.groups(job.mark):
        while sum(sizes.values()) + rows.nbytes > job.most and sizes:
            taken = min(_taken(folder, process) for process in range(job.processes))
            for group in [group for group in sizes if group < taken]:
                for ending in ("json", "npy"):
                    group_file(folder, group, ending).unlink()
                del sizes[group]
            time.sleep(PAUSE)
        with open(group_file(folder, mark.group, "npy"), "wb") as file:
            np.save(file, rows)
        write_json(group_file(folder, mark.group, "json"), asdict(mark) | {"rows": len(rows)})
        sizes[mark.group] = rows.nbytes


def group_file(folder: Path, group: int, ending: str) -> Path:
    return folder / f"group-{group:08d}.{ending}"


def _taken(folder: Path, process: int) -> int:
    try:
        return int((folder / f"taken-{process}").read_text() or 0)
    except FileNotFoundError:
        return 0


def main(folder: str) -> None:
    folder, job = Path(folder), pickle.load(sys.stdin.buffer)

    def end_with_parent() -> None:
        sys.stdin.buffer.read()  # until it is gone
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        produce(folder, job)
    except Exception as error:
        kinds = ValueError, ConnectionError, OSError
        kind = next((kind.__name__ for kind in kinds if isinstance(error, kind)), "RuntimeError")
        number = getattr(error, "errno", None) if kind == "OSError" else None
        failed = {"kind": kind, "errno": number, "message": str(error) or type(error).__name__}
        write_json(folder / FAILED, failed)
        if kind == "RuntimeError":
            raise

