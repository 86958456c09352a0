"""What a run measures, in metrics.jsonl."""

import contextlib
import json
import math
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from utils.io.files import write_json


class MetricsLog:
    """output_dir/metrics.jsonl: one JSON object per line and event, in the file when `write` returns.

    offset: None continues after the last complete line; 0 starts anew; a number of bytes (`.offset`, kept in
    checkpoints) cuts the file there, so that a resumed run repeats no line. A line that a crash cut short is
    dropped. Only the main process writes. run.json beside it holds the trackers' run id, the resumes, what
    each start ran on (`launch`), and the origin of a branch: {"run": name, "step": step}."""

    def __init__(self, output_dir, offset=None, is_main_process=True, origin=None, launch=None):
        self.path, self.file, self.offset = Path(output_dir) / "metrics.jsonl", None, offset or 0
        if not is_main_process:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self.file = open(self.path, "r+b", buffering=0)
        kept = self.file.read()[:offset]
        kept = kept[: kept.rfind(b"\n") + 1]
        self.offset = len(kept)
        self.file.truncate(self.offset)
        run = (read_run(output_dir) if kept else _new_run()) | ({"origin": origin} if origin else {})
        if kept:  # noted here, so that metrics.jsonl reads like one uninterrupted run
            steps = (line.get("step") for line in _records(reversed(kept.splitlines())))
            last = next((step for step in steps if isinstance(step, int)), 0)
            run["resumes"] = [step for step in run["resumes"] if step < last] + [last]
        if launch:
            step = run["resumes"][-1] if run["resumes"] else 0
            earlier = [start for start in run["launches"] if start["step"] < step]
            run["launches"] = [*earlier, {"step": step, **launch}]
        write_json(self.path.with_name("run.json"), run)

    def write(self, record: dict):
        """Append one line; NaN and infinity become null. A full disk costs the line, with a warning."""
        if self.file is None:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        line = (json.dumps(finite, allow_nan=False) + "\n").encode()
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
    """The lines of metrics.jsonl in order; lines that are not (yet) complete JSON objects are left out."""
    path = Path(output_dir) / "metrics.jsonl"
    return list(_records(path.read_bytes().splitlines())) if path.exists() else []


def _records(lines: Iterable[bytes]) -> Iterator[dict]:
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                yield record


def by_set(record: Mapping, metric: str) -> dict[str, Any]:
    """{evaluation set: its value} of the keys METRIC/NAME; a single one has the key METRIC and is ""."""
    prefix = f"{metric}/"
    named = {key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix)}
    return {"": record[metric], **named} if metric in record else named


def read_run(output_dir) -> dict:
    """{"id": the tracker run's id, "resumes": [last logged step before each resume]}"""
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):  # not as we wrote it
        run = json.loads((Path(output_dir) / "run.json").read_text())
        starts = [start["step"] for start in run.setdefault("launches", [])]
        steps = [*run.setdefault("resumes", []), *starts]
        if isinstance(run["id"], str) and all(isinstance(step, int) for step in steps):
            return run
    return _new_run()


def _new_run() -> dict:
    return {"id": secrets.token_hex(4), "resumes": [], "launches": []}
