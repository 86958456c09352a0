"""What only PyTorch/XLA (TPU) needs. Elsewhere these functions do nothing.

XLA records operations instead of running them; `sync` compiles and runs what was recorded. A new sequence of
operations or a new shape is a new graph and takes seconds to minutes to compile. So every step has the same
shapes, and values are read only after a sync.
"""

import os

import torch
from accelerate.utils import is_torch_xla_available as is_xla  # torch_xla is installed; USE_TORCH_XLA=0: no

from utils.patches import cast_attention_on_xla


def xla_precision() -> str:
    """ACCELERATE_MIXED_PRECISION, else "bf16" on a TPU and "no" on XLA's CPU device."""
    usual = "bf16" if is_xla(check_is_tpu=True) else "no"
    return os.environ.get("ACCELERATE_MIXED_PRECISION") or usual


def autocast_forward(model: torch.nn.Module) -> None:
    """On XLA, make `model` compute in `xla_precision`. Parameters and optimizer state stay float32."""
    if is_xla() and xla_precision() == "bf16":
        cast_attention_on_xla()
        model.forward = torch.autocast("xla", dtype=torch.bfloat16)(model.forward)


def sync() -> None:
    """Run what was recorded: after each optimizer step, and before anything is read or saved."""
    if is_xla():
        import torch_xla

        torch_xla.sync()


def compiled_graphs() -> int:
    """Graphs that this process has compiled on XLA: constant once everything has happened once."""
    import torch_xla.debug.metrics

    compilations = torch_xla.debug.metrics.metric_data("CompileTime")  # None before the first
    return compilations[0] if compilations else 0
