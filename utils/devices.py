"""What this launch runs on: the type of its devices, their memory, this machine's processes."""

import contextlib
import os
from pathlib import Path

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


def peak_memory(device: torch.device) -> int | None:
    """Bytes that tensors took on the device at their peak; None where torch counts none (CPU, MPS, XLA)."""
    return getattr(module_of(device), "max_memory_allocated", lambda: None)()
