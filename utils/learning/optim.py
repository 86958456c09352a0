"""Optimizer, schedule, the guard that skips updates that are not finite, and mean losses for the log."""

import math

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from utils.learning.muon import MuonAdamW, hidden_matrices
from utils.xla import sync

DECAYS = {  # schedule: share of the learning rate that is left, as a function of the share of the decay done
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "warmup_stable_decay": lambda done: 1 - math.sqrt(done),  # Haegele et al., 2024, 2405.18392
}
SCHEDULES = [*DECAYS, "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"]


def parameter_groups(model, weight_decay):
    """Two groups for an optimizer: matrices and embeddings, which decay, then biases and norms. Norms are
    recognized by their class (GPT-2's are named ln_1). Every trainable parameter once, also if tied."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        norm_or_bias = name.endswith("bias") or "Norm" in type(module).__name__
        if parameter.requires_grad:
            (plain if parameter.ndim < 2 or norm_or_bias else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def build_optimizer(model, learning_rate, weight_decay, betas=(0.9, 0.999), optimizer_type="adamw",
                    muon_learning_rate=0.0):
    """AdamW over `parameter_groups`, fused on CPU and CUDA (ROCm too): one pass over the weights per step.

    "muon": Muon for the hidden layers' matrices, at muon_learning_rate or, if that is 0, at learning_rate."""
    fused = next(model.parameters()).device.type in ("cpu", "cuda")
    groups = parameter_groups(model, weight_decay)
    if optimizer_type == "muon":
        matrices, decayed = hidden_matrices(model), groups[0]["params"]
        groups[0]["params"] = [weight for weight in decayed if weight not in matrices]
        hidden = [weight for weight in decayed if weight in matrices]
        options = dict(lr=muon_learning_rate or learning_rate, momentum=0.95, weight_decay=weight_decay)
        groups.append({"params": hidden, **options})
    groups = [group for group in groups if group["params"]]
    optimizer = MuonAdamW if optimizer_type == "muon" else torch.optim.AdamW
    return optimizer(groups, lr=learning_rate, betas=betas, fused=fused)


def name_optimizers(settings: dict, optimizers: list) -> dict:
    """The settings, with optimizer_type naming the optimizers of an edit."""
    kind, kinds = settings.get("optimizer_type"), {"muon": MuonAdamW, "adamw": torch.optim.AdamW}
    if not kind or kinds.get(kind) in map(type, optimizers):
        return settings
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    return settings | {"optimizer_type": names or "of the script's own"}


def describe_groups(optimizer):
    """A line per group: its algorithm, peak learning rate, weight decay, tensors, parameters."""
    kind, lines = type(optimizer).__name__, []
    for group in optimizer.param_groups:
        name = "Muon" if kind == "MuonAdamW" and "momentum" in group else kind.removeprefix("Muon")
        tensors, parameters = len(group["params"]), sum(p.numel() for p in group["params"])
        size = f"{tensors} tensor{'s' * (tensors != 1)}, {parameters:,} parameters"
        rate = float(group.get("initial_lr", group["lr"]))  # the first is what a schedule multiplies
        decay = group.get("weight_decay", 0)
        lines.append(f"optimizer  {name}, learning rate {rate:g}, weight decay {decay:g}: {size}")
    return lines


def build_schedule(optimizer, lr_scheduler_type, num_warmup_steps, max_train_steps, num_decay_steps=0,
                   min_lr_ratio=0.0):
    """A learning-rate schedule in optimizer steps. Those of DECAYS end at min_lr_ratio of the peak;
    warmup_stable_decay decays in the last num_decay_steps, the others from the warm-up on.

    Step it once per update, and leave it out of accelerator.prepare, which would step it once per process."""
    name, warmup, last = lr_scheduler_type, num_warmup_steps, max_train_steps
    decay = num_decay_steps if name == "warmup_stable_decay" else last - warmup
    if not 0 <= warmup <= last:
        raise ValueError(f"num_warmup_steps, {warmup}, must be 0 to {last}, the steps of the run")
    if warmup + decay > last:
        raise ValueError(f"num_decay_steps: {decay}, and {warmup} of warm-up, are more than the {last} steps "
                         "of the run")
    if name not in DECAYS:  # transformers' polynomial divides by 0 if no step follows the warm-up
        return get_scheduler(name, optimizer, warmup, max(last, warmup + 1))

    def factor(step):
        if step < warmup:
            return step / warmup
        done = min(max(step - (last - decay), 0) / decay, 1) if decay else float(step >= last)
        return min_lr_ratio + (1 - min_lr_ratio) * DECAYS[name](done)

    return LambdaLR(optimizer, factor)


def stable_steps(args, steps):
    """[first, last] step between warm-up and decay, where the learning rate is constant."""
    schedule = getattr(args, "lr_scheduler_type", "")
    warmup = 0 if schedule == "constant" else getattr(args, "num_warmup_steps", 0)
    decay = args.num_decay_steps if schedule == "warmup_stable_decay" else 0
    return [steps.count(warmup), steps.last - steps.count(decay)]


class UpdateGuard:
    """Skips updates of all optimizers if the gradient norm is not finite.

    All processes decide alike. Fused AdamW changes nothing if its `found_inf` is 1 (made for GradScaler), so
    the host need not wait. With any other optimizer the host reads the norm and drops the gradients. With
    fp16 GradScaler sets `found_inf` and skips what is not finite by itself."""

    def __init__(self, accelerator, *optimizers):
        if accelerator.scaler is not None and len(optimizers) > 1:
            raise ValueError("mixed_precision: fp16 allows one optimizer, as accelerate divides the "
                             "gradients of a second one twice by its scale; use bf16 or no.")
        self.optimizers = [o.optimizer if isinstance(o, AcceleratedOptimizer) else o for o in optimizers]
        self.scaler = accelerator.scaler
        # Fused SGD has `found_inf` too, but a skipped first update leaves its momentum unset.
        obey = [isinstance(o, torch.optim.Adam) and bool(o.defaults["fused"]) for o in self.optimizers]
        self.obeyed = self.scaler is None and all(obey)
        self.norm = torch.zeros((), device=accelerator.device)  # of the newest gradient
        self.consecutive = 0  # updates skipped in a row, at the last read
        self._pending, self._unread = [], []  # flags on the device; flags on the host

    def check(self, grad_norm, limit=None):
        """Call it once per update, after clipping and before optimizer.step(). grad_norm: 0-d, before
        clipping. Above `limit` (a number or 0-d, the same on all processes) the update is skipped too.

        Returns 1.0 (0-d, on the device) if the update is skipped, else 0.0. `.norm` holds the norm."""
        norm = getattr(grad_norm, "full_tensor", lambda: grad_norm)()  # FSDP2's norm is a DTensor
        norm = self.norm = norm.detach().float()
        skip = ~torch.isfinite(norm)
        if limit is not None:
            skip = skip | (norm > limit)
        flag = pending = skip.float()
        if self.obeyed:
            for optimizer in self.optimizers:
                optimizer.found_inf = flag
        elif self.scaler is None or limit is not None:
            sync()  # or XLA would compute the gradient twice, for the host and for the step
            pending = flag.cpu()
            if pending:
                for optimizer in self.optimizers:
                    optimizer.zero_grad(set_to_none=True)
        self._pending.append(pending)
        return flag

    def read(self):
        """For each update since the last read 1 if it was skipped, else 0."""
        flags, self._unread = self.state_dict()["unread"], []
        return flags

    def state_dict(self):
        """Values that fit into JSON. Only here, and in `read`, the host waits."""
        new = [int(flag) for flag in torch.stack(self._pending).tolist()] if self._pending else []
        for flag in new:
            self.consecutive = self.consecutive + 1 if flag else 0
        self._unread, self._pending = self._unread + new, []
        return {"consecutive": self.consecutive, "unread": self._unread}

    def load_state_dict(self, state):
        self.consecutive, self._pending, self._unread = state["consecutive"], [], list(state["unread"])


class Means:
    """Means of losses over the steps since the last log line. They stay on the device until `read`."""

    def __init__(self, accelerator, *names, total=None):
        """names: of the losses; total: the name of their sum, which comes first, or None."""
        self.accelerator, self.names = accelerator, [f"loss/{name}" for name in names]
        self.total = total and f"loss/{total}"
        self._step = torch.zeros(len(names)).to(accelerator.device)  # over a step's micro-batches
        self._added = 0  # micro-batches of this step
        self._start()

    def _start(self):
        self._sums = torch.zeros(len(self.names) + 1).to(self.accelerator.device)  # losses, steps

    def add(self, *losses):
        """Call it once per micro-batch, with one 0-d tensor per name, or ValueError."""
        if len(losses) != len(self.names):  # a single one would be broadcast to all names
            raise ValueError(f"means: {len(losses)} losses for {', '.join(self.names)}")
        self._step += torch.stack([loss.detach().float() for loss in losses])
        self._added += 1

    def end_step(self, skipped, micro_batches=1, divide=True):
        """Ends a step: its losses, divided by `micro_batches` if divide, count unless `skipped` (0-d) is 1.
        ValueError if `add` was not called once for each micro-batch, as the means would be wrong."""
        added, self._added = self._added, 0
        if added != micro_batches:
            raise ValueError(f"means: add was called {added} times in a step of {micro_batches} "
                             "micro-batches: call it once for each, with one loss per name of Means.")
        step = torch.cat([self._step / (micro_batches if divide else 1), torch.ones_like(skipped)[None]])
        self._sums += torch.where(skipped > 0, 0, step)
        self._step.zero_()

    def read(self, **others):
        """{"loss/<name>": mean over steps and processes, None if no step counted}, and the means of `others`
        (0-d) over processes. Then starts anew. All processes call it; here the host waits for the device."""
        rows = self.state_dict(*others.values())
        names = [*self.names, "steps", *others]
        sums = {name: sum(column) for name, *column in zip(names, *rows, strict=True)}
        self._start()
        losses, steps = {name: sums[name] for name in self.names}, sums["steps"]
        if self.total:
            losses = {self.total: sum(losses.values())} | losses
        means = {name: loss / steps if steps else None for name, loss in losses.items()}
        return means | {name: sums[name] / len(rows) for name in others}

    def state_dict(self, *others):
        """A row per process, [losses, steps, others]: the same on all processes, which all call it."""
        values = torch.cat([self._sums, *(other[None] for other in others)]) if others else self._sums
        if self.accelerator.num_processes > 1:  # with one process it would be another graph on XLA
            values = self.accelerator.gather(values)
        return values.cpu().view(-1, len(self._sums) + len(others)).tolist()

    def load_state_dict(self, rows):
        """rows: of any number of processes; each takes its share. ValueError for rows of other losses."""
        if any(len(row) != len(self._sums) for row in rows):
            raise ValueError(f"{len(rows[0]) - 1} losses there, {len(self.names)} now")
        self._start()
        if mine := rows[self.accelerator.process_index :: self.accelerator.num_processes]:
            self._sums = torch.tensor(mine).sum(0).to(self.accelerator.device)
