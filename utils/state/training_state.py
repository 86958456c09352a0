"""What a checkpoint holds: weights and whatever is kept beside them, as tensors by name and JSON values.

Names are those of the bare model, so that a state fits with and without DDP, compile and FSDP around it.
"""

import json
from pathlib import Path

import numpy as np
import torch
import xxhash
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load, load_file, save
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from utils.state.files import read_shards

BYTES = 1 << 15  # on XLA processes exchange bytes in multiples of so many: a shape is a graph
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
CHUNK = 1 << 20  # elements of a tensor that are summed at once
# What belongs to the device in an optimizer group stays as this run has it.
NOT_RESTORED = ("params", "fused", "foreach", "capturable", "differentiable")
ANOTHER = "keep it under another name to begin it anew"


class DoesNotFit(ValueError):
    """A checkpoint is of something else than what is there now."""


def clean_name(name: str) -> str:
    """Without what DDP (in front), compile and recomputation (inside) add to it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "").removeprefix("module.")


def named_tensors(model) -> dict:
    """{name: parameter or persistent buffer}; of tied ones only the first."""
    named, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[clean_name(name)] = tensor
    return named


def reshard(model) -> None:
    """Back to the layout that the optimizer was built with: a forward pass alone, as in evaluation, leaves
    gathered weights."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Anything with state_dict <-> a tree and tensors


def freeze(thing, model) -> tuple[dict, dict]:
    """(tree, {path: tensor}) of a model, an optimizer (by the names of its parameters), or anything else with
    state_dict; nothing is copied. ValueError for what is neither tensor nor JSON, and for what has no state.
    """
    if thing is model:
        return _encode(named_tensors(model))
    if isinstance(thing, torch.Generator):
        return _encode({"state": thing.get_state()})
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise ValueError(f"keep: a {type(thing).__name__} has no state_dict and load_state_dict")
    optimizer = bare_optimizer(thing)
    if optimizer is None:
        return _encode(thing.state_dict())
    names = _parameter_names(optimizer, model)
    groups = [
        {key: value for key, value in group.items() if key not in NOT_RESTORED}
        | {"params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {name: optimizer.state[p] for p, name in names.items() if p in optimizer.state}
    state |= {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
    tree, tensors = _encode(state)
    return {"groups": _encode(groups)[0], "state": tree}, tensors


@torch.no_grad()
def restore(folder: Path, name: str, thing, tree: dict, model) -> None:
    """Put back what freeze gave for `thing` and a checkpoint in `folder` holds as `name`, also into a model
    that is sharded otherwise, or not at all. DoesNotFit if it does not."""
    optimizer = bare_optimizer(thing)
    if thing is model:
        here = named_tensors(model)
        there = {path: f"{spec['dtype']} {spec['shape']}" for path, spec in tree.items()}
        found = {path: f"{spec['dtype']} {spec['shape']}" for path, spec in _encode(here)[0].items()}
        both = [(path, there.get(path, "missing"), found.get(path, "missing")) for path in there | found]
        if other := sorted(f"{path}: {a} there, {b} here" for path, a, b in both if a != b):
            first = "; ".join(other[:3])
            raise DoesNotFit(f"{folder} fits another model, {len(other)} tensors differ: {first}")
        return _fill(folder, name, here)
    if isinstance(thing, torch.Generator):
        thing.set_state(_read(folder, name, tree, {})["state"])
        return
    if optimizer is None:
        state = _read(folder, name, tree, _encode(thing.state_dict())[1])
        try:
            thing.load_state_dict(state)
        except Exception as error:  # whatever a class of the user's, or another scheduler, makes of it
            reason = f"{type(error).__name__}: {error}; {ANOTHER}"
            raise DoesNotFit(f"keep: {name} in {folder} does not fit what is kept now: {reason}") from error
        return
    optimizer.state.clear()
    names = _parameter_names(optimizer, model)
    here = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if here != (there := [group["params"] for group in tree["groups"]]):
        was, now = (" + ".join(str(len(group)) for group in groups) for groups in (there, here))
        told = f"keep: {name} has other groups of parameters: {was} in {folder}, {now} now"
        raise DoesNotFit(f"{told}; {ANOTHER}")
    state = _read(folder, name, tree["state"], {name: parameter for parameter, name in names.items()})
    groups = optimizer.state_dict()["param_groups"]  # with numbers for parameters
    numbers = {}
    for group, saved in zip(groups, _read(folder, name, tree["groups"], {}), strict=True):
        numbers |= dict(zip(saved["params"], group["params"], strict=True))
        group.update({key: value for key, value in saved.items() if key not in NOT_RESTORED})
    state = {numbers.get(name, name): value for name, value in state.items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def bare_optimizer(thing):
    """An optimizer without accelerate's wrapper; None for anything else."""
    while isinstance(thing, AcceleratedOptimizer):
        thing = thing.optimizer
    return thing if isinstance(thing, torch.optim.Optimizer) else None


def _parameter_names(optimizer, model) -> dict:
    """{parameter: name}: the model's, or its place in the optimizer where the model does not have it."""
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    return {
        parameter: names.get(parameter, f"group {g}, parameter {p}")
        for g, group in enumerate(optimizer.param_groups)
        for p, parameter in enumerate(group["params"])
    }


def _encode(value) -> tuple[dict, dict]:
    """(JSON values with {"__tensor__": path, "shape": ..., "dtype": ...} in each tensor's place, tensors)"""
    tensors = {}

    def encode(value, path):
        if isinstance(value, np.ndarray):
            return {"__numpy__": encode(torch.from_numpy(np.array(value)), path)}
        if torch.is_tensor(value):
            tensors[path] = value.detach()
            dtype = str(value.dtype).removeprefix("torch.")
            return {"__tensor__": path, "shape": [*value.shape], "dtype": dtype}
        if isinstance(value, dict):
            items = [[key, encode(item, f"{path}/{key}".strip("/"))] for key, item in value.items()]
            plain = all(isinstance(key, str) and key[:2] != "__" for key in value)
            return dict(items) if plain else {"__dict__": items}  # JSON would make texts of its keys
        if isinstance(value, list | tuple):
            items = [encode(item, f"{path}/{i}".strip("/")) for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"__tuple__": items}
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        known = "tensors, numbers, texts, lists and dictionaries of them can be kept"
        raise ValueError(f"keep: a state_dict holds a {type(value).__name__} at {path!r}; {known}")

    return encode(value, ""), tensors


def _read(folder: Path, name: str, tree, like: dict):
    """What _encode made `tree` of. Tensors are sharded as the one of their name in `like` is."""
    targets = {}

    def decoded(node):
        if "__tensor__" in node:
            path, shape, dtype = node["__tensor__"], node["shape"], getattr(torch, node["dtype"])
            model = like.get(path, like.get(path.rpartition("/")[0]))
            cut = isinstance(model, DTensor) and [*model.shape] == shape
            made = torch.empty_like(model, dtype=dtype) if cut else torch.empty(shape, dtype=dtype)
            return targets.setdefault(path, made)
        if "__numpy__" in node:
            return node["__numpy__"].numpy()  # the same memory
        if "__tuple__" in node:
            return tuple(node["__tuple__"])
        return dict(node["__dict__"]) if "__dict__" in node else node

    value = json.loads(json.dumps(tree), object_hook=decoded)  # inner ones first
    _fill(folder, name, targets)
    return value


def _fill(folder: Path, name: str, targets: dict) -> None:
    file = folder / f"{name}.safetensors"
    if targets and not file.exists():
        return read_shards(folder, name, targets)
    saved = load_file(file) if targets else {}
    values = {path: saved[path if path in saved else path.removeprefix("lm.")] for path in targets}
    for path, value in values.items():  # names as in transformers_names
        if isinstance(targets[path], torch.nn.Parameter) and not value.isfinite().all():
            raise DoesNotFit(f"{file}: {path} is not finite")
    for path, target in targets.items():
        value = values[path]
        if isinstance(target, DTensor):
            value = value.to(target.device)
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)  # not the mapped file itself, which may be deleted


# Several processes


def digest(tree, tensors: dict) -> str:
    """Of a state, for comparison; of sharded tensors this process's part."""
    sums = {name: checksum(tensor) for name, tensor in tensors.items()}
    return xxhash.xxh3_128_hexdigest(json.dumps([tree, sums]).encode())


def checksum(tensor) -> list:
    """Shape and a sum of all elements' bits, each times its odd number, taken where the tensor is."""
    tensor = local(tensor.detach()).contiguous()
    shape, tensor = [*tensor.shape], tensor.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    bits = tensor.view(INTEGERS.get(tensor.element_size(), torch.uint8))
    odd = torch.arange(1, 2 * min(CHUNK, bits.numel()) + 1, 2, device=tensor.device)
    for part in bits.split(CHUNK):
        total = total * 31 + (part * odd[: part.numel()]).sum()
    return [str(tensor.dtype), shape, int(total)]


def local(tensor) -> torch.Tensor:
    """This process's part of a sharded tensor; XLA's on the CPU, as each question to it is a graph."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.cpu() if tensor.device.type == "xla" else tensor


def gather_bytes(accelerator, mine: bytes) -> list[bytes]:
    """`mine` of every process, in their order."""
    if accelerator.num_processes == 1:
        return [mine]
    sizes = accelerator.gather(torch.tensor([len(mine)], device=accelerator.device)).tolist()
    room = -(-max(sizes) // BYTES) * BYTES if accelerator.device.type == "xla" else max(1, *sizes)
    padded = torch.frombuffer(bytearray(mine.ljust(room, b"\0")), dtype=torch.uint8)
    rows = accelerator.gather(padded.to(accelerator.device)).cpu().view(-1, room)
    return [bytes(row[:size].numpy()) for row, size in zip(rows, sizes, strict=True)]


def gather_differing(accelerator, tree, tensors: dict) -> tuple[dict, dict]:
    """The same on all processes: (tree, tensors) as they are where they agree, else {"__processes__": [tree
    of each]} and the tensors of all, "0/path", "1/path". Sharded tensors are left alone: every process has
    its part."""
    if accelerator.num_processes == 1 or any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return tree, tensors
    if len({*gather_bytes(accelerator, digest(tree, tensors).encode())}) == 1:
        return tree, tensors
    i = accelerator.process_index

    def renamed(node):
        return node | {"__tensor__": f"{i}/{node['__tensor__']}"} if "__tensor__" in node else node

    tree = json.loads(json.dumps(tree), object_hook=renamed)
    file = save({f"{i}/{path}": value.cpu().contiguous() for path, value in tensors.items()})
    trees = [json.loads(text) for text in gather_bytes(accelerator, json.dumps(tree).encode())]
    files = [load(content) for content in gather_bytes(accelerator, file)]
    return {"__processes__": trees}, {path: value for found in files for path, value in found.items()}
