"""What a script's function can reach: a digest of each part tells whether it has changed."""

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

from utils.state.training_state import bare_optimizer, checksum, clean_name, digest, freeze

SHOWN = int, float, str, type(None), itertools.count  # repr shows all that they hold
PICKLED = np.ndarray, random.Random, np.random.Generator, np.random.RandomState
# Attributes that torch itself gives to modules and optimizers: saved as such, or of the moment.
BY_TORCH = {*vars(torch.nn.Module()), *vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))}
BY_TORCH |= {"found_inf", "grad_scale", "step", "_opt_called", "_step_count"}


def reach(roots, known: set[int], model) -> tuple[dict, dict]:
    """{name: digest} and {weight: name} of all behind `roots`, (name, value) pairs: items of containers, what
    the user's functions take from outside, attributes of the user's objects. known: ids to pass by."""
    digests, weights, seen = {}, {}, {*known}

    def walk(name, value):
        value, inner = value.__self__ if isinstance(value, MethodType) else value, {}
        if id(value) in seen or isinstance(value, PretrainedConfig):  # which saving completes
            return
        if isinstance(value, FunctionType):
            name, inner = "", taken_from_outside(value) if of_the_user(value) else {}
        elif isinstance(value, list | tuple | deque | dict):
            digests[name] = len(value)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            inner = {f"[{key!r}]": item for key, item in items}
        elif isinstance(value, set | frozenset):
            digests[name] = sorted(map(repr, value))
        elif isinstance(value, SHOWN):
            digests[name] = repr(value)
        elif isinstance(value, PICKLED):
            digests[name] = pickle.dumps(value)
        elif isinstance(value, torch.Tensor):
            digests[name], weights[value] = checksum(value), name
        elif isinstance(value, torch.Generator) or hasattr(type(value), "state_dict"):
            with suppress(TypeError, ValueError):  # it holds what cannot be compared, nor be kept
                digests[name] = digest(*freeze(value, model))
            if isinstance(value, torch.nn.Module):
                weights.update((weight, path) for path, weight in value.named_parameters(name))
        elif isinstance(value, Iterator) and not hasattr(value, "fileno"):
            digests[name] = object()  # equal to nothing: where it is nobody can tell, nor put back
        elif isinstance(value, SimpleNamespace) or of_the_user(value, or_ours=True):
            inner = {f".{key}": item for key, item in getattr(value, "__dict__", {}).items()}
        seen.update({id(value)} if inner else ())
        for key, item in inner.items():
            walk(name + key, item)

    for name, value in roots:
        walk(name, value)
    return digests, weights


def taken_from_outside(function) -> dict:
    """{name: value} of its globals, closure, defaults, attributes; without names that begin with _."""
    code, around = function.__code__, function.__globals__
    values = {name: around[name] for name in code.co_names if name in around}
    values |= {name: argument.default for name, argument in inspect.signature(function).parameters.items()}
    values |= {f"{function.__name__}.{name}": value for name, value in vars(function).items()}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not yet bound
            values[name] = cell.cell_contents
    return {name: value for name, value in values.items() if name[0] != "_"}


def attributes(name: str, thing):
    """(name, value) of what is kept and load_state_dict may not restore: attributes of the user's objects and
    classes that torch does not know, and buffers that are not saved."""
    thing = bare_optimizer(thing) or thing
    for path, part in thing.named_modules() if isinstance(thing, torch.nn.Module) else [("", thing)]:
        values = {**vars(type(part)), **getattr(part, "__dict__", {})} if of_the_user(part) else {}
        values |= {key: part._buffers[key] for key in values.get("_non_persistent_buffers_set", ())}
        for key in [key for key in values if key not in BY_TORCH]:
            yield f"{name}.{clean_name(f'{path}.{key}').lstrip('.')}", values[key]


def of_the_user(value, or_ours: bool = False) -> bool:
    """Whether a function, a class, or an object's class comes neither with Python, nor from a package, nor
    (but with or_ours) from this project."""
    module = (value if isinstance(value, FunctionType | type) else type(value)).__module__ or ""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    known = sys.stdlib_module_names | (set() if or_ours else {"data", "utils"})
    return "-packages" not in file and module.split(".")[0] not in known
