"""What a checkpoint holds of a module, an optimizer, or anything with state_dict, and how it is put back.
The model's tensors have transformers' names; all others begin with their object's name and "/"."""

import re

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.optim import Optimizer

from utils.state.resume import CheckpointMismatch
from utils.state.tensors import flatten, unflatten

# Settings of an optimizer's group that depend on the device: a resumed run uses its own.
OF_THE_DEVICE = ("params", "fused", "foreach", "capturable", "differentiable")
ANOTHER = "is another one there ({}): choose another --output_dir"


def clean_name(name: str) -> str:
    """Without the prefixes of DDP, compile and gradient checkpointing."""
    name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
    return re.sub(r"^(module\.)+", "", name)


def named_tensors(module) -> dict:
    """{name: parameter or persistent buffer} of a module in any wrapper, of tied ones only the first."""
    first = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if torch.is_tensor(tensor):
            first.setdefault(id(tensor), (clean_name(name), tensor))
    return dict(first.values())


def reshard(model) -> None:
    """Back to the layout that the optimizer was built with: evaluation leaves FSDP's weights gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class GeneratorState:
    """A torch.Generator as an object with state_dict."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def state_dict(self) -> dict:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.generator.set_state(state["state"])


def unwrapped(obj):
    """Without accelerate's wrapper of optimizers."""
    while isinstance(obj, AcceleratedOptimizer):
        obj = obj.optimizer
    return obj


def collect_state(name: str, obj, model) -> tuple[dict, dict]:
    """(what state.json holds of it, {name: tensor}). Nothing is copied."""
    if obj is model:  # a loss module, whose `lm` is transformers' model
        tensors = named_tensors(obj)
        short = {key: key.removeprefix("lm.") for key in tensors}
        return {}, {key if short[key] in tensors else short[key]: tensor for key, tensor in tensors.items()}
    if isinstance(obj, Module):
        return {}, {f"{name}/{key}": tensor for key, tensor in named_tensors(obj).items()}
    obj, tensors = unwrapped(obj), {}
    record = {"state": flatten(obj.state_dict(), tensors, name)}
    if isinstance(obj, Optimizer):
        named = {weight: clean_name(key) for key, weight in model.named_parameters()}
        record["class"] = type(obj).__name__
        record["parameters"] = [[named.get(weight, "not of the model") for weight in group["params"]]
                                for group in obj.param_groups]  # fmt: skip
    return record, tensors


def find_targets(name: str, obj, record: dict, stored: dict, model) -> dict:
    """{name: tensor to be filled} for an object that a checkpoint holds as `record`. stored: {name:
    description} of all tensors of the checkpoint. Raises CheckpointMismatch if they do not fit the object."""
    now, tensors = collect_state(name, obj, model)
    saved = {key: item for key, item in stored.items() if key.startswith(f"{name}/")}
    if isinstance(obj, Module):
        if obj is model:
            saved = {key: item for key, item in stored.items() if "/" not in key}
        old = {key: f"{item.properties.dtype} {[*item.size]}" for key, item in saved.items()}
        new = {key: f"{tensor.dtype} {[*tensor.shape]}" for key, tensor in tensors.items()}
        if other := [key for key in sorted(old | new) if old.get(key) != new.get(key)]:
            first = (f"{key}: {old.get(key, 'none')} there, {new.get(key, 'none')} here" for key in other[:3])
            differ = f"{len(other)} tensors differ: {'; '.join(first)}".replace("torch.", "")
            raise CheckpointMismatch(f"does not fit: {name} {ANOTHER.format(differ)}")
        return tensors
    if isinstance(obj := unwrapped(obj), Optimizer):
        if any(record[key] != now[key] for key in ("class", "parameters")):
            sizes = [" + ".join(str(len(group)) for group in each["parameters"]) for each in (record, now)]
            differ = f"{record['class']} of {sizes[0]} tensors, here {now['class']} of {sizes[1]}, or renamed"
            raise CheckpointMismatch(f"does not fit: {name} {ANOTHER.format(differ)}")
        weights = [weight for group in obj.param_groups for weight in group["params"]]
        tensors |= {f"{name}/state/{i}": weight for i, weight in enumerate(weights)}
    similar = {key: tensors.get(key, tensors.get(key.rpartition("/")[0])) for key in saved}
    return {key: _like(similar[key], item) for key, item in saved.items()}


def _like(tensor, item) -> torch.Tensor:
    """An empty one, where that tensor is and sharded as it is, if it has its shape or a number per row."""
    if tensor is not None and (*tensor.shape[:-1], 1) == (*item.size,):
        tensor = tensor[..., :1]
    if tensor is None or tensor.shape != item.size:
        return torch.empty(item.size, dtype=item.properties.dtype)
    return torch.empty_like(tensor, dtype=item.properties.dtype, requires_grad=False)


def restore_state(obj, record: dict, targets: dict) -> None:
    """Puts back what `collect_state` took, once the targets are filled; modules are filled already."""
    if isinstance(obj, Module):
        return
    obj, state = unwrapped(obj), unflatten(record["state"], targets)
    if isinstance(obj, Optimizer):
        groups = obj.state_dict()["param_groups"]
        for group, saved in zip(groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in OF_THE_DEVICE})
        state = {"state": state["state"], "param_groups": groups}
    obj.load_state_dict(state)
