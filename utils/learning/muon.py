"""One optimizer with Muon for the matrices of the hidden layers and AdamW for the other parameters.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) updates a matrix by the momentum of its gradient
with all singular values set to about one (Polar Express: Amsel et al., 2025, arXiv 2505.16932). Each row, a
neuron, is then divided by its root mean square over recent steps, so that all neurons take steps of the same
size (NorMuon: Li et al., 2025, arXiv 2510.05491). This size is that of AdamW's updates, 0.2, so that AdamW's
learning rates and weight decay fit (Liu et al., "Muon is Scalable for LLM Training", 2025, arXiv 2502.16982).
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

# Coefficients of the five quintic iterations, which are the best for singular values from 1e-3 to 1, with a
# margin of 2 % each for rounding (Polar Express).
COEFFICIENTS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
MARGIN = 1.02  # a matrix is divided by more than its norm, so that rounding leaves no singular value above 1
FIRST_MOMENTUM = 0.85  # the first gradients are soon out of date
# Updates until the momentum reaches the group's. 149, not 150: then it would once be exactly 0.9, and
# XLA would merge that constant with AdamW's beta1 and compile a second graph.
WARM_UP = 149
BETA2 = 0.95  # of the moving average of a row's mean square
STEP = 0.2  # root mean square of an update at learning rate 1
AT_ONCE = 1 << 24  # elements of the matrices that are iterated together; 8 times as many on accelerators
# Type of the iteration; float32 on other devices. CPUs without bfloat16 instructions are slower in bfloat16.
PRECISION = dict.fromkeys(["cuda", "xla"], torch.bfloat16)
if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
    PRECISION["cpu"] = torch.bfloat16


def hidden_matrices(model) -> set:
    """The weights that Muon trains: matrices [r, c] and stacked experts [n, r, c] in a model's blocks (its
    ModuleLists), and square weights of other linear layers, such as a masked model's head, which is unstable
    with AdamW at the embeddings' rate. Not embeddings, vocabulary
    projections and state matrices (Mamba's A_log)."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    in_blocks = {id(module) for blocks in lists for module in blocks.modules()}
    vocabulary = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabulary += [lm.get_output_embeddings() for lm in model.modules() if isinstance(lm, PreTrainedModel)]
    vocabulary = {module.weight for module in vocabulary if module is not None}
    return {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and parameter not in vocabulary and _is_matrix(module, name, parameter)
        and (id(module) in in_blocks or isinstance(module, nn.Linear) and len(set(parameter.shape)) == 1)
    }


def _is_matrix(module, name, parameter) -> bool:
    if "Expert" in type(module).__name__:  # transformers' experts, stacked
        return parameter.ndim in (2, 3) and "bias" not in name
    return parameter.ndim == 2 and name.endswith("weight")


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """[n, r, c] -> the same with singular values near 1. Those below a thousandth of the norm stay small."""
    tall = matrices.shape[1] > matrices.shape[2]
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=torch.float32)  # on XLA, too
    x = (matrices.mT if tall else matrices) / (MARGIN * norms).clamp(min=1e-7).to(matrices.dtype)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if tall else x  # so that later sums over its rows round alike on all processes


class MuonAdamW(torch.optim.AdamW):
    """AdamW, but Muon for groups with a `momentum`, whose matrices of equal shape are updated together.

    If `found_inf` is 1 nothing changes, as in fused AdamW: an update is skipped without waiting for the
    device. Processes divide Muon's iteration (utils/learning/shares.py), so their gradients must be equal."""

    found_inf = machine_group = None  # machine_group: the process group of this machine

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
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's expects a `step` for every parameter

    def _muon(self, group):
        """Uses few calls for all matrices of a shape: on a GPU each call costs the host some microseconds."""
        rate, momentum, skip = group["lr"], group["momentum"], self.found_inf
        updates = group.get("updates", 0)
        momentum -= max(0, momentum - FIRST_MOMENTUM) * max(0, 1 - updates / WARM_UP)
        group["updates"] = updates + 1
        active = 1.0 if skip is None else 1 - skip  # 0-d; 0 if the update is skipped
        momentum_factor, decay_factor = 1 - active * (1 - momentum), 1 - active * rate * group["weight_decay"]
        square_weight = active * (1 - BETA2)
        square_factor = 1 - square_weight
        local, divided = [], []  # lists of weights: computed by this process; divided between processes
        for weights in _group_by_shape([weight for weight in group["params"] if weight.grad is not None]):
            experts = isinstance(weights[0], DTensor) and weights[0].ndim == 3  # not cut into parts
            (local if experts else divided).append(weights)
        processes = self._processes(divided[0][0]) if divided else None
        if processes is None:
            local, divided = local + divided, []

        def look_ahead(weights):
            """Updates the momenta. Returns Nesterov's look-ahead, [n, r, c] or this process's rows of it."""
            buffers = [_local(self._momentum_buffer(weight)) for weight in weights]
            stack = torch.stack([_local(weight.grad) for weight in weights])
            if skip is not None:
                stack.masked_fill_(skip > 0, 0)  # as 0 x nan is nan
            gradients = stack.unbind()  # views
            torch._foreach_mul_(buffers, momentum_factor)
            torch._foreach_add_(buffers, gradients, alpha=1 - momentum)
            torch._foreach_lerp_(gradients, buffers, momentum)
            return stack.to(PRECISION.get(stack.device.type, torch.float32)).flatten(0, -3)

        sizes = [(len(weights), *weights[0].shape) for weights in divided]
        shapes = [(math.prod(size[:-2]), *size[-2:]) for size in sizes]
        sharded = bool(divided) and isinstance(divided[0][0], DTensor)
        orthogonal = itertools.chain(
            (orthogonalize(look_ahead(weights)) for weights in local),
            share(orthogonalize, map(look_ahead, divided), shapes, processes, sharded) if divided else (),
        )
        for weights, update in zip(local + divided, orthogonal, strict=True):
            parts = [_local(weight) for weight in weights]
            squares = [_local(self.state[weight]["row_square"]) for weight in weights]  # [..., r, 1]
            update = update.view(len(parts), *parts[0].shape).to(parts[0].dtype)
            lengths = torch.linalg.vector_norm(update, dim=-1, keepdim=True)  # of rows, [n, ..., r, 1]
            torch._foreach_mul_(squares, square_factor)
            torch._foreach_add_(squares, lengths.square_().mul_(square_weight / update.shape[-1]).unbind())
            scale = torch.stack(squares).add_(1e-20).rsqrt_().mul_(active)  # 1e-20: rows without gradients
            torch._foreach_mul_(parts, decay_factor)
            torch._foreach_add_(parts, (update * scale).unbind(), alpha=-rate * STEP)

    def _momentum_buffer(self, weight):
        if not self.state[weight]:
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
            mean_square = 1 / max(weight.shape[-2:])  # of the elements, if all singular values are 1
            self.state[weight]["row_square"] = torch.full_like(weight[..., :1], mean_square)
        return self.state[weight]["momentum_buffer"]

    def _processes(self, weight):
        """The process group that divides the iteration, or None. For sharded matrices the group that shards
        their rows, else one machine: sending an update to another machine takes as long as the iteration."""
        if isinstance(weight, DTensor):
            return weight.device_mesh.get_group(weight.placements.index(Shard(0)))
        local = local_processes()
        if local == 1 or weight.device.type == "xla" or not dist.is_initialized():
            return None
        if self.machine_group is None and local == dist.get_world_size():
            self.machine_group = dist.group.WORLD
        elif self.machine_group is None:
            first = dist.get_rank() - int(os.environ["LOCAL_RANK"])
            ranks = range(first, first + local)
            self.machine_group = dist.new_group(ranks, use_local_synchronization=True)
        return self.machine_group


def _group_by_shape(weights) -> list[list]:
    """Lists of weights of equal shape. AT_ONCE limits their elements, as the tensors will be copied."""
    shapes, lists = {}, []
    for weight in weights:
        shapes.setdefault(weight.shape, []).append(weight)
    for group in shapes.values():
        numel = group[0].numel() // (group[0].device_mesh.size() if isinstance(group[0], DTensor) else 1)
        n = max(1, (AT_ONCE if group[0].device.type == "cpu" else 8 * AT_ONCE) // max(1, numel))
        lists += [group[i : i + n] for i in range(0, len(group), n)]
    return lists


def _local(tensor):
    """The part of a sharded tensor on this process, in the same memory; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
