"""Muon for the matrices of the hidden layers and AdamW for the rest, as one optimizer.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) updates a matrix by the momentum of its gradient
with all singular values set to about one (by Polar Express: Amsel et al., 2025, arXiv 2505.16932). Each row,
a neuron, is then divided by the root of its mean square in the last steps, so that all neurons take steps of
one size (NorMuon: Li et al., 2025, arXiv 2510.05491). That is 0.2, as of AdamW (Liu et al., "Muon is Scalable
for LLM Training", 2025, arXiv 2502.16982), so that AdamW's learning rates and weight decay fit.
"""

import itertools
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from utils.devices import local_processes
from utils.learning.shares import share

# Of the quintic iterations: the best ones for singular values from 1e-3 to 1 one after the other, each with
# room of 2 % for rounding (Polar Express).
COEFFICIENTS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
SLACK = 1.02  # the norm that a matrix is divided by is at least its largest singular value, rounded
FIRST_MOMENTUM = 0.85  # young gradients are soon out of date
WARM_UP = 149  # updates until a group's momentum; odd, so that it is never AdamW's 0.9: another graph on XLA
BETA2 = 0.95  # of a row's mean square
STEP = 0.2  # root mean square of an update at learning rate 1
AT_ONCE = 1 << 24  # elements of the matrices that are iterated together
# Type of the iteration, elsewhere float32. A CPU without bfloat16 instructions would be slower with bfloat16.
PRECISION = dict.fromkeys(["cuda", "xla"], torch.bfloat16)
if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
    PRECISION["cpu"] = torch.bfloat16


def hidden_matrices(model) -> set:
    """The weights [r, c] in a model's blocks, the modules of its ModuleLists, the stacks [n, r, c] of their
    experts, and square weights of other linear layers: a masked model's head is unstable with AdamW at the
    embeddings' rate. No embeddings, no vocabulary projection, no state matrices (Mamba's A_log)."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {id(module) for blocks in lists for module in blocks.modules()}
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outer += [lm.get_output_embeddings() for lm in model.modules() if isinstance(lm, PreTrainedModel)]
    outer = {module.weight for module in outer if module is not None}
    return {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and parameter not in outer and _is_matrix(module, name, parameter)
        and (id(module) in inside or isinstance(module, nn.Linear) and len(set(parameter.shape)) == 1)
    }


def _is_matrix(module, name, parameter) -> bool:
    if "Expert" in type(module).__name__:  # transformers' experts, stacked
        return parameter.ndim in (2, 3) and "bias" not in name
    return parameter.ndim == 2 and name.endswith("weight")


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """[n, r, c] -> the same singular vectors, singular values near 1; those below a 1000th stay smaller."""
    tall = matrices.shape[1] > matrices.shape[2]
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=torch.float32)  # XLA's too
    x = (matrices.mT if tall else matrices) / (SLACK * norms).clamp(min=1e-7).to(matrices.dtype)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if tall else x  # sums over its rows round alike wherever it is sent


class MuonAdamW(torch.optim.AdamW):
    """AdamW, but Muon for the groups that have a `momentum`. Their matrices of one shape are updated
    together.

    If `found_inf` is 1 nothing changes, as in fused AdamW: an update is skipped without waiting for the
    device. Processes divide Muon's iteration (utils/learning/shares.py), so their gradients must be equal."""

    found_inf = machine = None  # machine: the group of this machine's processes

    @torch.no_grad()
    def step(self, closure=None):
        if getattr(self, "grad_scale", None) is not None:
            raise RuntimeError("fp16: unscale the gradients before the step, by accelerator.clip_grad_norm_")
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if "momentum" in group:
                self._muon(group)
        return loss

    def __setstate__(self, state):
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's needs a `step` in every state

    def _muon(self, group):
        """Few calls for all matrices of a shape, as on a GPU each call costs the host some microseconds."""
        rate, momentum, skip, done = group["lr"], group["momentum"], self.found_inf, group.get("updates", 0)
        momentum -= max(0, momentum - FIRST_MOMENTUM) * max(0, 1 - done / WARM_UP)
        group["updates"] = done + 1
        keep = 1.0 if skip is None else 1 - skip  # 0-d; 0 if nothing may change
        held, left = 1 - keep * (1 - momentum), 1 - keep * rate * group["weight_decay"]
        squares_new = keep * (1 - BETA2)
        squares_held = 1 - squares_new
        alone, divided = [], []
        for weights in _of_one_shape([weight for weight in group["params"] if weight.grad is not None]):
            experts = isinstance(weights[0], DTensor) and weights[0].ndim == 3  # each process has whole ones
            (alone if experts else divided).append(weights)
        processes = self._processes(divided[0][0]) if divided else None
        if processes is None:
            alone, divided = alone + divided, []

        def ahead(weights):
            """Updates the momenta. Returns Nesterov's look-ahead: [n, r, c], or what this process holds."""
            buffers = [_local(self._buffer(weight)) for weight in weights]
            stack = torch.stack([_local(weight.grad) for weight in weights])
            if skip is not None:
                stack.masked_fill_(skip > 0, 0)  # as 0 x nan is nan
            gradients = stack.unbind()  # views
            torch._foreach_mul_(buffers, held)
            torch._foreach_add_(buffers, gradients, alpha=1 - momentum)
            torch._foreach_lerp_(gradients, buffers, momentum)
            return stack.to(PRECISION.get(stack.device.type, torch.float32)).flatten(0, -3)

        sizes = [(len(weights), *weights[0].shape) for weights in divided]
        shapes = [(math.prod(size[:-2]), *size[-2:]) for size in sizes]
        sharded = bool(divided) and isinstance(divided[0][0], DTensor)
        updates = itertools.chain(
            (orthogonalize(ahead(weights)) for weights in alone),
            share(orthogonalize, map(ahead, divided), shapes, processes, sharded) if divided else (),
        )
        for weights, update in zip(alone + divided, updates, strict=True):
            parts = [_local(weight) for weight in weights]
            squares = [_local(self.state[weight]["row_square"]) for weight in weights]  # [..., r, 1]
            update = update.view(len(parts), *parts[0].shape).to(parts[0].dtype)
            lengths = torch.linalg.vector_norm(update, dim=-1, keepdim=True)  # of rows, [n, ..., r, 1]
            torch._foreach_mul_(squares, squares_held)
            torch._foreach_add_(squares, lengths.square_().mul_(squares_new / update.shape[-1]).unbind())
            scale = torch.stack(squares).add_(1e-20).rsqrt_().mul_(keep)  # a row without gradients is 0
            torch._foreach_mul_(parts, left)
            torch._foreach_add_(parts, (update * scale).unbind(), alpha=-rate * STEP)

    def _buffer(self, weight):
        if not self.state[weight]:
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
            usual = 1 / max(weight.shape[-2:])  # of an element of a matrix whose singular values are 1
            self.state[weight]["row_square"] = torch.full_like(weight[..., :1], usual)
        return self.state[weight]["momentum_buffer"]

    def _processes(self, weight):
        """The processes that divide the iteration, or None. For sharded matrices all that hold rows, else
        those of one machine: sending an update to another machine takes as long as the iteration."""
        if isinstance(weight, DTensor):
            return weight.device_mesh.get_group(weight.placements.index(Shard(0)))
        local = local_processes()
        if local == 1 or weight.device.type == "xla" or not dist.is_initialized():
            return None
        if self.machine is None:
            first, alone = dist.get_rank() - int(os.environ["LOCAL_RANK"]), local == dist.get_world_size()
            own = range(first, first + local)
            self.machine = dist.group.WORLD if alone else dist.new_group(own, use_local_synchronization=True)
        return self.machine


def _of_one_shape(weights) -> list[list]:
    """Lists of weights of one shape, not too long, as the tensors of a list will be copied."""
    shapes, lists = {}, []
    for weight in weights:
        shapes.setdefault(weight.shape, []).append(weight)
    for alike in shapes.values():
        here = alike[0].numel() // (alike[0].device_mesh.size() if isinstance(alike[0], DTensor) else 1)
        n = max(1, (AT_ONCE if alike[0].device.type == "cpu" else 8 * AT_ONCE) // max(1, here))
        lists += [alike[i : i + n] for i in range(0, len(alike), n)]
    return lists


def _local(tensor):
    """The rows of a sharded matrix that this process holds, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
