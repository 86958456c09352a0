"""Places in the cache, and locks: what is made is made by one process at a time."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from utils.io.urls import explained

FORMAT = 3  # of what is there: raise it when that of old caches cannot be used
SILENT, AGAIN = 2, 30  # seconds until a run that waits says so, and between its lines


def cache_path(cache_dir, kind: str, settings) -> Path:
    """Where what these settings make is kept."""
    key = hashlib.blake2b(json.dumps([FORMAT, settings]).encode(), digest_size=12).hexdigest()
    return Path(cache_dir) / f"{kind}-{key}"


@contextlib.contextmanager
def locked(lock: Path, what) -> Iterator[None]:
    """Other processes wait, and say so, until the block has ended or its process was killed. ValueError: the
    lock cannot be written."""
    file, patience = FileLock(lock), SILENT
    with explained(str(what), "written"):
        lock.parent.mkdir(parents=True, exist_ok=True)
        while not file.is_locked:
            try:
                file.acquire(timeout=patience)
            except Timeout:
                done = len([*lock.parent.glob("progress/*.npz")])
                print(f"data       waits for another run, which is preparing {what}, {done} parts are done",
                      flush=True)
                patience = AGAIN
    try:
        yield
    finally:
        file.release()
