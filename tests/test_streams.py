"""Streams: the same rows in the same order for any number of processes, resumed anywhere."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from data.packing import prepare_rows
from data.shards import open_shards
from data.sources import storage
from data.sources.corpus import Source, load_corpus
from data.streams import ShardSource, StreamingRows, TextSource
from data.tokenizer import load_tokenizer
from tests.shard_data import make_texts, run, save_tokenizer, write_jsonl

T = 32


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source with duplicates, its shards (seven for training, unequal), its tokenizer."""
    folder = tmp_path_factory.mktemp("streams")
    texts = make_texts(70)
    source = write_jsonl(folder / "texts.jsonl", texts[:40] + texts[:15] + texts[40:])
    tokenizer = save_tokenizer(folder / "tokenizer")
    assert run(source, folder / "shards", tokenizer, shard_mb=0.006) == 0
    return {"shards": str(folder / "shards"), "cache": str(folder / "cache"),
            "corpus": load_corpus(Source(source)), "tokenizer": load_tokenizer(tokenizer)}


def sources(made) -> dict:
    settings = {"block_size": T, "validation_fraction": 0.05, "shuffle_rows": 100}
    return {"shards": ShardSource(made["shards"]),
            "text": TextSource(made["corpus"], made["tokenizer"], **settings)}


def map_rows(made) -> np.ndarray:
    rows = open_shards(made["shards"], "train", cache_dir=made["cache"])
    return rows.__getitems__([(row, 0, row) for row in range(len(rows))])["input_ids"].numpy()


def read(rows: StreamingRows, batches: int) -> list[dict]:
    """The first batches of a loader, each as lists."""
    loader = DataLoader(rows, batch_size=rows.batch_size)
    first = itertools.islice(loader, batches)
    return [{name: value.tolist() for name, value in batch.items()} for batch in first]


def in_turn(per_process: list[list[dict]]) -> list[tuple]:
    """(epoch, row, ids) of all processes in the order of the stream, whose positions are in it."""
    rows, positions = [], []
    for batch in itertools.chain.from_iterable(zip(*per_process, strict=True)):
        rows += zip(batch["epoch"], batch["row"], batch["input_ids"], strict=True)
        positions += batch["position"]
    assert positions == list(range(len(rows)))
    return rows


@pytest.mark.parametrize("kind", ["shards", "text"])
def test_two_processes_see_every_row_once_per_epoch(made, kind):
    expected = map_rows(made)
    n, B = len(expected), 4
    source = sources(made)[kind]
    if kind == "shards":
        sizes = [shard["rows"] for shard in source.shards]
        assert len(sizes) == 7 and len(set(sizes)) > 1
    batches = 2 * n // (2 * B) + 2  # two whole epochs and a little of the third
    settings = {"batch_size": B, "seed": 1, "num_processes": 2}
    streams = [StreamingRows(source, process_index=p, **settings) for p in range(2)]
    seen = in_turn([read(stream, batches) for stream in streams])
    epochs = [[(row, ids) for e, row, ids in seen if e == epoch] for epoch in range(2)]
    for rows in epochs:
        assert sorted(row for row, _ in rows) == list(range(n))
        for row, ids in rows:
            assert ids == expected[row].tolist()
    assert [row for row, _ in epochs[0]] != sorted(row for row, _ in epochs[0])
    assert [row for row, _ in epochs[0]] != [row for row, _ in epochs[1]]
    alone = StreamingRows(source, batch_size=2 * B, seed=1)
    assert in_turn([read(alone, batches)]) == seen, "the order does not depend on processes"


def test_text_for_evaluation_gives_the_map_style_rows_in_order(made):
    rows = np.concatenate([rows for rows, _, _ in sources(made)["text"].blocks(64)])
    assert np.array_equal(rows, map_rows(made))


def test_shards_and_prepare_rows_make_the_same_rows(made):
    prepared = prepare_rows(made["corpus"], made["tokenizer"], block_size=T, validation_fraction=0.05, seed=0,
                            cache_dir=made["cache"])
    assert np.array_equal(prepared.train.rows, map_rows(made))
    held_out = open_shards(made["shards"], "validation", cache_dir=made["cache"])
    assert np.array_equal(prepared.splits["validation"].rows, held_out.rows)


@pytest.mark.parametrize("kind", ["shards", "text"])
def test_resumed_at_any_position_it_goes_on_as_if_uninterrupted(made, kind):
    source, B = sources(made)[kind], 4
    n = len(map_rows(made))
    whole = read(StreamingRows(source, batch_size=B, seed=3), 2 * n // B)
    for batches in (1, n // B - 1, n // B + 5):
        first = StreamingRows(source, batch_size=B, seed=3)
        assert read(first, batches) == whole[:batches]
        state = first.state_dict(batches * B)
        second = StreamingRows(source, batch_size=B, seed=3)
        second.load_state_dict(state)
        second.start = batches * B
        more = min(len(whole) - batches, 40)
        assert read(second, more) == whole[batches : batches + more]
        if kind == "text" and batches * B > 100:  # it began with the window, not at the beginning
            assert state["mark"][0] >= 100


def test_a_state_of_another_stream_is_refused(made):
    state = StreamingRows(sources(made)["text"], batch_size=1, seed=3).state_dict(0)
    for other in (StreamingRows(sources(made)["shards"], batch_size=1, seed=3),
                  StreamingRows(sources(made)["text"], batch_size=1, seed=4)):
        with pytest.raises(ValueError, match="not the one this checkpoint"):
            other.load_state_dict(state)


def unsteady(corpus, good: int, times: int):
    """The corpus, with a reader that breaks off after every `good` documents, `times` times."""
    left = [times]

    def rows():
        for i, document in enumerate(corpus.rows()):
            if left[0] and i and i % good == 0:
                left[0] -= 1
                raise ConnectionResetError("the source went away")
            yield document

    return replace(corpus, rows=rows)


def test_a_failing_source_is_read_on_and_one_that_stays_away_reported(made, monkeypatch, capfd):
    waits = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    settings = {"block_size": T, "validation_fraction": 0.05}
    failing = TextSource(unsteady(made["corpus"], 50, 5), made["tokenizer"], **settings)
    rows = list(StreamingRows(failing, batch_size=1, seed=0, stop=len(map_rows(made))))
    rows.sort(key=lambda row: row["row"])
    assert np.array_equal(torch.stack([row["input_ids"] for row in rows]).numpy(), map_rows(made))
    assert waits == [1, 2, 4, 8, 16], "the same document failed five times: exponential backoff"
    assert "the source went away" in capfd.readouterr().err
    gone = TextSource(unsteady(made["corpus"], 50, 10**6), made["tokenizer"], **settings)
    with pytest.raises(ConnectionError, match=r"texts.jsonl, item 50, failed 8 times in 127 s"):
        list(StreamingRows(gone, batch_size=1, seed=0, stop=1000))


def test_a_stream_without_a_row_is_reported(made, tmp_path):
    corpus = load_corpus(Source(write_jsonl(tmp_path / "one.jsonl", ["short"])))
    with pytest.raises(ValueError, match="gives no row of 32 tokens"):
        next(iter(StreamingRows(TextSource(corpus, made["tokenizer"], block_size=T), batch_size=1, seed=0)))
