"""Writes files that are complete or absent, and folders with a manifest of checksums."""

import contextlib
import glob
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

CHUNK = 1 << 24  # bytes read and checksummed at a time


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file that is renamed to `path` at the end, so that readers never see a partial file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # if the block raised


def write_json(path: Path, content: dict) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def write_file(path: Path, chunks: Iterable) -> dict:
    """Writes chunks of bytes and flushes them to the disk. Returns their size and checksum."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "wb", buffering=1 << 20) as file:
        for chunk in chunks:
            digest.update(memoryview(chunk))
            size += file.write(chunk)
    flush(path)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def checksum_file(path: Path) -> dict:
    """Size and checksum of a file, as write_file returns them."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def check_file(path: Path, size: int, checksum: str) -> str:
    """Why a file is not the expected one, as words that follow its name; "" if it is."""
    if not path.is_file() or path.stat().st_size != size:
        return "is missing or has another size"
    return "" if checksum_file(path)["xxh3_128"] == checksum else "has a wrong checksum"


def checksum_json(value) -> str:
    return xxhash.xxh3_128(json.dumps(value, sort_keys=True).encode()).hexdigest()


def seal(folder: Path, files: dict) -> None:
    """Writes manifest.json, which marks the folder as complete. files: {name: size and checksum}"""
    manifest = {"files": files}
    manifest["checksum"] = checksum_json(manifest)
    write_file(folder / "manifest.json", [json.dumps(manifest, indent=1).encode()])
    flush(folder)


def verify_checksums(folder: Path) -> str:
    """What is wrong with a sealed folder; "" if every file has the size and checksum in its manifest."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        if manifest.pop("checksum") != checksum_json(manifest):
            return "manifest.json has a wrong checksum"
        if not manifest["files"]:
            return "manifest.json names no file"
        for name, entry in manifest["files"].items():
            if problem := check_file(folder / name, entry["bytes"], entry["xxh3_128"]):
                return f"{name} {problem}"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is not readable"
    return ""


def save_tokenizer(tokenizer, folder) -> list[Path]:
    """Saves the tokenizer and returns the files, all in the folder itself: several chat templates would be
    written into a subfolder, so they become part of the configuration."""
    single_template = not isinstance(tokenizer.chat_template, dict)
    return sorted(map(Path, tokenizer.save_pretrained(folder, save_jinja_files=single_template)))


def is_missing_folder(name: str) -> bool:
    """Whether a name can only be a local folder, not a repository on the Hub, and does not exist: `../a`, or
    `runs/b` if runs/ holds runs. Without a network the Hub's client would try such a name for a minute."""
    path = os.path.expanduser(str(name))
    is_path = path.startswith((".", "/", "~")) or path.count("/") > 1
    runs_beside = glob.escape(os.path.dirname(path)) + "/*/args.json"
    return not os.path.exists(path) and (is_path or "/" in path and bool(glob.glob(runs_beside)))


def set_aside(path: Path, prefix: str = "replaced-") -> None:
    """Renames a file or folder to prefix + its name, with a number if that name is taken."""
    target, number = path.with_name(f"{prefix}{path.name}"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"{prefix}{path.name}-{number}")
    path.rename(target)


def flush(path: Path) -> None:
    """Flushes a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
