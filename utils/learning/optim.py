"""Optimizer, schedule, and the guard that keeps a bad update out of the weights."""

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import get_scheduler

from utils.xla import sync

SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt")


def decays(module, name, parameter):
    """Weight decay is for matrices and embeddings, not for biases and norms, whatever the model calls them.

    Asked of the module that owns the parameter, because names lie: GPT-2's norms are ln_1, ln_2, ln_f.
    """
    return parameter.ndim >= 2 and not name.endswith("bias") and "Norm" not in type(module).__name__


def parameter_groups(model, weight_decay):
    """Two groups for an optimizer, the decayed one first; every trainable parameter once, also when tied."""
    decayed, plain, seen = [], [], set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                (decayed if decays(module, name, parameter) else plain).append(parameter)
    assert seen == {p for p in model.parameters() if p.requires_grad}
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def build_optimizer(model, learning_rate, weight_decay, betas=(0.9, 0.999), eps=1e-8):
    """AdamW over `parameter_groups`, fused on CPU and CUDA (ROCm too): one pass over the weights per step.

    Move the model to its device, and tie its weights there, before: XLA makes new parameters on the way.
    """
    fused = next(model.parameters()).device.type in ("cpu", "cuda")
    groups = [group for group in parameter_groups(model, weight_decay) if group["params"]]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=fused)


def describe_groups(optimizer):
    """One line per group: weight decay, tensors, parameters."""
    return "\n".join(
        f"weight decay {group['weight_decay']:g}: {len(group['params'])} tensors, "
        f"{sum(p.numel() for p in group['params']):,} parameters"
        for group in optimizer.param_groups
    )


def build_schedule(optimizer, lr_scheduler_type, num_warmup_steps, max_train_steps):
    """A learning-rate schedule in optimizer steps, 0 after `max_train_steps` for linear and cosine.

    Leave it out of accelerator.prepare, which would step it once per process, and step it once per update.
    """
    if lr_scheduler_type not in SCHEDULES:
        raise ValueError(f"lr_scheduler_type, {lr_scheduler_type!r}, must be one of {', '.join(SCHEDULES)}")
    if not 0 <= num_warmup_steps <= max_train_steps:
        raise ValueError(
            f"num_warmup_steps, {num_warmup_steps}, must be 0 to {max_train_steps}, the steps of the run"
        )
    return get_scheduler(lr_scheduler_type, optimizer, num_warmup_steps, max_train_steps)


class UpdateGuard:
    """Skips an update whose gradient norm is not finite, or is an outlier, without asking the host.

    The norm of the whole gradient is the same on all processes, so all judge alike. Fused AdamW leaves
    weights, moments and step count alone when its `found_inf` is 1 (made for GradScaler). Elsewhere the host
    reads the norm and drops the gradients. Under fp16 GradScaler owns `found_inf` and skips what is not
    finite by itself.
    """

    WARMUP = 20  # accepted updates before outliers are judged
    HORIZON = 100  # updates that the running mean of accepted norms looks back, about

    def __init__(self, accelerator, optimizer, outlier_factor=0.0):
        """outlier_factor: skip norms above this multiple of the running mean of accepted norms; 0 = never."""
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        self.optimizer, self.outlier_factor, self.scaler = optimizer, outlier_factor, accelerator.scaler
        device = optimizer.param_groups[0]["params"][0].device
        self.norm = torch.zeros((), device=device)  # of the newest gradient
        self.mean, self.accepted = 0.0, 0.0  # of accepted gradient norms, and how many; tensors once in use
        self.consecutive = 0  # updates skipped in a row, as of the last read
        self._pending, self._unread = [], []  # flags still on the device; flags on the host

    def judge(self, grad_norm):
        """After clipping, before optimizer.step(), once per update. grad_norm: 0-d, not clipped.

        Returns 1.0 (0-d, on the device) if the update is skipped, else 0.0. The norm stays in `.norm`.
        """
        norm = getattr(grad_norm, "full_tensor", lambda: grad_norm)()  # FSDP2's norm is a DTensor
        norm = self.norm = norm.detach().float()
        bad = ~torch.isfinite(norm)
        if self.outlier_factor:
            bad = bad | (self.accepted >= self.WARMUP) & (norm > self.outlier_factor * self.mean)
            self.accepted = self.accepted + ~bad
            share = 1 / self.accepted.clamp(1, self.HORIZON)  # a plain mean first, an exponential one later
            self.mean = self.mean + torch.where(bad, 0.0, (norm - self.mean) * share)
        flag = bad.float()
        if self.scaler is None and self.optimizer.defaults["fused"]:
            self.optimizer.found_inf = flag
        elif self.scaler is None or self.outlier_factor:
            sync()  # else XLA would compute the gradient twice: for the host, and for the step
            self._pending.append(flag.cpu())
            if self._pending[-1]:
                self.optimizer.zero_grad(set_to_none=True)
            return flag
        self._pending.append(flag)
        return flag

    def read(self):
        """For every update since the last read 1 if it was skipped, else 0. Only here the host waits."""
        self._fetch()
        flags, self._unread = self._unread, []
        return flags

    def _fetch(self):
        flags = [int(flag) for flag in torch.stack(self._pending).tolist()] if self._pending else []
        for flag in flags:
            self.consecutive = self.consecutive + 1 if flag else 0
        self._unread, self._pending = self._unread + flags, []

    def state_dict(self):
        """Numbers and a list, fit for JSON."""
        self._fetch()
        mean, accepted = float(self.mean), float(self.accepted)
        return {"mean": mean, "accepted": accepted, "consecutive": self.consecutive, "unread": self._unread}

    def load_state_dict(self, state):
        self.mean, self.accepted = state["mean"], state["accepted"]
        self.consecutive, self._pending, self._unread = state["consecutive"], [], list(state["unread"])


def skipped_updates(flags, step, rows_per_step):
    """One record for metrics.jsonl per skipped update: which step, and its samples' positions [first, end).

    flags: of the updates up to and including `step`, as UpdateGuard.read gives them.
    """
    steps = [step - len(flags) + i + 1 for i, flag in enumerate(flags) if flag]
    return [
        {"step": s, "event": "skipped_update", "positions": [(s - 1) * rows_per_step, s * rows_per_step]}
        for s in steps
    ]
