"""Checkpoint folders: which there are, which one is meant, whether it is whole, whether there is room."""

import json
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from utils.io.files import find_problem, retire
from utils.state.files import tensor_problem
from utils.state.training_state import bare_optimizer, freeze

logger = logging.getLogger(__name__)

FORMAT = 2  # of a checkpoint: raise it when older ones cannot be continued


def list_checkpoints(folder) -> list[Path]:
    """Complete checkpoints by their names, oldest first; nothing is verified."""
    return sorted(Path(folder).glob("step-" + "[0-9]" * 8))


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def outdate(made: list[Path], step: int) -> None:
    """Set aside, as replaced-*, the checkpoints or milestones after the step from which a run goes on."""
    newer = [path for path in made if step_of(path) > step]
    for path in newer:
        retire(path)
    if newer:
        logger.warning("newer than this start, renamed to replaced-*: %s", ", ".join(map(str, newer)))


def candidates(folder, resume_from: str) -> list[Path]:
    """What resume_from may mean, the first choice first; nothing is verified."""
    made = list_checkpoints(folder)[::-1]
    if resume_from in ("auto", "none"):
        return made if resume_from == "auto" else []
    origin = origin_path(folder, resume_from)
    return [path for path in made if origin in _peek(path).get("origins", [])] + [Path(resume_from)]


def origin_path(folder, resume_from: str) -> str:
    """The same for each way to write the path, also where both have moved together."""
    return os.path.relpath(os.path.realpath(resume_from), os.path.realpath(folder))


def run_name(checkpoint: Path) -> str:
    """The name of the run that made a checkpoint, as it may be printed: nothing of the path above it."""
    place = checkpoint.resolve()
    name = (place.parents[1] if place.parent.name == "checkpoints" else place).name
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def find_damage(folder: Path) -> str:
    """What is wrong with a checkpoint, "" for nothing: checksums; names, shapes and types of all tensors."""
    if problem := find_problem(folder):
        return problem
    try:
        state = json.loads((folder / "state.json").read_bytes())
        if isinstance(state, dict) and state.get("format") != FORMAT:
            return ""  # read_state says what to do
        sealed = json.loads((folder / "manifest.json").read_bytes())["files"]
        kinds = {"step": int, "keep": dict, "classes": dict, "extra": object}
        if "state.json" not in sealed or not all(isinstance(state[key], kinds[key]) for key in kinds):
            return "state.json: not that of a checkpoint"
        problems = (tensor_problem(folder, name, tree, sealed) for name, tree in state["keep"].items())
        return next(filter(None, problems), "")
    except Exception as error:  # of a file whose bytes are as they were sealed, and say something else
        return f"state.json: not readable ({type(error).__name__}: {error})"


def read_state(folder: Path) -> dict:
    """state.json of a verified checkpoint. ValueError where another version of the project has made it."""
    state = json.loads((folder / "state.json").read_text())
    if state.get("format") != FORMAT:
        raise ValueError(f"{folder} was made by another version of this project: continue it with that "
                         "version, or start anew in another output_dir (model_name_or_path takes its weights "
                         "along)")
    return state


def newest_extra(output_dir, resume_from: str) -> dict:
    """The extra of the checkpoint that a start would continue from, {} without one; nothing is verified."""
    with suppress(OSError, IndexError):
        extra = _peek(candidates(Path(output_dir) / "checkpoints", resume_from)[0]).get("extra")
        if isinstance(extra, dict) and all(isinstance(extra.get(key), dict) for key in ("settings", "data")):
            return extra
    return {}


def _peek(folder: Path) -> dict:
    """state.json that nobody has verified; {} where it cannot be read."""
    with suppress(OSError, ValueError):
        state = json.loads((folder / "state.json").read_text())
        return state if isinstance(state, dict) else {}
    return {}


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
    each = sum(thing_bytes(thing, model) for thing in (model, *keep.values()))
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
