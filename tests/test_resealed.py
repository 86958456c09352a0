"""Checkpoints whose checksums are right and whose content is not are refused."""

import json
import random
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from tests.test_checkpoint import build, train, weights
from utils.display.metrics import read_run
from utils.io.files import checksum_file, seal
from utils.resume import Resume
from utils.state.checkpoint import Checkpoints

MODEL, STATE = "model.safetensors", "state.json"


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def two_checkpoints(accelerator, folder):
    """A model, its optimizer, the weights at step 1; the checkpoints of steps 1 and 2."""
    model, optimizer = build(accelerator)
    checkpoints = Checkpoints(accelerator, folder)
    train(accelerator, model, optimizer, 1)
    checkpoints.save(1, model, {"optimizer": optimizer}, {"step": 1}, final=True)
    older = weights(model)
    train(accelerator, model, optimizer, 1)
    checkpoints.save(2, model, {"optimizer": optimizer}, {"step": 2}, final=True)
    return model, optimizer, older, checkpoints.folder / "step-00000002"


def reseal(folder, keep=lambda name: True):
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json" and keep(path.name)]
    seal(folder, {name: checksum_file(folder / name) for name in names}, step=2)


def change_tensors(folder, change, file=MODEL):
    tensors = load_file(folder / file)
    save_file({name: value.contiguous() for name, value in change(tensors).items()}, folder / file)


def change_state(folder, change):
    state = json.loads((folder / STATE).read_text())
    (folder / STATE).write_text(json.dumps(change(state)))


def of_one_row(tensors):
    return tensors | {"1.weight": tensors["1.weight"][:1]}  # would be broadcast in silence


def short_moments(tensors):
    name = next(name for name in tensors if name.endswith("exp_avg"))
    return tensors | {name: tensors[name].flatten()[:1]}


DAMAGES = {
    "shape": lambda folder: change_tensors(folder, of_one_row),
    "dtype": lambda folder: change_tensors(folder, lambda t: {name: x.half() for name, x in t.items()}),
    "missing": lambda folder: change_tensors(folder, lambda t: {name: t[name] for name in list(t)[1:]}),
    "moments": lambda folder: change_tensors(folder, short_moments, "optimizer.safetensors"),
    "a list": lambda folder: change_state(folder, lambda state: [state]),
    "keep": lambda folder: change_state(folder, lambda state: state | {"keep": 3}),
    "no tensors": lambda folder: (folder / MODEL).write_bytes(b"12"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_it_is_refused(damage, accelerator, tmp_path):
    model, optimizer, _, newest = two_checkpoints(accelerator, tmp_path)
    DAMAGES[damage](newest)
    reseal(newest)
    with pytest.raises(ValueError, match="step-00000002"):
        Checkpoints(accelerator, tmp_path).load("auto", model, {"optimizer": optimizer})


def test_where_a_manifest_names_no_file_the_one_before_is_loaded(accelerator, tmp_path, caplog):
    model, optimizer, older, newest = two_checkpoints(accelerator, tmp_path)
    reseal(newest, lambda name: False)
    extra = Checkpoints(accelerator, tmp_path).load("auto", model, {"optimizer": optimizer})
    assert extra == {"step": 1} and "step-00000002 is damaged" in caplog.text
    assert all(older[name].equal(value) for name, value in weights(model).items())


def test_weights_that_are_not_finite_or_of_another_type_are_refused_uncopied(accelerator, tmp_path):
    model, optimizer, _, newest = two_checkpoints(accelerator, tmp_path)
    before = weights(model)

    def spoil(tensors):
        tensors["3.weight"][2] = float("nan")
        return tensors

    change_tensors(newest, spoil)
    reseal(newest)
    with pytest.raises(ValueError, match="3.weight is not finite"):
        Checkpoints(accelerator, tmp_path).load("auto", model, {"optimizer": optimizer})
    assert all(before[name].equal(value) for name, value in weights(model).items())
    with pytest.raises(ValueError, match="fits another model, 5 tensors differ: .*float32 .* float64"):
        Checkpoints(accelerator, tmp_path).load("auto", model.double(), {"optimizer": optimizer})


def test_whatever_stands_in_a_resealed_state_there_is_one_message_or_the_same_weights(accelerator, tmp_path):
    """Hundred values of state.json, each replaced by one of another type."""
    model, optimizer, older, newest = two_checkpoints(accelerator, tmp_path)
    text, found, dice = (newest / STATE).read_text(), [], random.Random(0)
    expected = weights(model)

    def places(node, path=()):
        yield path
        for key, value in node.items() if isinstance(node, dict) else enumerate(node[:3]) if isinstance(
            node, list
        ) else ():
            yield from places(value, (*path, key))

    every = [*places(json.loads(text))][1:]
    for path in dice.sample(every, 100):
        state = node = json.loads(text)
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = dice.choice([None, [], {}, "two", -1, [1], {"a": 1}, 1e300])
        if newest.exists():
            (newest / STATE).write_text(json.dumps(state))
            reseal(newest)
        try:
            extra = Checkpoints(accelerator, tmp_path).load(str(newest), model, {"optimizer": optimizer})
        except ValueError as error:
            found.append(str(error))
            continue
        if isinstance(extra, dict):
            assert all(expected[name].equal(value) for name, value in weights(model).items()), path
    assert 20 < len(found) < 100


@pytest.mark.parametrize("extra", [[], "x", {}, {"state": {"step": "two"}}])
def test_a_state_that_is_not_that_of_a_run_is_one_message(extra):
    check = Resume.check.__get__(SimpleNamespace(args=SimpleNamespace(output_dir="here")))
    with pytest.raises(ValueError, match="a checkpoint of here lacks "):
        check(extra)


@pytest.mark.parametrize("content", ["[1]", "{}", "3", "null", '{"id": 1}', '{"id": "a", "launches": 3}',
                                     '{"id": "a", "launches": ["x"]}', "{"])  # fmt: skip
def test_a_damaged_run_json_is_a_new_one(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    run = read_run(tmp_path)
    assert isinstance(run["id"], str) and run["launches"] == []
