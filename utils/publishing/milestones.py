"""Models kept for good: output_dir/milestones/step-N, for from_pretrained, complete or absent. Their
manifest.json has the step, and bytes and sha256 of each file.

A run that resumes from an earlier step renames those after it to replaced-step-N and makes them again. One that
comes out the same takes its name back, untouched; the others are never deleted.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from utils.io.files import checksum_file, find_problem, flush, retire, seal
from utils.publishing.export import write_model
from utils.state.folders import step_of

LOG = 512  # `log` means the powers of two up to here, then every save


def milestone_steps(named: list, last: int = 0, saves: Iterable[int] = ()) -> set[int]:
    """The steps that the setting names. last: of the run, 0 where it is not known yet. ValueError."""
    if named == ["log"]:
        steps = {2**n for n in range(LOG.bit_length())} | {step for step in saves if step > LOG}
        return {step for step in steps if step <= last}
    steps = {int(step) if str(step).isdecimal() else 0 for step in named}
    if not all(1 <= step <= (last or step) for step in steps):
        given = " ".join(map(str, named))
        raise ValueError(f"milestones: {given}: give log, or steps from 1 to {last or 'the last'}, or none.")
    return steps


def list_milestones(output_dir) -> list[Path]:
    """Complete ones by their names, in order; nothing is verified."""
    named = Path(output_dir, "milestones").glob("step-*")
    return sorted((path for path in named if path.name[5:].isdecimal()), key=step_of)


def keep_milestone(accelerator, model, tokenizer, output_dir, step: int) -> str:
    """Makes the milestone of this step, or finds it as it was made before. Returns as write_model does."""
    folder = Path(output_dir, "milestones")

    def complete(written: Path) -> None:
        files = {path.name: checksum_file(path, hashlib.sha256) for path in sorted(written.iterdir())}
        for name in files:
            flush(written / name)
        seal(written, files, step=step)
        manifest, milestone = (written / "manifest.json").read_bytes(), folder / f"step-{step}"
        if milestone.exists():
            retire(milestone)
        same = [path.parent for path in folder.glob("replaced-*/manifest.json") if path.read_bytes() == manifest]
        next((path for path in same if not find_problem(path)), written).rename(milestone)
        flush(folder)

    return write_model(accelerator, model, tokenizer, folder / f".tmp-step-{step}", complete)
