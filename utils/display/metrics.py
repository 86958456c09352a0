"""A run's numbers: in metrics.jsonl, on trackers, as text; and args.json: its settings, versions, starts."""

import contextlib
import json
import math
import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.io.files import replacing, set_aside, write_json


class Metrics:
    """output_dir/metrics.jsonl: one JSON object per line and event, written when `write` returns.

    step: where the run continues. Lines of later steps are dropped, so that a resumed run repeats none, and
    so is a line that a crash cut short. writes: only this process writes; the others read.

    Of args.json: run_id, of the trackers; finished: the step after which the run had nothing left to do."""

    def __init__(self, args, step: int, writes: bool):
        self.folder, self.step, self.writes = Path(args.output_dir), step, writes
        self.path, self.file = self.folder / "metrics.jsonl", None
        lines = [line for line in read_metrics(self.folder) if isinstance(line.get("step"), int)]
        self.kept = [line for line in lines if line["step"] <= step]
        self.known = read_args(self.folder)
        if step == 0 or args.resume_from_checkpoint == "none":
            self.kept, self.known = [], {}
        self.run_id = self.known.get("run_id") or secrets.token_hex(4)
        self.finished = self.known.get("finished")
        self.seconds = next((line["seconds"] for line in reversed(self.kept) if "seconds" in line), 0.0)

    def start(self, step: int, settings: dict, rows: dict | None, launch: dict, environment: dict) -> None:
        """Drops the lines of later steps and writes args.json. rows: where they are."""
        if not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.kept and self.path.exists() and self.path.stat().st_size:
            set_aside(self.path)
            print(f"run        begins anew: the previous metrics were moved to replaced-{self.path.name}")
        elif self.known and not self.path.exists():
            print(f"warning    {self.path} is missing: the lines up to step {step} are lost")
        lines = [json.dumps(finite(line), allow_nan=False) + "\n" for line in self.kept]
        with replacing(self.path) as temporary:
            temporary.write_text("".join(lines))
        self.file = open(self.path, "r+b", buffering=0)
        starts = [start for start in self.known.get("starts", []) if start["step"] < step]
        self.known = {"settings": settings, "rows": rows, "run_id": self.run_id, "finished": None,
                      "starts": [*starts, {"step": step, **launch}], **environment}  # fmt: skip
        write_json(self.folder / "args.json", self.known)

    def changes(self, launch: dict) -> list[str]:
        """A line for each part of `launch` that was another one in the newest start."""
        before = (self.known.get("starts") or [launch])[-1]
        changed = [name for name, now in launch.items() if before.get(name, now) != now]
        return [f"launch     {name}: {before[name]} so far, {launch[name]} now" for name in changed]

    def write(self, record: dict) -> None:
        """Append a line; NaN and infinity become null. On a full disk the line is lost, with a warning. If
        somebody deletes the file, it is written again with all its lines, which the open file still has."""
        if self.file is None:
            return
        line, end = (json.dumps(finite(record), allow_nan=False) + "\n").encode(), self.file.seek(0, 2)
        try:
            if not self.path.exists():
                self.file.seek(0)
                self.folder.mkdir(parents=True, exist_ok=True)
                self.path.write_bytes(self.file.read())
                self.file = open(self.path, "r+b", buffering=0)
                self.file.seek(0, 2)
            if self.file.write(line) < len(line):
                raise OSError("no space left")
        except OSError as error:
            warnings.warn(f"{self.path}: a line is lost ({error}), training goes on", stacklevel=2)
            with contextlib.suppress(OSError):
                self.file.truncate(end)

    def finish(self, step: int, tried: str) -> None:
        """Remembers that nothing is left to do after `step`, and the first prompt."""
        if self.writes:
            write_json(self.folder / "args.json", self.known | {"finished": step, "tried": tried})


def newest(lines: list[dict], metric: str) -> tuple[dict, int | None]:
    """(the last record that has this metric, of one set or of several, without its counts; its step)"""
    line = next((line for line in reversed(lines) if by_set(line, metric)), {})
    return {key: value for key, value in line.items() if key not in ("step", "tokens")}, line.get("step")


def read_metrics(output_dir) -> list[dict]:
    """The lines of metrics.jsonl in order, without those that are not complete JSON objects."""
    path, records = Path(output_dir) / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def read_args(output_dir) -> dict:
    """args.json; {} if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        known = json.loads((Path(output_dir) / "args.json").read_text())
        starts = all(isinstance(start["step"], int) for start in known["starts"])
        if starts and isinstance(known["run_id"], str) and isinstance(known["settings"], dict):
            return known
    return {}


def finite(record: Mapping) -> dict[str, Any]:
    """The record with None, JSON's null, in the place of NaN and infinity, which JSON lacks."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def by_set(record: Mapping, metric: str) -> dict[str, Any]:
    """{evaluation set: value} of the keys METRIC/NAME. A single set has the key METRIC and the name ""."""
    named = {key: value for key, value in record.items() if f"{key}/".startswith(f"{metric}/")}
    return {key[len(metric) + 1 :]: value for key, value in named.items()}


def tracker_problems(report_to: list[str]) -> list[str]:
    """A line for each tracker that is not installed, which accelerate would leave out silently, and if wandb
    cannot log in."""
    from accelerate.tracking import get_available_trackers

    installed = [*map(str, get_available_trackers())]
    problems = [f"report_to: {name!r} is no tracker that is installed here; `pip install` it, or give some "
                f"of {' '.join([*installed, 'none'])}, separated by spaces."
                for name in report_to if name not in [*installed, "all"]]  # fmt: skip
    if "wandb" in installed and {"wandb", "all"} & {*report_to} and os.environ.get("RANK", "0") == "0":
        import wandb

        try:
            wandb.login()  # on a terminal it asks for the key
        except Exception as error:  # of wandb's own kinds
            problems.append(f"report_to: {error} WANDB_MODE=offline needs no login.")
    return problems


def start_trackers(accelerator, project: str, output_dir, run_id: str, settings: dict, step: int) -> None:
    """accelerator.init_trackers, so that a resumed run (step > 0) continues its curves."""
    if not accelerator.log_with:
        return
    name = Path(output_dir).resolve().name
    options = {
        "wandb": {"id": run_id, "name": name, "resume": "allow"},
        "trackio": {"name": f"{name}-{run_id}", "resume": "allow"},
        "tensorboard": {"purge_step": step + 1 if step else None},
    }
    accelerator.init_trackers(project, init_kwargs=options)
    plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in settings.items()}
    for tracker in accelerator.trackers:
        if not step or tracker.name != "tensorboard":  # there it would make each start another run
            tracker.store_init_configuration(plain)


def log_to_trackers(accelerator, record: dict) -> None:
    """Send the numbers of a record of metrics.jsonl to the trackers, if any, at the record's step."""
    numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
    accelerator.log(numbers, step=record["step"])


def duration(seconds: float) -> str:
    """42 s, 3 min 20 s, 5 h 12 min, 3 d 4 h"""
    seconds = round(seconds)
    for big, small, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if seconds >= size:
            return f"{seconds // size} {big} {seconds % size // part} {small}"
    return f"{seconds} s"


def format_metric(record: Mapping, metric: str, spec: str) -> str:
    """1.65; with several evaluation sets: books 1.65, news 2.10; "" without the metric"""
    texts = {name: "-" if v is None else format(v, spec) for name, v in by_set(record, metric).items()}
    return ", ".join(f"{name} {text}".lstrip() for name, text in texts.items())


def readable(value) -> str:
    """0.3333, 12.18, 65,024"""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
