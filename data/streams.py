"""Rows of a stream for training: those that data/ahead.py leaves in a ring of files on this disk.

The order is one endless stream of positions, a function of the seed alone. Rows are shuffled within a group
of the stream; each comes once per epoch, and the next epoch follows in the same batch. """

import contextlib
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
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from data.ahead import FAILED, PAUSE, Job, Mark, ShardGroups, TextGroups, group_file
from data.order import permuted
from utils.io.files import write_json

MARKS = 1024  # groups whose beginnings are remembered, for a checkpoint
PROJECT = Path(__file__).resolve().parent.parent
PRODUCER = "import sys; sys.path.insert(0, sys.argv[1]); from data.ahead import main; main(sys.argv[2])"
NUMBERS = itertools.count()  # of the rings of this process: all processes of a machine begin the same ones


class StreamedRows:
    """Map-style rows of a stream, which are read forward. It begins when the first row is asked for.

    process, processes: of this machine. The first one starts the producer."""

    def __init__(self, source: TextGroups | ShardGroups, cache_dir, most: int, process: int = 0,
                 processes: int = 1):
        self.source, self.cache_dir, self.most = source, Path(cache_dir), most
        self.process, self.processes = process, processes
        self.block_size = source.block_size
        self.n_rows: int | None = getattr(source, "n_rows", None)  # None: only the end of the text tells
        self.begun, self.marks = Mark(), deque(maxlen=MARKS)
        self.groups: dict[int, tuple[Mark, np.ndarray]] = {}  # open ones
        self.folder: Path | None = None  # the ring
        self.producer, self.ended = None, lambda: None
        self.released, self.walked = False, -1  # whether groups are given back; where the last walk began

    @property
    def fingerprint(self) -> str:
        source = self.source
        if isinstance(source, ShardGroups):
            content = [entry["sha256"] for entry in source.entries]
        else:
            content = [source.corpus.fingerprint, source.corpus.keywords, source.encoder,
                       source.held_out, source.fim]  # fmt: skip
        return hashlib.sha256(repr([content, source.block_size, source.size]).encode()).hexdigest()[:16]

    # ---- Rows

    def walk(self, first: int, seed: int) -> Iterator[tuple[int, int]]:
        """(epoch, row) of the uses first, first + 1, ... of these rows; waits for the producer."""
        self._start(first)
        for group in range(self.begun.group, sys.maxsize):
            mark, rows = self._open(group)
            self.marks.append(mark)
            own = seed + 0x9E3779B97F4A7C15 * (mark.row + 1)
            order = permuted(np.arange(len(rows)), len(rows), own, mark.epoch)
            for row in order[max(0, first - mark.first) :].tolist():
                yield mark.epoch, mark.row + row

    def take(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """{"input_ids": [B, T]} of these rows, which `walk` has named in this order. Those before the first
        of them are given back."""
        ids, at = np.empty((len(row), self.block_size), np.int64), []
        for i, (r, e) in enumerate(zip(row.tolist(), epoch.tolist(), strict=True)):
            found = (group for group, (mark, rows) in self.groups.items()
                     if mark.epoch == e and mark.row <= r < mark.row + len(rows))
            at.append(next(found))
            mark, rows = self.groups[at[-1]]
            ids[i] = rows[r - mark.row]
        for group in [group for group in self.groups if group < min(at)]:
            del self.groups[group]
        if self.released and min(at) > self.taken:
            self.taken = min(at)
            (self.folder / f"taken-{self.process}").write_text(str(self.taken))
        return {"input_ids": ids}

    def release(self) -> None:
        """From now on groups are given back when they are passed: no walk will begin again."""
        self.released = True

    # ---- Where it is

    def state_dict(self, uses: int) -> dict[str, Any]:
        """What resumes the stream after so many rows."""
        marks = [mark for mark in self.marks.copy() if mark.first < max(uses, 1)]
        mark = max(marks, key=lambda mark: mark.first, default=self.begun)
        return {"position": uses, "mark": asdict(mark), "source": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the stream is not the one that the state comes from."""
        if state.get("source") != self.fingerprint:
            raise ValueError("the stream is not the one this checkpoint was trained on: its source or its "
                             "settings changed. Restore them, or use another --output_dir.")
        self.close()
        self.begun = Mark(**state["mark"])

    # ---- The producer

    def _start(self, first: int) -> None:
        """Begins the ring for a walk, unless the one that there is has all of it still."""
        if self.folder and first == self.walked and not self.released:
            return
        self.close()
        if first < self.begun.first:
            self.begun = Mark()
        self.walked, self.released, self.taken = first, False, 0
        self.folder = self.cache_dir / f"stream-{_launch(self.processes)}-{self.fingerprint}-{next(NUMBERS)}"
        if self.process:
            return
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        for left in self.cache_dir.glob("stream-*.lock"):  # of runs that were killed
            with contextlib.suppress(Timeout, OSError), FileLock(left, timeout=0):
                shutil.rmtree(left.with_suffix(""), ignore_errors=True)
                left.unlink()
        lock = FileLock(f"{self.folder}.lock")
        lock.acquire()
        self.folder.mkdir()
        words = [sys.executable, "-c", PRODUCER, PROJECT, self.folder]
        self.producer = subprocess.Popen(words, stdin=subprocess.PIPE)
        self.ended = weakref.finalize(self, _end, self.producer, self.folder, lock)  # at exit at the latest
        pickle.dump(Job(self.source, self.begun, self.most, self.processes), self.producer.stdin)
        self.producer.stdin.flush()

    def _open(self, group: int) -> tuple[Mark, np.ndarray]:
        """A group, as soon as it is there."""
        if group not in self.groups:
            told = group_file(self.folder, group, "json")
            while not told.exists():
                self._check_producer()
                time.sleep(PAUSE)
            made = json.loads(told.read_text())
            del made["rows"]
            self.groups[group] = Mark(**made), np.load(group_file(self.folder, group, "npy"), mmap_mode="r")
        return self.groups[group]

    def _check_producer(self) -> None:
        """Raises what has ended it."""
        failed = self.folder / FAILED
        if not failed.exists() and self.producer and self.producer.poll() is not None:
            message = f"the process that reads {self.source.name} ahead is gone ({self.producer.returncode})"
            write_json(failed, {"kind": "ConnectionError", "errno": None, "message": message})
        if failed.exists():
            error = json.loads(failed.read_text())
            if error["errno"] in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(error["errno"], os.strerror(error["errno"]), str(self.cache_dir))
            kinds = {"ValueError": ValueError, "ConnectionError": ConnectionError}
            raise kinds.get(error["kind"], RuntimeError)(error["message"])

    def close(self) -> None:
        """Ends the producer and empties the ring."""
        self.ended()
        self.producer, self.folder, self.groups = None, None, {}


def _end(producer: subprocess.Popen, folder: Path, lock: FileLock) -> None:
    producer.kill()
    producer.wait()
    producer.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)


def _launch(processes: int) -> str:
    """The same for all processes of a launch on this machine, and for no others."""
    return f"{socket.gethostname()}-{os.getpid() if processes == 1 else os.getppid()}"
