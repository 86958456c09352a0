"""Tensors in files: safetensors of one process, and of all processes for sharded ones."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from utils.io.files import checksum_file

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
    header, end = {"__metadata__": {"format": "pt"}}, 0  # which transformers asks for
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def tensor_problem(folder: Path, name: str, tree, sealed: dict) -> str:
    """How the file of what is kept as `name` differs from its tree in state.json; "" where it does not.
    sealed: the files of the manifest. The shards of a folder are checked by torch, when they are loaded."""
    specs = {}

    def note(node):
        if "__tensor__" in node:
            specs[node["__tensor__"]] = node["shape"], DTYPES[getattr(torch, node["dtype"])]
        return node

    json.loads(json.dumps(tree), object_hook=note)
    file = f"{name}.safetensors"
    if not specs or any(path.startswith(f"{name}/") for path in sealed):
        return ""
    if file not in sealed:
        return f"{file}: missing"
    with safe_open(folder / file, "pt") as tensors:
        names = tensors.keys()
        for path, wanted in specs.items():
            found = path if path in names else path.removeprefix("lm.")  # see transformers_names
            if found not in names:
                return f"{file}: {path} is missing"
            part = tensors.get_slice(found)
            if wanted != (has := (part.get_shape(), part.get_dtype())):
                return f"{file}: {path} is {has[1]} {has[0]} instead of {wanted[1]} {wanted[0]}"
    return ""


def transformers_names(tensors: dict) -> dict:
    """The tensors of a loss module by the names that transformers has for them: its model is `lm` in there.
    What would get the name of another keeps its own."""
    short = {name: name.removeprefix("lm.") for name in tensors}
    return {name if short[name] in tensors else short[name]: tensor for name, tensor in tensors.items()}


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
