"""data.prepare: every token accounted for, the same shards after any interruption, every kind of document
survived.
"""

import contextlib
import itertools
import os
import random
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from data import encode, filters, prepare
from data.filters import in_validation
from data.shards import open_shards, read_manifest
from data.sources.corpus import Source, load_corpus
from data.tokenizer import load_tokenizer, train_tokenizer
from tests import forked
from tests.shard_data import (
    command,
    files_of,
    make_texts,
    manifest_of,
    run,
    save_tokenizer,
    shard_bytes,
    tokens_of,
    write_jsonl,
)
from utils.io import retry, urls

PROJECT = Path(__file__).resolve().parent.parent
KILLS = int(os.environ.get("KILLS", "2"))  # moments at which the preparation is killed


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


ODD = [  # what a JSON line can hold, and the column of the account that must count it
    ("read", "kept as it is"), ("empty", ""), ("empty", " \n\t"), ("unreadable", None), ("unreadable", 17),
    ("unreadable", ["a", "list"]), ("duplicate", "kept as it is"), ("kept", "NUL \0 bytes \0\0 inside"),
    ("unreadable", "a lone surrogate \ud800"), ("kept", "<|endoftext|> written out is text"),
    ("kept", "the end"),
]


def test_every_document_and_every_token_is_accounted_for(tmp_path, tokenizer):
    long_line = ("all on one line " * 200 + "x" * 5000) * 40  # more than one batch of the tokenizer
    odd = [text for _, text in ODD]
    texts = odd + make_texts(150) + [long_line] + make_texts(30)  # the last 30 are duplicates
    source = Path(write_jsonl(tmp_path / "odd.jsonl", texts))
    damaged = b'{"text": "not UTF-8: \xff\xfe"}\n{"text": "cut off\n{"other": 1}\n'
    source.write_bytes(source.read_bytes() + damaged)
    assert run(str(source), tmp_path / "shards", tokenizer) == 0
    accounts = manifest_of(tmp_path / "shards")["accounting"]
    train, held = accounts["train"], accounts["validation"]
    assert train["read"] == len(texts) + 3
    assert train["unreadable"] == sum(kind == "unreadable" for kind, _ in ODD) + 3
    assert (train["empty"], train["duplicate"]) == (2, 31)
    assert train["read"] == sum(train[name] for name in (
        "unreadable", "empty", "filtered", "duplicate", "validation", "kept"))

    # An independent count: one document at a time through transformers' own tokenizer, in one Python list.
    reference = {"train": [], "validation": []}
    size = {"train": 0, "validation": 0}
    hub_tokenizer, seen = load_tokenizer(tokenizer), set()
    for text in texts:
        if isinstance(text, str) and text.strip() and text not in seen and "\ud800" not in text:
            seen.add(text)
            split = "validation" if in_validation(text, 0, 0.05) else "train"
            ids = hub_tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            reference[split] += [*ids, hub_tokenizer.eos_token_id]
            size[split] += len(text.encode())
    for split, account in accounts.items():
        assert account["tokens"] == len(reference[split])
        assert account["bytes"] == size[split]
        assert tokens_of(tmp_path / "shards", split).tolist() == reference[split]
    assert held["kept"] == train["validation"] > 0


@pytest.mark.parametrize("flag", [None, "keep_duplicates"])
def test_interrupted_at_any_write_the_shards_are_the_same_and_nothing_is_tokenized_twice(
        tmp_path, tokenizer, monkeypatch, flag):
    """Of a source with three splits, documents in several of them."""
    texts, source = make_texts(160), tmp_path / "source"
    source.mkdir()
    splits = {"test": texts[110:130], "valid": texts[125:150], "train": texts[:115] + texts[100:]}
    for name, found in splits.items():
        write_jsonl(source / f"{name}.jsonl", found)
    settings = {"shard_mb": 0.002} | ({flag: []} if flag else {})
    assert run(str(source), tmp_path / "whole", tokenizer, **settings) == 0
    writes, write, encoded, batches = [], urls.Folder.write, [], encode._batches

    class Killed(BaseException):
        pass

    def write_or_die(folder, name, data, retries=None):
        writes.append(name)
        if len(writes) == 4:  # each run but the last ends at its fourth write
            writes.clear()
            raise Killed
        write(folder, name, data, retries)

    def counted(documents):
        for batch in batches(documents):
            encoded.append(sum(ends for *_, ends, _ in batch))
            yield batch

    monkeypatch.setattr(urls.Folder, "write", write_or_die)
    monkeypatch.setattr(encode, "_batches", counted)
    status, runs = None, 0
    while status is None:
        runs += 1
        chunks = len([*(tmp_path / "parts" / "progress").glob("*-*-*.npz")])
        if chunks == len(manifest_of(tmp_path / "whole")["chunks"]):
            monkeypatch.setattr(urls.Folder, "write", write)
        with contextlib.suppress(Killed):
            status = run(str(source), tmp_path / "parts", tokenizer, **settings)
    assert runs > 9 and status == 0
    assert shard_bytes(tmp_path / "parts") == shard_bytes(tmp_path / "whole")
    whole, parts = manifest_of(tmp_path / "whole"), manifest_of(tmp_path / "parts")
    kept = sum(account["kept"] for account in whole["accounting"].values())
    longest = max(line["accounts"][line["chunk"][0]]["read"] for line in whole["chunks"])
    assert kept <= sum(encoded) <= kept + runs * longest, "a chunk that was cut off, once more"
    train = whole["accounting"]["train"]
    assert train["duplicate"] == 10
    assert train["kept"] + train["evaluated"] == (175 if flag == "keep_duplicates" else 165)
    for manifest in (whole, parts):
        for account in [*manifest["accounting"].values(),
                        *(account for line in manifest["chunks"] for account in line["accounts"].values())]:
            del account["seconds"]
    assert parts == whole
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("whole", "parts")]
    assert names[0] == names[1]


@pytest.mark.parametrize("how", ["deleted", "cut off", "changed"])
def test_any_file_that_is_lost_or_damaged_is_made_again_to_the_same_bytes(tmp_path, how):
    texts, source = make_texts(120), tmp_path / "source"
    source.mkdir()
    for name, found in {"test": texts[:20], "train": texts[10:] + texts[:60]}.items():
        write_jsonl(source / f"{name}.jsonl", found)
    folder, settings = tmp_path / "shards", {"shard_mb": 0.01, "validation_fraction": 0.2, "fim_rate": 0.5}
    tokenizer = train_tokenizer(texts, "bpe", 400, "gpt2", fim=True)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert run(str(source), folder, tmp_path / "tokenizer", **settings) == 0
    before = files_of(folder)
    assert {*manifest_of(folder)["splits"]} == {"train", "validation", "fim", "test"} and len(before) > 11
    config = (folder / "tokenizer/tokenizer_config.json").read_bytes()
    single = [[name] for name in [*before, *["tokenizer/tokenizer_config.json"] * (how == "deleted")]]
    for names in [*single, random.Random(0).sample([*before], 4)]:
        modified = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
        for name in names:
            data = bytearray((folder / name).read_bytes())
            data[-1] ^= 1
            (folder / name).write_bytes(data if how == "changed" else data[:-2])
            if how == "deleted":
                (folder / name).unlink()
        assert run(str(source), folder, tmp_path / "tokenizer", **settings) == 0
        assert files_of(folder) == before and not (folder / "progress").exists()
        assert (folder / "tokenizer/tokenizer_config.json").read_bytes() == config
        newer = [path for path, at in modified.items() if path.stat().st_mtime_ns > at]
        again = {str(path.relative_to(folder)) for path in newer}
        assert "manifest.json" in names or again <= {*names}, "whole files were written again"


def test_a_preparation_that_mends_and_is_killed_goes_on(tmp_path, tokenizer, monkeypatch):
    """And mends what was damaged in between, too."""
    source, folder = write_jsonl(tmp_path / "texts.jsonl", make_texts(120)), tmp_path / "shards"
    write = urls.Folder.write
    assert run(source, folder, tokenizer) == 0
    before, writes = shard_bytes(folder), itertools.count()

    class Killed(BaseException):
        pass

    def write_or_die(*arguments):
        if next(writes) == 5:
            raise Killed
        write(*arguments)

    monkeypatch.setattr(urls.Folder, "write", write_or_die)
    (folder / "train-00000-00001.npy").unlink()
    with pytest.raises(Killed):
        run(source, folder, tokenizer)
    (folder / "train-00000-00000.npy").unlink()
    (folder / "validation-00000.npy").unlink()
    assert run(source, folder, tokenizer) == 0
    assert shard_bytes(folder) == before


def test_a_damaged_file_of_a_source_that_changed_is_told(tmp_path, tokenizer, capsys, monkeypatch):
    """And what is whole stays as it is."""
    source = write_jsonl(tmp_path / "texts.jsonl", make_texts(50))
    assert run(source, tmp_path / "shards", tokenizer) == 0
    (tmp_path / "shards/train-00000-00001.npy").unlink()
    before = shard_bytes(tmp_path / "shards")
    others = [{"text": text} for text in make_texts(50, 1)]
    for found in (others, others[:1]):
        corpus = replace(load_corpus(Source(source)), readers=[lambda found=found: iter(found)])
        monkeypatch.setattr(prepare, "load_corpus", lambda *_, corpus=corpus, **__: corpus)
        assert run(source, tmp_path / "shards", tokenizer) == 2
        assert "cannot be made again, because the source has other documents now" in capsys.readouterr().err
        assert shard_bytes(tmp_path / "shards").items() >= before.items()


def test_killed_at_random_moments_the_same_command_ends_with_the_same_shards(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "texts.jsonl", make_texts(4000))
    arguments = command(source, tmp_path / "killed", tokenizer, shard_mb=0.1)
    assert prepare.main(command(source, tmp_path / "whole", tokenizer, shard_mb=0.1)) == 0
    shards = len(shard_bytes(tmp_path / "whole"))
    rng, log = random.Random(time.time_ns()), tmp_path / "log"
    moments = []
    for i in range(KILLS):
        # The moment: so many shards are there, and a few milliseconds more: anywhere in the work.
        target = round(shards * (i + rng.random()) / KILLS * 0.95)
        process = forked.start(PROJECT, "data.prepare", arguments, log)
        while process.is_alive() and len(shard_bytes(tmp_path / "killed")) < target:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.join()
        moments.append((target, process.exitcode))
    forked.finish([forked.start(PROJECT, "data.prepare", arguments, log)], log)
    assert any(code == -signal.SIGKILL for _, code in moments), moments
    assert shard_bytes(tmp_path / "killed") == shard_bytes(tmp_path / "whole"), moments
    killed, whole = (read_manifest(str(tmp_path / name)) for name in ("killed", "whole"))
    assert killed["splits"] == whole["splits"]
    assert not list((tmp_path / "killed").rglob("*.tmp")) and not (tmp_path / "killed" / "progress").exists()
    print(f"killed when so many of {shards} shards were there: {moments}")


def test_documents_without_a_keyword_are_counted_and_left_out(tmp_path, tokenizer):
    texts = [*make_texts(100), None, "needle in a haystack", "needle again"] * 2
    source, made = write_jsonl(tmp_path / "texts.jsonl", texts), tmp_path / "shards"
    settings = {"keywords": ["needle", "absent"], "validation_fraction": 0}
    assert run(source, made, tokenizer, **settings) == 0
    account = manifest_of(made)["accounting"]["train"]
    expected = {"read": 206, "filtered": 200, "unreadable": 2, "duplicate": 2, "kept": 2}
    assert {name: account[name] for name in expected} == expected
    text = load_tokenizer(tokenizer).decode(tokens_of(made, "train"))
    assert text.startswith("needle in a haystack<|endoftext|>needle aga")


def test_all_splits_of_a_source_become_shards_and_what_is_evaluated_on_is_not_trained_on(
        tmp_path, tokenizer, capsys):
    texts, made = make_texts(150), tmp_path / "shards"
    splits = {"train": texts[:100], "validation": texts[90:120], "test": texts[115:]}
    (tmp_path / "source").mkdir()
    for name, found in splits.items():
        write_jsonl(tmp_path / "source" / f"my-{name}.jsonl", found)
    assert run(str(tmp_path / "source"), made, tokenizer) == 0
    expected = {"train": texts[:90], "validation": texts[90:115], "test": texts[115:]}
    manifest = manifest_of(made)
    accounts = manifest["accounting"]
    assert {name: account["read"] for name, account in accounts.items()} == {
        "train": 100, "validation": 30, "test": 35}
    assert (accounts["train"]["evaluated"], accounts["validation"]["duplicate"]) == (10, 5)
    assert "10 evaluated" in capsys.readouterr().out
    own = load_tokenizer(tokenizer)
    for name, found in expected.items():
        ids = [own(text, add_special_tokens=False)["input_ids"] + [own.eos_token_id] for text in found]
        ids = sum(ids, [])
        assert tokens_of(made, name).tolist() == ids
        assert manifest["splits"][name]["tokens"] == len(ids)
    one = tmp_path / "one"
    assert run(str(tmp_path / "source"), one, tokenizer, split="test", validation_fraction=0) == 0
    assert tokens_of(one, "train").tolist() == tokens_of(made, "test").tolist()
    assert len(open_shards(str(made), tmp_path / "cache").rows("test", 32)) == len(ids) // 32


def test_a_finished_preparation_is_left_alone_and_other_settings_are_refused(tmp_path, tokenizer, capsys):
    source = write_jsonl(tmp_path / "texts.jsonl", make_texts(50))
    assert run(source, tmp_path / "shards", tokenizer) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").rglob("*")}
    assert run(source, tmp_path / "shards", tokenizer) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").rglob("*")} == before
    assert "nothing to do" in capsys.readouterr().out
    assert run(source, tmp_path / "shards", tokenizer, shard_mb=64, seed=3) == 2
    error = capsys.readouterr().err
    assert "shard_mb 0.004096, now 64" in error and "seed 0, now 3" in error and "Traceback" not in error
    write_jsonl(tmp_path / "texts.jsonl", make_texts(51))
    assert run(source, tmp_path / "shards", tokenizer) == 2
    assert "content" in capsys.readouterr().err


@pytest.mark.parametrize("settings, message", [
    ({"tokenizer_name": "", "shard_mb": 0, "validation_fraction": 1},
     r"(?s)shard_mb: .*is 0\.0.*tokenizer_name: none.*validation_fraction: .*is 1\.0"),
    ({"tokenizer_name": "/nowhere"}, "tokenizer_name '/nowhere' cannot be loaded"),
    ({"dataset_name": "/nowhere.jsonl"}, "no such file"),
    ({"output_dir": "/proc/nowhere"}, "/proc/nowhere cannot be written"),
    ({"output_dir": str(PROJECT)}, "is not empty and holds no shards"),
    ({"keywords": ["absent"]}, "gives nothing to train on"),
])
def test_a_users_mistake_is_one_message_and_status_2(tmp_path, tokenizer, capsys, settings, message):
    source = write_jsonl(tmp_path / "texts.jsonl", make_texts(5))
    assert run(source, tmp_path / "shards", tokenizer, **settings) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("error:") == 1 and "Traceback" not in error


def test_two_runs_at_once_are_refused(tmp_path, tokenizer, capsys):
    source = write_jsonl(tmp_path / "texts.jsonl", make_texts(9))
    with prepare.only_run(urls.Folder(tmp_path / "shards"), "lock", 0):
        assert run(source, tmp_path / "shards", tokenizer) == 2
    assert "another run is preparing" in capsys.readouterr().err
    assert run(source, tmp_path / "shards", tokenizer) == 0


def test_a_source_that_stays_away_ends_the_run(tmp_path, tokenizer, monkeypatch, capsys):
    source = write_jsonl(tmp_path / "texts.jsonl", make_texts(300))
    assert run(source, tmp_path / "whole", tokenizer) == 0
    corpus, away = load_corpus(Source(source)), True

    def rows():
        for i, document in enumerate(corpus):
            if away and i == 280:
                raise TimeoutError("no answer")
            yield document

    monkeypatch.setattr(prepare, "load_corpus", lambda *_, **__: replace(corpus, readers=[rows]))
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: None)
    assert run(source, tmp_path / "shards", tokenizer) == 1
    assert "item 280, failed 8 times" in capsys.readouterr().err
    away = False
    assert run(source, tmp_path / "shards", tokenizer) == 0
    assert shard_bytes(tmp_path / "shards") == shard_bytes(tmp_path / "whole")


def test_progress_where_documents_become_slow_has_a_line_at_each_interval(monkeypatch, capsys):
    """tqdm guesses from the first documents how many come between two lines."""
    monkeypatch.setattr(filters, "SECONDS_BETWEEN_LINES", 0.05)

    def documents():
        yield from range(100_000)
        for number in range(8):
            time.sleep(0.1)
            yield number

    assert len([*filters.show_progress(documents(), "preparing")]) == 100_008
    lines = capsys.readouterr().err.split("\n")
    counts = [line.split()[1] for line in lines if "preparing: " in line]
    assert len(counts) >= 8 and counts[-1] == "100008", lines
