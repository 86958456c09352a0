"""--show: the rows that a run would begin with, compared with those that its update gets."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from tests.checked import MASKED, apply, copy_project
from tests.forked import finish, start, start_all
from tests.runs import PROJECT, TINY, write_corpus, write_english
from utils.learning.losses import keytoken_table

ROWS = 10  # of the first two steps of eight
KEYTOKENS = ["import", "self", "plot"]
CASES = {  # edit, script, settings
    "causal": (None, "train_clm.py", {}),
    "masked": (None, "train_mlm.py", {}),
    "pairs": (None, "train_mlm.py", {"model_type": "bert", "next_sentence": True, "block_size": 96}),
    "whole words": ("whole-word-masking", "train_mlm.py", {}),
}
SAVE = """
                torch.save((batch, locals().get("weights")), f"{step}.fed")
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("show")
    whole = map(json.loads, write_corpus(folder / "whole.jsonl").read_text().splitlines())
    parts = [json.dumps({"content": one["content"][at : at + 200]})
             for one in whole for at in range(0, 4000, 200)]  # fmt: skip
    (folder / "corpus.jsonl").write_text("\n".join(parts))  # most rows hold the end of a document
    write_english(folder / "english.jsonl")
    write_english(folder / "notes.jsonl", part=120)  # pairs that do not fill a row
    return folder


def settings(workspace, script, **changes):
    own = {"dataset_name": workspace / "corpus.jsonl", "keytokens": KEYTOKENS}
    if script == "train_mlm.py":
        own = {"dataset_name": workspace / "english.jsonl", **MASKED}
    if changes.get("next_sentence"):
        own["dataset_name"] = workspace / "notes.jsonl"
    return {**TINY, **own, "max_train_steps": 2, "eval_at_start": False, "cache_dir": workspace / "cache",
            "output_dir": workspace / "none", **changes}  # fmt: skip


def shown(workspace, script, folder=PROJECT, processes=1, **changes) -> str:
    """What --show prints, to a file. There is no output folder then."""
    log = workspace / "log"
    log.unlink(missing_ok=True)
    flags = settings(workspace, script, **{"show": ROWS, **changes})
    finish(start_all(folder, script, flags, log, processes), log)
    assert not (workspace / "none").exists()
    return log.read_text()


@pytest.fixture(scope="module", params=CASES)
def case(request, workspace):
    """What the script prints, and what its update gets: rows of steps 1 and 2."""
    edit, script, changes = CASES[request.param]
    folder, run = workspace / request.param, workspace / f"{request.param}-run"
    folder.mkdir()
    copy_project(folder)
    if edit:
        apply(PROJECT / f"docs/edits/{edit}.diff", folder)
    text = shown(workspace, script, folder, **changes)
    code, last = (folder / script).read_text(), "                accelerator.backward("
    assert code.count(last) == 1
    (folder / script).write_text(code.replace(last, SAVE + last))
    flags = settings(workspace, script, output_dir=run, **changes)
    finish([start(folder, script, flags, folder / "log")], folder / "log")
    rows = []
    for step in range(2):
        batch, weights = torch.load(folder / f"{step}.fed")
        batch |= {} if weights is None else {"weight": weights}
        columns = {name: column.tolist() for name, column in batch.items()}
        rows += [{name: column[i] for name, column in columns.items()} for i in range(len(batch["row"]))]
    tokenizer = AutoTokenizer.from_pretrained(run)
    return SimpleNamespace(name=request.param, text=text, rows=rows[:ROWS], tokenizer=tokenizer)


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """(facts, lines) of each row."""
    found = re.findall(r"^(step \d+, row .*)\n((?:  │ .*\n)+)", text, re.M)
    return [(facts, [line[4:] for line in body.split("\n")[:-1]]) for facts, body in found]


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text.replace("\\n", "").replace("\x0c", "\\x0c"))


def label_text(line: str) -> str:
    """As it was before it was masked."""
    return re.sub(r"«([^«»]*?)(?:→[^«»]*)?»", r"\1", line)


def test_rows_are_those_of_the_first_steps_decoded(case):
    found = blocks(case.text)
    assert len(found) == ROWS
    for number, ((facts, lines), row) in enumerate(zip(found, case.rows, strict=True)):
        assert facts.startswith(f"step {1 + number // 8}, row {row['row']:,}")
        ids = list(row["input_ids"])
        for slot, label in zip(row.get("slots", []), row.get("slot_labels", []), strict=True):
            if label != -100:
                ids[slot] = label
        real = sum(mask > 0 for mask in row.get("attention_mask", [1] * len(ids)))
        expected = case.tokenizer.decode(ids[:real], clean_up_tokenization_spaces=False)
        assert squeezed("".join(map(label_text, lines))) == squeezed(expected)
        assert f"{real} tokens" in facts and (f"{len(ids) - real} of padding" in facts) == (real < len(ids))
    batch = re.search(r"^  a batch is (.*)$", case.text, re.M)[1]
    assert f"input_ids int64 [8, {len(case.rows[0]['input_ids'])}]" in batch
    assert all(f"{name} int64" in batch for name in case.rows[0] if name not in ("key", "weight"))
    if case.name == "causal":  # with every space and line, each document's end closing a line
        eos = case.tokenizer.eos_token
        assert eos in case.text.split("step 1")[0]
        for (_, lines), row in zip(found, case.rows, strict=True):
            expected = case.tokenizer.decode(row["input_ids"]).replace("\x0c", "\\x0c")
            ended = re.sub(re.escape(eos) + "(?!$)", f"{eos}\n", expected)
            assert label_text("\n".join(lines)) == ended


def test_masks_are_those_of_the_first_steps(case):
    if "slots" not in case.rows[0]:
        pytest.skip("nothing is masked")

    def word(token):
        return squeezed(case.tokenizer.decode([token]))

    kinds = set()
    for (facts, lines), row in zip(blocks(case.text), case.rows, strict=True):
        ids, labels = row["input_ids"], zip(row["slots"], row["slot_labels"], strict=True)
        expected = [(ids[slot], label) for slot, label in sorted(labels) if label != -100]
        found = re.findall(r"«([^«»]*)→([^«»]*)»", "\n".join(lines))
        assert [(squeezed(given), squeezed(label)) for label, given in found] == [
            (word(given), word(label)) for given, label in expected
        ]
        assert f"{len(expected)} to be predicted" in facts
        kinds |= {"kept" if a == b else a == case.tokenizer.mask_token_id for a, b in expected}
    assert kinds == {"kept", True, False}
    assert case.text.split("step 1")[0].count("to be predicted") == 1


def test_pairs_have_their_parts_and_their_label(case):
    if case.name != "pairs":
        pytest.skip("no pairs")
    assert "label 0: B, after A and [SEP], follows A; 1: B is from another" in case.text.split("step 1")[0]
    labels = set()
    for (facts, lines), row in zip(blocks(case.text), case.rows, strict=True):
        labels.add(row["next_sentence_label"])
        assert facts.endswith(f"label {row['next_sentence_label']}")
        parts = [line for line in lines if line.endswith("[SEP]")]
        assert len(parts) == 2 and lines[-1] is parts[-1]
        assert [part.startswith("[CLS]") for part in parts] == [True, False]
    assert labels == {0, 1}


def test_key_tokens_are_marked_and_rows_weigh_what_the_loss_takes(case):
    if case.name != "causal":
        pytest.skip("no key tokens")
    key = keytoken_table(KEYTOKENS, case.tokenizer, "cpu").nonzero().flatten().tolist()
    weights = set()
    for (facts, lines), row in zip(blocks(case.text), case.rows, strict=True):
        expected = [case.tokenizer.decode([token]).strip() for token in row["input_ids"] if token in key]
        assert re.findall(r"«([^«»]*)»", "\n".join(lines)) == expected
        assert f"{len(expected)} key token" in facts and facts.endswith(f"weight {row['weight']:g}")
        weights.add(row["weight"])
    assert len(weights) > 1


@pytest.mark.parametrize("script", ["train_clm.py", "train_mlm.py"])
def test_default_settings_make_nothing_and_text_cannot_garble_the_terminal(script, workspace):
    """Not even a repository, for which there is no token here. Escapes, half characters and overrides of the
    direction of writing are in the text."""
    wild = workspace / "wild.jsonl"
    texts = [f"import pandas {i} '\x1b[31m\x07\u202e' # " + "\U0001f600\u00e9" * (20 + i) for i in range(200)]
    wild.write_text("\n".join(json.dumps({"content": text}) for text in texts))
    flags = {"dataset_name": wild, "cache_dir": workspace / "cache", "output_dir": workspace / "none",
             "show": 20, "push_to_hub": True, "block_size": 61}  # fmt: skip
    log = workspace / "log"
    log.unlink(missing_ok=True)
    finish([start(PROJECT, script, flags, log)], log)
    text = log.read_text()
    assert not (workspace / "none").exists()
    assert "\\x1b[31m\\x07\\u202e" in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_of_several_processes_the_main_one_prints_its_rows(workspace):
    rows = blocks(shown(workspace, "train_clm.py", show=16))
    text = shown(workspace, "train_clm.py", processes=2, per_device_train_batch_size=4, show=8)
    assert text.count("What the model is fed") == 1
    assert blocks(text) == rows[:4] + rows[8:12]


def test_the_folder_of_a_run_with_other_settings_stays_as_it_is(workspace):
    folder, log = workspace / "other", workspace / "other-log"
    finish([start(PROJECT, "train_clm.py", settings(workspace, "train_clm.py", output_dir=folder), log)], log)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert before
    assert len(blocks(shown(workspace, "train_clm.py", output_dir=folder, block_size=16, show=3))) == 3
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
