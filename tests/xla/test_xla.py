"""The scripts on PyTorch/XLA's CPU device, through accelerate's TPU launcher: the code path of a TPU host.

    .venv-tpu/bin/python -m pytest tests/xla      (requirements.txt says how to make that environment)

A CPU cannot show speed or several XLA processes (accelerate's world size is 1). A TPU's compiler runs here.
"""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import PROJECT, TINY, arguments, metrics, write_corpus

if importlib.util.find_spec("torch_xla") is None:
    pytest.skip("torch_xla is not installed: see tests/xla/requirements.txt", allow_module_level=True)

os.environ |= {"PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu"}  # of this process
# Optimization level 0 compiles five times faster and computes the same values.
XLA = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
CPU = {"USE_TORCH_XLA": "0"}
FIFTY = {"max_train_steps": 50, "eval_steps": 25, "save_steps": 25, "logging_steps": 5}
MLM_SHAPE = (
    "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,"
    "hidden_dropout_prob=0,attention_probs_dropout_prob=0"
)
both_scripts = pytest.mark.parametrize("script", ["train_clm.py", "train_mlm.py"])


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xla")
    write_corpus(folder / "corpus.jsonl")
    return folder


def settings_for(script, workspace, **changes) -> dict:
    shape = {"model_type": "roberta", "config_overrides": MLM_SHAPE} if script == "train_mlm.py" else {}
    return TINY | shape | {
        "dataset_name": workspace / "corpus.jsonl", "cache_dir": workspace / "cache", "prompts": "none",
        "save_total_limit": 10, **changes,
    }  # fmt: skip


def launch(script, folder: Path, settings: dict, device=XLA, **env) -> subprocess.CompletedProcess:
    config = "tpu" if device is XLA else "cpu"
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", f"accelerate_configs/{config}.yaml", str(script)]
    command += arguments(settings | {"output_dir": folder})
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | device | env
    return subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=900)


def run_script(script, workspace, name, device=XLA, env=None, **changes) -> Path:
    """Returns the output folder of a run, with its output in the file `stdout`. Runs once per name."""
    folder = workspace / f"{Path(script).stem}-{name}"
    if not folder.exists():
        done = launch(script, folder, settings_for(script, workspace, **changes), device, **(env or {}))
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        (folder / "stdout").write_text(done.stdout)
    return folder


def count_graphs(stdout: str) -> int:
    return int(re.search(r"compiled graphs +(\d+)", stdout)[1])


def assert_same_run(a: Path, b: Path, rel: float):
    """Compares losses, learning rates, gradient norms and evaluations at all steps."""
    for x, y in zip(metrics(a), metrics(b), strict=True):
        assert x.keys() == y.keys()
        for key in x:
            within = 10 * rel if "stderr" in key else rel  # a difference of large numbers
            least = rel if "accuracy" in key else None  # few predictions: one more or less
            assert x[key] == pytest.approx(y[key], rel=within, abs=least), (x, y)


@both_scripts
def test_xla_trains_like_the_cpu_with_accumulation_and_tied_weights(script, workspace):
    """With 42 micro-batches accelerate's end-of-data flag, which a prefetch thread sets, would cause another
    step. Weights that are no longer tied on the device would leave the head untrained."""
    changes = {
        "max_train_steps": 21, "gradient_accumulation_steps": 2, "eval_steps": 10, "save_steps": 10,
        "optimizer_type": "adamw",  # Muon iterates in bfloat16, whose rounding differs
    }  # fmt: skip
    xla = run_script(script, workspace, "xla-21", **changes)
    cpu = run_script(script, workspace, "cpu-21", CPU, **changes)
    assert_same_run(xla, cpu, rel=2e-5)
    on_xla, on_cpu = load_file(xla / "model.safetensors"), load_file(cpu / "model.safetensors")
    assert on_xla.keys() == on_cpu.keys()  # without the tied head
    for name, weight in on_xla.items():
        torch.testing.assert_close(weight, on_cpu[name], rtol=1e-3, atol=5e-5, msg=name)


@both_scripts
def test_the_number_of_graphs_does_not_grow_with_steps(script, workspace):
    """50 steps with two evaluations and saves compile at most 9 graphs, and 100 steps as many."""
    fifty = count_graphs((run_script(script, workspace, "xla-50", **FIFTY) / "stdout").read_text())
    longer = FIFTY | {"max_train_steps": 100}
    hundred = count_graphs((run_script(script, workspace, "xla-100", **longer) / "stdout").read_text())
    print(f"{script}: {fifty} graphs for 50 steps, {hundred} for 100")
    assert fifty == hundred <= 9


@both_scripts
def test_a_resumed_run_is_bit_identical(script, workspace):
    unbroken = run_script(script, workspace, "xla-50", **FIFTY)
    resumed = workspace / f"{Path(script).stem}-resumed"
    shutil.copytree(unbroken, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000050")
    (resumed / "model.safetensors").unlink()
    done = launch(script, resumed, settings_for(script, workspace, **FIFTY))
    assert done.returncode == 0, done.stderr[-4000:]
    assert metrics(resumed) == metrics(unbroken)
    for file in ("model.safetensors", "checkpoints/step-00000050/state.safetensors"):
        a, b = load_file(unbroken / file), load_file(resumed / file)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    print(f"{script}: {count_graphs(done.stdout)} graphs after resuming")
    assert count_graphs(done.stdout) <= 9


@both_scripts
def test_bfloat16_is_autocast_and_leaves_weights_and_moments_in_float32(script, workspace):
    """accelerate's own way on a TPU, XLA_USE_BF16, would round all of them."""
    exact = run_script(script, workspace, "xla-6")
    autocast = run_script(script, workspace, "xla-6-bf16", env={"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert "bfloat16 autocast" in (autocast / "stdout").read_text()
    assert metrics(autocast) != metrics(exact)
    assert_same_run(autocast, exact, rel=0.05)
    for file in ("model.safetensors", "checkpoints/step-00000006/state.safetensors"):
        tensors = load_file(autocast / file).values()
        assert all(tensor.dtype == torch.float32 for tensor in tensors if tensor.is_floating_point())
        matrices = torch.cat([tensor.flatten() for tensor in tensors if tensor.ndim == 2])
        assert (matrices != matrices.bfloat16().float()).float().mean() > 0.9


@both_scripts
def test_gradient_checkpointing_changes_no_loss(script, workspace):
    again = run_script(script, workspace, "xla-6-again", gradient_checkpointing=True)
    assert_same_run(again, run_script(script, workspace, "xla-6"), rel=1e-5)


@both_scripts
def test_no_transfer_from_the_device_between_two_log_lines(script, workspace, tmp_path):
    """Counts transfers after each of 20 steps with two micro-batches."""
    counting, counts = tmp_path / "counting.py", tmp_path / "counts"
    counting.write_text(
        f"import sys\nsys.path.insert(0, {str(PROJECT)!r})\nimport {Path(script).stem} as script\n"
        "import torch_xla.debug.metrics as metrics\n"
        "from torch.optim.optimizer import register_optimizer_step_post_hook\n"
        "def count(*_):\n"
        "    transfers = metrics.metric_data('TransferFromDeviceTime')\n"
        f"    open({str(counts)!r}, 'a').write(f'{{transfers[0] if transfers else 0}}\\n')\n"
        "register_optimizer_step_post_hook(count)\n"
        "def main(): script.main()\n"
    )
    changes = {"max_train_steps": 20, "logging_steps": 20, "eval_steps": 20, "save_steps": 20}
    settings = settings_for(script, workspace, gradient_accumulation_steps=2, **changes)
    done = launch(counting, workspace / f"{Path(script).stem}-counting", settings)
    assert done.returncode == 0, done.stderr[-3000:]
    transfers = counts.read_text().split()
    assert len(transfers) >= 20 and len(set(transfers)) == 1, transfers  # Muon's step calls AdamW's


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_updates_that_are_not_finite_change_neither_weights_nor_optimizer_state(kind):
    """Neither the first update, which creates the optimizer's state, nor a later one."""
    from accelerate import Accelerator

    from utils.devices import sync
    from utils.learning.optim import UpdateGuard, build_optimizer

    args = SimpleNamespace(optimizer_type=kind, learning_rate=0.1, muon_learning_rate=0.1, weight_decay=0.1,
                           adam_beta2=0.99)  # fmt: skip

    def train(updates):
        accelerator = Accelerator()
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(3, 5)]).to(accelerator.device)
        optimizer = accelerator.prepare(build_optimizer(model, args))
        guard, states = UpdateGuard(accelerator, optimizer), []
        for factor in updates:
            for weight in model.parameters():
                weight.grad = torch.full_like(weight, factor)
            guard.check(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            sync()
            state = [value for values in optimizer.state.values() for value in values.values()]
            on_device = [x for x in [*model.parameters(), *state] if x.device.type == "xla"]
            states.append([x.detach().cpu() for x in on_device])
        return states, guard.read()

    (first, second, third, fourth), skipped = train([math.nan, 1.0, math.inf, 2.0])
    assert skipped == [1, 0, 1, 0]
    torch.testing.assert_close(third, second, rtol=0, atol=0)
    assert all(x.isfinite().all() for x in first + fourth)
    assert not torch.equal(first[0], second[0]) and not torch.equal(third[0], fourth[0])


@pytest.mark.parametrize(("script", "optimizer"), [
    ("train_clm.py", "adamw"), ("train_clm.py", "muon"), ("train_mlm.py", "adamw"),
])  # fmt: skip
def test_every_graph_of_a_run_compiles_for_a_tpu(script, optimizer, workspace, tmp_path):
    """libtpu compiles micro-batch, step and evaluation of two layers for a v5e, with the flash kernel."""
    changes = {"block_size": 128, "gradient_accumulation_steps": 3, "optimizer_type": optimizer}
    settings = settings_for(script, workspace, **changes)
    left_out = ("cache_dir", "max_train_steps", "eval_steps", "save_steps", "logging_steps", "prompts",
           "num_warmup_steps", "max_eval_samples", "save_total_limit")  # fmt: skip
    flags = arguments({name: value for name, value in settings.items() if name not in left_out})
    command = [sys.executable, "-m", "tests.benchmarks.tpu", "--plain", "false", "--folder", str(tmp_path)]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    command += [script, *flags]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "attention: flash (Pallas)" in done.stdout
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| ours")]
    assert {row[1].split("-", 1)[1].strip() for row in rows} == {"micro-batch", "step", "evaluation"}
    assert all(float(row[2]) > 0 for row in rows)


@both_scripts
def test_an_error_in_the_data_ends_the_run(script, workspace, tmp_path):
    """On XLA it ends the prefetch thread, and to the loop it looks like the end of the batches."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        f"import sys\nsys.path.insert(0, {str(PROJECT)!r})\nimport {Path(script).stem} as script\n"
        "from data.batches.rows import PackedRows\n"
        "read, calls = PackedRows.__getitems__, []\n"
        "def fails(self, keys):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 40: raise OSError('this disk is broken')\n"
        "    return read(self, keys)\n"
        "PackedRows.__getitems__ = fails\n"
        "def main(): script.main()\n"
    )
    settings = settings_for(script, workspace, max_train_steps=100, eval_steps=100, save_steps=100)
    done = launch(broken, workspace / f"{Path(script).stem}-broken", settings)
    assert done.returncode != 0 and "this disk is broken" in done.stderr, done.stderr[-3000:]
    assert "Stopped" not in done.stdout and "Next:" not in done.stdout
