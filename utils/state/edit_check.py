"""What an edit of the script forgot: state to keep, weights that processes share, a guard, zero_grad."""

from dataclasses import asdict
from types import FunctionType

import torch
from torch.distributed.tensor import DTensor

from utils.io.files import checksum_json
from utils.learning.optim import UpdateGuard
from utils.state import training_state
from utils.state.reach import attributes, of_the_user, reach
from utils.state.training_state import bare_optimizer, checksum, clean_name


class EditCheck:
    """Digests of everything that `update` can reach, taken now and compared with those after it has run.

    A loss function that the model holds counts too, and so does collate, which makes batches. args: the
    settings; known: objects that the run restores by itself."""

    def __init__(self, update, model, keep: dict, args=None, known=(), collate=None):
        self.update, self.model, self.keep, self.collate = update, model, keep, collate
        self.args, self.settings = args, asdict(args) if args else {}
        bare = {name: bare_optimizer(thing) for name, thing in keep.items()}
        self.optimizers = {name: optimizer for name, optimizer in bare.items() if optimizer}
        scheduled = [getattr(thing, "optimizer", model) for thing in keep.values()]
        known = [*known, args or model, *keep.values(), *scheduled, *self.optimizers.values()]
        modules = [*model.modules()]
        self.known = {id(thing) for thing in [*known, *modules, *model.buffers(), *self._weights()]}
        held = [value for module in modules for value in vars(module).values()]
        losses = [value for value in held if isinstance(value, FunctionType) and of_the_user(value)]
        self.functions = [("", function) for function in (update, *losses)]
        self.before = self._reached()[0]
        self.requires_grad = {weight: weight.requires_grad for weight in model.parameters()}
        self.reported, self.checked = set(), False  # names in earlier messages; whether an update was checked

    def warnings(self) -> list[str]:
        """A line for each optimizer without a guard, and for parameters that two optimizers update."""
        guards = [thing for thing in self.keep.values() if isinstance(thing, UpdateGuard)]
        guarded = [optimizer for guard in guards for optimizer in guard.optimizers]
        lines, owners = [], {}  # owners: {weight: names of its optimizers}
        for name, optimizer in self.optimizers.items():
            if guarded and optimizer not in guarded:
                lines.append(f"guard      none for {name}: non-finite gradients reach its weights; use "
                             f"UpdateGuard(accelerator, optimizer, {name})")
            for weight in weights_of(optimizer):
                owners.setdefault(weight, []).append(name)
        for names in sorted({" and ".join(names) for names in owners.values() if len(names) > 1}):
            lines.append(f"optimizers {names} share weights; remove them from one optimizer's groups")
        return lines

    def lost(self) -> str:
        """A message about what a resume would lose: gradients that update leaves, or what it changes that is
        neither kept nor reported before; "" for nothing."""
        digests, weights = self._reached()
        if message := self._left_behind(weights):
            return message
        names = [name for name in _differing(self.before, digests) if name not in self.reported]
        self.reported.update(names)
        if not names:
            return ""
        if names[0].startswith("data.collate"):
            return (f"{_listed(names)} changes, but batches are made ahead of the step: a resume would make "
                    "others. Compute it from a batch's position and epoch, as in data/masking.py.")
        first = names[0].split(".")[0]
        return (f"keep: {self.update.__name__} changes {_listed(names)}, which is not in keep: a resume "
                f"would lose it. Add it, keep=dict(..., {first}={first}), as a torch.Generator or an object "
                "with state_dict and load_state_dict; or, if it may be lost, let its name begin with _.")

    def _left_behind(self, reached: dict) -> str:
        """A message about gradients that update leaves, which no checkpoint holds; "" if there are none."""
        names = self._weights() | reached
        left = [w for w in names if w.is_leaf and w.grad is not None and w.grad.any()]
        if not left:
            return ""
        shown = _listed([names[weight].removeprefix("model.") for weight in left])
        return (f"{self.update.__name__} leaves gradients of {shown}, which a resume loses: end it with "
                "zero_grad() of every optimizer; each of these weights must be in one, or need no gradient.")

    def unsaved(self) -> str:
        """A message about weights of an optimizer that no checkpoint holds; "" if there are none."""
        things = [thing for name, thing in self.keep.items() if name not in self.optimizers]
        states = [training_state.collect_state(thing, self.model)[1] for thing in things]
        saved = {training_state.local(tensor).data_ptr() for state in states for tensor in state.values()}
        training_state.reshard(self.model)  # to the parameters that optimizers have
        ours = {*self.model.parameters()}
        for name, optimizer in self.optimizers.items():
            others = (weight for weight in weights_of(optimizer) if weight not in ours)
            if lost := [weight for weight in others if training_state.local(weight).data_ptr() not in saved]:
                return (f"keep: {name} trains {len(lost)} weights that no checkpoint holds, the first of "
                        f"shape {list(lost[0].shape)}: put a module that has them into keep.")
        return ""

    def check(self) -> None:
        """ValueError for what is unsaved or lost."""
        if message := self.unsaved() or self.lost():
            raise ValueError(message)

    def check_step(self, accelerator) -> None:
        """After each update: ValueError if the model is not in train mode, or if a setting or, on several
        processes, requires_grad of a weight has changed. After the first one also `check`."""
        if not self.checked:
            self.check()
        self.checked = True
        if not self.model.training:
            raise ValueError("update: the model is in eval mode, without dropout. End an evaluation of your "
                             "own with model.train(), or use eval_mode of utils/learning/evaluation.py.")
        if changed := [name for name, value in self.settings.items() if getattr(self.args, name) != value]:
            raise ValueError(f"{changed[0]}: changed in the loop, but read before it. What changes with the "
                             "step must be a function of it, as in docs/edits/growing-batch.diff.")
        weights = self.model.named_parameters()
        names = [clean_name(name) for name, w in weights if w.requires_grad != self.requires_grad[w]]
        if names and accelerator.num_processes > 1:
            raise ValueError(f"requires_grad of {_listed(names)} changed in the loop, too late for several "
                             "processes: set grad to None instead, as in docs/edits/frozen-embeddings.diff.")

    def check_weights(self, accelerator) -> list[str]:
        """Names of weights that are not finite on some process. ValueError if weights of the model or an
        optimizer that are not sharded differ between processes. All processes call it."""
        names, sums = self._weights(), {}
        if accelerator.num_processes > 1:
            trained = {*self.model.parameters()}.union(*map(weights_of, self.optimizers.values()))
            sums = {names[w]: checksum(w) for w in names if w in trained and not isinstance(w, DTensor)}
        bad = [name for w, name in names.items() if not training_state.local(w.detach()).isfinite().all()]
        everywhere, apart = training_state.gather_json(accelerator, [checksum_json(sums), bad]), []
        if any(theirs != everywhere[0][0] for theirs, _ in everywhere):
            all_sums = training_state.gather_json(accelerator, sums)
            apart = [name for name in sums if any(theirs[name] != sums[name] for theirs in all_sums)]
        if apart and apart[0].startswith("model."):
            raise ValueError("the processes have different weights. Either gradients were not all-reduced: "
                             "the forward pass is not through `model`, backward runs twice, or a step comes "
                             "before the last micro-batch. Or random numbers changed weights: draw them from "
                             "run.generator, which is the same on all processes.")
        if apart:
            raise ValueError(f"keep: weights of {apart[0].split('.')[0]} outside the model differ between "
                             "processes, as their gradients are not all-reduced. Before its step, for each: "
                             'weight.grad.copy_(accelerator.reduce(weight.grad, "mean")).')
        return list(dict.fromkeys(name for _, bad_there in everywhere for name in bad_there))

    def check_saved(self, checkpoints, step: int) -> None:
        """RuntimeError, which names the last good checkpoint, if weights are not finite at a save."""
        if names := self.check_weights(checkpoints.accelerator):
            checkpoints.wait()
            raise RuntimeError(f"weights are not finite at step {step} ({names[0]}): they are not saved. The "
                               f"last good checkpoint is {checkpoints.last_good or 'missing'}.")

    def kept(self) -> dict:
        """{name: digest} of what is kept, and of its attributes that load_state_dict may not restore."""
        training_state.reshard(self.model)
        digests = {}
        for name, thing in {"model": self.model, **self.keep}.items():
            digests[name] = training_state.digest(*training_state.collect_state(thing, self.model))
            digests |= reach(attributes(name, thing), set(), self.model)[0]
        return digests

    def check_restored(self, before: dict) -> None:
        """ValueError or RuntimeError if what was restored differs from what `kept` gave before."""
        names = _differing(self.kept(), before)  # attributes that are new since then do not matter
        if left_out := [name for name in names if name not in self.keep and name != "model"]:
            raise ValueError(f"keep: {self.update.__name__} changes {_listed(left_out)}, and load_state_dict "
                             "does not restore it: add it to state_dict (a module: as a persistent buffer), "
                             "or set it back if it is only for the moment.")
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

    def optimizer_checksums(self) -> dict:
        """{optimizer: checksums of its weights}"""
        return {name: [checksum(w) for w in weights_of(o)] for name, o in self.optimizers.items()}

    def _reached(self) -> tuple[dict, dict]:
        """({name: digests}, {weight: name}) of what update and collate can reach."""
        digests, weights = reach(self.functions, self.known, self.model)
        batches, _ = reach([("data.collate", self.collate)], self.known, self.model, prefix="data.collate.")
        return digests | batches, weights


def weights_of(optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _differing(before: dict, now: dict) -> list[str]:
    return [name for name in now if before.get(name) != now[name]]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
