"""The devices of this launch, their memory, the processes on this machine; and what PyTorch/XLA (TPU) needs.

XLA records operations instead of running them. `sync` compiles what was recorded to a graph, and runs it. A
new sequence of operations or a new shape is a new graph, and takes seconds to minutes to compile. So every
step has the same shapes, and values are read only after a sync.
"""

import contextlib
import os
from pathlib import Path

import torch
from accelerate.utils import is_torch_xla_available as is_xla  # with torch_xla, unless USE_TORCH_XLA=0
from accelerate.utils import parse_flag_from_env

CONTAINER = Path("/sys/fs/cgroup")  # a container sees its own control group here


def device_type() -> str:
    """The type of device that this launch will train on. It needs no Accelerator."""
    if is_xla() or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return "xla" if is_xla() else "cpu"
    return getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")


def has_bf16(device: torch.device | None = None) -> bool:
    """False for GPUs that would emulate bfloat16, slowly (NVIDIA's before Ampere)."""
    supports_bf16 = getattr(module_of(device), "is_bf16_supported", None)
    return supports_bf16 is None or supports_bf16(including_emulation=False)


def local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def granted_cores() -> int:
    """Cores that this process may use, by its affinity and by its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):  # no such file (cgroup v2), or the quota is "max"
        quota, period = map(int, (CONTAINER / "cpu.max").read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


def module_of(device: torch.device | None):
    """torch.cuda, torch.xpu, torch.mps, ... of a device, by default of this machine's accelerator. None for
    XLA, which is not a part of torch."""
    return None if device and device.type == "xla" else torch.get_device_module(device)


def peak_memory(device: torch.device) -> int | None:
    """Peak bytes of tensors on the device; None where torch does not count them (CPU, MPS, XLA)."""
    return getattr(module_of(device), "max_memory_allocated", lambda: None)()


def is_tpu() -> bool:
    return is_xla(check_is_tpu=True)


def xla_precision() -> str:
    """ACCELERATE_MIXED_PRECISION, else "bf16" on a TPU and "no" on XLA's CPU device."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION") or ("bf16" if is_tpu() else "no")


def forward_on_xla(model: torch.nn.Module) -> None:
    """Makes `model`, on XLA, compute in `xla_precision`. Parameters and optimizer state stay float32.

    Each micro-batch is a graph, as one graph of all micro-batches would take longer to compile."""
    forward, weight = model.forward, next(p for p in model.parameters() if p.requires_grad)
    if xla_precision() == "bf16":
        forward = torch.autocast("xla", dtype=torch.bfloat16)(forward)

    def forward_after_sync(*args, **options):
        if weight.grad is not None:
            sync()
        return forward(*args, **options)

    model.forward = forward_after_sync


def sync() -> None:
    """Runs the recorded operations. The data loader does this before each batch, so a step needs no sync."""
    if is_xla():
        import torch_xla

        torch_xla.sync()


def compiled_graphs() -> int:
    """Graphs that this process has compiled on XLA: no new ones after the first step, evaluation and save."""
    import torch_xla.debug.metrics

    compilations = torch_xla.debug.metrics.metric_data("CompileTime")  # None before the first
    return compilations[0] if compilations else 0
