"""What a run is about to do, in one block before it starts, and what will not do what the user thinks."""

import functools
import os
import re
from pathlib import Path

import torch
from accelerate.utils import DistributedType, DynamoBackend, parse_flag_from_env

from utils.display.throughput import device_name, timed
from utils.xla import is_xla, xla_precision

DRIVERS = {"/proc/driver/nvidia/version": "NVIDIA", "/dev/kfd": "AMD"}  # there while the driver is loaded
VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
PRECISIONS = {"no": "float32", "bf16": "bfloat16 autocast", "fp16": "float16 autocast with loss scaling"}


def check_devices() -> None:
    """Before the Accelerator is made: ValueError if this machine was given more processes than accelerators,
    of which some would end with "invalid device ordinal". None at all is for `check_launch`."""
    processes, devices = local_processes(), torch.accelerator.device_count()
    if processes > devices > 0 and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        raise ValueError(f"num_processes: {processes} processes were started on this machine and it shows "
                         f"{counted(devices, 'device')}{hiding()}; each process needs its own. "
                         f"Launch with --num_processes {devices}.")  # fmt: skip


def check_launch(accelerator) -> None:
    """ValueError if several processes were started and each believes to be alone. They would train N times on
    the same data and overwrite each other's files. GPU configurations on a machine without GPUs end so."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started == accelerator.num_processes:
        return
    remedy = (f"No accelerator is visible{hiding()}. On the CPU launch with accelerate_configs/cpu.yaml, or "
              "for several processes set ACCELERATE_USE_CPU=true in the environment and --mixed_precision "
              "no.")  # fmt: skip
    if accelerator.distributed_type == DistributedType.XLA:
        remedy = "On XLA launch with accelerate_configs/tpu.yaml: it starts one process per chip."
    raise ValueError(f"num_processes: {started} processes were started, but each sees "
                     f"{accelerator.num_processes}: they form no group, would all train on the same data and "
                     f"overwrite each other's files. {remedy}")  # fmt: skip


def report(accelerator, steps, start: int, *, model: str, parameters: int, attention: str,
           memory: float | None = None) -> str:  # fmt: skip
    """The block printed before training starts, warnings at its end.

    steps: as utils.steps.Steps; start: those done already; parameters: of the whole model; attention: what
    computes it; memory: estimated bytes per process."""
    precision = xla_precision() if is_xla() else accelerator.mixed_precision
    processes, device, local = accelerator.num_processes, accelerator.device, local_processes()
    accumulation, compiler = steps.micro_batches(0), accelerator.state.dynamo_plugin.backend
    rows, step_tokens = steps.rows_before(1), steps.tokens_before(1)
    tokens = steps.tokens_before(steps.last)
    lines = [
        f"target     {launched(accelerator.distributed_type, processes, local)}, {device_name(device)}",
        f"precision  {PRECISIONS.get(precision, precision)}"
        + ("" if compiler == DynamoBackend.NO else f", compiled with {compiler.value.lower()}"),
        f"batch      {counted(rows // (accumulation * processes), 'row')} x "
        f"{counted(accumulation, 'micro-batch')} x {counted(processes, 'process')} = {rows:,} rows = "
        f"{step_tokens:,} tokens per step" + (" at first" if tokens != steps.last * step_tokens else ""),
        f"steps      {steps.last:,} steps = {_millions(tokens)} tokens"
        + (f"; {start:,} are done" if start else ""),
        f"model      {model}, {_millions(parameters)} parameters, attention: {attention}",
    ]
    doubts = device_warnings(device.type, torch.accelerator.device_count(), local)
    doubts += precision_warnings(precision, device)
    if memory:
        room = memory_of(device)
        lines.append(f"memory     about {_gib(memory)} per process" + (f" of {_gib(room)}" if room else ""))
        if room and memory > 0.95 * room:
            doubts.append("memory: this will hardly fit; halve per_device_train_batch_size and double "
                          "gradient_accumulation_steps, which changes nothing else.")  # fmt: skip
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not sharded:
        doubts.append("FSDP: asked for, but not in use on this device: every process holds the whole model.")
    return "\n".join(lines + [f"warning    {text}" for text in doubts])


def lost_peer(error: RuntimeError) -> str | None:
    """What to tell the user of an error that another process's end, or silence, has caused; None: it has not.
    NCCL, and gloo where a machine falls silent, raise after the process group's timeout."""
    text = str(error)
    if not re.search(r"(closed|reset) by peer|[Tt]imed out|NCCL .*(abort|timeout|remote)", text):
        return None
    cause = re.sub(r"^\[\S+\] |\. This is typically.*", "", text.splitlines()[0])
    return (f"another process is gone: {cause}. Its own output says why. Start the same command again, on "
            "all machines: it continues from the newest complete checkpoint.")  # fmt: skip


def device_warnings(device: str, devices: int, processes: int) -> list[str]:
    """device: the type in use; devices: visible here; processes: on this machine."""
    lines, env = [], os.environ
    if device == "cpu" and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        lines = [f"device: the {maker} driver is loaded, but torch {torch.__version__} sees none of "
                 f"its devices{hiding()}: is this torch built for them?"
                 for file, maker in DRIVERS.items() if Path(file).exists()]  # fmt: skip
        if not lines and ("ACCELERATE_MIXED_PRECISION" in env or "WORLD_SIZE" in env):
            lines.append(f"device: launched for an accelerator, none is visible{hiding()}: on the CPU.")
    if device == "xla" and env.get("PJRT_DEVICE") != "CPU" and not is_xla(check_is_tpu=True):
        lines.append("device: torch_xla found no TPU, this is its CPU device (PJRT_DEVICE=CPU asks for it).")
    if device != "cpu" and processes < devices:
        lines.append(f"num_processes: {processes} of {devices} devices are used.")
    return lines


def precision_warnings(precision: str, device: torch.device) -> list[str]:
    if precision == "bf16" and device.type == "cpu" and (takes := bf16_seconds()) > 1:
        return [f"mixed_precision: on this CPU a matrix product in bf16 takes {takes:.2g} x the time of "
                "float32, measured now; use --mixed_precision no."]  # fmt: skip
    if precision == "bf16" and computes_bf16(device) is False:
        return ["mixed_precision: bf16 is emulated on this device and slow; use --mixed_precision fp16."]
    return []


@functools.cache
def bf16_seconds() -> float:
    """What a matrix product in bfloat16 takes on this CPU, of its time in float32. It differs between makers
    and models, and not by their instructions alone. Takes a tenth of a second."""
    fastest = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        fastest.append(min(timed(torch.matmul, a, b) for _ in range(6)))
    return fastest[1] / fastest[0]


def computes_bf16(device: torch.device) -> bool | None:
    """Whether an accelerator itself, not an emulation, multiplies bfloat16; None: it cannot be asked."""
    ask = getattr(_module(device), "is_bf16_supported", None)
    try:
        return ask and ask(including_emulation=False)
    except TypeError:  # only one maker's emulates
        return ask()


def launched(kind: DistributedType, processes: int, local: int) -> str:
    names = {"NO": "one process", "XLA": "XLA", "FSDP": "FSDP", "MULTI_CPU": "CPU"}
    name = names.get(kind.name, "DDP")
    if processes > 1 or kind != DistributedType.NO:
        name += f", {counted(processes, 'process')}"
    return name + (f" on {processes // local} machines" if processes > local and kind.name != "XLA" else "")


def counted(number: int, noun: str) -> str:
    plural = noun + ("es" if noun[-1] in "sh" else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def hiding() -> str:
    """" (CUDA_VISIBLE_DEVICES=...)" if such a variable is set, else ""."""
    found = [f"{name}={os.environ[name]!r}" for name in VISIBILITY if name in os.environ]
    return f" ({', '.join(found)})" if found else ""


def memory_of(device: torch.device) -> int | None:
    """Bytes of the device; on the CPU one process's share of the machine's. None: it cannot be asked."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_processes()
    if hasattr(module := _module(device), "get_device_properties"):
        return module.get_device_properties(device).total_memory
    return module.recommended_max_memory() if hasattr(module, "recommended_max_memory") else None


def _module(device: torch.device):
    """torch.cuda, torch.xpu, torch.mps, ...; None for XLA, whose device is no part of torch."""
    return None if device.type == "xla" else torch.get_device_module(device)


def _gib(number: float) -> str:
    return f"{number / 2**30:,.1f} GiB" if number >= 2**29 else f"{number / 2**20:,.0f} MiB"


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 500_000 else f"{number:,}"
