"""Continue on a fresh machine: the training state that a run has published, from the Hub or a bucket."""

import json
import logging
import math
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from utils.publishing.hub_client import BESIDE
from utils.state.checkpoint import list_checkpoints, step_of
from utils.state.files import find_problem

logger = logging.getLogger(__name__)


def newest_checkpoint(output_dir: Path) -> tuple[int, Path | None]:
    """(step, folder) of the newest complete one; (-1, None) without any. Other names are the user's."""
    made = list_checkpoints(output_dir / "checkpoints")
    complete = ((step_of(path), path) for path in made if (path / "manifest.json").exists())
    return max(complete, default=(-1, None))


def fetch_checkpoint(store, output_dir: str | os.PathLike) -> Path | None:
    """The newest valid checkpoint of `store`, and BESIDE, unless output_dir has one as new, or another run.

    Its folder, or None. It appears whole and verified, or not at all. ValueError when the store cannot be
    read, or has damaged ones only."""
    output_dir = Path(output_dir)
    for left in output_dir.glob(".fetch-*"):  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    have, steps = newest_checkpoint(output_dir)[0], store.steps()
    if have >= 0 and _another_run(store, steps, output_dir):
        return None
    for step in reversed([step for step in steps if step > have]):
        name = f"checkpoints/step-{step:08d}"
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=output_dir) as folder:
            store.download(step, Path(folder))
            if problem := find_problem(Path(folder, name)):
                logger.warning("%s: the checkpoint of step %s is damaged (%s)", store.name, step, problem)
                continue
            for beside in BESIDE:
                if Path(folder, beside).exists():
                    os.replace(Path(folder, beside), output_dir / beside)
            (output_dir / "checkpoints").mkdir(exist_ok=True)
            shutil.rmtree(output_dir / name, ignore_errors=True)  # without a manifest: it did not finish
            os.replace(Path(folder, name), output_dir / name)
        return output_dir / name
    if steps and have < 0:
        raise ValueError(f"{store.name} holds no valid checkpoint: name another checkpoint_url, or empty it")
    return None


def refuse_another(store, output_dir: str | os.PathLike, step: float = math.inf) -> None:
    """ValueError where a bucket has what is not of the run in output_dir, or newer than `step`, where that is
    told to start. (On the Hub the next commit replaces it, and the history keeps it.)"""
    steps = [] if store.repo_id else store.steps()
    if steps and (steps[-1] > step or _another_run(store, steps, Path(output_dir))):
        raise ValueError(
            f"checkpoint_url {store.name} holds step {steps[-1]}, of another run or not where this one "
            "starts: name another URL. (An empty output_dir goes on from there.)"
        )


def _another_run(store, steps: list[int], output_dir: Path) -> bool:
    """Whether both have an id in their run.json, and not the same."""
    with suppress(OSError, ValueError, KeyError, IndexError):  # none, as older versions left it
        ours = json.loads((output_dir / "run.json").read_bytes())["id"]
        return ours != json.loads(store.read(steps[-1], "run.json"))["id"]
    return False
