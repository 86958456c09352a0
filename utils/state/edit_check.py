"""What an edit of the script forgot: state to keep, weights that processes share, a guard."""

import json
import types
from dataclasses import asdict

import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.distributed.tensor import DTensor

from utils.learning.optim import UpdateGuard
from utils.state.reach import closed_over, digests, of_the_user
from utils.state.training_state import bare_optimizer, clean_name, digest, gather_bytes, local


def refuse_prepared_schedules(keep: dict) -> None:
    for name, thing in keep.items():
        if isinstance(thing, AcceleratedScheduler):
            cause = "went through accelerator.prepare, which makes it step once for each process"
            raise ValueError(f"{name}: {cause}; leave it out there.")


def optimizers_of(keep: dict) -> list[torch.optim.Optimizer]:
    return [optimizer for thing in keep.values() if (optimizer := bare_optimizer(thing))]


def optimizer_warnings(keep: dict) -> list[str]:
    """A line for each optimizer without a guard, and for weights that two optimizers update."""
    guards = [thing for thing in keep.values() if isinstance(thing, UpdateGuard)]
    guarded = [optimizer for guard in guards for optimizer in guard.optimizers]
    lines, names = [], {}  # names: of each weight's optimizers
    for name, thing in keep.items():
        optimizer = bare_optimizer(thing)
        if guarded and optimizer not in [None, *guarded]:
            line = f"guard      of {name}: none, what is not finite would reach its weights"
            lines.append(f"{line}; UpdateGuard(accelerator, optimizer, {name}) mends it")
        for group in optimizer.param_groups if optimizer else ():
            for weight in group["params"]:
                names.setdefault(weight, {}).setdefault(optimizer, name)
    for several in sorted({tuple(of.values()) for of in names.values() if len(of) > 1}):
        both = " and ".join(several)
        lines.append(f"optimizers {both} move some weights twice; take these out of one's groups")
    return lines


class EditCheck:
    """Digests of what `update` can reach, taken before it runs and compared after it has run.

    Functions that the model's modules hold (a loss) count, too, and collate, which makes batches."""

    def __init__(self, update, model, keep: dict, args=None, known=(), collate=None):
        self.update, self.model, self.collate, self.args = update, model, collate, args
        self.kept, self.told, modules = {"model": model, **keep}, set(), [*model.modules()]
        self.optimizers = {name: o for name, thing in keep.items() if (o := bare_optimizer(thing))}
        known = [*known, *self.kept.values(), *self.optimizers.values(), *modules, *model.buffers()]
        known += [thing.optimizer for thing in keep.values() if hasattr(thing, "optimizer")]
        known += [weight for weights in self._weights().values() for weight in weights.values()]
        self.known = {id(thing) for thing in known}
        held = [value for module in modules for value in vars(module).values()]
        losses = [value for value in held if isinstance(value, types.FunctionType) and of_the_user(value)]
        self.functions = [update, *losses]
        self.weights = {name: digest({}, weights) for name, weights in self._weights().items()}
        self.requires_grad = [weight.requires_grad for weight in model.parameters()]
        self.before, self.settings = self._look(), args and asdict(args)
        self.steps = 0  # so many updates since

    def changed(self) -> str:
        """What has changed, is not kept and was not told before, as a sentence; "" for nothing."""
        names = [name for name in self._differing(kept=False) if name not in self.told]
        self.told.update(names)
        if not names:
            return ""
        if names[0].startswith("data.collate"):
            return (f"{_listed(names)} changes, and batches are made ahead of the step: a resumed run would "
                    "make others. Let it follow from a batch's position and epoch, as in data/masking.py.")
        first = names[0].split(".")[0]
        return (f"keep: {self.update.__name__} changes {_listed(names)}, and nobody keeps it: a resumed run "
                f"would begin it anew. Hand it over, keep=dict(..., {first}={first}), as a torch.Generator "
                "or an object with state_dict and load_state_dict, or let its name begin with _ where a "
                "resume may forget it. run.generator has random numbers that need no keeping.")

    def check(self) -> None:
        """ValueError of `changed`, and where an update leaves gradients, which no checkpoint holds."""
        parts = [*self.model.named_parameters()]
        for name, thing in closed_over(self.update).items():
            parts += thing.named_parameters(name) if isinstance(thing, torch.nn.Module) else [(name, thing)]
        weights = {weight: name for name, weight in parts[::-1] if isinstance(weight, torch.nn.Parameter)}
        left = [name for weight, name in weights.items() if weight.grad is not None and weight.grad.any()]
        if left:
            raise ValueError(f"{self.update.__name__} leaves gradients of {_listed(left[::-1])}, which a "
                             "resumed run would not have: end it with zero_grad() of every optimizer, and "
                             "let each of these weights be in one, or need no gradient.")
        if message := self.changed():
            raise ValueError(message)

    def check_restored(self) -> None:
        """ValueError where something kept was restored and an attribute of it is not as it was."""
        if names := self._differing(kept=True):
            raise ValueError(f"keep: {self.update.__name__} changes {_listed(names)}, and load_state_dict "
                             "does not put it back: let state_dict hold it (of a module: a persistent "
                             "buffer); what is only for the moment, leave as it was found.")

    def check_step(self, accelerator) -> None:
        """After each update: ValueError, after the first one of `check`."""
        self.steps += 1
        if self.steps == 1:
            self.check()
        self.check_frozen(accelerator)

    def check_settings(self) -> None:
        """ValueError where the loop changes a setting."""
        now = asdict(self.args)
        if changed := [name for name in now if now[name] != self.settings[name]]:
            remedy = "What changes with the step is a function of it, as in docs/edits/growing-batch.diff."
            raise ValueError(f"{changed[0]}: changed in the loop, but read before it. {remedy}")

    def check_frozen(self, accelerator) -> None:
        """ValueError where several processes would wait for a gradient that does not come."""
        parts = zip(self.requires_grad, self.model.named_parameters(), strict=True)
        names = [clean_name(name) for before, (name, weight) in parts if before != weight.requires_grad]
        if names and accelerator.num_processes > 1:
            raise ValueError(f"requires_grad of {_listed(names)} changed in the loop, and processes wait for "
                             "each other's gradients as they were at the start. To leave weights as they are "
                             "for a while set their grad to None, as in docs/edits/frozen-embeddings.diff.")

    def idle_optimizers(self) -> list[str]:
        """Names of those that have moved no weight."""
        weights = self._weights()
        return [name for name in self.optimizers if digest({}, weights[name]) == self.weights[name]]

    def check_weights(self, accelerator) -> list[str]:
        """Names of weights that are not finite on some process. ValueError where weights that are not
        sharded, the model's or an optimizer's own, differ between processes. All processes call it."""
        groups, sums, names = self._weights(), {}, {}
        for name, group in groups.items():
            if accelerator.num_processes > 1 and (name == "model" or name in self.optimizers):
                whole = {path: weight for path, weight in group.items() if not isinstance(weight, DTensor)}
                sums[name] = digest({}, whole)
            names |= {weight: path for path, weight in group.items() if weight not in names}
        values = {name: local(weight.detach()) for weight, name in names.items()}
        doubtful = [name for name, value in values.items() if not value.sum().isfinite()]  # which is quick
        bad = [name for name in doubtful if not values[name].isfinite().all()]
        mine = json.dumps([sums, bad]).encode()
        found = [json.loads(text) for text in gather_bytes(accelerator, mine)]
        apart = [name for name in sums if len({each[name] for each, _ in found}) > 1]
        if apart and apart[0] != "model":
            cause = "differ between processes, as nobody exchanges their gradients. Before its step, for each"
            remedy = 'weight.grad.copy_(accelerator.reduce(weight.grad, "mean"))'
            raise ValueError(f"keep: weights of {apart[0]} outside the model {cause} of them: {remedy}.")
        if apart:
            raise ValueError("the processes have come to different weights: draw random numbers that move "
                             "them from run.generator, which is the same on all, as torch's own is not.")
        return list(dict.fromkeys(name for _, names in found for name in names))

    def _weights(self) -> dict[str, dict]:
        """{name in keep: {path: weight}} of modules and optimizers."""
        found = {}
        for name, thing in self.kept.items():
            parts = thing.named_parameters() if isinstance(thing, torch.nn.Module) else ()
            found[name] = {f"{name}.{clean_name(path)}": weight for path, weight in parts}
        for name, optimizer in self.optimizers.items():
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            found[name] = {f"{name}, weight {i}": weight for i, weight in enumerate(weights)}
        return found

    def _differing(self, kept: bool) -> list[str]:
        """Names without what stands in brackets, each once. What kept things have got since is no matter."""
        now = self._look()
        keys = [key for key in (self.before if kept else now) if self.before.get(key) != now.get(key)]
        return list(dict.fromkeys(name.split("[")[0] for of_kept, name in keys if of_kept == kept))

    def _look(self) -> dict:
        collate = self.collate
        roots = [item for function in self.functions for item in closed_over(function).items()]
        made = closed_over(collate) if isinstance(collate, types.FunctionType) else {"": collate}
        roots += [(f"data.collate.{name}".rstrip("."), value) for name, value in made.items()]
        return digests(roots, self.kept, self.known, self.model)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
