"""Streaming: on each machine a producer, a process of its own, reads and tokenizes ahead of training, and
leaves rows in a ring of files that all processes of the machine read.

    cache_dir/stream-<run>-<source>.tmp/
        12-98304-0-98304-5012-77.uint16    a group: its StreamPosition, and rows [n, T]
        taken                              the group that each process is at, int64
        failed.json                        what has ended the producer, and ends the run

A group that all processes have passed is deleted, so the disk never holds more than the setting stream_gb
says. Rows are shuffled within a group, as a function of the seed alone; each comes once per epoch.
"""

import errno
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
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock

from data.cache import sweep
from data.groups import Groups, StreamPosition
from data.order import permuted
from data.sources.files import digest
from utils.io.files import write_json

PAUSE = 0.02  # seconds between looks at the disk
STARTS = 1024  # groups whose beginnings are remembered, for a checkpoint
PROJECT = Path(__file__).resolve().parent.parent
PRODUCER = "import sys; sys.path.insert(0, sys.argv[1]); from data.streams import main; main(sys.argv[2])"
NUMBERS = itertools.count()  # numbers this process's rings, alike in all processes of a machine


# ---- The producer


def produce(folder: Path, source: Groups, begun: StreamPosition, max_bytes: int) -> None:
    """Fills the ring from there on, for ever."""
    ring: dict[int, tuple[Path, int]] = {}  # group: its file, bytes
    for start, rows in source.groups_from(begun):
        while ring and sum(size for _, size in ring.values()) + rows.nbytes > max_bytes:
            taken = np.fromfile(folder / "taken", np.int64).min()
            for group in [group for group in ring if group < taken]:
                ring.pop(group)[0].unlink()
            time.sleep(PAUSE)
        (folder / "next").write_bytes(rows)  # np.save does not tell of a full disk
        path = folder / f"{'-'.join(map(str, start))}.{rows.dtype}"
        ring[start.group] = (folder / "next").rename(path), rows.nbytes


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
        told = {"error": kind, "errno": getattr(error, "errno", None), "message": str(error)}
        Path(folder, "next").unlink(missing_ok=True)  # room for the message
        write_json(Path(folder, "failed.json"), told)


# ---- Its readers


class StreamedRows:
    """Map-style rows of a stream, which are read forward. It begins when the first row is asked for.

    process, processes: of this machine. The first one starts the producer."""

    def __init__(self, source: Groups, cache_dir, max_bytes: int, process: int = 0, processes: int = 1):
        self.source, self.cache_dir, self.max_bytes = source, Path(cache_dir), max_bytes
        self.process, self.processes = process, processes
        self.block_size, self.n_rows = source.block_size, source.n_rows
        self.fingerprint = digest(source.content, source.block_size, source.size)
        self.begun, self.starts = StreamPosition(), deque(maxlen=STARTS)
        self.groups: dict[tuple, tuple[StreamPosition, np.ndarray]] = {}  # open: by epoch and row // size
        self.folder: Path | None = None  # the ring
        self.producer, self.end, self.released = None, lambda: None, False

    def order_from(self, first: int, seed: int) -> Iterator[tuple[int, int]]:
        """(epoch, row) of the samples first, first + 1, ...; waits for the producer."""
        self._start(first)
        for group in itertools.count(self.begun.group):
            start, rows = self._open(group)
            self.starts.append(start)
            self.groups[start.epoch, start.row // self.source.size] = start, rows
            own = seed + 0x9E3779B97F4A7C15 * (start.row + 1)
            order = permuted(np.arange(len(rows)), len(rows), own, start.epoch)
            for row in order[max(0, first - start.first) :].tolist():
                yield start.epoch, start.row + row

    def columns(self, row: np.ndarray, epoch: np.ndarray) -> dict[str, np.ndarray]:
        """{"input_ids": [B, T]} of these rows, which `order_from` has named in this order. Groups before the
        first of them are given back."""
        ids = np.empty((len(row), self.block_size), np.int64)
        at = [*zip(epoch.tolist(), (row // self.source.size).tolist(), strict=True)]
        for i, group in enumerate(at):
            start, rows = self.groups[group]
            ids[i] = rows[row[i] - start.row]
        for group in [group for group in self.groups if group < min(at)]:
            del self.groups[group]
            if self.released:
                taken = np.memmap(self.folder / "taken", np.int64, "r+")
                taken[self.process] = self.groups[min(at)][0].group
        return {"input_ids": ids}

    def release(self) -> None:
        """From now on groups are given back when they are passed: no order will begin again."""
        self.released = True

    def state_dict(self, uses: int) -> dict:
        """The state after `uses` rows."""
        starts = [start for start in self.starts.copy() if start.first < max(uses, 1)]
        start = max(starts, key=lambda start: start.first, default=self.begun)
        return {"position": uses, "mark": start._asdict(), "source": self.fingerprint}

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError when the stream is not the one that the state comes from."""
        if state.get("source") != self.fingerprint:
            raise ValueError("the stream is not the one this checkpoint was trained on: its source or its "
                             "settings changed. Restore them, or use another --output_dir.")
        self.close()
        self.begun = StreamPosition(**state["mark"])

    def _start(self, first: int) -> None:
        """Begins the ring for an order, unless the one that there is has all of it still."""
        if self.folder and first >= self.begun.first and not self.released:
            return
        self.close()
        if first < self.begun.first:
            self.begun = StreamPosition()
        name = self.cache_dir / f"stream-{_ring_name(self.process, self.processes)}-{self.fingerprint}"
        self.folder, self.released = Path(f"{name}.tmp"), False
        if self.process:
            return
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        sweep(self.cache_dir)
        lock = FileLock(f"{name}.lock", thread_local=False)
        lock.acquire()
        self.folder.mkdir()
        np.zeros(self.processes, np.int64).tofile(self.folder / "taken")
        words = [sys.executable, "-c", PRODUCER, PROJECT, self.folder]
        self.producer = subprocess.Popen(words, stdin=subprocess.PIPE)
        self.end = weakref.finalize(self, _end, self.producer, self.folder, lock)  # at exit at the latest
        pickle.dump((self.source, self.begun, self.max_bytes), self.producer.stdin)
        self.producer.stdin.flush()

    def _open(self, group: int) -> tuple[StreamPosition, np.ndarray]:
        """A group, as soon as it is there. Raises what has ended the producer."""
        failed = self.folder / "failed.json"
        while not (path := next(self.folder.glob(f"{group}-*"), None)):
            if self.producer and self.producer.poll() is not None and not failed.exists():
                told = f"the process that reads {self.source.name} ahead is gone ({self.producer.returncode})"
                write_json(failed, {"error": "ConnectionError", "errno": None, "message": told})
            if failed.exists():
                error = json.loads(failed.read_text())
                if error["errno"] in (errno.ENOSPC, errno.EDQUOT):
                    raise OSError(error["errno"], os.strerror(error["errno"]), str(self.cache_dir))
                raise (ValueError if error["error"] == "ValueError" else ConnectionError)(error["message"])
            time.sleep(PAUSE)
        rows = np.asarray(np.memmap(path, path.suffix[1:], "r")).reshape(-1, self.block_size)
        return StreamPosition(*map(int, path.stem.split("-"))), rows

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
    """One name for all processes of this machine, new for each run, as a killed run may have left its ring.
    On XLA new for each parent process."""
    host, number = socket.gethostname(), next(NUMBERS)
    name = f"{host}-{os.getpid()}-{time.time_ns()}"
    if processes > 1:
        from torch import distributed as dist  # not at the top: the producer imports this file

        if not dist.is_initialized():  # XLA
            return f"{host}-{os.getppid()}-{number}"
        store, first = dist.distributed_c10d._get_default_store(), dist.get_rank() - process
        if process == 0:
            store.set(f"stream {first} {number}", name)
        name = store.get(f"stream {first} {number}").decode()  # waits for process 0
    return name
