"""The folders of checkpoints: which one to load, room for more, one run at a time in an output folder."""

import json
import logging
import os
import shutil
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from utils.io.files import set_aside, verify_checksums

logger = logging.getLogger(__name__)

FORMAT = 3  # of checkpoints: increase it when older ones cannot be resumed


class Unfit(ValueError):
    """A checkpoint is valid, but of another version, run, model or optimizer. Its text follows the folder."""


def list_checkpoints(folder) -> list[Path]:
    """The complete checkpoints by their names, oldest first; nothing is verified."""
    return sorted(Path(folder).glob("step-" + "[0-9]" * 8))


def read_state(folder: Path) -> dict:
    """state.json. Raises Unfit if another version wrote it."""
    state = json.loads((folder / "state.json").read_bytes())
    if state["format"] != FORMAT:
        raise Unfit("was made by another version of this project: resume it with that version, or start anew "
                    "in another output_dir (model_name_or_path takes weights)")
    return state


def choose(folder: Path, args) -> str | None:
    """The verified checkpoint that resume_from_checkpoint means, None if the run begins anew. Sets aside, on
    disk, what is damaged or replaced. ValueError if no checkpoint is valid, or an older one was meant."""
    own, wanted = list_checkpoints(folder)[::-1], args.resume_from_checkpoint
    if wanted == "none":
        for path in own:
            set_aside(path)
        if own:
            logger.warning("checkpoints of the run before were renamed to replaced-* in %s", folder)
        return None
    candidates = own
    if wanted != "auto":
        inside = Path(wanted).resolve().parent == folder.resolve()
        if not own:
            candidates = [Path(wanted)]
        elif not inside:
            logger.warning("%s has checkpoints of its own: continuing with them, not with %s", folder, wanted)
        elif Path(wanted).name != own[0].name:
            raise ValueError(f"resume_from_checkpoint: {wanted} is not the newest of its run, {own[0].name}: "
                             "to branch off there, give another --output_dir")
    damaged = {}
    for path in candidates:
        if not (problem := verify_checksums(path)):
            for other, damage in damaged.items():
                logger.warning("%s is damaged (%s): going back to %s", other, damage, path)
                set_aside(other, "bad-")
            return str(path)
        damaged[path] = problem
    if damaged:
        there = ", ".join(path.name for path in own[::-1]) or "none"
        raise ValueError(f"resume_from_checkpoint {wanted}: no checkpoint is valid ({problem}). In {folder}: "
                         f"{there}. Repair one, or begin anew with --resume_from_checkpoint none")
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
