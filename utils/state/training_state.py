"""What a checkpoint holds: weights and whatever is kept beside them, as tensors by name and JSON values.

Names are those of the bare model, so that a state fits with and without DDP, compile and FSDP around it.
"""

import json
import random
from pathlib import Path

import numpy as np
import torch
import xxhash
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load, load_file, save
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from utils.state.files import read_shards, safetensors_chunks

BYTES = 1 << 15  # processes exchange bytes in multiples of so many: few shapes, which matters on XLA
# What belongs to the device in an optimizer group stays as this run has it.
NOT_RESTORED = ("params", "fused", "foreach", "capturable", "differentiable")
ANOTHER = "keep it under another name to begin it anew"
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # what compile and recomputation add to a name


def clean_name(name: str) -> str:
    """Without what DDP ("module." in front) and the wrappers inside add to a name."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def named_tensors(model) -> dict:
    """{name: parameter or persistent buffer}; of tied ones only the first."""
    named, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[clean_name(name)] = tensor
    return named


def reshard(model) -> None:
    """Cut the weights up again that a forward pass without backward, as in evaluation, has left whole: the
    optimizer knows them only so.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Anything with state_dict <-> a tree and tensors


def freeze(thing, model) -> tuple[dict, dict]:
    """(tree, {path: tensor}) of a model, an optimizer, or anything else with state_dict; nothing is copied.

    Optimizers are told by the names of their parameters. ValueError for what is neither tensor nor JSON, and
    for what has no state.
    """
    if thing is model:
        return _encode(named_tensors(model))
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise ValueError(f"keep: a {type(thing).__name__} has no state_dict and load_state_dict")
    optimizer = _bare_optimizer(thing)
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
    """Put back what freeze gave for `thing` and a checkpoint in `folder` holds as `name`.

    Also into a model that is cut up otherwise, or not at all. ValueError if it does not fit.
    """
    optimizer = _bare_optimizer(thing)
    if thing is model:
        here = named_tensors(model)
        if differences := _differences(tree, here):
            first = "; ".join(differences[:3])
            raise ValueError(f"{folder} fits another model, {len(differences)} tensors differ: {first}")
        _fill(folder, name, here)
        return
    if optimizer is None:
        targets = _fill(folder, name, _targets(tree, _encode(thing.state_dict())[1]))
        try:
            thing.load_state_dict(_decode(tree, targets))
        except Exception as error:  # whatever a class of the user's, or another scheduler, makes of it
            reason = f"{type(error).__name__}: {error}; {ANOTHER}"
            raise ValueError(f"keep: {name} in {folder} does not fit what is kept now: {reason}") from error
        return
    optimizer.state.clear()
    names = _parameter_names(optimizer, model)
    here = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if here != [group["params"] for group in tree["groups"]]:
        raise ValueError(f"{folder} fits an optimizer with other parameter groups than {name}")
    parameters = {name: parameter for parameter, name in names.items()}
    targets = _fill(folder, name, _targets(tree["state"], parameters))
    groups = optimizer.state_dict()["param_groups"]  # with numbers for parameters
    numbers = {}
    for group, saved in zip(groups, tree["groups"], strict=True):
        numbers |= dict(zip(saved["params"], group["params"], strict=True))
        group.update({key: _decode(value, {}) for key, value in saved.items() if key not in NOT_RESTORED})
    state = {numbers.get(name, name): value for name, value in _decode(tree["state"], targets).items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def class_name(thing) -> str:
    """Of a kept thing, without accelerate's wrapper."""
    return type(_bare_optimizer(thing) or thing).__name__


def is_optimizer(thing) -> bool:
    """Bare, or as accelerate wraps it."""
    return _bare_optimizer(thing) is not None


def _bare_optimizer(thing):
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
        raise ValueError(
            f"keep: a state_dict holds a {type(value).__name__} at {path!r}; tensors, numbers, texts, lists "
            "and dictionaries of them can be kept"
        )

    return encode(value, ""), tensors


def _decode(tree, tensors):
    if isinstance(tree, list):
        return [_decode(item, tensors) for item in tree]
    if not isinstance(tree, dict) or "__tensor__" in tree:
        return _mapped(tree, lambda spec: tensors[spec["__tensor__"]])
    if "__numpy__" in tree:
        return _decode(tree["__numpy__"], tensors).numpy()
    if "__tuple__" in tree:
        return tuple(_decode(tree["__tuple__"], tensors))
    if "__dict__" in tree:
        return {key: _decode(item, tensors) for key, item in tree["__dict__"]}
    return {key: _decode(item, tensors) for key, item in tree.items()}


def _mapped(tree, change):
    """The tree with change(spec) in each tensor's place: {"__tensor__": path, "shape": ..., "dtype": ...}"""
    if isinstance(tree, list):
        return [_mapped(item, change) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return change(tree) if "__tensor__" in tree else {k: _mapped(item, change) for k, item in tree.items()}


def _targets(tree, like: dict) -> dict:
    """{path: empty tensor}, cut up as the tensor or parameter of that name in `like` is, where it is."""
    targets = {}

    def add(spec):
        path, shape, dtype = spec["__tensor__"], spec["shape"], getattr(torch, spec["dtype"])
        model = like.get(path, like.get(path.rpartition("/")[0]))
        cut = isinstance(model, DTensor) and [*model.shape] == shape
        targets[path] = torch.empty_like(model, dtype=dtype) if cut else torch.empty(shape, dtype=dtype)

    _mapped(tree, add)
    return targets


def _fill(folder: Path, name: str, targets: dict) -> dict:
    file = folder / f"{name}.safetensors"
    if targets and not file.exists():
        read_shards(folder, name, targets)
        return targets
    saved = load_file(file) if targets else {}
    for path, target in targets.items():
        value = saved[path]
        if isinstance(target, DTensor):
            value = value.to(target.device)
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)  # not the mapped file itself, which may be deleted
    return targets


def _differences(tree: dict, here: dict) -> list[str]:
    """A line for each tensor whose shape is not the same in both."""
    there = {name: tuple(spec["shape"]) for name, spec in tree.items()}
    found = {name: tuple(tensor.shape) for name, tensor in here.items()}
    both = {name: (there.get(name, "missing"), found.get(name, "missing")) for name in there | found}
    return [f"{name}: {a} there, {b} here" for name, (a, b) in sorted(both.items()) if a != b]


# Several processes


def digest(tree, tensors: dict) -> str:
    """Of this process's part; reads every tensor."""
    content = xxhash.xxh3_128(json.dumps(tree).encode())
    local = {path: t.to_local() if isinstance(t, DTensor) else t for path, t in tensors.items()}
    for chunk in safetensors_chunks(local):
        content.update(memoryview(chunk))
    return content.hexdigest()


def gather_bytes(accelerator, mine: bytes) -> list[bytes]:
    """`mine` of every process, in their order."""
    if accelerator.num_processes == 1:
        return [mine]
    size = torch.tensor([len(mine)], device=accelerator.device)
    sizes = accelerator.gather(size).tolist()
    room = -(-max(sizes) // BYTES) * BYTES
    padded = _bytes_tensor(mine.ljust(room, b"\0")).to(accelerator.device)
    rows = accelerator.gather(padded).cpu().view(-1, room)
    return [bytes(row[:size].numpy()) for row, size in zip(rows, sizes, strict=True)]


def gather_differing(accelerator, tree, tensors: dict) -> tuple[dict, dict]:
    """The same on all processes: (tree, tensors) as they are where they agree, else {"__processes__": [tree
    of each]} and the tensors of all, "0/path", "1/path". What is cut up is everybody's and left as it is.
    """
    if accelerator.num_processes == 1 or any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return tree, tensors
    text = json.dumps(tree).encode()
    mine = xxhash.xxh3_64_digest(text) + json.dumps(_sums(tensors)).encode()
    if len({*gather_bytes(accelerator, mine)}) == 1:
        return tree, tensors
    trees = [json.loads(text) for text in gather_bytes(accelerator, text)]
    on_host = {path: value.cpu().contiguous() for path, value in tensors.items()}
    files = gather_bytes(accelerator, save(on_host))
    merged = {f"{i}/{path}": tensor for i, file in enumerate(files) for path, tensor in load(file).items()}
    of_process = [
        _mapped(tree, lambda spec, i=i: spec | {"__tensor__": f"{i}/{spec['__tensor__']}"})
        for i, tree in enumerate(trees)
    ]
    return {"__processes__": of_process}, merged


def tree_of_process(tree: dict, index: int) -> dict:
    """The process's part of what gather_differing gave; of more processes now, the parts are dealt again."""
    if not (isinstance(tree, dict) and "__processes__" in tree):
        return tree
    return tree["__processes__"][index % len(tree["__processes__"])]


def _sums(tensors: dict) -> list[int]:
    """One number a tensor, of its bits: what differs on two processes differs here, without copies of it."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = [tensor.contiguous().reshape(-1) for tensor in tensors.values()]
    sums = [values.view(integers[values.element_size()]).sum(dtype=torch.int64) for values in flat]
    return torch.stack([value.cpu() for value in sums]).tolist() if sums else []


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
    mine = json.dumps(random_state(accelerator.device)).encode()
    return [json.loads(text) for text in gather_bytes(accelerator, mine)]


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
