"""Rows are the documents' tokens with EOS between them, nothing lost, prepared once and never half."""

import itertools
import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data import cache, packing
from data.filters import in_validation
from data.packing import (
    PackedRows,
    Split,
    prepare_rows,
    token_dtype,
    tokenize_documents,
    trained_tokenizer,
)
from data.rows import Recipe, open_sources
from data.sources.corpus import Source, load_corpus
from tests import forked
from tests.runs import TINY, write_corpus

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
    return rows.__getitems__([(i, 0, i) for i in range(len(rows))])["input_ids"]


def with_keywords(corpus, *keywords):
    return replace(corpus, source=replace(corpus.source, keywords=keywords))


def prepare(corpus, tokenizer, cache, **changes):
    settings = {"block_size": T, "validation_fraction": 0.2, "seed": 0} | changes
    return prepare_rows(corpus, tokenizer, cache_dir=str(cache), **settings)


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
        assert len(rows) == len(stream) // T == account["rows"]
        assert account["tokens"] == len(stream) == account["rows"] * T + account["tokens_dropped"]
        assert account["kept"] == len(own) and account["bytes"] == sum(len(text.encode()) for text in own)
    train = prepared.accounting["train"]
    reasons = ("unreadable", "empty", "filtered", "duplicate", "validation", "kept")
    assert train["read"] == sum(train[reason] for reason in reasons) == 80
    ratio = sum(len(text.encode()) for text in held_out) / len(expected_stream(held_out, tokenizer))
    assert prepared.splits["validation"].bytes_per_token == pytest.approx(ratio, rel=1e-12)


def test_few_documents_give_a_validation_row_whatever_the_seed(corpus, tokenizer, tmp_path):
    few = replace(corpus, rows=lambda: itertools.islice(corpus.rows(), 9), fingerprint="few")
    for seed in range(8):
        prepared = prepare(few, tokenizer, tmp_path, validation_fraction=0.02, seed=seed)
        assert len(prepared.splits["validation"]) and prepared.accounting["validation"]["kept"] < 9
        assert prepared.accounting["train"]["validation"] == prepared.accounting["validation"]["kept"]


def test_a_validation_corpus_is_packed_as_it_is(corpus, tokenizer, folder, tmp_path):
    texts = [document["content"] for document in corpus][:10]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepared = prepare(corpus, tokenizer, tmp_path, eval_corpus=load_corpus(Source(str(other))))
    assert prepared.accounting["train"]["validation"] == 0
    stream = expected_stream(texts, tokenizer)
    assert all_rows(prepared.splits["validation"]).flatten().tolist() == stream[: len(stream) // T * T]


def test_what_is_evaluated_on_is_counted_told_and_not_trained_on(corpus, tokenizer, tmp_path, capsys):
    texts = list(dict.fromkeys(document["content"] for document in corpus))
    for name, found in {"one": [*texts[:10], "of its own " * 50], "two": texts[5:15]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in found))
    one, two = (load_corpus(Source(str(tmp_path / f"{name}.jsonl"))) for name in ("one", "two"))
    found = prepare(corpus, tokenizer, tmp_path, eval_corpus=one, also_evaluated=(two,))
    stream = expected_stream(texts[15:], tokenizer)
    assert all_rows(found.train).flatten().tolist() == stream[: len(stream) // T * T]
    train, validation = found.accounting["train"], found.accounting["validation"]
    assert (train["evaluated"], train["kept"], validation["kept"]) == (15, len(texts) - 15, 11)
    assert train["read"] == train["kept"] + 15 + train["duplicate"]
    assert f"15 documents of {corpus.name} are in the evaluation data too" in capsys.readouterr().out
    apart = prepare(corpus, tokenizer, tmp_path, eval_corpus=one)
    assert apart.accounting["train"]["evaluated"] == 10 and apart.folder != found.folder
    same = prepare(corpus, tokenizer, tmp_path, eval_corpus=corpus)  # to see whether a model can learn it all
    assert (np.array(same.splits["validation"].rows) == np.array(same.train.rows)).all()
    with pytest.raises(ValueError, match="all of its documents are in the evaluation data"):
        prepare(two, tokenizer, tmp_path, eval_corpus=corpus)


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
    assert [corpus.source.keep_duplicates for corpus in rows] == [False, True]


def test_long_documents_and_any_batching_give_the_same_tokens(corpus, tokenizer, monkeypatch):
    documents = [document["content"] for document in corpus]
    documents += ["\n".join(documents), "", "<|endoftext|> is only text here", "a\0b"]
    parts = {}
    for piece, batch in ((1 << 20, 1 << 20), (500, 3000), (1000, 1)):
        monkeypatch.setattr(packing, "split_text", lambda text, piece=piece: original(text, piece))
        monkeypatch.setattr(packing, "BATCH_CHARACTERS", batch)
        found = tokenize_documents(((text, text) for text in documents), tokenizer)
        parts[piece, batch] = [(tokens.tolist(), note) for tokens, note in found]
    first, *others = parts.values()
    assert all(other == first for other in others)
    assert [note for _, note in first] == documents
    # a text that mentions EOS does not end there
    assert all(tokens.index(tokenizer.eos_token_id) == len(tokens) - 1 for tokens, _ in first)
    assert [tokenizer.decode(tokens[:-1]) for tokens, _ in first] == documents


original = packing.split_text


def test_a_split_carries_over_and_its_file_is_npy(tokenizer, tmp_path):
    draw = np.random.default_rng(0)
    for block_size in (1, 7, 128):
        split = Split(tmp_path / "a.npy", block_size, tokenizer)
        chunks = [draw.integers(0, 1 << 16, draw.integers(0, 500), dtype=np.uint16) for _ in range(50)]
        for chunk in chunks:
            split.add(chunk)
        split.close()
        stream, rows = np.concatenate(chunks), np.load(tmp_path / "a.npy")
        assert rows.dtype == np.uint16 and rows.shape == (len(stream) // block_size, block_size)
        rest = split.rest
        assert (np.concatenate([rows.ravel(), rest]) == stream).all() and len(rest) < block_size
        assert split.counts.tokens == len(stream) and split.counts.tokens_dropped == len(rest)


def test_packed_rows_deliver_batches_and_padding(tmp_path):
    array = np.random.default_rng(0).integers(1, 1 << 16, (100, T), dtype=np.uint16)
    np.save(tmp_path / "rows.npy", array)
    rows = PackedRows(tmp_path / "rows.npy")
    assert len(rows) == 100 and rows.block_size == T
    batch = rows.__getitems__([(7, 0, 3), (-1, 2, -1), (8, 1, 59)])
    assert batch["input_ids"].dtype == torch.int64 and batch["input_ids"].shape == (3, T)
    assert batch["row"].tolist() == [3, -1, 59] and batch["epoch"].tolist() == [0, 2, 1]
    assert batch["position"].tolist() == [7, -1, 8]
    assert (batch["input_ids"].numpy() == np.stack([array[3], np.zeros(T), array[59]])).all()
    keys = [(i, 0, i) for i in range(60)]
    loader = torch.utils.data.DataLoader(rows, batch_size=7, sampler=keys, collate_fn=dict, num_workers=2)
    assert (torch.cat([batch["input_ids"] for batch in loader]).numpy() == array[:60]).all()


def test_ids_beyond_uint16_are_kept():
    vocabulary = {f"w{i}": i for i in range((1 << 16) + 2)} | {"[UNK]": (1 << 16) + 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0", unk_token="[UNK]")
    [(tokens, _)] = tokenize_documents([("w65535 w65537 w65536 w1", None)], tokenizer)
    assert token_dtype(tokenizer) == tokens.dtype == np.uint32
    assert tokens.tolist() == [65535, 65537, 65536, 1, 0]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        next(tokenize_documents([("w1", None)], tokenizer))


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
        "num_warmup_steps": 0, "prompts": "none", "config_overrides": "n_layer=1,n_embd=8,n_head=1",
    })  # fmt: skip
    assert done.returncode == 0, done.stderr
    [rows] = (tmp_path / "cache").glob("rows-*/train.npy")
    assert set(np.unique(np.load(rows)).tolist()) == {0, 1, 70_000}


def test_a_second_start_reads_nothing_and_every_setting_counts(corpus, tokenizer, folder, tmp_path):
    first = prepare(corpus, tokenizer, tmp_path)

    def refuse():
        raise AssertionError("the corpus was read again")

    again = prepare(replace(corpus, rows=refuse), tokenizer, tmp_path)
    assert again.folder == first.folder and again.accounting == first.accounting
    other_tokenizer = trained_tokenizer(corpus, vocab_size=500, algorithm="bpe", model_type="gpt2",
                                        cache_dir=str(tmp_path))
    changes = [{"block_size": 16}, {"seed": 1}, {"validation_fraction": 0.3}, {"eval_corpus": corpus},
               {"validation_fraction": None}]
    folders = {prepare(corpus, tokenizer, tmp_path, **change).folder for change in changes}
    folders |= {prepare(corpus, other_tokenizer, tmp_path).folder, first.folder}
    folders.add(prepare(with_keywords(corpus, "import"), tokenizer, tmp_path).folder)
    assert len(folders) == len(changes) + 3


def test_a_damaged_cache_is_built_again(corpus, tokenizer, tmp_path):
    first = prepare(corpus, tokenizer, tmp_path)
    whole = all_rows(first.train)
    for name in ("train.npy", "train.npy.xxh3", "preparation.json", cache.MANIFEST):
        file = Path(first.folder, name)
        file.write_bytes(file.read_bytes()[:-9])
        assert (all_rows(prepare(corpus, tokenizer, tmp_path).train) == whole).all()


PREPARE = """
import sys, time
from data.rows import Recipe, open_sources
from data.sources.corpus import Source, load_corpus
from data.packing import prepare_rows
from data.tokenizer import load_tokenizer
source, tokenizer, cache, slow = sys.argv[1:]
corpus = load_corpus(Source(source))
rows = corpus.rows
def slowly():
    for number, row in enumerate(rows()):
        print(f"document-{number}", flush=True)
        time.sleep(float(slow))
        yield row
corpus.rows = slowly
prepared = prepare_rows(corpus, load_tokenizer(tokenizer), block_size=32, validation_fraction=0.2, seed=0,
                        cache_dir=cache)
print(prepared.folder)
"""


def start(folder, tokenizer, cache, slow):
    tokenizer.save_pretrained(folder / "tokenizer")
    return forked.start_code(PREPARE, [folder / "text.jsonl", folder / "tokenizer", cache, slow], folder)


def test_of_two_processes_one_prepares_and_a_killed_one_leaves_no_trace(corpus, tokenizer, folder, tmp_path):
    killed, log = start(folder, tokenizer, tmp_path, 0.5)
    forked.wait_for(killed, log, "document-")
    killed.kill()
    killed.join()
    assert not any((path / cache.MANIFEST).exists() for path in tmp_path.iterdir())
    both = [start(folder, tokenizer, tmp_path, 0.02) for _ in range(2)]
    for process, log in both:
        forked.finish([process], log)
    outputs = [log.read_text().split() for _, log in both]
    read = [sum(word.startswith("document-") for word in words) for words in outputs]
    assert sorted(read) == [0, 80], "the other read nothing"
    assert outputs[0][-1] == outputs[1][-1]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]
    assert (np.load(Path(outputs[0][-1], "train.npy")) ==
            all_rows(prepare(corpus, tokenizer, tmp_path / "own").train).numpy()).all()


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
    assert not any(path.is_dir() for path in tmp_path.iterdir())


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
