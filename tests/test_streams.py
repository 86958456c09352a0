"""Streams: the same rows in the same order for any number of processes, resumed anywhere; each document is
tokenized once for all processes of a machine, and the ring on the disk stays within its bound.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from data.encode import Encoder
from data.groups import StreamPosition, shard_groups, text_groups
from data.mixture import MixedOrder, MixedRows, Mixture
from data.preparation import TokenMaker
from data.shards import open_shards, read_manifest
from data.sources.corpus import Source, load_corpus
from data.streams import StreamedRows
from data.text import prepare_rows
from data.tokenizer import load_tokenizer
from tests.runs import PROJECT
from tests.shard_data import all_ids, make_texts, run, save_tokenizer, write_jsonl
from utils.io import retry

T, GROUP = 32, 100


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source with duplicates, its shards, its tokenizer."""
    folder = tmp_path_factory.mktemp("streams")
    texts = make_texts(70)
    source = write_jsonl(folder / "texts.jsonl", texts[:40] + texts[:15] + texts[40:])
    tokenizer = save_tokenizer(folder / "tokenizer")
    assert run(source, folder / "shards", tokenizer, shard_mb=0.006) == 0
    return {"shards": str(folder / "shards"), "cache": str(folder / "cache"),
            "corpus": load_corpus(Source(source)), "tokenizer": load_tokenizer(tokenizer)}


def sources(made) -> dict:
    files = read_manifest(made["shards"])["splits"]["train"]["files"]
    return {"shards": shard_groups(made["shards"], files, T, GROUP), "text": text_of(made, made["corpus"])}


def text_of(made, corpus, size: int = GROUP):
    return text_groups(corpus, Encoder.of(made["tokenizer"]), T, size, (0, 0.05))


def map_rows(made) -> np.ndarray:
    return all_ids(open_shards(made["shards"], made["cache"]).rows("train", T))


class Reader:
    """Batches of B rows of positions from `start` on, as process p of P is fed them."""

    def __init__(self, made, source, seed, max_bytes=10**9, machine=(0, 1)):
        self.rows = StreamedRows(source, made["cache"], max_bytes, *machine)
        self.mixed = MixedRows(Mixture((1.0,), seed), {"": self.rows})

    def read(self, start: int, stop: int, B: int = 4, process: int = 0, processes: int = 1) -> list[tuple]:
        """(position, epoch, row, ids) of each."""
        found, order = [], iter(MixedOrder(self.mixed, start, stop))
        for number in itertools.count():
            keys = [*itertools.islice(order, B)]
            if not keys:
                return found
            if number % processes == process:
                batch = self.mixed.__getitems__(keys)
                self.mixed.release()
                columns = (batch[name].tolist() for name in ("position", "epoch", "row", "input_ids"))
                found += zip(*columns, strict=True)


@pytest.mark.parametrize("kind", ["shards", "text"])
def test_every_row_comes_once_per_epoch_and_is_the_prepared_one(made, kind):
    expected, source = map_rows(made), sources(made)[kind]
    n = len(expected)
    seen = Reader(made, source, 1).read(0, 2 * n + 7)
    assert [position for position, *_ in seen] == [*range(2 * n + 7)]
    epochs = [[(row, ids) for _, e, row, ids in seen if e == epoch] for epoch in range(2)]
    for rows in epochs:
        assert sorted(row for row, _ in rows) == list(range(n))
        assert all(ids == expected[row].tolist() for row, ids in rows)
    order = [[row for row, _ in rows] for rows in epochs]
    assert order[0] != sorted(order[0]) and order[0] != order[1]
    assert sorted(order[0][:GROUP]) == [*range(GROUP)], "shuffled within a group"
    assert Reader(made, source, 2).read(0, n) != seen[:n]


@pytest.mark.parametrize("keep_duplicates", [False, True])
def test_a_stream_has_the_rows_of_a_preparation(made, keep_duplicates, tmp_path):
    corpus = load_corpus(replace(made["corpus"].source, keep_duplicates=keep_duplicates))
    prepared = prepare_rows(corpus, TokenMaker(made["tokenizer"]), block_size=T, validation_fraction=0.05,
                            seed=0, cache_dir=tmp_path)
    groups = text_of(made, corpus, 64)
    streamed = np.concatenate([rows for rows, *_ in groups.rows_from(0, 0)])
    assert np.array_equal(streamed, all_ids(prepared.train))
    assert keep_duplicates or np.array_equal(all_ids(prepared.train), map_rows(made))


def test_two_processes_share_one_producer_and_see_together_what_one_sees(made, monkeypatch):
    alone = Reader(made, sources(made)["text"], 1).read(0, 400)
    monkeypatch.setattr("data.streams._ring_name", lambda *machine: "both")
    both, found = [], []
    for process in range(2):
        both.append(Reader(made, sources(made)["text"], 1, machine=(process, 2)))
        both[-1].rows._start(0)
    for process, reader in enumerate(both):
        found += reader.read(0, 400, process=process, processes=2)
    assert sorted(found) == alone and both[1].rows.producer is None


@pytest.mark.parametrize("kind", ["shards", "text"])
def test_resumed_at_any_position_it_is_as_if_uninterrupted(made, kind):
    source, n = sources(made)[kind], len(map_rows(made))
    whole = Reader(made, source, 3).read(0, 2 * n)
    for position in (4, 99, 100, n - 1, n + 20):
        first = Reader(made, source, 3)
        assert first.read(0, position) == whole[:position]
        state = json.loads(json.dumps(first.mixed.state_dict(position)))
        second = Reader(made, source, 3)
        second.mixed.load_state_dict(state)
        stop = min(2 * n, position + 150)
        assert second.read(position, stop) == whole[position:stop]
        assert position <= GROUP or second.rows.begun.first >= GROUP, "it began with the group"


def test_a_state_of_another_stream_is_refused(made):
    state = Reader(made, sources(made)["text"], 3).mixed.state_dict(0)
    for other in (Reader(made, sources(made)["shards"], 3), Reader(made, sources(made)["text"], 4)):
        with pytest.raises(ValueError, match="not the one this checkpoint"):
            other.mixed.load_state_dict(state)


def test_the_ring_stays_within_its_bound_and_goes_with_the_reader(made):
    most = 3 * GROUP * T * 2
    reader = Reader(made, sources(made)["text"], 0, most)
    order = iter(MixedOrder(reader.mixed, 0, 10**6))
    largest = 0
    for _ in range(300):
        reader.mixed.__getitems__([*itertools.islice(order, 4)])
        reader.mixed.release()
        folder = reader.rows.folder
        with contextlib.suppress(FileNotFoundError):  # deleted while we look
            largest = max(largest, sum(file.stat().st_size for file in folder.glob("*-*")))
    assert GROUP * T * 2 < largest <= most
    process = reader.rows.producer
    reader.rows.close()
    assert not folder.exists() and process.poll() is not None


def test_an_order_that_begins_again_before_anything_was_given_back_reads_nothing_again(made):
    """As the rehearsal does, and then the loop."""
    reader = Reader(made, sources(made)["text"], 0)
    order = iter(MixedOrder(reader.mixed, 0, 400))
    first = reader.mixed.__getitems__([*itertools.islice(order, 4)])["input_ids"]
    producer = reader.rows.producer
    assert [ids for *_, ids in reader.read(0, 4)] == first.tolist() and reader.rows.producer is producer


@pytest.mark.parametrize("how", ["killed", "full disk"])
def test_a_producer_that_dies_ends_the_run_with_its_message(made, how, tmp_path):
    reader = Reader(made, sources(made)["text"], 0, 4 * GROUP * T * 2)
    order = iter(MixedOrder(reader.mixed, 0, 10**6))
    reader.mixed.__getitems__([*itertools.islice(order, 4)])
    if how == "killed":
        reader.rows.producer.kill()
    else:
        (reader.rows.folder / "failed.json").write_text(json.dumps(
            {"error": "OSError", "errno": 28, "message": "No space left on device"}))
    with pytest.raises(ConnectionError if how == "killed" else OSError) as raised:
        for _ in range(500):
            reader.mixed.__getitems__([*itertools.islice(order, 4)])
    told = "texts.jsonl ahead is gone .*-9" if how == "killed" else "No space left on device"
    assert raised.match(told)


def test_the_producer_writes_what_ends_it(made, tmp_path):
    """A mistake of the user's, and a disk that is full."""
    short = load_corpus(Source(write_jsonl(tmp_path / "one.jsonl", ["short"])))
    with pytest.raises(ValueError, match="gives no row of 32 tokens"):
        Reader(made, text_groups(short, Encoder.of(made["tokenizer"]), T, GROUP), 0).read(0, 4)
    (tmp_path / "small").mkdir()
    for size, kilobytes in ((GROUP, 64), (10**5, 20)):  # then the first group is larger than the disk
        if os.system(f"mount -t tmpfs -o size={kilobytes}k tmpfs {tmp_path}/small 2>/dev/null"):
            pytest.skip("mounting a small tmpfs needs root")
        try:
            reader = Reader(made | {"cache": f"{tmp_path}/small"}, text_of(made, made["corpus"], size), 0)
            with pytest.raises(OSError, match="No space left"):
                reader.read(0, 10**5)
            reader.rows.close()
        finally:
            os.system(f"umount {tmp_path}/small")


def test_the_producer_loads_no_torch():
    """Half a second and 200 MB of each machine."""
    code = "import sys, data.streams; print({'torch', 'transformers', 'datasets'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_ring_of_a_killed_run_goes_with_the_next_one(made):
    reader = Reader(made, sources(made)["text"], 0)
    left = reader.rows.cache_dir / "stream-left.tmp"
    left.mkdir(parents=True)
    (reader.rows.cache_dir / "stream-left.lock").touch()
    reader.read(0, 4)
    assert not left.exists() and reader.rows.folder.exists()


def unsteady(corpus, good: int, times: int):
    """The corpus, with a reader that breaks off after every `good` documents, `times` times."""
    left = [times]

    def rows():
        for i, document in enumerate(corpus):
            if left[0] and i and i % good == 0:
                left[0] -= 1
                raise ConnectionResetError("the source went away")
            yield document

    return replace(corpus, readers=[rows])


def test_a_failing_source_is_read_on_and_one_that_stays_away_reported(made, monkeypatch, capfd):
    waits = []
    monkeypatch.setattr(retry.time, "sleep", waits.append)
    failing = text_of(made, unsteady(made["corpus"], 50, 5))
    rows = np.concatenate([rows for rows, *_ in failing.rows_from(0, 0)])
    assert np.array_equal(rows, map_rows(made))
    assert waits == [1, 2, 4, 8, 16], "the same document failed five times: exponential backoff"
    assert "the source went away" in capfd.readouterr().err
    gone = text_of(made, unsteady(made["corpus"], 50, 10**6))
    with pytest.raises(ConnectionError, match=r"texts.jsonl, item 50, failed 8 times in 127 s"):
        list(gone.rows_from(0, 0))


def test_groups_from_a_mark_are_those_of_the_whole_stream(made):
    for source in sources(made).values():
        whole = [*itertools.islice(source.groups_from(StreamPosition()), 20)]
        for number in (1, 7, 13):
            mark = whole[number][0]
            for (a, rows), (b, others) in zip(whole[number:], source.groups_from(mark), strict=False):
                assert a == b and np.array_equal(rows, others)
