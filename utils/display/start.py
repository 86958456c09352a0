"""The start of a run: which messages of libraries are shown, the start-up lines, advice and warnings."""

import importlib.metadata
import logging
import math
import os
import platform
import warnings

import torch

from utils.devices import has_bf16, is_xla, local_processes, xla_precision
from utils.display.throughput import device_name
from utils.launch import PRECISIONS, counted
from utils.learning.optim import finetuning_rates


def quiet_libraries(level: int = logging.ERROR) -> None:
    """Hides the libraries' progress bars, and their messages below `level` unless TRANSFORMERS_VERBOSITY or
    the like is set. UserWarnings from the script, utils/ and data/ are shown."""
    import huggingface_hub.utils
    import transformers

    # datasets, which is imported only if needed (85 MB, half a second), reads these variables.
    os.environ.setdefault("DATASETS_VERBOSITY", logging.getLevelName(level).lower())
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for name in ("transformers", "huggingface_hub", "accelerate", "torch", "fsspec", "httpx"):
        if f"{name.upper()}_VERBOSITY" not in os.environ:
            logging.getLogger(name).setLevel(level)
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("huggingface_hub.utils._http").setLevel(logging.WARNING)  # shows retries
        for name in ("transformers.models", "transformers.integrations"):  # say that a kernel is missing
            logging.getLogger(name).setLevel(min(level, logging.WARNING))
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=UserWarning, module=r"(__main__|train_|utils\.|data\.)")
    warnings.filterwarnings("ignore", message=r"std\(\)")  # a single row has no standard error
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()


def launch_facts(accelerator, attention: str) -> dict:
    """Device, processes, precision, attention and compiler. attention: the name of its kernel."""
    precision = xla_precision() if is_xla() else accelerator.mixed_precision
    return {
        "device": device_name(accelerator.device),
        "processes": accelerator.num_processes,
        "precision": PRECISIONS.get(precision, precision),
        "attention": attention,
        "compiler": accelerator.state.dynamo_plugin.backend.value.lower(),
    }


def environment_of() -> dict:
    """Versions and platform, for args.json."""
    packages = ("torch", "accelerate", "transformers", "datasets", "huggingface_hub", "tokenizers", "numpy")
    versions = {package: importlib.metadata.version(package) for package in packages}
    return {"versions": versions, "python": platform.python_version(), "platform": platform.platform()}


def start_lines(args, accelerator, steps, step: int, size: str, facts: dict) -> list[str]:
    """The lines printed before the first step; advice and warnings come last. step: where the run continues.
    size: the text of compare_with_default. facts: those that Log keeps."""
    processes, launch = accelerator.num_processes, facts["launch"]
    micro, rows, tokens = steps.micro_batches(0), steps.rows_before(1), steps.tokens_before(1)
    total, passes = steps.tokens_before(steps.last), steps.epoch(steps.last)
    resumes = ": the same command resumes it" if args.resume_from_checkpoint == "auto" else ""
    starts = f"continues at step {step:,}" if step else "starts"
    parallelism = accelerator.distributed_type.name  # NO: one process
    device = counted(processes, "process") + f" ({parallelism})" * (parallelism != "NO")
    device += f", {launch['device']}, {launch['precision']}"
    if launch["compiler"] != "no":
        device += f", compiled with {launch['compiler']}"
    factors = (rows // (micro * processes), "row"), (micro, "micro-batch"), (processes, "process")
    batch = " x ".join(counted(*factor) for factor in factors)
    batch += f" = {rows:,} rows = {tokens:,} tokens per step"
    if total != steps.last * tokens:
        batch += " at first"
    length = f"{steps.last:,} steps = {_millions(total)} tokens"
    length += f" = {passes:,.3g} passes over {len(steps.rows):,} rows"
    names, weights = facts["settings"]["dataset_name"], args.model_name_or_path
    data = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    origin = "" if step else f" with the weights of {weights}" if weights else " from scratch"
    model = f"{facts['model_type']}{origin}"
    model += f" on {data}, {_millions(facts['parameters'])} parameters{size}"
    model += f", attention: {launch['attention']}"
    lines = [f"run        {starts} in {args.output_dir}; stop it any time{resumes}", f"device     {device}",
             f"batch      {batch}", f"steps      {length}", f"model      {model}"]
    lines += [f"optimizer  {group}" for group in facts["optimizer"]]
    if "tensorboard" in args.report_to:
        lines.append(f"tracker    tensorboard --logdir {args.output_dir}")
    if args.prompts == ["rows"]:
        lines.append("samples    complete the first words of evaluation rows; give your own with --prompts")
    if passes >= 5 and not step:
        lines.append(f"advice     {passes:,.0f} passes over the same text may overfit: watch the evaluation "
                     "loss, or train less with --num_train_epochs 3")
    default_rate = getattr(type(args)(), "learning_rate", math.inf)
    if weights and not step and getattr(args, "learning_rate", 0) >= default_rate:
        lines.append("advice     these learning rates are for random weights and ruin trained weights: try a "
                     f"twentieth, {finetuning_rates(args)}")
    local, devices = local_processes(), torch.accelerator.device_count()
    if accelerator.device.type != "cpu" and local < devices:
        lines.append(f"warning    num_processes: {local} of {devices} devices are used.")
    if accelerator.mixed_precision == "bf16" and not has_bf16(accelerator.device):
        lines.append("warning    mixed_precision: bf16 is emulated and slow here; use fp16.")
    return lines


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 500_000 else f"{number:,}"
