"""docs/edits: each edit passes utils/check.py and does what it says."""

import gzip
import itertools
import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from tests.checked import ForkedCheck, apply, copy_project
from tests.forked import run
from tests.runs import PROJECT, TINY, arguments, metrics, write_corpus
from utils.compare import settings

DIFFS = sorted((PROJECT / "docs" / "edits").glob("*.diff"))
STEPS, ROWS, T = 12, 8, 32  # in the runs of utils/check.py: steps, rows per step, tokens per row
HIGH = {"learning_rate": 1, "muon_learning_rate": 1, "num_warmup_steps": 0}  # so that the loss rises
LONGER = {"distillation": 25, "early-stopping": 25, "isolated-documents": 34, "fill-in-the-middle": 40,
          "time-budget": 44, "scores": 40, "own-model": 33}


@dataclass
class Edit:
    check: Callable  # asserts the edit's effect; arguments: the checks of the edited and the unedited script
    script: str = "train_clm.py"
    settings: dict = field(default_factory=dict)  # settings of the edit for a run of few steps
    observes: bool = False  # it trains the same weights as the unedited script; other edits must not
    short: bool = False  # needs short documents
    fast: bool = False  # the others run with -m slow
    fails: list = field(default_factory=list)  # checks of utils/check.py that the edit fails on purpose


def state(check, name: str, run: str = "first", step: int = STEPS) -> dict:
    """The part of a checkpoint's state that is not a tensor."""
    file = check.folder / run / f"checkpoints/step-{step:08d}/state.json"
    return json.loads(file.read_text())["things"][name]


def saved(check, step: int, part: str = "model", run: str = "first") -> dict:
    """The tensors of one part of a checkpoint."""
    folder = check.folder / run / f"checkpoints/step-{step:08d}"
    if part == "model":
        return load_file(folder / "model.safetensors")
    return {name.removeprefix(f"{part}/"): tensor for name, tensor in
            load_file(folder / "state.safetensors").items() if name.startswith(f"{part}/")}  # fmt: skip


def records(check, key: str = "loss/train", run: str = "first") -> list[dict]:
    return [line for line in metrics(check.folder / run) if key in line]


def again(check, run: str, **flags) -> list[str]:
    """Run again to the end. Returns the lines of the output."""
    assert check.run(run, *arguments(flags)) == 0, (check.folder / f"{run}.log").read_text()[-3000:]
    return (check.folder / f"{run}.log").read_text().splitlines()


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def z_loss(edited, plain):
    """A new model's logits are small, so the loss is about log(V) and the penalty about 1e-4 log(V)**2."""
    with_it, without = records(edited)[0], records(plain)[0]
    vocabulary = json.loads((edited.folder / "first/config.json").read_text())["vocab_size"]
    ratio = with_it["loss/train"] / without["loss/train"]
    assert ratio - 1 == pytest.approx(1e-4 * math.log(vocabulary), rel=0.02)
    assert with_it["loss/train_plain"] == without["loss/train_plain"]


def label_smoothing(edited, plain):
    """The training loss begins alike. The evaluation is not smoothed and ends close to the unedited one's."""
    assert records(edited)[0]["loss/train"] == pytest.approx(records(plain)[0]["loss/train"], rel=0.01)
    last = [records(check, "loss/eval")[-1]["loss/eval"] for check in (edited, plain)]
    assert last[0] == pytest.approx(last[1], rel=0.05)


def ema(edited, plain):
    """The average equals that of the weights saved after each step, and is evaluated and exported."""
    again(edited, "again", save_steps=1, save_total_limit=20)
    average = saved(edited, 1, run="again")
    for step in range(2, STEPS + 1):
        weights = saved(edited, step, run="again")
        average = {name: value.lerp(weights[name], 1 - 0.9) for name, value in average.items()}
    averaged, exported = saved(edited, STEPS, "ema"), load_file(edited.folder / "first/ema/model.safetensors")
    for name, weight in average.items():
        torch.testing.assert_close(averaged[f"lm.{name}"], weight)
        torch.testing.assert_close(exported[name], weight)
    AutoModelForCausalLM.from_pretrained(edited.folder / "first/ema")
    line = records(edited, "loss/eval")[-1]
    assert 0.001 < line["loss/ema"] - line["loss/eval"] < 1  # higher, as the loss still falls


def early_stopping(edited, plain):
    """At much too high rates an evaluation is worse than the one before: the run is finished there and stays
    finished. With one evaluation set and with two."""
    high = HIGH | {"patience": 1, "eval_steps": 2, "max_train_steps": 40}
    corpus = Path(edited.flags[edited.flags.index("--dataset_name") + 1])
    two = {"eval_dataset_name": [corpus.with_name("short.jsonl"), corpus.with_name("long.jsonl")]}
    for run_name, sets in (("one-set", {}), ("two-sets", two)):
        again(edited, run_name, **high, **sets)
        lines = [line for line in metrics(edited.folder / run_name) if "loss/eval" in " ".join(line)]
        losses = [sum(line[key] for key in line if re.fullmatch("loss/eval(/.*)?", key)) for line in lines]
        assert 1 < len(losses) < 20 and losses[-1] >= losses[-2]
        assert losses[:-1] == sorted(losses[:-1], reverse=True)
        assert len(lines[0].keys() & {"loss/eval", "loss/eval/short", "loss/eval/long"}) == len(sets) + 1
        last = max((edited.folder / run_name / "checkpoints").glob("step-*"))
        assert last.name == f"step-{2 * len(losses) - 2:08d}"
        before = (edited.folder / run_name / "metrics.jsonl").read_text()
        assert any("this run is finished" in line for line in again(edited, run_name, **high, **sets))
        assert (edited.folder / run_name / "metrics.jsonl").read_text() == before


def growing_batch(edited, plain):
    """Steps have 8, then 16, then 24 rows, and the metrics count them."""
    each = [ROWS * (1 + step // 5) for step in range(STEPS)]
    assert [line["samples"] for line in records(edited)] == [*itertools.accumulate(each)]
    assert [line["tokens"] for line in records(edited)] == [*itertools.accumulate(T * rows for rows in each)]


def second_optimizer(edited, plain):
    """Each weight has one optimizer, the embeddings Adafactor, and both optimizers update."""
    adafactor, others = (state(edited, name)["parameters"] for name in ("adafactor", "optimizer"))
    early, late = saved(edited, 4), saved(edited, STEPS)
    assert adafactor == [["lm.model.embed_tokens.weight"]]
    assert {name.removeprefix("lm.") for group in others + adafactor for name in group} == late.keys()
    assert sum(map(len, others)) + 1 == len(late)
    assert not any(torch.equal(early[name], late[name]) for name in late)


def layer_wise_learning_rates(edited, plain):
    """The rates of the final norm, two blocks and the embeddings. Each weight is in one group."""
    optimizer = state(edited, "optimizer")
    groups = zip(optimizer["state"]["param_groups"], optimizer["parameters"], strict=True)
    rates = [(name, group["initial_lr"]) for group, names in groups for name in names]
    assert sorted(name.removeprefix("lm.") for name, _ in rates) == sorted(saved(edited, STEPS))
    for part, depth in {"norm": 0, "layers.1": 1, "layers.0": 2, "embed_tokens": 3}.items():
        part_rates = {rate for name, rate in rates if name.startswith(f"lm.model.{part}.")}
        assert part_rates == {2e-3 * 0.5**depth}, part


def frozen_embeddings(edited, plain):
    """The embeddings do not change until step 8, nor by weight decay. Other weights learn from step 1."""
    names = "model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"
    tokens, others = ([saved(edited, step)[name] for step in (0, 8, STEPS)] for name in names)
    assert torch.equal(tokens[0], tokens[1]) and not torch.equal(tokens[1], tokens[2])
    assert not torch.equal(others[0], others[1])


def whole_words(edited, plain):
    """Each word is masked completely or not at all. The evaluation has as many predictions as without the
    edit, and another loss."""
    lines, without = (records(check, "loss/eval") for check in (edited, plain))
    assert [line["eval_tokens"] for line in lines] == [line["eval_tokens"] for line in without]
    assert lines[-1]["loss/eval"] != without[-1]["loss/eval"]
    tokenizer = AutoTokenizer.from_pretrained(edited.folder / "first")
    text = "The tokenizer reads documents.\nAnother paragraph of words, unfortunately.\n\n(nothing)\n"
    encoded = tokenizer(text * 3, add_special_tokens=False, return_offsets_mapping=True)
    ids = torch.tensor([encoded["input_ids"]]).expand(64, -1)  # [rows, T]
    row = torch.arange(64)
    masked = edited.module.MaskWords(tokenizer, 0.3, 0)(
        {"input_ids": ids, "row": row, "position": row, "epoch": 0 * row})
    words = [-1, *(len((text * 3)[:end].split()) if (text * 3)[start:end].strip() else -1
                   for start, end in encoded["offset_mapping"])]  # word of each position; 0: <s>
    masked_alone = set()  # words that were masked without the next one, or not masked when it was
    for slots, labels in zip(masked["slots"].tolist(), masked["slot_labels"].tolist(), strict=True):
        hidden = [place for place, label in zip(slots, labels, strict=True) if label != -100]
        partly = {words[p] for p in hidden if words[p] >= 0} & {
            word for place, word in enumerate(words) if word >= 0 and place not in hidden}
        assert len(partly) <= 1  # the word at which the number of masks ran out
        touched = {words[place] for place in hidden}
        masked_alone |= {word for word in range(max(words)) if (word in touched) != (word + 1 in touched)}
    assert masked_alone == {*range(max(words))}


def rows_of(check) -> tuple:
    """(tokenizer, training rows, {name: evaluation rows}, settings) of a check's run."""
    args = settings(check.module, [*check.flags, "--output_dir", str(check.folder / "first")])
    return *check.module.load_rows(args), args


def isolated_documents(edited, plain):
    """The evaluation loss equals that of the saved model on each document separately."""
    tokenizer, _, eval_rows, args = rows_of(edited)
    model, losses, documents = AutoModelForCausalLM.from_pretrained(edited.folder / "first"), [], 0
    for batch in edited.module.eval_loader(eval_rows[""], args):
        for row in batch["input_ids"][batch["row"] >= 0]:
            ends = [int(end) + 1 for end in (row == tokenizer.eos_token_id).nonzero()]
            for begin, end in itertools.pairwise(sorted({0, *ends, len(row)})):
                targets, documents = row[begin + 1 : end + 1], documents + 1
                with torch.no_grad():
                    logits = model(row[None, begin:end]).logits[0, : len(targets)]
                losses.append(cross_entropy(logits, targets, reduction="none"))
    assert documents > 2 * 16
    assert torch.cat(losses).mean() == pytest.approx(records(edited, "loss/eval")[-1]["loss/eval"], rel=1e-5)


def fill_in_the_middle(edited, plain):
    """In their original order, documents are unchanged, except the last, which may be truncated. About half
    are rearranged. The saved tokenizer and model have the three new tokens."""
    tokenizer, rows, _, args = rows_of(edited)
    tokenizer.add_tokens(edited.module.FIM, special_tokens=True)
    pre, suf, mid = tokenizer.convert_tokens_to_ids(edited.module.FIM)
    rearrange, documents, rearranged = edited.module.FillInMiddle(tokenizer, 0.5, 1), 0, 0
    for batch in itertools.islice(edited.module.train_loader(rows, args), 20):
        of_both = batch["input_ids"].tolist(), rearrange(batch)["input_ids"].tolist()
        for before, after in zip(*of_both, strict=True):
            in_order = []
            for is_end, group in itertools.groupby(after, tokenizer.eos_token_id.__eq__):
                document, documents = [*group], documents + (not is_end)
                if document[0] == pre:
                    rearranged += 1
                    if after[-len(document) :] == document:  # it may be truncated
                        break
                    i, j = document.index(suf), document.index(mid)
                    document = document[1:i] + document[j + 1 :] + document[i + 1 : j]
                in_order += document
            assert in_order == before[: len(in_order)]
    assert 0.4 < rearranged / documents < 0.6
    assert len(AutoTokenizer.from_pretrained(edited.folder / "first")) == len(tokenizer)
    assert json.loads((edited.folder / "first/config.json").read_text())["vocab_size"] == len(tokenizer)


def metric_per_layer(edited, plain):
    """There is a norm for each of two blocks. Together they are at most the total, which is clipped to 1."""
    lines = records(edited, "grad_norm")
    assert len(lines) == STEPS
    for line in lines:
        assert 0 < math.hypot(line["grad_norm/0"], line["grad_norm/1"]) <= min(1, line["grad_norm"]) + 1e-6


def distillation(edited, plain):
    """The loss is half cross-entropy and half divergence, which is smaller."""
    with_it, without = records(edited)[0], records(plain)[0]
    assert with_it["loss/train_plain"] == pytest.approx(without["loss/train_plain"])
    assert 0.5 < with_it["loss/train"] / without["loss/train"] < 0.95


def own_model(edited, plain):
    """Its logits are Qwen3's plus those of the added embeddings, whose scale begins at 0."""
    begin, end = (saved(edited, step)["model.skip"] for step in (0, STEPS))
    assert not begin.any() and end.any()
    kinds = AutoModelForCausalLM, Qwen3ForCausalLM
    model, qwen3 = (kind.from_pretrained(edited.folder / "first") for kind in kinds)
    ids = torch.arange(9)[None]
    expected = qwen3(ids).logits + qwen3.lm_head(end * qwen3.model.embed_tokens(ids))
    torch.testing.assert_close(model(ids).logits, expected)


def milestones(edited, plain):
    """The models of exactly these steps are there and equal the checkpoints."""
    folders = {path.name: path for path in (edited.folder / "first/milestones").iterdir()}
    assert folders.keys() == {"step-0", "step-4", "step-7"}
    assert equal(load_file(folders["step-4"] / "model.safetensors"), saved(edited, 4))
    AutoModelForCausalLM.from_pretrained(folders["step-7"])


def keep_best(edited, plain):
    """At too high rates the best evaluation is not the last one."""
    again(edited, "again", **HIGH | {"learning_rate": 5, "muon_learning_rate": 5}, eval_steps=4)
    losses = {line["step"]: line["loss/eval"] for line in records(edited, "loss/eval", "again")}
    assert (best := min(losses, key=losses.get)) != STEPS
    assert equal(load_file(edited.folder / "again/best/model.safetensors"), saved(edited, best, run="again"))
    AutoModelForCausalLM.from_pretrained(edited.folder / "first/best")


def scores(edited, plain):
    """The score equals one computed by transformers on each choice separately, after an end of document."""
    model = AutoModelForCausalLM.from_pretrained(edited.folder / "first")
    known = AutoTokenizer.from_pretrained(edited.folder / "first")
    flags = edited.flags
    right = []
    for line in map(json.loads, open(flags[flags.index("--scores_file") + 1], encoding="utf-8")):
        pairs = [("", line["sentence_good"]), ("", line["sentence_bad"])] if "sentence_good" in line else [
            (line["ctx"], f" {ending}") for ending in line["endings"]]
        likely = []
        for context, choice in pairs:
            ids = torch.tensor([[known.eos_token_id, *known.encode(context + choice)]])
            with torch.no_grad():
                each = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
            likely.append(each[len(known.encode(context)) :].sum() / (len(choice.encode()) if context else 1))
        right.append(int(torch.stack(likely).argmax()) == line.get("label", 0))
    assert records(edited, "score")[-1]["score"] == pytest.approx(sum(right) / len(right))
    assert 0 < sum(right) < len(right) == 24


def profiler(edited, plain):
    """The trace has the ten steps after step 10. That of a run of 12 steps has two and the begun third."""
    again(edited, "longer", max_train_steps=24)
    for run_name, steps in (("longer", 10), ("first", 3)):
        with gzip.open(edited.folder / run_name / "trace-0.json.gz") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert len({name for name in names if name.startswith("ProfilerStep#")}) == steps
        assert sum(name.startswith("Optimizer.step#") for name in names) >= steps - 1


EDITS = {
    "z-loss": Edit(z_loss),
    "label-smoothing": Edit(label_smoothing, "train_mlm.py"),
    "ema": Edit(ema, settings={"ema_decay": 0.9}, observes=True, fast=True),
    "early-stopping": Edit(early_stopping, observes=True, fast=True),
    "growing-batch": Edit(growing_batch, settings={"batch_growth_steps": 5}),
    "second-optimizer": Edit(second_optimizer, fast=True),
    "layer-wise-learning-rates": Edit(layer_wise_learning_rates, settings={"layer_decay": 0.5}),
    "frozen-embeddings": Edit(frozen_embeddings, settings={"frozen_embedding_steps": 8}),
    "whole-word-masking": Edit(whole_words, "train_mlm.py"),
    "isolated-documents": Edit(
        isolated_documents, short=True, fails=["the saved model"],
        # At these rates the model learns enough to use the documents before.
        settings={"config_overrides": TINY["config_overrides"],
                  "learning_rate": 7e-3, "muon_learning_rate": 7e-3}),
    "fill-in-the-middle": Edit(fill_in_the_middle, short=True),
    "metric-per-layer": Edit(metric_per_layer, observes=True),
    "distillation": Edit(distillation),
    "own-model": Edit(own_model, fast=True),
    "milestones": Edit(milestones, settings={"milestones": [0, 4, 7]}, observes=True),
    "keep-best": Edit(keep_best, observes=True),
    "scores": Edit(scores, observes=True),
    "profiler": Edit(profiler, observes=True),
}


def write_choices(folder: Path, lines: list[str]) -> None:
    """Twelve lines in BLiMP's format, whose bad sentence is the good one's words sorted, and twelve in
    HellaSwag's with four endings."""
    texts = [json.loads(line)["content"].split() for line in lines[:12]]
    choices = [{"sentence_good": " ".join(words[:6]), "sentence_bad": " ".join(sorted(words[:6]))}
            for words in texts]  # fmt: skip
    choices += [{"ctx": " ".join(words[:5]), "label": i % 4,
              "endings": [" ".join(other[5 : 8 + j]) for j, other in enumerate(texts[i % 8 :][:4])]}
             for i, words in enumerate(texts)]  # fmt: skip
    (folder / "choices.jsonl").write_text("\n".join(map(json.dumps, choices)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Data files, and a cache of prepared rows and tokenizers for all tests."""
    folder = tmp_path_factory.mktemp("edits")
    lines = write_corpus(folder / "corpus.jsonl").read_text().splitlines()
    # Parts of the documents. "more" and "short" have no text in common.
    for name, first, characters in (("short", 0, 40), ("long", 0, 400), ("more", 800, 40)):
        parts = [json.dumps({"content": json.loads(line)["content"][start:][:characters]})
                 for line in lines for start in range(first, first + 800, characters)]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("\n".join(parts))
    write_choices(folder, lines)
    return {"dataset_name": folder / "corpus.jsonl", "cache_dir": folder / "cache"}


@pytest.fixture(scope="module")
def unedited(corpus, tmp_path_factory):
    """A function that returns the finished run of an unedited script on some data."""
    checks = {}

    def check(script, data):
        key = script, str(data)
        if key not in checks:
            checks[key] = ForkedCheck(copy_project(tmp_path_factory.mktemp("plain")), script, corpus | data)
            assert checks[key].run("first") == 0
        return checks[key]

    return check


@pytest.mark.parametrize("name, two", [
    pytest.param(name, two, marks=pytest.mark.sweep if two else [] if edit.fast else pytest.mark.slow)
    for two in (False, True) for name, edit in EDITS.items()])
def test_edit_passes_check_and_works(name, two, corpus, unedited, tmp_path):
    """two: with two evaluation sets."""
    edit, beside = EDITS[name], corpus["dataset_name"].with_name
    data = {"dataset_name": beside("more.jsonl" if two else "short.jsonl")} if edit.short else {}
    if two:
        data["eval_dataset_name"] = [beside("short.jsonl"), beside("long.jsonl")]
    if name == "distillation":
        data["tokenizer_name"] = edit.settings["teacher"] = str(unedited(edit.script, {}).folder / "first")
    if name == "scores":
        edit.settings["scores_file"] = beside("choices.jsonl")
    apply(PROJECT / f"docs/edits/{name}.diff", copy_project(tmp_path))
    edited = ForkedCheck(tmp_path, edit.script, corpus | data, **edit.settings)
    assert edited.run_all() == edit.fails
    if not two:
        plain = unedited(edit.script, data)
        assert equal(saved(edited, STEPS), saved(plain, STEPS)) == edit.observes
        edit.check(edited, plain)


@pytest.mark.slow
def test_time_budget_survives_a_resume_and_ends_at_rate_zero(corpus, tmp_path):
    """Also after a kill. The run ends after max_train_steps at the latest. utils/check.py would fail it, as
    it depends on the clock."""
    apply(PROJECT / "docs/edits/time-budget.diff", copy_project(tmp_path))
    check = ForkedCheck(tmp_path, "train_clm.py", corpus, minutes=0.1, max_train_steps=100_000)
    for name, stop in (("first", 0), ("killed", signal.SIGKILL)):
        flags = arguments({"max_train_steps": 100_000, "save_steps": 4})
        assert check.run(name, *flags, stop=stop) == -stop, (check.folder / f"{name}.log").read_text()[-3000:]
        lines = again(check, name, max_train_steps=100_000, save_steps=4)
        rates = [line["learning_rate"] for line in records(check, run=name)]
        peak = rates.index(max(rates))
        assert rates == sorted(rates[:peak]) + sorted(rates[peak:], reverse=True)
        assert rates[-1] < max(rates) / 10
        assert state(check, "clock", name, records(check, run=name)[-1]["step"])["state"]["spent"] >= 1
        assert any("this run is finished" in line for line in lines) == (not stop)
    assert check.run("few", *arguments({"minutes": 60, "max_train_steps": 6})) == 0
    assert [line["step"] for line in records(check, run="few")] == [*range(1, 7)]


@pytest.mark.slow
def test_own_corpus_edit_passes_check(corpus, tmp_path):
    apply(PROJECT / "docs/edits/own-corpus.diff", copy_project(tmp_path))
    flags = TINY | {"keywords": "none", "cache_dir": corpus["cache_dir"]}
    words = ["train_clm.py", *arguments({"preset": "topics", **flags})]
    done = run("utils.check", words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("holds: ") == 8


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.stem)
def test_edit_is_short_explained_and_reversible(diff, tmp_path):
    folder = copy_project(tmp_path)
    before = [script.read_text() for script in sorted(folder.glob("train_*.py"))]
    apply(diff, folder)
    assert all(len(line) < 112 for file in folder.glob("train_*.py") for line in open(file, encoding="utf-8"))
    apply(diff, folder, "-R")
    assert [script.read_text() for script in sorted(folder.glob("train_*.py"))] == before
    text, _, hunks = diff.read_text().partition("\ndiff --git ")
    changed = [line for line in hunks.splitlines() if re.match(r"[+-](?!\+\+ |-- )", line)]
    assert 0 < len(changed) <= LONGER.get(diff.stem, 18)
    assert text.strip().endswith(".") and diff.stem in [*EDITS, "own-corpus", "time-budget"]


def test_at_most_20_pairs_of_edits_conflict(tmp_path):
    """In either order, merged by git as README says."""
    copy_project(tmp_path)
    env = os.environ | {"GIT_CONFIG_COUNT": "0", "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}

    def git(*words):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True).returncode == 0

    assert git("init") and git("add", ".") and git("commit", "-m", "the scripts as they are")
    conflicts = []
    for pair in itertools.combinations(DIFFS, 2):
        for first, second in (pair, pair[::-1]):
            assert git("apply", "--3way", first)
            merged = git("apply", "--3way", second)
            assert git("reset", "--hard")
            if merged:
                break
        else:
            conflicts.append(" ".join(diff.stem for diff in pair))
    assert len(conflicts) <= 20, conflicts
