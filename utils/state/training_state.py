"""What a checkpoint holds (tensors by name, optimizer groups, random states) and how it gets to a file.

Names are those of the bare model, so that a state fits with and without DDP, compile and FSDP around it.
"""

import json
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

CHUNK = 1 << 24  # bytes checksummed and written, or read and checksummed, at a time
RANDOM_BYTES = 1 << 15  # for one process's random states as text
# What belongs to the device in an optimizer group stays as this run has it.
NOT_RESTORED = ("params", "fused", "foreach", "capturable", "differentiable")
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}


def reshard(model) -> bool:
    """Cut the weights up again that a forward pass without backward, as in evaluation, has left whole: the
    optimizer knows them only so. Returns whether FSDP has cut up any.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return fsdp1 or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def clean_name(name: str) -> str:
    """Without what DDP ("module." in front) and compile ("_orig_mod." anywhere) add to a name."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def named_tensors(model) -> dict:
    """{name: parameter or persistent buffer}; of tied ones only the first."""
    named, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[clean_name(name)] = tensor
    return named


def optimizer_groups(model, optimizer) -> list[dict]:
    """The optimizer's groups as JSON values, with names in place of parameters."""
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    return [
        {key: value for key, value in group.items() if key not in NOT_RESTORED}
        | {"params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def optimizer_tensors(model, optimizer) -> dict:
    """{"parameter name/key": tensor}, for example "lm.lm_head.weight/exp_avg"."""
    return {
        f"{clean_name(name)}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


@torch.no_grad()
def restore(folder: Path, model, optimizer, state: dict) -> None:
    """Copy the weights and the optimizer state of a checkpoint into place. ValueError if they do not fit.

    state: of state.json, "groups" from optimizer_groups or "shards", the keys of shards().
    """
    optimizer.state.clear()
    if "shards" in state:  # torch re-shards, or assembles where the model is not sharded
        tensors = shards(model, optimizer, state["shards"])
        dcp.load(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())
        set_model_state_dict(model, tensors["model"])
        if "optimizer" in tensors:
            set_optimizer_state_dict(model, optimizer, tensors["optimizer"])
        return
    groups = state["groups"]
    saved = load_file(folder / "model.safetensors")
    moments = {}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        name, _, key = key.rpartition("/")
        moments.setdefault(name, {})[key] = value.clone()  # not the mapped file, which may be deleted
    here = named_tensors(model)
    differences = [
        f"{name}: {_shape(saved.get(name))} there, {_shape(here.get(name))} here"
        for name in sorted(saved.keys() | here.keys())
        if _shape(saved.get(name)) != _shape(here.get(name))
    ]
    if differences:
        count, first = len(differences), "; ".join(differences[:3])
        raise ValueError(f"{folder} fits another model, {count} tensors differ: {first}")
    groups_here = optimizer_groups(model, optimizer)
    if [group["params"] for group in groups_here] != [group["params"] for group in groups]:
        raise ValueError(f"{folder} fits an optimizer with other parameter groups")
    if reshard(model):
        whole = StateDictOptions(full_state_dict=True, strict=False)  # not strict: tied weights once
        set_model_state_dict(model, saved, options=whole)
        if moments:
            moments = {"state": moments, "param_groups": groups}
            set_optimizer_state_dict(model, optimizer, moments, options=whole)
        return
    for name, tensor in here.items():
        tensor.copy_(saved[name])
    groups_here = optimizer.state_dict()["param_groups"]
    for here, group in zip(groups_here, groups, strict=True):
        here.update({key: value for key, value in group.items() if key not in NOT_RESTORED})
    order = [name for group in groups for name in group["params"]]
    moments = {index: moments[name] for index, name in enumerate(order) if name in moments}
    optimizer.load_state_dict({"state": moments, "param_groups": groups_here})


def _shape(tensor):
    return "missing" if tensor is None else tuple(tensor.shape)


# Files


def safetensors_chunks(tensors: dict):
    """The bytes of a safetensors file, tensor after tensor, straight from their memory.

    safetensors' own save_file cannot tell a checksum of what it writes. Wide types go first, which aligns
    every tensor. https://huggingface.co/docs/safetensors/index#format
    """
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
            view = memoryview(chunk)
            size += len(view)
            for start in range(0, len(view), CHUNK):
                piece = view[start : start + CHUNK]
                digest.update(piece)
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def checksum_file(path: Path) -> dict:
    """Size and checksum of a file, as write_file returns them."""
    digest, size = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def shards(model, optimizer, keys=None, cpu_offload: bool = False) -> dict:
    """{"model": ..., "optimizer": ...} as torch.distributed.checkpoint takes them.

    Before the first step there is no "optimizer": torch would make its state by a step of zero gradients,
    which AdamW would count.
    """
    options = StateDictOptions(cpu_offload=cpu_offload)
    tensors = {"model": get_model_state_dict(model, options=options)}
    if "optimizer" in keys if keys else optimizer.state:
        tensors["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
    return tensors


def save_shards(folder: Path, tensors: dict, accelerator, group) -> dict:
    """Every process writes and checksums its part. Returns {file: size and checksum} of all parts."""
    several = accelerator.num_processes > 1
    writer = dcp.FileSystemWriter(folder)
    dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=not several)
    mine = list(folder.glob(f"__{accelerator.process_index}_*"))
    if accelerator.is_main_process:
        mine.append(folder / ".metadata")
    try:
        part = {path.name: checksum_file(path) for path in mine}
    except OSError as error:
        part = error  # all processes must hear of it
    parts = [part]
    if several:
        parts = [None] * accelerator.num_processes
        dist.all_gather_object(parts, part, group=group)
    files = {}
    for part in parts:
        if isinstance(part, OSError):
            raise part
        files |= part
    return files


# Random numbers


def random_state(device) -> dict:
    """Python's, numpy's, torch's and the device's random states as JSON values."""
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest]}
    state["torch"] = bytes(torch.get_rng_state().numpy()).hex()
    if device.type not in ("cpu", "mps", "xla"):
        state[device.type] = bytes(torch.get_device_module(device).get_rng_state(device).numpy()).hex()
    elif device.type == "xla":
        import torch_xla.core.xla_model as xm

        state["xla"] = int(xm.get_rng_state())
    return state


def set_random_state(state: dict, device) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_bytes_tensor(bytes.fromhex(state["torch"])))
    if device.type == "xla" and "xla" in state:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(state["xla"])
    elif device.type != "cpu" and device.type in state:
        saved = _bytes_tensor(bytes.fromhex(state[device.type]))
        torch.get_device_module(device).set_rng_state(saved, device)


def gather_random_states(accelerator) -> list[dict]:
    """random_state of every process, in their order."""
    text = json.dumps(random_state(accelerator.device)).encode()
    if accelerator.num_processes == 1:
        return [json.loads(text)]
    assert len(text) <= RANDOM_BYTES, len(text)
    mine = _bytes_tensor(text.ljust(RANDOM_BYTES)).to(accelerator.device)
    rows = accelerator.gather(mine).cpu().view(-1, RANDOM_BYTES)
    return [json.loads(bytes(row.numpy())) for row in rows]


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
