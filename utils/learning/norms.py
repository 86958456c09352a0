"""RMS norms on a CPU in half of the time of transformers', which are written out in six operations."""

import inspect
from functools import partial

import torch
from torch.autograd.function import once_differentiable

from utils.devices import device_type


@torch.no_grad()
def use_few_kernels(model) -> None:
    """Replaces, on a CPU, the forward of what a trial shows to be weight * x / sqrt(mean(x ** 2) + eps)."""
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
