"""State as tensors by name and JSON values, and safetensors files of tensors.

The files are those of torch.distributed.checkpoint, whose HuggingFaceStorageReader reads them here. Its
writer would make a second copy of all that a process writes, and talk to the other processes meanwhile.
"""

import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
DTYPES |= {torch.uint8: "U8", torch.bool: "BOOL"}


def flatten(value, tensors: dict, path: str):
    """JSON values of `value`, with {"__tensor__": its path} for each tensor, which is put into `tensors`
    {path: tensor}. path: where `value` stands. ValueError for what cannot be saved."""
    if torch.is_tensor(value):
        while path in tensors:  # {"a/b": ...} beside {"a": {"b": ...}}
            path += "'"
        tensors[path] = value.detach()
        return {"__tensor__": path}
    if isinstance(value, dict):
        items = [[key, flatten(item, tensors, f"{path}/{key}")] for key, item in value.items()]
        if all(isinstance(key, str) and key[:2] != "__" for key in value):
            return dict(items)
        return {"__dict__": [[flatten(key, {}, path), item] for key, item in items]}  # JSON's keys are texts
    if isinstance(value, list | tuple):
        items = [flatten(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"checkpoints: a state_dict holds a {type(value).__name__} at {path!r}; tensors, "
                     "numbers, texts, lists and dictionaries of them can be saved")


def unflatten(tree, tensors: dict):
    """The inverse of `flatten`."""
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "__tensor__" in tree:
        return tensors[tree["__tensor__"]]
    if "__tuple__" in tree:
        return tuple(unflatten(tree["__tuple__"], tensors))
    if "__dict__" in tree:
        return {unflatten(key, tensors): unflatten(item, tensors) for key, item in tree["__dict__"]}
    return {key: unflatten(item, tensors) for key, item in tree.items()}


def own_part(tensor, main: bool) -> tuple | None:
    """(tensor, offsets) of what this process has to write of a tensor, None if nothing: of a sharded tensor
    its own part, once among copies; of a whole one all (offsets None), on the main process."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return (tensor.cpu() if tensor.device.type == "xla" else tensor, None) if main else None
    position = tensor.device_mesh.get_coordinate()  # None: no process of this mesh
    copies = [place for place, p in zip(position or (), tensor.placements, strict=False) if p.is_replicate()]
    if position is None or any(copies) or not tensor.to_local().numel():
        return None
    return tensor.to_local(), [*tensor.__create_chunk_list__()[0].offsets]


def safetensors_chunks(parts: dict):
    """The bytes of a safetensors file, tensor by tensor: safetensors' save_file copies all to the CPU at
    once. parts: {name: (tensor, offsets in the whole tensor, or None)}. Wide types go first, which aligns
    them. https://huggingface.co/docs/safetensors/index#format"""
    if other := {str(tensor.dtype) for tensor, _ in parts.values() if tensor.dtype not in DTYPES}:
        raise ValueError(f"tensors of {', '.join(sorted(other))} cannot be saved")
    ordered = sorted(parts.items(), key=lambda item: -item[1][0].element_size())
    header, end = {"__metadata__": {"format": "pt"}}, 0  # transformers requires it
    if any(offsets for _, offsets in parts.values()):
        where = {name: {"saved_offsets": offsets or [0] * tensor.ndim} for name, (tensor, offsets) in ordered}
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(where)
    for name, (tensor, _) in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, (tensor, _) in ordered:
        yield tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def tensors_of(folder: Path) -> dict:
    """{name: torch's description, with .size and .properties.dtype} of the tensors in a folder's files."""
    return HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata


@torch.no_grad()
def read_tensors(folder: Path, targets: dict) -> None:
    """Fill `targets` {name: tensor or DTensor} in place, however they were sharded when they were saved."""
    staged = {name: torch.empty_like(tensor, device="cpu") if tensor.device.type == "xla" else tensor
              for name, tensor in targets.items()}  # fmt: skip
    reader, alone = HuggingFaceStorageReader(str(folder)), not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single process dcp says that it is one
        dcp.load(dict(staged), storage_reader=reader, no_dist=alone)
    for name, tensor in targets.items():
        if tensor is not staged[name]:
            tensor.copy_(staged[name])
