"""Rows are the documents' tokens with EOS between them, nothing lost, prepared once and never half."""

import itertools
import json
import os
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data import encode
from data import text as text_rows
from data.encode import Encoder, token_dtype, tokenize_documents
from data.filters import in_validation
from data.mixture import MixedRows
from data.open import Recipe, open_sources
from data.preparation import Preparation, TokenMaker
from data.rows import PackedRows
from data.sources.corpus import Source, load_corpus
from data.text import prepare_rows, share_to_hold_out, trained_tokenizer
from tests import forked
from tests.runs import PROJECT, TINY, metrics, write_corpus
from tests.shard_data import batch_of

T = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packing")
    write_corpus(folder / "text.jsonl", 80)
    return folder


@pytest.fixture(scope="module")
def corpus(folder):
    return load_corpus(Source(str(folder / "text.jsonl")))


@pytest.fixture(scope="module")
def tokenizer(folder, corpus):
    return trained_tokenizer(corpus, vocab_size=600, algorithm="bpe", model_type="gpt2",
                             cache_dir=str(folder / "cache"))


def expected_stream(documents, tokenizer):
    """Independent of data/: transformers' own call, one document at a time."""
    return [i for text in documents
            for i in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]]


def all_rows(rows):
    return batch_of(rows, [(i, 0, i) for i in range(len(rows))])["input_ids"]


def with_keywords(corpus, *keywords):
    return replace(corpus, source=replace(corpus.source, keywords=keywords))


def prepare(corpus, tokenizer, cache, **changes):
    settings = {"block_size": T, "validation_fraction": 0.2, "seed": 0} | changes
    return prepare_rows(corpus, TokenMaker(tokenizer), cache_dir=str(cache), **settings)


def test_rows_are_the_documents_joined_with_eos_and_one_remainder_is_dropped(corpus, tokenizer, tmp_path):
    prepared = prepare(corpus, tokenizer, tmp_path)
    documents = list(dict.fromkeys(document["content"] for document in corpus))
    held_out = [text for text in documents if in_validation(text, 0, 0.2)]
    kept = [text for text in documents if text not in held_out]
    assert 5 < len(held_out) < 30
    for split, own in (("train", kept), ("validation", held_out)):
        rows = prepared.splits[split]
        stream = expected_stream(own, tokenizer)
        account = prepared.accounting[split]
        assert all_rows(rows).flatten().tolist() == stream[: len(rows) * T]
        assert len(rows) == len(stream) // T and account["tokens"] == len(stream)
        assert account["kept"] == len(own) and account["bytes"] == sum(len(text.encode()) for text in own)
    train = prepared.accounting["train"]
    reasons = ("unreadable", "empty", "filtered", "duplicate", "validation", "kept")
    assert train["read"] == sum(train[reason] for reason in reasons) == 80
    ratio = sum(len(text.encode()) for text in held_out) / len(expected_stream(held_out, tokenizer))
    assert prepared.splits["validation"].bytes_per_token == pytest.approx(ratio, rel=1e-12)


def test_few_documents_give_a_validation_row_whatever_the_seed(corpus, tokenizer, tmp_path):
    few = replace(corpus, readers=[lambda: itertools.islice(corpus, 9)], fingerprint="few")
    for seed in range(8):
        share = share_to_hold_out(few, seed, 0.02, T)
        prepared = prepare(few, tokenizer, tmp_path, validation_fraction=share, seed=seed)
        assert len(prepared.splits["validation"]) and prepared.accounting["validation"]["kept"] < 9
        assert prepared.accounting["train"]["validation"] == prepared.accounting["validation"]["kept"]


def test_a_validation_corpus_is_packed_as_it_is(corpus, tokenizer, folder, tmp_path):
    texts = [document["content"] for document in corpus][:10]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepared = prepare(load_corpus(Source(str(other))), tokenizer, tmp_path, split="validation",
                       validation_fraction=None)
    assert [*prepared.splits] == ["validation"]
    stream = expected_stream(texts, tokenizer)
    assert all_rows(prepared.splits["validation"]).flatten().tolist() == stream[: len(stream) // T * T]


def test_what_is_evaluated_on_is_counted_told_and_not_trained_on(corpus, tokenizer, tmp_path, capsys):
    texts = list(dict.fromkeys(document["content"] for document in corpus))
    for name, found in {"one": [*texts[:10], "of its own " * 50], "two": texts[5:15]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in found))
    one, two = (load_corpus(Source(str(tmp_path / f"{name}.jsonl"))) for name in ("one", "two"))
    found = prepare(corpus, tokenizer, tmp_path, validation_fraction=None, evaluated=(one, two))
    stream = expected_stream(texts[15:], tokenizer)
    assert all_rows(found.train).flatten().tolist() == stream[: len(stream) // T * T]
    train = found.accounting["train"]
    assert (train["evaluated"], train["kept"]) == (15, len(texts) - 15)
    assert train["read"] == train["kept"] + 15 + train["duplicate"]
    assert "15 evaluated" in capsys.readouterr().out
    apart = prepare(corpus, tokenizer, tmp_path, validation_fraction=None, evaluated=(one,))
    assert apart.accounting["train"]["evaluated"] == 10 and apart.folder != found.folder
    # To see whether a model can learn it all.
    same = prepare(corpus, tokenizer, tmp_path, validation_fraction=None, evaluated=(corpus,))
    assert same.accounting["train"]["kept"] == len(texts)
    with pytest.raises(ValueError, match="all of its documents are in the evaluation data"):
        prepare(two, tokenizer, tmp_path, validation_fraction=None, evaluated=(corpus,))


def test_duplicates_are_counted_either_way_and_kept_where_asked(folder, tokenizer, tmp_path):
    texts = [document["content"] for document in load_corpus(Source(str(folder / "text.jsonl")))][:20]
    twice = tmp_path / "twice.jsonl"
    twice.write_text("".join(json.dumps({"content": text}) + "\n" for text in [*texts, *texts[:5], texts[0]]))
    made = {}
    for keep in (False, True):
        corpus = load_corpus(Source(str(twice), keep_duplicates=keep))
        made[keep] = prepare(corpus, tokenizer, tmp_path, validation_fraction=None)
        account = made[keep].accounting["train"]
        assert account["duplicate"] == 6 and account["kept"] == 20 + 6 * keep
        expected = expected_stream([*texts, *([*texts[:5], texts[0]] if keep else [])], tokenizer)
        assert all_rows(made[keep].train).flatten().tolist() == expected[: len(expected) // T * T]
    assert made[True].folder != made[False].folder
    recipe = {"dataset_name": str(twice), "block_size": T, "cache_dir": str(tmp_path), "vocab_size": 600}
    rows = [open_sources(Recipe(**recipe, keep_duplicates=keep), []).train[""] for keep in (False, True)]
    assert [text.corpus.source.keep_duplicates for text in rows] == [False, True]


def test_long_documents_and_any_batching_give_the_same_tokens(corpus, tokenizer, monkeypatch):
    documents = [document["content"] for document in corpus]
    documents += ["\n".join(documents), "", "<|endoftext|> is only text here", "a\0b"]
    parts = {}
    for piece, batch in ((1 << 20, 1 << 20), (500, 3000), (1000, 1)):
        monkeypatch.setattr(encode, "split_text", lambda text, piece=piece: original(text, piece))
        monkeypatch.setattr(encode, "BATCH_CHARACTERS", batch)
        found = tokenize_documents(((text, text) for text in documents), Encoder.of(tokenizer))
        parts[piece, batch] = [(tokens.tolist(), note) for tokens, note in found]
    first, *others = parts.values()
    assert all(other == first for other in others)
    assert [note for _, note in first] == documents
    # a text that mentions EOS does not end there
    assert all(tokens.index(tokenizer.eos_token_id) == len(tokens) - 1 for tokens, _ in first)
    assert [tokenizer.decode(tokens[:-1]) for tokens, _ in first] == documents


original = encode.split_text


CORPORA = int(os.environ.get("CORPORA", "4"))
ODD = ["", " \n\t", None, 17, "NUL \0 bytes \0", "a lone surrogate \ud800", "\r\nCRLF\r\n", "twice", "twice"]


def random_corpus(path: Path, seed: int) -> list[str]:
    """Writes one; returns its texts that count, the later of two alike left out."""
    draw = random.Random(seed)
    words = ["alpha", "beta", "gamma\n", "42", "é", "\t"]
    texts = [" ".join(draw.choices(words, k=draw.choice([1, 3, 40, 400])))
             for _ in range(draw.randint(1, 120))]
    texts += draw.sample(texts, len(texts) // 5) + ODD
    draw.shuffle(texts)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [*dict.fromkeys(t for t in texts if isinstance(t, str) and t.strip() and "\ud800" not in t)]


@pytest.mark.parametrize("seed", range(CORPORA))
def test_rows_of_any_corpus_in_chunks_of_any_size_are_those_of_an_independent_packer(
        tokenizer, tmp_path, seed, monkeypatch):
    """Each token of each document once, in the order of the source, but for the last T - 1 at most."""
    texts = random_corpus(tmp_path / "texts.jsonl", seed)
    corpus, rng = load_corpus(Source(str(tmp_path / "texts.jsonl"))), random.Random(seed)
    drawn = 10 ** rng.uniform(-4, -2), rng.randint(2, 300)
    for shard_mb, block_size in ((0.0005, 7), (0.004, 64), (64, 1), drawn):
        monkeypatch.setattr(text_rows, "Preparation", partial(Preparation, shard_mb=shard_mb))
        cache, fraction = tmp_path / f"{shard_mb}", rng.choice([None, 0.3])
        settings = {"block_size": block_size, "validation_fraction": fraction, "seed": seed}
        splits = {"train": [t for t in texts if not fraction or not in_validation(t, seed, fraction)],
                  "validation": [t for t in texts if fraction and in_validation(t, seed, fraction)]}
        streams = {split: expected_stream(own, tokenizer) for split, own in splits.items() if own}
        if min(map(len, streams.values())) < block_size or fraction and len(streams) < 2:
            continue
        prepared = prepare(corpus, tokenizer, cache, **settings)
        for split, stream in streams.items():
            rows = all_rows(prepared.splits[split])
            assert rows.flatten().tolist() == stream[: len(stream) // block_size * block_size], shard_mb
            assert prepared.accounting[split]["kept"] == len(splits[split])


def test_packed_rows_deliver_batches_and_padding(tmp_path):
    array = np.random.default_rng(0).integers(1, 1 << 16, (100, T), dtype=np.uint16)
    rows = PackedRows([array.ravel()[:1000], array.ravel()[1000:]], T)
    assert len(rows) == 100 and rows.block_size == T
    batch = batch_of(rows, [(7, 0, 3), (-1, 2, -1), (8, 1, 59)])
    assert batch["input_ids"].dtype == torch.int64 and batch["input_ids"].shape == (3, T)
    assert batch["row"].tolist() == [3, -1, 59] and batch["epoch"].tolist() == [0, 2, 1]
    assert batch["position"].tolist() == [7, -1, 8]
    assert (batch["input_ids"].numpy() == np.stack([array[3], np.zeros(T), array[59]])).all()
    keys, data = [(i, 0, i, 0) for i in range(60)], MixedRows(None, {"": rows})
    loader = torch.utils.data.DataLoader(data, batch_size=7, sampler=keys, collate_fn=dict, num_workers=2)
    assert (torch.cat([batch["input_ids"] for batch in loader]).numpy() == array[:60]).all()


def test_ids_beyond_uint16_are_kept():
    vocabulary = {f"w{i}": i for i in range((1 << 16) + 2)} | {"[UNK]": (1 << 16) + 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0", unk_token="[UNK]")
    [(tokens, _)] = tokenize_documents([("w65535 w65537 w65536 w1", None)], Encoder.of(tokenizer))
    assert token_dtype(tokenizer) == tokens.dtype == np.uint32
    assert tokens.tolist() == [65535, 65537, 65536, 1, 0]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        next(tokenize_documents([("w1", None)], Encoder.of(tokenizer)))


def test_ids_with_gaps_are_kept_and_weighed(tmp_path):
    """The largest id counts, not how many there are: stored in 16 bits, 70,000 would be 4,464."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "<eos>": 1, "plt": 70_000}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="[UNK]")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert token_dtype(tokenizer) == np.uint32
    texts = [json.dumps({"text": "plt " * 40 + f"other {i}"}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(texts))
    done = forked.run("train_clm.py", TINY | {
        "dataset_name": tmp_path / "a.jsonl", "tokenizer_name": tmp_path / "tokenizer", "keytokens": ["plt"],
        "cache_dir": tmp_path / "cache", "output_dir": tmp_path / "run", "max_train_steps": 1,
        "num_warmup_steps": 0, "prompts": "none",
        "config_overrides": "num_hidden_layers=1,hidden_size=8,num_attention_heads=1",
    })  # fmt: skip
    assert done.returncode == 0, done.stderr
    [rows] = (tmp_path / "cache").glob("rows-*/train-*.npy")
    assert set(np.unique(np.load(rows)).tolist()) == {0, 1, 70_000}


def test_a_second_start_reads_nothing_and_every_setting_counts(corpus, tokenizer, folder, tmp_path):
    first = prepare(corpus, tokenizer, tmp_path)

    def refuse(*_):
        raise AssertionError("the corpus was read again")

    again = prepare(replace(corpus, readers=[refuse]), tokenizer, tmp_path)
    assert again.folder == first.folder and again.accounting == first.accounting
    other_tokenizer = trained_tokenizer(corpus, vocab_size=500, algorithm="bpe", model_type="gpt2",
                                        cache_dir=str(tmp_path))
    changes = [{"seed": 1}, {"validation_fraction": 0.3}, {"validation_fraction": None}]
    folders = {prepare(corpus, tokenizer, tmp_path, **change).folder for change in changes}
    folders |= {prepare(corpus, other_tokenizer, tmp_path).folder, first.folder}
    folders.add(prepare(with_keywords(corpus, "import"), tokenizer, tmp_path).folder)
    assert len(folders) == len(changes) + 3
    longer = prepare(corpus, tokenizer, tmp_path, block_size=2 * T)
    assert longer.folder == first.folder, "rows of any length are cut from the same tokens"


def test_a_damaged_cache_is_built_again(corpus, tokenizer, tmp_path):
    first = prepare(corpus, tokenizer, tmp_path)
    whole = all_rows(first.train)
    for name in ("train-00000-00000.npy", "validation-00000.npy", "manifest.json"):
        file = Path(first.folder, name)
        before = file.read_bytes()
        file.write_bytes(before[:-9])
        again = prepare(corpus, tokenizer, tmp_path)
        assert (all_rows(again.train) == whole).all() and again.accounting == first.accounting | {
            split: again.accounting[split] | {"seconds": first.accounting[split]["seconds"]}
            for split in first.accounting} | ({} if name != "manifest.json" else again.accounting)
        assert name == "manifest.json" or file.read_bytes() == before


def test_lost_validation_rows_of_the_first_rows_are_made_again(corpus, tokenizer, tmp_path):
    first = prepare(corpus, tokenizer, tmp_path, max_rows=20)
    rows = all_rows(first.splits["validation"])
    Path(first.folder, "validation-00000.npy").unlink()
    again = prepare(corpus, tokenizer, tmp_path, max_rows=20)
    assert np.array_equal(all_rows(again.splits["validation"]), rows) and len(again.train) == 20


PREPARE = """
import sys, time
from data.preparation import TokenMaker
from data.sources.corpus import Source, load_corpus
from data.text import prepare_rows
from data.tokenizer import load_tokenizer
source, tokenizer, cache, slow = sys.argv[1:]
corpus = load_corpus(Source(source))
[rows] = corpus.readers
def slowly():
    for number, row in enumerate(rows()):
        print(f"document-{number}", flush=True)
        time.sleep(float(slow))
        yield row
corpus.readers = [slowly]
prepared = prepare_rows(corpus, TokenMaker(load_tokenizer(tokenizer)), block_size=32, validation_fraction=0.2,
                        seed=0, cache_dir=cache)
print(prepared.folder)
"""


def start(folder, tokenizer, cache, slow):
    tokenizer.save_pretrained(folder / "tokenizer")
    return forked.start_code(PREPARE, [folder / "text.jsonl", folder / "tokenizer", cache, slow], folder)


def test_of_two_processes_one_prepares_and_a_killed_one_is_resumed(corpus, tokenizer, folder, tmp_path):
    killed, log = start(folder, tokenizer, tmp_path, 0.5)
    forked.wait_for(killed, log, "document-")
    killed.kill()
    killed.join()
    assert not [*tmp_path.glob("rows-*/manifest.json")]
    both = [start(folder, tokenizer, tmp_path, 0.02) for _ in range(2)]
    for process, log in both:
        forked.finish([process], log)
    outputs = [log.read_text().split() for _, log in both]
    assert outputs[0][-1] == outputs[1][-1]
    made = Path(outputs[0][-1])
    assert sorted(path.name for path in made.iterdir()) == [
        "manifest.json", "tokenizer", "train-00000-00000.npy", "validation-00000.npy"]
    assert (np.load(made / "train-00000-00000.npy") == np.load(Path(
        prepare(corpus, tokenizer, tmp_path / "own").folder, "train-00000-00000.npy"))).all()


def test_too_little_text_is_refused_and_leaves_nothing(corpus, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="keywords zzqx: none of the 80 documents"):
        prepare(with_keywords(corpus, "zzqx"), tokenizer, tmp_path)
    with pytest.raises(ValueError, match="block_size 1000000: the train split"):
        prepare(corpus, tokenizer, tmp_path, block_size=1_000_000)
    with pytest.raises(ValueError, match=r"raise validation_fraction \(0\)"):
        prepare(corpus, tokenizer, tmp_path, validation_fraction=0)
    one = tmp_path / "one.txt"
    one.write_text("only one document\n" * 500)
    with pytest.raises(ValueError, match="one document cannot be split"):
        prepare(load_corpus(Source(str(one))), tokenizer, tmp_path)
    assert not [*tmp_path.glob("rows-*/")]


@pytest.mark.parametrize("script", ["train_clm.py", "train_mlm.py"])
def test_one_small_text_file_is_enough(script, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/mine.txt").write_text((PROJECT / "README.md").read_text())
    flags = {name: value for name, value in TINY.items() if name != "keywords"}
    flags |= {"dataset_name": tmp_path / "texts", "cache_dir": tmp_path / "cache"}
    done = forked.run(script, flags | {"output_dir": tmp_path / "run"})
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss/eval" in line] == [0, 3, 6]


def test_the_trained_tokenizer_is_kept(corpus, tokenizer, folder):
    began = time.time()
    again = trained_tokenizer(corpus, vocab_size=600, algorithm="bpe", model_type="gpt2",
                              cache_dir=str(folder / "cache"))
    assert again.get_vocab() == tokenizer.get_vocab()
    tokenizers = [path for path in (folder / "cache").iterdir() if path.is_dir()]
    assert len(tokenizers) == 1 and os.path.getmtime(tokenizers[0]) < began
    draw = random.Random(0)
    text = "".join(chr(draw.randrange(1, 0xD800)) for _ in range(1000))
    assert again.decode(again(text)["input_ids"]) == text
