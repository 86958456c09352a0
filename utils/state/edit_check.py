"""What an edit of the script forgot: state to keep, weights that processes share, a guard."""

from dataclasses import asdict
from types import FunctionType

import torch
from torch.distributed.tensor import DTensor

from utils.learning.optim import UpdateGuard
from utils.state import training_state
from utils.state.reach import attributes, of_the_user, reach
from utils.state.training_state import bare_optimizer, checksum, clean_name


def optimizers_of(keep: dict) -> dict[str, torch.optim.Optimizer]:
    return {name: optimizer for name, thing in keep.items() if (optimizer := bare_optimizer(thing))}


def weights_of(optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def optimizer_warnings(keep: dict) -> list[str]:
    """A line for each optimizer without a guard, and for weights that two optimizers update."""
    guards = [thing for thing in keep.values() if isinstance(thing, UpdateGuard)]
    guarded = [optimizer for guard in guards for optimizer in guard.optimizers]
    lines, owners = [], {}  # owners: names of the optimizers of each weight
    for name, optimizer in optimizers_of(keep).items():
        if guarded and optimizer not in guarded:
            lines.append(f"guard      of {name}: none, what is not finite would reach its weights; "
                         f"UpdateGuard(accelerator, optimizer, {name}) mends it")
        for weight in weights_of(optimizer):
            owners.setdefault(weight, []).append(name)
    for names in sorted({" and ".join(names) for names in owners.values() if len(names) > 1}):
        lines.append(f"optimizers {names} move some weights twice; take these out of one's groups")
    return lines


class EditCheck:
    """Digests of what `update` can reach, taken before it runs and compared after it has run.

    A loss that the model holds counts, too, and collate, which makes batches. args: the settings; known: what
    the run restores by itself."""

    def __init__(self, update, model, keep: dict, args=None, known=(), collate=None):
        self.update, self.model, self.keep, self.collate = update, model, keep, collate
        self.args, self.settings, self.optimizers = args, asdict(args) if args else {}, optimizers_of(keep)
        modules, inner = [*model.modules()], [getattr(thing, "optimizer", model) for thing in keep.values()]
        known = [*known, args or model, *keep.values(), *inner, *self.optimizers.values()]
        self.known = {id(thing) for thing in [*known, *modules, *model.buffers(), *self._weights()]}
        held = [value for module in modules for value in vars(module).values()]
        losses = [value for value in held if isinstance(value, FunctionType) and of_the_user(value)]
        self.functions = [("", function) for function in (update, *losses)]
        self.before, self.values = self._reached()[0], self._values()
        self.requires_grad = {weight: weight.requires_grad for weight in model.parameters()}
        self.named, self.checked = set(), False  # names in earlier messages; whether a step was checked

    def changed(self) -> str:
        """What has changed, is not kept and was not named before, as a sentence; "" for nothing."""
        names = [name for name in _differing(self.before, self._reached()[0]) if name not in self.named]
        self.named.update(names)
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
        names = self._weights() | self._reached()[1]
        left = [w for w in names if w.is_leaf and w.grad is not None and w.grad.any()]
        if left:
            shown = _listed([names[weight].removeprefix("model.") for weight in left])
            raise ValueError(f"{self.update.__name__} leaves gradients of {shown}, which a resumed run would "
                             "not have: end it with zero_grad() of every optimizer, and let each of these "
                             "weights be in one, or need no gradient.")
        if message := self.changed():
            raise ValueError(message)

    def check_step(self, accelerator) -> None:
        """After each update. ValueError where it has changed a setting or, on several processes, which
        weights have gradients; after the first one that of `check`."""
        if not self.checked:
            self.check()
        self.checked = True
        if changed := [name for name, value in self.settings.items() if getattr(self.args, name) != value]:
            raise ValueError(f"{changed[0]}: changed in the loop, but read before it. What changes with the "
                             "step is a function of it, as in docs/edits/growing-batch.diff.")
        weights = self.model.named_parameters()
        names = [clean_name(name) for name, w in weights if w.requires_grad != self.requires_grad[w]]
        if names and accelerator.num_processes > 1:
            raise ValueError(f"requires_grad of {_listed(names)} changed in the loop, and processes wait for "
                             "each other's gradients as they were at the start. To leave weights as they are "
                             "for a while set their grad to None, as in docs/edits/frozen-embeddings.diff.")

    def check_weights(self, accelerator) -> list[str]:
        """Names of weights that are not finite on some process. ValueError where weights that are not
        sharded, the model's or an optimizer's own, differ between processes. All processes call it."""
        names, sums = self._weights(), {}
        if accelerator.num_processes > 1:
            trained = {*self.model.parameters()}.union(*map(weights_of, self.optimizers.values()))
            sums = {names[w]: checksum(w) for w in names if w in trained and not isinstance(w, DTensor)}
        bad = [name for w, name in names.items() if not training_state.local(w.detach()).isfinite().all()]
        found = training_state.gather_json(accelerator, [sums, bad])
        apart = [name for name in sums if any(theirs[name] != sums[name] for theirs, _ in found)]
        if apart and apart[0].startswith("model."):
            raise ValueError("the processes have come to different weights: draw random numbers that move "
                             "them from run.generator, which is the same on all, as torch's own is not.")
        if apart:
            raise ValueError(f"keep: weights of {apart[0].split('.')[0]} outside the model differ between "
                             "processes, as nobody exchanges their gradients. Before its step, for each of "
                             'them: weight.grad.copy_(accelerator.reduce(weight.grad, "mean")).')
        return list(dict.fromkeys(name for _, names in found for name in names))

    def idle_optimizers(self) -> list[str]:
        """Names of those that have moved no weight."""
        return [name for name, values in self._values().items() if values == self.values[name]]

    def kept(self) -> dict:
        """{name: digest} of what is kept, and of attributes that its load_state_dict may leave out."""
        training_state.reshard(self.model)
        things, digests = {"model": self.model, **self.keep}, {}
        for name, thing in things.items():
            digests[name] = training_state.digest(*training_state.freeze(thing, self.model))
            digests |= reach(attributes(name, thing), set(), self.model)[0]
        return digests

    def check_restored(self, before: dict) -> None:
        """ValueError or RuntimeError where what is kept was restored and differs from `kept()` before."""
        names = _differing(self.kept(), before)  # what things have got since is no matter
        if left_out := [name for name in names if name not in self.keep and name != "model"]:
            raise ValueError(f"keep: {self.update.__name__} changes {_listed(left_out)}, and load_state_dict "
                             "does not put it back: let state_dict hold it (of a module: a persistent "
                             "buffer); what is only for the moment, leave as it was found.")
        if names:
            raise RuntimeError("preflight: what was written to a checkpoint and read back differs from what "
                               f"was saved: {', '.join(names)}")

    def _weights(self) -> dict:
        """{weight: name} of the model and of all modules and optimizers in keep."""
        names = {}
        for thing, module in {"model": self.model, **self.keep}.items():
            for name, weight in module.named_parameters() if isinstance(module, torch.nn.Module) else ():
                names.setdefault(weight, f"{thing}.{clean_name(name)}")
        for thing, optimizer in self.optimizers.items():
            for i, weight in enumerate(weights_of(optimizer)):
                names.setdefault(weight, f"{thing}.{i}")
        return names

    def _values(self) -> dict:
        """{optimizer: checksums of its weights}"""
        return {name: [checksum(w) for w in weights_of(o)] for name, o in self.optimizers.items()}

    def _reached(self) -> tuple[dict, dict]:
        """What update and collate can reach: {name: digest}, {weight: name}."""
        digests, weights = reach(self.functions, self.known, self.model)
        batches, _ = reach([("", self.collate)], self.known, self.model)
        return digests | {f"data.collate.{name.lstrip('.')}": d for name, d in batches.items()}, weights


def _differing(before: dict, now: dict) -> list[str]:
    """Names in `now` of what is another than before, without what stands in brackets, each once."""
    return list(dict.fromkeys(name.split("[")[0] for name in now if before.get(name) != now[name]))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
