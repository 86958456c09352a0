"""Everything that a long run will need, done once before it starts; and what an edit forgot to keep.

A run that fails at its last line, over a missing folder or a typo, has cost days; this costs seconds.
"""

import contextlib
import shutil
import types
from collections import deque

import numpy as np
import torch

from utils.state.checkpoint import Checkpoints
from utils.state.training_state import digest, freeze, reshard

PLAIN = (int, float, str, bool, type(None))


@contextlib.contextmanager
def rehearsal(accelerator, model, keep: dict, checkpoints, watch):
    """Inside the block the run may update, evaluate and complete; afterwards the model, all that is kept and
    the random states are as they were, bit for bit.

    A real checkpoint is written before and read back after, and what comes back is compared; so saving and
    loading are rehearsed too. Yields its folder. Raises RuntimeError where they differ, and what watch.check
    raises. checkpoints: those of the run; the memory for its background saves is taken.
    """
    folder = checkpoints.folder.parent / ".preflight"
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    accelerator.wait_for_everyone()
    rehearsed = Checkpoints(accelerator, folder, save_total_limit=1, background=False)
    before = _digests(model, keep)
    rehearsed.save(0, model, keep, extra={}, final=True)
    yield folder
    model.zero_grad(set_to_none=True)
    watch.check()
    checkpoints.reserve(model, keep)  # before the optimizer's state is gone again
    rehearsed.load("auto", model, keep)
    after = _digests(model, keep)
    if different := [name for name in before if before[name] != after[name]]:
        raise RuntimeError(
            f"preflight: what was written to a checkpoint and read back differs from what was saved: "
            f"{', '.join(different)}"
        )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)


def _digests(model, keep: dict) -> dict[str, str]:
    reshard(model)
    return {name: digest(*freeze(thing, model)) for name, thing in {"model": model, **keep}.items()}


class Watch:
    """Notices what a function changes and nobody keeps: objects with a state_dict, tensors, counters.

    It looks at what the function closes over or names in its script, at the functions of the script that it
    calls, and inside plain objects and containers. Made before the function runs; `check` comes after.
    """

    def __init__(self, function, model, keep: dict, known=()):
        self.model, self.function = model, function
        mine = {id(thing) for thing in (model, *model.modules(), *keep.values(), *known)}
        mine |= {id(thing.optimizer) for thing in keep.values() if hasattr(thing, "optimizer")}
        mine |= {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.known = mine
        self.before = self._look()

    def check(self) -> None:
        """ValueError that names what has changed since."""
        now = self._look()
        changed = [name for name in now if self.before.get(name) != now[name]]
        if changed:
            names = ", ".join(changed)
            first = changed[0].split(".")[0].split("[")[0]
            raise ValueError(
                f"keep: {self.function.__name__} changes {names}, and nobody keeps it: a resumed run would "
                f"begin it anew. Hand it over, keep=dict(..., {first}={first}); it needs state_dict and "
                "load_state_dict."
            )

    def _look(self) -> dict:
        found = {}
        for name, value in closed_over(self.function).items():
            self._add(found, name, value, depth=0)
        return found

    def _add(self, found: dict, name: str, value, depth: int) -> None:
        value = getattr(value, "__self__", value) if isinstance(value, types.MethodType) else value
        if id(value) in self.known or depth > 3:
            return
        if isinstance(value, PLAIN):
            found[name] = repr(value)
        elif isinstance(value, torch.Tensor | np.ndarray):
            found[name] = digest({}, {"": torch.as_tensor(value).detach()})
        elif isinstance(value, set | frozenset):
            found[name] = str(sorted(map(repr, value)))
        elif isinstance(value, list | tuple | deque | dict):
            found[name] = f"{len(value)} items"
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                self._add(found, f"{name}[{key!r}]", item, depth + 1)
        elif hasattr(value, "state_dict") and not isinstance(value, type):
            with contextlib.suppress(TypeError, ValueError):  # it holds what cannot be compared, nor be kept
                found[name] = digest(*freeze(value, self.model))
        elif isinstance(value, types.SimpleNamespace) or type(value).__module__ == self.function.__module__:
            for key, item in vars(value).items() if hasattr(value, "__dict__") else ():
                self._add(found, f"{name}.{key}", item, depth + 1)


def closed_over(function, seen=None) -> dict:
    """{name: value} of what a function of a script closes over or takes from its module, and the functions of
    the script that it calls.
    """
    seen = {function} if seen is None else seen
    names = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    values = {}
    for name, cell in names.items():
        with contextlib.suppress(ValueError):  # not yet bound
            values[name] = cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            values[name] = function.__globals__[name]
    for value in list(values.values()):
        ours = isinstance(value, types.FunctionType) and value.__module__ == function.__module__
        if ours and value not in seen:
            seen.add(value)
            values = closed_over(value, seen) | values
    return {name: value for name, value in values.items() if not isinstance(value, types.ModuleType | type)}
