"""What a checkpoint holds: weights and everything else that is kept, as tensors by name and JSON values.

Names are those of the bare model, so that a state fits with and without DDP, compile or FSDP around it.
"""

import json
from pathlib import Path

import numpy as np
import torch
import xxhash
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from safetensors.torch import load, save
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from utils.state.files import read_tensors

BYTES = 1 << 15  # on XLA messages are padded to a multiple of this: each shape is a graph
# Settings of an optimizer's group that depend on the device: a resumed run uses its own.
NOT_RESTORED = ("params", "fused", "foreach", "capturable", "differentiable")
ANOTHER = "keep it under another name to start it anew"


def clean_name(name: str) -> str:
    """Without the prefixes of DDP, compile and gradient checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "").removeprefix("module.")


def named_tensors(model) -> dict:
    """{name: parameter or persistent buffer}, of tied ones only the first."""
    first = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), (clean_name(name), tensor))
    return dict(first.values())


def reshard(model) -> None:
    """Reshard: evaluation leaves FSDP's weights gathered, but the optimizer was built with shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def bare_optimizer(thing):
    """An optimizer without accelerate's wrapper; None for anything else."""
    while isinstance(thing, AcceleratedOptimizer):
        thing = thing.optimizer
    return thing if isinstance(thing, torch.optim.Optimizer) else None


def collect_state(thing, model) -> tuple[dict, dict]:
    """(tree, {path: tensor}) of a model, an optimizer (by the names of its parameters) or anything else with
    state_dict. Nothing is copied. ValueError for what cannot be kept."""
    if thing is model:
        return _encode(named_tensors(model))
    if isinstance(thing, torch.Generator):
        return _encode({"state": thing.get_state()})
    if isinstance(thing, AcceleratedScheduler):
        raise ValueError(f"keep: a {type(thing.scheduler).__name__} was given to accelerator.prepare, which "
                         "steps it once for each process; leave it out there.")
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise ValueError(f"keep: a {type(thing).__name__} has no state_dict and load_state_dict")
    if not (optimizer := bare_optimizer(thing)):
        return _encode(thing.state_dict())
    names = _parameter_names(optimizer, model)
    groups = []
    for group in optimizer.param_groups:
        groups.append({key: value for key, value in group.items() if key not in NOT_RESTORED})
        groups[-1]["params"] = [names[parameter] for parameter in group["params"]]
    state = {name: optimizer.state[p] for p, name in names.items() if p in optimizer.state}
    state |= {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
    (tree, tensors), (group_tree, more) = _encode(state), _encode(groups, "groups")
    return {"groups": group_tree, "state": tree}, tensors | more


@torch.no_grad()
def restore(folder: Path, name: str, thing, tree: dict, model) -> None:
    """Restore `thing`, which a checkpoint in `folder` holds as `name` with this tree of `collect_state`.
    A model may be sharded in another way, or not at all."""
    if thing is model:
        here = named_tensors(model)
        now = _encode(here)[0]
        if other := [path for path in sorted(tree | now) if tree.get(path) != now.get(path)]:
            first = [f"{p}: {_spec(tree.get(p))} there, {_spec(now.get(p))} here" for p in other[:3]]
            raise ValueError(f"{folder} fits another model, {len(other)} tensors differ: {'; '.join(first)}")
        return read_tensors(folder, name, here)
    if optimizer := bare_optimizer(thing):
        return _restore_optimizer(folder, name, optimizer, tree, model)
    if isinstance(thing, torch.Generator):
        return thing.set_state(_read(folder, name, tree, {})["state"])
    state = _read(folder, name, tree, like=_encode(thing.state_dict())[1])
    try:
        thing.load_state_dict(state)
    except Exception as error:  # the user's class may raise anything
        reason = f"{type(error).__name__}: {error}; {ANOTHER}"
        raise ValueError(f"keep: {name} of {folder} does not fit what is kept now: {reason}") from error


def _spec(node: dict | None) -> str:
    return f"{node['dtype']} {node['shape']}" if node else "missing"


def _restore_optimizer(folder, name, optimizer, tree, model):
    names = _parameter_names(optimizer, model)
    here = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if here != (there := [group["params"] for group in tree["groups"]]):
        was, now = (" + ".join(str(len(group)) for group in groups) for groups in (there, here))
        groups = f"{name} has other groups of parameters: {was} in {folder}, {now} now"
        raise ValueError(f"keep: {groups}; {ANOTHER}")
    optimizer.state.clear()
    saved = _read(folder, name, tree, like={name: parameter for parameter, name in names.items()})
    groups, numbers = optimizer.state_dict()["param_groups"], {}  # numbers: {name: torch's number}
    for group, old in zip(groups, saved["groups"], strict=True):
        numbers.update(zip(old["params"], group["params"], strict=True))
        group.update({key: value for key, value in old.items() if key not in NOT_RESTORED})
    state = {numbers.get(key, key): value for key, value in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _parameter_names(optimizer, model) -> dict:
    """{parameter: its name in the model, or its place in the optimizer if the model lacks it}"""
    named, names = {weight: clean_name(name) for name, weight in model.named_parameters()}, {}
    for g, group in enumerate(optimizer.param_groups):
        names |= {p: named.get(p, f"group {g}, parameter {i}") for i, p in enumerate(group["params"])}
    return names


def _encode(value, path: str = "") -> tuple[dict, dict]:
    """(JSON values with {"__tensor__": path, "shape": ..., "dtype": ...} for each tensor, {path: tensor})"""
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
            return dict(items) if plain else {"__dict__": items}  # JSON's keys are strings
        if isinstance(value, list | tuple):
            items = [encode(item, f"{path}/{i}".strip("/")) for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"__tuple__": items}
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        known = "tensors, numbers, texts, lists and dictionaries of them can be kept"
        raise ValueError(f"keep: a state_dict holds a {type(value).__name__} at {path!r}; {known}")

    return encode(value, path), tensors


def _read(folder: Path, name: str, tree, like: dict):
    """The inverse of _encode. A tensor is sharded like the one of its name in `like`."""
    tensors = {}

    def decoded(node):
        if "__tensor__" in node:
            path, shape, dtype = node["__tensor__"], node["shape"], getattr(torch, node["dtype"])
            model = like.get(path, like.get(path.rpartition("/")[0]))
            sharded = isinstance(model, DTensor) and [*model.shape] == shape
            empty = torch.empty_like(model, dtype=dtype) if sharded else torch.empty(shape, dtype=dtype)
            return tensors.setdefault(path, empty)
        if "__numpy__" in node:
            return node["__numpy__"].numpy()  # shares its memory
        if "__tuple__" in node:
            return tuple(node["__tuple__"])
        return dict(node["__dict__"]) if "__dict__" in node else node

    value = json.loads(json.dumps(tree), object_hook=decoded)  # calls it for inner nodes first
    read_tensors(folder, name, tensors)
    return value


def digest(tree, tensors: dict) -> str:
    """Checksum of what `collect_state` gives; of sharded tensors only this process's part counts."""
    sums = {name: checksum(tensor) for name, tensor in tensors.items()}
    return xxhash.xxh3_128_hexdigest(json.dumps([tree, sums]).encode())


def checksum(tensor) -> str:
    """Checksum of a tensor's type, shape and bytes; of a sharded one only this process's part counts."""
    part = local(tensor.detach()).to("cpu", copy=True)  # numpy would keep the storage, and FSDP must free it
    content = part.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{part.dtype} {[*part.shape]} {xxhash.xxh3_128_hexdigest(content)}"


def local(tensor) -> torch.Tensor:
    """This process's part of a sharded tensor. XLA's are copied to the CPU, or each operation is a graph."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.cpu() if tensor.device.type == "xla" else tensor


def gather_bytes(accelerator, mine: bytes) -> list[bytes]:
    """`mine` of every process, in the order of processes."""
    if accelerator.num_processes == 1:
        return [mine]
    sizes = accelerator.gather(torch.tensor([len(mine)], device=accelerator.device)).tolist()
    room = -(-max(sizes) // BYTES) * BYTES if accelerator.device.type == "xla" else max(1, *sizes)
    padded = torch.frombuffer(bytearray(mine.ljust(room, b"\0")), dtype=torch.uint8)
    rows = accelerator.gather(padded.to(accelerator.device)).cpu().view(-1, room)
    return [bytes(row[:size].numpy()) for row, size in zip(rows, sizes, strict=True)]


def gather_json(accelerator, mine) -> list:
    return [json.loads(text) for text in gather_bytes(accelerator, json.dumps(mine).encode())]


def gather_differing(accelerator, tree, tensors: dict) -> tuple[dict, dict]:
    """(tree, tensors) to be saved by the main process. If the processes' states differ and are not sharded,
    it is {"__processes__": [tree of each]} and the tensors of all, by the names "0/path", "1/path"."""
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    if accelerator.num_processes == 1 or sharded:
        return tree, tensors
    if len({*gather_json(accelerator, digest(tree, tensors))}) == 1:
        return tree, tensors
    i = accelerator.process_index

    def renamed(node):
        return node | {"__tensor__": f"{i}/{node['__tensor__']}"} if "__tensor__" in node else node

    trees = gather_json(accelerator, json.loads(json.dumps(tree), object_hook=renamed))
    file = save({f"{i}/{path}": value.cpu().contiguous() for path, value in tensors.items()})
    files = [load(content) for content in gather_bytes(accelerator, file)]
    return {"__processes__": trees}, {path: value for file in files for path, value in file.items()}
