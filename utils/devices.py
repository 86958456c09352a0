"""What this launch runs on: the type of its devices, their memory, this machine's processes."""

import contextlib
import math
import os
import re
import time
from pathlib import Path

import psutil
import torch
from accelerate.utils import parse_flag_from_env

from utils.xla import is_xla


def device_type() -> str:
    """The type of the devices that this launch will train on, before there is an Accelerator."""
    if is_xla() or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return "xla" if is_xla() else "cpu"
    return getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def granted_cores() -> int:
    """Cores that this process may use at a time: by its affinity, and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, int(min(cores, cpu_quota())))


def cpu_quota(root=Path("/sys/fs/cgroup"), own=Path("/proc/self/cgroup")) -> float:
    """Cores that the control groups of this process grant, and those around them; infinite without any."""
    quotas = [math.inf]
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        base = root / "cpu" if controllers else root
        if "cpu" not in controllers.split(",") and controllers:
            continue
        for group in [base / path.strip("/"), *(base / path.strip("/")).parents]:
            with contextlib.suppress(OSError, ValueError):  # no such file, or the quota is "max"
                if controllers:
                    files = group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"
                    quota, period = (int(file.read_text()) for file in files)
                else:
                    quota, period = map(int, (group / "cpu.max").read_text().split())
                quotas += [quota / period] if quota > 0 else []  # -1: no limit
    return min(quotas)


def module_of(device: torch.device):
    """torch.cuda, torch.xpu, torch.mps, ...; None for XLA, which is not a part of torch."""
    return None if device.type == "xla" else torch.get_device_module(device)


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
        group = Path("/sys/fs/cgroup")
        return int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
    return math.inf, 0


def forget_peak(device: torch.device) -> None:
    """Start `peak_memory` anew, if the system allows it."""
    if device.type == "cpu":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    elif hasattr(module := module_of(device), "reset_peak_memory_stats"):
        module.reset_peak_memory_stats()


def peak_memory(device: torch.device) -> int | None:
    """Bytes of the device's memory that this process used at its peak. None: unknown."""
    if device.type == "cpu":
        with contextlib.suppress(OSError):
            return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
        return None
    return getattr(module_of(device), "max_memory_reserved", lambda: None)()


def timed(function, *args) -> float:
    """Seconds that function(*args) takes, until the device has finished."""
    start = time.perf_counter()
    function(*args)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start
