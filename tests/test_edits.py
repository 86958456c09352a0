"""docs/edits: each applied to a copy of the scripts keeps what the scripts promise, and does what it says.

A run that is killed and continued ends with the same bits, two processes train like one, transformers loads
what is saved.
"""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from data.order import evaluation_rows
from tests.forked import finish, start, start_all
from tests.runs import PROJECT, TINY, environment, metrics, write_corpus

FOLDER = PROJECT / "docs" / "edits"
DIFFS = sorted(FOLDER.glob("*.diff"))
STEPS, KILL_AFTER, SAVE_STEPS = 15, 6, 5
LONGER = {"distillation": 25, "growing-sequence-length": 25, "isolated-documents": 40}  # others: 15 lines
FLAGS = {
    **TINY, "gradient_accumulation_steps": 2, "max_train_steps": STEPS, "preflight": True, "eval_steps": 10,
    "save_steps": SAVE_STEPS, "save_total_limit": STEPS, "max_eval_samples": 20,
    "eval_at_start": False, "prompts": "none",
}  # fmt: skip
MASKED = {
    "model_type": "roberta", "prompts": ["The [MASK] of a list."],
    "config_overrides": "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,"
    "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
}  # fmt: skip


@dataclass
class Edit:
    script: str = "train_clm.py"
    flags: dict = field(default_factory=dict)  # of the script as it is, too; "{workspace}" is the folder
    settings: dict = field(default_factory=dict)  # of the edit: few steps for things that take thousands
    observes: bool = False  # it trains the same weights as the script as it is; all others must not
    two_processes: bool = True  # which give the same losses
    slow: bool = False  # others go through the same places; all are applied
    check: Callable = lambda runs: None  # that it does what it says


# ---- What they say


def check_z_loss(runs):
    """A new model's logits are small: log(V) is their normalizer, and the loss; squared it is the penalty."""
    with_it, without = metrics(runs.whole)[0], metrics(runs.plain)[0]
    vocabulary = json.loads((runs.whole / "config.json").read_text())["vocab_size"]
    assert with_it["loss/train"] / without["loss/train"] - 1 == pytest.approx(
        1e-4 * math.log(vocabulary), rel=0.02
    )
    assert with_it["loss/train_plain"] == without["loss/train_plain"]


def check_label_smoothing(runs):
    """It keeps the loss from falling far; evaluation is plain, so both begin alike."""
    smoothed, plain = (metrics(folder) for folder in (runs.whole, runs.plain))
    assert smoothed[0]["loss/train"] == pytest.approx(plain[0]["loss/train"], rel=0.01)
    assert smoothed[-1]["loss/eval"] == pytest.approx(plain[-1]["loss/eval"], rel=0.05)


def check_ema(runs):
    """The average of the weights that were saved after each step, computed here; evaluated, too."""
    folder, average = runs.again(max_train_steps=5, save_steps=1), {}
    for step in range(1, 6):
        for name, weight in saved(folder, step, "model").items():
            average[name] = average[name].lerp(weight, 1 - 0.9) if step > 1 else weight
    kept, exported = saved(folder, 5, "ema"), load_file(folder / "ema" / "model.safetensors")
    for name, weight in average.items():
        torch.testing.assert_close(kept[f"module.{name}"], weight)
        torch.testing.assert_close(exported[name.removeprefix("lm.")], weight)
    assert forward(runs, runs.whole / "ema")
    middle = next(line for line in metrics(runs.whole) if "loss/eval" in line)
    assert 0.001 < middle["loss/ema"] - middle["loss/eval"] < 1  # behind, as the loss still falls
    runs.again(eval_only=True, max_train_steps=5)
    last, alone = metrics(folder)[-1], json.loads(runs.log.read_text().splitlines()[-1])
    assert alone["loss/ema"] == pytest.approx(last["loss/ema"], rel=1e-6) != alone["loss/eval"]


def check_outlier_updates(runs):
    """The rule once more, of the norms in the log: skipped above 1.2 times the median of five accepted."""
    lines = metrics(runs.whole)
    norms, expected = [math.inf] * 5, []
    for line in lines:
        if "grad_norm" in line:
            if line["grad_norm"] > 1.2 * sorted(norms)[2]:
                expected.append(line["step"])
            else:
                norms = [*norms[1:], line["grad_norm"]]
    assert [line["step"] for line in lines if line.get("event") == "skipped_update"] == expected
    assert 0 < len(expected) < STEPS - 5


def check_early_stopping(runs):
    """At rates that are far too high some loss is worse than the one before; there the run is finished."""
    folder = runs.again(patience=1, eval_steps=2, learning_rate=1.0, muon_learning_rate=1.0, logging_steps=1)
    losses = [line["loss/eval"] for line in metrics(folder) if "loss/eval" in line]
    assert len(losses) < STEPS // 2 and losses[-1] >= min(losses[:-1])
    assert losses[:-1] == sorted(losses[:-1], reverse=True)
    last = metrics(folder)[-1]["step"]
    assert last == 2 * len(losses) and checkpoint(folder, last).exists() and forward(runs, folder)
    lines = (folder / "metrics.jsonl").read_text()
    runs.again(patience=1, eval_steps=2, learning_rate=1.0, muon_learning_rate=1.0, logging_steps=1)
    assert (folder / "metrics.jsonl").read_text() == lines, "finished"


def check_growing_batch(runs):
    """Steps of 16 rows of 32 tokens, then of 32 rows, then of 48; what is reported follows."""
    each = [16 * (1 + step // 7) for step in range(STEPS)]
    lines = [line for line in metrics(runs.whole) if "samples" in line]
    assert [line["samples"] for line in lines] == [*itertools.accumulate(each)]
    assert [line["tokens"] for line in lines] == [32 * line["samples"] for line in lines]
    settings = state(runs.whole)["extra"]["settings"]
    assert lines[-1]["epoch"] == pytest.approx(sum(each) / settings["training_rows"])


def check_second_optimizer(runs):
    """Each weight has one optimizer, Adafactor the embeddings; and neither stands still."""
    adafactor, adamw = ({path.rpartition("/")[0] for path in saved(runs.whole, STEPS, name)}
                   for name in ("adafactor", "optimizer"))  # fmt: skip
    early, late = (saved(runs.whole, step, "model") for step in (SAVE_STEPS, STEPS))
    assert adafactor == {"lm.model.embed_tokens.weight"}
    assert adamw == late.keys() - adafactor
    assert not any(torch.equal(early[name], late[name]) for name in late)
    assert state(runs.whole)["keep"]["adafactor"]["groups"][0]["lr"] == 0  # at the end of the cosine


def check_layer_wise_learning_rates(runs):
    """Of two blocks, the norm above and the embeddings below; each weight once."""
    groups = state(runs.whole)["keep"]["optimizer"]["groups"]
    rates = {name: group["initial_lr"] for group in groups for name in group["params"]}
    assert rates.keys() == saved(runs.whole, STEPS, "model").keys()
    assert sum(len(group["params"]) for group in groups) == len(rates)
    depths = {"norm": 0, "layers.1": 1, "layers.0": 2, "embed_tokens": 3}
    for part, depth in depths.items():
        found = {rate for name, rate in rates.items() if name.startswith(f"lm.model.{part}.")}
        assert found == {2e-3 * 0.5**depth}, part
    logged = [[line.get("learning_rate") for line in metrics(folder)] for folder in (runs.whole, runs.plain)]
    assert logged[0] == logged[1]  # the top's


def check_frozen_embeddings(runs):
    """Until step 10 not a bit changes, decay included; then they learn. The others learn from the start."""
    names = "lm.model.embed_tokens.weight", "lm.model.layers.0.self_attn.q_proj.weight"
    tokens, others = ([saved(runs.whole, step, "model")[name] for step in (5, 10, 15)] for name in names)
    assert torch.equal(tokens[0], tokens[1]) and not torch.equal(tokens[1], tokens[2])
    assert not torch.equal(others[0], others[1])
    assert tokens[0].std() == pytest.approx(0.02, rel=0.05)  # as it begins


def check_evaluation_is_comparable(runs):
    """As many predictions as the script makes as it is, of which the two models think differently."""
    lines, plain = ([line for line in metrics(folder) if "loss/eval" in line]
                    for folder in (runs.whole, runs.plain))  # fmt: skip
    assert [line["eval_tokens"] for line in lines] == [line["eval_tokens"] for line in plain]
    assert [line["loss/eval"] for line in lines] != [line["loss/eval"] for line in plain]


def check_isolated_documents(runs):
    """The loss of the saved model on rows of several documents, computed of one document after the other."""
    [file] = runs.whole.parent.parent.glob("short-cache/**/validation-*.npy")
    model, losses, documents = AutoModelForCausalLM.from_pretrained(runs.whole), [], 0
    ids, T = np.load(file), FLAGS["block_size"]
    rows = ids[: len(ids) // T * T].reshape(-1, T)
    for row in torch.from_numpy(rows[evaluation_rows(len(rows), FLAGS["max_eval_samples"], 42)]).long():
        ends = [int(end) + 1 for end in (row == model.config.eos_token_id).nonzero()]
        for begin, end in itertools.pairwise(sorted({0, *ends, len(row)})):
            targets, documents = row[begin + 1 : end + 1], documents + 1
            with torch.no_grad():
                logits = model(row[None, begin:end]).logits[0, : len(targets)]
            losses.append(cross_entropy(logits, targets, reduction="none"))
    assert documents > 2 * FLAGS["max_eval_samples"]
    last = [line["loss/eval"] for line in metrics(runs.whole) if "loss/eval" in line][-1]
    assert torch.cat(losses).double().mean() == pytest.approx(last, rel=1e-5)


def check_metric_per_layer(runs):
    """A norm for each of two blocks; together no more than that of all, which is clipped to 1."""
    lines = [line for line in metrics(runs.whole) if "grad_norm" in line]
    assert len(lines) == STEPS
    for line in lines:
        assert 0 < math.hypot(line["grad_norm/0"], line["grad_norm/1"]) <= min(1, line["grad_norm"]) + 1e-6


def check_own_corpus(runs):
    assert state(runs.whole)["extra"]["settings"]["preset"] == "topics"
    tokenizers = [(folder / "tokenizer.json").read_text() for folder in (runs.whole, runs.plain)]
    assert tokenizers[0] != tokenizers[1]


def check_distillation(runs):
    """Half of the new model's cross-entropy, and half a divergence that is smaller, are trained."""
    with_it, without = metrics(runs.whole)[0], metrics(runs.plain)[0]
    assert with_it["loss/train_plain"] == pytest.approx(without["loss/train_plain"])
    assert 0.5 < with_it["loss/train"] / without["loss/train"] < 0.9


def check_growing_sequence_length(runs):
    """Rows of 32 tokens, in eighths of which two are taken at first, and all after 12 steps."""
    lengths = [4 * (2 + 6 * step // 12) if step < 12 else 32 for step in range(STEPS)]
    lines = [line for line in metrics(runs.whole) if "loss/train" in line]
    assert [line["tokens"] for line in lines] == [*itertools.accumulate(16 * length for length in lengths)]
    assert [line["samples"] for line in lines] == [16 * (step + 1) for step in range(STEPS)]


EDITS = {
    "z-loss": Edit(check=check_z_loss, slow=True),
    "label-smoothing": Edit("train_mlm.py", check=check_label_smoothing),
    "ema": Edit(settings={"ema_decay": 0.9}, observes=True, check=check_ema),
    "outlier-updates": Edit(
        settings={"outlier_factor": 1.2, "usual_updates": 5}, check=check_outlier_updates
    ),
    "early-stopping": Edit(observes=True, check=check_early_stopping),
    "growing-batch": Edit(settings={"batch_growth_steps": 7}, check=check_growing_batch),
    "second-optimizer": Edit(check=check_second_optimizer),
    "layer-wise-learning-rates": Edit(
        settings={"layer_decay": 0.5}, check=check_layer_wise_learning_rates, slow=True
    ),
    "frozen-embeddings": Edit(settings={"frozen_embedding_steps": 10}, check=check_frozen_embeddings),
    "whole-word-masking": Edit("train_mlm.py", check=check_evaluation_is_comparable),
    "decaying-mask-rate": Edit("train_mlm.py", check=check_evaluation_is_comparable, slow=True),
    "isolated-documents": Edit(
        flags={"dataset_name": "{workspace}/short.jsonl", "cache_dir": "{workspace}/short-cache"},
        check=check_isolated_documents,
    ),
    "metric-per-layer": Edit(observes=True, check=check_metric_per_layer, slow=True),
    "own-corpus": Edit(
        settings={"preset": "topics", "dataset_name": "python-topics"}, check=check_own_corpus, slow=True
    ),
    "distillation": Edit(
        flags={"tokenizer_name": "{workspace}/teacher"},
        settings={"teacher": "{workspace}/teacher"},
        check=check_distillation,
    ),
    "growing-sequence-length": Edit(settings={"grow_steps": 12}, check=check_growing_sequence_length),
}


# ---- Running them


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def state(folder: Path) -> dict:
    """All that is not a tensor in the last checkpoint."""
    return json.loads((checkpoint(folder, STEPS) / "state.json").read_text())


def saved(folder: Path, step: int, name: str) -> dict:
    """Tensors of one of the things that are kept."""
    tensors = load_file(checkpoint(folder, step) / f"{name}.safetensors")
    return {f"lm.{path}": value for path, value in tensors.items()} if name == "model" else tensors


def forward(runs, folder: Path) -> bool:
    """Whether transformers loads the model, whole, and its logits are finite."""
    kind = AutoModelForMaskedLM if runs.edit.script == "train_mlm.py" else AutoModelForCausalLM
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return bool(model(torch.arange(8)[None]).logits.isfinite().all())


PLAIN = {}  # output folders of unedited scripts


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """With prepared rows, a trained tokenizer, and a model that can teach."""
    folder = tmp_path_factory.mktemp("edits")
    write_corpus(folder / "corpus.jsonl")
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    short = [json.dumps({"content": json.loads(line)["content"][:start][-40:]})
             for line in lines for start in range(40, 800, 40)]  # fmt: skip
    (folder / "short.jsonl").write_text("\n".join(short))
    finish([start(PROJECT, "train_clm.py", flags(folder, Edit(), folder / "teacher"), folder / "log")],
           folder / "log")  # fmt: skip
    PLAIN["train_clm.py", "{}"] = folder / "teacher"
    return folder


def flags(workspace, edit: Edit, output_dir: Path, **changes) -> dict:
    found = {
        **FLAGS, **(MASKED if edit.script == "train_mlm.py" else {}),
        "dataset_name": workspace / "corpus.jsonl", "cache_dir": workspace / "cache",
        "output_dir": output_dir, **edit.flags, **changes,
    }  # fmt: skip
    return {
        name: value.replace("{workspace}", str(workspace)) if isinstance(value, str) else value
        for name, value in found.items()
    }


def apply(diff: Path, folder: Path) -> None:
    """To a copy of what the scripts need, with their compiled modules."""
    for part in ("data", "utils"):
        half_written = shutil.ignore_patterns("*.pyc.*")  # by another worker
        shutil.copytree(PROJECT / part, folder / part, ignore=half_written)
    for script in PROJECT.glob("train_*.py"):
        shutil.copy2(script, folder)
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # a folder outside any repository
    result = subprocess.run(["git", "apply", str(diff)], cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def steps_logged(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().splitlines()[-3:] if file.exists() else []
    return max((int(found[1]) for line in lines if (found := re.match(rb'{"step": (\d+),', line))), default=0)


def killed(process, folder: Path, log: Path) -> None:
    """SIGKILL after KILL_AFTER steps, when there is a checkpoint to continue from."""
    end = time.monotonic() + 60
    while steps_logged(folder) < KILL_AFTER or not checkpoint(folder, SAVE_STEPS).exists():
        assert process.is_alive() and time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -9 and steps_logged(folder) < STEPS


@pytest.fixture(
    scope="module", ids=lambda diff: diff.stem,
    params=[pytest.param(diff, marks=[pytest.mark.slow] * EDITS[diff.stem].slow) for diff in DIFFS],
)  # fmt: skip
def runs(request, workspace):
    """Output folders of one edit's runs: whole, killed and continued, of two processes; and of the script
    as it is. Two at a time."""
    edit, folder = EDITS[request.param.stem], workspace / request.param.stem
    code = folder / "code"
    code.mkdir(parents=True)
    apply(request.param, code)
    whole, broken, two, log = (folder / name for name in ("whole", "broken", "two", "log"))

    def begin(output_dir, log=log, env=None, **changes):
        settings = flags(workspace, edit, output_dir, **edit.settings | changes)
        return start(code, edit.script, settings, log, env=env)

    unrehearsed = {"preflight": False}  # which leaves no trace: the whole run rehearses
    one, other = begin(whole), begin(broken, folder / "killed", **unrehearsed)
    killed(other, broken, folder / "killed")
    finish([one, begin(broken, **unrehearsed)], log)
    key = edit.script, json.dumps(edit.flags)
    unedited = []
    if key not in PLAIN:
        PLAIN[key] = folder / "plain"
        unedited = [start(PROJECT, edit.script, flags(workspace, edit, PLAIN[key], **unrehearsed), log)]
    half = flags(workspace, edit, two, **edit.settings, per_device_train_batch_size=4)
    finish([*start_all(code, edit.script, half, log, processes=2), *unedited], log)

    def again(**changes) -> Path:
        finish([begin(folder / "again", **changes)], log)
        return folder / "again"

    made = {"whole": whole, "broken": broken, "two": two, "plain": PLAIN[key], "again": again, "log": log}
    return SimpleNamespace(edit=edit, **made)


def test_it_goes_on_after_a_kill_as_if_nothing_had_happened(runs):
    assert metrics(runs.whole) == metrics(runs.broken)
    assert state(runs.whole)["keep"] == state(runs.broken)["keep"]
    files = sorted(checkpoint(runs.whole, STEPS).glob("*.safetensors"))
    assert {"model.safetensors", "optimizer.safetensors"} <= {file.name for file in files}
    for file in [*files, runs.whole / "model.safetensors"]:
        expected, found = load_file(file), load_file(runs.broken / file.relative_to(runs.whole))
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected), file.name


def test_two_processes_train_like_one(runs):
    if not runs.edit.two_processes:
        pytest.skip("depends on the number of processes: see EDITS")
    assert_same_losses(runs.whole, runs.two)


def assert_same_losses(output_dir: Path, other: Path) -> None:
    """Those in the metrics of two runs."""
    for a, b in zip(metrics(output_dir), metrics(other), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            if key.startswith("loss/") and a[key] != b[key]:  # None where a step was skipped
                rel = 2e-4 if "stderr" in key else 1e-5  # a small difference of large numbers
                assert a[key] == pytest.approx(b[key], rel=rel), (key, a, b)


@pytest.mark.sweep
def test_compiled_by_blocks_it_trains_the_same(runs):
    """As on GPUs, with evaluations, samples and saves. aot_eager traces and differentiates as inductor."""
    dynamo = {"BACKEND": "AOT_EAGER", "USE_REGIONAL_COMPILATION": "True", "USE_DYNAMIC": "False"}
    env = environment(**{f"ACCELERATE_DYNAMO_{name}": value for name, value in dynamo.items()})
    compiled, log = runs.again(env=env), runs.log.read_text()
    assert "compiles   2 x " in log and "warning: not compiled" not in log
    assert_same_losses(runs.whole, compiled)


def test_it_does_what_it_says(runs):
    plain, edited = (saved(folder, STEPS, "model") for folder in (runs.plain, runs.whole))
    same = plain.keys() == edited.keys() and all(torch.equal(plain[name], edited[name]) for name in plain)
    assert same == runs.edit.observes
    runs.edit.check(runs)


def test_transformers_loads_the_result(runs):
    assert forward(runs, runs.whole)


@pytest.mark.parametrize("name", ["ema", "second-optimizer"])
def test_a_forgotten_keep_is_named(name, workspace, tmp_path):
    apply(FOLDER / f"{name}.diff", tmp_path)
    script = tmp_path / EDITS[name].script
    kept = re.compile(r"(?<=means=means), .*(?=\))|^    keep \|= .*$", re.M)
    script.write_text(kept.sub("", script.read_text()))
    process = start(tmp_path, script.name, flags(workspace, EDITS[name], tmp_path / "run"), tmp_path / "log")
    process.join(120)
    message = (tmp_path / "log").read_text()
    assert process.exitcode == 2, message
    assert re.search(r"error: keep: update changes .*\b(ema|adafactor)\b.*not in keep", message), message


@pytest.mark.parametrize("preflight", [True, False])
def test_forgotten_gradients_are_named(preflight, workspace, tmp_path):
    """No checkpoint holds them: a resumed run would differ."""
    apply(FOLDER / "second-optimizer.diff", tmp_path)
    script = tmp_path / "train_clm.py"
    script.write_text(re.sub(r"^ *adafactor\.zero_grad\(\)\n", "", script.read_text(), flags=re.M))
    made = flags(workspace, EDITS["second-optimizer"], tmp_path / "run") | {"preflight": preflight}
    process = start(tmp_path, script.name, made, tmp_path / "log")
    process.join(120)
    message = (tmp_path / "log").read_text()
    assert process.exitcode == 2, message
    assert "update leaves gradients of lm.model.embed_tokens.weight, which" in message, message


def test_an_optimizer_without_a_guard_and_weights_that_two_move_are_named(workspace, tmp_path):
    apply(FOLDER / "second-optimizer.diff", tmp_path)
    script = tmp_path / "train_clm.py"
    told = []
    for guarded in ("UpdateGuard(accelerator, optimizer, adafactor)", "UpdateGuard(accelerator, optimizer)"):
        text = re.sub(r"UpdateGuard\(.*\)", guarded, script.read_text())
        if told:
            text = re.sub(r'(group\["params"\]) = \[.*', r"\1 = \1", text)
        script.write_text(text)
        (tmp_path / "log").unlink(missing_ok=True)
        made = flags(workspace, EDITS["second-optimizer"], tmp_path / f"run-{len(told)}", max_train_steps=2)
        finish([start(tmp_path, script.name, made, tmp_path / "log")], tmp_path / "log")
        log = (tmp_path / "log").read_text()
        said = "guard      none for adafactor", "optimizers optimizer and adafactor share weights"
        told.append([log.count(line) for line in said])
    assert told == [[0, 0], [1, 1]]


def test_processes_of_which_one_is_slower_rehearse_alike(workspace, tmp_path):
    """One falls behind in the update that is timed: each exchanges gradients as often as the other."""
    apply(FOLDER / "z-loss.diff", tmp_path)
    script = tmp_path / "train_clm.py"
    end = "        optimizer.zero_grad()\n"
    once = "_calls.append(1) or len(_calls) == 2 and accelerator.process_index"
    slow = f"{end}        __import__('time').sleep(1.1 * ({once}))\n"
    code = script.read_text().replace("\n@entry_point", "\n_calls = []\n\n\n@entry_point")
    assert code.count(end) == 1
    script.write_text(code.replace(end, slow))
    settings = {"max_train_steps": 2, "per_device_train_batch_size": 4, "eval_steps": 2, "save_steps": 2}
    made = flags(workspace, Edit(), tmp_path / "run", **settings)
    log = tmp_path / "log"
    finish(start_all(tmp_path, script.name, made, log, processes=2), log, timeout=60)
    assert log.read_text().count("ms a step") == 1


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.stem)
def test_it_is_short_explained_and_tested(diff, tmp_path):
    apply(diff, tmp_path)
    for script in tmp_path.glob("train_*.py"):
        compile(script.read_text(), script, "exec")
    text, mark, hunks = diff.read_text().partition("\n--- ")
    changed = [line for line in (mark + hunks).splitlines() if re.match(r"[+-](?!\+\+ |-- )", line)]
    assert 0 < len(changed) <= LONGER.get(diff.stem, 15)
    sentence = text.split("\ndiff ")[0].strip()
    assert sentence.endswith(".") and len(sentence) > 40
    assert diff.stem in EDITS
