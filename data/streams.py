"""Streaming: on each machine a producer, a process of its own, reads and tokenizes ahead of training, and
leaves rows in a ring of files that all processes of the machine read.

    cache_dir/stream-<run>-<source>.tmp/
        12-98304-0-98304-5012-77.uint16    a group: its Mark, and rows [n, T]
        taken                              the group that each process is at, int64
        failed.json                        what has ended the producer, and ends the run

A group that all processes have passed is deleted, so the disk never holds more than the setting stream_gb
says. Rows are shuffled within a group, as a function of the seed alone; each comes once per epoch.
"""

import errno
import hashlib
import itertools
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from data.cache import sweep
from data.encode import Encoder, tokenize_documents
from data.filters import Accounting, clean_documents, in_validation
from data.order import permuted
from data.shards import read_file
from data.sources.corpus import Corpus
from utils.io.files import write_json
from utils.io.secrets import without_secrets
from utils.io.urls import Folder

PAUSE = 0.02  # seconds between looks at the disk
MARKS = 1024  # groups whose beginnings are remembered, for a checkpoint
PROJECT = Path(__file__).resolve().parent.parent
PRODUCER = "import sys; sys.path.insert(0, sys.argv[1]); from data.streams import main; main(sys.argv[2])"
NUMBERS = itertools.count()  # of the rings of this process: all processes of a machine begin the same ones


class Mark(NamedTuple):
    """Where a group begins: its number, its first position in the stream, the epoch and its first row in it;
    and the document (or shard), and the token of it, that this row begins with."""

    group: int = 0
    first: int = 0
    epoch: int = 0
    row: int = 0
    document: int = 0
    offset: int = 0


@dataclass
class Groups:
    """A source as rows of block_size tokens, in order, `size` rows at a time.

    content: changes with the rows. tokens(first): the token ids of each document (or shard) from number
    `first` on, and its number; it pickles. n_rows: of an epoch; None: only the end of the text tells."""

    name: str
    content: list
    tokens: Callable[[int], Iterator[tuple[np.ndarray, int]]]
    block_size: int
    size: int
    n_rows: int | None = None

    def epoch(self, document: int, offset: int) -> Iterator[tuple[np.ndarray, int, int]]:
        """From token `offset` of `document` on: rows [size, T], the last time fewer, and the document and
        offset where the next row begins."""
        T, full, waiting, size = self.block_size, self.size * self.block_size, [], 0
        for ids, number in self.tokens(document):
            waiting.append(ids[offset:])
            size, offset = size + len(waiting[-1]), 0
            if size >= full:
                rest = np.concatenate(waiting)
                while len(rest) >= full:
                    rows, rest = rest[:full], rest[full:]
                    yield rows.reshape(-1, T), number, len(ids) - len(rest)
                waiting, size = [rest], len(rest)
        if size >= T:
            yield np.concatenate(waiting)[: size // T * T].reshape(-1, T), 0, 0

    def groups(self, mark: Mark) -> Iterator[tuple[Mark, np.ndarray]]:
        """Groups from this mark on, endlessly. ValueError: no row in an epoch."""
        for epoch in itertools.count(mark.epoch):
            for rows, document, offset in self.epoch(mark.document, mark.offset):
                yield mark, rows
                first, row = mark.first + len(rows), mark.row + len(rows)
                mark = Mark(mark.group + 1, first, epoch, row, document, offset)
            if mark.row == 0:
                raise ValueError(f"dataset_name: {self.name} gives no row of {self.block_size} tokens to "
                                 "train on. Take more text, a smaller block_size or other keywords.")
            mark = Mark(mark.group, mark.first, epoch + 1)


def text_groups(corpus: Corpus, encoder: Encoder, block_size: int, size: int, held_out: tuple = (0, 0.0),
                fim=None) -> Groups:
    """The rows of prepare_rows for training. A resumed stream reads the epoch again up to where it was,
    without tokenizing. held_out: seed, share of the documents that are for validation."""
    content = [corpus.fingerprint, corpus.keywords, encoder, held_out, fim]
    tokens = partial(_text_tokens, corpus, encoder, held_out, fim)
    return Groups(corpus.name, content, tokens, block_size, size)


def _text_tokens(corpus: Corpus, encoder: Encoder, held_out: tuple, fim, first: int) -> Iterator:
    def documents() -> Iterator[tuple]:
        counts = Accounting()
        for document in clean_documents(corpus, counts):
            text, number = document[corpus.text_column], counts.read - 1
            if number >= first and not in_validation(text, *held_out):
                yield fim(text) if fim else text, number

    return tokenize_documents(documents(), encoder, fim)


def shard_groups(url: str, entries: list[dict], block_size: int, size: int) -> Groups:
    """Token shards at a URL; entries: of the manifest."""
    content = ["shards", *(entry["sha256"] for entry in entries)]
    n_rows = sum(entry["tokens"] for entry in entries) // block_size
    tokens = partial(_shard_tokens, url, entries)
    return Groups(without_secrets(url), content, tokens, block_size, size, n_rows)


def _shard_tokens(url: str, entries: list[dict], first: int) -> Iterator:
    for number, entry in enumerate(entries[first:], first):
        yield np.load(BytesIO(read_file(Folder(url), entry))), number


# ---- The producer


def produce(folder: Path, source: Groups, begun: Mark, most: int) -> None:
    """Fills the ring from this mark on, for ever, with at most so many bytes."""
    ring: dict[int, tuple[Path, int]] = {}  # group: its file, bytes
    for mark, rows in source.groups(begun):
        while ring and sum(size for _, size in ring.values()) + rows.nbytes > most:
            taken = np.fromfile(folder / "taken", np.int64).min()
            for group in [group for group in ring if group < taken]:
                ring.pop(group)[0].unlink()
            time.sleep(PAUSE)
        (folder / "next").write_bytes(rows)  # np.save does not tell of a full disk
        path = folder / f"{'-'.join(map(str, mark))}.{rows.dtype}"
        ring[mark.group] = (folder / "next").rename(path), rows.nbytes


def main(folder: str) -> None:
    """What `produce` needs comes on stdin, which ends with the process that has started it."""
    job = pickle.load(sys.stdin.buffer)

    def end_with_parent() -> None:
        sys.stdin.buffer.read()  # until it is gone
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        produce(Path(folder), *job)
    except (ValueError, OSError) as error:  # others end it with their traceback
        kind = "ValueError" if isinstance(error, ValueError) else "ConnectionError"
        told = {"kind": kind, "errno": getattr(error, "errno", None), "message": str(error)}
        Path(folder, "next").unlink(missing_ok=True)  # room for the message
        write_json(Path(folder, "failed.json"), told)


# ---- Its readers


class StreamedRows:
    """Map-style rows of a stream, which are read forward. It begins when the first row is asked for.

    process, processes: of this machine. The first one starts the producer."""

    def __init__(self, source: Groups, cache_dir, most: int, process: int = 0, processes: int = 1):
        self.source, self.cache_dir, self.most = source, Path(cache_dir), most
        self.process, self.processes = process, processes
        self.block_size, self.n_rows = source.block_size, source.n_rows
        shape = [source.content, source.block_size, source.size]
        self.fingerprint = hashlib.sha256(repr(shape).encode()).hexdigest()[:16]
        self.begun, self.marks = Mark(), deque(maxlen=MARKS)
        self.groups: dict[tuple, tuple[Mark, np.ndarray]] = {}  # open ones, by epoch and row // size
        self.folder: Path | None = None  # the ring
        self.producer, self.end, self.released = None, lambda: None, False

    def walk(self, first: int, seed: int) -> Iterator[tuple[int, int]]:
        """(epoch, row) of the uses first, first + 1, ... of these rows; waits for the producer."""
        self._start(first)
        for group in itertools.count(self.begun.group):
            mark, rows = self._open(group)
            self.marks.append(mark)
            self.groups[mark.epoch, mark.row // self.source.size] = mark, rows
            own = seed + 0x9E3779B97F4A7C15 * (mark.row + 1)
            order = permuted(np.arange(len(rows)), len(rows), own, mark.epoch)
            for row in order[max(0, first - mark.first) :].tolist():
                yield mark.epoch, mark.row + row

    def take(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """{"input_ids": [B, T]} of these rows, which `walk` has named in this order. Groups before the first
        of them are given back."""
        ids = np.empty((len(row), self.block_size), np.int64)
        at = [*zip(epoch.tolist(), (row // self.source.size).tolist(), strict=True)]
        for i, group in enumerate(at):
            mark, rows = self.groups[group]
            ids[i] = rows[row[i] - mark.row]
        for group in [group for group in self.groups if group < min(at)]:
            del self.groups[group]
            if self.released:
                taken = np.memmap(self.folder / "taken", np.int64, "r+")
                taken[self.process] = self.groups[min(at)][0].group
        return {"input_ids": ids}

    def release(self) -> None:
        """From now on groups are given back when they are passed: no walk will begin again."""
        self.released = True

    def state_dict(self, uses: int) -> dict:
        """What resumes the stream after so many rows."""
        marks = [mark for mark in self.marks.copy() if mark.first < max(uses, 1)]
        mark = max(marks, key=lambda mark: mark.first, default=self.begun)
        return {"position": uses, "mark": mark._asdict(), "source": self.fingerprint}

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError when the stream is not the one that the state comes from."""
        if state.get("source") != self.fingerprint:
            raise ValueError("the stream is not the one this checkpoint was trained on: its source or its "
                             "settings changed. Restore them, or use another --output_dir.")
        self.close()
        self.begun = Mark(**state["mark"])

    def _start(self, first: int) -> None:
        """Begins the ring for a walk, unless the one that there is has all of it still."""
        if self.folder and first >= self.begun.first and not self.released:
            return
        self.close()
        if first < self.begun.first:
            self.begun = Mark()
        name = self.cache_dir / f"stream-{_ring_name(self.process, self.processes)}-{self.fingerprint}"
        self.folder, self.released = Path(f"{name}.tmp"), False
        if self.process:
            return
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        sweep(self.cache_dir)
        lock = FileLock(f"{name}.lock")
        lock.acquire()
        self.folder.mkdir()
        np.zeros(self.processes, np.int64).tofile(self.folder / "taken")
        words = [sys.executable, "-c", PRODUCER, PROJECT, self.folder]
        self.producer = subprocess.Popen(words, stdin=subprocess.PIPE)
        self.end = weakref.finalize(self, _end, self.producer, self.folder, lock)  # at exit at the latest
        pickle.dump((self.source, self.begun, self.most), self.producer.stdin)
        self.producer.stdin.flush()

    def _open(self, group: int) -> tuple[Mark, np.ndarray]:
        """A group, as soon as it is there. Raises what has ended the producer."""
        failed = self.folder / "failed.json"
        while not (path := next(self.folder.glob(f"{group}-*"), None)):
            if self.producer and self.producer.poll() is not None and not failed.exists():
                told = f"the process that reads {self.source.name} ahead is gone ({self.producer.returncode})"
                write_json(failed, {"kind": "ConnectionError", "errno": None, "message": told})
            if failed.exists():
                error = json.loads(failed.read_text())
                if error["errno"] in (errno.ENOSPC, errno.EDQUOT):
                    raise OSError(error["errno"], os.strerror(error["errno"]), str(self.cache_dir))
                raise (ValueError if error["kind"] == "ValueError" else ConnectionError)(error["message"])
            time.sleep(PAUSE)
        rows = np.asarray(np.memmap(path, path.suffix[1:], "r")).reshape(-1, self.block_size)
        return Mark(*map(int, path.stem.split("-"))), rows

    def close(self) -> None:
        """Ends the producer and empties the ring."""
        self.end()
        self.producer, self.folder, self.groups = None, None, {}


def _end(producer: subprocess.Popen, folder: Path, lock: FileLock) -> None:
    producer.kill()
    producer.wait()
    producer.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)


def _ring_name(process: int, processes: int) -> str:
    """The same in all processes of this machine, and new: a killed run may have left its ring, even one that
    the same parent has launched (torchrun, a notebook)."""
    number, name = next(NUMBERS), f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    if processes == 1:
        return name
    from torch import distributed as dist  # not at the top: the producer imports this file

    if not dist.is_initialized():  # XLA
        return f"{socket.gethostname()}-{os.getppid()}-{number}"
    store, key = dist.distributed_c10d._get_default_store(), f"stream {socket.gethostname()} {number}"
    if process == 0:
        store.set(key, name)
    return store.get(key).decode()  # waits for process 0
