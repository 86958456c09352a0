"""Comparisons of what runs of a script left in their folders, for utils/check.py."""

import contextlib
import io
import json
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file

from utils.display.metrics import by_set, newest, read_metrics
from utils.display.progress import quiet_libraries
from utils.flags import parse_args

CLOCK = ("seconds", "tokens_per_second", "mfu", "save_seconds", "peak_memory")


def settings(script, flags: list[str]):
    """The settings of a script, a module, with these flags."""
    return parse_args(script.TrainArgs, script.PRESETS, getattr(script, "OTHERS", None), flags)


def values(what: str, found: float, expected: float, tolerance: float) -> tuple[str, str]:
    """(what differs by more than tolerance, relative, or ""; what was compared)"""
    apart = abs(found - expected) / abs(expected)
    text = f"{what} is {found:.6f}, the run's {expected:.6f}, relative difference {apart:.1g}"
    return text if apart > tolerance else "", text


def metrics_difference(run: Path, other: Path, tolerance: float = 0.0) -> tuple[str, str]:
    """The same of two metrics.jsonl: the first number. Standard errors, norms: ten times the tolerance."""
    ours, theirs, largest, count = _lines(run), _lines(other), 0.0, 0
    for mine, its in zip(ours, theirs, strict=False):
        for key in sorted(mine.keys() | its.keys()):
            was, now, count = mine.get(key), its.get(key), count + 1
            numbers = isinstance(was, float) and isinstance(now, float)
            apart = abs(was - now) / max(abs(was), 1e-12) if numbers else float(was != now)
            apart /= 10 if "stderr" in key or "grad_norm" in key else 1
            if apart > tolerance:
                return f"{key} of step {mine.get('step')} is {now} instead of {was}", ""
            largest = max(largest, apart)
    if len(ours) != len(theirs):
        return f"{len(theirs)} lines of metrics.jsonl instead of {len(ours)}", ""
    return "", f"{count} numbers of metrics.jsonl, largest relative difference {largest:.1g}"


def checkpoint_difference(run: Path, other: Path) -> str:
    """Which tensors of the last checkpoints are not the same bits, or ""."""
    ours, theirs = (_tensors(max((each / "checkpoints").glob("step-*"))) for each in (run, other))
    unequal = [name for name in sorted(ours.keys() | theirs.keys()) if name not in ours or name not in theirs
               or not torch.equal(ours[name], theirs[name])]  # fmt: skip
    return f"{len(unequal)} tensors of the last checkpoint differ, {unequal[0]} first" if unequal else ""


def odd_state(checkpoint: Path) -> str:
    """What is wrong with one checkpoint: a schedule without its optimizer, memory that is shared; or ""."""
    things = json.loads((checkpoint / "state.json").read_bytes())["things"]
    states = {name: thing.get("state", {}) for name, thing in things.items()}
    used = [group["lr"] for state in states.values() for group in state.get("param_groups", ())]
    for rate in (rate for state in states.values() for rate in state.get("_last_lr", ())):
        if rate not in used:
            return f"a schedule is at {rate:g}, the optimizers at {used}: it drives another optimizer"
    tensors = {name: tensor for name, tensor in _tensors(checkpoint).items() if tensor.numel() > 1}
    weights = [tensor for name, tensor in tensors.items() if "/" not in name]
    for thing in things.keys() - {"model", "optimizer"}:
        own = [tensor for name, tensor in tensors.items() if name.startswith(f"{thing}/")]
        if own and all(any(torch.equal(tensor, weight) for weight in weights) for tensor in own):
            return f"all of {thing} equals weights of the model: they share memory, for lack of a clone"
    return ""


def evaluation_loss(run: Path) -> tuple[str, float]:
    """The last loss of the first evaluation set, and its name."""
    losses = by_set(newest(_lines(run), "loss/eval")[0], "loss/eval")
    name, loss = next(iter(losses.items()))
    return f"loss/eval/{name}".rstrip("/"), loss


@torch.no_grad()
def loss_by_transformers(script, args) -> float:
    """The same of the model in output_dir by transformers alone, of all rows as one batch.

    script: the module, with what it imports from data; args: the settings of the run."""
    masked = hasattr(args, "mlm_probability")
    pairs = masked and args.next_sentence
    kind = "PreTraining" if pairs else "MaskedLM" if masked else "CausalLM"
    quiet_libraries()
    with contextlib.redirect_stdout(io.StringIO()):
        special = ("unigram", 0 if pairs else 2) if masked else ()
        tokenizer, _, eval_rows = script.load_rows(args, Accelerator(cpu=True), [], *special)
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


def _lines(run: Path) -> list[dict]:
    """metrics.jsonl without what the clock decides."""
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in read_metrics(run)]


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """{name of a weight, or thing/name: tensor}"""
    files = [load_file(file) for file in sorted(checkpoint.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}
