"""Checkpoint folders: which exist, which one to load, whether it is damaged, whether the disk has room."""

import json
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from utils.io.files import set_aside
from utils.state.training_state import bare_optimizer, collect_state

logger = logging.getLogger(__name__)

FORMAT = 2  # of checkpoints: increase it when older ones cannot be resumed


def list_checkpoints(folder) -> list[Path]:
    """The complete checkpoints by their names, oldest first; nothing is verified."""
    return sorted(Path(folder).glob("step-" + "[0-9]" * 8))


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def set_aside_newer(paths: list[Path], step: int) -> None:
    """Rename checkpoints or milestones after `step`, from which the run resumes, to replaced-*."""
    newer = [path for path in paths if step_of(path) > step]
    for path in newer:
        set_aside(path)
    if newer:
        logger.warning("newer than this start, renamed to replaced-*: %s", ", ".join(map(str, newer)))


def candidates(folder, resume_from: str) -> list[Path]:
    """The checkpoints that resume_from may mean, best first; nothing is verified."""
    newest_first = list_checkpoints(folder)[::-1]
    if resume_from in ("auto", "none"):
        return newest_first if resume_from == "auto" else []
    origin = origin_path(folder, resume_from)
    descendants = [path for path in newest_first if origin in _origins(path)]
    return [*descendants, Path(resume_from)]


def origin_path(folder, resume_from: str) -> str:
    """A relative path: the same however the path is written, and after both folders have moved together."""
    return os.path.relpath(os.path.realpath(resume_from), os.path.realpath(folder))


def run_name(checkpoint: Path) -> str:
    """The name of the run that made a checkpoint, without the path above it, as it may be printed."""
    place = checkpoint.resolve()
    name = (place.parents[1] if place.parent.name == "checkpoints" else place).name
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def read_state(folder: Path) -> dict:
    """state.json. ValueError if it is not that of a checkpoint of this version."""
    state = json.loads((folder / "state.json").read_bytes())
    if isinstance(state, dict) and state.get("format") != FORMAT:
        raise ValueError(f"{folder} was made by another version of this project: resume it with that "
                         "version, or start anew in another output_dir (model_name_or_path takes weights)")
    kinds = {"step": int, "keep": dict, "classes": dict, "extra": object}
    if not isinstance(state, dict) or not all(isinstance(state.get(key), kinds[key]) for key in kinds):
        raise ValueError(f"{folder}/state.json is not that of a checkpoint")
    return state


def newest_extra(output_dir, resume_from: str) -> dict:
    """The extra of the checkpoint that a start would resume from, {} without one; nothing is verified."""
    with suppress(OSError, ValueError, IndexError):
        extra = read_state(candidates(Path(output_dir) / "checkpoints", resume_from)[0])["extra"]
        if isinstance(extra, dict) and all(isinstance(extra.get(key), dict) for key in ("settings", "data")):
            return extra
    return {}


def _origins(folder: Path) -> list[str]:
    with suppress(OSError, ValueError):
        return read_state(folder).get("origins", [])
    return []


def thing_bytes(thing, model) -> int:
    """Bytes of its tensors. An optimizer before its first step counts AdamW's two moments."""
    tensors = [*collect_state(thing, model)[1].values()]
    if not tensors and (optimizer := bare_optimizer(thing)):
        tensors = 2 * [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return sum(tensor.nbytes for tensor in tensors)


def disk_space(output_dir, model, keep: dict, save_total_limit: int, models=1) -> str:
    """A text: the space that a run's files need, and the space that is free. ValueError if that is less.

    While a checkpoint is written, save_total_limit complete ones exist too; likewise one of the exported
    models exists twice. The space of files that the run replaces counts as free."""
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


def size_text(count) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
