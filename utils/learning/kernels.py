"""Faster kernels for the same formulas: matrix products on some CPUs, and modules of transformers that take
many operations. Names of weights and saved files stay the same."""

import inspect
import threading
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import masking_utils

from utils.devices import device_type

# .rows_in_order: True if the positions of all rows are 0, 1, 2, ... ModelLoss sets it in each forward pass.
in_forward = threading.local()  # per thread: some TPUs run two processes as threads
_find_packed_sequences = masking_utils.find_packed_sequence_indices  # of transformers


def use_fast_products(block_size: int) -> None:
    """Makes oneDNN compute float32 matrix products on AMD CPUs with AVX-512, which MKL does not use there: in
    0.4 x of MKL's time. torch (2.13) calls oneDNN only if it allows rounding to bfloat16. oneDNN rounds only
    with AMX; a test product detects that. These settings affect all of the process."""
    cpu = Path("/proc/cpuinfo")
    amd = device_type() == "cpu" and cpu.exists() and "AuthenticAMD" in cpu.read_text()
    if not amd or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return
    factors = torch.rand(2, 512, 512, generator=torch.Generator().manual_seed(0))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    if not torch.allclose(torch.mm(*factors).double(), torch.mm(*factors.double()), rtol=1e-5):
        return torch.set_float32_matmul_precision(before)
    # Fused attention multiplies small blocks, each in a call. For rows of 128 tokens it takes 4 x the time of
    # plain operations, for rows of 512 the same time.
    torch.backends.cuda.enable_flash_sdp(block_size > 256)


def use_one_kernel_gelu(model) -> None:
    """Replaces GELUs of eight operations, which keep several copies of the widest activation for backward, by
    torch's kernel of the same formula."""
    class_names = "NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation"
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module).__name__ in class_names:
            model.set_submodule(name, nn.GELU(approximate="tanh"))


def skip_search_for_documents() -> None:
    """Stops transformers from searching rows for packed documents while `in_forward.rows_in_order` is True.

    transformers 5.24 searches for positions that restart within a row. That waits for the device in each
    forward pass, and with torch.compile it prevents the causal kernel."""
    masking_utils.find_packed_sequence_indices = _search_unless_in_order


def _search_unless_in_order(position_ids):
    return None if getattr(in_forward, "rows_in_order", False) else _find_packed_sequences(position_ids)


@torch.no_grad()
def use_few_kernel_norms(model) -> None:
    """On a CPU, replaces the forward pass of RMSNorms by one that takes half of the time. A test shows which
    modules compute weight * x / sqrt(mean(x ** 2) + eps)."""
    for module in model.modules() if device_type() == "cpu" else ():
        eps, weight = getattr(module, "variance_epsilon", None), getattr(module, "weight", None)
        if eps is None or weight is None or len(inspect.signature(module.forward).parameters) > 1:
            continue  # gated norms have two inputs
        before = weight.clone()
        weight += torch.linspace(-0.5, 0.5, len(before))  # weights of 1 would not show how they are used
        x = torch.linspace(-1, 2, 2 * len(before)).view(2, -1) * torch.tensor([[1.0], [1e-3]])
        if torch.allclose(module(x), _RMSNorm.apply(x, weight, eps), rtol=1e-6, atol=1e-6):
            module.forward = partial(_forward, module)
        weight.copy_(before)


def _forward(norm, x):
    if x.dtype != torch.float32 or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return type(norm).forward(norm, x)
    return _RMSNorm.apply(x, norm.weight, norm.variance_epsilon)


class _RMSNorm(torch.autograd.Function):
    """x [..., D], weight [D]"""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., 1]
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        product = grad * x
        along = (product @ weight)[..., None] * scale**3 / -x.shape[-1]  # [..., 1]
        d_weight = product.flatten(0, -2).mT @ scale.flatten()  # [D]
        return (grad * weight).mul_(scale).addcmul_(x, along), d_weight, None
