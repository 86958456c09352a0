"""The same formulas in less time: products of matrices on some CPUs, and parts of transformers' models that
are written out in many operations. Names of weights and what is saved stay the same."""

import inspect
import threading
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import masking_utils

from utils.devices import device_type

# Per thread, as some TPUs run two processes as threads of one. ModelLoss sets it around each forward pass.
in_forward = threading.local()  # .rows_in_order: this forward's rows have positions 0, 1, 2, ...
_search = masking_utils.find_packed_sequence_indices  # transformers' own


def use_fast_products(block_size: int) -> None:
    """Lets oneDNN compute the products of float32 matrices on AMD's CPUs with AVX-512, which MKL does not use
    there: 0.4 x of its seconds. torch (2.13) gives them to oneDNN only if it may round factors to bfloat16;
    that it does with AMX alone, and a trial shows it. These are settings of the whole process."""
    cpu = Path("/proc/cpuinfo")
    amd = device_type() == "cpu" and cpu.exists() and "AuthenticAMD" in cpu.read_text()
    if not amd or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return
    factors = torch.rand(2, 512, 512, generator=torch.Generator().manual_seed(0))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    if not torch.allclose(torch.mm(*factors).double(), torch.mm(*factors.double()), rtol=1e-5):
        return torch.set_float32_matmul_precision(before)
    # The fused attention's products are of small blocks, each a call: for rows of 128 tokens it takes 4 x the
    # seconds of plain operations, for rows of 512 as many.
    torch.backends.cuda.enable_flash_sdp(block_size > 256)


def use_one_kernel_gelu(model) -> None:
    """Replace GELUs of eight operations, which keep several copies of the widest activation for backward, by
    torch's kernel of the same formula."""
    written_out = "NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation"
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module).__name__ in written_out:
            model.set_submodule(name, nn.GELU(approximate="tanh"))


def skip_search_for_documents() -> None:
    """transformers 5.24 looks for positions that start again within a row (packed documents). That waits for
    the device in each forward, and with torch.compile it prevents the causal kernel. A batch without
    position_ids has none: nothing is searched while `in_forward.rows_in_order` is set."""
    masking_utils.find_packed_sequence_indices = _search_unless_in_order


def _search_unless_in_order(position_ids):
    return None if getattr(in_forward, "rows_in_order", False) else _search(position_ids)


@torch.no_grad()
def use_few_kernel_norms(model) -> None:
    """Replaces, on a CPU, the forward of what a trial shows to be weight * x / sqrt(mean(x ** 2) + eps), by
    one that takes half of the time."""
    for module in model.modules() if device_type() == "cpu" else ():
        eps, weight = getattr(module, "variance_epsilon", None), getattr(module, "weight", None)
        if eps is None or weight is None or len(inspect.signature(module.forward).parameters) > 1:
            continue  # gated norms have two inputs
        before = weight.clone()
        weight += torch.linspace(-0.5, 0.5, len(before))  # ones would hide what they are used for
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
