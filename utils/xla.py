"""What PyTorch/XLA (TPU) needs and nothing else does. Elsewhere each of these does nothing.

XLA records operations instead of running them; `sync` compiles and runs what was recorded. A new sequence or
shape is a new graph, seconds to minutes each: same shapes every step, values read only after a sync.
"""

import os

import torch
from accelerate.utils import is_torch_xla_available as is_xla  # for every launch; USE_TORCH_XLA=0 stops it


def launcher_precision() -> str | None:
    """For Accelerator(mixed_precision=...): None is the launcher's choice.

    On a TPU accelerate's bf16 would turn weights and optimizer state into bfloat16, and its launcher hands
    the YAML's choice to no process. So accelerate gets "no", and `autocast_forward` does it."""
    if not is_xla():
        return None
    if not is_xla(check_is_tpu=True):
        os.environ.setdefault("LOCAL_RANK", "0")  # accelerate takes -1 on XLA's CPU, and no process prints
    return "no"


def xla_precision() -> str:
    """ACCELERATE_MIXED_PRECISION, else "bf16" on a TPU and "no" on XLA's CPU device.

    ValueError for what XLA cannot: fp16 has no gradient scaler there."""
    usual = "bf16" if is_xla(check_is_tpu=True) else "no"
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION") or usual
    if precision not in ("bf16", "no"):
        raise ValueError(f"ACCELERATE_MIXED_PRECISION is {precision!r}; XLA has 'bf16' and 'no'.")
    return precision


def autocast_forward(model: torch.nn.Module) -> None:
    """On XLA, `model` computes in `xla_precision` from now on; parameters and state stay float32."""
    if is_xla() and xla_precision() == "bf16":
        model.forward = torch.autocast("xla", dtype=torch.bfloat16)(model.forward)


def sync() -> None:
    """Run what was recorded. After each optimizer step, before anything is read or saved."""
    if is_xla():
        import torch_xla

        torch_xla.sync()


def compiled_graphs() -> int:
    """Graphs this process has compiled so far, on XLA. Constant once everything happened once."""
    import torch_xla.debug.metrics

    compilations = torch_xla.debug.metrics.metric_data("CompileTime")  # None before the first
    return compilations[0] if compilations else 0
