"""What only PyTorch/XLA (TPU) needs. Elsewhere these functions do nothing.

XLA records operations instead of running them; `sync` compiles and runs what was recorded. A new sequence of
operations or a new shape is a new graph and takes seconds to minutes to compile. So every step has the same
shapes, and values are read only after a sync.
"""

import os

import torch
from accelerate.utils import is_torch_xla_available as is_xla  # torch_xla is installed; USE_TORCH_XLA=0: no


def is_tpu() -> bool:
    return is_xla(check_is_tpu=True)


def xla_precision() -> str:
    """ACCELERATE_MIXED_PRECISION, else "bf16" on a TPU and "no" on XLA's CPU device."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION") or ("bf16" if is_tpu() else "no")


def forward_on_xla(model: torch.nn.Module) -> None:
    """Makes `model`, which is on XLA, compute in `xla_precision`, with a graph for each micro-batch: one of
    all of them would take longer to compile. Parameters and optimizer state stay float32."""
    forward, weight = model.forward, next(p for p in model.parameters() if p.requires_grad)
    if xla_precision() == "bf16":
        forward = torch.autocast("xla", dtype=torch.bfloat16)(forward)

    def forward_after_sync(*args, **options):
        if weight.grad is not None:
            sync()
        return forward(*args, **options)

    model.forward = forward_after_sync


def sync() -> None:
    """Run what was recorded. The data loader does this before each batch, so a step needs no other sync."""
    if is_xla():
        import torch_xla

        torch_xla.sync()


def compiled_graphs() -> int:
    """Graphs that this process has compiled on XLA: constant once everything has happened once."""
    import torch_xla.debug.metrics

    compilations = torch_xla.debug.metrics.metric_data("CompileTime")  # None before the first
    return compilations[0] if compilations else 0
