"""metrics.jsonl, trackers, numbers as text; and args.json: the settings, versions and starts of a run."""

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
    """output_dir/metrics.jsonl: a JSON object per line, in the file when `write` returns.

    step: where the run continues. Lines of later steps are dropped, so that a resumed run repeats none, and
    so is a line that a crash cut short. writes: True on the one process that writes; the others only read.

    args_json: the content of args.json, {} for a new run. run_id: the run's id on trackers."""

    def __init__(self, args, step: int, writes: bool):
        self.folder, self.writes = Path(args.output_dir), writes
        self.path, self.file = self.folder / "metrics.jsonl", None
        lines = [line for line in read_metrics(self.folder) if isinstance(line.get("step"), int)]
        self.lines = [line for line in lines if line["step"] <= step]
        self.args_json = read_args(self.folder)
        if step == 0 or args.resume_from_checkpoint == "none":
            self.lines, self.args_json = [], {}
        self.run_id = self.args_json.get("run_id") or secrets.token_hex(4)
        self.seconds = next((line["seconds"] for line in reversed(self.lines) if "seconds" in line), 0.0)

    def start(self, step: int, settings: dict, rows: dict | None, launch: dict, environment: dict) -> None:
        """Rewrites metrics.jsonl without later steps and writes args.json. rows: where the rows are."""
        if not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.lines and self.path.exists() and self.path.stat().st_size:
            set_aside(self.path)
            print(f"run        starts again: the previous metrics were moved to replaced-{self.path.name}")
        elif self.args_json and not self.path.exists():
            print(f"warning    {self.path} is missing: the lines up to step {step} are lost")
        lines = [json.dumps(finite(line), allow_nan=False) + "\n" for line in self.lines]
        with replacing(self.path) as temporary:
            temporary.write_text("".join(lines))
        self.file = open(self.path, "r+b", buffering=0)
        starts = [start for start in self.args_json.get("starts", []) if start["step"] < step]
        self.args_json = {"settings": settings, "rows": rows, "run_id": self.run_id, "finished": None,
                      "starts": [*starts, {"step": step, **launch}], **environment}  # fmt: skip
        write_json(self.folder / "args.json", self.args_json)

    def changes(self, launch: dict) -> list[str]:
        """A line for each entry of `launch` that differs from the previous start of the run."""
        before = (self.args_json.get("starts") or [launch])[-1]
        changed = [name for name, value in launch.items() if before.get(name, value) != value]
        return [f"launch     {name}: {before[name]} so far, {launch[name]} now" for name in changed]

    def write(self, record: dict) -> None:
        """Appends a line; NaN and infinity become null. On a full disk the line is lost, with a warning. A
        deleted file is written again with all its lines, which the open file still has."""
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
        """Writes to args.json the step at which the run finished, and its first prompt, `tried`."""
        if self.writes:
            write_json(self.folder / "args.json", self.args_json | {"finished": step, "tried": tried})


def newest(lines: list[dict], metric: str) -> tuple[dict, int | None]:
    """(the last record with this metric, without step and tokens; its step), or ({}, None)."""
    line = next((line for line in reversed(lines) if by_set(line, metric)), {})
    return {key: value for key, value in line.items() if key not in ("step", "tokens")}, line.get("step")


def read_metrics(output_dir) -> list[dict]:
    """The records of metrics.jsonl in order. Lines that are not JSON objects are skipped."""
    path, records = Path(output_dir) / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def read_args(output_dir) -> dict:
    """args.json; {} if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        content = json.loads((Path(output_dir) / "args.json").read_text())
        valid_starts = all(isinstance(start["step"], int) for start in content["starts"])
        if valid_starts and isinstance(content["run_id"], str) and isinstance(content["settings"], dict):
            return content
    return {}


def finite(record: Mapping) -> dict[str, Any]:
    """The record with NaN and infinity, which JSON lacks, replaced by None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def by_set(record: Mapping, metric: str) -> dict[str, Any]:
    """{evaluation set: value} from the keys METRIC/NAME. A single set has the key METRIC and the name ""."""
    named = {key: value for key, value in record.items() if f"{key}/".startswith(f"{metric}/")}
    return {key[len(metric) + 1 :]: value for key, value in named.items()}


def tracker_problems(report_to: list[str]) -> list[str]:
    """A line for each tracker that is not installed, which accelerate would skip silently, and one if the
    login to wandb fails."""
    from accelerate.tracking import get_available_trackers

    installed = [*map(str, get_available_trackers())]
    problems = [f"report_to: {name!r} is not an installed tracker; `pip install` it, or give some of "
                f"{' '.join([*installed, 'none'])}, separated by spaces."
                for name in report_to if name not in [*installed, "all"]]  # fmt: skip
    if "wandb" in installed and {"wandb", "all"} & {*report_to} and os.environ.get("RANK", "0") == "0":
        import wandb

        try:
            wandb.login()  # on a terminal it asks for the key
        except Exception as error:  # of wandb's own types
            problems.append(f"report_to: {error} WANDB_MODE=offline needs no login.")
    return problems


def start_trackers(accelerator, project: str, output_dir, run_id: str, settings: dict, step: int) -> None:
    """Starts the trackers; a resumed run (step > 0) continues its curves."""
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
        if not step or tracker.name != "tensorboard":  # which shows each call as a further run
            tracker.store_init_configuration(plain)


def log_to_trackers(accelerator, record: dict) -> None:
    """Sends the numbers of a record to the trackers, if any, at the record's step."""
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
    """"1.65", or with several evaluation sets "books 1.65, news 2.10", or "" if the metric is missing."""
    texts = {name: "-" if v is None else format(v, spec) for name, v in by_set(record, metric).items()}
    return ", ".join(f"{name} {text}".lstrip() for name, text in texts.items())


def readable(value) -> str:
    """0.3333, 12.18, 65,024"""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
