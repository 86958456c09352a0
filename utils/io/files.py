"""Files and sealed folders that are complete or absent, down on the disk, with checksums."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

CHUNK = 1 << 24  # bytes read and checksummed at a time


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file, renamed once it is written: readers see the old file or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    yield temporary
    os.replace(temporary, path)


def write_json(path: Path, content: dict) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def write_file(path: Path, chunks: Iterable) -> dict:
    """Write chunks of bytes down to the disk. Returns size and checksum of what was handed over."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "wb", buffering=1 << 20) as file:
        for chunk in chunks:
            digest.update(memoryview(chunk))
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def checksum_file(path: Path, algorithm=xxhash.xxh3_128) -> dict:
    """Size and checksum of a file, as write_file returns them; or with another algorithm: hashlib.sha256."""
    digest, size = algorithm(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, digest.name.lower(): digest.hexdigest()}


def checksum_json(value) -> str:
    return xxhash.xxh3_128(json.dumps(value, sort_keys=True).encode()).hexdigest()


def seal(folder: Path, files: dict, **more) -> None:
    """manifest.json, written last: the folder is complete. files: {name: its size and checksum}"""
    manifest = more | {"files": files}
    manifest["checksum"] = checksum_json(manifest)
    write_file(folder / "manifest.json", [json.dumps(manifest, indent=1).encode()])
    flush(folder)


def find_problem(folder: Path) -> str:
    """What is wrong with a sealed folder; "" when every file has the size and checksum of its manifest."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        if manifest.pop("checksum") != checksum_json(manifest):
            return "manifest.json: wrong checksum"
        if not manifest["files"]:
            return "manifest.json: names no file"
        for name, entry in manifest["files"].items():
            if (size := (folder / name).stat().st_size) != entry["bytes"]:
                return f"{name}: {size} bytes instead of {entry['bytes']}"
            algorithm = hashlib.sha256 if "sha256" in entry else xxhash.xxh3_128  # of a milestone
            if checksum_file(folder / name, algorithm) != entry:
                return f"{name}: wrong checksum"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json: not readable"
    return ""


def retire(path: Path, prefix: str = "replaced-") -> None:
    """Rename it to prefix + its name, with a number if that is taken."""
    to, number = path.with_name(f"{prefix}{path.name}"), 1
    while to.exists():
        number += 1
        to = path.with_name(f"{prefix}{path.name}-{number}")
    path.rename(to)


def flush(path: Path) -> None:
    """Down to the disk: a file's content, a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
