"""Checkpoints: what is saved comes back exactly, and no damage, full disk or kill loses the ones before."""

import json
import os
import resource
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from tests import forked
from utils.io.files import verify_checksums
from utils.state import checkpoint
from utils.state.checkpoint import Checkpoints
from utils.state.folders import disk_space, list_checkpoints

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def build(accelerator, seed=0, width=16):
    """A model with tied weights and dropout, and AdamW with two groups."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Embedding(50, width), torch.nn.Linear(width, width), torch.nn.Dropout(0.5),
        torch.nn.LayerNorm(width), torch.nn.Linear(width, 50, bias=False),
    )  # fmt: skip
    model[4].weight = model[0].weight
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
    return accelerator.prepare(model, torch.optim.AdamW(groups, lr=1e-2))


def train(accelerator, model, optimizer, steps):
    """Losses of some steps; the random numbers go on from where they are."""
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 50, (8,))
        loss = torch.nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_restored_run_continues_exactly(accelerator, tmp_path):
    """Losses, weights, learning rate, the script's extra; tied weights are tied."""
    model, optimizer = build(accelerator)
    train(accelerator, model, optimizer, 3)
    optimizer.param_groups[0]["lr"] = 0.005
    extra = {"step": 3, "rate": 0.1 + 0.2, "name": None}
    checkpoints = Checkpoints(accelerator, tmp_path)
    checkpoints.save(3, model, {"optimizer": optimizer}, extra)
    torch.manual_seed(3)
    losses = train(accelerator, model, optimizer, 5)
    checkpoints.wait()

    again, again_optimizer = build(accelerator, seed=1)
    loaded = Checkpoints(accelerator, tmp_path).load("auto", again, {"optimizer": again_optimizer})
    assert loaded["rate"] == extra["rate"] and loaded["name"] is None
    assert again[4].weight is again[0].weight
    assert again_optimizer.param_groups[0]["lr"] == 0.005
    torch.manual_seed(3)
    assert train(accelerator, again, again_optimizer, 5) == losses
    for name, tensor in weights(model).items():
        assert tensor.equal(again.state_dict()[name]), name


def test_names_are_those_of_the_bare_model(accelerator, tmp_path):
    """A compiled model's checkpoint is one for the model itself; safetensors reads the file."""
    model, optimizer = build(accelerator)
    Checkpoints(accelerator, tmp_path).save(1, torch.compile(model), {"optimizer": optimizer}, {}, final=True)
    saved = load_file(tmp_path / "checkpoints/step-00000001/model.safetensors")
    bare = {name: tensor for name, tensor in model.state_dict().items() if name != "4.weight"}  # tied
    assert saved.keys() == bare.keys()
    assert all(saved[name].equal(bare[name]) for name in bare)


def wrapped(accelerator, seed):
    """A loss module around a model, with tensors of its own, one of which has a name of the model's."""
    torch.manual_seed(seed)
    module = torch.nn.Module()
    module.lm, module.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
    module.register_buffer("bias", torch.randn(2))
    return accelerator.prepare(module)


@pytest.mark.parametrize("written", ["now", "before"])
def test_weights_are_stored_by_the_names_of_transformers(written, accelerator, tmp_path, monkeypatch):
    """And come back, from checkpoints with the names of before, too."""
    if written == "before":
        monkeypatch.setattr(checkpoint, "transformers_names", lambda named: named)
    model, again = wrapped(accelerator, 0), wrapped(accelerator, 1)
    Checkpoints(accelerator, tmp_path).save(1, model, {}, {}, final=True)
    saved = load_file(tmp_path / "checkpoints/step-00000001/model.safetensors").keys()
    weight = "weight" if written == "now" else "lm.weight"
    assert saved == {weight, "lm.bias", "bias", "head.weight", "head.bias"}
    Checkpoints(accelerator, tmp_path).load("auto", again, {})
    assert all(value.equal(again.state_dict()[name]) for name, value in model.state_dict().items())


def test_the_memory_reserved_is_what_the_saves_copy_into(accelerator, tmp_path):
    model, optimizer = build(accelerator)
    train(accelerator, model, optimizer, 1)
    checkpoints = Checkpoints(accelerator, tmp_path)
    checkpoints.reserve(model, {"optimizer": optimizer})
    taken = {place: copy.data_ptr() for place, copy in checkpoints._copies.items()}
    checkpoints.save(1, model, {"optimizer": optimizer}, {})
    assert len(taken) > 10 and taken == {place: c.data_ptr() for place, c in checkpoints._copies.items()}


def test_a_save_in_the_background_is_the_save_in_the_foreground(accelerator, tmp_path):
    """Byte by byte, although training goes on while it is written; also when the copy's memory is reused."""
    model, optimizer = build(accelerator, width=1500)
    background = Checkpoints(accelerator, tmp_path / "background")
    for step in (1, 2):
        train(accelerator, model, optimizer, 1)
        keep = {"optimizer": optimizer}
        Checkpoints(accelerator, tmp_path / "foreground").save(step, model, keep, {}, final=True)
        background.save(step, model, keep, {})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    background.wait()
    for step in (1, 2):
        name = f"checkpoints/step-{step:08d}"
        here, there = tmp_path / "background" / name, tmp_path / "foreground" / name
        assert {f.name for f in here.iterdir()} == {f.name for f in there.iterdir()}
        assert all(f.read_bytes() == (there / f.name).read_bytes() for f in here.iterdir())


def test_without_memory_for_a_copy_training_waits(accelerator, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "SPARE_MEMORY", 1 << 60)
    model, optimizer = build(accelerator)
    checkpoints = Checkpoints(accelerator, tmp_path)
    for step in (1, 2):
        checkpoints.save(step, model, {"optimizer": optimizer}, {})
        assert checkpoints.last_good.name == f"step-{step:08d}"
    assert len(caplog.records) == 1 and "no memory for a copy" in caplog.text


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_loaded(
    accelerator, tmp_path, caplog, damage, file
):
    model, optimizer = build(accelerator)
    checkpoints = Checkpoints(accelerator, tmp_path)
    checkpoints.save(1, model, {"optimizer": optimizer}, {"step": 1})
    older = weights(model)
    train(accelerator, model, optimizer, 1)
    checkpoints.save(2, model, {"optimizer": optimizer}, {"step": 2})
    checkpoints.wait()
    damage(tmp_path / "checkpoints/step-00000002" / file)

    with pytest.raises(ValueError, match=file):
        newest = str(checkpoints.folder / "step-00000002")
        Checkpoints(accelerator, tmp_path).load(newest, model, {"optimizer": optimizer})
    checkpoints = Checkpoints(accelerator, tmp_path)
    assert checkpoints.load("auto", model, {"optimizer": optimizer})["step"] == 1
    assert file in caplog.text and "step-00000002 is damaged" in caplog.text
    assert all(older[name].equal(tensor) for name, tensor in weights(model).items())
    checkpoints.save(2, model, {"optimizer": optimizer}, {}, final=True)
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_run_never_starts_again_from_the_beginning_by_itself(accelerator, tmp_path):
    """When every checkpoint is damaged, the user decides; with "none" the old ones are kept aside."""
    model, optimizer = build(accelerator)
    checkpoints = Checkpoints(accelerator, tmp_path)
    assert checkpoints.load("auto", model, {"optimizer": optimizer}) is None
    checkpoints.save(1, model, {"optimizer": optimizer}, {}, final=True)
    flip_a_bit(checkpoints.last_good / "model.safetensors")
    with pytest.raises(ValueError, match="auto: no checkpoint is valid"):
        checkpoints.load("auto", model, {"optimizer": optimizer})
    assert checkpoints.load("none", model, {"optimizer": optimizer}) is None
    assert [p.name for p in checkpoints.folder.iterdir()] == ["replaced-step-00000001"]


def test_starting_from_an_older_step_outdates_the_newer_ones(accelerator, tmp_path):
    """Else they would be the newest for "auto", and rotation would delete the new ones."""
    model, optimizer = build(accelerator)
    checkpoints = Checkpoints(accelerator, tmp_path, save_total_limit=0)
    for step in (1, 2, 3):
        checkpoints.save(step, model, {"optimizer": optimizer}, {"step": step}, final=True)
    checkpoints = Checkpoints(accelerator, tmp_path, save_total_limit=2)
    oldest = f"{checkpoints.folder}/step-00000001"
    assert checkpoints.load(oldest, model, {"optimizer": optimizer}) == {"step": 1}
    checkpoints.save(2, model, {"optimizer": optimizer}, {"step": "new 2"}, final=True)
    assert [p.name for p in list_checkpoints(checkpoints.folder)] == ["step-00000001", "step-00000002"]
    checkpoints = Checkpoints(accelerator, tmp_path)
    assert checkpoints.load("auto", model, {"optimizer": optimizer}) == {"step": "new 2"}


def test_a_path_left_in_the_command_goes_on_from_what_descends_from_it(accelerator, tmp_path, caplog):
    """A job started again by the same command neither repeats its steps nor deletes what it replaced."""
    model, optimizer = build(accelerator)
    keep = {"optimizer": optimizer}

    def start(resume_from, saves=()):
        checkpoints = Checkpoints(accelerator, tmp_path, save_total_limit=2)
        extra = checkpoints.load(str(resume_from), model, keep)
        for step, told in saves:
            checkpoints.save(step, model, keep, told, final=True)
        return extra

    start("auto", [(1, "a 1"), (2, "a 2")])
    first = tmp_path / "checkpoints/step-00000001"
    assert start(first, [(2, "b 2")]) == "a 1"
    assert "descends" not in caplog.text
    assert start(os.path.relpath(first), [(3, "b 3")]) == "b 2" and not first.exists()  # rotated away
    assert start(first, [(4, "b 4")]) == "b 3" and "step-00000003 descends from" in caplog.text
    state = tmp_path / "checkpoints/step-00000004/state.json"
    state.write_text(state.read_text().replace("b 4", "b 5"))  # damaged, and still JSON
    assert start(first) == "b 3"
    second = tmp_path / "checkpoints/step-00000002"
    with pytest.raises(ValueError, match="step-00000002: no checkpoint is valid .*No such file"):
        start(second)
    assert start(tmp_path / "checkpoints/step-00000003", [(5, "c 5")]) == "b 3"
    assert start("none", [(2, "d 2")]) is None and start("auto") == "d 2"
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    kept = [f"replaced-step-0000000{step}" for step in (2, 3, 5)]
    assert left == sorted([*kept, "step-00000002"]), left
    assert start("none") is None
    assert (tmp_path / "checkpoints/replaced-step-00000002-2").exists()
    told = json.loads((tmp_path / "checkpoints/replaced-step-00000002/state.json").read_text())
    assert told["extra"] == "a 2"


def test_another_model_and_changed_settings_are_refused_by_name(accelerator, tmp_path):
    model, optimizer = build(accelerator)
    before = Checkpoints(accelerator, tmp_path)
    before.save(1, model, {"optimizer": optimizer}, {"lr": 1}, final=True)
    wider, wider_optimizer = build(accelerator, width=32)
    with pytest.raises(ValueError, match=r"0.weight: float32 \[50, 16\] there, float32 \[50, 32\] here"):
        Checkpoints(accelerator, tmp_path).load("auto", wider, {"optimizer": wider_optimizer})

    def refuse(extra):
        raise ValueError(f"lr was {extra['lr']}")

    untouched = weights(wider)
    with pytest.raises(ValueError, match="lr was 1"):
        Checkpoints(accelerator, tmp_path).load("auto", wider, {"optimizer": wider_optimizer}, check=refuse)
    assert all(untouched[name].equal(tensor) for name, tensor in weights(wider).items())


def test_old_checkpoints_go_when_the_new_one_is_complete_and_not_before(accelerator, tmp_path, caplog):
    model, optimizer = build(accelerator)
    checkpoints = Checkpoints(accelerator, tmp_path, save_total_limit=1)
    checkpoints.save(1, model, {"optimizer": optimizer}, {}, final=True)
    too_small = checkpoints.last_good.joinpath("state.json").stat().st_size // 2
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (too_small, limits[1]))  # every larger file: EFBIG
    try:
        checkpoints.save(2, model, {"optimizer": optimizer}, {})
        checkpoints.wait()
        assert "step-00000002 was not saved" in caplog.text and "step-00000001" in caplog.text
        said = "checkpoints: the state of step 3 was not saved: .*too large.*last good .*step-00000001"
        with pytest.raises(RuntimeError, match=said):
            checkpoints.save(3, model, {"optimizer": optimizer}, {}, final=True)
        with pytest.raises(RuntimeError, match="preflight/checkpoints: the state of step 0 .*too large"):
            Checkpoints(accelerator, tmp_path / ".preflight").save(0, model, {"o": optimizer}, {}, final=True)
        shutil.rmtree(tmp_path / ".preflight")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-00000001"]
    assert verify_checksums(checkpoints.folder / "step-00000001") == ""
    checkpoints.save(4, model, {"optimizer": optimizer}, {}, final=True)
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-00000004"]


def test_a_full_disk_costs_one_checkpoint_and_nothing_older(accelerator, tmp_path, caplog):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", tmp_path]).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        model, optimizer = build(accelerator, width=256)
        train(accelerator, model, optimizer, 1)  # 1 MB of state
        checkpoints = Checkpoints(accelerator, tmp_path)
        with pytest.raises(ValueError, match=r"(.* MB){3} are free: choose another output_dir"):
            disk_space(tmp_path, model, {"optimizer": optimizer}, save_total_limit=10)
        checkpoints.save(1, model, {"optimizer": optimizer}, {"step": 1})
        checkpoints.wait()
        (tmp_path / "ballast").write_bytes(bytes(3 << 19))
        checkpoints.save(2, model, {"optimizer": optimizer}, {"step": 2})
        checkpoints.wait()
        assert "No space left" in caplog.text and "step-00000001" in caplog.text
        assert [p.name for p in checkpoints.folder.iterdir()] == ["step-00000001"]
        (tmp_path / "ballast").unlink()
        checkpoints.save(3, model, {"optimizer": optimizer}, {"step": 3}, final=True)
        assert Checkpoints(accelerator, tmp_path).load("auto", model, {"optimizer": optimizer}) == {"step": 3}
    finally:
        subprocess.run(["umount", tmp_path])


def test_the_checkpoints_that_a_run_replaces_count_as_free_space(tmp_path, monkeypatch):
    """Not those that it has set aside."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**12))
    model = torch.nn.Linear(100_000, 100_000, bias=False, device="meta")  # 40 GB
    for name, free in (("replaced-step-00000001", 1000), ("step-00000001", 1040), ("step-00000002", 1080)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        assert disk_space(tmp_path, model, {}, 2).endswith(f"; {free}.0 GB are free"), name


KILLED = """
import os, random, signal, sys, time
import torch
from accelerate import Accelerator
from utils.io.files import verify_checksums
from utils.state.checkpoint import Checkpoints
from utils.state.folders import list_checkpoints
folder, trials = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)  # forking below
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(512, 512)  # 3 MB with its optimizer state
optimizer = torch.optim.AdamW(model.parameters())
optimizer.state.update({p: {"step": torch.tensor(0.0), "exp_avg": p.clone(), "exp_avg_sq": p.clone()}
                        for p in model.parameters()})
delays, step, inside = random.Random(0), 0, 0
for trial in range(trials):
    if (pid := os.fork()) == 0:
        checkpoints = Checkpoints(accelerator, folder)
        while True:
            step += 1
            for p in model.parameters():
                p.data.fill_(step)
            checkpoints.save(step, model, {"optimizer": optimizer}, {"step": step}, final=trial % 2 == 1)
    time.sleep(delays.uniform(0.02, 0.2))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    inside += any(name.startswith(".tmp-step") for name in os.listdir(folder + "/checkpoints"))
    found = list_checkpoints(folder + "/checkpoints")
    assert all(verify_checksums(path) == "" for path in found), found
    newest = Checkpoints(accelerator, folder).load("auto", model, {"optimizer": optimizer})["step"]
    assert newest >= step, (newest, step)
    assert all((p == newest).all() for p in model.parameters()), newest
    assert not any(name.startswith(".") for name in os.listdir(folder + "/checkpoints"))
    step = newest
print(inside, "inside a save")
"""


def test_no_moment_to_kill_a_save_loses_a_complete_checkpoint(tmp_path):
    """kill -9 at 40 random moments of a process that only saves; what is there is valid and of one step."""
    result = forked.run_code(KILLED, [tmp_path, "40"])
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[0]) >= 10  # kills that really hit a save


KILLED_AT = """
import itertools, os, shutil, signal, sys
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from utils.state.checkpoint import Checkpoints
folder, sharded = sys.argv[1], sys.argv[2] == "sharded"
torch.set_num_threads(1)  # forking below
accelerator = Accelerator(cpu=True)
EVENTS = {"os.rename", "os.rmdir"} | (set() if sharded else {"os.mkdir", "os.remove", "open"})

def build():
    model = torch.nn.Linear(8, 8)
    if sharded:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        fully_shard(model)
    return model

def save(value, checkpoints, model):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    checkpoints.save(5, model, {}, {"value": value}, final=True)

def forked(work):
    if (pid := os.fork()) == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def save_and_die(number):
    model, checkpoints = build(), Checkpoints(accelerator, folder, save_total_limit=1)
    save(1, checkpoints, model)
    seen = itertools.count(1)
    def at(event, arguments):
        if event in EVENTS and next(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(at)
    save(2, checkpoints, model)

def look():
    model, checkpoints = build(), Checkpoints(accelerator, folder, save_total_limit=1)
    value = checkpoints.load("auto", model, {})["value"]
    assert sharded == os.path.isdir(folder + "/checkpoints/step-00000005/model")
    for p in model.parameters():
        p = p.full_tensor() if sharded else p
        assert (p == value).all(), (value, p)
    assert os.listdir(folder + "/checkpoints") == ["step-00000005"]
    print(value, flush=True)

for number in itertools.count(1):
    ended = forked(lambda: save_and_die(number))
    assert ended in (0, -9), ended
    assert forked(look) == 0, number
    shutil.rmtree(folder)
    if ended == 0:
        break
"""


@pytest.mark.parametrize("state", ["whole", "sharded"])
def test_the_same_step_saved_again_is_there_whenever_the_save_is_killed(tmp_path, state):
    """kill -9 at each file operation of the second save (sharded: each renaming and deletion of a folder):
    what comes back is whole, the first state or the new one, and both were met; with save_total_limit 1.
    """
    result = forked.run_code(KILLED_AT, [tmp_path / "run", state])
    assert result.returncode == 0, result.stderr[-3000:]
    found = result.stdout.split()
    assert len(found) > 3 and {*found} == {"1", "2"} and found == sorted(found), found


PLANTED = """
import json, os, pickle, shutil, sys
from pathlib import Path
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from utils.state.checkpoint import Checkpoints
from utils.io.files import checksum_file, checksum_json
folder, marker = Path(sys.argv[1]), Path(sys.argv[2])

class Bomb:
    def __reduce__(self):
        return open, (str(marker), "w")

def plant(place, *names):
    for name in names:
        (place / name).write_bytes(pickle.dumps(Bomb()))
    torch.save(Bomb(), place / "as_torch_saves.pt")

def forge(made):  # a manifest that fits what is there
    manifest = json.loads((made / "manifest.json").read_text())
    files = [path for path in made.rglob("*") if path.is_file() and path.name != "manifest.json"]
    manifest["files"] = {str(path.relative_to(made)): checksum_file(path) for path in files}
    del manifest["checksum"]
    (made / "manifest.json").write_text(json.dumps(manifest | {"checksum": checksum_json(manifest)}))

pickle.loads(pickle.dumps(Bomb()))
assert marker.exists()  # it works
marker.unlink()
accelerator = Accelerator(cpu=True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for sharded in (False, True):
    place = folder / str(sharded)
    model = torch.nn.Linear(8, 8)
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    keep = {"optimizer": optimizer}
    checkpoints = Checkpoints(accelerator, place)
    checkpoints.save(5, model, keep, {"fine": True}, final=True)
    made = place / "checkpoints/step-00000005"
    names = [".metadata", "__0_0.distcp", "pytorch_model.bin", "optimizer.bin", "optimizer.pt",
             "scheduler.bin", "random_states_0.pkl", "rng_state_0.pth", "state.pkl", "model.pt"]
    for here in [made, *(path for path in made.iterdir() if path.is_dir())]:
        plant(here, *names)
    forge(made)
    assert checkpoints.load("auto", model, keep) == {"fine": True}
    for path in [*made.rglob("*.safetensors")]:  # and nothing but pickles
        path.write_bytes(pickle.dumps(Bomb()))
    forge(made)
    try:
        checkpoints.load("auto", model, keep)
    except BaseException as error:  # as torch's is
        print("refused:", type(error).__name__)
    for path in [*made.rglob("*.safetensors")]:
        path.unlink()
    forge(made)
    try:
        checkpoints.load("auto", model, keep)
    except BaseException as error:  # as torch's is
        print("refused:", type(error).__name__)
    assert not marker.exists()
"""


def test_no_file_planted_in_a_checkpoint_is_unpickled(tmp_path):
    """Beside the state, and in its place: whole and sharded, under the names that other loaders look for."""
    result = forked.run_code(PLANTED, [tmp_path, tmp_path / "marker"])
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("refused:") == 4 and not (tmp_path / "marker").exists(), result.stdout


SEVERAL = """
import json, os, resource, sys
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from utils.state import checkpoint
from utils.state.checkpoint import Checkpoints
folder, hard = sys.argv[1], resource.getrlimit(resource.RLIMIT_FSIZE)[1]
accelerator = Accelerator(cpu=True)

def build(seed, sharded):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    if sharded:
        return fully_shard(model), torch.optim.AdamW(model.parameters(), lr=0.1)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

class Average:  # of the weights, cut up as they are
    def __init__(self, model):
        self.model = model
        self.tensors = {name: p.detach().clone() for name, p in model.named_parameters()}

    def add(self):
        for name, p in self.model.named_parameters():
            self.tensors[name].lerp_(p.detach(), 0.5)

    def state_dict(self):
        return {"tensors": {name.removeprefix("module."): t for name, t in self.tensors.items()}}

    def load_state_dict(self, state):
        for name, t in self.tensors.items():
            t.copy_(state["tensors"][name.removeprefix("module.")])

def train(model, optimizer, steps, average=None):
    for i in range(steps):
        x = torch.arange(12.0).view(2, 6) / 10 + i
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if average:
            average.add()

def outcome(model, average):  # sums over weights and average after one more step
    tensors = [*model.parameters(), *average.tensors.values()]
    whole = [getattr(t, "full_tensor", lambda t=t: t)() for t in tensors]
    return [p.double().sum().item() for p in whole]

outcomes = {}
for saved_as in ("ddp", "fsdp"):
    place = os.path.join(folder, saved_as)
    model, optimizer = build(7, saved_as == "fsdp")
    average = Average(model)
    keep = {"optimizer": optimizer, "average": average}
    checkpoints = Checkpoints(accelerator, place)
    checkpoints.save(0, model, keep, {"step": 0})  # leaves no trace in a fresh state
    assert checkpoints.load("auto", model, keep) == {"step": 0} and not optimizer.state
    train(model, optimizer, 2, average)
    checkpoints.save(2, model, keep, {"step": 2})
    train(model, optimizer, 1, average)  # while it is written
    outcomes[saved_as, "unbroken"] = outcome(model, average)
    checkpoints.wait()
    accelerator.wait_for_everyone()
    for loaded_as in ("ddp", "fsdp"):
        model, optimizer = build(8, loaded_as == "fsdp")
        average = Average(model)
        keep = {"optimizer": optimizer, "average": average}
        checkpoints = Checkpoints(accelerator, place)
        assert checkpoints.load("auto", model, keep) == {"step": 2}
        train(model, optimizer, 1, average)
        outcomes[saved_as, loaded_as] = outcome(model, average)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # every larger file: EFBIG, on all processes
    try:
        checkpoints.save(3, model, keep, {}, final=True)
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "the state of step 3 was not saved" in str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    # Only the main process sees these failures; nobody may wait for it
    checkpoints.folder = checkpoints.folder / "step-00000002" / "state.json"  # a file: no folder can be made
    checkpoints.save(3, model, keep, {})
    try:
        checkpoints.save(3, model, keep, {}, final=True)
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "the state of step 3 was not saved" in str(error)
    assert Checkpoints(accelerator, place).load("auto", model, keep) == {"step": 2}
checkpoint.SPARE_MEMORY = 1 << 60  # no room for copies of the shards, on either process
checkpoints = Checkpoints(accelerator, os.path.join(folder, "shards"))
checkpoints.save(4, model, keep, {})
assert not checkpoints.background
with open(f"{folder}/{accelerator.process_index}.json", "w") as file:
    json.dump([[*key, value] for key, value in outcomes.items()], file)
accelerator.end_training()
"""


def test_a_state_of_two_processes_loads_with_two_and_with_one(accelerator, tmp_path):
    """Replicated and sharded, saved beside training, into either."""
    result = forked.run_code(SEVERAL, [tmp_path], processes=2)
    assert result.returncode == 0, result.stderr[-3000:]

    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    unbroken = outcomes[0][0][2]
    for saved_as, loaded_as, sums in outcomes[0] + outcomes[1]:
        assert sums == pytest.approx(unbroken, rel=1e-6), (saved_as, loaded_as)

    for saved_as in ("ddp", "fsdp"):  # neither sharded nor several, here
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.5))
        checkpoints = Checkpoints(accelerator, tmp_path / saved_as)
        assert checkpoints.load("auto", model, {"optimizer": optimizer}) == {"step": 2}
        model(torch.arange(12.0).view(2, 6) / 10).square().sum().backward()
        optimizer.step()
        assert [p.double().sum().item() for p in model.parameters()] == pytest.approx(unbroken[:4], rel=1e-6)


DIFFERING = """
import sys
import torch
from types import SimpleNamespace
from accelerate import Accelerator
from utils.state.checkpoint import Checkpoints, restore_average
accelerator = Accelerator(cpu=True)
i, model = accelerator.process_index, accelerator.prepare(torch.nn.Linear(2, 2))
own = torch.nn.BatchNorm1d(3)
own.running_mean.fill_(i + 1)
Checkpoints(accelerator, sys.argv[1]).save(1, model, {"own": own}, {}, final=True)
own.running_mean.zero_()
args = SimpleNamespace(output_dir=sys.argv[1], model_name_or_path=sys.argv[1])
restore_average(args, accelerator, model, {"own": own, "new": torch.nn.Linear(1, 1)})
assert own.running_mean.tolist() == [i + 1.0] * 3
"""


def test_a_module_that_differs_between_processes_is_restored_for_an_evaluation(tmp_path):
    result = forked.run_code(DIFFERING, [tmp_path], processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr.count("no checkpoint here has new: it is evaluated as new") == 1
