"""load_rows: from settings to rows of tokens, compared with a packer that is written here."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from data.load import eval_loader, train_loader
from data.tokens.tokenizer import load_tokenizer
from tests import forked
from tests.data_runs import all_ids, files_of, load, make_texts, save_tokenizer, settings, write_jsonl

PIECES = ["word ", "  ", "\n", "\r\n", "été ", "日本 ", "🎉", "\0", "<|endoftext|>", "x = 1\n", "\t", "é"]
PIECES.append("9 ")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def random_corpus(path: Path, rng: random.Random) -> list[str]:
    """Writes a .jsonl file; returns the documents to train or evaluate on, in order."""
    documents = ["".join(rng.choices(PIECES, k=rng.randint(0, 60))) for _ in range(rng.randint(12, 60))]
    documents = [f"{rng.randrange(10**6)} {text}" if text.strip() else text for text in documents]
    documents += rng.choices(documents, k=5)
    rng.shuffle(documents)
    lines = [json.dumps({"text": text}, ensure_ascii=rng.random() < 0.5) for text in documents]
    lines.insert(rng.randrange(len(lines)), json.dumps({"text": "lone \ud800"}))
    path.write_text("\n".join(lines), "utf-8")
    return [text for text in dict.fromkeys(documents) if text.strip()]


@pytest.mark.parametrize("number", range(40))
def test_rows_hold_every_token_of_every_document_once(number, tmp_path, tokenizer):
    """Except for less than a row at the end of each split. The packer here adds EOS to each document."""
    rng = random.Random(number)
    name = tmp_path / "a.jsonl"
    documents = random_corpus(name, rng)
    T = rng.choice([4, 16, 33])
    _, rows, evals = load(tmp_path, name, tokenizer_name=tokenizer, block_size=T, seed=number)
    plain = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    plain.encode_special_tokens = True
    encoded = [plain.encode(text).ids + [plain.token_to_id("<|endoftext|>")] for text in documents]
    parts = {"train": rows, "eval": evals[""]}
    streams = {split: all_ids(part).ravel().tolist() for split, part in parts.items()}
    remaining = {split: list(ids) for split, ids in streams.items()}
    for ids in encoded:
        for stream in remaining.values():
            if stream and stream[: len(ids)] == ids[: len(stream)]:  # otherwise it was dropped
                del stream[: len(ids)]
                break
    assert not remaining["train"] and not remaining["eval"]
    assert 0 <= sum(map(len, encoded)) - sum(map(len, streams.values())) <= 2 * (T - 1)
    assert len(rows) == len(streams["train"]) // T > 0 and len(evals[""]) > 0


@pytest.mark.parametrize("T", [16, 30])
def test_loaders_give_every_row_once_per_epoch_and_pad_evaluation_batches(T, tmp_path, tokenizer):
    name = write_jsonl(tmp_path / "a.jsonl", make_texts(40))
    args = settings(tmp_path, name, tokenizer_name=tokenizer, block_size=T, max_eval_samples=10)
    _, rows, evals = load(tmp_path, name, tokenizer_name=tokenizer, block_size=T)
    n, ids = len(rows), all_ids(rows)
    batches = [batch for batch in train_loader(rows, args, 0, 2 * n)]
    names = "position", "epoch", "row"
    keys = [np.concatenate([batch[name].numpy() for batch in batches]) for name in names]
    assert keys[0].tolist() == list(range(2 * n)) and (keys[1] == np.arange(2 * n) // n).all()
    assert sorted(keys[2][:n]) == sorted(keys[2][n:]) == list(range(n)) and (keys[2][:n] != keys[2][n:]).any()
    assert all((batch["input_ids"].numpy() == ids[batch["row"]]).all() for batch in batches)
    resumed = [batch["row"].tolist() for batch in train_loader(rows, args, 8, 2 * n)]
    assert resumed == [batch["row"].tolist() for batch in batches[2:]]
    drawn = [batch for batch in eval_loader(evals[""], args)]
    numbers = sum((batch["row"].tolist() for batch in drawn), [])
    assert len(numbers) == 12 and numbers[-2:] == [-1, -1] and len({*numbers}) == 11
    assert not drawn[-1]["input_ids"][2:].any() and drawn[-1]["input_ids"].shape == (4, T)


def test_a_small_corpus_holds_out_at_least_one_row(tmp_path, tokenizer):
    for n in (2, 3, 10, 60):
        texts = make_texts(n, seed=n)
        name = write_jsonl(tmp_path / f"{n}.jsonl", texts)
        known, rows, evals = load(tmp_path, name, tokenizer_name=tokenizer, validation_fraction=1e-6)
        text = {split: known.decode(all_ids(split_rows).ravel())
                for split, split_rows in (("train", rows), ("eval", evals[""]))}  # fmt: skip
        inside = {split: {t for t in texts if t[:40] in joined} for split, joined in text.items()}
        assert len(inside["eval"]) and not inside["train"] & inside["eval"], n


def test_evaluation_documents_are_never_trained_on(tmp_path, tokenizer, capsys):
    texts = make_texts(60)
    for name, documents in (("a", texts), ("copy", texts[:40]), ("other", make_texts(9, seed=5))):
        write_jsonl(tmp_path / f"{name}.jsonl", documents)
    a, copy, other = (str(tmp_path / f"{name}.jsonl") for name in ("a", "copy", "other"))
    settings = dict(tokenizer_name=tokenizer)
    with pytest.raises(ValueError, match="all of its documents are in the evaluation data"):
        load(tmp_path, a, eval_dataset_name=[a], **settings)
    tokenizer, rows, evals = load(tmp_path, a, eval_dataset_name=[copy, other], **settings)
    assert "40 of 60 documents are also in the evaluation data: they are left out" in capsys.readouterr().out
    assert list(evals) == ["copy", "other"]
    text = tokenizer.decode(all_ids(rows).ravel())
    assert all((t[:60] in text) == (i >= 40) for i, t in enumerate(texts))


def test_a_mixture_has_exact_shares_and_leaks_no_evaluation_document(tmp_path, tokenizer):
    small, large = make_texts(8, seed=1), make_texts(300, seed=2)
    shared = small + large[:3]  # the large dataset holds all documents of the small one
    names = [write_jsonl(tmp_path / f"{name}.jsonl", documents)
             for name, documents in (("small", shared), ("large", large + small))]  # fmt: skip
    args = settings(tmp_path, *names, tokenizer_name=tokenizer, mixture=[0.25, 0.75], block_size=16)
    tokenizer, rows, evals = load(tmp_path, *names, tokenizer_name=tokenizer, mixture=[0.25, 0.75])
    assert list(evals) == ["small", "large"]
    trained, evaluated = ([tokenizer.decode(all_ids(part).ravel()) for part in parts.values()]
                          for parts in (rows.sources, evals))  # fmt: skip
    held_out = {text for text in shared + large if any(text[:60] in part for part in evaluated)}
    assert held_out & {*shared} and not any(text[:60] in part for text in held_out for part in trained)

    def row_keys(start):
        names = "position", "row", "source"
        return [key for batch in train_loader(rows, args, start, 4000)
                for key in zip(*(batch[name].tolist() for name in names), strict=True)]  # fmt: skip

    keys = row_keys(0)
    for window in range(4):
        sources = [source for _, _, source in keys[1000 * window : 1000 * window + 1000]]
        assert sources.count(0) == 250 and sources.count(1) == 750
    assert row_keys(1500) == keys[1500:]
    for source, source_rows in enumerate(rows.sources.values()):
        taken, n = [row for _, row, s in keys if s == source], len(source_rows)
        assert sorted(taken[:n]) == list(range(n))[: len(taken)] or len(taken) < n
    batch = next(iter(train_loader(rows, args, 0, 64)))
    for ids, row, source in zip(batch["input_ids"], batch["row"], batch["source"], strict=True):
        assert ids.tolist() == all_ids([*rows.sources.values()][source])[row].tolist()
    assert rows.epochs(4000)["small"] == 1000 / len(rows.sources["small"])


def test_a_data_set_with_share_0_is_only_evaluated(tmp_path, tokenizer):
    names = [write_jsonl(tmp_path / f"{name}.jsonl", make_texts(40, seed)) for seed, name in enumerate("ab")]
    _, rows, evals = load(tmp_path, *names, tokenizer_name=tokenizer, mixture=[1, 0])
    assert list(evals) == ["a", "b"] and len(rows) == len(rows.sources["a"])
    batch = next(iter(train_loader(rows, settings(tmp_path, *names), 0, 200)))
    assert not batch["source"].any()


def test_max_train_samples_gives_the_first_rows_and_reads_little_more(tmp_path, tokenizer):
    name = write_jsonl(tmp_path / "a.jsonl", make_texts(3000))
    _, all_rows, _ = load(tmp_path, name, tokenizer_name=tokenizer, validation_fraction=0.02)
    limits = dict(validation_fraction=0.02, max_train_samples=50)
    _, first_rows, _ = load(tmp_path, name, tokenizer_name=tokenizer, **limits)
    assert len(first_rows) == 50 and (all_ids(first_rows) == all_ids(all_rows)[:50]).all()
    assert first_rows.fingerprint != all_rows.fingerprint
    read = [json.loads(path.read_text())["accounting"]["train"]["read"]
            for path in tmp_path.glob("cache/rows-*/manifest.json")]  # fmt: skip
    assert min(read) < 100 and max(read) == 3000


def test_a_damaged_cache_is_reported_and_rebuilt(tmp_path, tokenizer, capsys):
    name = write_jsonl(tmp_path / "a.jsonl", make_texts(60))
    before = all_ids(load(tmp_path, name, tokenizer_name=tokenizer)[1])
    (folder,) = tmp_path.glob("cache/rows-*[0-9a-f]")
    undamaged = files_of(folder)
    for damage in ("flipped", "gone", "manifest"):
        path = folder / "manifest.json" if damage == "manifest" else next(folder.glob("train-*.npy"))
        data = bytearray(path.read_bytes())
        if damage == "gone":
            path.unlink()
        else:
            data[-1] ^= 64
            path.write_bytes(b'{"splits": {}}' if damage == "manifest" else data)
        capsys.readouterr()
        assert (all_ids(load(tmp_path, name, tokenizer_name=tokenizer)[1]) == before).all()
        assert "all of it is prepared again" in capsys.readouterr().out or damage == "manifest", damage
        assert files_of(folder) == undamaged, damage


def test_a_tokenizer_with_equal_ids_reuses_rows_and_keeps_its_template_and_padding(tmp_path):
    name, folder = write_jsonl(tmp_path / "a.jsonl", make_texts(40)), tmp_path / "tokenizer"
    words, fingerprints = load_tokenizer(save_tokenizer(folder)), set()
    for template in (None, "{{ messages }}", {"default": "{{ messages }}", "tool_use": "{{ tools }}"}):
        words.chat_template, words.pad_token = template, template and words.eos_token
        words.save_pretrained(folder)
        tokenizer, rows, _ = load(tmp_path, name, tokenizer_name=str(folder))
        assert (tokenizer.chat_template, tokenizer.pad_token) == (template, words.pad_token)
        fingerprints.add(rows.fingerprint)
    assert len(fingerprints) == 1


def test_the_fingerprint_changes_with_content_tokenizer_and_block_size(tmp_path, tokenizer):
    other = save_tokenizer(tmp_path / "other", seed=1)
    texts, fingerprints = make_texts(60), set()
    for documents, tokenizer_name, T in (
        (texts, tokenizer, 16), (texts, tokenizer, 17), (texts, other, 16), (texts[::-1], tokenizer, 16),
        (texts[1:] + ["y " * 99], tokenizer, 16),
    ):  # fmt: skip
        name = write_jsonl(tmp_path / "a.jsonl", documents)
        fingerprints.add(load(tmp_path, name, tokenizer_name=tokenizer_name, block_size=T)[1].fingerprint)
    assert len(fingerprints) == 5


LOAD_ROWS = """
import sys, json, hashlib
from accelerate import Accelerator
from data.load import load_rows, train_loader, eval_loader
from tests.data_runs import settings
accelerator = Accelerator(cpu=True)
args = settings(sys.argv[1], sys.argv[2], tokenizer_name=sys.argv[3], max_eval_samples=10)
with accelerator.local_main_process_first():
    tokenizer, rows, evals = load_rows(args)
train = [b["position"].tolist() for b in accelerator.prepare(train_loader(rows, args, 8, 40))]
evaluated = [b["row"].tolist() for b in accelerator.prepare(eval_loader(evals[""], args))]
print(json.dumps([accelerator.process_index, train, evaluated, rows.fingerprint]))
"""


def test_two_processes_share_the_rows_of_one_and_prepare_once(tmp_path, tokenizer):
    name = write_jsonl(tmp_path / "a.jsonl", make_texts(60))
    words = [tmp_path, name, tokenizer]
    done = forked.run_code(LOAD_ROWS, words, processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("data       train:") == 1
    two = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    single = json.loads(
        [line for line in forked.run_code(LOAD_ROWS, words).stdout.splitlines() if line.startswith("[")][0]
    )
    for i in (1, 2):
        merged = [batch for pair in zip(two[0][i], two[1][i], strict=True) for batch in pair]
        seen = [row for batch in merged for row in batch if row >= 0]
        assert seen == [row for batch in single[i] for row in batch if row >= 0]
    assert two[0][3] == two[1][3] == single[3]


def test_a_data_error_is_printed_once_and_ends_all_processes(tmp_path, tokenizer):
    done = forked.run_code(LOAD_ROWS, [tmp_path, tmp_path / "gone.jsonl", tokenizer], processes=2)
    assert done.returncode == 1 and done.stderr.count("ValueError: dataset_name") == 1


def test_a_run_says_that_it_waits_for_another_run_to_prepare_the_rows(tmp_path, tokenizer):
    """Then it uses the rows of the other run."""
    name = write_jsonl(tmp_path / "a.jsonl", make_texts(60))
    load(tmp_path, name, tokenizer_name=tokenizer)
    (folder,) = tmp_path.glob("cache/rows-*[0-9a-f]")
    shutil.copytree(folder, tmp_path / "kept")
    shutil.rmtree(folder)
    folder.mkdir()
    hold = "import filelock, sys, time\nwith filelock.FileLock(sys.argv[1]):\n    print('held', flush=True)\n"
    process, log = forked.start_code(hold + "    time.sleep(600)\n", [f"{folder}/.lock"], tmp_path)
    forked.wait_for(process, log, "held")
    waiting, waiting_log = forked.start_code(LOAD_ROWS, [tmp_path, name, tokenizer], tmp_path)
    forked.wait_for(waiting, waiting_log, "waiting for another run that is preparing")
    shutil.copytree(tmp_path / "kept", folder, dirs_exist_ok=True)
    process.kill()
    waiting.join(60)
    assert waiting.exitcode == 0 and "data       train:" not in waiting_log.read_text()
