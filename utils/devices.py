"""What this launch runs on: the type of its devices, their memory, the processes of this machine."""

import contextlib
import os
import re
import time
from pathlib import Path

import psutil
import torch
from accelerate.utils import parse_flag_from_env

from utils.xla import is_xla


def device_type() -> str:
    """Of what this launch will train on; before there is an Accelerator to ask."""
    if is_xla() or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return "xla" if is_xla() else "cpu"
    return getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")


def local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def module_of(device: torch.device):
    """torch.cuda, torch.xpu, torch.mps, ...; None for XLA, whose device is no part of torch."""
    return None if device.type == "xla" else torch.get_device_module(device)


def memory_of(device: torch.device) -> int | None:
    """Bytes of the device; on the CPU one process's share of the machine's, or of the container's. None: it
    cannot be asked."""
    if device.type == "cpu":
        total = psutil.virtual_memory().total
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
        return total // local_processes()
    if hasattr(module := module_of(device), "get_device_properties"):
        return module.get_device_properties(device).total_memory
    return module.recommended_max_memory() if hasattr(module, "recommended_max_memory") else None


def forget_peak(device: torch.device) -> None:
    """`peak_memory` is of what comes after this, where the system lets it be."""
    if device.type == "cpu":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    elif hasattr(module := module_of(device), "reset_peak_memory_stats"):
        module.reset_peak_memory_stats()


def peak_memory(device: torch.device) -> int | None:
    """Bytes of the device that this process took at its peak; on the CPU all of its memory. None: unknown."""
    if device.type == "cpu":
        with contextlib.suppress(OSError):
            return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
        return None
    return getattr(module_of(device), "max_memory_reserved", lambda: None)()


def timed(function, *args) -> float:
    """Seconds that it takes, until the device has done it, too."""
    start = time.perf_counter()
    function(*args)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start
