"""Whether there is room: what a run's checkpoints take on the disk, what is free in memory."""

import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from utils.state.folders import list_checkpoints
from utils.state.training_state import bare_optimizer, freeze


def thing_bytes(thing, model) -> int:
    """Bytes of its tensors. An optimizer that has made no step yet counts with AdamW's two moments."""
    tensors = [*freeze(thing, model)[1].values()]
    if not tensors and (optimizer := bare_optimizer(thing)):
        tensors = 2 * [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return sum(tensor.nbytes for tensor in tensors)


def disk_space(output_dir, model, keep: dict, save_total_limit: int, models=1) -> str:
    """How much the checkpoints of a run need, and how much is free. ValueError where that is less.

    While a checkpoint is written, save_total_limit complete ones are there too; of the models for users one
    at a time is replaced by a new file. What the run replaces is as good as free."""
    weights, count, folder = thing_bytes(model, model), save_total_limit + 1, Path(output_dir).absolute()
    each = weights + sum(thing_bytes(thing, model) for thing in keep.values())
    needed = each * count + (models + 1) * weights
    exported = sum(any(place.glob("model*.safetensors")) for place in (folder, folder / "best"))
    replaced = each * len(list_checkpoints(folder / "checkpoints")) + weights * exported
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(existing).free + replaced
    kept = "the model" if models == 1 else f"{models} models"
    need = f"{count} checkpoints of {size_text(each)} and {kept} need {size_text(needed)} in {output_dir}"
    if needed > free:
        raise ValueError(f"output_dir: {need}, but {size_text(free)} are free: choose another output_dir or "
                         "lower save_total_limit.")
    return f"{need}; {size_text(free)} are free"


def available_memory() -> int:
    """Bytes that can be taken now: of the machine, or of this container (cgroup v2)."""
    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())  # "max" without a limit
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


def size_text(count) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
