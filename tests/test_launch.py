"""`python train_clm.py` uses the YAML file of the device, as `accelerate launch` would."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests import forked
from tests.runs import PROJECT, TINY, command, environment, metrics, write_corpus
from utils import launch


def test_plain_python_equals_accelerate_launch(tmp_path):
    flags = TINY | {"dataset_name": write_corpus(tmp_path / "corpus.jsonl"), "cache_dir": tmp_path / "cache"}
    plain = forked.run("train_clm.py", flags | {"output_dir": tmp_path / "plain"})
    words = command("train_clm.py", flags | {"output_dir": tmp_path / "launched"})[3:]
    launched = forked.run("accelerate.commands.launch", words)
    assert plain.returncode == launched.returncode == 0, plain.stderr + launched.stderr
    line = ("launch     settings of accelerate_configs/cpu.yaml, as there is no launcher: "
            "float32, not compiled, 1 thread\n")  # fmt: skip
    assert line in plain.stdout and "no launcher" not in launched.stdout
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "launched")


def test_environment_variables_override_the_yaml(tmp_path, monkeypatch):
    configs = shutil.copytree(PROJECT / "accelerate_configs", tmp_path / "accelerate_configs")
    monkeypatch.setattr(launch, "CONFIGS", configs)
    monkeypatch.setattr(launch, "has_bf16", lambda: True)
    edits = {"mps": {}, "cpu": {"dynamo_backend: 'no'": "dynamo_backend: inductor"},
             "cuda": {"mixed_precision: bf16": "mixed_precision: 'no'", "regional_compilation: true":
                      "regional_compilation: false\n  dynamo_mode: max-autotune"}}  # fmt: skip
    compiled = ("no", "INDUCTOR", "False")
    expected = {"mps": ("no", "NO", "False"), "cpu": compiled, "cuda": compiled}
    names = "MIXED_PRECISION", "DYNAMO_BACKEND", "DYNAMO_USE_REGIONAL_COMPILATION"
    for device, changes in edits.items():
        monkeypatch.setattr(launch, "device_type", lambda device=device: device)
        path = launch.launcher_yaml()
        for old, new in changes.items():
            assert old in path.read_text()
            path.write_text(path.read_text().replace(old, new))
        variables = launch.launcher_environment()
        assert tuple(variables[f"ACCELERATE_{name}"] for name in names) == expected[device]
    assert variables["ACCELERATE_DYNAMO_MODE"] == "max-autotune"
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    assert "ACCELERATE_DYNAMO_BACKEND" not in launch.launcher_environment()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert launch.launcher_environment() == {}


def test_gpu_without_bf16_uses_fp16(monkeypatch):
    monkeypatch.setattr(launch, "device_type", lambda: "cuda")
    for has, precision in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(launch, "has_bf16", lambda has=has: has)
        assert launch.launcher_environment()["ACCELERATE_MIXED_PRECISION"] == precision


THREADS = """
import os, torch
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from utils.launch import claim_threads
claim_threads()
print(torch.get_num_threads())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux sets affinity")
@pytest.mark.parametrize("threads", ["", "4"])
def test_threads_do_not_exceed_available_cores(threads):
    env = {name: value for name, value in environment().items() if "OMP" not in name}
    env |= {"OMP_NUM_THREADS": threads} if threads else {}
    done = subprocess.run([sys.executable, "-c", THREADS], cwd=PROJECT, env=env, capture_output=True)
    assert done.stdout == b"1\n", done.stderr


@pytest.mark.parametrize("script", ["train_clm.py", "train_mlm.py"])
def test_ctrl_c_during_imports_is_one_line(script, tmp_path):
    log = tmp_path / "log"
    words = [sys.executable, "-X", "importtime", script, "--output_dir", str(tmp_path / "run")]
    with open(log, "w") as out:
        process = subprocess.Popen(words, cwd=PROJECT, env=environment(), stdout=out, stderr=out)
    while "torch" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(600) == 130
    assert "SIGINT: stopped before the first step" in log.read_text() and "Traceback" not in log.read_text()


def test_unreadable_yaml_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "CONFIGS", tmp_path)
    with pytest.raises(ValueError, match="cpu.yaml, which is read as there is no launcher, is not valid: "):
        launch.launcher_environment()
