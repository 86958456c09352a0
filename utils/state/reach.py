"""What a function of the script can reach, and digests of it: whether anything of that has changed."""

import contextlib
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from io import IOBase

import numpy as np
import torch
import xxhash
from transformers import PretrainedConfig

from utils.state.training_state import bare_optimizer, digest, freeze

# What differs when a value of these types has changed.
CONTENT = (
    ((int, float, str, bool, type(None), itertools.count), repr),
    (torch.Tensor, lambda tensor: digest({}, {"": tensor.detach()})),
    (np.ndarray, lambda array: xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).view(np.uint8).data)),
    (torch.Generator, lambda generator: digest({}, {"": generator.get_state()})),
    (random.Random, lambda generator: generator.getstate()),
    (np.random.Generator, lambda generator: repr(generator.bit_generator.state)),
    (np.random.RandomState, lambda generator: repr(generator.get_state())),
    (PretrainedConfig, lambda config: ""),  # saving completes it
    ((set, frozenset), lambda values: sorted(map(repr, values))),
)
# Attributes that torch itself gives to modules and optimizers: saved as such, or of the moment.
BY_TORCH = {*vars(torch.nn.Module()), *vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))}
BY_TORCH |= {"found_inf", "grad_scale", "step", "_opt_called", "_step_count"}


def digests(roots: list, kept: dict, known: set, model) -> dict:
    """{(whether it is part of something kept, name): digest}

    roots: (name, value) each, looked into where they are containers or of no library's classes. Of kept
    things only attributes of the user's own classes are looked at: the rest is restored with their state.
    known: ids of objects that are passed by."""
    found = {}

    def walk(of_kept, name, value, depth=0):
        value = getattr(value, "__self__", value) if isinstance(value, types.MethodType) else value
        if id(value) in known and not of_kept or depth > 3:
            return
        inner = {}
        if of_kept and not depth:  # its state is restored, attributes that torch does not know may not be
            inner = _attributes(value) if of_the_user(value) else {}
        elif content := next((content for kind, content in CONTENT if isinstance(value, kind)), None):
            found[of_kept, name] = content(value)
        elif isinstance(value, list | tuple | deque | dict):
            found[of_kept, name] = f"{len(value)} items"
            inner = value if isinstance(value, dict) else dict(enumerate(value))
            inner = {f"[{key!r}]": item for key, item in inner.items()}
        elif hasattr(value, "state_dict") and not isinstance(value, type):
            with contextlib.suppress(TypeError, ValueError):  # it holds what cannot be compared, nor be kept
                found[of_kept, name] = digest(*freeze(value, model))
        elif isinstance(value, Iterator) and not isinstance(value, IOBase):
            found[of_kept, name] = object()  # where it is nobody can tell, nor put back
        elif isinstance(value, types.SimpleNamespace) or of_the_user(value, or_ours=not of_kept):
            inner = {f".{key}": item for key, item in getattr(value, "__dict__", {}).items()}
        for key, item in inner.items():
            walk(of_kept, name + key, item, depth + 1)

    for name, value in roots:
        walk(False, name, value)
    for name, thing in kept.items():
        module = isinstance(thing, torch.nn.Module)
        for part in thing.modules() if module else [bare_optimizer(thing) or thing]:
            walk(True, name, part)
    return found


def _attributes(thing) -> dict:
    """{.name: value} of an object, its class (where a counter may begin), its buffers that are not saved."""
    values = {**vars(type(thing)), **getattr(thing, "__dict__", {})}
    values |= {key: values["_buffers"].get(key) for key in values.pop("_non_persistent_buffers_set", ())}
    return {f".{key}": value for key, value in values.items() if key not in BY_TORCH}


def of_the_user(value, or_ours: bool = False) -> bool:
    """Whether a function, a class or an object's class comes neither with Python, nor from a package, nor
    (but with or_ours) from this project."""
    module = value.__module__ if isinstance(value, types.FunctionType | type) else type(value).__module__
    file, first = getattr(sys.modules.get(module), "__file__", None) or "", (module or "").split(".")[0]
    known = {*sys.stdlib_module_names} - {"__main__"} | (set() if or_ours else {"data", "utils"})
    return "site-packages" not in file and "dist-packages" not in file and first not in known


def closed_over(function, seen=None) -> dict:
    """{name: value} of what a script's function, and those of the user's that it calls, take from outside."""
    seen = {function} if seen is None else seen
    found, code = function.__globals__, function.__code__
    values = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not yet bound
            values[name] = cell.cell_contents
    values |= {name: found[name] for name in code.co_names if name in found}
    arguments, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
    values |= dict(zip(arguments[::-1], defaults[::-1], strict=False)) | (function.__kwdefaults__ or {})
    values |= {f"{function.__name__}.{name}": value for name, value in vars(function).items()}
    for value in list(values.values()):
        if isinstance(value, types.FunctionType) and of_the_user(value) and value not in seen:
            seen.add(value)
            values = closed_over(value, seen) | values
    return {name: value for name, value in values.items() if name[0] != "_" and not (
        isinstance(value, types.ModuleType) or isinstance(value, type) and not of_the_user(value))}
