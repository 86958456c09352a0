"""State as JSON values and named tensors, and safetensors files of these tensors.

The files have the format of torch.distributed.checkpoint, whose HuggingFaceStorageReader reads them here. Its
writer is not used, as it copies all tensors in memory first and communicates between processes.
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
    """Returns `value` as JSON values. A tensor in it becomes {"__tensor__": path} and is added to `tensors`
    {path: tensor}. path: the name of `value`. ValueError if it cannot be saved."""
    if torch.is_tensor(value):
        while path in tensors:  # {"a/b": ...} and {"a": {"b": ...}} have the same path
            path += "'"
        tensors[path] = value.detach()
        return {"__tensor__": path}
    if isinstance(value, dict):
        items = [[key, flatten(item, tensors, f"{path}/{key}")] for key, item in value.items()]
        if all(isinstance(key, str) and key[:2] != "__" for key in value):
            return dict(items)
        return {"__dict__": [[flatten(key, {}, path), item] for key, item in items]}  # JSON keys are text
    if isinstance(value, list | tuple):
        items = [flatten(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"checkpoints: a state_dict holds a {type(value).__name__} at {path!r}; only tensors, "
                     "numbers, texts, None, and lists and dictionaries of these can be saved")


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


def part_to_write(tensor, is_main_process: bool) -> tuple | None:
    """(tensor, offsets in the full tensor) that this process writes, or None. A sharded tensor is written by
    the first replica of each shard; any other tensor by the main process, with offsets None."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return (tensor.cpu() if tensor.device.type == "xla" else tensor, None) if is_main_process else None
    position = tensor.device_mesh.get_coordinate()  # None: this process is not in the mesh
    replica = [i for i, axis in zip(position or (), tensor.placements, strict=False) if axis.is_replicate()]
    if position is None or any(replica) or not tensor.to_local().numel():  # any: not the first replica
        return None
    return tensor.to_local(), [*tensor.__create_chunk_list__()[0].offsets]


def safetensors_chunks(parts: dict):
    """Yields the bytes of a safetensors file tensor by tensor, as safetensors' save_file would copy all
    tensors to the CPU at once. parts: {name: (tensor, offsets in the full tensor, or None)}.
    https://huggingface.co/docs/safetensors/index#format"""
    if unsupported := {str(tensor.dtype) for tensor, _ in parts.values() if tensor.dtype not in DTYPES}:
        raise ValueError(f"tensors of {', '.join(sorted(unsupported))} cannot be saved")
    ordered = sorted(parts.items(), key=lambda item: -item[1][0].element_size())  # this aligns every tensor
    header, end = {"__metadata__": {"format": "pt"}}, 0  # transformers requires this format
    if any(offsets for _, offsets in parts.values()):
        sharding = {name: {"saved_offsets": offsets or [0] * tensor.ndim}
                    for name, (tensor, offsets) in ordered}
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(sharding)
    for name, (tensor, _) in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, (tensor, _) in ordered:
        yield tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def describe_tensors(folder: Path) -> dict:
    """{name: torch's metadata, with .size and .properties.dtype} of all tensors in a folder's files."""
    return HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata


@torch.no_grad()
def read_tensors(folder: Path, targets: dict) -> None:
    """Fills `targets` {name: tensor or DTensor} in place. The files may be sharded in any other way."""
    on_cpu = {name: torch.empty_like(tensor, device="cpu")
              for name, tensor in targets.items() if tensor.device.type == "xla"}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dcp warns that a single process reads alone
        dcp.load(targets | on_cpu, storage_reader=HuggingFaceStorageReader(str(folder)),
                 no_dist=not dist.is_initialized())
    for name, tensor in on_cpu.items():
        targets[name].copy_(tensor)
