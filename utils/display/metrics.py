"""What a run measures, in metrics.jsonl; what it runs on and where it was resumed, in run.json."""

import contextlib
import json
import math
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.io.files import write_json


class MetricsLog:
    """output_dir/metrics.jsonl: one JSON object per line and event, written when `write` returns.

    offset: in bytes, saved in checkpoints: the file is truncated there, so that a resumed run repeats no
    line; 0 starts anew. A line that a crash cut short is dropped. step: where the run continues.

    run.json has the trackers' run id, the step of each start and what it computed with (`launch`), and the
    origin of a branch: {"run": name, "step": step}."""

    def __init__(self, output_dir, offset: int, is_main_process=True, step=0, origin=None, launch=None):
        self.path, self.file, self.offset = Path(output_dir) / "metrics.jsonl", None, offset
        if not is_main_process:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self.file = open(self.path, "r+b", buffering=0)
        kept = self.file.read()[:offset]
        self.offset = kept.rfind(b"\n") + 1
        self.file.truncate(self.offset)
        run = read_run(output_dir) if self.offset else _new_run()
        if origin:
            run["origin"] = origin
        # Not in metrics.jsonl, which reads like one uninterrupted run.
        earlier = [start for start in run["launches"] if start["step"] < step]
        run["launches"] = [*earlier, {"step": step, **(launch or {})}]
        write_json(self.path.with_name("run.json"), run)

    def write(self, record: dict) -> None:
        """Append a line; NaN and infinity become null. On a full disk the line is lost, with a warning."""
        if self.file is None:
            return
        line = (json.dumps(finite(record), allow_nan=False) + "\n").encode()
        try:
            self.file.seek(self.offset)
            if self.file.write(line) < len(line):
                raise OSError("no space left")
            self.offset += len(line)
        except OSError as error:
            warnings.warn(f"{self.path}: a line is lost ({error}), training goes on", stacklevel=2)
            with contextlib.suppress(OSError):
                self.file.truncate(self.offset)


def read_metrics(output_dir) -> list[dict]:
    """The lines of metrics.jsonl in order, without those that are not complete JSON objects."""
    path, records = Path(output_dir) / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def finite(record: Mapping) -> dict[str, Any]:
    """The record with None, JSON's null, in the place of NaN and infinity, which JSON lacks."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def by_set(record: Mapping, metric: str) -> dict[str, Any]:
    """{evaluation set: value} of the keys METRIC/NAME. A single set has the key METRIC and the name ""."""
    named = {key: value for key, value in record.items() if f"{key}/".startswith(f"{metric}/")}
    return {key[len(metric) + 1 :]: value for key, value in named.items()}


def read_run(output_dir) -> dict:
    """run.json; a new run's if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        run = _new_run() | json.loads((Path(output_dir) / "run.json").read_text())
        if isinstance(run["id"], str) and all(isinstance(start["step"], int) for start in run["launches"]):
            return run
    return _new_run()


def _new_run() -> dict:
    return {"id": secrets.token_hex(4), "launches": []}
