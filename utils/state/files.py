"""Files of a checkpoint or milestone: down on the disk, with checksums; whole folders: complete or absent."""

import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

ALGORITHMS = xxhash.xxh3_128, hashlib.sha256  # of checkpoints, of milestones
CHUNK = 1 << 24  # bytes read and checksummed at a time
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
DTYPES |= {torch.uint8: "U8", torch.bool: "BOOL"}


def safetensors_chunks(tensors: dict):
    """The bytes of a safetensors file, tensor after tensor, straight from their memory.

    safetensors' own save_file cannot tell a checksum of what it writes. Wide types go first, which aligns
    every tensor. https://huggingface.co/docs/safetensors/index#format"""
    if other := {str(t.dtype) for t in tensors.values() if t.dtype not in DTYPES}:
        raise ValueError(f"keep: tensors of {', '.join(sorted(other))} cannot be kept")
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def write_file(path: Path, chunks) -> dict:
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
    buffer = memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return {"bytes": size, digest.name.lower(): digest.hexdigest()}


def write_shards(folder: Path, name: str, tensors: dict, accelerator, group) -> dict:
    """Every process writes and checksums its part of `tensors` (DTensors among them) into folder/name/, in
    torch's distributed safetensors format: nothing in it can run code. Returns {file: size and checksum}."""
    writer = HuggingFaceStorageWriter(str(folder / name), save_distributed=True)
    dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=accelerator.num_processes == 1)
    try:
        mine = sorted((folder / name).glob(f"shard-{accelerator.process_index + 1:05d}-*"))
        part = {f"{name}/{path.name}": checksum_file(path) for path in mine}
    except OSError as error:
        part = error  # all processes must hear of it
    parts = [part] * accelerator.num_processes
    if len(parts) > 1:
        dist.all_gather_object(parts, part, group=group)
    for part in parts:
        if isinstance(part, OSError):
            raise part
    return {file: entry for part in parts for file, entry in part.items()}


def read_shards(folder: Path, name: str, targets: dict) -> None:
    """Fill `targets` {name: tensor or DTensor} in place from what write_shards wrote, however it was cut."""
    reader = HuggingFaceStorageReader(str(folder / name))
    dcp.load(targets, storage_reader=reader, no_dist=not dist.is_initialized())


def seal(folder: Path, files: dict, **told) -> None:
    """manifest.json, written last: the folder is complete. files: {name: its size and checksum}"""
    manifest = told | {"files": files}
    manifest["checksum"] = checksum_json(manifest)
    write_file(folder / "manifest.json", [json.dumps(manifest, indent=1).encode()])
    flush(folder)


def find_problem(folder: Path) -> str:
    """What is wrong with a sealed folder; "" when every file has the size and checksum of its manifest."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        if manifest.pop("checksum") != checksum_json(manifest):
            return "manifest.json: wrong checksum"
        for name, entry in manifest["files"].items():
            algorithm, size = ALGORITHMS["sha256" in entry], (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name}: {size} bytes instead of {entry['bytes']}"
            if checksum_file(folder / name, algorithm) != entry:
                return f"{name}: wrong checksum"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json: not readable"
    return ""


def checksum_json(value) -> str:
    return xxhash.xxh3_128(json.dumps(value, sort_keys=True).encode()).hexdigest()


def retire(path: Path, prefix: str = "replaced-") -> None:
    """Rename it to prefix + its name, with a number if that is taken."""
    names = (f"{prefix}{path.name}{again}" for again in ("", *(f"-{n}" for n in range(2, 10_000))))
    path.rename(next(to for to in map(path.with_name, names) if not to.exists()))


def flush(path: Path) -> None:
    """Down to the disk: a file's content, a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
