"""What was prepared once is kept in the cache, whole or not at all, and rows with their checksum."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from filelock import FileLock, Timeout

MANIFEST = "sizes.json"
FORMAT = 1  # of the folders: raise it when those of old caches cannot be used
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def build_once(cache_dir, kind: str, settings, build: Callable[[Path], None]) -> Path:
    """The folder of `cache_dir` that build(folder) filled for these settings, or fills it now.

    It appears by a rename. Of several processes one builds and the others wait, without a collective that
    could time out; what a killed one leaves goes with the next build. ValueError: none can be written."""
    key = hashlib.blake2b(json.dumps([FORMAT, settings]).encode(), digest_size=12).hexdigest()
    folder, building = Path(cache_dir) / f"{kind}-{key}", Path(cache_dir) / f"{kind}-{key}.tmp"
    if is_whole(folder):
        return folder
    try:
        os.makedirs(cache_dir, exist_ok=True)
        for left in Path(cache_dir).glob("*.tmp"):
            with contextlib.suppress(Timeout), FileLock(left.with_suffix(".lock"), timeout=0):
                shutil.rmtree(left, ignore_errors=True)
        with FileLock(f"{folder}.lock"):
            if not is_whole(folder):
                shutil.rmtree(folder, ignore_errors=True)
                building.mkdir()
                try:
                    build(building)
                    sizes = {file.name: file.stat().st_size for file in building.iterdir()}
                    (building / MANIFEST).write_text(json.dumps(sizes))
                    building.rename(folder)
                finally:
                    shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        if error.errno not in FULL and not str(error.filename or "").startswith(str(cache_dir)):
            raise
        raise ValueError(f"cache_dir: {cache_dir} cannot be written ({error.strerror}); name another folder, "
                         "or make room") from error
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a folder of the cache is complete."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


class RowFile:
    """Writes a .npy file [n, T] whose n is known only at the end: numpy's header has room for it. The
    xxh3_128 of the rows, their T and their type is computed on the way and kept beside the file."""

    def __init__(self, path, block_size: int, dtype):
        self.path, self.block_size, self.dtype, self.rows = path, block_size, np.dtype(dtype), 0
        self.digest = xxhash.xxh3_128(f"{self.dtype.str} {block_size}".encode())
        self.file = open(path, "wb")
        self._write_header()

    def _write_header(self) -> None:
        shape = (self.rows, self.block_size)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, header)

    def write(self, rows: np.ndarray) -> None:
        """rows [n, T]"""
        data = np.ascontiguousarray(rows).data
        self.file.write(data)
        self.digest.update(data)
        self.rows += len(rows)

    def close(self) -> None:
        self.file.seek(0)
        self._write_header()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        Path(f"{self.path}.xxh3").write_text(self.digest.hexdigest())
