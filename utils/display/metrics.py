"""What a run measures: metrics.jsonl, trackers, tokens per second, model FLOPs utilisation, time left.

    log = MetricsLog(output_dir, offset=saved_offset)      # None: append, 0: start anew, else: continue there
    clock = Throughput(max_train_steps, tokens_per_step, flops_per_token(model, block_size), peak)
    log.write({"step": step, "loss/train": loss, **clock.measure(step)})
    with clock.aside("eval"):                              # not counted in tokens/s, counted in the time left
        ...
"""

import contextlib
import json
import math
import os
import re
import secrets
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import nn


class MetricsLog:
    """output_dir/metrics.jsonl: one JSON object per line and event, in the file when `write` returns.

    offset: None continues after the last complete line; 0 starts anew; a number of bytes (`.offset`, kept in
    checkpoints) cuts the file there, so that a resumed run repeats no line. A line that a crash cut short is
    dropped. Only the main process writes. run.json beside it holds the trackers' run id and the resumes.
    """

    def __init__(self, output_dir, offset=None, is_main_process=True):
        self.path, self.file, self.offset = Path(output_dir) / "metrics.jsonl", None, offset or 0
        if not is_main_process:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = self.path.read_bytes() if self.path.exists() else b""
        kept = kept[:offset]
        kept = kept[: kept.rfind(b"\n") + 1]
        self.offset = len(kept)
        self.file = open(self.path, "r+b" if self.path.exists() else "w+b", buffering=0)
        self.file.truncate(self.offset)
        last_step = json.loads(kept.splitlines()[-1]).get("step", 0) if kept else None
        _note_start(Path(output_dir), last_step)

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

    def close(self):
        if self.file is not None:
            self.file.close()


def read_metrics(output_dir) -> list[dict]:
    """The lines of metrics.jsonl in order; lines that are not (yet) complete JSON objects are left out."""
    records = []
    path = Path(output_dir) / "metrics.jsonl"
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records


def read_run(output_dir) -> dict:
    """{"id": the tracker run's id, "resumes": [last logged step before each resume]}"""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((Path(output_dir) / "run.json").read_text())
    return {"id": secrets.token_hex(4), "resumes": []}


def _note_start(output_dir: Path, last_step):
    """Lines before a start make it a resume. Noted here: metrics.jsonl reads like one uninterrupted run."""
    run = read_run(output_dir)
    if last_step is None:
        run = {"id": secrets.token_hex(4), "resumes": []}
    else:
        run["resumes"] = [step for step in run["resumes"] if step < last_step] + [last_step]
    write_json(output_dir / "run.json", run)


def write_json(path: Path, content: dict):
    """Write a temporary file and rename it: readers see the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


# --- trackers: accelerate's, for the same numbers on a dashboard ---


def check_trackers(report_to: str) -> list[str]:
    """report_to ("none", or names separated by commas) -> what Accelerator(log_with=...) takes.

    accelerate leaves out a tracker whose package is missing without a word; here it is a ValueError."""
    from accelerate.tracking import get_available_trackers

    names = [name.strip() for name in report_to.split(",") if name.strip() not in ("", "none")]
    missing = sorted(set(names) - {str(name) for name in get_available_trackers()} - {"all"})
    if missing:
        raise ValueError(f"report_to is {report_to!r}, but {', '.join(missing)} cannot be imported here: "
                         f"`pip install {' '.join(missing)}`, or --report_to none")
    return names


def start_trackers(accelerator, project: str, output_dir, settings: dict, step: int = 0):
    """accelerator.init_trackers such that a resumed run (step > 0) continues its curves. On all processes."""
    if not accelerator.log_with:
        return
    run_id, name = read_run(output_dir)["id"], Path(output_dir).resolve().name
    plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in settings.items()}
    accelerator.init_trackers(
        project,
        config=None if step else plain,
        init_kwargs={
            "wandb": {"id": run_id, "name": name, "resume": "allow"},
            "trackio": {"name": f"{name}-{run_id}", "resume": "allow"},
            "tensorboard": {"purge_step": step + 1 if step else None},  # hides what came after the checkpoint
        },
    )


def log_to_trackers(accelerator, record: dict):
    """Send one metrics.jsonl record to the trackers, if there are any: numbers only, at the record's step."""
    if accelerator.trackers:
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
        accelerator.log(numbers, step=record["step"])


# --- throughput ---

# Dense matrix-multiply peak in TFLOP/s with bf16 inputs (fp16 where the chip has no bf16), without sparsity,
# from the makers' public data sheets. "Device" is what torch calls one: one of the two dies of an MI250X, one
# core of a TPU v2 or v3, one chip of later TPUs. The first name found in the device's name counts.
PEAK_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989,
    "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10G": 70, "A10": 125,
    "L40S": 362, "L40": 181, "L4": 121, "V100": 125, "T4": 65,
    "RTX 6000 Ada": 364, "RTX A6000": 155, "RTX 4090": 165, "RTX 3090": 71,
    "MI325X": 1307, "MI300X": 1307, "MI250X": 191.5, "MI250": 181, "MI210": 181,
    "TPU v6e": 918, "TPU v5p": 459, "TPU v5litepod": 197, "TPU v5e": 197, "TPU v4": 275,
    "TPU v3": 61.5, "TPU v2": 22.5,
}  # fmt: skip


def device_name(device: torch.device) -> str:
    """The name PEAK_TFLOPS is searched with: "NVIDIA H100 80GB HBM3", "TPU v5litepod-8", "cpu", ..."""
    if device.type == "xla":
        import torch_xla.runtime

        if torch_xla.runtime.device_type() != "TPU":
            return f"XLA's {torch_xla.runtime.device_type()} device"
        kind = os.environ.get("TPU_ACCELERATOR_TYPE") or os.environ.get("ACCELERATOR_TYPE") or "?"
        return f"TPU {kind}"
    named = getattr(torch.get_device_module(device), "get_device_name", None)  # of torch.cuda, torch.xpu
    return named(device) if named else device.type


def peak_flops(name: str) -> float | None:
    """FLOP/s of one device by its name; None if PEAK_TFLOPS lacks it, and for laptop and MIG parts."""
    if re.search(r"laptop|\bMIG\b", name, re.IGNORECASE):
        return None
    for known, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{known}\b", name, re.IGNORECASE):
            return tflops * 1e12
    return None


def flops_per_token(model: nn.Module, block_size: int, head_share: float = 1.0) -> float:
    """Training FLOPs per token: 6 N + 12 L D T (PaLM, arXiv 2204.02311, appendix B; nanoGPT's estimate, too).

    6 N: two for each multiply-add, once forward and twice backward. N counts the parameters that every token
    is multiplied with: the head (tied or not), not the lookups (token, position and type embeddings).
    head_share: the share of positions the head is applied to (masked LM: the share predicted).
    12 L D T: queries times keys, weights times values, over T positions in L layers of width D = heads x head
    size; not halved because of the causal mask.
    Take it before FSDP cuts the parameters up.
    """
    head = model.get_output_embeddings()
    head_weight = None if head is None else head.weight
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = sum(p.numel() for p in set(model.parameters()) - (embeddings - {head_weight}))
    if head_weight is not None:
        parameters -= (1 - head_share) * head_weight.numel()
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_size
    return 6 * parameters + 12 * config.num_hidden_layers * width * block_size


class Throughput:
    """Tokens per second over the last log interval, model FLOPs utilisation, time left for the whole run.

    tokens_per_step: rows x T of one update over all processes, padding included: work, as it is done.
    peak: FLOP/s of all devices together or None; the bf16 peak whatever the run's precision, so that a run in
    float32 shows what it leaves unused. mfu = flops_per_token * tokens/s / peak.
    every: {"eval": eval_steps, "save": save_steps}: how often the time spent in `aside(name)` comes again.
    seconds: what earlier parts of a resumed run took.
    """

    def __init__(self, total_steps: int, tokens_per_step: int, flops_per_token=0.0, peak: float | None = None,
                 *, step: int = 0, every: dict | None = None, seconds: float = 0.0):
        self.total_steps, self.tokens_per_step = total_steps, tokens_per_step
        self.flops_per_token, self.peak = flops_per_token, peak
        self.every = {name: steps for name, steps in (every or {}).items() if steps}
        self.step, self.measured, self.step_seconds = step, 0, None
        self.aside_seconds, self.last_aside = Counter(), {}  # by name: in this log interval; the last one
        self.interval_start = time.perf_counter()
        self.run_start = self.interval_start - seconds

    @property
    def seconds(self) -> float:
        """Seconds the run has taken: training, evaluation and saving, over all its parts."""
        return time.perf_counter() - self.run_start

    @contextlib.contextmanager
    def aside(self, name: str):
        """Evaluation, saving: time that is not training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.last_aside[name] = time.perf_counter() - start
            self.aside_seconds[name] += self.last_aside[name]

    def measure(self, step: int) -> dict:
        """{"seconds", "tokens_per_second", "mfu"} at the end of a log interval, and "save_seconds" where
        training stood still for a save in it. Call it when the device has finished (after reading the loss):
        before, it would time the queueing."""
        now = time.perf_counter()
        spent = max(now - self.interval_start - self.aside_seconds.total(), 1e-9)
        saving = self.aside_seconds.get("save")
        steps = max(step - self.step, 1)
        # the first interval holds compilation and warm-up: the second replaces it, later ones are averaged in
        new = spent / steps
        self.step_seconds = new if self.measured < 2 else 0.8 * self.step_seconds + 0.2 * new
        self.measured += 1
        self.interval_start, self.aside_seconds, self.step = now, Counter(), step
        rate = steps * self.tokens_per_step / spent
        mfu = self.flops_per_token * rate / self.peak if self.peak and self.flops_per_token else None
        return {"seconds": round(self.seconds, 3), "tokens_per_second": round(rate, 1),
                "mfu": None if mfu is None else round(mfu, 4),
                **({"save_seconds": round(saving, 3)} if saving else {})}

    @property
    def eta(self) -> float | None:
        """Seconds left, evaluations and saves included; None before the first measurement."""
        if self.step_seconds is None:
            return None
        left = (self.total_steps - self.step) * self.step_seconds
        for name, took in self.last_aside.items():
            if steps := self.every.get(name):  # once per multiple still ahead, the last step counts as one
                left += took * (math.ceil(self.total_steps / steps) - self.step // steps)
        return left
