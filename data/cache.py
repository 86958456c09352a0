"""Folders of the cache: made once, by one process, whole or not at all."""

import contextlib
import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from filelock import FileLock

FORMAT = 2  # of the folders: raise it when those of old caches cannot be used
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def cache_folder(cache_dir, kind: str, settings) -> Path:
    """The folder for what these settings make."""
    key = hashlib.blake2b(json.dumps([FORMAT, settings]).encode(), digest_size=12).hexdigest()
    return Path(cache_dir) / f"{kind}-{key}"


def make_once(folder: Path, is_whole: Callable[[], bool], make: Callable[[], None]) -> bool:
    """Unless the folder is whole, one process calls make() while others wait. A killed process frees
    the lock; a collective could time out. Returns whether it was not whole at first.

    ValueError: the cache cannot be written."""
    try:
        if is_whole():
            return False
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not is_whole():
                make()
    except OSError as error:
        if error.errno not in FULL and not str(error.filename or "").startswith(str(folder.parent)):
            raise
        raise ValueError(f"cache_dir: {folder.parent} cannot be written ({error.strerror}); name another "
                         "folder, or make room") from error
    return True


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
            sizes = {file.name: file.stat().st_size for file in building.iterdir()}
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
