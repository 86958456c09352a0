"""Before the first step: what libraries may print, what the run will do, warnings of what surprises users."""

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
from utils.learning.optim import describe_groups, further_rates


def quiet_libraries(level: int = logging.ERROR) -> None:
    """Show libraries' messages from `level` on, and no progress bars of theirs; TRANSFORMERS_VERBOSITY and
    the like override that. Warnings of our own modules are for the user."""
    import huggingface_hub.utils
    import transformers

    # datasets reads these when it is imported, which takes 60 MB and half a second: only if it is needed.
    os.environ.setdefault("DATASETS_VERBOSITY", logging.getLevelName(level).lower())
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for name in ("transformers", "huggingface_hub", "accelerate", "torch", "fsspec", "httpx"):
        if f"{name.upper()}_VERBOSITY" not in os.environ:
            logging.getLogger(name).setLevel(level)
    if os.environ.get("RANK", "0") == "0":  # waiting for the Hub is no silence
        logging.getLogger("huggingface_hub.utils._http").setLevel(logging.WARNING)
        for name in ("transformers.models", "transformers.integrations"):  # a model without its kernels
            logging.getLogger(name).setLevel(min(level, logging.WARNING))
        logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_worth_a_line)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=UserWarning, module=r"(__main__|train_|utils\.|data\.)")
    warnings.filterwarnings("ignore", message=r"std\(\)")  # of one row there is no standard error
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Short convolutions, which the default has, are fast without a kernel of their own."""
    return "causal_conv1d" not in record.getMessage()


def launch_facts(accelerator, attention: str) -> dict:
    """What the run computes with. attention: transformers' name of its kernel."""
    precision = xla_precision() if is_xla() else accelerator.mixed_precision
    return {
        "device": device_name(accelerator.device),
        "processes": accelerator.num_processes,
        "precision": PRECISIONS.get(precision, precision),
        "attention": attention,
        "compiler": accelerator.state.dynamo_plugin.backend.value.lower(),
    }


def environment_of() -> dict:
    """For args.json: versions and platform."""
    packages = ("torch", "accelerate", "transformers", "datasets", "huggingface_hub", "tokenizers", "numpy")
    versions = {package: importlib.metadata.version(package) for package in packages}
    return {"versions": versions, "python": platform.python_version(), "platform": platform.platform()}


def start_lines(args, accelerator, steps, step: int, optimizer, facts: dict) -> list[str]:
    """The lines printed before the first step, the last ones warnings. step: steps already done; facts: as in
    utils/display/log.py."""
    processes, launch = accelerator.num_processes, facts["launch"]
    micro, rows, tokens = steps.micro_batches(0), steps.rows_before(1), steps.tokens_before(1)
    total, passes = steps.tokens_before(steps.last), steps.epoch(steps.last)
    again = "; the same command resumes it" if args.resume_from_checkpoint == "auto" else ""
    begins = f"continues at step {step:,}" if step else "begins"
    kind = accelerator.distributed_type.name  # NO: one process
    target = counted(processes, "process") + f" ({kind})" * (kind != "NO")
    target += f", {launch['device']}, {launch['precision']}"
    if launch["compiler"] != "no":
        target += f", compiled with {launch['compiler']}"
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
    model += f" on {data}, {_millions(facts['parameters'])} parameters{facts['size']}"
    model += f", attention: {launch['attention']}"
    lines = [f"run        {begins}, in {args.output_dir}; stop it any time{again}", f"target     {target}",
             f"batch      {batch}", f"steps      {length}", f"model      {model}"]
    lines += describe_groups(optimizer)
    if "tensorboard" in args.report_to:
        lines.append(f"tracker    tensorboard --logdir {args.output_dir}")
    if args.prompts == ["rows"]:
        lines.append("samples    continue words of evaluation rows; --prompts gives yours")
    if passes >= 5 and not step:
        lines.append(f"advice     {passes:,.0f} passes over the same text: evaluations may get worse while "
                     "the training loss still falls; --num_train_epochs 3 takes the place of steps")
    usual = getattr(type(args)(), "learning_rate", math.inf)
    if weights and not step and getattr(args, "learning_rate", 0) >= usual:
        lines.append("advice     these rates are for new models and ruin trained weights: try a twentieth, "
                     f"{further_rates(args)}")
    local, devices = local_processes(), torch.accelerator.device_count()
    if accelerator.device.type != "cpu" and local < devices:
        lines.append(f"warning    num_processes: {local} of {devices} devices are used.")
    if accelerator.mixed_precision == "bf16" and not has_bf16(accelerator.device):
        lines.append("warning    mixed_precision: bf16 is emulated and slow here; use fp16.")
    return lines


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 500_000 else f"{number:,}"
