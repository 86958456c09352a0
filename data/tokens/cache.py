"""Folders of the cache: made once, by one process, whole or not at all."""

import contextlib
import errno
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

FORMAT = 3  # of the folders: raise it when those of old caches cannot be used
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
FIRST_LINE, LATER_LINES = 2, 30  # seconds until a run that waits says so, and between its lines


def cache_folder(cache_dir, kind: str, settings) -> Path:
    """The folder for what these settings make."""
    key = hashlib.blake2b(json.dumps([FORMAT, settings]).encode(), digest_size=12).hexdigest()
    return Path(cache_dir) / f"{kind}-{key}"


def make_once(folder: Path, is_whole: Callable[[], bool], make: Callable[[], None]) -> bool:
    """Unless the folder is whole, one process calls make() while others wait, and say so. A killed process
    frees the lock. Returns whether it was not whole at first.

    ValueError: the cache cannot be written."""
    try:
        if is_whole():
            return False
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not is_whole():
                make()
    except OSError as error:
        if error.errno not in FULL and not str(error.filename or "").startswith(str(folder.parent)):
            raise
        raise ValueError(f"cache_dir: {folder.parent} cannot be written ({error.strerror}); name another "
                         "folder, or make room") from error
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock, started, patience = FileLock(f"{folder}.lock"), time.monotonic(), FIRST_LINE
    while True:
        try:
            lock.acquire(timeout=patience)
            break
        except Timeout:
            done = len(list((folder / "progress").glob("*.npz")))
            seconds = time.monotonic() - started
            print(f"data       waits for another run, which is preparing {folder}: {done} chunks are done, "
                  f"{seconds:.0f} s", flush=True)
            patience = LATER_LINES
    try:
        yield
    finally:
        lock.release()


def sweep(cache_dir: Path) -> None:
    """Deletes what killed processes have left: folders *.tmp that no process has locked."""
    for left in cache_dir.glob("*.tmp"):
        with contextlib.suppress(OSError), FileLock(left.with_suffix(".lock"), timeout=0):
            shutil.rmtree(left, ignore_errors=True)


def build_once(cache_dir, kind: str, settings, build: Callable[[Path], None]) -> Path:
    """The folder of `cache_dir` that build(folder) fills for these settings, now or in an earlier run.

    A rename puts it in place, with a list of its files' sizes. ValueError: it cannot be written."""
    folder = cache_folder(cache_dir, kind, settings)
    building = Path(f"{folder}.tmp")

    def make() -> None:
        sweep(folder.parent)
        for left in (folder, building):
            shutil.rmtree(left, ignore_errors=True)
        try:
            building.mkdir()
            build(building)
            files = [file for file in building.rglob("*") if file.is_file()]
            sizes = {file.relative_to(building).as_posix(): file.stat().st_size for file in files}
            (building / "sizes.json").write_text(json.dumps(sizes))
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)

    make_once(folder, partial(_has_its_files, folder), make)
    return folder


def _has_its_files(folder: Path) -> bool:
    """Whether a folder of build_once has every file in its size."""
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False
