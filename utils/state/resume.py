"""Which checkpoint a run continues from: the newest valid one of the same settings, rows and length. What
becomes of the others, and the lock that keeps two runs out of one folder."""

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
from utils.learning.optim import further_rates

logger = logging.getLogger(__name__)

FORMAT = 3  # of checkpoints: increase it when older ones cannot be resumed
OTHER = "holds a run with other settings: repeat them, or choose another --output_dir"


class CheckpointMismatch(ValueError):
    """A checkpoint is valid, but of another version, run, model or optimizer. Its text follows the folder."""


def list_checkpoints(folder) -> list[Path]:
    """The complete checkpoints by their names, oldest first; nothing is verified."""
    return sorted(Path(folder).glob("step-" + "[0-9]" * 8))


def read_state(folder: Path) -> dict:
    """state.json. Raises CheckpointMismatch if another version wrote it."""
    state = json.loads((folder / "state.json").read_bytes())
    if state["format"] != FORMAT:
        raise CheckpointMismatch("was made by another version of this project: resume it with that version, "
                                 "or start anew in another output_dir (model_name_or_path takes weights)")
    return state


def choose_checkpoint(folder: Path, args) -> str | None:
    """The verified checkpoint that resume_from_checkpoint means, None if the run begins anew. Sets aside, on
    disk, what is damaged or replaced. ValueError if no checkpoint is valid, or an older one was meant."""
    newest_first, source = list_checkpoints(folder)[::-1], args.resume_from_checkpoint
    if source == "none":
        for path in newest_first:
            set_aside(path)
        if newest_first:
            logger.warning("checkpoints of the run before were renamed to replaced-* in %s", folder)
        return None
    candidates = newest_first
    if source != "auto":
        inside = Path(source).resolve().parent == folder.resolve()
        if not newest_first:
            candidates = [Path(source)]
        elif not inside:
            logger.warning("%s has checkpoints of its own: continuing with them, not with %s", folder, source)
        elif Path(source).name != newest_first[0].name:
            raise ValueError(f"resume_from_checkpoint: {source} is not the newest of its run, "
                             f"{newest_first[0].name}: to branch off there, give another --output_dir")
    damaged = {}
    for path in candidates:
        if not (problem := verify_checksums(path)):
            for other, damage in damaged.items():
                logger.warning("%s is damaged (%s): going back to %s", other, damage, path)
                set_aside(other, "bad-")
            return str(path)
        damaged[path] = problem
    if damaged:
        names = ", ".join(path.name for path in newest_first[::-1]) or "none"
        raise ValueError(f"resume_from_checkpoint {source}: no checkpoint is valid ({problem}). In {folder}: "
                         f"{names}. Repair one, or begin anew with --resume_from_checkpoint none")
    return None


def delete_old(folder: Path, save_total_limit: int) -> None:
    """Keeps the newest complete checkpoints. Half deleted one must not look like a damaged one."""
    for path in (*list_checkpoints(folder)[:-save_total_limit], *folder.glob("bad-*")):
        set_aside(path, ".tmp-old-")
    for path in folder.glob(".tmp-old-*"):
        shutil.rmtree(path, ignore_errors=True)


def lock_output_dir(output_dir, wait_seconds: float = 20.0) -> FileLock:
    """Lock output_dir as long as the lock object exists, at most until this process ends in any way.

    A run that is just ending gets wait_seconds. ValueError if the folder cannot be locked or written."""
    path = Path(output_dir) / ".lock"
    lock = FileLock(path, thread_local=False, is_singleton=True)  # a notebook may start a run again
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait_seconds)
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    except Timeout:
        raise ValueError(f"output_dir {output_dir} is in use by another run ({path.read_text().strip()}): "
                         "stop that run, or choose another output_dir for this one") from None
    except OSError as error:
        raise ValueError(f"output_dir {output_dir} cannot be written: {error}. Choose another one") from None
    return lock


def experiment(args, steps, step: int, rows_fingerprint: str) -> dict:
    """What a checkpoint after `step` steps records of its run."""
    rows = steps.rows_before(step + 1)
    return dict(settings=_plain(vars(args)), rows=rows, last=steps.last, fingerprint=rows_fingerprint)


def changed_settings(saved: dict, args, may_change: set) -> list[str]:
    """A line for each setting that differs. One that the run lacks counts as its default; "x" is ["x"]."""
    now, defaults, lines = _plain(vars(args)), vars(type(args)()), []
    for name in sorted(now.keys() - may_change - LENGTH):  # the steps that follow from those are compared
        was = as_list(saved.get(name, without_secrets(defaults.get(name))))
        if was != (is_now := as_list(now[name])):
            shown = [" ".join(map(str, value)) or "none" for value in (was, is_now)]
            lines.append(f"{name}: {shown[0]} in the run, {shown[1]} now")
    return lines


def check_experiment(state: dict, args, steps, rows_fingerprint: str, may_change: set, schedule=None) -> None:
    """Raises CheckpointMismatch with what differs from state.json. The length may differ if it does not end
    before the checkpoint's step and the learning rate of that step is the same."""
    lines, remedy, step = changed_settings(state["settings"], args, may_change), (), state["step"]
    was, is_now = state["rows"], steps.rows_before(step + 1)
    if was != is_now:
        lines.append(f"rows per step: {was / (step + 1):g} in the run, {is_now / (step + 1):g} now")
    if state["last"] != steps.last and (steps.last < step or not _same_rate(schedule, state)):
        rate = f"the learning rate of step {step} depends on it"
        reason = f"{step} are done" if steps.last < step else rate
        lines.append(f"max_train_steps: {state['last']} in the run, {steps.last} now, and {reason}")
        folder = shlex.quote(str(args.output_dir))
        remedy = (f"For all steps anew: --output_dir {folder}-2; for a new run with its weights also "
                  f"--model_name_or_path {folder} {further_rates(args)}",)
    if not lines and state["fingerprint"] != rows_fingerprint:
        lines.append("dataset_name: the rows of the run had other content or another order, or it had "
                     "another tokenizer: restore them")
    if lines:
        raise CheckpointMismatch("\n".join([OTHER, *lines, *remedy]))


def _plain(settings: dict) -> dict:
    return json.loads(json.dumps(without_secrets(settings), default=str))


def _same_rate(schedule, state: dict) -> bool:
    """Whether this run's schedule has the saved learning rates at the step of the checkpoint."""
    if schedule is None:
        return True
    if not hasattr(schedule, "lr_lambdas"):  # its length is part of its state
        return False
    saved = state["things"].get("schedule", {}).get("state", {}).get("_last_lr")
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    rates = [base * factor(state["step"]) for base, factor in pairs]
    return isinstance(saved, list) and len(saved) == len(rates) and all(map(math.isclose, rates, saved))
