"""Muon for the matrices of the hidden layers and AdamW for the rest, as one optimizer.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) moves a matrix along the momentum of its
gradient with all singular values set to about one; here with the step size of Liu et al. ("Muon is Scalable
for LLM Training", 2025, arXiv 2502.16982), so that learning rates and weight decay of AdamW fit.
"""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, Jordan et al.
AT_ONCE = 1 << 24  # elements of the matrices that are iterated together
# Of the iteration, elsewhere float32. A CPU without instructions for bfloat16 is slower with it.
PRECISION = dict.fromkeys(["cuda", "xla"], torch.bfloat16)
if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
    PRECISION["cpu"] = torch.bfloat16


def hidden_matrices(model) -> set:
    """The weights [r, c] inside a model's blocks, the modules of its ModuleLists, and other layers' square
    ones, as in the head of a masked model: AdamW at the embeddings' rate would throw that about. No
    embeddings, no projection on the vocabulary."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {id(module) for blocks in lists for module in blocks.modules()}
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outer += [lm.get_output_embeddings() for lm in model.modules() if isinstance(lm, PreTrainedModel)]
    outer = {module.weight for module in outer if module is not None}
    return {
        parameter
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2 and parameter.requires_grad and parameter not in outer
        and (id(module) in inside or isinstance(module, nn.Linear) and len(set(parameter.shape)) == 1)
    }


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[n, r, c] with r <= c: singular values between 0.5 and 1.5, about; singular vectors stay."""
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class MuonAdamW(torch.optim.AdamW):
    """AdamW, but Muon for the groups that have a `momentum`: matrices, those of one shape together.

    Where `found_inf` is 1 nothing changes, as in fused AdamW: an update is skipped without asking the device.
    """

    found_inf = None

    @torch.no_grad()
    def step(self, closure=None):
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        super().step(closure)
        self.param_groups = groups
        for group in groups:
            if "momentum" in group:
                self._muon(group)

    def __setstate__(self, state):
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's asks every state for its `step`

    def _of_one_shape(self, parameters):
        shapes = {}
        for weight in parameters:
            if weight.grad is not None:
                shapes.setdefault(weight.shape, []).append(weight)
        for weights in shapes.values():
            n = max(1, AT_ONCE // weights[0].numel())
            n = n if weights[0].device.type == "cpu" else 8 * n
            yield from (weights[i : i + n] for i in range(0, len(weights), n))

    def _muon(self, group):
        """One call for all matrices of a shape: on a GPU each call costs the host some microseconds."""
        rate, momentum, skip = group["lr"], group["momentum"], self.found_inf
        keep = 1.0 if skip is None else 1 - skip  # 0-d, 0: nothing may change
        held, left = 1 - keep * (1 - momentum), 1 - keep * rate * group["weight_decay"]
        nothing = None if skip is None else skip > 0
        for weights in self._of_one_shape(group["params"]):
            buffers = [_local(self._buffer(weight)) for weight in weights]
            ahead = torch.stack([_local(weight.grad) for weight in weights])  # [n, r, c]
            if nothing is not None:
                ahead.masked_fill_(nothing, 0)  # 0 x nan is nan
            gradients = ahead.unbind()  # views
            torch._foreach_mul_(buffers, held)
            torch._foreach_add_(buffers, gradients, alpha=1 - momentum)
            torch._foreach_lerp_(gradients, buffers, momentum)  # Nesterov's
            updates = _orthogonal(ahead, weights[0]) * keep
            parts, size = [_local(weight) for weight in weights], 0.2 * math.sqrt(max(weights[0].shape))
            torch._foreach_mul_(parts, left)
            torch._foreach_add_(parts, updates.unbind(), alpha=-rate * size)

    def _buffer(self, weight):
        if not self.state[weight]:
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        return self.state[weight]["momentum_buffer"]


def _local(tensor):
    """Of a sharded matrix the part that this process holds: the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _orthogonal(stack, like):
    """stack [n, r, c] of matrices like this one, or of this process's parts of them -> their updates."""
    sharded, dtype = isinstance(like, DTensor), stack.dtype
    if sharded:  # the iteration needs whole matrices
        layout = dict(shape=like.shape, stride=like.stride())
        whole = [DTensor.from_local(part, like.device_mesh, like.placements, **layout) for part in stack]
        stack = torch.stack([part.full_tensor() for part in whole])
    stack = stack.to(PRECISION.get(stack.device.type, torch.float32))
    stands = like.shape[0] > like.shape[1]
    stack = orthogonalize(stack.mT if stands else stack).to(dtype)
    stack = stack.mT if stands else stack
    if not sharded:
        return stack
    mesh, placements = like.device_mesh, like.placements
    parts = [distribute_tensor(whole, mesh, placements, src_data_rank=None) for whole in stack]
    return torch.stack([part.to_local() for part in parts])
