"""Everything that a long run will need, done once before it starts; and what an edit forgot to keep.

A run that fails at its last line, over a missing folder or a typo, has cost days; this costs seconds.
"""

import contextlib
import itertools
import random
import shutil
import sys
import types
from collections import deque
from collections.abc import Iterator
from io import IOBase

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from utils.state.checkpoint import Checkpoints
from utils.state.training_state import bare_optimizer, digest, freeze, gather_bytes, reshard

# What differs when a value of these types has changed.
CONTENT = (
    ((int, float, str, bool, type(None), itertools.count), repr),
    (np.ndarray, lambda array: xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).view(np.uint8).data)),
    (torch.Generator, lambda generator: generator.get_state().tolist()),
    (random.Random, lambda generator: generator.getstate()),
    (np.random.Generator, lambda generator: repr(generator.bit_generator.state)),
    (np.random.RandomState, lambda generator: repr(generator.get_state())),
    (PretrainedConfig, lambda config: ""),  # saving completes it
    ((set, frozenset), lambda values: sorted(map(repr, values))),
)
# Attributes that torch itself gives to modules and optimizers: saved as such, or of the moment.
BY_TORCH = {*vars(torch.nn.Module()), *vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))}
BY_TORCH |= {"found_inf", "grad_scale", "step", "_opt_called", "_step_count"}


@contextlib.contextmanager
def rehearsal(accelerator, model, keep: dict, checkpoints, watch):
    """Inside the block the run may update, evaluate and complete; afterwards the model, all that is kept and
    the random states are as they were, bit for bit.

    A real checkpoint is written before and read back after; RuntimeError where they differ, and what `watch`
    raises. Yields its folder. The memory for background saves of `checkpoints` is taken."""
    folder = checkpoints.folder.parent / ".preflight"
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    accelerator.wait_for_everyone()
    rehearsed = Checkpoints(accelerator, folder)
    before = _digests(model, keep)
    rehearsed.save(0, model, keep, extra={}, final=True)
    yield folder
    watch.check()
    model.zero_grad(set_to_none=True)
    checkpoints.reserve(model, keep)  # before the optimizer's state is gone again
    rehearsed.load("auto", model, keep)
    watch.check_restored()
    after = _digests(model, keep)
    if different := [name for name in before if before[name] != after[name]]:
        told = "preflight: what was written to a checkpoint and read back differs from what was saved"
        raise RuntimeError(f"{told}: {', '.join(different)}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)


def _digests(model, keep: dict) -> dict[str, str]:
    reshard(model)
    return {name: digest(*freeze(thing, model)) for name, thing in {"model": model, **keep}.items()}


class Watch:
    """Notices what a function changes and nobody keeps: objects with a state_dict, tensors, counters,
    generators of random numbers; and what is kept and not put back: attributes of classes of the user's own.

    It looks at what `closed_over` finds, from the function, those that the model's modules hold (a loss) and
    collate, which makes batches; and inside containers and objects that no library has made. Nothing of a
    device is read: a tensor counts its changes. Made before the function runs."""

    def __init__(self, function, model, keep: dict, known=(), collate=None):
        self.function, self.model, self.collate = function, model, collate
        self.kept, modules = {"model": model, **keep}, [*model.modules()]
        mine = [*known, *self.kept.values(), *modules, *model.parameters(), *model.buffers()]
        mine += [thing.optimizer for thing in keep.values() if hasattr(thing, "optimizer")]
        own = [thing for thing in keep.values() if isinstance(thing, torch.nn.Module)]
        mine += [parameter for thing in own for parameter in thing.parameters()]
        self.known = {id(thing) for thing in mine}
        held = [value for module in modules for value in vars(module).values()]
        losses = [value for value in held if isinstance(value, types.FunctionType) and _is_of_the_user(value)]
        self.functions = [function, *losses]
        self.optimizers = {name: found for name, thing in keep.items() if (found := bare_optimizer(thing))}
        self.weights = {name: self._weights(name) for name in self.optimizers}
        self.before, self.inside = self._look(), self._look_inside()
        self.told = set()

    def changed(self) -> str:
        """What has changed since, nobody keeps, and was not told before, as a sentence; "" for nothing."""
        now = self._look()
        changed = _roots(name for name in now if self.before.get(name) != now[name])
        names = [name for name in changed if name not in self.told]
        if not names:
            return ""
        self.told.update(names)
        if names[0].startswith("data.collate"):
            return (f"{_listed(names)} changes, and batches are made ahead of the step: a resumed run would "
                    "make others. Let it follow from a batch's position, epoch and row, as in "
                    "data/masking.py.")  # fmt: skip
        first = names[0].split(".")[0]
        return (f"keep: {self.function.__name__} changes {_listed(names)}, and nobody keeps it: a resumed "
                f"run would begin it anew. Hand it over, keep=dict(..., {first}={first}), as an object with "
                "state_dict and load_state_dict, or let its name begin with _ where a resume may forget it.")

    def check(self) -> None:
        """ValueError of `changed`, and where an update leaves gradients, which no checkpoint holds."""
        weights = {}  # by any name; the model's own first
        for name, thing in {"": self.kept["model"], **closed_over(self.function)}.items():
            parts = thing.named_parameters(name) if isinstance(thing, torch.nn.Module) else [(name, thing)]
            weights |= {weight: path for path, weight in parts if isinstance(weight, torch.nn.Parameter)
                        and weight not in weights}
        left = [name for weight, name in weights.items() if weight.grad is not None and weight.grad.any()]
        if left:
            raise ValueError(f"{self.function.__name__} leaves gradients of {_listed(left)}, which a resumed "
                             "run would not have: end it with zero_grad() of every optimizer, and let each "
                             "of these weights be in one, or need no gradient.")
        if told := self.changed():
            raise ValueError(told)

    def check_optimizers(self, accelerator) -> None:
        """Tells which kept optimizers have moved no weight. ValueError where weights outside the model have
        moved apart on several processes."""
        weights = {id(weight) for weight in self.model.parameters()}
        for name, optimizer in self.optimizers.items():
            if self._weights(name) == self.weights[name]:
                accelerator.print(f"warning: {name} has moved no weight: it makes no step yet, or nothing "
                                  "that is trained depends on them.")  # fmt: skip
            own = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in weights]
            found = digest({}, {str(i): weight.detach() for i, weight in enumerate(own)}).encode()
            if len(set(gather_bytes(accelerator, found))) > 1:
                raise ValueError(f"keep: weights of {name} outside the model differ between processes, as "
                                 "nobody exchanges their gradients. Before its step, for each of them: "
                                 'weight.grad.copy_(accelerator.reduce(weight.grad, "mean")).')  # fmt: skip

    def _weights(self, name: str) -> list:
        groups = self.optimizers[name].param_groups
        return [_version(weight) for group in groups for weight in group["params"]]

    def check_restored(self) -> None:
        """ValueError where something kept was put back and an attribute of it is not as it was."""
        now = self._look_inside()
        if names := _roots(name for name in self.inside if self.inside[name] != now.get(name)):
            raise ValueError(f"keep: {self.function.__name__} changes {_listed(names)}, and load_state_dict "
                             "does not put it back: let state_dict hold it (of a module: as a persistent "
                             "buffer), or a resume differs; what is only for the moment, leave as it was "
                             "found, also after evaluations.")  # fmt: skip

    def _look(self) -> dict:
        found = {}
        for function in self.functions:
            for name, value in closed_over(function).items():
                self._add(found, name, value)
        collate = self.collate
        inside = closed_over(collate) if isinstance(collate, types.FunctionType) else {"": collate}
        for name, value in inside.items():
            self._add(found, f"data.collate.{name}".rstrip("."), value)
        return found

    def _look_inside(self) -> dict:
        """Attributes of kept things and modules whose classes are the user's own: values, not versions."""
        found = {}
        for name, thing in self.kept.items():
            module = isinstance(thing, torch.nn.Module)
            parts = thing.modules() if module else [bare_optimizer(thing) or thing]
            for part in filter(_is_of_the_user, parts):
                values = {**vars(type(part)), **getattr(part, "__dict__", {})}  # a counter may begin there
                stored = values.pop("_non_persistent_buffers_set", set())
                values |= {key: values.get("_buffers", {}).get(key) for key in stored}
                for key, value in values.items():
                    if key not in BY_TORCH:
                        self._add(found, f"{name}.{key}", value, 1, read=True)
        return found

    def _add(self, found: dict, name: str, value, depth: int = 0, read: bool = False) -> None:
        value = getattr(value, "__self__", value) if isinstance(value, types.MethodType) else value
        if id(value) in self.known and not read or depth > 3:
            return
        if content := next((content for kind, content in CONTENT if isinstance(value, kind)), None):
            found[name] = content(value)
        elif isinstance(value, torch.Tensor):
            found[name] = digest({}, {"": value.detach()}) if read else _version(value)
        elif isinstance(value, list | tuple | deque | dict):
            found[name] = f"{len(value)} items"
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self._add(found, f"{name}[{key!r}]", item, depth + 1, read)
        elif hasattr(value, "state_dict") and not isinstance(value, type):
            with contextlib.suppress(TypeError, ValueError):  # it holds what cannot be compared, nor be kept
                tree, tensors = freeze(value, self.model)
                versions = [_version(tensor) for tensor in tensors.values()]
                found[name] = digest(tree, tensors) if read else repr((tree, versions))
        elif isinstance(value, Iterator) and not isinstance(value, IOBase):
            found[name] = object()  # where it is nobody can tell, nor put back
        elif isinstance(value, types.SimpleNamespace) or _is_of_the_user(value, or_ours=not read):
            for key, item in getattr(value, "__dict__", {}).items():
                self._add(found, f"{name}.{key}", item, depth + 1, read)


def _version(tensor) -> tuple:
    """What differs when a tensor has changed or is another one; nothing of it is read."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    try:
        return local.data_ptr(), local._version
    except RuntimeError:  # XLA has no address, inference tensors count nothing
        return (id(tensor),)


def _is_of_the_user(value, or_ours: bool = False) -> bool:
    """Whether a function, a class or an object's class comes neither with Python, nor from a package, nor
    (but with or_ours) from this project."""
    module = value.__module__ if isinstance(value, types.FunctionType | type) else type(value).__module__
    file, first = getattr(sys.modules.get(module), "__file__", None) or "", (module or "").split(".")[0]
    known = {*sys.stdlib_module_names} - {"__main__"} | (set() if or_ours else {"data", "utils"})
    return "site-packages" not in file and "dist-packages" not in file and first not in known


def _roots(names) -> list[str]:
    """Without what stands in brackets, each once."""
    return list(dict.fromkeys(name.split("[")[0] for name in names))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


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
        if isinstance(value, types.FunctionType) and _is_of_the_user(value) and value not in seen:
            seen.add(value)
            values = closed_over(value, seen) | values
    return {name: value for name, value in values.items() if name[0] != "_" and not (
        isinstance(value, types.ModuleType) or isinstance(value, type) and not _is_of_the_user(value))}
