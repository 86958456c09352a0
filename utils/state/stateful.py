"""What a checkpoint holds of a module, an optimizer, or anything with state_dict, and how that is restored.
The model's tensors have transformers' names. All other tensors' names begin with "OBJECT/"."""

import re
from types import SimpleNamespace

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.optim import Optimizer

from utils.state.resume import CheckpointMismatch
from utils.state.tensors import flatten, unflatten

# Settings of an optimizer's parameter group that depend on the device: a resumed run uses its own.
DEVICE_SETTINGS = ("params", "fused", "foreach", "capturable", "differentiable")


def clean_name(name: str) -> str:
    """A tensor's name without the prefixes of DDP, torch.compile and gradient checkpointing."""
    name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
    return re.sub(r"^(module\.)+", "", name)


def named_tensors(module) -> dict:
    """{name: parameter or persistent buffer} of a module in any wrapper. Of tied tensors only the first."""
    first = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if torch.is_tensor(tensor):
            first.setdefault(id(tensor), (clean_name(name), tensor))
    return dict(first.values())


def reshard(model) -> None:
    """Shards FSDP's weights again, as the optimizer knows them: evaluation leaves them gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def as_stateful(name: str, obj):
    """Returns `obj`, an optimizer without accelerate's wrapper, a torch.Generator with state_dict and
    load_state_dict. ValueError if the object cannot be saved."""
    if isinstance(obj, torch.Generator):
        return SimpleNamespace(state_dict=lambda: {"state": obj.get_state()},
                               load_state_dict=lambda state: obj.set_state(state["state"]))  # fmt: skip
    if isinstance(obj, AcceleratedScheduler):
        raise ValueError(f"checkpoints: {name} was given to accelerator.prepare, which steps it once per "
                         "process: do not prepare it")
    if not hasattr(obj, "load_state_dict"):
        raise ValueError(f"checkpoints: {name}, a {type(obj).__name__}, has no load_state_dict: give it one, "
                         "and state_dict")
    while isinstance(obj, AcceleratedOptimizer):
        obj = obj.optimizer
    return obj


def collect_state(name: str, obj, model) -> tuple[dict, dict]:
    """(JSON values for state.json, {name in the checkpoint: tensor}) of an object. Copies nothing."""
    if isinstance(obj, Module):
        tensors = named_tensors(obj)
        if obj is not model:
            return {}, {f"{name}/{key}": tensor for key, tensor in tensors.items()}
        short = {key: key.removeprefix("lm.") for key in tensors}  # a loss module's lm is transformers' model
        return {}, {key if short[key] in tensors else short[key]: tensor for key, tensor in tensors.items()}
    tensors = {}
    record = {"state": flatten(obj.state_dict(), tensors, name)}
    if isinstance(obj, Optimizer):
        names = {weight: clean_name(key) for key, weight in model.named_parameters()}
        record["class"] = type(obj).__name__
        record["parameters"] = [[names.get(weight, "not of the model") for weight in group["params"]]
                                for group in obj.param_groups]  # fmt: skip
    return record, tensors


def find_targets(name: str, obj, record: dict, stored: dict, model) -> dict:
    """Returns {name in the checkpoint: tensor to fill} for an object. record: its JSON values in state.json.
    stored: {name: metadata} of all tensors in the checkpoint. CheckpointMismatch if the object differs."""
    current, tensors = collect_state(name, obj, model)
    saved = {key: metadata for key, metadata in stored.items() if key.startswith(f"{name}/")}
    if isinstance(obj, Module):
        if obj is model:
            saved = {key: metadata for key, metadata in stored.items() if "/" not in key}
        old = {key: f"{item.properties.dtype} {[*item.size]}" for key, item in saved.items()}
        new = {key: f"{tensor.dtype} {[*tensor.shape]}" for key, tensor in tensors.items()}
        if different := [key for key in sorted(old | new) if old.get(key) != new.get(key)]:
            texts = [f"{key}: {old.get(key, 'none')} saved, {new.get(key, 'none')} now" for key in different]
            message = f"{len(texts)} tensors differ: {'; '.join(texts[:3])}".replace("torch.", "")
            raise CheckpointMismatch(f"holds another {name} ({message}): choose another --output_dir")
        return tensors
    if isinstance(obj, Optimizer):
        if any(record[key] != current[key] for key in ("class", "parameters")):
            sizes = [" + ".join(map(str, map(len, each["parameters"]))) for each in (record, current)]
            message = (f"{record['class']} of {sizes[0]} tensors saved, {current['class']} of {sizes[1]} "
                       "now, or with other names")
            raise CheckpointMismatch(f"holds another {name} ({message}): choose another --output_dir")
        weights = [weight for group in obj.param_groups for weight in group["params"]]
        tensors |= {f"{name}/state/{i}": weight for i, weight in enumerate(weights)}
    # For each saved tensor the object's tensor of this name, or the weight to whose state it belongs.
    similar = {key: tensors.get(key, tensors.get(key.rpartition("/")[0])) for key in saved}
    return {key: empty_target(similar[key], metadata) for key, metadata in saved.items()}


def empty_target(similar, metadata) -> torch.Tensor:
    """An empty tensor of the size and dtype in `metadata`. It has the device and the sharding of `similar` if
    both have one shape, or differ only by a last dimension of 1."""
    if similar is not None and (*similar.shape[:-1], 1) == (*metadata.size,):
        similar = similar[..., :1]
    if similar is None or similar.shape != metadata.size:
        return torch.empty(metadata.size, dtype=metadata.properties.dtype)
    return torch.empty_like(similar, dtype=metadata.properties.dtype, requires_grad=False)


def restore_state(obj, record: dict, targets: dict) -> None:
    """Loads the saved state into an object. targets: from find_targets, filled; this restores a module."""
    if isinstance(obj, Module):
        return
    state = unflatten(record["state"], targets)
    if isinstance(obj, Optimizer):
        groups = obj.state_dict()["param_groups"]
        for group, saved in zip(groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in DEVICE_SETTINGS})
        state = {"state": state["state"], "param_groups": groups}
    obj.load_state_dict(state)
