"""Models kept for good: output_dir/milestones/step-N, for from_pretrained, complete or absent. Their
manifest.json has the step, and bytes and sha256 of each file.

A run that goes on from an earlier step sets those after it aside, as replaced-step-N, and makes them again:
the very same come back untouched; what is another now stays there: yours, never deleted.
"""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from utils.publishing.export import export_model
from utils.state.checkpoint import step_of
from utils.state.files import checksum_file, find_problem, flush, retire, seal

LOG = 512  # `log` means the powers of two up to here, then every save


def milestone_steps(named: list, last: int = 0, saves: Iterable[int] = ()) -> set[int]:
    """The steps that the setting names. last: of the run, 0 where it is not known yet. ValueError."""
    if named == ["log"]:
        steps = {2**n for n in range(LOG.bit_length())} | {step for step in saves if step > LOG}
        return {step for step in steps if step <= last}
    steps = {int(step) if str(step).isdecimal() else 0 for step in named}
    if not all(1 <= step <= (last or step) for step in steps):
        told = " ".join(map(str, named))
        raise ValueError(f"milestones: {told}: give log, or steps from 1 to {last or 'the last'}, or none.")
    return steps


def list_milestones(output_dir) -> list[Path]:
    """Complete ones by their names, in order; nothing is verified."""
    found = Path(output_dir, "milestones").glob("step-*")
    return sorted((path for path in found if path.name[5:].isdecimal()), key=step_of)


def keep_milestone(accelerator, model, tokenizer, output_dir, step: int) -> None:
    """Make the milestone of this step, or find it as it was made before. Called on all processes."""
    folder, main = Path(output_dir) / "milestones", accelerator.is_main_process
    made, aside = folder / f"step-{step}", folder / f".tmp-step-{step}"
    if main:
        shutil.rmtree(aside, ignore_errors=True)  # of a killed run
    export_model(accelerator, model, tokenizer, aside)
    if not main:
        return
    files = {path.name: checksum_file(path, hashlib.sha256) for path in sorted(aside.iterdir())}
    for name in files:
        flush(aside / name)
    seal(aside, files, step=step)
    if made.exists():
        retire(made)
    same = (aside / "manifest.json").read_bytes()
    older = [path.parent for path in folder.glob("replaced-*/manifest.json") if path.read_bytes() == same]
    found = next((path for path in older if not find_problem(path)), aside)
    found.rename(made)
    flush(folder)
    shutil.rmtree(aside, ignore_errors=True)
