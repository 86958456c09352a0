"""Comparisons of what runs of a script left in their folders, for utils/check.py."""

import contextlib
import io
import json
import math
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from utils.display.metrics import read_metrics
from utils.display.start import quiet_libraries
from utils.flags import parse_args

CLOCK = ("seconds", "tokens_per_second", "mfu", "save_seconds", "peak_memory")


def settings(script, flags: list[str]):
    """The settings of a script, a module, with these flags."""
    return parse_args(script.TrainArgs, script.PRESETS, flags)


def records(run: Path, last: float = math.inf) -> list[dict]:
    """The lines of metrics.jsonl up to step `last`, without what the clock decides."""
    return [{key: value for key, value in line.items() if key not in CLOCK}
            for line in read_metrics(run) if line.get("step", 0) <= last]  # fmt: skip


def by_processes(metric: str, step: int) -> float:
    """The relative tolerance of a metric between one and two processes: sums in another order, which Muon's
    bfloat16 makes larger with each step. Small differences of large numbers get ten times as much."""
    if step < 2 and metric.startswith("loss") and "stderr" not in metric:
        return 1e-5
    if step > 1 and "accuracy" in metric:  # rounding may change one of few right predictions
        return math.inf
    return 1e-2 if any(name in metric for name in ("stderr", "grad_norm", "perplexity")) else 1e-3


def differences(expected: list[dict], actual: list[dict], ignored=(), tolerance=0.0) -> tuple[dict, str]:
    """({metric: its first difference}, a summary) of two lists of records. tolerance: relative, a number or a
    function of metric and step."""
    unequal, metrics, largest, count = {}, set(), 0.0, 0
    for record, other in zip(expected, actual, strict=False):
        step = record.get("step", 0)
        for metric in sorted((record.keys() | other.keys()) - {*ignored}):
            was, now = record.get(metric, "missing"), other.get(metric, "missing")
            numbers = isinstance(was, float) and isinstance(now, float)
            difference = abs(was - now) / max(abs(was), 1e-12) if numbers else float(was != now)
            limit = tolerance(metric, step) if callable(tolerance) else tolerance
            if difference > limit:
                where = f" of step {step}" * ("step" in record)
                unequal.setdefault(metric, f"{metric}{where} is {now} instead of {was}")
            if limit < math.inf:
                largest, metrics, count = max(largest, difference), metrics | {metric}, count + 1
    if len(expected) != len(actual):
        unequal["lines"] = f"metrics.jsonl has {len(actual)} lines instead of {len(expected)}"
    if not unequal:
        return {}, f"{count} number{'s' * (count > 1)}, largest relative difference {largest:.1g}"
    first, *others = unequal
    also = f"; {', '.join(others)} differ, too" * bool(others)
    return unequal, f"{unequal[first]}{also}; {len(metrics - unequal.keys())} other metrics agree"


def checkpoint_difference(run: Path, other: Path, weights: bool = False) -> str:
    """Which tensors of the last checkpoints are not the same bits, or "". weights: only the model's."""
    ours, theirs = (_tensors(max((each / "checkpoints").glob("step-*"))) for each in (run, other))
    names = [name for name in sorted(ours.keys() | theirs.keys()) if "/" not in name or not weights]
    unequal = [name for name in names if name not in ours or name not in theirs
               or not torch.equal(ours[name], theirs[name])]  # fmt: skip
    return f"{len(unequal)} tensors of the last checkpoint differ, {unequal[0]} first" if unequal else ""


def variables_difference(undisturbed: Path, stopped: Path, resumed: Path) -> str:
    """Local variables that have other values after a resume, at the first such step, or "". Not those that
    differ before the stop already, as a clock does, or that never change."""
    before, expected, after = (read_notes(file, "variables") for file in (stopped, undisturbed, resumed))
    of_all = [*expected.values(), *after.values()]
    changing = {name for values in of_all for name in values
                if len({values[name] for values in of_all if name in values}) > 1}  # fmt: skip
    clocks = {name for step, values in before.items() for name in values
              if values[name] != expected.get(step, {}).get(name)}  # fmt: skip
    for step, now in after.items():
        was = expected.get(step, {})
        unequal = [name for name in now.keys() & was.keys() & changing - clocks if now[name] != was[name]]
        if unequal:
            name, *others = sorted(unequal, key=lambda name: (len(now[name]), name))  # numbers before tensors
            also = f"; so are {', '.join(others)}" * bool(others)
            return f"{name} of main at step {step} is {now[name]:.40} instead of {was[name]:.40}{also}"
    return ""


def read_notes(file: Path, key: str) -> dict:
    """{step: value} of what utils/observed.py wrote."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {line["step"]: line[key] for line in lines if key in line}


def odd_state(checkpoint: Path) -> str:
    """What is wrong with one checkpoint: a schedule without its optimizer, memory that is shared; or ""."""
    things = json.loads((checkpoint / "state.json").read_bytes())["things"]
    states = {name: thing.get("state", {}) for name, thing in things.items()}
    used = [group["lr"] for state in states.values() for group in state.get("param_groups", ())]
    schedules = {name: state["_last_lr"] for name, state in states.items() if "_last_lr" in state}
    for name, rates in schedules.items():
        if unused := [rate for rate in rates if rate not in used]:
            second = [other for other in schedules if other != name and {*schedules[other]} <= {*used}]
            why = f"{second[0]} overwrites its rates" if second else "it drives another optimizer"
            return f"{name} is at {unused[0]:g}, the optimizers at {used}: {why}"
    tensors = {name: tensor for name, tensor in _tensors(checkpoint).items() if tensor.numel() > 1}
    weights = [tensor for name, tensor in tensors.items() if "/" not in name]
    for thing in things.keys() - {"model", "optimizer"}:
        its = [tensor for name, tensor in tensors.items() if name.startswith(f"{thing}/")]
        if its and all(any(torch.equal(tensor, weight) for weight in weights) for tensor in its):
            return f"all of {thing} equals weights of the model: they share memory, for lack of a clone"
    return ""


@torch.no_grad()
def loss_by_transformers(script, args) -> float:
    """The evaluation loss of the model in output_dir by transformers alone, of all rows as one batch.

    script: the module, with what it imports from data; args: the settings of the run."""
    masked = hasattr(args, "mlm_probability")
    pairs = masked and args.next_sentence
    kind = "PreTraining" if pairs else "MaskedLM" if masked else "CausalLM"
    quiet_libraries()
    with contextlib.redirect_stdout(io.StringIO()):
        special = ("unigram", 0 if pairs else 2) if masked else ()
        tokenizer, _, eval_rows = script.load_rows(args, *special)
        model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(args.output_dir)
    args.per_device_eval_batch_size = args.max_eval_samples
    mask = script.MaskTokens(tokenizer, script.EVAL_MASKED) if masked else None
    [batch] = script.eval_loader(next(iter(eval_rows.values())), args, mask)
    batch = {name: column[batch["row"] >= 0] for name, column in batch.items()}
    labels = batch["input_ids"].clone()
    if masked:
        labels.fill_(-100)
        used = batch["slot_labels"] != -100
        labels[used.nonzero()[:, 0], batch["slots"][used]] = batch["slot_labels"][used]
    inputs = ("input_ids", "attention_mask", "token_type_ids", "next_sentence_label")
    return model(**{key: batch[key] for key in inputs if key in batch}, labels=labels)["loss"].item()


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """{name of a weight, or thing/name: tensor}"""
    files = [load_file(file) for file in sorted(checkpoint.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}
