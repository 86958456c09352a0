"""A few lines on what a run will do, before its first step, with warnings of what the user may not expect."""

import contextlib
import hashlib
import importlib.metadata
import inspect
import os
import platform
import subprocess
from pathlib import Path

import torch
from accelerate.utils import DistributedType, parse_flag_from_env

from utils.devices import cpu_has_bfloat16, local_processes, module_of
from utils.display.throughput import device_name
from utils.launch import PRECISIONS, counted, hiding
from utils.learning.optim import describe_groups
from utils.xla import is_xla, xla_precision

DRIVERS = {"/proc/driver/nvidia/version": "NVIDIA", "/dev/kfd": "AMD"}  # files of a loaded driver
LARGE = 10_000_000  # parameters of a model whose step on a CPU is much faster in bfloat16


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


def environment_of(args) -> dict:
    """For args.json: versions, platform, and {"script": its SHA-256, "git": git describe --dirty, or None}"""
    packages = ("torch", "accelerate", "transformers", "datasets", "huggingface_hub", "tokenizers", "numpy")
    versions = {package: importlib.metadata.version(package) for package in packages}
    script = Path(inspect.getsourcefile(type(args)))
    git, command = None, ["git", "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=10)
        git = done.stdout.strip() or None
    code = {"script": hashlib.sha256(script.read_bytes()).hexdigest(), "git": git}
    return {"versions": versions, "python": platform.python_version(), "platform": platform.platform(),
            "code": code}  # fmt: skip


def start_lines(args, accelerator, steps, step: int, optimizer, facts: dict) -> list[str]:
    """The lines printed before the first step, the last ones warnings. step: steps already done; facts: as in
    utils/display/log.py."""
    processes, local, launch = accelerator.num_processes, local_processes(), facts["launch"]
    micro, rows, tokens = steps.micro_batches(0), steps.rows_before(1), steps.tokens_before(1)
    total, passes = steps.tokens_before(steps.last), steps.epoch(steps.last)
    again = "; the same command resumes it" if args.resume_from_checkpoint == "auto" else ""
    begins = f"continues at step {step:,}" if step else "begins"
    target = launched(accelerator.distributed_type, processes, local)
    target += f", {launch['device']}, {launch['precision']}"
    if launch["compiler"] != "no":
        target += f", compiled with {launch['compiler']}"
    factors = (rows // (micro * processes), "row"), (micro, "micro-batch"), (processes, "process")
    batch = " x ".join(counted(*factor) for factor in factors)
    batch += f" = {rows:,} rows = {tokens:,} tokens per step"
    if total != steps.last * tokens:
        batch += " at first"
    length = f"{steps.last:,} steps = {_millions(total)} tokens"
    if passes > 1:
        length += f" = {passes:,.3g} passes over the rows"
    names, weights = facts["settings"]["dataset_name"], args.model_name_or_path
    data = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    model = f"{facts['model_type']} {f'with the weights of {weights}' if weights else 'from scratch'}"
    model += f" on {data}, {_millions(facts['parameters'])} parameters, attention: {launch['attention']}"
    lines = [f"run        {begins}, in {args.output_dir}; stop it any time{again}", f"target     {target}",
             f"batch      {batch}", f"steps      {length}", f"model      {model}"]
    lines += describe_groups(optimizer)
    on_cpu, large = accelerator.device.type == "cpu", facts["parameters"] > LARGE
    if on_cpu and large and launch["precision"] == PRECISIONS["no"] and cpu_has_bfloat16():
        lines.append("advice     accelerate launch --mixed_precision bf16 is faster on this CPU")
    warnings = device_warnings(accelerator.device.type, torch.accelerator.device_count(), local)
    warnings += precision_warnings(launch["precision"], accelerator.device)
    return lines + [f"warning    {text}" for text in warnings]


def device_warnings(device: str, devices: int, processes: int) -> list[str]:
    """device: the type in use; devices: how many are visible; processes: how many on this machine."""
    if device != "cpu":
        return [f"num_processes: {processes} of {devices} devices are used."] if processes < devices else []
    drivers = [maker for file, maker in DRIVERS.items() if Path(file).exists()]
    causes = [f"an accelerator's {maker} driver is loaded" for maker in drivers]
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "WORLD_SIZE" in os.environ:
        causes.append("launched for an accelerator")
    if not causes or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return []
    return [f"device: {causes[0]}, but none is visible{hiding()} to torch {torch.__version__}: on the CPU."]


def precision_warnings(precision: str, device: torch.device) -> list[str]:
    ask = getattr(module_of(device), "is_bf16_supported", None)
    if precision != PRECISIONS["bf16"] or ask is None or ask(including_emulation=False):
        return []
    return ["mixed_precision: bf16 is emulated on this device and slow; use --mixed_precision fp16."]


def launched(kind: DistributedType, processes: int, local: int) -> str:
    names = {"NO": "one process", "XLA": "XLA", "FSDP": "FSDP", "MULTI_CPU": "CPU"}
    name = names.get(kind.name, "DDP")
    if processes > 1 or kind != DistributedType.NO:
        name += f", {counted(processes, 'process')}"
    return name + (f" on {processes // local} machines" if processes > local and kind.name != "XLA" else "")


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 500_000 else f"{number:,}"
