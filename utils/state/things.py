"""What a checkpoint holds of a module, an optimizer, a generator or anything with state_dict, and how it is
put back. The model's tensors have transformers' names; all others begin with their thing's name and "/"."""

import re

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.optim import Optimizer

from utils.state.folders import Unfit
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


def bare(thing):
    """Without accelerate's wrapper of optimizers."""
    while isinstance(thing, AcceleratedOptimizer):
        thing = thing.optimizer
    return thing


def collect_state(name: str, thing, model) -> tuple[dict, dict]:
    """(what state.json holds of it, {name: tensor}). Nothing is copied."""
    if thing is model:  # a loss module, whose `lm` is transformers' model
        tensors = named_tensors(thing)
        short = {key: key.removeprefix("lm.") for key in tensors}
        return {}, {key if short[key] in tensors else short[key]: tensor for key, tensor in tensors.items()}
    if isinstance(thing, Module):
        return {}, {f"{name}/{key}": tensor for key, tensor in named_tensors(thing).items()}
    thing, tensors = bare(thing), {}
    state = {"state": thing.get_state()} if isinstance(thing, torch.Generator) else thing.state_dict()
    record = {"state": flatten(state, tensors, name)}
    if isinstance(thing, Optimizer):
        named = {weight: clean_name(key) for key, weight in model.named_parameters()}
        record["class"] = type(thing).__name__
        record["parameters"] = [[named.get(weight, "not of the model") for weight in group["params"]]
                                for group in thing.param_groups]  # fmt: skip
    return record, tensors


def find_targets(name: str, thing, record: dict, there: dict, model) -> dict:
    """{name: tensor to be filled} for a thing that a checkpoint holds as `record`. there: {name: description}
    of all tensors of the checkpoint. Raises Unfit if they are not those of the thing."""
    now, here = collect_state(name, thing, model)
    saved = {key: item for key, item in there.items() if key.startswith(f"{name}/")}
    if isinstance(thing, Module):
        if thing is model:
            saved = {key: item for key, item in there.items() if "/" not in key}
        old = {key: f"{item.properties.dtype} {[*item.size]}" for key, item in saved.items()}
        new = {key: f"{tensor.dtype} {[*tensor.shape]}" for key, tensor in here.items()}
        if other := [key for key in sorted(old | new) if old.get(key) != new.get(key)]:
            told = (f"{key}: {old.get(key, 'none')} there, {new.get(key, 'none')} here" for key in other[:3])
            differ = f"{len(other)} tensors differ: {'; '.join(told)}".replace("torch.", "")
            raise Unfit(f"does not fit: {name} {ANOTHER.format(differ)}")
        return here
    if isinstance(thing := bare(thing), Optimizer):
        if any(record[key] != now[key] for key in ("class", "parameters")):
            sizes = [" + ".join(str(len(group)) for group in each["parameters"]) for each in (record, now)]
            differ = f"{record['class']} of {sizes[0]} tensors, here {now['class']} of {sizes[1]}, or renamed"
            raise Unfit(f"does not fit: {name} {ANOTHER.format(differ)}")
        weights = [weight for group in thing.param_groups for weight in group["params"]]
        here |= {f"{name}/state/{i}": weight for i, weight in enumerate(weights)}
    return {key: _like(here.get(key, here.get(key.rpartition("/")[0])), item) for key, item in saved.items()}


def _like(tensor, item) -> torch.Tensor:
    """An empty one, where that tensor is and sharded as it is, if it has its shape or a number per row."""
    if tensor is not None and (*tensor.shape[:-1], 1) == (*item.size,):
        tensor = tensor[..., :1]
    if tensor is None or tensor.shape != item.size:
        return torch.empty(item.size, dtype=item.properties.dtype)
    return torch.empty_like(tensor, dtype=item.properties.dtype, requires_grad=False)


def restore_state(thing, record: dict, targets: dict) -> None:
    """Puts back what `collect_state` took, once the targets are filled; modules are filled already."""
    if isinstance(thing, Module):
        return
    thing, state = bare(thing), unflatten(record["state"], targets)
    if isinstance(thing, torch.Generator):
        return thing.set_state(state["state"])
    if isinstance(thing, Optimizer):
        groups = thing.state_dict()["param_groups"]
        for group, saved in zip(groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in OF_THE_DEVICE})
        state = {"state": state["state"], "param_groups": groups}
    thing.load_state_dict(state)
