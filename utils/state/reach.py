"""Everything that a function of the script can reach, with a digest of each part that shows changes."""

import inspect
import itertools
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, MethodType, SimpleNamespace

import numpy as np
import torch
from transformers import PretrainedConfig

from utils.state.training_state import bare_optimizer, checksum, clean_name, collect_state, digest

DIGESTS = [  # of objects of these types
    ((int, float, str, type(None), itertools.count), repr),
    ((np.ndarray, random.Random, np.random.Generator, np.random.RandomState), pickle.dumps),
    (torch.Tensor, checksum),
    ((dict, set, frozenset), lambda keys: sorted(map(repr, keys))),
    ((list, tuple, deque), len),
]
# Attributes that torch sets on modules and optimizers: they are saved, or hold for a moment only.
BY_TORCH = {*vars(torch.nn.Module()), *vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))}
BY_TORCH |= {"found_inf", "grad_scale", "step", "_opt_called", "_step_count"}


def reach(roots, known: set[int], model, prefix: str = "") -> tuple[dict, dict]:
    """({name: digests}, {weight: name}) of everything behind `roots`, (name, value) pairs: what the user's
    functions take from outside, attributes of the user's objects, items of containers, named like these.

    known: ids of objects to skip; prefix: of the names behind functions."""
    digests, weights, seen = {}, {}, set(known)

    def walk(name, value):
        value = value.__self__ if isinstance(value, MethodType) else value
        if id(value) in seen or isinstance(value, PretrainedConfig):  # which saving completes
            return
        found = next((of(value) for types, of in DIGESTS if isinstance(value, types)), None)
        inner = []
        if isinstance(value, FunctionType):
            taken = taken_from_outside(value) if of_the_user(value) else {}
            inner = [(prefix + key, item) for key, item in taken.items()]
        elif isinstance(value, dict):
            inner = [(name, value[key]) for key in sorted(value, key=repr)]
        elif isinstance(value, list | tuple | deque):
            inner = [(name, item) for item in value]
        elif isinstance(value, torch.Tensor):
            weights[value] = name
        elif isinstance(value, torch.Generator) or hasattr(type(value), "state_dict"):
            with suppress(TypeError, ValueError):  # its state can be neither compared nor kept
                found = digest(*collect_state(value, model))
            if isinstance(value, torch.nn.Module):
                weights.update((weight, path) for path, weight in value.named_parameters(name))
        elif found is None and isinstance(value, Iterator) and not hasattr(value, "fileno"):
            found = object()  # equal to nothing: its position can be neither compared nor restored
        elif found is None and (isinstance(value, SimpleNamespace) or of_the_user(value, or_ours=True)):
            inner = [(f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items()]
        if found is not None:
            digests.setdefault(name, []).append(found)
        seen.update([id(value)] if inner else [])
        for pair in inner:
            walk(*pair)

    for name, value in roots:
        walk(name, value)
    return digests, weights


def taken_from_outside(function) -> dict:
    """{name: value} of its globals, closure, defaults and attributes whose names do not begin with _."""
    code, around = function.__code__, function.__globals__
    values = {name: around[name] for name in code.co_names if name in around}
    values |= {name: argument.default for name, argument in inspect.signature(function).parameters.items()}
    values |= {f"{function.__name__}.{name}": value for name, value in vars(function).items()}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not bound yet
            values[name] = cell.cell_contents
    return {name: value for name, value in values.items() if name[0] != "_"}


def attributes(name: str, thing):
    """(name, value) of what load_state_dict may not restore of a kept thing: attributes of the user's objects
    and classes that torch does not know, and all buffers that are not saved."""
    thing = bare_optimizer(thing) or thing
    for path, part in thing.named_modules() if isinstance(thing, torch.nn.Module) else [("", thing)]:
        values = {**vars(type(part)), **getattr(part, "__dict__", {})} if of_the_user(part) else {}
        values |= {key: part._buffers[key] for key in getattr(part, "_non_persistent_buffers_set", ())}
        for key in [key for key in values if key not in BY_TORCH]:
            yield f"{name}.{clean_name(f'{path}.{key}').lstrip('.')}", values[key]


def of_the_user(value, or_ours: bool = False) -> bool:
    """Whether a function, class or object is neither Python's, nor a package's, nor (unless or_ours) ours."""
    module = (value if isinstance(value, FunctionType | type) else type(value)).__module__ or ""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    known = sys.stdlib_module_names | (set() if or_ours else {"data", "utils"})
    return "-packages" not in file and module.split(".")[0] not in known
