"""What a user keeps beside the model comes back bit for bit; what update changes and nobody keeps is told."""

import importlib
import itertools
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from data.masking import MaskTokens
from tests import forked
from tests.test_masking import SPECIAL, make_batch, make_tokenizer
from utils.learning.muon import MuonAdamW
from utils.rehearsal import rehearsal
from utils.state.checkpoint import Checkpoints
from utils.state.edit_check import EditCheck
from utils.state.folders import thing_bytes
from utils.state.training_state import collect_state, digest

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


class Mine:
    """State of every shape that a user may think of."""

    def __init__(self, value=0.0):
        self.state = {
            "tensor": torch.full((3, 2), value), "half": torch.full((2,), value).bfloat16(),
            "counts": {3: value, "a": [1, (2, None)]}, "array": np.full(4, value), "nan": float("nan"),
            "empty": torch.zeros(0), "flag": torch.tensor(value > 0), "text": "x",
            "number": np.float64(value),
        }  # fmt: skip

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def build(accelerator, seed=0):
    """A model, two optimizers of different kinds, a schedule, an average, state of one's own."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.1)
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, 50)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    model, adamw, muon = accelerator.prepare(model, adamw, muon)
    return model, dict(adamw=adamw, muon=muon, schedule=schedule, average=average, mine=Mine(float(seed)))


def train(model, keep, steps):
    for i in range(steps):
        model(torch.arange(12.0).view(2, 6) / 10 + i).square().sum().backward()
        for name in ("adamw", "muon"):
            keep[name].step()
            keep[name].zero_grad()
        keep["schedule"].step()
        keep["average"].update_parameters(model)
        keep["mine"].state["tensor"] += 1
        keep["mine"].state["counts"][3] += 1


def digests(model, keep):
    return {name: digest(*collect_state(thing, model)) for name, thing in {"model": model, **keep}.items()}


def test_everything_comes_back_bit_for_bit_and_goes_on_as_if_nothing_had_happened(accelerator, tmp_path):
    model, keep = build(accelerator)
    train(model, keep, 3)
    Checkpoints(accelerator, tmp_path).save(3, model, keep, {}, final=True)
    saved = digests(model, keep)
    train(model, keep, 2)
    unbroken = digests(model, keep)

    model, keep = build(accelerator, seed=1)
    train(model, keep, 1)
    assert set(digests(model, keep).values()).isdisjoint(saved.values())
    Checkpoints(accelerator, tmp_path).load("auto", model, keep)
    assert digests(model, keep) == saved
    found = keep["mine"].state
    assert found["counts"] == {3: 3.0, "a": [1, (2, None)]} and found["array"].dtype == np.float64
    assert found["half"].dtype == torch.bfloat16 and found["empty"].shape == (0,)
    train(model, keep, 2)
    assert digests(model, keep) == unbroken

    folder = tmp_path / "checkpoints/step-00000003"
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    assert "module.0.weight" in load_file(folder / "average.safetensors")
    sizes = [t.nbytes for file in folder.glob("*.safetensors") for t in load_file(file).values()]
    assert sum(sizes) == sum(thing_bytes(thing, model) for thing in (model, *keep.values()))


def test_what_cannot_be_kept_is_named_at_the_first_save(accelerator, tmp_path):
    model, keep = build(accelerator)
    keep["mine"].state["queue"] = deque([1])
    with pytest.raises(ValueError, match="a deque at 'queue'"):
        Checkpoints(accelerator, tmp_path).save(0, model, keep, {})


def test_the_name_of_the_model_is_taken(accelerator, tmp_path):
    model, keep = build(accelerator)
    with pytest.raises(ValueError, match="give yours another name"):
        Checkpoints(accelerator, tmp_path).save(0, model, {"model": keep["average"]}, {})


def test_a_thing_that_is_new_begins_anew_and_one_that_is_gone_is_named(accelerator, tmp_path, caplog):
    model, keep = build(accelerator)
    old = {name: thing for name, thing in keep.items() if name != "mine"}
    Checkpoints(accelerator, tmp_path).save(1, model, old, {}, final=True)
    del keep["average"]
    Checkpoints(accelerator, tmp_path).load("auto", model, keep)
    assert "mine: not in" in caplog.text and "average: in" in caplog.text


def test_the_rehearsal_puts_everything_back(accelerator, tmp_path, monkeypatch):
    model, keep = build(accelerator)
    before, checkpoints = digests(model, keep), Checkpoints(accelerator, tmp_path)

    def update():
        train(model, keep, 1)

    reserved, reserve = [], Checkpoints.reserve

    def noted(self, *given):
        reserved.append(self)
        reserve(self, *given)

    monkeypatch.setattr(Checkpoints, "reserve", noted)
    with rehearsal(checkpoints, EditCheck(update, model, keep)) as folder:
        update()
        assert folder.is_dir() and digests(model, keep) != before
    assert reserved == [checkpoints]  # no second copy of the weights
    assert digests(model, keep) == before and not folder.exists()


def test_the_rehearsal_notices_what_does_not_come_back(accelerator, tmp_path):
    model, keep = build(accelerator)

    class Forgets(Mine):
        def load_state_dict(self, state):
            pass

    keep["mine"] = Forgets()
    watch = EditCheck(lambda: None, model, keep)
    with pytest.raises(RuntimeError, match="differs from what was saved: mine"):
        with rehearsal(Checkpoints(accelerator, tmp_path), watch):
            train(model, keep, 1)


def test_what_nobody_keeps_is_told_once(accelerator):
    """Each save asks; and what changes later for the first time is still told."""
    model, keep = build(accelerator)
    early, late = [0], [0]

    def update():
        return early, late

    watch = EditCheck(update, model, keep)
    early[0] += 1
    assert "changes early, which is not in keep" in watch.lost()
    early[0] += 1
    assert watch.lost() == ""
    late[0] += 1
    assert "changes late, which is not in keep" in watch.lost() and watch.lost() == ""


calls = SimpleNamespace(count=0)


class Counter:
    made = 0

    def __init__(self):
        self.seen = [0, torch.zeros(2)]


@pytest.mark.parametrize(
    "what",
    ["average", "muon", "tensor", "swap", "closure", "namespace", "counter", "helper", "queue", "array",
     "dict", "generator", "numbers", "attribute", "default", "keyword", "random", "iterator", "class", "file",
     "loss", "ours"],
)
def test_what_update_changes_and_nobody_keeps_is_named(accelerator, what, tmp_path, monkeypatch):
    """Also in a file of the user's, in a class among the project's, behind a loss that the model holds."""
    model, keep = build(accelerator)
    (tmp_path / "augment.py").write_text("import random\nseed = random.Random(0)\ndef noise(): seed.random()")
    monkeypatch.syspath_prepend(tmp_path)
    noise = importlib.import_module("augment").noise
    random, losses = np.random.RandomState(0), [0]
    iterator = iter([1, 2]) if what == "iterator" else None
    ours = type("Ours", (), {"__module__": "utils.mine"})()
    ours.mean = torch.zeros(2)

    def token_loss():
        losses[0] += 1

    model.token_loss = token_loss
    forgotten = {name: keep.pop(name) for name in ("average", "muon")}
    average, muon, tensor, number, counter = *forgotten.values(), torch.zeros(2), 0, Counter()
    queue, array, found, generator = deque([1]), np.zeros(2), {}, torch.Generator()
    numbers, swap = itertools.count(), torch.arange(2.0)
    constant, table = torch.ones(3), {"a": torch.ones(2)}  # never changed: nobody has to keep them

    def helper():
        tensor.add_(1)

    def update(default=[0], *, keyword=[0]):  # noqa: B006
        nonlocal number
        assert constant.sum() == 3 and table["a"].sum() == 2
        model(torch.ones(2, 6)).square().sum().backward()
        keep["adamw"].step()
        if what == "average":
            average.update_parameters(model)
        elif what == "muon":
            muon.step()
        elif what == "tensor":
            tensor.add_(1)
        elif what == "swap":
            swap.copy_(swap.flip(0))
        elif what == "closure":
            number += 1
        elif what == "namespace":
            calls.count += 1
        elif what == "counter":
            counter.seen[1] += 1
        elif what == "helper":
            helper()
        elif what == "queue":
            queue.append(2)
        elif what == "array":
            array[0] += 1
        elif what == "dict":
            found["new"] = 1
        elif what == "generator":
            torch.rand(1, generator=generator)
        elif what == "numbers":
            next(numbers)
        elif what == "attribute":
            update.calls += 1
        elif what == "default":
            default[0] += 1
        elif what == "keyword":
            keyword[0] += 1
        elif what == "random":
            random.rand()
        elif what == "iterator":
            next(iterator)
        elif what == "class":
            Counter.made += 1
        elif what == "file":
            noise()
        elif what == "loss":
            model.token_loss()
        elif what == "ours":
            ours.mean += 1
        model.zero_grad()

    update.calls = 0

    everything = {**keep, **forgotten}
    known = {"tensor": "tensor", "closure": "number", "namespace": "calls.count", "helper": "tensor",
             "counter": "counter.seen", "dict": "found", "attribute": "update.calls", "class": "Counter.made",
             "file": "seed", "loss": "losses", "ours": "ours.mean"}  # fmt: skip
    watch = EditCheck(update, model, keep)
    update()
    with pytest.raises(ValueError, match=f"update changes {known.get(what, what)},"):
        watch.check()
    if what in forgotten:
        watch = EditCheck(update, model, everything)
        update()
        watch.check()


def test_batches_that_depend_on_those_before_are_named(accelerator):
    """They are made ahead, so that no resume could tell where what makes them was."""
    model, keep = build(accelerator)
    numbers = np.random.default_rng(0)

    def collate(batch):
        return batch + numbers.random()

    watch = EditCheck(lambda: None, model, keep, collate=collate)
    assert watch.lost() == ""
    collate(1)
    assert "data.collate.numbers changes, but batches are made ahead of the step" in watch.lost()
    masks = MaskTokens(make_tokenizer(**SPECIAL), 0.3, seed=0)
    watch = EditCheck(lambda: None, model, keep, collate=masks)
    masks(make_batch([0, 1]))
    assert watch.lost() == ""
    masks.mlm_probability = 0.2
    assert "data.collate.mlm_probability changes" in watch.lost()


@pytest.mark.parametrize("kind", ["AdamW", "fused AdamW", "MuonAdamW", "Muon", "Adafactor", "SGD"])
def test_only_an_optimizer_that_moves_nothing_is_named(accelerator, kind):
    """Fused AdamW does not raise the version of a tensor that it changes."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.Linear(8, 4, bias=False))
    makers = {"fused AdamW": lambda weights: torch.optim.AdamW(weights, fused=True),
              "MuonAdamW": lambda weights: MuonAdamW([{"params": weights, "momentum": 0.95}])}  # fmt: skip
    maker = makers.get(kind) or getattr(torch.optim, kind)
    moves, idle = maker([model[0].weight]), torch.optim.SGD([model[1].weight])

    def update():
        model(torch.ones(2, 6)).square().sum().backward()
        moves.step()
        model.zero_grad()

    watch = EditCheck(update, model, {"moves": moves, "idle": idle})
    before = watch.optimizer_checksums()
    update()
    assert [name for name, sums in watch.optimizer_checksums().items() if sums == before[name]] == ["idle"]


APART = """
import os, sys, torch
from accelerate import Accelerator
from utils.state.edit_check import EditCheck
accelerator = Accelerator(cpu=True)
rank, exchanged = accelerator.process_index, sys.argv[1] == "exchanged"
model, scale = accelerator.prepare(torch.nn.Linear(2, 2)), torch.nn.Parameter(torch.ones(()))
own = torch.optim.SGD([scale], 0.1)

def update():
    (scale * model(torch.full((1, 2), 1.0 + rank))).sum().backward()
    if exchanged:
        scale.grad.copy_(accelerator.reduce(scale.grad, "mean"))
    own.step()

watch = EditCheck(update, model, {"own": own})
update()
try:
    watch.check_weights(accelerator)
    sys.stdout.write("together\\n")  # at once: print may write the end of the line apart
except ValueError as error:
    print(error)
accelerator.end_training()
os._exit(0)
"""


def test_weights_outside_the_model_that_move_apart_are_named(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(APART.replace("os._exit(0)", "sys.stdout.flush(); os._exit(0)"))
    told = [forked.run(str(script), [how], processes=2).stdout for how in ("exchanged", "apart")]
    assert told[0].split() == ["together", "together"]
    assert told[1].count("weights of own outside the model differ between processes") == 2


@pytest.mark.parametrize("what", ["head", "scale"])
def test_weights_of_no_optimizer_are_named_wherever_they_are(accelerator, what):
    """They would never learn, and what they gather is lost in a resume."""
    model, keep = build(accelerator)
    head, scale = torch.nn.Linear(4, 2), torch.nn.Parameter(torch.ones(()))

    def update():
        found = model(torch.ones(2, 6))
        (head(found) if what == "head" else scale * found).square().sum().backward()
        model.zero_grad()

    watch = EditCheck(update, model, keep)
    update()
    with pytest.raises(ValueError, match=f"leaves gradients of {what}.*in one, or need no gradient"):
        watch.check()


class Lion(torch.optim.Optimizer):
    """A user's own, with state of all kinds."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})
        self.count = 0

    def step(self):
        self.count += 1
        self.state["all"] = self.state.get("all", 0) + 1  # of no parameter
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.1)
                p.data.sub_(group["lr"] * momentum.sign())


class Bank(torch.nn.Module):
    calls = 0

    def __init__(self, persistent):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)
        self.register_buffer("queue", torch.zeros(4), persistent=persistent)

    def forward(self, x):
        self.queue = self.queue + 1
        return self.layer(x)


@pytest.mark.parametrize("case, named", [
    ("complete", ""), ("buffer", "model.queue"), ("counter", "optimizer.count"), ("attribute", "mine.epoch"),
    ("class", "model.calls"),
])  # fmt: skip
def test_what_is_kept_and_not_put_back_is_named(accelerator, tmp_path, case, named):
    """A counter beside the state of an optimizer, a buffer that is not saved, an attribute left out, or one
    that the class begins with."""
    model, mine = Bank(persistent=case != "buffer"), Mine()
    optimizer, mine.epoch = Lion(model.parameters()), 0
    keep = {"optimizer": optimizer, "mine": mine}

    def update():
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if case != "counter":
            optimizer.count = 0
        mine.epoch += case == "attribute"
        if case == "class":
            model.calls += 1

    def rehearse():
        watch = EditCheck(update, model, keep)
        with rehearsal(Checkpoints(accelerator, tmp_path), watch):
            update()

    if named:
        told = f"update changes {named}, and load_state_dict does not restore.* for the moment"
        with pytest.raises(ValueError, match=told):
            rehearse()
        return
    rehearse()
    assert not optimizer.state and model.queue.sum() == 0
    update()
    Checkpoints(accelerator, tmp_path / "run").save(1, model, keep, {}, final=True)
    other = Bank(True)
    again = Lion(other.parameters())
    Checkpoints(accelerator, tmp_path / "run").load("auto", other, {"optimizer": again, "mine": Mine()})
    assert again.state["all"] == 1 and other.queue.sum() == 4


def test_another_class_under_the_same_name_is_refused(accelerator, tmp_path):
    """An optimizer goes on with no other one's moments, a schedule with no other one's numbers."""
    model = torch.nn.Linear(6, 4)
    adamw = torch.optim.AdamW(model.parameters())
    Checkpoints(accelerator, tmp_path).save(1, model, {"o": adamw}, {}, final=True)
    with pytest.raises(ValueError, match="o is a AdamW in .*, and a Lion now; keep it under another name"):
        Checkpoints(accelerator, tmp_path).load("auto", model, {"o": Lion(model.parameters())})
    with pytest.raises(ValueError, match="keep: a list has no state_dict"):
        Checkpoints(accelerator, tmp_path).save(2, model, {"mine": [1]}, {})


def test_an_optimizer_with_other_groups_is_refused_by_its_name_and_their_sizes(accelerator, tmp_path):
    model = torch.nn.Linear(6, 4)
    one = torch.optim.AdamW(model.parameters())
    two = torch.optim.AdamW([{"params": [parameter]} for parameter in model.parameters()])
    Checkpoints(accelerator, tmp_path).save(1, model, {"o": one}, {}, final=True)
    with pytest.raises(ValueError, match="o has other groups of parameters: 2 in .*, 1 [+] 1 now; keep it"):
        Checkpoints(accelerator, tmp_path).load("auto", model, {"o": two})


def test_what_stays_as_it_is_is_not_named(accelerator):
    model, keep = build(accelerator)
    teacher, table = torch.nn.Linear(6, 4), torch.ones(4)

    def update():
        loss = (model(torch.ones(2, 6)) - teacher(torch.ones(2, 6)).detach() * table).square().sum()
        loss.backward()
        keep["adamw"].step()
        model.zero_grad()

    watch = EditCheck(update, model, keep)
    update()
    watch.check()


TWO = """
import os, sys, torch
from accelerate import Accelerator
from utils.state.checkpoint import Checkpoints
accelerator = Accelerator(cpu=True)
rank, folder, part = accelerator.process_index, sys.argv[1], sys.argv[2]

class Own:
    def __init__(self):
        self.tensor, self.number = torch.full((3, rank + 1), float(rank)), rank * 10
    def state_dict(self):
        return {"tensor": self.tensor, "number": self.number}
    def load_state_dict(self, state):
        self.tensor, self.number = state["tensor"], state["number"]

model, own = accelerator.prepare(torch.nn.Linear(2, 2)), Own()
if part == "save":
    Checkpoints(accelerator, folder).save(1, model, {"own": own}, {}, final=True)
else:
    own.tensor, own.number = None, None
    Own.state_dict = lambda self: {}
    Checkpoints(accelerator, folder).load("auto", model, {"own": own})
    assert own.number == rank * 10 and own.tensor.equal(torch.full((3, rank + 1), float(rank))), vars(own)
accelerator.end_training()
os._exit(0)  # taking DDP apart may hang or abort, see utils/entry.py
"""


def test_state_that_differs_between_processes_is_kept_for_each(accelerator, tmp_path):
    """Tensors of other shapes on each process, too; a run of one process takes the first one's."""
    script = tmp_path / "job.py"
    script.write_text(TWO)
    for part in ("save", "load"):
        result = forked.run(str(script), [tmp_path / "run", part], processes=2)
        assert result.returncode == 0, result.stderr[-3000:]
    own = type("Own", (Mine,), {})()
    Checkpoints(accelerator, tmp_path / "run").load("auto", torch.nn.Linear(2, 2), {"own": own})
    assert own.state["number"] == 0 and own.state["tensor"].shape == (3, 1)


def test_a_complete_save_that_was_not_renamed_yet_is_not_lost(accelerator, tmp_path):
    """A kill just before the renaming, also where the same step is saved again."""
    model, keep = build(accelerator)
    checkpoints = Checkpoints(accelerator, tmp_path, save_total_limit=1)
    checkpoints.save(5, model, keep, {"n": 1}, final=True)
    folder = checkpoints.folder
    (folder / "step-00000005").rename(folder / ".tmp-step-00000005")
    (folder / ".tmp-step-00000007").mkdir()  # not complete
    assert Checkpoints(accelerator, tmp_path).load("auto", model, keep) == {"n": 1}
    assert [path.name for path in folder.iterdir()] == ["step-00000005"]


def test_a_generator_is_kept_as_it_is(accelerator, tmp_path):
    """What the start asks for must be accepted: a resumed run draws the numbers that would have come."""
    model, generator = torch.nn.Linear(2, 2), torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    Checkpoints(accelerator, tmp_path).save(1, model, {"noise": generator}, {}, final=True)
    expected = torch.rand(5, generator=generator)
    again = torch.Generator()
    Checkpoints(accelerator, tmp_path).load("auto", model, {"noise": again})
    assert torch.equal(torch.rand(5, generator=again), expected)


def test_weights_that_are_not_finite_are_named(accelerator):
    model, keep = build(accelerator)
    watch = EditCheck(lambda: None, model, keep)
    assert watch.check_weights(accelerator) == []
    next(model.parameters()).data[1, 2] = float("inf")
    assert watch.check_weights(accelerator) == ["model.0.weight"]
