"""What was prepared once is kept in the cache, whole or not at all."""

import contextlib
import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock

FORMAT = 2  # of the folders: raise it when those of old caches cannot be used
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def cache_folder(cache_dir, kind: str, settings) -> Path:
    """Where what these settings make belongs."""
    key = hashlib.blake2b(json.dumps([FORMAT, settings]).encode(), digest_size=12).hexdigest()
    return Path(cache_dir) / f"{kind}-{key}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time works on a folder of the cache, the others wait, without a collective that could
    time out. The lock ends with the process. ValueError where the cache cannot be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            yield
    except OSError as error:
        if error.errno not in FULL and not str(error.filename or "").startswith(str(folder.parent)):
            raise
        raise ValueError(f"cache_dir: {folder.parent} cannot be written ({error.strerror}); name another "
                         "folder, or make room") from error


def sweep(cache_dir: Path) -> None:
    """Deletes what killed processes have left: folders *.tmp that nobody has locked."""
    for left in cache_dir.glob("*.tmp"):
        with contextlib.suppress(OSError), FileLock(left.with_suffix(".lock"), timeout=0):
            shutil.rmtree(left, ignore_errors=True)


def build_once(cache_dir, kind: str, settings, build: Callable[[Path], None]) -> Path:
    """The folder of `cache_dir` that build(folder) filled for these settings, or fills now. It appears by a
    rename, with the sizes of its files. ValueError: it cannot be written."""
    folder = cache_folder(cache_dir, kind, settings)
    building = Path(f"{folder}.tmp")
    if not is_whole(folder):
        with locked(folder):
            sweep(folder.parent)
            if not is_whole(folder):
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
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a folder that build_once has made is complete."""
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False
