"""A few lines on what a run will do, before it starts, with warnings of what the user may not expect."""

import os
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from accelerate.utils import DistributedType, DynamoBackend, parse_flag_from_env

from utils.devices import cpu_has_bfloat16, local_processes, module_of
from utils.display.throughput import device_name
from utils.xla import is_xla, xla_precision

DRIVERS = {"/proc/driver/nvidia/version": "NVIDIA", "/dev/kfd": "AMD"}  # files of a loaded driver
VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
LARGE = 10_000_000  # parameters of a model whose step on a CPU is much faster in bfloat16
PRECISIONS = {"no": "float32", "bf16": "bfloat16 autocast", "fp16": "float16 autocast with loss scaling"}


def check_devices() -> None:
    """Before the Accelerator is made: ValueError if this machine has more processes than accelerators, as
    some would fail with "invalid device ordinal". `check_launch` deals with machines without any."""
    processes, devices = local_processes(), torch.accelerator.device_count()
    if processes > devices > 0 and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        raise ValueError(
            f"num_processes: {processes} processes were started on this machine and it shows "
            f"{counted(devices, 'device')}{hiding()}; each process needs its own. Launch with "
            f"--num_processes {devices}."
        )


def check_launcher() -> None:
    """ValueError if the launcher's precision, compiler or number of processes cannot be used here."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in PRECISIONS:
        raise ValueError(f"mixed_precision: {precision!r} from the launcher; give no, bf16 or fp16.")
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if precision == "fp16" and (on_cpu or is_xla()):
        raise ValueError("mixed_precision: fp16 from the launcher needs an accelerator with loss scaling; "
                         "give no on the CPU, bf16 or no on XLA.")
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.upper() not in DynamoBackend.__members__:
        raise ValueError(f"dynamo_backend: {compiler!r} from the launcher; give no or inductor.")
    if (asked := processes_asked()) > 1 and "WORLD_SIZE" not in os.environ and not is_xla():
        raise ValueError(
            f"num_processes: accelerate starts one process with this YAML file, not {asked}; launch with "
            "accelerate_configs/multi_gpu.yaml, whose first lines show how to start several CPU processes."
        )


def processes_asked() -> int:
    """--num_processes in the command of `accelerate launch`; 1 if there is none, or another parent."""
    try:
        command = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):  # AttributeError: no parent
        return 1
    words = " ".join(command).replace("=", " ").split()
    numbers = [number for flag, number in pairwise(words) if flag in ("--num_processes", "--num-processes")]
    return int(numbers[-1]) if "launch" in words and numbers and numbers[-1].isdecimal() else 1


def check_launch(accelerator) -> None:
    """ValueError if several processes were started and each takes itself for the only one (a GPU
    configuration without GPUs), or if the environment makes accelerate divide each loss a second time."""
    if (steps := accelerator.gradient_accumulation_steps) != 1:
        cause = f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS is {steps} in the environment"
        raise ValueError(f"{cause}: unset it, and give --gradient_accumulation_steps {steps} to the script.")
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started == accelerator.num_processes:
        return
    remedy = "On XLA launch with accelerate_configs/tpu.yaml: it starts one process per chip."
    if accelerator.distributed_type != DistributedType.XLA:
        flags = "set ACCELERATE_USE_CPU=true and give --mixed_precision no --dynamo_backend no"
        cpu = f"launch with accelerate_configs/cpu.yaml, or for several processes {flags}"
        remedy = f"No accelerator is visible{hiding()}. On the CPU {cpu}."
    raise ValueError(
        f"num_processes: {started} processes were started, but each sees {accelerator.num_processes}: they "
        f"form no group, would all train on the same data and overwrite each other's files. {remedy}"
    )


def announce(args, settings: dict, datasets: list[str], is_main_process: bool) -> None:
    """Prints the first line of a run: what it trains on what, for how long, where, and how to stop it."""
    if args.eval_only or args.show or not is_main_process:
        return
    model = settings["model_name_or_path"] or f"{settings['model_type']} from scratch"
    steps, epochs = args.max_train_steps, args.num_train_epochs
    length = counted(steps, "step") if steps else counted(epochs, "epoch")
    again = "; the same command resumes it" if args.resume_from_checkpoint == "auto" else ""
    what = f"trains {model} on {', '.join(datasets)} for {length}, in {args.output_dir}"
    print(f"run        {what}; stop it any time{again}", flush=True)


def launch_facts(accelerator, attention: str) -> dict:
    """What the run computes with, for args.json and run.json. attention: transformers' name of its kernel."""
    precision = xla_precision() if is_xla() else accelerator.mixed_precision
    return {
        "device": device_name(accelerator.device),
        "processes": accelerator.num_processes,
        "precision": PRECISIONS.get(precision, precision),
        "attention": attention,
        "compiler": accelerator.state.dynamo_plugin.backend.value.lower(),
    }


def report(accelerator, steps, start: int, launch: dict, model: str, parameters: int) -> str:
    """The lines printed before training starts, the last ones warnings.

    start: steps already done; launch: as launch_facts; parameters: of the whole model."""
    processes, local, kind = accelerator.num_processes, local_processes(), accelerator.distributed_type
    micro, rows, tokens = steps.micro_batches(0), steps.rows_before(1), steps.tokens_before(1)
    total, passes = steps.tokens_before(steps.last), steps.epoch(steps.last) or 0
    target = f"{launched(kind, processes, local)}, {launch['device']}, {launch['precision']}"
    slow = accelerator.device.type == "cpu" and launch["precision"] == PRECISIONS["no"] and parameters > LARGE
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
    if start:
        length += f"; {start:,} are done"
    lines = [f"target     {target}", f"batch      {batch}", f"steps      {length}",
             f"model      {model}, {_millions(parameters)} parameters, attention: {launch['attention']}"]
    if slow and cpu_has_bfloat16():
        lines.append("advice     accelerate launch --mixed_precision bf16 is faster on this CPU")
    warnings = device_warnings(accelerator.device.type, torch.accelerator.device_count(), local)
    warnings += precision_warnings(launch["precision"], accelerator.device)
    return "\n".join(lines + [f"warning    {text}" for text in warnings])


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


def counted(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith(("ss", "tch")) else "s")
    return f"{number:,.10g} {noun if number == 1 else plural}"


def hiding() -> str:
    """" (CUDA_VISIBLE_DEVICES=...)" if such a variable is set, else ""."""
    settings = [f"{name}={os.environ[name]!r}" for name in VISIBILITY if name in os.environ]
    return f" ({', '.join(settings)})" if settings else ""


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 500_000 else f"{number:,}"
