"""Checkpoints whose checksums are right and whose content is not are refused."""

import json
import random

import pytest
from safetensors.torch import load_file, save_file

from tests.small_run import SmallRun
from utils.io.files import checksum_file, seal

MODEL, STATE = "model.safetensors", "state.json"


def two_checkpoints(folder):
    """The outcomes at steps 1 and 2, and the checkpoint of step 2."""
    run = SmallRun(folder).train(1).save()
    older = run.outcome()
    run.train(2).save()
    return older, run.outcome(), run.checkpoints.folder / "step-00000002"


def reseal(folder, keep=lambda name: True):
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json" and keep(path.name)]
    seal(folder, {name: checksum_file(folder / name) for name in names})


def change_tensors(folder, change, file=MODEL):
    tensors = load_file(folder / file)
    save_file({name: value.contiguous() for name, value in change(tensors).items()}, folder / file)


def change_state(folder, change):
    state = json.loads((folder / STATE).read_text())
    (folder / STATE).write_text(json.dumps(change(state)))


def of_one_row(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    return tensors | {name: tensors[name][:1]}  # would be broadcast in silence


DAMAGES = {
    "shape": lambda folder: change_tensors(folder, of_one_row),
    "dtype": lambda folder: change_tensors(folder, lambda t: {name: x.half() for name, x in t.items()}),
    "missing": lambda folder: change_tensors(folder, lambda t: {name: t[name] for name in list(t)[1:]}),
    "moments": lambda folder: change_tensors(
        folder, lambda t: {name: t[name] for name in t if "exp_avg" not in name}, "state.safetensors"
    ),
    "a list": lambda folder: change_state(folder, lambda state: [state]),
    "things": lambda folder: change_state(folder, lambda state: state | {"things": 3}),
    "settings": lambda folder: change_state(folder, lambda state: state | {"settings": [1]}),
    "step": lambda folder: change_state(folder, lambda state: state | {"step": "two"}),
    "no tensors": lambda folder: (folder / MODEL).write_bytes(b"12"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_it_is_refused(damage, tmp_path):
    _, _, newest = two_checkpoints(tmp_path)
    DAMAGES[damage](newest)
    reseal(newest)
    with pytest.raises(ValueError, match="step-00000002"):
        SmallRun(tmp_path)


def test_where_a_manifest_names_no_file_the_one_before_is_loaded(tmp_path, caplog):
    older, _, newest = two_checkpoints(tmp_path)
    reseal(newest, lambda name: False)
    run = SmallRun(tmp_path)
    assert run.step == 1 and "step-00000002 is damaged" in caplog.text
    assert all(older[name].equal(value) for name, value in run.outcome().items())


def test_whatever_stands_in_a_resealed_state_there_is_one_message_or_the_same_weights(tmp_path):
    """Hundred values of state.json, each replaced by one of another type."""
    _, expected, newest = two_checkpoints(tmp_path)
    text, refused, dice = (newest / STATE).read_text(), 0, random.Random(0)

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
        (newest / STATE).write_text(json.dumps(state))
        reseal(newest)
        try:
            run = SmallRun(tmp_path)
        except ValueError:
            refused += 1
            continue
        weights = dict(run.model.named_parameters())
        assert all(expected[name].equal(weight.double()) for name, weight in weights.items()), path
    assert 20 < refused < 100
