"""What this launch runs on: the type of its devices, their memory, this machine's processes."""

import contextlib
import math
import os
from pathlib import Path

import psutil
import torch
from accelerate.utils import parse_flag_from_env

from utils.xla import is_xla

CONTAINER = Path("/sys/fs/cgroup")  # the control group that a container sees as its own


def device_type() -> str:
    """The type of the devices that this launch will train on, before there is an Accelerator."""
    if is_xla() or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return "xla" if is_xla() else "cpu"
    return getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")


def has_bf16(device: torch.device | None = None) -> bool:
    """False for GPUs that would emulate it, slowly (NVIDIA's before Ampere)."""
    ask = getattr(module_of(device), "is_bf16_supported", None)
    return ask is None or ask(including_emulation=False)


def local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def granted_cores() -> int:
    """Cores that this process may use at a time: by its affinity, and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):  # no such file (cgroup v2), or the quota is "max"
        quota, period = map(int, (CONTAINER / "cpu.max").read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


def module_of(device: torch.device | None):
    """torch.cuda, torch.xpu, torch.mps, ...; None for XLA, which is not a part of torch. No device: that of
    the machine's accelerator."""
    return None if device and device.type == "xla" else torch.get_device_module(device)


def memory_of(device: torch.device) -> int | None:
    """Bytes of the device; on the CPU a process's share of the machine or container. None: unknown."""
    if device.type == "cpu":
        return min(psutil.virtual_memory().total, container_memory()[0]) // local_processes()
    if hasattr(module := module_of(device), "get_device_properties"):
        return module.get_device_properties(device).total_memory
    return module.recommended_max_memory() if hasattr(module, "recommended_max_memory") else None


def free_memory() -> int:
    """Bytes of memory that are free: of the machine, or of this container."""
    limit, used = container_memory()
    return int(min(psutil.virtual_memory().available, limit - used))


def container_memory() -> tuple[float, int]:
    """(limit, bytes in use) of this container (cgroup v2); an infinite limit if there is none."""
    with contextlib.suppress(OSError, ValueError):  # the files are missing, or the limit is "max"
        return int((CONTAINER / "memory.max").read_text()), int((CONTAINER / "memory.current").read_text())
    return math.inf, 0


def peak_memory(device: torch.device) -> int | None:
    """Bytes that tensors took on the device at their peak; None where torch counts none (CPU, MPS, XLA)."""
    return getattr(module_of(device), "max_memory_allocated", lambda: None)()
