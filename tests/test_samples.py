"""A sample of a source: its first rows (max_train_samples), or a part as the datasets library spells it."""

import itertools
from dataclasses import replace
from functools import partial

import datasets
import numpy as np
import pytest
from accelerate import Accelerator

import train_clm
import train_mlm
from data import open as opening
from data.filters import drawn_place, in_validation
from data.open import Recipe, open_sources, prepare, short_names
from data.preparation import TokenMaker
from data.sources import files
from data.sources.corpus import Corpus, Source, evaluation_source, load_corpus
from data.streams import StreamedRows
from data.text import FEW, prepare_rows, share_to_hold_out, trained_tokenizer
from data.tokenizer import load_tokenizer
from tests import shard_data
from utils.settings import common_problems

T = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    texts = shard_data.make_texts(900)
    shard_data.write_jsonl(folder / "a.jsonl", texts)
    (folder / "splits").mkdir()
    for name, found in {"train": texts[:400], "validation": texts[400:430], "test": texts[430:450]}.items():
        shard_data.write_jsonl(folder / "splits" / f"{name}.jsonl", found)
    shard_data.save_tokenizer(folder / "tokenizer")
    done = shard_data.run(str(folder / "a.jsonl"), folder / "shards", str(folder / "tokenizer"))
    assert done == 0
    return folder


class Counted:
    """The rows of a corpus, and how many of them were read."""

    def __init__(self, corpus: Corpus):
        [self.rows], self.read = corpus.readers, 0
        self.corpus = replace(corpus, readers=[self])

    def __call__(self):
        for row in self.rows():
            self.read += 1
            yield row


def test_the_first_rows_are_prepared_and_little_more_is_read(folder, tmp_path):
    corpus = load_corpus(Source(f"{folder}/a.jsonl"))
    maker = TokenMaker(load_tokenizer(folder / "tokenizer"))
    make = partial(prepare_rows, block_size=T, seed=3, cache_dir=tmp_path, validation_fraction=0.1)
    whole, counted = make(corpus, maker), Counted(corpus)
    sample = make(counted.corpus, maker, max_rows=100)
    assert len(sample.train) == 100 and len(whole.train) > 1000
    assert np.array_equal(shard_data.all_ids(sample.train), shard_data.all_ids(whole.train)[:100])
    account = sample.accounting["train"]
    assert account["read"] <= counted.read < 150  # of 900; 16 Ki characters at a time are about 40 of them
    assert account["tokens"] >= 100 * T
    first, all_of_it = (shard_data.all_ids(made.splits["validation"]) for made in (sample, whole))
    assert np.array_equal(first, all_of_it[: len(first)])
    more = make(corpus, maker, max_rows=10**6)
    assert np.array_equal(shard_data.all_ids(more.train), shard_data.all_ids(whole.train))
    assert make(corpus, maker).folder == whole.folder


@pytest.mark.parametrize("first", [1, 400])  # texts in the first document, which alone may be the sample
@pytest.mark.parametrize("documents, rows", [(2, 0), (3, 0), (12, 0), (12, 20)])
def test_of_few_documents_about_as_few_as_fill_a_row_are_held_out(folder, first, documents, rows, tmp_path):
    texts = shard_data.make_texts(900)
    texts = ["\n".join(texts[:first]), *("\n".join(texts[i : i + 30]) for i in range(400, 820, 30))]
    shard_data.write_jsonl(tmp_path / "a.jsonl", texts[:documents])
    maker = TokenMaker(load_tokenizer(folder / "tokenizer"))
    for seed in range(4):
        corpus = load_corpus(Source(f"{tmp_path}/a.jsonl"))
        share = share_to_hold_out(corpus, seed, 1e-6, T, rows)
        made = prepare_rows(corpus, maker, block_size=T, seed=seed, validation_fraction=share,
                            cache_dir=tmp_path, max_rows=rows)
        account = made.accounting["train"]
        assert len(made.splits["validation"]) > 0 and account["kept"] > 0
        assert len(made.train) == rows if rows else account["validation"] == 1


@pytest.mark.parametrize("fraction, least, expected", [(0.1, 1, 0.1), (0.001, 1, None), (0.2, 9, 0.2)])
def test_the_share_to_hold_out_is_known_from_the_first_documents(folder, fraction, least, expected):
    """A source that has enough of them has the share that was asked for."""
    counted, size = Counted(load_corpus(Source(f"{folder}/a.jsonl"))), 3 * T
    share = share_to_hold_out(counted.corpus, 7, fraction, size, least=least)
    texts = [document["text"] for document in counted.corpus]
    if expected:
        assert share == expected and counted.read - len(texts) < 100
    else:
        taken = [text for text in texts if in_validation(text, 7, share)]
        assert fraction < share < 0.02 and len("".join(taken)) >= 8 * size
        assert len("".join(sorted(taken, key=lambda text: drawn_place(text, 7))[:-1])) < 8 * size
    many = ({"text": text} for text in shard_data.make_texts(FEW + 1, words=2))
    assert share_to_hold_out(replace(counted.corpus, readers=[lambda: many]), 7, 1e-9, 10**6) == 1e-9
    assert len([*many]) <= 1  # no more were read


def test_pairs_hold_out_two_documents(folder):
    corpus = load_corpus(Source(f"{folder}/a.jsonl"))
    for number in range(2, 9):
        few = replace(corpus, readers=[lambda number=number: itertools.islice(corpus.documents(), number)])
        share = share_to_hold_out(few, 7, 1e-6, 1, least=2)
        held_out = [document for document in few if in_validation(document["text"], 7, share)]
        assert len(held_out) == min(2, number // 2)


def test_a_tokenizer_is_trained_on_the_beginning_alone(folder, tmp_path):
    counted = Counted(load_corpus(Source(f"{folder}/a.jsonl")))
    make = partial(trained_tokenizer, counted.corpus, vocab_size=400, algorithm="bpe", model_type="gpt2",
                   cache_dir=tmp_path)
    make(read_bytes=50_000)
    assert 50_000 < sum(len(row["text"]) for row in list(counted.rows())[: counted.read]) < 60_000


def opened(folder, problems: list, **changes):
    settings = {
        "dataset_name": f"{folder}/a.jsonl", "tokenizer_name": f"{folder}/tokenizer", "block_size": T,
        "cache_dir": f"{folder}/cache", "max_eval_samples": 10,
    }  # fmt: skip
    sources = open_sources(Recipe(**settings | changes), problems)
    return None if problems else prepare(sources, Accelerator(cpu=True))


def rows_of(data) -> np.ndarray:
    """Of the only data set."""
    (rows,) = data.train.sources.values()
    return shard_data.all_ids(rows)


def test_text_and_shards_give_their_first_rows_and_what_cannot_is_told(folder, tmp_path, monkeypatch):
    for source in ("a.jsonl", "shards"):
        whole, sample = (opened(folder, [], dataset_name=f"{folder}/{source}", max_train_samples=number)
                         for number in (0, 70))
        assert np.array_equal(rows_of(sample), rows_of(whole)[:70]) and sample.length == 70
    assert sample.evals[""].fingerprint == whole.evals[""].fingerprint  # of shards
    asked = []

    def train(*words, **named):
        asked.append(named["read_bytes"])
        return trained_tokenizer(*words, **named)

    monkeypatch.setattr(opening, "trained_tokenizer", train)
    for number in (70, 20_000, 0):
        made = opened(folder, [], tokenizer_name=None, vocab_size=400, max_train_samples=number)
        assert made.length == number or number != 70
    assert asked == [1_000_000, 4 * 20_000 * T, 0]
    problems = []
    opened(folder, problems, next_sentence=True, max_train_samples=70)
    assert problems == [
        "max_train_samples: not for sentence pairs or a mixture; name a part of the text instead, "
        f"{folder}/a.jsonl:train[:70]."]
    for script in (train_clm, train_mlm):
        here = {"output_dir": str(tmp_path), "max_train_steps": 5, "max_eval_samples": 5, "streaming": True}
        args = script.TrainArgs(max_train_samples=5, **here)
        assert [line for line in common_problems(args) if "max_train_samples" in line] == [
            "max_train_samples: a stream is read as far as max_train_steps goes, leave it out."]
        assert "max_train_samples: must be 0 (off) or greater, is -1." in common_problems(
            script.TrainArgs(max_train_samples=-1, **here))


PARTS = ["train[:1%]", "train[10:20]", "train[:1000]", "train[-7:]", "train[99%:]", "train[:-390]",
         "train[5:2]", "train[:33%]+validation[20:]", "test", "train+test"]


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_splits_are_those_of_the_datasets_library(folder, part, tmp_path):
    files = {name: f"{folder}/splits/{name}.jsonl" for name in ("train", "validation", "test")}
    settings = {"data_files": files, "cache_dir": str(tmp_path)}
    expected = datasets.load_dataset("json", split=part, **settings)["text"]
    if not expected:
        with pytest.raises(ValueError, match="holds no readable documents"):
            load_corpus(Source(f"{folder}/splits:{part}"))
        return
    corpus = load_corpus(Source(f"{folder}/splits:{part}"))
    assert [document["text"] for document in corpus] == list(expected)
    assert corpus.fingerprint != load_corpus(Source(f"{folder}/splits")).fingerprint
    datasets.load_dataset("json", **settings).save_to_disk(tmp_path / "saved")
    saved = load_corpus(Source(f"{tmp_path}/saved:{part}"))
    assert [document["text"] for document in saved] == list(expected)


def test_a_part_that_is_numbered_is_read_alone_and_a_name_is_a_name(folder, tmp_path):
    corpus = load_corpus(Source(f"{folder}/a.jsonl:train[3:6]"))
    [unit] = corpus.readers
    [part] = unit.args[0]
    whole, start, stop = part.args
    counted = Counted(replace(corpus, readers=whole))
    corpus = replace(corpus, readers=[partial(part.func, [counted], start, stop)])
    assert len(list(corpus)) == 3 and counted.read == 6
    assert "validation" in load_corpus(Source(f"{folder}/splits:train[:1%]")).splits
    with pytest.raises(ValueError, match=r"no split 'nothing\[:3\]'"):
        load_corpus(Source(f"{folder}/splits:nothing[:3]"))
    odd = tmp_path / "x.jsonl:train"
    odd.write_text((folder / "a.jsonl").read_text())
    assert len(list(load_corpus(Source(f"file://{folder}/a.jsonl:train[:2]")))) == 2
    names = (f"{folder}/splits:validation[:10]", "s3://bucket/texts:test", "user/name")
    assert short_names(names) == ["splits", "texts", "name"]


def test_an_evaluation_set_asks_for_its_splits_once(folder, monkeypatch):
    """Each time is several requests of the Hub."""
    asked, splits = [], files.splits
    monkeypatch.setattr(files, "splits", lambda source: asked.append(source) or splits(source))
    for name, split in {"splits": "train", "splits:test": "test"}.items():
        assert evaluation_source(Source(f"{folder}/{name}"), ()).split == split
    assert len(asked) == 1


def test_training_on_a_part_evaluates_on_the_sources_own_validation_split(folder):
    data = opened(folder, [], dataset_name=f"{folder}/splits:train[:50%]")
    assert list(data.evals) == [""]
    whole = opened(folder, [], dataset_name=f"{folder}/splits")
    assert data.evals[""].fingerprint == whole.evals[""].fingerprint
    assert np.array_equal(rows_of(data), rows_of(whole)[: data.length])
    assert 0.4 < data.length / whole.length < 0.6
    several = (f"{folder}/splits:validation", f"{folder}/splits:test[:50%]")
    found = opened(folder, [], dataset_name=f"{folder}/splits:train[10:200]", eval_dataset_name=several)
    assert list(found.evals) == ["splits", "splits-2"] and len(found.evals["splits-2"]) > 10
    # Of another split than train, a part of its own documents is held out.
    other = opened(folder, [], dataset_name=f"{folder}/splits:validation", validation_fraction=0.3)
    assert other.length > len(other.evals[""]) > 0
    stream = opened(folder, [], dataset_name=f"{folder}/splits:train[:50%]", streaming=True)
    (rows,) = stream.train.sources.values()
    assert isinstance(rows, StreamedRows) and len(list(rows.source.documents_from.args[0])) == 200
