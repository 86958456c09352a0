"""Tensors in files: safetensors written by one process or, for sharded tensors, by all processes."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, distribute_tensor

from utils.io.files import checksum_file

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
DTYPES |= {torch.uint8: "U8", torch.bool: "BOOL"}


def safetensors_chunks(tensors: dict):
    """The bytes of a safetensors file, tensor by tensor: safetensors' save_file copies all to the CPU at
    once. Wide types go first, which aligns them. https://huggingface.co/docs/safetensors/index#format"""
    if other := {str(t.dtype) for t in tensors.values() if t.dtype not in DTYPES}:
        raise ValueError(f"keep: tensors of {', '.join(sorted(other))} cannot be kept")
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header, end = {"__metadata__": {"format": "pt"}}, 0  # transformers requires it
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def transformers_names(tensors: dict) -> dict:
    """The tensors of a loss module by transformers' names: its model is `lm` there. A tensor keeps its name
    if another has the shorter one."""
    short = {name: name.removeprefix("lm.") for name in tensors}
    return {name if short[name] in tensors else short[name]: tensor for name, tensor in tensors.items()}


def read_tensors(folder: Path, name: str, targets: dict) -> None:
    """Fill `targets` {path: tensor or DTensor} in place with the kept thing `name`, however it was sharded.
    ValueError, before anything is filled, for another shape or dtype and weights that are not finite."""
    file = folder / f"{name}.safetensors"
    if targets and not file.exists():
        reader = HuggingFaceStorageReader(str(folder / name))
        return dcp.load(targets, storage_reader=reader, no_dist=not dist.is_initialized())
    saved = load_file(file) if targets else {}  # memory-mapped
    values = {path: saved[path if path in saved else path.removeprefix("lm.")] for path in targets}
    for path, target in targets.items():
        value = values[path]
        if (value.shape, value.dtype) != (target.shape, target.dtype):
            raise ValueError(f"{file}: {path} is {value.dtype} {[*value.shape]}, not what state.json says")
        if isinstance(target, torch.nn.Parameter) and not value.isfinite().all():
            raise ValueError(f"{file}: {path} is not finite")
    for path, target in targets.items():
        value = values[path]
        if isinstance(target, DTensor):
            value = value.to(target.device)
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)  # the mapped file may be deleted


def write_shards(folder: Path, name: str, tensors: dict, accelerator, group) -> dict:
    """Every process writes its part of `tensors`, some of them DTensors, into folder/name/ in torch's
    distributed safetensors format, which cannot run code. Returns {file: size and checksum}."""
    writer = HuggingFaceStorageWriter(str(folder / name), save_distributed=True)
    dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=accelerator.num_processes == 1)
    try:
        mine = sorted((folder / name).glob(f"shard-{accelerator.process_index + 1:05d}-*"))
        part = {f"{name}/{path.name}": checksum_file(path) for path in mine}
    except OSError as error:
        part = error  # raised on all processes below
    parts = [part] * accelerator.num_processes
    if len(parts) > 1:
        dist.all_gather_object(parts, part, group=group)
    for part in parts:
        if isinstance(part, OSError):
            raise part
    return {file: entry for part in parts for file, entry in part.items()}
