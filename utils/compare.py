"""Compares the folders of two runs: metrics, checkpoints, local variables, the saved model; for check.py."""

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

TIMES_AND_SIZES = ("seconds", "tokens_per_second", "mfu", "save_seconds", "peak_memory")


def settings(script, flags: list[str]):
    """The settings of a script (a module) for these flags."""
    return parse_args(script.TrainArgs, script.PRESETS, flags)


def records(run: Path, last: float = math.inf) -> list[dict]:
    """The lines of metrics.jsonl up to step `last`, without times and memory sizes."""
    return [{key: value for key, value in line.items() if key not in TIMES_AND_SIZES}
            for line in read_metrics(run) if line.get("step", 0) <= last]  # fmt: skip


def by_processes(metric: str, step: int) -> float:
    """The relative tolerance of a metric between one and two processes, which sum in another order. Muon's
    bfloat16 amplifies that at each step. Metrics that amplify a loss difference get ten times as much."""
    if step < 2 and metric.startswith("loss") and "stderr" not in metric:
        return 1e-5
    if step > 1 and "accuracy" in metric:  # rounding may change one of few correct predictions
        return math.inf
    return 1e-2 if any(name in metric for name in ("stderr", "grad_norm", "perplexity")) else 1e-3


def differences(expected: list[dict], actual: list[dict], ignored=(), tolerance=0.0) -> tuple[dict, str]:
    """Compares two lists of records: ({metric: its first difference}, a summary). tolerance: relative; a
    number, or a function of metric and step."""
    unequal, metrics, largest, count = {}, set(), 0.0, 0
    for record, other in zip(expected, actual, strict=False):
        step = record.get("step", 0)
        for metric in sorted((record.keys() | other.keys()) - {*ignored}):
            old, new = record.get(metric, "missing"), other.get(metric, "missing")
            floats = isinstance(old, float) and isinstance(new, float)
            difference = abs(old - new) / max(abs(old), 1e-12) if floats else float(old != new)
            limit = tolerance(metric, step) if callable(tolerance) else tolerance
            if difference > limit:
                where = f" of step {step}" * ("step" in record)
                unequal.setdefault(metric, f"{metric}{where} is {new} instead of {old}")
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
    """Which tensors of the last checkpoints differ in any bit, or "". weights: compare only the model's."""
    old, new = (_tensors(max((folder / "checkpoints").glob("step-*"))) for folder in (run, other))
    names = [name for name in sorted(old.keys() | new.keys()) if "/" not in name or not weights]
    unequal = [name for name in names if name not in old or name not in new
               or not torch.equal(old[name], new[name])]  # fmt: skip
    return f"{len(unequal)} tensors of the last checkpoint differ, first {unequal[0]}" if unequal else ""


def variables_difference(undisturbed: Path, stopped: Path, resumed: Path) -> str:
    """The local variables with other values after a resume, at the first such step, or "". Variables that
    already differ before the stop, as a time does, and variables that never change are left out."""
    before, expected, after = (read_notes(file, "variables") for file in (stopped, undisturbed, resumed))
    all_steps = [*expected.values(), *after.values()]
    changing = {name for values in all_steps for name in values
                if len({values[name] for values in all_steps if name in values}) > 1}  # fmt: skip
    clocks = {name for step, values in before.items() for name in values
              if values[name] != expected.get(step, {}).get(name)}  # fmt: skip
    for step, new in after.items():
        old = expected.get(step, {})
        unequal = [name for name in new.keys() & old.keys() & changing - clocks if new[name] != old[name]]
        if unequal:
            name, *others = sorted(unequal, key=lambda name: (len(new[name]), name))  # numbers before tensors
            also = f" (different, too: {', '.join(others)})" * bool(others)
            value = f"{new[name]:.40} instead of {old[name]:.40}"
            return f"the variable {name} of main at step {step} is {value}{also}"
    return ""


def read_notes(file: Path, key: str) -> dict:
    """{step: value of `key`} from the notes that utils/observed.py wrote."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {line["step"]: line[key] for line in lines if key in line}


def state_problem(checkpoint: Path) -> str:
    """The problem in a checkpoint, or "": a schedule whose optimizer is not saved, a copy of the weights that
    shares their memory."""
    objects = json.loads((checkpoint / "state.json").read_bytes())["things"]
    states = {name: record.get("state", {}) for name, record in objects.items()}
    used = [group["lr"] for state in states.values() for group in state.get("param_groups", ())]
    schedules = {name: state["_last_lr"] for name, state in states.items() if "_last_lr" in state}
    for name, rates in schedules.items():
        if unused := [rate for rate in rates if rate not in used]:
            second = [other for other in schedules if other != name and {*schedules[other]} <= {*used}]
            why = f"{second[0]} overwrites its rates" if second else "it drives another optimizer"
            return f"{name} has the learning rate {unused[0]:g}, the optimizers have {used}: {why}"
    tensors = {name: tensor for name, tensor in _tensors(checkpoint).items() if tensor.numel() > 1}
    weights = [tensor for name, tensor in tensors.items() if "/" not in name]
    for name in objects.keys() - {"model", "optimizer"}:
        copies = [tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")]
        if copies and all(any(torch.equal(copy, weight) for weight in weights) for copy in copies):
            return f"all tensors of {name} equal weights of the model: they share memory, clone() is missing"
    return ""


@torch.no_grad()
def loss_by_transformers(script, args) -> float:
    """The evaluation loss of the model in output_dir, computed by transformers alone on all rows at once.

    script: the module, whose imports from data/ are used. args: the settings of the run."""
    masked = hasattr(args, "mlm_probability")
    pairs = masked and args.next_sentence
    kind = "PreTraining" if pairs else "MaskedLM" if masked else "CausalLM"
    quiet_libraries()
    with contextlib.redirect_stdout(io.StringIO()):
        options = ("unigram", 0 if pairs else 2) if masked else ()
        tokenizer, _, eval_rows = script.load_rows(args, *options)
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
    """{name of a weight, or object/name: tensor}"""
    files = [load_file(file) for file in sorted(checkpoint.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}
