"""Regional compilation, which the YAML files for GPUs choose, gives the same run; here on the CPU. aot_eager
traces and differentiates as inductor does, in a tenth of the time."""

import shutil
import time

import pytest
import torch
from safetensors.torch import load_file

from tests import forked
from tests.runs import DROPOUT, PROJECT, TINY, environment, metrics, write_corpus

AROUND = """
import runpy, torch
from torch._dynamo.utils import counters
try:
    runpy.run_path("train_SCRIPT.py", run_name="__main__")
finally:
    print("breaks", sum(counters["graph_break"].values()), "graphs", counters["stats"]["unique_graphs"])
"""
MASKED = {
    "model_type": "modernbert", "prompts": ["The [MASK] of a list."],
    "config_overrides": "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64",
    "optimizer_type": "adamw",  # Muon amplifies differences of rounding, as it iterates in bfloat16
}  # fmt: skip
needs_a_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++ here")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    write_corpus(folder / "corpus.jsonl")
    return folder


def write_wrapper(workspace, script):
    """Writes a script that runs train_SCRIPT.py and then prints its numbers of graph breaks and graphs."""
    path = workspace / f"train_{script}.py"
    path.write_text(AROUND.replace("SCRIPT", script))
    return path


def flags(workspace, name, **changes):
    return TINY | {
        "dataset_name": workspace / "corpus.jsonl", "cache_dir": workspace / "cache",
        "output_dir": workspace / name, "per_device_eval_batch_size": 8, **changes,
    }  # fmt: skip


def compile_environment(backend="aot_eager", **more):
    return environment(
        ACCELERATE_DYNAMO_BACKEND=backend.upper(), ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION="True",
        ACCELERATE_DYNAMO_USE_DYNAMIC="False", **more,
    )  # fmt: skip


def train(script, flags, **settings):
    done = forked.run(str(script), flags, **settings)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, metrics(flags["output_dir"])


def assert_same_losses(lines, others, rel):
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        for key in line:
            if key.startswith("loss") and "stderr" not in key:
                assert line[key] == pytest.approx(other[key], rel=rel), (line["step"], key)


@needs_a_compiler
@pytest.mark.parametrize("script", ["clm", "mlm"])
def test_thirty_steps_with_inductor_have_the_losses_of_eager(script, workspace):
    """In float32 to 1e-5, with evaluations, samples and no graph break."""
    of_script = MASKED if script == "mlm" else {"optimizer_type": "adamw", "prompts": ["import os"]}
    steps = {"max_train_steps": 30, "eval_steps": 10, "save_steps": 30, **of_script}
    output, lines = train(
        write_wrapper(workspace, script), flags(workspace, f"{script}-inductor", **steps),
        env=compile_environment("inductor"),
    )  # fmt: skip
    _, eager = train(f"train_{script}.py", flags(workspace, f"{script}-eager", **steps))
    assert_same_losses(lines, eager, 1e-5)
    assert "with inductor" in output and "breaks 0" in output and "graphs 0" not in output


def test_a_compiled_run_resumed_after_sigkill_is_bit_identical(workspace):
    settings = {"save_steps": 2, **DROPOUT}
    _, lines = train("train_clm.py", flags(workspace, "whole", **settings), env=compile_environment())
    killed, log = flags(workspace, "killed", **settings), workspace / "log"
    process = forked.start(PROJECT, "train_clm.py", killed, log, env=compile_environment())
    while not (killed["output_dir"] / "checkpoints/step-00000002").exists() and process.is_alive():
        time.sleep(0.01)
    process.kill()
    process.join()
    _, again = train("train_clm.py", killed, env=compile_environment())
    assert again == lines
    ends = [load_file(workspace / name / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not [name for name in ends[0] if "_orig_mod" in name]


def test_two_compiled_processes_train_like_one(workspace):
    _, single = train("train_clm.py", flags(workspace, "one"))
    half = flags(workspace, "two", per_device_train_batch_size=4)
    _, two = train("train_clm.py", half, processes=2, env=compile_environment(ACCELERATE_USE_CPU="true"))
    assert_same_losses(two, single, 1e-5)
