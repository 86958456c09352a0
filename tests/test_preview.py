"""--show prints the first rows of a run. They are compared with the rows that the training step gets."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from tests.checked import MASKED, copy_project
from tests.forked import finish, start, start_all
from tests.runs import PROJECT, TINY, write_corpus, write_english
from utils.io.text import visible
from utils.learning.losses import keytoken_table

ROWS = 10  # of the first two steps, which have eight each
KEYTOKENS = ["import", "self", "plot"]
CASES = {  # script, settings
    "causal": ("train_clm.py", {}),
    "masked": ("train_mlm.py", {}),
    "pairs": ("train_mlm.py", {"model_type": "bert", "next_sentence": True, "block_size": 96}),
}
SAVE = """
                torch.save((batch, locals().get("weights")), f"{step}.fed")
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("show")
    documents = map(json.loads, write_corpus(folder / "whole.jsonl").read_text().splitlines())
    parts = [json.dumps({"content": document["content"][at : at + 200]})
             for document in documents for at in range(0, 4000, 200)]  # fmt: skip
    (folder / "corpus.jsonl").write_text("\n".join(parts))  # most rows contain the end of a document
    write_english(folder / "english.jsonl")
    write_english(folder / "notes.jsonl", part=120)  # pairs that do not fill a row
    return folder


def settings(workspace, script, **changes):
    data = {"dataset_name": workspace / "corpus.jsonl", "keytokens": KEYTOKENS}
    if script == "train_mlm.py":
        data = {"dataset_name": workspace / "english.jsonl", **MASKED}
    if changes.get("next_sentence"):
        data["dataset_name"] = workspace / "notes.jsonl"
    return {**TINY, **data, "max_train_steps": 2, "eval_at_start": False, "cache_dir": workspace / "cache",
            "output_dir": workspace / "none", **changes}  # fmt: skip


def shown(workspace, script, folder=PROJECT, processes=1, **changes) -> str:
    """The output of --show. It must not create an output folder."""
    log = workspace / "log"
    log.unlink(missing_ok=True)
    flags = settings(workspace, script, **{"show": ROWS, **changes})
    finish(start_all(folder, script, flags, log, processes), log)
    assert not (workspace / "none").exists()
    return log.read_text()


@pytest.fixture(scope="module", params=CASES)
def case(request, workspace):
    """The output of --show, and the rows that the training steps 1 and 2 get."""
    script, changes = CASES[request.param]
    folder, run = workspace / request.param, workspace / f"{request.param}-run"
    folder.mkdir()
    copy_project(folder)
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


def blocks(text: str) -> list[tuple[str, str]]:
    """(numbers, text) of each row."""
    return re.findall(r"^(position \d+, [^\n]*)\n((?:(?!\nposition \d).)*)", text, re.M | re.S)


def test_show_prints_the_rows_of_the_first_steps(case):
    assert len(blocks(case.text)) == ROWS
    masks = set()
    for (facts, lines), row in zip(blocks(case.text), case.rows, strict=True):
        printed = dict(fact.split(" ") for fact in facts.split(", "))
        numbers = {name: value for name, value in row.items() if not isinstance(value, list)}
        assert {name: float(value) for name, value in printed.items()} == pytest.approx(numbers)
        real = sum(row.get("attention_mask", [1] * len(row["input_ids"])))
        text = visible(case.tokenizer.decode(row["input_ids"][:real], clean_up_tokenization_spaces=False))
        expected = [text]
        if "slots" in row:
            pairs = sorted(zip(row["slots"], row["slot_labels"], strict=True))
            labels = [(place, label) for place, label in pairs if label != -100]
            words = (f"{place} {case.tokenizer.decode([label]).strip()!r}" for place, label in labels)
            expected.append(f"to predict, by position: {', '.join(words)}")
            tokens = [(row["input_ids"][place], label) for place, label in labels]
            masks |= {"kept" if a == b else a == case.tokenizer.mask_token_id for a, b in tokens}
        assert lines.rstrip("\n") == "\n".join(expected).rstrip("\n")
    assert masks == ({"kept", True, False} if "slots" in case.rows[0] else set())
    [columns] = re.findall(r"A batch is (.*)\.$", case.text, re.M)
    assert f"input_ids int64 [8, {len(case.rows[0]['input_ids'])}]" in columns
    assert {name.split(" ")[0] for name in re.split(r"(?<=\]), ", columns)} == case.rows[0].keys()
    if case.name == "causal":
        key = keytoken_table(KEYTOKENS, case.tokenizer, "cpu")
        weights = [1 + key[torch.tensor(row["input_ids"])].sum().item() for row in case.rows]
        assert [row["weight"] for row in case.rows] == weights and len({*weights}) > 1


def test_show_prints_rows_of_the_main_process(workspace):
    rows = blocks(shown(workspace, "train_clm.py", show=16))
    text = shown(workspace, "train_clm.py", processes=2, per_device_train_batch_size=4, show=8)
    assert text.count("What the model is fed") == 1
    assert blocks(text) == rows[:4] + rows[8:12]


def test_show_leaves_output_dir_unchanged(workspace):
    folder, log = workspace / "other", workspace / "other-log"
    finish([start(PROJECT, "train_clm.py", settings(workspace, "train_clm.py", output_dir=folder), log)], log)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert before
    assert len(blocks(shown(workspace, "train_clm.py", output_dir=folder, block_size=16, show=3))) == 3
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
