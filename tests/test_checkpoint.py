"""Checkpoints restore the state exactly. Damage, a full disk or a kill never loses an older checkpoint."""

import itertools
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import AveragedModel

from tests import forked
from tests.runs import PATIENCE, PROJECT
from tests.small_run import SmallRun
from utils.io.files import checksum_file, seal, verify_checksums
from utils.io.mistakes import RunFailed
from utils.state.resume import lock_output_dir


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def names(folder):
    return sorted(path.name for path in Path(folder, "checkpoints").iterdir())


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


# One process

@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_resume_is_bit_identical(kind, tmp_path):
    """Weights, schedule, a user's state and a generator, saved during the run and at its end."""
    unbroken = SmallRun(tmp_path / "unbroken", optimizer_type=kind).train(8).outcome()
    SmallRun(tmp_path / "run", optimizer_type=kind).train(5, save_steps=2).save()
    assert names(tmp_path / "run") == ["step-00000004", "step-00000005"]
    resumed = SmallRun(tmp_path / "run", optimizer_type=kind)
    assert resumed.step == 5 and resumed.counter.count == 5
    assert same(resumed.train(8).outcome(), unbroken)
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000005")
    assert same(SmallRun(tmp_path / "run", optimizer_type=kind).train(8).outcome(), unbroken)


def test_checkpoint_of_step_0_restores_the_initial_state(tmp_path):
    unbroken = SmallRun(tmp_path / "unbroken").train(3).outcome()
    SmallRun(tmp_path / "run").save()
    run = SmallRun(tmp_path / "run").train(2)
    assert run.checkpoints.load() == 0 and not run.optimizer.state
    run.step = 0
    assert same(run.train(3).outcome(), unbroken)


def two_checkpoints(folder):
    """The outcome at step 1, and the checkpoint of step 2."""
    run = SmallRun(folder).train(1).save()
    older = run.outcome()
    run.train(2).save()
    return older, run.checkpoints.folder / "step-00000002"


def reseal(folder):
    """Write a manifest with the checksums of the files as they are."""
    files = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    seal(folder, {name: checksum_file(folder / name) for name in files})


def change_tensors(change, file="model.safetensors"):
    def damage(folder):
        tensors = change(load_file(folder / file))
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / file)

    return damage


def change_state(changes):
    def damage(folder):
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | changes if changes else [state]))

    return damage


def seal_without_files(folder):
    seal(folder, {})


UP = "model.layers.0.mlp.up_proj.weight"
PARTS = ["model.safetensors", "state.safetensors", "state.json", "manifest.json"]
DAMAGES = [*itertools.product([truncate, flip_a_bit, Path.unlink], PARTS), (seal_without_files, "")]
WRONG_CONTENT = {  # under right checksums
    "shape": change_tensors(lambda tensors: tensors | {UP: tensors[UP][:1]}),  # broadcasting would hide it
    "dtype": change_tensors(lambda tensors: {name: value.half() for name, value in tensors.items()}),
    "missing": change_tensors(lambda tensors: {name: tensors[name] for name in list(tensors)[1:]}),
    "moments": change_tensors(lambda tensors: {name: tensors[name] for name in tensors
                                               if "exp_avg" not in name}, "state.safetensors"),
    "list": change_state({}), "things": change_state({"things": 3}),
    "settings": change_state({"settings": [1]}), "step": change_state({"step": "two"}),
    "empty": lambda folder: (folder / "model.safetensors").write_bytes(b"12"),
}  # fmt: skip


@pytest.mark.parametrize("damage, file", DAMAGES)
def test_damaged_checkpoint_is_skipped(tmp_path, caplog, damage, file):
    older, newest = two_checkpoints(tmp_path)
    damage(newest / file)
    again = SmallRun(tmp_path)
    assert again.step == 1 and same(again.outcome(), older)
    assert "step-00000002 is damaged" in caplog.text and file in caplog.text
    assert names(tmp_path) == ["bad-step-00000002", "step-00000001"]
    again.train(2).save()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("damage", WRONG_CONTENT.values(), ids=WRONG_CONTENT)
def test_wrong_content_with_valid_checksums_is_refused(damage, tmp_path):
    _, newest = two_checkpoints(tmp_path)
    damage(newest)
    reseal(newest)
    with pytest.raises(ValueError, match="step-00000002"):
        SmallRun(tmp_path)


def test_run_does_not_restart_if_all_checkpoints_are_damaged(tmp_path):
    """The user decides; "none" starts again and renames the old checkpoints."""
    SmallRun(tmp_path).train(1).save()
    flip_a_bit(tmp_path / "checkpoints/step-00000001/model.safetensors")
    with pytest.raises(ValueError, match="auto: no checkpoint is valid .model.safetensors has a wrong "
                                         "checksum.*step-00000001.*--resume_from_checkpoint none"):
        SmallRun(tmp_path)
    assert names(tmp_path) == ["step-00000001"]
    with pytest.raises(ValueError, match="no checkpoint is valid .manifest.json: No such file"):
        SmallRun(tmp_path / "other", resume_from_checkpoint=str(tmp_path / "nothing"))
    for left in (["replaced-step-00000001"], ["replaced-step-00000001", "replaced-step-00000001-2"]):
        run = SmallRun(tmp_path, resume_from_checkpoint="none")
        assert run.step == 0 and names(tmp_path) == left
        run.train(1).save()


def test_failed_save_keeps_older_checkpoints(tmp_path, caplog):
    run = SmallRun(tmp_path, save_total_limit=1).train(1).save()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # every larger file: EFBIG
    try:
        run.train(2).save()
        assert "step-00000002 was not saved: " in caplog.text
        assert "the last good checkpoint is" in caplog.text and "step-00000001" in caplog.text
        with pytest.raises(RunFailed, match="step-00000003 was not saved: .*too large.*last good .*00001"):
            run.train(3).save(stopping=True)
        with pytest.raises(RunFailed, match="step-00000000 was not saved: .*too large.*no checkpoint"):
            SmallRun(tmp_path / "new").save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["step-00000001"]
    assert verify_checksums(tmp_path / "checkpoints/step-00000001") == ""
    run.save()
    assert names(tmp_path) == ["step-00000003"]


def test_weights_with_inf_are_not_saved(tmp_path):
    run = SmallRun(tmp_path).train(1).save().train(2)
    with torch.no_grad():
        next(run.model.parameters())[3] = float("inf")
    with pytest.raises(RunFailed, match="not finite after step 2.*last good checkpoint is .*00000001"):
        run.save()
    assert names(tmp_path) == ["step-00000001"]


def test_added_and_removed_state_gives_a_warning(tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    SmallRun(tmp_path, extra_state={"average": AveragedModel(model)}).train(1).save()
    assert SmallRun(tmp_path, extra_state={"other": torch.nn.Linear(1, 1)}).step == 1
    assert "other is not in" in caplog.text and "average is in" in caplog.text
    differ = "holds another average .1 tensors differ: average/weight: float32 .2, 2. saved"
    with pytest.raises(ValueError, match=differ):
        SmallRun(tmp_path, extra_state={"average": AveragedModel(torch.nn.Linear(3, 2))})


def test_state_that_cannot_be_saved_is_refused(tmp_path):
    run = SmallRun(tmp_path)
    prepared = AcceleratedScheduler(run.schedule, [])
    for state, message in ((prepared, "was given to accelerator.prepare"), (object(), "no load_state_dict")):
        with pytest.raises(ValueError, match=message):
            SmallRun(tmp_path, extra_state={"extra": state})

    class Text:
        load_state_dict = None

        def state_dict(self):
            return {"a": {"b": object()}}

    with pytest.raises(ValueError, match="a state_dict holds a object at 'extra/a/b'"):
        SmallRun(tmp_path, extra_state={"extra": Text()}).save()


# The same experiment?

def test_resume_with_other_settings_rows_or_model_is_refused(tmp_path):
    SmallRun(tmp_path, keywords=["a", "b"]).train(1).save()
    with pytest.raises(ValueError) as refused:
        SmallRun(tmp_path, learning_rate=0.1, rows=8, keywords=["a"])
    assert str(refused.value).splitlines() == [
        f"{tmp_path}/checkpoints/step-00000001 holds a run with other settings: repeat them, or choose "
        "another --output_dir",
        "keywords: a b in the run, a now", "learning_rate: 0.01 in the run, 0.1 now",
        "rows per step: 12 in the run, 8 now",
    ]  # fmt: skip
    keywords = {"keywords": ["a", "b"]}
    with pytest.raises(ValueError, match="dataset_name: the rows have other content"):
        SmallRun(tmp_path, fingerprint="others", **keywords)
    with pytest.raises(ValueError, match=r"holds another model .\d+ tensors differ: .*"
                                         r"model.embed_tokens.weight: float32 \[300, 32\] saved, "
                                         r"float32 \[300, 64\] now"):
        SmallRun(tmp_path, width=64, **keywords)
    with pytest.raises(ValueError, match="holds another optimizer .AdamW of 15 . 9 tensors saved, M"):
        SmallRun(tmp_path, optimizer_type="muon", **keywords)
    assert SmallRun(tmp_path, save_total_limit=5, **keywords).step == 1
    state = tmp_path / "checkpoints/step-00000001/state.json"
    assert json.loads(state.read_text())["settings"].keys() >= {"keywords", "learning_rate"}


def test_resume_with_another_number_of_steps_is_refused(tmp_path):
    """As the learning rate depends on it. tests/test_settings.py has every schedule."""
    SmallRun(tmp_path).train(2).save()
    with pytest.raises(ValueError) as refused:
        SmallRun(tmp_path, max_train_steps=20)
    first, problem, remedy = str(refused.value).splitlines()
    assert problem == "max_train_steps: 10 in the run, 20 now, and the learning rate of step 2 depends on it"
    assert remedy.startswith(f"To train all steps again: --output_dir {tmp_path}-2;")
    assert remedy.endswith(f"--model_name_or_path {tmp_path} --learning_rate 0.0005")
    SmallRun(tmp_path / "start").save()
    assert SmallRun(tmp_path / "start", max_train_steps=20).step == 0  # allowed: no step is done


# Kills

KILLED = """
import os, random, signal, sys, time
import torch
from tests.small_run import SmallRun
from utils.io.files import verify_checksums
from utils.state.resume import list_checkpoints
folder, trials = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)  # forking below
delays, step, inside = random.Random(0), 0, 0

def fill(run, value):
    with torch.no_grad():
        for p in run.model.parameters():
            p.fill_(value)

run = SmallRun(folder, width=256)
fill(run, 0)
run.checkpoints.save(0)
for trial in range(trials):
    if (pid := os.fork()) == 0:
        while True:
            step += 1
            fill(run, step)
            run.checkpoints.save(step)
    time.sleep(delays.uniform(0.02, 0.2))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    inside += any(name.startswith(".tmp-step") for name in os.listdir(folder + "/checkpoints"))
    checkpoints = list_checkpoints(folder + "/checkpoints")
    assert all(verify_checksums(path) == "" for path in checkpoints), checkpoints
    run.checkpoints._open()
    assert not any(name.startswith(".") for name in os.listdir(folder + "/checkpoints"))
    newest = run.checkpoints.load()
    assert newest >= step and int(checkpoints[-1].name[5:]) == newest, (newest, step)
    assert all((p == newest).all() for p in run.model.parameters()), newest
    step = newest
print(inside, "inside a save,", step, "saves")
"""


def test_sigkill_during_save_loses_no_complete_checkpoint(tmp_path):
    """kill -9 at random moments of a process that only saves: all files are valid and of the same step."""
    kills = int(os.environ.get("CRASH_KILLS", 40))
    result = forked.run_code(KILLED, [tmp_path, kills])
    assert result.returncode == 0, result.stderr[-3000:]
    print(result.stdout)
    assert int(result.stdout.split()[0]) >= kills / 8  # kills that really hit a save


def test_loading_a_checkpoint_never_unpickles(tmp_path):
    """Neither pickles beside the state, under the names that other loaders read, nor pickles in its place."""
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self):
            return open, (str(marker), "w")

    pickle.loads(pickle.dumps(Bomb()))
    assert marker.exists()  # the bomb works
    marker.unlink()
    run = SmallRun(tmp_path / "run").train(1).save()
    folder = run.checkpoints.folder / "step-00000001"
    for name in (".metadata", "__0_0.distcp", "pytorch_model.bin", "optimizer.bin", "optimizer.pt",
                 "scheduler.bin", "random_states_0.pkl", "rng_state_0.pth", "state.pkl", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    torch.save(Bomb(), folder / "as_torch_saves.pt")
    reseal(folder)
    assert run.checkpoints.load() == 1
    for path in folder.glob("*.safetensors"):
        path.write_bytes(pickle.dumps(Bomb()))
    reseal(folder)
    with pytest.raises(ValueError, match="step-00000001"):
        run.checkpoints.load()
    assert not marker.exists()


# Several processes

SEVERAL = """
import json, os, resource, shutil, sys
from pathlib import Path
import torch
from tests.small_run import SmallRun
from utils.io.mistakes import RunFailed
folder, kinds = Path(sys.argv[1]), sys.argv[2].split(",")
processes, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])

def wait():
    run.accelerator.wait_for_everyone()

def write(outcome, name):
    if rank == 0:
        torch.save(outcome, folder / f"{name}.outcome")

for kind in kinds:
    for source in sorted(folder.glob(f"{kind}-*/checkpoints/step-00000003")):  # of other processes
        for sharded in (False, True):
            name = f"{source.parts[-3]}-{processes}-{sharded}"
            run = SmallRun(folder / "loaded" / name, sharded, kind, resume_from_checkpoint=str(source))
            assert run.step == 3, run.step
            write(run.train(6).outcome(), name)
    for sharded in (False, True):
        name = f"{kind}-{processes}-{sharded}"
        run = SmallRun(folder / name, sharded, kind).train(3, save_steps=3)
        write(run.train(6).outcome(), name + "-unbroken")
        wait()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for blocked in range(processes):  # only one of them cannot write
    if rank == blocked:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        run.save(stopping=True)
        raise SystemExit("no error")
    except RunFailed as error:
        assert "step-00000006 was not saved" in str(error) and "last good checkpoint" in str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    wait()
weight = next(run.model.parameters()).to_local()
with torch.no_grad():
    original = weight.clone()
    weight.fill_(float("nan") if rank == processes - 1 else 1)
try:
    run.save()
    raise SystemExit("no error")
except RunFailed as error:
    assert "not finite" in str(error)
weight.data.copy_(original)
try:
    SmallRun(folder / name, sharded, kind, learning_rate=1.0)
    raise SystemExit("no error")
except ValueError as error:
    assert "learning_rate: 0.01 in the run, 1.0 now" in str(error)
wait()
os._exit(0)
"""


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Runs of 2, then 3, then 4 processes, each of which also resumes the checkpoints of the earlier ones."""
    folder = tmp_path_factory.mktemp("several")
    for processes in (2, 3, 4):
        result = forked.run_code(SEVERAL, [folder, "adamw,muon"], processes)
        assert result.returncode == 0, result.stderr[-3000:]
    return folder


def test_checkpoint_loads_on_any_number_of_processes(several, tmp_path):
    """Between replicated and sharded, in both directions, and on one process without a process group."""
    expected = {kind: SmallRun(tmp_path / kind, optimizer_type=kind).train(6).outcome()
                for kind in ("adamw", "muon")}  # fmt: skip
    outcomes = {path.stem: torch.load(path) for path in several.glob("*.outcome")}
    for kind, processes, sharded in itertools.product(expected, (2, 3, 4), (False, True)):
        name = f"{kind}-{processes}-{sharded}"
        source = several / name / "checkpoints/step-00000003"
        files = {path.name for path in source.glob("model*")}
        shards = {f"model-{i + 1:05d}-of-{processes:05d}.safetensors" for i in range(processes)}
        assert files == (shards if sharded else {"model.safetensors"})
        run = SmallRun(tmp_path / name, optimizer_type=kind, resume_from_checkpoint=str(source))
        assert run.step == 3
        outcomes[f"{name}-1"] = run.train(6).outcome()
    assert len(outcomes) == 12 + 2 * 2 * 2 * (1 + 2) + 12
    for name, outcome in outcomes.items():
        for key, value in expected[name.split("-")[0]].items():
            torch.testing.assert_close(outcome[key], value, rtol=1e-3, atol=2e-4, msg=lambda m, n=name: n + m)


HOLD = """
import os, sys, time
from tests.runs import PATIENCE
from utils.state.resume import lock_output_dir
lock = lock_output_dir(sys.argv[1])
print("held", flush=True)
os.fork()
time.sleep(PATIENCE)
"""


def test_output_dir_is_locked_until_the_run_ends(tmp_path):
    """A killed run leaves no lock, even if its forked child (a data loader worker) lives on."""
    script = [sys.executable, "-c", HOLD, str(tmp_path)]
    holder = subprocess.Popen(script, cwd=PROJECT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"in use by another run .process {holder.pid} on "):
            lock_output_dir(tmp_path, wait_seconds=0.3)
        holder.kill()
        holder.wait()
        lock_output_dir(tmp_path, wait_seconds=PATIENCE).release()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
