"""Chooses the checkpoint that a run continues from, the newest valid one, and checks that it belongs to the
same experiment. Deletes old checkpoints, and locks output_dir against a second run."""

import json
import logging
import math
import os
import shlex
import shutil
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from utils.flags import LENGTH, as_list
from utils.io.files import set_aside, verify_checksums
from utils.io.text import without_secrets
from utils.learning.optim import finetuning_rates

logger = logging.getLogger(__name__)

FORMAT = 3  # of checkpoints: increase it when older checkpoints cannot be resumed


class CheckpointMismatch(ValueError):
    """A valid checkpoint of another version, run, model or optimizer. The message follows the folder name."""


def list_checkpoints(folder) -> list[Path]:
    """Folders of complete checkpoints, oldest first. Their checksums are not verified."""
    return sorted(Path(folder).glob("step-" + "[0-9]" * 8))


def read_state(folder: Path) -> dict:
    """Reads state.json. CheckpointMismatch if it was written in another format."""
    state = json.loads((folder / "state.json").read_bytes())
    if state["format"] != FORMAT:
        raise CheckpointMismatch("was written by another version of this project: resume it with that one, "
                                 "or begin a new run with its weights (--model_name_or_path)")
    return state


def choose_checkpoint(folder: Path, args) -> str | None:
    """The verified checkpoint that resume_from_checkpoint selects, or None for a new run. Renames
    damaged and replaced checkpoints. ValueError if none is valid, or if an older one of the run is chosen."""
    newest_first, source = list_checkpoints(folder)[::-1], args.resume_from_checkpoint
    if source == "none":
        for path in newest_first:
            set_aside(path)
        if newest_first:
            logger.warning("the checkpoints of the previous run were renamed to replaced-* in %s", folder)
        return None
    candidates = newest_first
    if source != "auto":
        inside = Path(source).resolve().parent == folder.resolve()
        if not newest_first:
            candidates = [Path(source)]
        elif not inside:
            logger.warning("%s has checkpoints already: continuing with them, not with %s", folder, source)
        elif Path(source).name != newest_first[0].name:
            raise ValueError(f"resume_from_checkpoint: {source} is not the newest of its run, "
                             f"{newest_first[0].name}: to branch off there, choose another --output_dir")
    damaged = {}
    for path in candidates:
        if not (problem := verify_checksums(path)):
            for bad, reason in damaged.items():
                logger.warning("%s is damaged (%s): going back to %s", bad, reason, path)
                set_aside(bad, "bad-")
            return str(path)
        damaged[path] = problem
    if damaged:
        names = ", ".join(path.name for path in newest_first[::-1]) or "none"
        raise ValueError(f"resume_from_checkpoint {source}: no checkpoint is valid ({problem}). In {folder}: "
                         f"{names}. Repair one, or start a new run with --resume_from_checkpoint none")
    return None


def delete_old(folder: Path, save_total_limit: int) -> None:
    """Deletes damaged checkpoints and all but the newest save_total_limit. Each is renamed first, so that a
    half deleted folder does not look like a damaged checkpoint."""
    for path in (*list_checkpoints(folder)[:-save_total_limit], *folder.glob("bad-*")):
        set_aside(path, ".tmp-old-")
    for path in folder.glob(".tmp-old-*"):
        shutil.rmtree(path, ignore_errors=True)


def lock_output_dir(output_dir, wait_seconds: float = 20.0) -> FileLock:
    """Locks output_dir until the returned object is deleted or this process ends, also by a kill.

    Waits wait_seconds for a run that is about to end. ValueError if the folder is locked or not writable."""
    path = Path(output_dir) / ".lock"
    lock = FileLock(path, thread_local=False, is_singleton=True)  # a notebook may start the same run twice
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait_seconds)
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    except Timeout:
        raise ValueError(f"output_dir {output_dir} is in use by another run ({path.read_text().strip()}): "
                         "stop that run, or choose another --output_dir") from None
    except OSError as error:
        raise ValueError(f"output_dir {output_dir} is not writable ({error}): choose another one") from None
    return lock


def describe_experiment(args, steps, step: int, rows_fingerprint: str) -> dict:
    """The values of a checkpoint after `step` steps that identify its run."""
    rows = steps.rows_before(step + 1)
    return dict(settings=_plain(vars(args)), rows=rows, last=steps.last, fingerprint=rows_fingerprint)


def changed_settings(saved: dict, args, may_change: set) -> list[str]:
    """A line for each setting that differs. A missing one counts as its default, and "x" equals ["x"]."""
    current, defaults, lines = _plain(vars(args)), vars(type(args)()), []
    for name in sorted(current.keys() - may_change - LENGTH):  # LENGTH: check_experiment compares the steps
        before, now = as_list(saved.get(name, without_secrets(defaults.get(name)))), as_list(current[name])
        if before != now:
            texts = [" ".join(map(str, value)) or "none" for value in (before, now)]
            lines.append(f"{name}: {texts[0]} in the run, {texts[1]} now")
    return lines


def check_experiment(state: dict, args, steps, rows_fingerprint: str, may_change: set, schedule=None) -> None:
    """CheckpointMismatch with a line for each difference between state.json and this run. The run may become
    longer or shorter, but not end before the checkpoint's step or change the learning rate of that step."""
    lines, remedy, step = changed_settings(state["settings"], args, may_change), [], state["step"]
    before, now = state["rows"], steps.rows_before(step + 1)
    if before != now:
        lines.append(f"rows per step: {before / (step + 1):g} in the run, {now / (step + 1):g} now")
    too_short = steps.last < step
    if state["last"] != steps.last and (too_short or not _same_rate(schedule, state)):
        reason = f"{step} are done" if too_short else f"the learning rate of step {step} depends on it"
        epochs = "" if args.max_train_steps else f" (num_train_epochs {args.num_train_epochs:g})"
        lines.append(f"max_train_steps: {state['last']} in the run, {steps.last} now{epochs}, and {reason}")
        folder = shlex.quote(str(args.output_dir))
        remedy = [f"To train all steps again: --output_dir {folder}-2; to begin with this run's weights, "
                  f"also --model_name_or_path {folder} {finetuning_rates(args)}"]  # fmt: skip
    if not lines and state["fingerprint"] != rows_fingerprint:
        lines.append("dataset_name: the rows have other content or another order than in the run, or the "
                     "tokenizer has changed: restore them")
    if lines:
        first = "holds a run with other settings: repeat them, or choose another --output_dir"
        raise CheckpointMismatch("\n".join([first, *lines, *remedy]))


def _plain(settings: dict) -> dict:
    """The settings as JSON stores them, without secrets."""
    return json.loads(json.dumps(without_secrets(settings), default=str))


def _same_rate(schedule, state: dict) -> bool:
    """Whether this run's schedule gives the saved learning rates at the checkpoint's step."""
    if schedule is None:
        return True
    if not hasattr(schedule, "lr_lambdas"):  # only LambdaLR computes the rates of any step
        return False
    saved = state["things"].get("schedule", {}).get("state", {}).get("_last_lr")
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    rates = [base * factor(state["step"]) for base, factor in pairs]
    return isinstance(saved, list) and len(saved) == len(rates) and all(map(math.isclose, rates, saved))
