"""data/rows.py: batches that say what is in them, whatever they come from; several evaluation sets; what a
checkpoint knows of the data.
"""

import itertools
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from filelock import FileLock

from data.batches import Data
from data.masking import MaskTokens
from data.open import Recipe, open_sources, prepare, short_names
from data.order import evaluation_rows
from data.tokenizer import train_tokenizer
from tests import forked, shard_data
from tests.runs import PROJECT

T, B = 32, 4
KINDS = ("text", "shards", "pairs", "stream of text", "stream of shards")


class Growing:
    """One micro-batch more on each process at every other step."""

    def __init__(self, last: int, processes: int = 1, batch_size: int = B):
        self.last, self.rows = last, processes * batch_size

    def micro_batches(self, step: int) -> int:
        return 1 + step // 2

    def rows_before(self, step: int) -> int:
        return self.rows * sum(self.micro_batches(s) for s in range(step))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    texts = shard_data.make_texts(120)
    for name, found in {"a": texts, "b": texts[:20], "c": texts[20:50]}.items():
        shard_data.write_jsonl(folder / f"{name}.jsonl", found)
    words = [" ".join(text.split()[:9]).capitalize() for text in texts]
    pairs = [". ".join(words[i : i + 8]) + "." for i in range(0, 112, 2)]
    shard_data.write_jsonl(folder / "pairs.jsonl", pairs)
    shard_data.write_jsonl(folder / "more-pairs.jsonl", pairs[:9])
    train_tokenizer(texts, "wordpiece", 400, "bert").save_pretrained(folder / "tokenizer")
    for name, fraction in {"shards": 0.05, "only-train": 0.0}.items():
        done = shard_data.run(str(folder / "a.jsonl"), folder / name, str(folder / "tokenizer"),
                              validation_fraction=fraction)
        assert done == 0
    return folder


def recipe(folder, kind="text", **changes) -> Recipe:
    name = "pairs.jsonl" if kind == "pairs" else "shards" if "shards" in kind else "a.jsonl"
    settings = {
        "dataset_name": f"{folder}/{name}", "tokenizer_name": f"{folder}/tokenizer", "block_size": T,
        "validation_fraction": 0.05, "next_sentence": kind == "pairs", "streaming": "stream" in kind,
        "cache_dir": f"{folder}/cache", "seed": 3, "max_eval_samples": 10,
        "per_device_train_batch_size": B, "per_device_eval_batch_size": 4,
    }  # fmt: skip
    return Recipe(**settings | changes)


def opened(found: Recipe) -> Data:
    problems = []
    sources = open_sources(found, problems)
    assert not problems, problems
    return prepare(sources, Accelerator(cpu=True))


def rows_of(data):
    """Of the only data set."""
    (rows,) = data.train.sources.values()
    return rows


def lists(batches) -> list[dict]:
    return [{name: value.tolist() for name, value in batch.items()} for batch in batches]


def flat(steps) -> list[dict]:
    return lists(itertools.chain.from_iterable(steps))


def joined(batches: list[dict], name: str) -> list:
    return list(itertools.chain.from_iterable(batch[name] for batch in batches))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_say_what_is_in_them_and_steps_of_any_size_take_every_position_once(folder, kind):
    data, last = opened(recipe(folder, kind)), 30
    steps = Growing(last)
    made = list(data.batches(steps, 0))
    assert [len(micro_batches) for micro_batches in made] == [1 + step // 2 for step in range(last)]
    batches = flat(made)
    assert joined(batches, "position") == list(range(steps.rows_before(last)))
    epochs, rows = joined(batches, "epoch"), joined(batches, "row")
    n = data.length or epochs.count(0)
    assert epochs == [position // n for position in range(len(epochs))]
    assert sorted(rows[:n]) == list(range(n)) != rows[:n] and rows[:n] != rows[n : 2 * n]
    content = {}
    for row, ids in zip(rows, joined(batches, "input_ids"), strict=True):
        assert content.setdefault(row, ids) == ids and len(ids) == T
    if "stream" not in kind:
        rows = shard_data.all_ids(rows_of(data))
        assert all(rows[row].tolist() == ids for row, ids in content.items())


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_at_any_step_it_is_the_same_run_masks_that_depend_on_the_position_included(folder, kind):
    steps, end = Growing(16), Growing(16).rows_before(16)

    def rate(positions):
        return 0.1 + 0.3 * positions / end

    def started() -> Data:
        data = opened(recipe(folder, kind))
        data.collate = MaskTokens(data.tokenizer, rate, seed=1, most=0.4)
        return data

    whole = [lists(micro_batches) for micro_batches in started().batches(steps, 0)]
    for stopped in (1, 8, 15):
        first = started()
        before = first.batches(steps, 0)
        assert [lists(next(before)) for _ in range(stopped)] == whole[:stopped]
        state = json.loads(json.dumps(first.train.state_dict(steps.rows_before(stopped))))
        assert (state is None) == ("stream" not in kind)
        second = started()
        second.train.load_state_dict(state)
        assert lists(next(second.batches(steps, stopped))) == whole[stopped]
        assert [lists(found) for found in second.batches(steps, stopped)] == whole[stopped:]
    # Each row has as many predictions as its own position asks for.
    batches = [batch for step in whole for batch in step]
    special = set(started().tokenizer.all_special_ids)
    plain = [[lists([batch])[0] for batch in step] for step in opened(recipe(folder, kind)).batches(steps, 0)]
    text = joined([batch for step in plain for batch in step], "input_ids")
    counts = [sum(label != -100 for label in labels) for labels in joined(batches, "slot_labels")]
    for position, count, ids in zip(joined(batches, "position"), counts, text, strict=True):
        share = rate(position) * sum(token not in special for token in ids)
        assert share - 1 < count < share + 1
    assert len({len(labels) for labels in joined(batches, "slot_labels")}) == 1, "shapes are static"


SCRIPT = """
import json, sys, time
sys.path.insert(0, {project!r})
from pathlib import Path
from accelerate import Accelerator
from data.order import evaluation_rows
from data.open import open_sources, prepare
from tests import test_rows

def main():
    accelerator, folder = Accelerator(), Path({folder!r})
    steps = test_rows.Growing(12, accelerator.num_processes, 2)
    for kind in test_rows.KINDS:
        sizes = {{"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}}
        recipe = test_rows.recipe(folder, kind, cache_dir=str(folder / "cache-of-two"), **sizes)
        data = prepare(open_sources(recipe, []), accelerator)
        found = {{"train": test_rows.flat(data.batches(steps, 0))}}
        found["resumed"] = test_rows.flat(data.batches(steps, 7))
        found["evaluation"] = test_rows.lists(data.evaluation(""))
        (folder / f"{{kind}}-{{accelerator.process_index}}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    time.sleep(1 - accelerator.process_index)  # the first one keeps the store

main()
"""


def test_two_processes_see_together_what_one_sees(folder):
    """Prepared by both at once, in a cache of their own."""
    script = folder / "two_processes.py"
    script.write_text(SCRIPT.format(project=str(PROJECT), folder=str(folder)))
    done = forked.run(str(script), [], processes=2)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[:4000]
    for kind in KINDS:
        both = [json.loads((folder / f"{kind}-{process}.json").read_text()) for process in range(2)]
        data = opened(recipe(folder, kind))
        alone = {
            "train": flat(data.batches(Growing(12), 0)), "resumed": flat(data.batches(Growing(12), 7)),
            "evaluation": lists(data.evaluation("")),
        }  # fmt: skip
        for part, expected in alone.items():
            batches = list(itertools.chain.from_iterable(zip(both[0][part], both[1][part], strict=True)))
            for name in expected[0]:
                assert joined(batches, name) == joined(expected, name), (kind, part, name)


APART = """
import datetime, os, sys, time
from pathlib import Path
import torch.distributed as dist
from accelerate import Accelerator
from data.open import open_sources, prepare
from tests.test_rows import recipe
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
(folder / f"here-{rank}").touch()
while len(list(folder.glob("here-*"))) < 2:
    time.sleep(0.01)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
accelerator = Accelerator(cpu=True)
for kind in ("text", "pairs"):
    data = prepare(open_sources(recipe(folder, kind, cache_dir=f"{folder}/{rank}"), []), accelerator)
    print(f"rank {rank}: {kind}\\n", end="", flush=True)  # in one piece, as both do so at once
accelerator.wait_for_everyone()
time.sleep(1 - int(rank))  # the first one keeps the store
os._exit(0)
"""


def test_a_machine_that_prepares_for_longer_than_a_collective_may_wait_is_waited_for(folder, tmp_path):
    """Two caches, as on two machines; the second one is locked for longer than the group's time limit."""
    shutil.copytree(folder, tmp_path / "all")
    opened(recipe(tmp_path / "all", cache_dir=str(tmp_path / "cache")))
    (prepared,) = (tmp_path / "cache").glob("rows-*/manifest.json")
    lock = tmp_path / "all" / "1" / f"{prepared.parent.name}.lock"
    lock.parent.mkdir()
    (tmp_path / "apart.py").write_text(APART)
    log = tmp_path / "log"
    with FileLock(lock):
        script = str(tmp_path / "apart.py")
        both = forked.start_all(PROJECT, script, [tmp_path / "all"], log, processes=2)
        while not list((tmp_path / "all").glob("0/rows-*/manifest.json")) and both[0].is_alive():
            time.sleep(0.1)
        time.sleep(6)
    forked.finish(both, log)
    output = log.read_text()
    assert sorted(line for line in output.splitlines() if line.startswith("rank")) == [
        "rank 0: pairs", "rank 0: text", "rank 1: pairs", "rank 1: text"]


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_takes_every_row_of_the_sample_once_and_marks_its_padding(folder, kind):
    most = 0 if kind == "stream of text" else 5  # of text that is streamed there are no more than it takes
    data = opened(recipe(folder, kind, max_eval_samples=most or 10))
    rows = shard_data.all_ids(data.evals[""])
    drawn = evaluation_rows(len(rows), most, seed=3)
    assert most == 0 or len(drawn) == 5 < len(rows)
    batches = lists(data.evaluation(""))
    assert joined(batches, "row") == joined(batches, "position") == drawn + [-1] * (-len(drawn) % 4)
    assert joined(batches, "input_ids")[: len(drawn)] == rows[drawn].tolist()
    assert lists(data.evaluation("")) == batches and data.evaluation("") is data.evaluation("")


@pytest.mark.parametrize("kind", ["text", "pairs", "shards"])
def test_a_row_has_the_same_evaluation_mask_in_any_sample(folder, kind):
    def masked(**changes) -> dict[int, dict]:
        data = opened(recipe(folder, kind, **changes))
        data.collate = MaskTokens(data.tokenizer, 0.15, seed=1)
        return {batch["row"][i]: {name: batch[name][i] for name in batch}
                for batch in lists(data.evaluation("")) for i in range(len(batch["row"]))}  # fmt: skip

    whole, sample = masked(max_eval_samples=0), masked(max_eval_samples=6, per_device_eval_batch_size=3)
    assert len(sample) == 6 < len(whole) - 1
    assert all(whole[row] == found for row, found in sample.items())


def test_an_incomplete_step_is_not_handed_out(folder):
    class Mistaken(Growing):
        def rows_before(self, step):
            return super().rows_before(step) - B * (step == self.last)

    data = opened(recipe(folder))
    assert [len(micro_batches) for micro_batches in data.batches(Mistaken(6), 0)] == [1, 1, 2, 2, 3]


def test_several_evaluation_sets_are_each_their_own_rows(folder):
    one = opened(recipe(folder, eval_dataset_name=(f"{folder}/b.jsonl",)))
    names = tuple(f"{folder}/{name}" for name in ("b.jsonl", "c.jsonl", "shards", "only-train"))
    several = opened(recipe(folder, eval_dataset_name=names, max_eval_samples=0))
    assert list(several.evals) == ["b", "c", "shards", "only-train"] and list(one.evals) == [""]
    lines = (folder / "a.jsonl").read_text().splitlines(keepends=True)
    for data, first in ((one, 20), (several, 50)):  # b and c are part of it, and not trained on
        (folder / "rest.jsonl").write_text("".join(lines[first:]))
        rest = recipe(folder, dataset_name=f"{folder}/rest.jsonl", eval_dataset_name=(f"{folder}/shards",))
        assert np.array_equal(shard_data.all_ids(rows_of(data)), shard_data.all_ids(rows_of(opened(rest))))
    assert np.array_equal(shard_data.all_ids(several.evals["b"]), shard_data.all_ids(one.evals[""]))
    alone = opened(recipe(folder, dataset_name=f"{folder}/c.jsonl", eval_dataset_name=names[:1]))
    assert np.array_equal(shard_data.all_ids(several.evals["c"]), shard_data.all_ids(rows_of(alone)))
    own = opened(recipe(folder, "shards"))
    assert np.array_equal(shard_data.all_ids(several.evals["shards"]), shard_data.all_ids(own.evals[""]))
    assert several.evals["shards"].bytes_per_token == own.evals[""].bytes_per_token
    assert len(several.evals["only-train"]) > own.length
    for name, found in several.evals.items():
        batches = lists(several.evaluation(name))
        assert [row for row in joined(batches, "row") if row >= 0] == list(range(len(found)))
        assert 1 < found.bytes_per_token < 5


@pytest.mark.parametrize("kind, name", [("pairs", "more-pairs"), ("stream of text", "b"),
                                        ("stream of shards", "b"), ("shards", "c")])
def test_several_evaluation_sets_for_every_kind_of_training_rows(folder, kind, name, capsys):
    own = {"pairs": "pairs.jsonl", "stream of text": "a.jsonl"}.get(kind, "shards")
    names = (f"{folder}/{name}.jsonl", f"{folder}/{own}")
    data = opened(recipe(folder, kind, eval_dataset_name=names))
    assert list(data.evals) == [name, Path(own).stem]
    assert ("is trained on as it is" in capsys.readouterr().out) == (kind != "pairs")
    assert [len(lists(data.evaluation(name))) > 0 for name in data.evals] == [True, True]
    single = opened(recipe(folder, kind, eval_dataset_name=names[:1]))
    assert np.array_equal(shard_data.all_ids(single.evals[""]), shard_data.all_ids(data.evals[name]))
    if kind != "pairs":  # these leave out what is evaluated on
        assert single.train.fingerprint == data.train.fingerprint


def test_the_bytes_of_a_token_are_those_of_the_text_streamed_or_not(folder):
    """An end of text is a token, and no bytes: bits per byte of all kinds compare."""
    for names in ((), (f"{folder}/c.jsonl",)):
        asked = {"eval_dataset_name": names, "max_eval_samples": 10_000}
        found = {kind: opened(recipe(folder, kind, **asked)).evals[""] for kind in ("text", "stream of text")}
        texts = [json.loads(line)["text"] for line in (folder / "c.jsonl").open()]
        if names:
            tokenizer = opened(recipe(folder)).tokenizer
            tokens = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in texts)
            expected = sum(len(text.encode()) for text in texts) / tokens
            assert found["text"].bytes_per_token == pytest.approx(expected, rel=1e-12)
        assert found["stream of text"].bytes_per_token == found["text"].bytes_per_token


def test_names_of_evaluation_sets_tell_them_apart():
    files = ("x/a.jsonl.gz", "y/a.parquet", "user/set-v1.5", "s3://bucket/valid/", "texts/*.txt", "a-2.json")
    assert short_names((*files, "b")) == ["a", "a-2", "set-v1.5", "valid", "texts", "a-2-2", "b"]
    assert short_names(("x/a.jsonl",)) == [""] and short_names(()) == []
    typed = "data/a.bin?dtype=uint32", "b.bin?dtype=uint32", "https://host/x/c.jsonl?token=1", "y/d-?.csv"
    assert short_names(typed) == ["a", "b", "c", "y"]


def test_a_split_of_shards_is_named_as_one_of_text(folder):
    names = f"{folder}/shards:validation", f"{folder}/shards:train"
    named = opened(recipe(folder, eval_dataset_name=names))
    own = opened(recipe(folder, "shards"))
    assert named.evals["shards"].fingerprint == own.evals[""].fingerprint
    problems = []
    names = f"{folder}/shards:test", f"{folder}/shards:train[:9]"
    open_sources(recipe(folder, eval_dataset_name=names), problems)
    for line, split in zip(problems, ("test", "train[:9]"), strict=True):
        assert f"shards has no row of 32 tokens for {split}, only for train, validation: set eval" in line


def test_evaluation_sets_of_a_stream_are_streamed_too(folder):
    evaluated = recipe(folder, "stream of text", eval_dataset_name=f"{folder}/b.jsonl")
    (kind,) = open_sources(evaluated, []).evals.values()
    assert kind.corpus.source.streaming


def test_every_mistake_is_a_line_and_nothing_is_prepared(folder, tmp_path):
    def problems(kind="text", **changes):
        found = []
        open_sources(recipe(folder, kind, cache_dir=str(tmp_path / "cache"), **changes), found)
        return found

    evals = tuple(f"{folder}/{name}.jsonl" for name in ("none-a", "b", "none-b"))
    several = problems(dataset_name="no/such.jsonl", tokenizer_name=str(tmp_path / "none"),
                       eval_dataset_name=evals)
    assert len(several) == 4
    for line, part in zip(several, ("no/such.jsonl", "none-a", "none-b", "tokenizer_name"), strict=True):
        assert part in line
    assert not problems("shards", block_size=64) and not problems("shards", block_size=64, n_special=2)
    assert "no row of 1000000 tokens for train" in problems("shards", block_size=1_000_000)[0]
    assert problems("shards", next_sentence=True) == [
        "next_sentence: token files have no sentences; name text or saved sentence pairs."
    ]
    assert not problems() and not problems("shards", tokenizer_name=None) and not problems("pairs")
    two = {"mixture": (0.5, 0.5), "max_train_samples": 9}
    part = f"{folder}/a.jsonl:train[:50%]"
    (line,) = problems(dataset_name=(f"{folder}/shards", part), **two)
    assert line.endswith(f"name a part of the text instead, {folder}/a.jsonl:train[:9].")
    (line,) = problems(dataset_name=(f"{folder}/shards",) * 2, **two)
    assert line == "max_train_samples: not for sentence pairs or a mixture; leave it out."
    assert not (tmp_path / "cache").exists()


def test_a_recipe_takes_its_settings_by_name(folder):
    class Args:
        def __init__(self, **settings):
            vars(self).update(settings)

    args = Args(dataset_name="x", keywords=["a", "b"], eval_dataset_name="y.jsonl", learning_rate=1.0, seed=5)
    found = Recipe.of(args, n_special=2, block_size=66)
    assert found == Recipe("x", keywords=("a", "b"), eval_dataset_name=("y.jsonl",), seed=5, n_special=2,
                           block_size=66)
    assert found.row_size == 64 and hash(found)
    for none in (None, []):
        assert Recipe.of(Args(dataset_name="x", eval_dataset_name=none)).eval_dataset_name == ()


@pytest.mark.parametrize("kind", ["text", "pairs"])
def test_a_run_goes_on_with_the_rows_in_the_cache_whatever_became_of_their_source(folder, kind, tmp_path):
    first = opened(recipe(folder, kind, cache_dir=str(tmp_path / "cache")))
    gone = recipe(folder, kind, cache_dir=str(tmp_path / "cache"), dataset_name="/gone",
                  tokenizer_name="/gone", output_dir=f"{folder}/tokenizer",
                  saved=first.fingerprints | {"dataset_name": ["/gone"]})
    again = opened(gone)
    assert again.fingerprints == first.fingerprints
    assert lists(again.loader(0, 40)) == lists(first.loader(0, 40))
    assert lists(again.evaluation()) == lists(first.evaluation())
    assert again.evals[""].bytes_per_token == first.evals[""].bytes_per_token
    for changed in ({"cache_dir": str(tmp_path / "other")}, {"output_dir": "/gone"},
                    {"saved": gone.saved | {"tokenizer": "x"}}, {"saved": gone.saved | {"train": "x"}},
                    {"saved": gone.saved | {"dataset_name": ["another"]}}):
        problems = []
        open_sources(replace(gone, **changed), problems)
        assert any("/gone" in line for line in problems), changed


@pytest.mark.parametrize("kind", ["text", "pairs"])
def test_a_broken_folder_in_the_cache_stops_no_resume(folder, kind, tmp_path):
    first = opened(recipe(folder, kind, cache_dir=str(tmp_path)))
    gone = recipe(folder, kind, cache_dir=str(tmp_path), dataset_name="/gone",
                  output_dir=f"{folder}/tokenizer", saved=first.fingerprints | {"dataset_name": ["/gone"]})
    (whole,) = tmp_path.glob("*-*/manifest.json")
    for number, content in enumerate(("", "[]", '{"splits": 1}', whole.read_text())):
        broken = tmp_path / f"{whole.parent.name}-{number}"  # of the last one all files are lost
        broken.mkdir()
        (broken / "manifest.json").write_text(content)
    assert opened(gone).fingerprints == first.fingerprints


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprints_change_with_the_content_and_with_nothing_else(folder, kind, tmp_path):
    first = opened(recipe(folder, kind)).fingerprints
    elsewhere = recipe(folder, kind, cache_dir=str(tmp_path / "cache"), per_device_train_batch_size=1)
    again = opened(elsewhere)
    again.tokenizer(["a", "b c"], padding=True, truncation=True, max_length=8)  # leaves its traces in it
    assert again.fingerprints == first and first.keys() == {"tokenizer", "train", "eval"}
    lines = Path(recipe(folder, kind).dataset_name[0]).with_suffix(".jsonl")
    lines = (lines if lines.exists() else folder / "a.jsonl").read_text().splitlines(keepends=True)
    source = tmp_path / "changed.jsonl"
    source.write_text("".join(lines[:-1]))
    if "shards" in kind:
        assert shard_data.run(str(source), tmp_path / "shards", str(folder / "tokenizer")) == 0
        source = tmp_path / "shards"
    changed = recipe(folder, kind, dataset_name=str(source), cache_dir=str(tmp_path / "cache"))
    other = opened(changed).fingerprints
    assert other["train"] != first["train"] and other["tokenizer"] == first["tokenizer"]


def test_workers_deliver_the_facts_too(folder):
    data = opened(recipe(folder))
    data.collate = MaskTokens(data.tokenizer, 0.15, 1)
    expected = list(data.loader(8, 80))
    names = "position", "epoch", "row", "source"
    columns = ([batch[name].tolist() for name in names] for batch in expected)
    order = [key for found in columns for key in zip(*found, strict=True)]
    loader = torch.utils.data.DataLoader(data.train, B, sampler=order, collate_fn=data.collate, num_workers=2)
    assert lists(loader) == lists(expected)
