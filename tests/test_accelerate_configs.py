"""accelerate's parser loads every YAML file, and `accelerate launch` accepts it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from tests import forked
from tests.runs import PATIENCE, PROJECT, environment, kill_family

CONFIGS = sorted((PROJECT / "accelerate_configs").glob("*.yaml"))
TARGETS = {"cpu", "multi_cpu", "single_gpu", "multi_gpu", "multi_node", "fsdp", "hsdp", "tpu", "rocm", "mps"}


def test_one_yaml_per_target():
    assert {path.stem for path in CONFIGS} == TARGETS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_yaml_loads_in_accelerate(path):
    keys = yaml.safe_load(path.read_text())
    assert 6 <= len(keys) <= 15
    config = load_config_from_file(str(path))  # raises on unknown keys
    assert config.num_processes >= 1
    assert {"distributed_type", "num_processes", "mixed_precision"} <= set(keys)
    assert "dynamo_backend" in {**keys, **keys.get("dynamo_config", {})}
    assert f"accelerate launch --config_file accelerate_configs/{path.name}" in path.read_text()
    if path.stem == "tpu":  # bf16 would turn weights and optimizer state into bfloat16 on a TPU
        assert config.mixed_precision == "no"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_launch_accepts_the_yaml(path):
    flags = ["--main_process_ip", "127.0.0.1"] if path.stem in ("multi_node", "hsdp") else []
    args = launch_command_parser().parse_args(["--config_file", str(path), *flags, "train_clm.py"])
    args, config, _ = _validate_launch_command(args)
    if args.tpu:
        assert path.stem == "tpu"  # its launcher imports the script; run in tests/xla
        return
    several = args.multi_gpu or args.use_fsdp
    env = prepare_multi_gpu_env(args) if several else prepare_simple_launcher_cmd_env(args)[1]
    assert env["ACCELERATE_MIXED_PRECISION"] == config.mixed_precision
    compiles = path.stem in {"single_gpu", "multi_gpu"}
    assert env["ACCELERATE_DYNAMO_BACKEND"] == ("INDUCTOR" if compiles else "NO")
    by_blocks = path.stem not in {"cpu", "multi_cpu", "mps"}  # one line turns it on
    assert env["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] == str(by_blocks)
    assert several == (path.stem in {"multi_cpu", "multi_gpu", "multi_node", "fsdp", "hsdp", "rocm"})
    if several:
        assert int(args.nproc_per_node) * config.num_machines == config.num_processes
    if path.stem in ("fsdp", "hsdp"):
        expected = dict(FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP")
        expected |= dict(ACCELERATE_USE_FSDP="true", FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT")
        assert expected.items() <= env.items()


def test_two_cpu_processes_form_one_group(tmp_path):
    """Also on a machine with GPUs, which they do not use."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, torch\nfrom accelerate import Accelerator\n"
        "import os\nfrom utils.launch import check_launch, launcher_environment\n"
        "os.environ.update(launcher_environment())\n"
        "a = Accelerator()\ncheck_launch(a)\n"
        "total = a.reduce(torch.tensor(a.process_index + 1.0)).item()\n"
        "if a.is_main_process:\n"
        "    print(json.dumps([a.num_processes, a.device.type, a.mixed_precision, total]))\n"
        "a.end_training()\n"
    )
    env = environment(PYTHONPATH=str(PROJECT))
    env.pop("ACCELERATE_USE_CPU", None)
    done = forked.run("accelerate.commands.launch", ["--config_file", CONFIGS[0].with_name("multi_cpu.yaml"),
                                                     script], env=env)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [2, "cpu", "no", 3.0]


@pytest.mark.slow
def test_slurm_nodes_form_one_group_and_stop_before_the_time_limit(tmp_path):
    """srun and scontrol are stand-ins that run both nodes on this machine; it was not run under Slurm. Only
    the batch script receives the signal, and each process gets it once."""
    tools = {
        "srun": "shift 2\nfor i in 0 1; do \"$@\" & pids=\"$pids $!\"; done\ntrap 'kill $pids' TERM\n"
        "for pid in $pids $pids; do wait $pid; status=$?; done; exit $status\n",
        "scontrol": "echo 127.0.0.1; echo 127.0.0.2\n",
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"\n',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text("#!/bin/bash\n" + text)
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\nfrom accelerate import Accelerator\n"
        "signal.signal(signal.SIGTERM, lambda *_: stops.append(1))\n"
        "stops, a = [], Accelerator()\na.wait_for_everyone()\n"
        "if a.is_main_process: print('begun', flush=True)\n"
        "while not stops: time.sleep(0.1)\n"
        "time.sleep(1)\na.wait_for_everyone()\n"
        "line = ['stops', stops, a.process_index, a.num_processes, a.mixed_precision, sys.argv[1:]]\n"
        "os.write(1, (' '.join(map(str, line)) + '\\n').encode())  # one write: lines do not mix\n"
        "a.end_training()\n"
        "sys.exit(143)\n"
    )
    node = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": str(os.getpid())}
    env = os.environ | node | {"SLURM_JOB_NODELIST": "node[1-2]", "ACCELERATE_USE_CPU": "true"}
    env |= {"OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "accelerate_configs/slurm.sh", str(script), "--seed", "7"]
    log = tmp_path / "log"
    with open(log, "w") as out:
        job = subprocess.Popen(command, cwd=PROJECT, env=env, stdout=out, stderr=out)
    try:
        until = time.monotonic() + PATIENCE
        while "begun" not in log.read_text():
            assert time.monotonic() < until and job.poll() is None, log.read_text()
            time.sleep(0.1)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(PATIENCE) != 0  # it has not finished
    finally:
        if job.poll() is None:
            kill_family(job.pid)
    words = ["--seed", "7", "--gradient_accumulation_steps", "1"]
    assert sorted(line for line in log.read_text().splitlines() if "stops" in line) == [
        f"stops [1] {rank} 2 bf16 {words}" for rank in (0, 1)
    ]
