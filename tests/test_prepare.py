"""data.prepare writes the same bytes after kills and with any number of workers; its tokenizers."""

import hashlib
import json
import os
import random
import signal
import time

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from data import prepare
from data.documents.source import Source, open_corpus
from data.tokens.encode import Encoder
from data.tokens.tokenizer import load_tokenizer
from tests import forked
from tests.data_runs import (
    all_ids,
    exit_status,
    files_of,
    load,
    make_texts,
    manifest_of,
    save_tokenizer,
    tokens_of,
    write_jsonl,
)
from tests.runs import PROJECT, environment
from train_clm import TrainArgs

KILLS = int(os.environ.get("KILLS", "30"))  # moments at which the preparation is killed


def make_command(source, folder, tokenizer, **settings) -> list[str]:
    """Returns arguments for small shards: about 9 kB of text each."""
    usual = {"dataset_name": source, "output_dir": folder, "shard_mb": 0.004096, "validation_fraction": 0.05}
    return [
        str(word)
        for name, value in (usual | {"tokenizer_name": tokenizer} | settings).items()
        for word in (f"--{name}", *(value if isinstance(value, list) else [value]))
    ]


def run(*arguments, **settings) -> int:
    return exit_status(prepare.main, make_command(*arguments, **settings))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_small_corpus_holds_out_exactly_the_fraction_in_any_order(tmp_path, tokenizer):
    """Reference: the texts with the lowest keyed BLAKE2. Training and data.prepare have the same defaults."""
    for n, expected in ((21, 2), (113, 6), (344, 18), (999, 50)):
        texts = make_texts(n, seed=n, words=20)
        place = {text: hashlib.blake2b(text.encode(), digest_size=8, key=b"validation").digest()[::-1]
                 for text in texts}  # fmt: skip
        held_out = {*sorted(texts, key=place.get)[:expected]}
        for order in (texts, texts[::-1]):
            path, folder = write_jsonl(tmp_path / "texts.jsonl", order), tmp_path / f"{n}-{order is texts}"
            words = ["--dataset_name", path, "--tokenizer_name", tokenizer, "--output_dir", folder]
            assert exit_status(prepare.main, words) == 0
            ids = tokens_of(folder, "validation").tolist()
            ended = load_tokenizer(tokenizer).decode(ids).split("<|endoftext|>")
            assert {*filter(None, ended)} == held_out and len(ended) == expected + 1, n
            load(folder, path, tokenizer_name=tokenizer, validation_fraction=TrainArgs.validation_fraction)
            (cached,) = folder.glob("cache/rows-*")
            assert tokens_of(cached, "validation").tolist() == ids


def test_preparation_resumed_after_sigkill_is_byte_identical(tmp_path, tokenizer):
    source, rng = write_jsonl(tmp_path / "texts.jsonl", make_texts(4000)), random.Random(time.time_ns())
    assert run(source, tmp_path / "whole", tokenizer, shard_mb=0.05) == 0
    words, log = make_command(source, tmp_path / "killed", tokenizer, shard_mb=0.05), tmp_path / "log"
    shards, codes = len(files_of(tmp_path / "whole")) - 6, []
    for i in range(KILLS):
        target = round(shards * (i + rng.random()) / KILLS * 0.95)  # kill soon after
        process = forked.start(PROJECT, "data.prepare", words, log)
        while process.is_alive() and len(list((tmp_path / "killed").glob("*.npy"))) < target:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.join()
        codes.append(process.exitcode)
    for newest in sorted((tmp_path / "killed" / "progress").glob("*.npz"))[-1:]:
        newest.rename(f"{newest}.tmp")  # as if killed before it was renamed
    forked.finish([forked.start(PROJECT, "data.prepare", words, log)], log)
    assert codes.count(-signal.SIGKILL) > KILLS // 2, codes
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_any_number_of_workers_writes_the_same_bytes(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "texts.jsonl", make_texts(2000))
    for workers in (1, 2, 3, 8):
        done = forked.run(
            "data.prepare",
            make_command(source, tmp_path / str(workers), tokenizer),
            env=environment(RAYON_NUM_THREADS=str(workers), TOKENIZERS_PARALLELISM="true"),
        )
        assert done.returncode == 0, done.stderr
        assert files_of(tmp_path / str(workers)) == files_of(tmp_path / "1")


def test_prepared_shards_give_the_rows_of_all_splits(tmp_path, tokenizer):
    """Documents of the validation split are not trained on. The size of the shards changes nothing."""
    texts = make_texts(150)
    (tmp_path / "source").mkdir()
    for name, documents in (("train", texts[:100]), ("valid", texts[90:120]), ("test", texts[115:])):
        write_jsonl(tmp_path / "source" / f"{name}.jsonl", documents)
    splits = []
    for name, size in (("a", 0.004), ("b", 1)):
        assert run(tmp_path / "source", tmp_path / name, tokenizer, shard_mb=size) == 0
        assert manifest_of(tmp_path / name)["accounting"]["train"]["evaluated"] == 10
        assert manifest_of(tmp_path / name)["accounting"]["validation"]["read"] == 30
        splits.append(
            [tokens_of(tmp_path / name, split).tolist() for split in ("train", "validation", "test")]
        )
        _, rows, evals = load(tmp_path, tmp_path / name)  # with its tokenizer
        ids = all_ids(rows).ravel().tolist()
        assert ids == splits[-1][0][: len(ids)] and len(ids) > len(splits[-1][0]) - 16
        assert len(evals[""]) == len(splits[-1][1]) // 16 and 0 < evals[""].bytes_per_token < 9
    assert splits[0] == splits[1]


def test_a_damaged_shard_is_named_and_prepared_again(tmp_path, tokenizer, capsys):
    source, folder = write_jsonl(tmp_path / "a.jsonl", make_texts(100)), tmp_path / "shards"
    assert run(source, folder, tokenizer) == 0
    undamaged, path = files_of(folder), sorted(folder.glob("train-*.npy"))[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{path} has a wrong checksum. Copy it again, or delete"):
        load(tmp_path, folder)
    assert run(source, folder, tokenizer) == 0
    assert f"{path} has a wrong checksum" in capsys.readouterr().out and files_of(folder) == undamaged
    assert run(source, folder, tokenizer) == 0 and "data " not in capsys.readouterr().out
    assert run(source, folder, tokenizer, validation_fraction=0.1) == 2
    assert "other settings" in capsys.readouterr().err
    write_jsonl(tmp_path / "a.jsonl", make_texts(101))
    assert run(source, folder, tokenizer) == 2


@pytest.mark.parametrize(("setting", "value"), [("keywords", ["nope"]), ("text_column", "nope")])
def test_settings_for_text_are_refused_for_shards(setting, value, tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "texts.jsonl", make_texts(100))
    assert run(source, tmp_path / "shards", tokenizer) == 0
    message = f"{setting}: works on text only, and .*shards holds tokens: leave it out"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, tmp_path / "shards", **{setting: value})


@pytest.mark.parametrize("name", ["/etc/hostname", "../a.npy", "train-../a.npy", 7])
def test_a_manifest_that_names_files_outside_its_folder_is_refused(name, tmp_path, tokenizer):
    folder = tmp_path / "shards"
    assert run(write_jsonl(tmp_path / "a.jsonl", make_texts(100)), folder, tokenizer) == 0
    manifest = manifest_of(folder)
    manifest["splits"]["train"]["files"][0]["file"] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="is no name of a file in this folder"):
        load(tmp_path, folder)


def test_remote_shards_are_copied_once_and_verified(tmp_path, tokenizer):
    """From fsspec's memory file system."""
    import fsspec

    folder, memory = tmp_path / "shards", fsspec.filesystem("memory")
    assert run(write_jsonl(tmp_path / "a.jsonl", make_texts(100)), folder, tokenizer) == 0
    memory.put(str(folder), "/bucket/tokens", recursive=True)
    local, remote = (load(tmp_path, name)[1] for name in (folder, "memory://bucket/tokens"))
    assert remote.fingerprint == local.fingerprint
    saved = memory.cat("/bucket/tokens/train-00000-00001.npy")
    memory.pipe("/bucket/tokens/train-00000-00001.npy", b"damage")
    assert load(tmp_path, "memory://bucket/tokens")[1].fingerprint == local.fingerprint  # the copy
    content = memory.cat("/bucket/tokens/train-00000-00000.npy")
    (path,) = (path for path in tmp_path.glob("cache/shards-*/train-00000-00000.npy"))
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    memory.pipe("/bucket/tokens/train-00000-00001.npy", saved)
    assert load(tmp_path, "memory://bucket/tokens")[1].fingerprint == local.fingerprint
    assert path.read_bytes() == content
    memory.pipe("/bucket/tokens/train-00000-00001.npy", b"damage")
    with pytest.raises(ValueError, match="train-00000-00001.npy is missing or has another size"):
        load(tmp_path / "other", "memory://bucket/tokens")
    memory.rm("/bucket", recursive=True)


def encode(tokenizer, text: str) -> list[int]:
    return next(ids for ids, _ in Encoder(tokenizer)([(text, 0)])).tolist()


@pytest.mark.parametrize(("algorithm", "model_type"), [
    ("unigram", "roberta"), ("unigram", "gpt2"), ("bpe", "gpt2"), ("bpe", "roberta"), ("unigram", "bert"),
])  # fmt: skip
def test_special_tokens_spelled_out_in_a_text_stay_text(algorithm, model_type, tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, algorithm=algorithm, model_type=model_type))
    text = "a word " + " ".join(tokenizer.all_special_tokens) + " and more"
    ids = encode(tokenizer, text)
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    assert not special & {*ids[:-1]} and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id)


@pytest.mark.parametrize("template", ["b $A", "b $A <|endoftext|>", "b $A <|endoftext|> <|endoftext|>"])
def test_documents_get_the_bos_of_their_tokenizer_and_one_eos(template, tmp_path):
    """Llama's tokenizer adds <s>, with add_eos_token also the end."""
    folder = save_tokenizer(tmp_path / "plain")
    backend = Tokenizer.from_file(f"{folder}/tokenizer.json")
    special = [("b", begin := backend.token_to_id("b")), ("<|endoftext|>", 0)]
    backend.post_processor = TemplateProcessing(single=template, special_tokens=special)
    backend.save(f"{folder}/tokenizer.json")
    tokenizer = load_tokenizer(folder)
    bare = tokenizer("a word", add_special_tokens=False)["input_ids"]
    assert encode(tokenizer, "a word") == [begin, *bare, 0]
    _, rows, _ = load(tmp_path, write_jsonl(tmp_path / "a.jsonl", make_texts(30)), tokenizer_name=folder)
    stream = all_ids(rows).ravel()
    assert stream[0] == begin and (stream[1:][stream[:-1] == 0] == begin).all() and (stream == 0).sum() > 20


def test_a_tokenizer_that_loses_characters_is_refused_or_reported(tmp_path, capsys):
    folder = save_tokenizer(tmp_path / "words", algorithm="unigram", model_type="bert")
    english = make_texts(60)
    greek = [" ".join(chr(0x3B1 + ord(c) - 97) for c in text if c.islower()) for text in english]
    with pytest.raises(ValueError, match="does not know the text of .*% of its characters are lost"):
        load(tmp_path, write_jsonl(tmp_path / "greek.jsonl", greek), tokenizer_name=folder)
    both = [f"{words} {letters[:99]}" for words, letters in zip(english, greek, strict=True)]
    mixed = write_jsonl(tmp_path / "mixed.jsonl", both)
    _, _, evals = load(tmp_path, mixed, tokenizer_name=folder)
    assert "the tokenizer loses" in capsys.readouterr().out
    assert np.isnan(evals[""].bytes_per_token)
    load(tmp_path, write_jsonl(tmp_path / "english.jsonl", english), tokenizer_name=folder)
    assert "loses" not in capsys.readouterr().out


def test_a_column_that_holds_no_text_is_named(tmp_path):
    for name, row, message in (
        ("list", {"text": ["a"]}, "column text: list"),
        ("number", {"text": 7}, "column text: int"),
        ("null", {"content": None, "title": "x"}, "none of 90 documents is text"),
    ):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 90)
        with pytest.raises(ValueError, match=message):
            load(tmp_path, tmp_path / f"{name}.jsonl")
    rows = "".join(json.dumps({"content": None, "text": text}) + "\n" for text in make_texts(40))
    (tmp_path / "other.jsonl").write_text(rows)
    assert open_corpus(Source(str(tmp_path / "other.jsonl"))).text_column == "text"


def test_a_text_of_one_long_word_trains_a_tokenizer_quickly(tmp_path):
    rng = random.Random(0)
    (tmp_path / "dna.txt").write_text("".join(rng.choices("ACGT", k=1_000_000)))
    words = ["--dataset_name", tmp_path / "dna.txt", "--vocab_size", 600, "--output_dir", tmp_path / "out"]
    done = forked.run("data.tokens.tokenizer", words)
    assert done.returncode == 0 and len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 600
