"""data.prepare --parts: whatever the order of the parts, and killed anywhere, the same bytes; together they
are the documents, the duplicates and the counts of one preparation.
"""

import contextlib
import itertools
import random
import re
import time
from pathlib import Path

import datasets
import pytest

from data import prepare
from data.preparation import Preparation
from data.shards import read_manifest
from data.sources import files, installed, library
from data.sources.corpus import Source, load_corpus
from data.tokenizer import load_tokenizer
from tests import forked
from tests.runs import PROJECT
from tests.shard_data import command, files_of, make_texts, run, save_tokenizer, tokens_of, write_jsonl
from utils.io import urls

PARTS = 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write_source(folder: Path, evaluation: bool = True, n: int = 160) -> str:
    """Four files for training, for evaluation one each: with texts that are twice in a file, in two files, in
    files of several splits, and with what is no text."""
    texts, quarter = make_texts(n), n // 4
    splits = {f"train-{i}": [*texts[i * quarter : (i + 1) * quarter], *texts[i + 5 :: quarter // 3], "", None,
                             "\ud800", *texts[:9]] for i in range(4)}
    if evaluation:
        splits["validation"] = texts[: n // 8] + texts[-4:] + make_texts(9, 1) * 2
        splits["test"] = texts[n // 9 : n // 6] * 2 + make_texts(5, 1)
    folder.mkdir()
    for name, found in splits.items():
        write_jsonl(folder / f"{name}.jsonl", found)
    return str(folder)


def in_parts(source, folder, tokenizer, order=range(PARTS), parts=PARTS, **settings) -> Path:
    """Each part once to be read, and once to be prepared."""
    for part in [*order] * 2:
        assert run(source, folder, tokenizer, parts=parts, part=part, **settings) == 0
    return folder


@pytest.fixture(params=[1, 1 << 26], ids=["many units", "one unit"])
def units(request, monkeypatch):
    monkeypatch.setattr(files, "UNIT_BYTES", request.param)


@pytest.mark.parametrize("evaluation, settings", [
    (True, {}), (False, {"fim_rate": 0.5}), (True, {"keep_duplicates": []}), (False, {"keywords": ["e s"]})])
def test_any_number_of_parts_in_any_order_makes_the_files_of_one_preparation(
        tmp_path, tokenizer, evaluation, settings, units):
    """units: each of its files is one, or all are."""
    source = write_source(tmp_path / "source", evaluation)
    if "fim_rate" in settings:
        own = load_tokenizer(tokenizer)
        special = [f"<|fim_{name}|>" for name in ("prefix", "suffix", "middle")]
        own.add_special_tokens({"additional_special_tokens": special})
        tokenizer = str(tmp_path / "tokenizer")
        own.save_pretrained(tokenizer)
    assert run(source, tmp_path / "one", tokenizer, **settings) == 0
    for parts in (2, 3, 7):
        order = random.Random(parts).sample(range(parts), parts)
        made = in_parts(source, tmp_path / f"parts-{parts}", tokenizer, order, parts, **settings)
        assert files_of(made) == files_of(tmp_path / "one"), parts
    accounts = read_manifest(str(tmp_path / "one"))["accounting"]
    assert accounts["train"]["duplicate"] > 20 and accounts["train"]["unreadable"] >= 4
    assert evaluation == (accounts["train"]["evaluated"] > 9) == (accounts["validation"]["duplicate"] > 9)
    assert len(tokens_of(tmp_path / "one", "validation")) > 32


def test_parts_that_end_at_any_write_leave_the_bytes_of_those_that_do_not(tmp_path, tokenizer, monkeypatch):
    source = write_source(tmp_path / "source")
    whole = files_of(in_parts(source, tmp_path / "whole", tokenizer))
    rng, writes, write, folder = random.Random(3), itertools.count(1), urls.Folder.write, tmp_path / "parts"

    class Killed(BaseException):
        pass

    def write_or_die(*arguments):
        if next(writes) and rng.random() < 0.12:
            raise Killed
        write(*arguments)

    monkeypatch.setattr(urls.Folder, "write", write_or_die)
    for part in itertools.cycle([2, 0, 1]):
        with contextlib.suppress(Killed):
            assert run(source, folder, tokenizer, parts=PARTS, part=part) == 0
        if (folder / "manifest.json").exists():
            break
    assert next(writes) > 70  # about eight deaths
    assert files_of(folder) == whole


def test_parts_that_run_at_once_and_one_that_is_killed_leave_the_same_bytes(tmp_path, tokenizer, capsys):
    """As processes. Those that finish together do no harm, and once more is once too often."""
    source, log, folder = write_source(tmp_path / "source", n=600), tmp_path / "log", tmp_path / "parts"
    whole = files_of(in_parts(source, tmp_path / "whole", tokenizer, shard_mb=0.01))

    def start(part):
        words = command(source, folder, tokenizer, parts=PARTS, part=part, shard_mb=0.01)
        return forked.start(PROJECT, "data.prepare", words, log)

    for part in (2, 0):
        assert run(source, folder, tokenizer, parts=PARTS, part=part, shard_mb=0.01) == 0
    assert "is read. Run the same command again when these are: 1\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="not finished; run the same `python -m data.prepare`"):
        read_manifest(str(folder))
    before = len([*(folder / "progress").glob("*-*-*.npz")])
    process = start(1)  # the last one to be read goes on
    while process.is_alive() and len([*(folder / "progress").glob("*-*-*.npz")]) < before + 3:
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -9 and not (folder / "progress/part-00001.json").exists()
    forked.finish([start(part) for part in (1, 2, 0)], log)
    assert files_of(folder) == whole
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert run(source, folder, tokenizer, parts=PARTS, part=1, shard_mb=0.01) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before




@pytest.mark.parametrize("other_first", [True, False])
def test_two_that_find_all_done_at_once_write_one_manifest(tmp_path, tokenizer, monkeypatch, other_first):
    """On a store without locks: the other one joins the parts just before this one does, or just after."""
    source, url = write_source(tmp_path / "source"), f"memory://bucket/{other_first}"
    join = Preparation.finish
    one = files_of(in_parts(source, tmp_path / "parts", tokenizer))
    for part in (0, 1, 2, 0):
        assert run(source, url, tokenizer, parts=PARTS, part=part) == 0

    def join_beside_another(*arguments):
        monkeypatch.setattr(Preparation, "finish", join)
        made = None if other_first else join(*arguments)
        assert run(source, url, tokenizer, parts=PARTS, part=0) == 0
        return made or join(*arguments)

    monkeypatch.setattr(Preparation, "finish", join_beside_another)
    assert run(source, url, tokenizer, parts=PARTS, part=1) == 0
    assert Preparation.finish is join
    folder = urls.Folder(url)
    folder.fs.get(folder.root, str(tmp_path / "copy"), recursive=True)
    assert files_of(tmp_path / "copy") == one and not folder.names("progress")


def test_a_part_with_other_settings_is_refused(tmp_path, tokenizer, capsys, monkeypatch):
    source, folder = write_source(tmp_path / "source"), tmp_path / "parts"
    assert run(source, folder, tokenizer, parts=3, part=0) == 0
    for settings, message in [
        (dict(parts=4, part=1), "parts 3, now 4"), (dict(parts=3, part=1, seed=1), "seed 0, now 1"),
        (dict(parts=3, part=3), "part: must be 0 to 2"), (dict(parts=3), "part: must be 0 to 2.*is None"),
        (dict(part=1), "part: must be 0 to 0"), (dict(parts=0, part=0), "parts: must be 1 or greater"),
    ]:
        assert run(source, folder, tokenizer, **settings) == 2
        error = capsys.readouterr().err
        assert re.search(message, error) and error.count("error:") == 1 and "Traceback" not in error
    (tmp_path / "train.bin").write_bytes(bytes(1000))
    assert run(str(tmp_path / "train.bin"), folder, tokenizer, parts=3, part=1) == 2
    assert "holds tokens already: train on it as it is" in capsys.readouterr().err
    # Of two that begin at the same moment the settings of one stay, and the other leaves nothing.
    settings, check = folder / "progress/settings.json", prepare.earlier_manifest
    others = [settings.read_text()]

    def check_late(*arguments):
        if settings.read_text() in others:
            return None  # as if it were not there yet
        settings.write_text(others[0])
        return check(*arguments)

    monkeypatch.setattr(prepare, "earlier_manifest", check_late)
    assert run(source, folder, tokenizer, parts=3, part=1, seed=1) == 2
    assert not (folder / "progress/hashes-00001.npz").exists()


def test_one_part_is_what_no_parts_are(tmp_path, tokenizer):
    source = write_source(tmp_path / "source")
    assert run(source, tmp_path / "a", tokenizer) == 0
    assert run(source, tmp_path / "b", tokenizer, parts=1, part=0) == 0
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_parts_that_give_nothing_to_train_on_are_told_at_the_end(tmp_path, tokenizer, capsys):
    source = write_jsonl(tmp_path / "texts.jsonl", ["a", "b"])
    settings = {"parts": 3, "keywords": ["absent"]}
    for part in [0, 1, 2, 0]:
        assert run(source, tmp_path / "parts", tokenizer, part=part, **settings) == 0
    assert run(source, tmp_path / "parts", tokenizer, part=1, **settings) == 2
    assert "gives nothing to train on" in capsys.readouterr().err
    assert not [*(tmp_path / "parts").rglob("*.*")]


@pytest.mark.parametrize("kind", ["five files", "articles", "a part", "saved", "installed-docs"])
def test_the_units_of_a_source_are_all_of_it_in_order(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(files, "UNIT_BYTES", 1)
    monkeypatch.setattr(library, "UNIT_BYTES", 3000)
    texts, folder = make_texts(90), tmp_path / "source"
    folder.mkdir()
    lines = [line for text in texts for line in ("", " = Title = ", text)]
    if kind == "saved":
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder)
    for i in range({"five files": 5, "articles": 4, "a part": 5}.get(kind, 0)):
        found = lines[i * 70 : (i + 1) * 70] if kind == "articles" else texts[i::5]
        write_jsonl(folder / f"{i}.jsonl", found)
    few = lambda: ({"text": text} for text in texts)  # noqa: E731
    monkeypatch.setitem(installed.INSTALLED, "installed-docs", few)
    part = ":train[3:20]" if kind == "a part" else ""
    corpus = load_corpus(Source(kind if "installed" in kind else f"{folder}{part}"))
    assert (len(corpus.readers) > 4) == (kind in ("five files", "saved"))
    units = [[*corpus.documents(unit)] for unit in range(len(corpus.readers))]
    assert [*itertools.chain.from_iterable(units)] == [*corpus] and len([*corpus]) > 1
    assert all(units)
