"""Where results are in the cache, and locks, so that one process at a time makes a result."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from utils.io.urls import explained

FORMAT = 3  # part of each name in the cache: raise it when results of older versions cannot be used
FIRST_NOTICE, NEXT_NOTICE = 2, 30  # seconds of waiting for a lock before each line that says so


def cache_path(cache_dir, kind: str, settings) -> Path:
    """The path of the result that these settings give; kind: the beginning of its name."""
    key = hashlib.blake2b(json.dumps([FORMAT, settings]).encode(), digest_size=12).hexdigest()
    return Path(cache_dir) / f"{kind}-{key}"


@contextlib.contextmanager
def locked(lock: Path, result) -> Iterator[None]:
    """Runs the block while other processes wait; they go on when it has ended or its process was killed.
    result: what is made, for their message. ValueError if the lock file cannot be written."""
    file, timeout = FileLock(lock), FIRST_NOTICE
    with explained(str(result), "written"):
        lock.parent.mkdir(parents=True, exist_ok=True)
        while not file.is_locked:
            try:
                file.acquire(timeout=timeout)
            except Timeout:
                done = len([*lock.parent.glob("progress/*.npz")])
                print(f"data       waiting for another run that is preparing {result}: {done} files are done",
                      flush=True)
                timeout = NEXT_NOTICE
    try:
        yield
    finally:
        file.release()
