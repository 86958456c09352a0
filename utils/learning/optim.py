"""The optimizer, its learning-rate schedule, the guard against infinite gradients, mean losses to log."""

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import get_scheduler

from utils.devices import sync
from utils.flags import named_values
from utils.learning.muon import MuonAdamW, hidden_matrices

GIVE_UP = 20  # skipped updates in a row


def parameter_groups(model, weight_decay):
    """Two parameter groups: matrices and embeddings with weight decay, biases and norms without. Norms are
    recognized by their class (GPT-2's are named ln_1). Each trainable parameter occurs once, also if tied."""
    decayed, not_decayed = [], []
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        norm_or_bias = name.endswith("bias") or "Norm" in type(module).__name__
        if parameter.requires_grad:
            (not_decayed if parameter.ndim < 2 or norm_or_bias else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]


def build_optimizer(model, args):
    """AdamW over `parameter_groups`, fused on CPU and CUDA (also ROCm): one pass over the weights per step.

    optimizer_type "muon": Muon for the hidden layers' matrices, with muon_learning_rate; 0: learning_rate."""
    fused = next(model.parameters()).device.type in ("cpu", "cuda")
    groups, muon = parameter_groups(model, args.weight_decay), args.optimizer_type == "muon"
    if muon:
        matrices, decayed = hidden_matrices(model), groups[0]["params"]
        groups[0]["params"] = [weight for weight in decayed if weight not in matrices]
        hidden = [weight for weight in decayed if weight in matrices]
        rate = args.muon_learning_rate or args.learning_rate
        groups.append(dict(params=hidden, lr=rate, momentum=0.95, weight_decay=args.weight_decay))
    groups = [group for group in groups if group["params"]]
    options = dict(lr=args.learning_rate, betas=(0.9, args.adam_beta2), fused=fused)
    return (MuonAdamW if muon else torch.optim.AdamW)(groups, **options)


def describe_groups(optimizer):
    """A text per parameter group: algorithm, peak learning rate, weight decay, tensors, parameters."""
    unwrapped, lines = getattr(optimizer, "optimizer", optimizer), []  # without accelerate's wrapper
    class_name = type(unwrapped).__name__
    for group in unwrapped.param_groups:
        is_muon = class_name == "MuonAdamW" and "momentum" in group
        name = "Muon" if is_muon else class_name.removeprefix("Muon")
        tensors, parameters = len(group["params"]), sum(p.numel() for p in group["params"])
        size = f"{tensors} tensor{'s' * (tensors != 1)}, {parameters:,} parameters"
        rate = float(group.get("initial_lr", group["lr"]))  # initial_lr: set by a schedule
        decay = group.get("weight_decay", 0)
        lines.append(f"{name}, learning rate {rate:g}, weight decay {decay:g}: {size}")
    return lines


def finetuning_rates(args) -> str:
    """Flags with a twentieth of the learning rates, to continue from trained weights."""
    names = ["learning_rate"] + ["muon_learning_rate"] * (getattr(args, "optimizer_type", "") == "muon")
    rates = {name: getattr(args, name, 0) / 20 for name in names}
    return " ".join(f"--{name} {rate:g}" for name, rate in rates.items() if rate)


def build_schedule(optimizer, args, last):
    """transformers' schedule lr_scheduler_type over `last` optimizer steps, with lr_scheduler_kwargs.
    num_warmup_steps, and num_decay_steps among the kwargs, are steps or, if below 1, a share of all steps.

    optimizer: prepared or not. Step the schedule once per update. Do not prepare it: accelerate would step it
    once per process. ValueError for a warmup or options that do not fit."""
    name, options = args.lr_scheduler_type, named_values(args.lr_scheduler_kwargs or "")
    counts = args.num_warmup_steps, options.get("num_decay_steps", 0)
    warmup, decay = (int(count * (last if count < 1 else 1)) for count in counts)
    if not 0 <= warmup <= last - decay:
        raise ValueError(f"num_warmup_steps: {warmup} must be 0 to {last - decay}, as the run has {last} "
                         "steps; below 1 it is a share of them")
    if options and name.startswith("constant"):  # transformers would ignore options
        raise ValueError(f"lr_scheduler_kwargs: the schedule {name} has no options, leave them out")
    options |= {"num_decay_steps": decay} if decay else {}
    total = max(last, warmup + 1)  # polynomial divides by the steps after the warmup
    return get_scheduler(name, getattr(optimizer, "optimizer", optimizer), warmup, total, options)


class UpdateGuard:
    """Skips the update of all optimizers if the gradient norm is not finite, on all processes alike.

    Fused AdamW and MuonAdamW change nothing if their `found_inf` is 1 (made for GradScaler), so that the host
    need not wait for the norm. On XLA any optimizer steps with gradients of 0, and then weights and state are
    restored, but not its count of updates. Elsewhere the host reads the norm and drops the gradients. With
    fp16 GradScaler itself sets `found_inf` and skips the update."""

    def __init__(self, accelerator, *optimizers):
        if accelerator.scaler is not None and len(optimizers) > 1:
            raise ValueError("mixed_precision: fp16 allows one optimizer, as accelerate divides the "
                             "gradients of a second one twice by its scale; use bf16 or no.")
        self.optimizers = [o.optimizer if isinstance(o, AcceleratedOptimizer) else o for o in optimizers]
        self.scaler = accelerator.scaler
        # Fused SGD has `found_inf`, too, but a skipped first update would leave its momentum unset.
        fused_adam = [isinstance(o, torch.optim.Adam) and bool(o.defaults["fused"]) for o in self.optimizers]
        self.uses_found_inf = self.scaler is None and all(fused_adam)
        self.restores = self.scaler is None and accelerator.device.type == "xla"
        for optimizer in self.optimizers if self.restores else ():
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        self.norm = torch.zeros((), device=accelerator.device)  # of the newest gradient
        self.updates, self.consecutive = 0, 0  # at the last read: all updates; skipped updates in a row
        self._before, self._depth = [], 0  # during a step on XLA: (tensor, value to restore); nested steps
        # Flags since the last read, 1 for a skipped update: still on the device; restored from a checkpoint.
        self._pending, self._unread = [], []

    def check(self, grad_norm):
        """Call it once per update, between clipping and the optimizer's step. grad_norm: 0-d, not clipped.

        Returns 1.0 (0-d, on the device) if the update is skipped, else 0.0. `.norm` is the norm."""
        norm = getattr(grad_norm, "full_tensor", lambda: grad_norm)()  # FSDP2's norm is a DTensor
        norm = self.norm = norm.detach().float()
        flag = pending = (~torch.isfinite(norm)).float()
        if self.uses_found_inf:
            for optimizer in self.optimizers:
                optimizer.found_inf = flag
        elif self.scaler is None and not self.restores:
            pending = flag.cpu()
            if pending:
                for optimizer in self.optimizers:
                    optimizer.zero_grad(set_to_none=True)
        self._pending.append(pending)
        return flag

    @torch.no_grad()
    def _before_step(self, optimizer, *_):
        self._depth += 1
        if self._depth > 1:  # MuonAdamW's step calls AdamW's
            return
        skip = self._pending[-1] > 0
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        state = [value for values in optimizer.state.values() for value in values.values()]
        self._before = [(x, x.clone()) for x in weights + state if getattr(x, "device", None) == skip.device]
        for weight in weights:
            if weight.grad is not None:
                weight.grad.masked_fill_(skip, 0)  # so that state that this step creates is not NaN

    @torch.no_grad()
    def _after_step(self, *_):
        self._depth -= 1
        if not self._depth:
            for x, before in self._before:
                x.copy_(torch.where(self._pending[-1] > 0, before, x))
            self._before = []  # freed before a sync, which would write the copies to memory

    def read(self):
        """For each update since the last read 1 if it was skipped, else 0. The host waits for the device.
        RuntimeError after GIVE_UP skipped updates in a row."""
        state = self.state_dict()
        self.load_state_dict(state | {"unread": []})
        if self.consecutive >= GIVE_UP:
            where = f"of steps {self.updates - self.consecutive + 1} to {self.updates}"
            raise RuntimeError(f"{self.consecutive} updates in a row, {where}, were skipped, as gradients "
                               "were not finite. Lower learning_rate, or check the rows of these steps.")
        return state["unread"]

    def state_dict(self):
        """The state as plain numbers. The host waits for the device."""
        if self.restores:
            sync()
            self._pending = [flag.cpu() for flag in self._pending]  # a stack would be a graph for each length
        new = [int(flag) for flag in torch.stack(self._pending).tolist()] if self._pending else []
        consecutive = self.consecutive
        for flag in new:
            consecutive = consecutive + 1 if flag else 0
        return {"updates": self.updates + len(new), "consecutive": consecutive, "unread": self._unread + new}

    def load_state_dict(self, state):
        self.updates, self.consecutive = state["updates"], state["consecutive"]
        self._pending, self._unread = [], list(state["unread"])


class Means:
    """Mean losses over the steps since the last log line. The sums stay on the device until `read`."""

    def __init__(self, accelerator, *names):
        self.accelerator, self.names = accelerator, names
        self._sums = torch.zeros(len(names) + 1).to(accelerator.device)  # losses, steps

    def add(self, losses, skipped):
        """Call it once per step. losses [names]: of this step and process. They do not count if skipped (0-d)
        is 1. ValueError for another number of losses."""
        if losses.shape != (len(self.names),):  # a single loss would be broadcast to all names
            raise ValueError(f"means: losses of shape {[*losses.shape]}, expected one for each of "
                             f"{', '.join(self.names)}")
        step = torch.cat([losses.detach().float(), torch.ones_like(skipped)[None]])
        self._sums += torch.where(skipped > 0, 0, step)

    def read(self, **others):
        """{name: mean over steps and processes, or None without a step}, and the means of `others` (0-d) over
        processes. Resets the sums. All processes call it, and the host waits for the device."""
        sums = {name: (sum(values), len(values)) for name, values in self.state_dict(**others).items()}
        self._sums = torch.zeros_like(self._sums)
        steps, _ = sums.pop("steps")
        losses = {name: sums[name][0] / steps if steps else None for name in self.names}
        return losses | {name: sums[name][0] / sums[name][1] for name in others}

    def state_dict(self, **others):
        """{name, or "steps": list of each process's sum}, the same on all processes, which all call it."""
        values = self._sums  # without an operation if possible, as each would be a graph on XLA
        if others:
            sync()  # or XLA would compile the part of the step that `others` need, and compute it twice
            values = torch.cat([values, *(other[None] for other in others.values())])
        if self.accelerator.num_processes > 1:  # with one process gather would be another graph on XLA
            values = self.accelerator.gather(values)
        columns = values.cpu().view(-1, len(self._sums) + len(others)).T.tolist()
        return dict(zip([*self.names, "steps", *others], columns, strict=True))

    def load_state_dict(self, sums):
        """sums: from any number of processes, which are divided among today's. ValueError for other names."""
        if [*sums] != [*self.names, "steps"]:
            raise ValueError(f"means: the checkpoint has {', '.join(sums)}; this run needs "
                             f"{', '.join([*self.names, 'steps'])}")
        share = slice(self.accelerator.process_index, None, self.accelerator.num_processes)
        self._sums = torch.tensor([sum(column[share]) for column in sums.values()]).to(self._sums)
