"""Mixtures: which row each position takes is what the specification below says, row by row, on any number of
processes, whatever was killed; shares hold in every block; one source with the whole share is that one alone.
"""

import functools
import itertools
import json
import math
import os
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator
from transformers import PreTrainedTokenizerFast

from data.batches import Data
from data.masking import MaskTokens
from data.mixture import Mixture
from data.open import Recipe, open_sources, prepare
from data.rows import PackedRows
from data.streams import StreamedRows
from tests import forked, shard_data
from tests.runs import PROJECT, TINY, metrics, write_corpus
from utils.flags import parse_args
from utils.settings import changed_settings

T, B, SEED = 32, 50, 3
SHARES = (0.5, 0.3333, 0.1667)  # of the last two 333.3 and 166.7 rows of a block


# ---- The specification, written anew: one position at a time, nothing shared with data/


def mixed(x: int) -> int:
    """splitmix64's finalizer."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@functools.cache
def permutation(n: int, seed: int, epoch: int) -> list[int]:
    """Of range(n): a Feistel network of six rounds on the least even number of bits, walked to range(n)."""
    bits = max(1, -(-(n - 1).bit_length() // 2))
    key = (mixed(seed) + epoch) % 2**64
    keys = [mixed((key + 0x9E3779B97F4A7C15 * (i + 1)) % 2**64) for i in range(6)]

    def place(x: int) -> int:
        left, right = x >> bits, x % 2**bits
        for k in keys:
            left, right = right, left ^ mixed((right + k) % 2**64) % 2**bits
        x = left << bits | right
        return x if x < n else place(x)

    return [place(x) for x in range(n)]


def block_rows(shares, blocks: int = 1000) -> list[list[int]]:
    """Rows of each source in each block. Whole rows are everyone's; each left over goes to the source that,
    without it, would soonest be a whole row behind; if two would at once, to the one whose next row may
    then come at once and must come sooner; never to one that would be a whole row ahead."""
    exact = [Fraction(round(share * 10**6), 1000) for share in shares]
    whole, rest = [int(x) for x in exact], [x - int(x) for x in exact]
    extra, made, urgent = [0] * len(shares), [], []
    for part in rest:
        ends = [Fraction(row) / part for row in range(1, int(part * 1000) + 1)]  # in blocks
        urgent.append([(math.ceil(end), end == int(end)) for end in ends])
    for block in range(1, blocks + 1):
        rows = list(whole)
        ready = [i for i in range(len(shares)) if rest[i] and extra[i] < rest[i] * block]
        for i in sorted(ready, key=lambda i: urgent[i][extra[i] :])[: 1000 - sum(whole)]:
            rows[i] += 1
            extra[i] += 1
        made.append(rows)
    return made


def specified(shares, seed: int, end: int):
    """(source, use) of positions 0, ..., end - 1, of which there are less than a cycle."""
    counts, used = block_rows(shares, end // 1000), [0] * len(shares)
    for position in range(end):
        block, place = divmod(position, 1000)
        if place == 0:
            key = mixed(mixed(seed) + block)
            order = sorted(range(1000), key=lambda slot: mixed((key + slot) % 2**64))  # noqa: B023
            slots = [i for i, n in enumerate(counts[block]) for _ in range(n)]
        source = slots[order[place]]
        yield source, used[source]
        used[source] += 1


# ---- What it is compared with


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    texts = shard_data.make_texts(150)
    for name, found in {"a": texts[:60], "b": texts[60:110], "c": texts[110:]}.items():
        shard_data.write_jsonl(folder / f"{name}.jsonl", found)
    train_tokenizer = shard_data.train_tokenizer
    train_tokenizer(texts, "wordpiece", 400, "bert").save_pretrained(folder / "tokenizer")
    train_tokenizer(texts[:20], "wordpiece", 300, "bert").save_pretrained(folder / "other-tokenizer")
    for name, tokenizer in {"shards": "tokenizer", "other-shards": "other-tokenizer"}.items():
        assert shard_data.run(str(folder / "b.jsonl"), folder / name, str(folder / tokenizer)) == 0
    encode = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer").encode
    np.concatenate([encode(text) for text in texts[110:]]).astype(np.uint16).tofile(folder / "flat.bin")
    sentences = [" ".join(text.split()[:9]).capitalize() for text in texts]
    for i, name in enumerate(("pairs", "more-pairs")):
        documents = [". ".join(sentences[j : j + 8]) + "." for j in range(i, 140, 3)]
        shard_data.write_jsonl(folder / f"{name}.jsonl", documents)
    return folder


def recipe(folder, *names, mixture=SHARES, **changes) -> Recipe:
    settings = {
        "dataset_name": tuple(f"{folder}/{name}" for name in names or ("a.jsonl", "shards", "c.jsonl")),
        "mixture": mixture, "tokenizer_name": f"{folder}/tokenizer", "block_size": T, "seed": SEED,
        "validation_fraction": 0.1, "cache_dir": f"{folder}/cache", "max_eval_samples": 10,
        "per_device_train_batch_size": B, "per_device_eval_batch_size": 4,
    }  # fmt: skip
    return Recipe(**settings | changes)


def opened(found: Recipe, process: int = 0, processes: int = 1) -> Data:
    problems = []
    sources = open_sources(found, problems)
    assert not problems, problems
    place = {"num_processes": property(lambda _: processes), "process_index": property(lambda _: process),
             "local_process_index": property(lambda _: 0)}
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # each as on a machine of its own
    return prepare(sources, type("OneOfSeveral", (Accelerator,), place)(cpu=True))


def rows_of(batches) -> list[tuple]:
    """(position, source, epoch, row, ids) of each row."""
    names = "position", "source", "epoch", "row", "input_ids"
    columns = ([batch[name].tolist() for name in names] for batch in batches)
    return [row for found in columns for row in zip(*found, strict=True)]


def consumed(found: Recipe, end: int, kills: int) -> list[tuple]:
    """The rows of positions 0 to end - 1, in their order, by 1, 2 and 4 processes in turn, killed so often
    after any number of batches of each; what goes on knows a checkpoint's JSON alone."""
    rng, rows, state = random.Random(0), [], "null"
    stops = [4 * B * n for n in sorted(rng.sample(range(1, end // B // 4), kills))] + [end]
    for number, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        processes, shares = (1, 2, 4)[number % 3], []
        for process in range(processes):
            data = opened(found, process, processes)
            data.train.load_state_dict(json.loads(state))
            shares.append(list(itertools.islice(data.loader(start, end), (stop - start) // B // processes)))
            if process == 0:  # the main process saves
                saved = json.dumps(data.train.state_dict(stop))
        state = saved
        rows += rows_of(itertools.chain.from_iterable(zip(*shares, strict=True)))
    return rows


def flat_rows(path: str) -> list[list[int]]:
    """Rows of T of a file as nanoGPT writes them."""
    ids = np.fromfile(path, np.uint16)
    return ids[: len(ids) // T * T].reshape(-1, T).tolist()


def check_consumed(found: Recipe, end: int, kills: int = 20) -> Data:
    """Killed so often it is, row by row, what the specification says."""
    data, expected = opened(found), {}
    for i, (name, source) in enumerate(data.train.sources.items()):
        if found.streaming and name != "flat":  # position k of the stream of this source alone
            alone = StreamedRows(source.source, f"{found.cache_dir}/alone", 10**9)
            expected[i] = []
            for epoch, row in itertools.islice(alone.order_from(0, SEED), int(end * SHARES[i]) + 2):
                ids = alone.columns(np.array([row]), np.array([epoch]))["input_ids"][0]
                expected[i].append((epoch, row, ids.tolist()))
        else:
            ids = shard_data.all_ids(source).tolist() if name != "flat" else flat_rows(found.dataset_name[i])
            n = len(ids)
            uses = [divmod(k, n) for k in range(int(end * SHARES[i]) + 2)]
            rows = [(epoch, permutation(n, SEED, epoch)[at]) for epoch, at in uses]
            expected[i] = [(epoch, row, ids[row]) for epoch, row in rows]
    rows = consumed(found, end, kills)
    assert len(rows) == end
    for position, (row, (source, use)) in enumerate(zip(rows, specified(SHARES, SEED, end), strict=True)):
        assert row == (position, source, *expected[source][use]), position
    drawn = np.array([row[1] for row in rows]).reshape(-1, 1000)
    for i, share in enumerate(SHARES):
        counts = (drawn == i).sum(1)
        assert np.abs(counts - 1000 * share).max() < 1
        assert np.abs(counts.cumsum() - 1000 * share * np.arange(1, len(counts) + 1)).max() < 1
    return data


def test_100_000_positions_killed_20_times_on_1_2_and_4_processes_are_what_is_specified(folder):
    data = check_consumed(recipe(folder), 100_000)
    assert all(type(source) is PackedRows for source in data.train.sources.values())


STREAMS = "a.jsonl", "shards", "flat.bin"  # streamed text, streamed shards, a mapped file


def test_streams_of_text_and_shards_and_a_file_killed_8_times_are_what_is_specified(folder):
    evaluated = (f"{folder}/c.jsonl",)
    check_consumed(recipe(folder, *STREAMS, streaming=True, eval_dataset_name=evaluated), 6_000, kills=8)


@pytest.mark.sweep
def test_100_000_positions_of_streams_killed_20_times_are_what_is_specified(folder):
    evaluated = (f"{folder}/c.jsonl",)
    check_consumed(recipe(folder, *STREAMS, streaming=True, eval_dataset_name=evaluated), 100_000)


def test_every_block_and_all_blocks_together_are_within_one_row_of_any_shares():
    rng = random.Random(1)
    for sources in range(1, 9):
        draws = [rng.random() ** rng.choice([1, 5]) for _ in range(sources)]
        mixture = Mixture([draw / sum(draws) for draw in draws], 0)
        exact = mixture.millionths / 1000
        assert mixture.millionths.sum() == 10**6
        assert np.abs(mixture.millionths / 10**6 - np.array(draws) / sum(draws)).max() < sources * 1e-6
        rows = np.diff(mixture.given, axis=0)
        assert (rows.sum(1) == 1000).all() and np.abs(rows - exact).max() < 1
        assert np.abs(mixture.given - np.outer(np.arange(1001), exact)).max() < 1
        if sources in (3, 6):
            assert rows.tolist() == block_rows(mixture.millionths / 10**6)
        for position in (0, 1, 999, 54_321, 10**6 + 1, 10**12 + 7):
            before = mixture.before(position)
            assert before.sum() == position
            source = mixture.window(position // 1000)[position % 1000]
            assert mixture.position(source, before[source]) == position


# ---- One source with all of the share


@pytest.mark.parametrize("kind", ["rows", "pairs", "stream"])
def test_all_of_the_share_is_that_source_alone(folder, kind):
    names = ("pairs.jsonl", "more-pairs.jsonl") if kind == "pairs" else ("a.jsonl", "shards")
    more = {"next_sentence": kind == "pairs", "streaming": kind == "stream"}
    alone, found = opened(recipe(folder, names[0], mixture=(), **more)), {}
    for shares, order in (((1.0, 0.0), names), ((0.0, 1.0), names[::-1])):
        data = found[shares] = opened(recipe(folder, *order, mixture=shares, **more))
        assert data.length == alone.length
        for mine, batch in zip(data.loader(0, 6 * B), alone.loader(0, 6 * B), strict=True):
            assert batch.keys() == mine.keys()
            assert set(mine["source"].tolist()) == {shares.index(1.0)} and not batch["source"].any()
            assert all(mine[name].equal(batch[name]) for name in batch.keys() - {"source"})


def test_pairs_and_masks_of_several_sources(folder):
    data = opened(recipe(folder, "pairs.jsonl", "more-pairs.jsonl", mixture=(0.7, 0.3), next_sentence=True))
    data.collate = MaskTokens(data.tokenizer, 0.15, 1)
    batches = list(data.loader(0, 4 * B))
    assert {"source", "slots", "next_sentence_label", "token_type_ids"} <= batches[0].keys()
    sources = list(data.train.sources.values())
    for batch in batches:
        columns = (batch[name].tolist() for name in ("source", "row", "next_sentence_label"))
        for source, row, label in zip(*columns, strict=True):
            assert sources[source].spans[row, 2] == label


# ---- What is opened, prepared, told


def problems_of(found: Recipe) -> list[str]:
    problems = []
    open_sources(found, problems)
    return problems


def test_every_mistake_is_a_line(folder):
    two = ("a.jsonl", "c.jsonl")
    for shares, line in {
        (): "mixture: 0 shares for 2 data sets; give one each: --mixture 0.6 0.4",
        (0.5, 0.2, 0.3): "mixture: 3 shares for 2 data sets",
        (1.5, -0.5): "mixture: 1.5 is not a share; give 0, or 0.000001 to 1.",
        (0.6, 0.6): "mixture: the shares sum to 1.2, not to 1.",
        (float("nan"), 1.0): "mixture: nan is not a share",
        (1.0, 1e-9): "mixture: 1e-09 is not a share",
    }.items():
        assert problems_of(recipe(folder, *two, mixture=shares))[0].startswith(line)
    assert len(problems_of(recipe(folder, *two, mixture=(1.5, -0.5)))) == 2
    assert not problems_of(recipe(folder, "a.jsonl", mixture=(1.0,)))
    assert not problems_of(recipe(folder, mixture=(1 / 3, 1 / 3, 1 / 3)))
    (line,) = problems_of(recipe(folder, text_column=("text", "none")))
    assert line == "text_column: 2 for 3 data sets; give one, or one each."
    (line,) = problems_of(recipe(folder, "a.jsonl", "shards", "other-shards"))
    assert line.startswith(f"tokenizer_name: not the tokenizer that made {folder}/other-shards")


def test_each_source_is_prepared_as_if_it_were_alone_and_evaluated_under_its_name(folder, tmp_path):
    cache = str(tmp_path)
    alone = {name: opened(recipe(folder, name, mixture=(), cache_dir=cache))
             for name in ("a.jsonl", "shards", "c.jsonl")}  # fmt: skip
    made = sorted(Path(cache).iterdir())
    data = opened(recipe(folder, cache_dir=cache))
    assert sorted(Path(cache).iterdir()) == made, "nothing was prepared again"
    assert list(data.evals) == list(data.train.sources) == ["a", "shards", "c"]
    for found, other in zip(data.train.sources, alone.values(), strict=True):
        assert data.train.sources[found].fingerprint == other.train.fingerprint
        assert data.evals[found].fingerprint == other.evals[""].fingerprint
    parts = zip((500_000, 333_300, 166_700), alone.values(), strict=True)
    expected = [[part, other.train.fingerprint] for part, other in parts]
    assert data.fingerprints["train"] == dict(zip(("a", "shards", "c"), expected, strict=True))
    # A run resumes with the rows in the cache, whatever became of the text.
    names = {"mixture": (0.6, 0.4), "cache_dir": cache}
    data = opened(recipe(folder, "a.jsonl", "c.jsonl", **names))
    elsewhere = {"tokenizer_name": "/gone", "output_dir": f"{folder}/tokenizer"}
    gone = recipe("/gone", "a.jsonl", "c.jsonl", **names, **elsewhere)
    saved = json.loads(json.dumps(data.fingerprints)) | {"dataset_name": [*gone.dataset_name]}
    gone = replace(gone, saved=saved)
    assert rows_of(opened(gone).loader(0, 3 * B)) == rows_of(data.loader(0, 3 * B))
    assert any("/gone" in line for line in problems_of(replace(gone, dataset_name="/gone/a", mixture=())))


def test_streams_share_their_room_and_sources_without_a_share_are_not_copied(folder, tmp_path, monkeypatch):
    streams = opened(recipe(folder, "a.jsonl", "shards", mixture=(0.5, 0.5), streaming=True, stream_gb=1.0))
    assert [rows.max_bytes for rows in streams.train.sources.values()] == [5 * 10**8] * 2
    names, evaluated = ("a.jsonl", "shards"), {"eval_dataset_name": (f"{folder}/c.jsonl",)}
    before = opened(recipe(folder, *names, mixture=(0.9, 0.1), cache_dir=str(tmp_path / "a"), **evaluated))
    data = opened(recipe(folder, *names, mixture=(1.0, 0.0), cache_dir=str(tmp_path / "b"), **evaluated))
    assert [*tmp_path.glob("a/verified-*")] and not [*tmp_path.glob("b/verified-*")]
    prints = (found.train.fingerprint["shards"][1] for found in (before, data))
    assert len({*prints}) == 1 and data.train.epochs(50)["shards"] == 0


def test_what_is_evaluated_on_is_left_out_of_every_source(folder):
    shard_data.write_jsonl(folder / "held-out.jsonl", shard_data.make_texts(150)[50:60] +
                           shard_data.make_texts(150)[110:120])  # of a and of c
    names = (f"{folder}/held-out.jsonl",)
    data = opened(recipe(folder, "a.jsonl", "c.jsonl", mixture=(0.5, 0.5), eval_dataset_name=names))
    assert list(data.evals) == [""]
    for name, texts in (("a", shard_data.make_texts(150)[:50]), ("c", shard_data.make_texts(150)[120:])):
        rest = shard_data.write_jsonl(folder / "rest.jsonl", texts)
        other = opened(recipe("", rest.lstrip("/"), mixture=(), tokenizer_name=f"{folder}/tokenizer",
                              cache_dir=f"{folder}/cache", eval_dataset_name=(f"{folder}/shards",)))
        both = data.train.sources[name], other.train.sources[""]
        assert np.array_equal(*map(shard_data.all_ids, both))


def whole_in(rows, tokenizer, texts) -> list[str]:
    """Which of these texts stand whole in the rows."""
    stream = " ".join(tokenizer.convert_ids_to_tokens(shard_data.all_ids(rows).ravel().tolist()))
    return [text for text in texts if " ".join(tokenizer.tokenize(text)) in stream]


def test_keywords_of_one_source_do_not_hide_what_another_must_leave_out(folder, tmp_path):
    """With a warm cache of other keywords: b's validation documents stand in a, too."""
    made = enumerate(shard_data.make_texts(60, words=20))
    texts = [f"{'guide' if i % 2 else 'story'} {text}" for i, text in made]
    for name, found in {"a/train": texts, "b/train": texts[:5], "b/validation": texts[20:60]}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shard_data.write_jsonl(tmp_path / f"{name}.jsonl", found)
    names = f"{tmp_path}/a".lstrip("/"), f"{tmp_path}/b".lstrip("/")
    for keywords, evaluated in ((("b=guide",), texts[21:60:2]), ((), texts[20:60])):
        data = opened(recipe("", *names, mixture=(0.5, 0.5), keywords=keywords, cache_dir=f"{tmp_path}/c",
                             tokenizer_name=f"{folder}/tokenizer"))
        assert not whole_in(data.train.sources["a"], data.tokenizer, evaluated), keywords


def test_what_a_small_source_holds_out_no_other_one_trains_on(folder, tmp_path):
    """Twelve documents of which more are held out than the fraction says, and 2,000 with these among them."""
    few = shard_data.make_texts(12, seed=5, words=30)
    many = shard_data.make_texts(2000, seed=6, words=30)
    for name, found in {"few": few, "many": many[:1000] + few + many[1000:]}.items():
        shard_data.write_jsonl(tmp_path / f"{name}.jsonl", found)
    names = f"{tmp_path}/few.jsonl".lstrip("/"), f"{tmp_path}/many.jsonl".lstrip("/")
    data = opened(recipe("", *names, mixture=(0.5, 0.5), validation_fraction=0.03, block_size=256,
                         tokenizer_name=f"{folder}/tokenizer", cache_dir=f"{tmp_path}/c"))
    held_out, trained = (whole_in(rows, data.tokenizer, few)
                         for rows in (data.evals["few"], data.train.sources["many"]))  # fmt: skip
    assert held_out and trained and not {*held_out} & {*trained}


def test_what_is_held_out_is_not_trained_on_by_a_source_that_brings_its_validation(folder, tmp_path):
    texts = shard_data.make_texts(120, seed=7, words=30)
    for name, found in {"a": texts[:80], "b/train": texts[40:], "b/validation": texts[100:110]}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shard_data.write_jsonl(tmp_path / f"{name}.jsonl", found)
    names = f"{tmp_path}/a.jsonl".lstrip("/"), f"{tmp_path}/b".lstrip("/")
    data = opened(recipe("", *names, mixture=(0.5, 0.5), tokenizer_name=f"{folder}/tokenizer",
                         cache_dir=f"{tmp_path}/c"))
    held_out, trained = (whole_in(rows, data.tokenizer, texts[40:80])
                         for rows in (data.evals["a"], data.train.sources["b"]))  # fmt: skip
    assert held_out and trained and not {*held_out} & {*trained}
    assert not whole_in(data.train.sources["a"], data.tokenizer, held_out)


def test_text_columns_and_keywords_of_each_source(folder):
    lines = [json.loads(line) for line in (folder / "c.jsonl").read_text().splitlines()]
    with open(folder / "d.jsonl", "w") as file:
        file.writelines(json.dumps({"body": line["text"]}) + "\n" for line in lines)
    names, kept = ("a.jsonl", "d.jsonl"), ("1", "d=9", "d=7")  # texts begin with their number
    data = opened(recipe(folder, *names, mixture=(0.5, 0.5), text_column=("none", "body"), keywords=kept))
    for name, column, words in (("a.jsonl", (), ("1",)), ("d.jsonl", ("body",), ("9", "7"))):
        alone = opened(recipe(folder, name, mixture=(), text_column=column, keywords=words))
        assert data.train.sources[name[0]].fingerprint == alone.train.fingerprint
    columns = ("text", "body")
    data = opened(recipe(folder, *names, mixture=(0.5, 0.5), text_column=columns, keywords=("1", "d=")))
    none = recipe(folder, "a.jsonl", mixture=(), text_column="none", eval_dataset_name=f"{folder}/c.jsonl")
    assert opened(none).fingerprints == opened(replace(none, text_column=())).fingerprints
    alone = opened(recipe(folder, "d.jsonl", mixture=(), text_column=("body",)))
    assert data.train.sources["d"].fingerprint == alone.train.fingerprint


def test_a_source_with_keywords_of_its_own_and_an_evaluation_set_of_its_name(folder, tmp_path):
    for name in ("a", "b"):
        shard_data.write_jsonl(tmp_path / f"{name}.jsonl", shard_data.make_texts(90)[60:])
    evals = tuple(f"{tmp_path}/{name}.jsonl" for name in "ab")
    data = opened(recipe(folder, "a.jsonl", "c.jsonl", mixture=(0.5, 0.5), keywords=("a=1",),
                         eval_dataset_name=evals))
    assert [*data.evals] == ["a", "b"] and data.evals["a"].fingerprint == data.evals["b"].fingerprint


def test_a_tokenizer_is_trained_on_the_shares(folder, tmp_path):
    def vocabulary(*names, mixture):
        found = recipe(folder, *names, mixture=mixture, tokenizer_name=None, vocab_size=300)
        return set(opened(replace(found, cache_dir=str(tmp_path))).tokenizer.get_vocab())

    other = "\n".join(chr(0x410 + i % 32) * 3 for i in range(40))
    shard_data.write_jsonl(folder / "russian.jsonl", [f"{i} {other * 4}" for i in range(20)])
    a = vocabulary("a.jsonl", mixture=())
    made = sorted(tmp_path.glob("tokenizer-*"))
    assert vocabulary("a.jsonl", "russian.jsonl", mixture=(1.0, 0.0)) == a
    assert sorted(tmp_path.glob("tokenizer-*")) == made, "the one that a alone has"
    both = vocabulary("a.jsonl", "russian.jsonl", mixture=(0.5, 0.5))
    assert both != a and both != vocabulary("russian.jsonl", mixture=())


def test_an_epoch_ends_where_the_first_source_begins_to_repeat_and_epochs_are_told(folder):
    data = opened(recipe(folder))
    rows = rows_of(data.loader(0, 40 * B))
    assert data.length == next(position for position, _, epoch, *_ in rows if epoch)
    for end in (1, data.length, data.length + 1, 40 * B):
        for i, (name, source) in enumerate(data.train.sources.items()):
            uses = sum(row[1] == i for row in rows[:end])
            assert data.train.epochs(end)[name] == uses / len(source)
    streamed = opened(recipe(folder, streaming=True))
    assert streamed.length is None
    for batches in (4, 40):
        read = rows_of(itertools.islice(streamed.loader(0, 40 * B), batches))
        last = {name: max(row[2] for row in read if row[1] == i) for i, name in ((0, "a"), (2, "c"))}
        told = streamed.train.epochs(batches * B)
        assert {name: told[name] for name in last} == last
        assert told["shards"] == sum(row[1] == 1 for row in read) / streamed.train.sources["shards"].n_rows
    assert opened(recipe(folder, "a.jsonl", mixture=())).train.epochs(5) == {}


def test_a_run_of_before_with_one_name_goes_on(tmp_path):
    import train_clm

    words = ["--dataset_name", "x.jsonl", "--text_column", "body"]
    now = parse_args(train_clm.TrainArgs, train_clm.PRESETS, words)
    was = {"dataset_name": "x.jsonl", "dataset_config_name": None, "text_column": "body"}
    assert changed_settings(was, now) == []
    line = "dataset_name: y.jsonl in the run, x.jsonl now"
    assert line in changed_settings(was | {"dataset_name": "y.jsonl"}, now)


# ---- Real runs


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """Flags of small runs on real source code and made-up words; batches are over before the words repeat."""
    write_corpus(folder / "code.jsonl", 40)
    flags = TINY | {
        "dataset_name": [f"{folder}/code.jsonl", f"{folder}/shards"], "mixture": [0.2, 0.8],
        "tokenizer_name": f"{folder}/tokenizer", "cache_dir": f"{folder}/cache", "prompts": "none",
        "keytokens": "none", "max_train_steps": 30, "save_steps": 3, "eval_steps": 15, "logging_steps": 2,
        "save_total_limit": 100, "per_device_train_batch_size": 16,
    }  # fmt: skip
    return flags, tmp_path_factory.mktemp("runs")


def check_killed(flags: dict, folder: Path, processes: int, kills: int) -> list[dict]:
    """metrics.jsonl of a run that is killed so often while it trains, the same as that of one left alone."""
    whole, log, script = folder / "whole", folder / "log", "train_clm.py"
    unbroken, broken = (flags | {"output_dir": folder / name} for name in ("whole", "broken"))
    forked.finish(forked.start_all(PROJECT, script, unbroken, log, processes), log)
    for step in range(3, 3 + 9 * kills, 9):  # killed when this checkpoint is there, or a later one
        group = forked.start_all(PROJECT, script, broken, log, processes)
        wanted = [folder / f"broken/checkpoints/step-{n:08d}" for n in (step, step + 3, step + 6)]
        while not any(found.exists() for found in wanted) and group[0].is_alive():
            group[0].join(0.01)
        for process in group:
            process.kill()
        for process in group:
            process.join()
        assert group[0].exitcode == -9, log.read_text()[-3000:]
    forked.finish(forked.start_all(PROJECT, script, broken, log, processes), log)
    assert metrics(folder / "broken") == metrics(whole)
    last = "checkpoints/step-00000030/model.safetensors"
    assert (folder / "broken" / last).read_bytes() == (whole / last).read_bytes()
    return metrics(whole)


def test_a_killed_run_goes_on_bit_for_bit_and_tells_of_each_source(runs, tmp_path):
    lines = check_killed(runs[0], tmp_path, 1, kills=2)
    losses = [line for line in lines if "loss/eval/code" in line]
    assert len(losses) == 3 and all("loss/eval/shards" in line for line in losses)
    train = [line for line in lines if "loss/train" in line]
    repeats = {line["source"]: line["step"] for line in lines if line.get("event") == "repeats"}
    assert set(repeats) == {"shards"} and (tmp_path / "log").read_text().count("first epoch done") >= 1
    for line in train:
        assert (line["epoch/shards"] >= 1) == (line["step"] >= repeats["shards"])
        assert 0 < line["epoch/code"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("processes, streaming", [(1, True), (2, False), (2, True)])
def test_a_killed_run_of_two_processes_or_of_streams_is_the_same(runs, tmp_path, processes, streaming):
    lines = check_killed(runs[0] | {"streaming": streaming}, tmp_path, processes, kills=3)
    assert any(line.get("event") == "repeats" for line in lines)


def test_all_of_the_share_is_the_run_of_that_source_to_the_last_digit(runs, tmp_path):
    flags = runs[0] | {"max_train_steps": 6, "save_steps": 6}
    found, names = [], ("step", "epoch", "loss/train", "grad_norm")
    for number, changes in enumerate([
        {"dataset_name": flags["dataset_name"][0], "mixture": 1.0}, {"mixture": [1.0, 0.0]},
    ]):  # fmt: skip
        done = forked.run("train_clm.py", flags | changes | {"output_dir": tmp_path / str(number)})
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [line for line in metrics(tmp_path / str(number)) if "loss/train" in line]
        found.append([[line[name] for name in names] for line in lines])
    assert found[0] == found[1] and len(found[0]) == 3
    assert (tmp_path / "0/model.safetensors").read_bytes() == (tmp_path / "1/model.safetensors").read_bytes()
