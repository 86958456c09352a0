"""`python train_clm.py` against accelerate's launcher with the YAML file of the device."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import TorchDynamoPlugin, patch_environment
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from tests import forked
from tests.runs import PROJECT, TINY, command, environment, metrics, write_corpus
from utils import launch
from utils.devices import cpu_quota


def test_losses_are_those_of_the_launcher_with_cpu_yaml(tmp_path):
    flags = TINY | {"dataset_name": write_corpus(tmp_path / "corpus.jsonl"), "cache_dir": tmp_path / "cache"}
    plain = forked.run("train_clm.py", flags | {"output_dir": tmp_path / "plain"})
    words = command("train_clm.py", flags | {"output_dir": tmp_path / "launched"})[3:]
    launched = forked.run("accelerate.commands.launch", words)
    assert plain.returncode == launched.returncode == 0, plain.stderr + launched.stderr
    line = "launch     no launcher: as accelerate_configs/cpu.yaml (float32, not compiled, 1 thread)\n"
    assert line in plain.stdout and "no launcher" not in launched.stdout
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "launched")


def handed_on(path) -> dict[str, str]:
    args = launch_command_parser().parse_args(["--config_file", str(path), "train_clm.py"])
    return prepare_simple_launcher_cmd_env(_validate_launch_command(args)[0])[1]


def test_each_yaml_gives_what_the_launcher_hands_on_and_variables_win(tmp_path, monkeypatch):
    configs = shutil.copytree(PROJECT / "accelerate_configs", tmp_path / "accelerate_configs")
    monkeypatch.setattr(launch, "CONFIGS", configs)
    edits = {"mps": {}, "cpu": {"dynamo_backend: 'no'": "dynamo_backend: inductor"},
             "cuda": {"mixed_precision: bf16": "mixed_precision: 'no'", "regional_compilation: true":
                      "regional_compilation: false\n  dynamo_mode: max-autotune"}}  # fmt: skip
    for device, changes in edits.items():
        monkeypatch.setattr(launch, "device_type", lambda device=device: device)
        monkeypatch.setattr(launch, "_has_bf16", lambda: True)
        for edited in (False, True):
            path = launch.launcher_yaml()
            for old, new in changes.items() if edited else ():
                assert old in path.read_text()
                path.write_text(path.read_text().replace(old, new))
            env = handed_on(path)
            with patch_environment(**env):
                assert launch.launch_options() == {}
                theirs = TorchDynamoPlugin()
            ours = {"mixed_precision": env["ACCELERATE_MIXED_PRECISION"], "dynamo_plugin": theirs}
            assert launch.launch_options() == ours
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    plugin = launch.launch_options()["dynamo_plugin"]
    assert plugin.backend == "EAGER" and plugin.mode == "max-autotune"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert launch.launcher_yaml() is None


def test_a_gpu_without_bf16_gets_fp16(monkeypatch):
    monkeypatch.setattr(launch, "device_type", lambda: "cuda")
    for has, precision in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(launch, "_has_bf16", lambda has=has: has)
        assert launch.launch_options()["mixed_precision"] == precision


THREADS = """
import os, torch
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from utils.launch import claim_hardware
claim_hardware()
print(torch.get_num_threads())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux sets affinity")
@pytest.mark.parametrize("threads", ["", "4"])
def test_threads_are_at_most_the_cores_granted(threads):
    env = {name: value for name, value in environment().items() if "OMP" not in name}
    env |= {"OMP_NUM_THREADS": threads} if threads else {}
    done = subprocess.run([sys.executable, "-c", THREADS], cwd=PROJECT, env=env, capture_output=True)
    assert done.stdout == b"1\n", done.stderr


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "400000 100000", "a/b/cpu.max": "max 1"}, 4),
        ("4:cpuset,cpu:/gone", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, float("inf")),
        ("4:cpuset:/", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "1"}, float("inf")),
    ],
)
def test_quotas_of_both_kinds_of_control_groups(line, files, cores, tmp_path):
    for name, text in ({"own": line} | {f"root/{name}": text for name, text in files.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cpu_quota(tmp_path / "root", tmp_path / "own") == cores


@pytest.mark.parametrize("script", ["train_clm.py", "train_mlm.py"])
def test_ctrl_c_while_libraries_are_imported_is_one_line(script, tmp_path):
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


def test_a_yaml_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "CONFIGS", tmp_path)
    with pytest.raises(ValueError, match="cpu.yaml cannot be read: .*; without a launcher its settings"):
        launch.launch_options()
