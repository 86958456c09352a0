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

    @torch.no_grad()
    def step(self, closure=None):
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        super().step(closure)
        self.param_groups = groups
        for group in groups:
            if "momentum" in group:
                for weights in self._of_one_shape(group["params"]):
                    self._muon(weights, group)

    def __setstate__(self, state):
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's asks every state for its `step`

    def _of_one_shape(self, parameters):
        shapes = {}
        for weight in parameters:
            if weight.grad is not None:
                shapes.setdefault((min(weight.shape), max(weight.shape)), []).append(weight)
        for (rows, columns), weights in shapes.items():
            n = max(1, AT_ONCE // (rows * columns))
            yield from (weights[i : i + n] for i in range(0, len(weights), n))

    def _muon(self, weights, group):
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        pairs, momentum = zip(weights, buffers, strict=True), group["momentum"]
        moved = [buffer.lerp(weight.grad, 1 - momentum) for weight, buffer in pairs]
        # Nesterov's. Of a matrix that is cut up each process has a part: put together for the iteration.
        ahead = [w.grad.lerp(buffer, momentum) for w, buffer in zip(weights, moved, strict=True)]
        ahead = [x.full_tensor() if isinstance(x, DTensor) else x for x in ahead]
        flat = torch.stack([x.mT if x.shape[0] > x.shape[1] else x for x in ahead])  # [n, r, c], lying
        precision = PRECISION.get(flat.device.type, torch.float32)
        updates = orthogonalize(flat.to(precision)).to(flat.dtype)
        size = group["lr"] * 0.2 * math.sqrt(flat.shape[2])
        skip = getattr(self, "found_inf", None)
        for weight, buffer, newer, update in zip(weights, buffers, moved, updates, strict=True):
            update = update.mT if weight.shape[0] > weight.shape[1] else update
            if isinstance(weight, DTensor):
                update = distribute_tensor(update, weight.device_mesh, weight.placements, src_data_rank=None)
            new = weight * (1 - group["lr"] * group["weight_decay"]) - size * update
            buffer.copy_(newer if skip is None else torch.where(skip > 0, buffer, newer))
            weight.copy_(new if skip is None else torch.where(skip > 0, weight, new))
