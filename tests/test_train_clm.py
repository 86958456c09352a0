"""train_clm.py on real text, on one and two processes.

Runs are forked (tests/forked.py), without `accelerate launch`. A slow test here, tests/test_readme.py and
tests/test_accelerate_configs.py use the launcher.
"""

import functools
import json
import math
import re
import shlex
import shutil
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data.batches.order import evaluation_rows
from tests import forked
from tests.runs import (
    PATIENCE,
    PROJECT,
    TINY,
    assert_same_metrics,
    command,
    environment,
    first_moments,
    metrics,
    write_corpus,
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clm")
    write_corpus(folder / "corpus.jsonl")
    return folder


def flags(workspace, name, **changes):
    return {
        **TINY, "dataset_name": str(workspace / "corpus.jsonl"), "cache_dir": str(workspace / "cache"),
        "output_dir": str(workspace / name), "prompts": ["import os"],
        "keytokens": ["import", "self"], **changes,
    }  # fmt: skip


def trained(workspace, name, processes=1, start=forked.run, **changes):
    """Train to the end. Returns the output folder."""
    result = start("train_clm.py", flags(workspace, name, **changes), processes)
    assert result.returncode == 0, result.stderr[-3000:]
    return workspace / name


def launched(script, flags, processes, env=None):
    """Run by `accelerate launch`. env: if set, the launch uses multi_gpu.yaml with this environment."""
    words = command(script, flags, processes)[3:]
    if env:
        words[1] = "accelerate_configs/multi_gpu.yaml"
        words[2:2] = ["--mixed_precision", "no", "--dynamo_backend", "no"]
    return forked.run("accelerate.commands.launch", words, env=env or environment(processes))


@pytest.fixture(scope="module")
def one_process(workspace):
    return trained(workspace, "one", start=functools.partial(forked.run, picture=True))


@pytest.fixture(scope="module")
def two_processes(workspace):
    return trained(workspace, "two", processes=2, per_device_train_batch_size=4)


def test_gradient_does_not_depend_on_micro_batches_or_processes(workspace):
    """1 x 8, 2 x 4 and 8 x 1 micro-batches x rows, and two processes: equal gradients to 1e-6 relative."""
    one_step = {"max_train_steps": 1, "num_warmup_steps": 0, "max_grad_norm": 0, "max_eval_samples": 8}
    splits = {"1x8": (1, 8, 1), "2x4": (2, 4, 1), "8x1": (8, 1, 1), "2 processes": (2, 2, 2)}
    gradients = {}
    for name, (accumulation, rows, processes) in splits.items():
        folder = trained(
            workspace, f"split-{name.replace(' ', '-')}", processes, **one_step,
            gradient_accumulation_steps=accumulation, per_device_train_batch_size=rows,
        )  # fmt: skip
        gradients[name] = first_moments(folder)
    reference = gradients.pop("1x8")
    assert reference.norm() > 0
    for name, gradient in gradients.items():
        assert (gradient - reference).norm() <= 1e-6 * reference.norm(), name


def test_two_processes_equal_one(one_process, two_processes):
    assert_same_metrics(one_process, two_processes)


@pytest.mark.slow
def test_launched_run_equals_forked(workspace, two_processes):
    folder = trained(workspace, "launched", processes=2, start=launched, per_device_train_batch_size=4)
    assert metrics(folder) == metrics(two_processes)


def test_compiled_run_equals_eager_and_compiles_once(workspace, one_process):
    """No shape is new after the first step, not even in evaluation's last batch. aot_eager traces like
    inductor in a tenth of the time. tests/test_compiled.py compiles by blocks."""
    name = "compiled"
    words = ["--config_file", "accelerate_configs/cpu.yaml", "--dynamo_backend", "aot_eager"]
    args = launch_command_parser().parse_args([*words, "train_clm.py"])
    launcher_env = prepare_simple_launcher_cmd_env(_validate_launch_command(args)[0])[1]
    log, script = workspace / f"{name}.log", workspace / "recompiles.py"
    script.write_text(  # as TORCH_LOGS=recompiles, which torch reads at import
        "import runpy, torch; torch._logging.set_logs(recompiles=True)\n"
        "runpy.run_path('train_clm.py', run_name='__main__')\n"
    )
    env = launcher_env | environment(PYTHONUNBUFFERED="1")
    process = forked.start(PROJECT, str(script), flags(workspace, name), log, env=env)
    process.join(PATIENCE)
    output = log.read_text()
    assert process.exitcode == 0, output[-3000:]
    start, rest = output.split("step 1/6", 1)
    assert "compiled with aot_eager" in start and "Recompiling" in start
    assert "Recompiling" not in rest and "recompile_limit" not in output
    for a, b in zip(metrics(one_process), metrics(workspace / name), strict=True):
        assert a == pytest.approx(b, rel=3e-4), (a, b)
    saved = [load_file(folder / "checkpoints/step-00000006/model.safetensors").keys()
             for folder in (one_process, workspace / name)]  # fmt: skip
    assert saved[0] == saved[1]


def brute_force(folder, rows):
    """Mean loss per predicted token of each row, float64 [n], from the logits of transformers' model."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = (model(row[None]).logits[0, :-1].double() for row in rows)
        return torch.stack([F.cross_entropy(*pair) for pair in zip(logits, rows[:, 1:], strict=True)])


def test_evaluation_equals_brute_force_for_any_batch_size(
    workspace, one_process
):
    tokens = np.load(next((workspace / "cache").rglob("validation-*.npy"))).astype(np.int64)
    n, T = 37, TINY["block_size"]  # divisible by none of the batch sizes below
    ids = torch.from_numpy(tokens[: len(tokens) // T * T].reshape(-1, T))
    assert len(ids) > n
    losses = brute_force(one_process, ids[evaluation_rows(len(ids), n)])
    loss = losses.mean().item()
    for processes, batch_size in [(1, 1), (1, 7), (1, 32), (2, 7)]:
        result = forked.run(
            "train_clm.py",
            flags(
                workspace, "one", eval_only=True, max_eval_samples=n, per_device_eval_batch_size=batch_size
            ),
            processes,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        report = json.loads(result.stdout.strip().splitlines()[-1])
        assert report["loss/eval"] == pytest.approx(loss, rel=1e-6)
        assert report["loss/eval_stderr"] == pytest.approx(losses.std().item() / n**0.5, rel=1e-5)
        assert report["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        assert report["eval_tokens"] == n * (ids.shape[1] - 1)


def test_finished_run_is_left_unchanged(workspace, one_process):
    before = {file: file.stat().st_mtime_ns for file in one_process.rglob("*") if file.name != ".lock"}
    result = forked.run("train_clm.py", flags(workspace, "one"))
    assert result.returncode == 0 and "finished" in result.stdout
    result = forked.run("train_clm.py", flags(workspace, "one") | {"max_train_steps": 4})
    assert result.returncode == 2 and "6 in the run, 4 now, and 6 are done" in result.stderr, result.stderr
    assert before == {
        file: file.stat().st_mtime_ns for file in one_process.rglob("*") if file.name != ".lock"
    }


def test_files_and_metrics_of_a_run(one_process):
    names = "args.json metrics.jsonl curves.png config.json model.safetensors tokenizer.json README.md"
    for name in [*names.split(), "train_clm.py"]:
        assert (one_process / name).is_file(), name
    assert [path.name for path in sorted((one_process / "checkpoints").iterdir())] == [
        "step-00000003", "step-00000006"]  # fmt: skip
    assert json.loads((one_process / "args.json").read_text())["finished"] == 6
    lines = metrics(one_process)
    train = [line for line in lines if "loss/train" in line]
    assert [line["step"] for line in train] == [1, 2, 3, 4, 5, 6]
    assert {"epoch", "samples", "tokens", "loss/train_plain", "learning_rate", "grad_norm"} <= train[0].keys()
    assert train[-1]["tokens"] == 6 * 8 * 32
    evaluations = [line for line in lines if "loss/eval" in line]
    assert [line["step"] for line in evaluations] == [0, 3, 6]
    assert [line["tokens"] for line in evaluations] == [0, 3 * 8 * 32, 6 * 8 * 32]
    losses = [line["loss/eval"] for line in evaluations]
    assert losses[-1] < losses[0] == pytest.approx(math.log(512), rel=0.02)


def test_skipped_update_is_logged_with_its_rows(workspace, one_process):
    """Weights whose products overflow: each update is skipped, and metrics.jsonl has a line for it."""
    broken = shutil.copytree(one_process, workspace / "broken", ignore=lambda *_: ["checkpoints"])
    weights = load_file(broken / "model.safetensors")
    for name in ("gate", "up", "down"):
        weights[f"model.layers.0.mlp.{name}_proj.weight"].fill_(1e15)
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    folder = trained(workspace, "skips", model_name_or_path=broken, config_overrides="", max_train_steps=3)
    lines = metrics(folder)
    assert [line for line in lines if line.get("event") == "skipped_update"] == [
        {"step": step, "event": "skipped_update", "update": step, "positions": [8 * step - 8, 8 * step]}
        for step in (1, 2, 3)
    ]
    assert [line["skipped_updates"] for line in lines if "loss/train" in line] == [1, 2, 3]


def test_printed_evaluate_command_evaluates_the_run(workspace, one_process):
    other = {"model_name_or_path": one_process, "config_overrides": ""}  # and its tokenizer
    begun = forked.run("train_clm.py", flags(workspace, "begun", **other, max_eval_samples=0))
    assert begun.returncode == 0, begun.stderr[-3000:]
    _, script, *words = shlex.split(re.search(r"^ *evaluate +(python .*)$", begun.stdout, re.M)[1])
    done = forked.run(script, words)
    assert done.returncode == 0, done.stderr[-3000:]
    loss = json.loads(done.stdout.splitlines()[-1])["loss/eval"]
    last = [line["loss/eval"] for line in metrics(workspace / "begun") if "loss/eval" in line][-1]
    assert loss == pytest.approx(last, rel=1e-6)


@pytest.mark.parametrize("start", [forked.run, pytest.param(launched, marks=pytest.mark.slow)])
def test_processes_that_form_no_group_are_stopped(start, workspace):
    """A GPU configuration on a machine without GPUs starts N runs that would overwrite each other. The first
    process reports it and the launcher ends the others, which may report that they lost their peer."""
    if torch.accelerator.is_available():
        pytest.skip("needs a machine without an accelerator")
    result = start("train_clm.py", flags(workspace, "apart"), 2, env=environment())
    assert result.returncode != 0 and 1 <= result.stderr.count("error:") <= (1 if start is launched else 2)
    assert "multi_cpu.yaml" in result.stderr and not (workspace / "apart").exists()


@pytest.fixture(scope="module")
def uninterrupted(workspace):
    return trained(workspace, "whole", **SLOW)


SLOW = {"per_device_eval_batch_size": 1, "max_eval_samples": 0}


@pytest.mark.parametrize("during", ["first", "last"])
def test_stop_during_evaluation_loses_nothing(during, workspace, uninterrupted):
    """The evaluation ends, then the run is saved; after the last step the run is finished. The same command
    leaves the same metrics as an uninterrupted run."""
    settings = flags(workspace, f"{during}-cut", **SLOW)
    log, file = workspace / f"{during}-log", workspace / f"{during}-cut" / "metrics.jsonl"
    seen = '"step": 6' if during == "last" else ""
    process = forked.start(PROJECT, "train_clm.py", settings, log)
    while process.is_alive() and not (file.exists() and seen in file.read_text()):
        time.sleep(0.001)
    process.terminate()
    process.join(PATIENCE)
    assert process.exitcode == (0 if during == "last" else 143), log.read_text()
    logged = [json.loads(line) for line in file.open()]
    evaluated = [line["step"] for line in logged if "loss/eval" in line]
    assert evaluated in ([[0, 3, 6]] if during == "last" else [[], [0]])  # []: before the loop
    cut = trained(workspace, f"{during}-cut", **SLOW)
    assert metrics(cut) == metrics(uninterrupted)
    assert (cut / "model.safetensors").read_bytes() == (uninterrupted / "model.safetensors").read_bytes()
    assert json.loads((cut / "args.json").read_text())["finished"] == 6
