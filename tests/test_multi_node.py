"""Two machines, simulated by two network namespaces with a virtual cable, and one launch command in each.

They use the CPU and gloo. NCCL, fast networks and clocks that differ are not tested.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked
from tests.runs import (
    PATIENCE,
    PROJECT,
    TINY,
    arguments,
    assert_same_metrics,
    environment,
    metrics,
    write_corpus,
)


@pytest.fixture(scope="module")
def machines():
    """[(namespace, interface, address)] of two machines."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = f"p{os.getpid() % 100_000}"
    names = [f"{tag}-a", f"{tag}-b"]
    hosts = [(name, f"{name}0", f"10.77.0.{i + 1}") for i, name in enumerate(names)]
    added = [subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True) for name in names]
    if any(done.returncode for done in added):
        pytest.skip(f"no network namespaces here: {added[0].stderr.strip()}")
    try:
        (a, on_a, _), (b, on_b, _) = hosts
        ip("link", "add", on_a, "netns", a, "type", "veth", "peer", "name", on_b, "netns", b)
        for name, interface, address in hosts:
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
            (etc := Path("/etc/netns", name)).mkdir(parents=True)
            lines = [f"{address} {name}\n" for name, _, address in hosts]
            (etc / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    write_corpus(folder / "corpus.jsonl")
    return folder


def settings(workspace, name, **changes):
    return TINY | {
        "dataset_name": workspace / "corpus.jsonl", "cache_dir": workspace / "cache", "prompts": "none",
        "output_dir": workspace / name, "per_device_train_batch_size": 4,
        "optimizer_type": "adamw", **changes,  # Muon's bfloat16 makes 2e-5 of the last bit of a gradient
    }  # fmt: skip


def start(machines, flags: dict) -> list[subprocess.Popen]:
    """Start the same command on each machine, which differs only in --machine_rank, as on a cluster."""
    started = []
    for rank, (namespace, interface, _) in enumerate(machines):
        command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", "accelerate_configs/multi_node.yaml", "--machine_rank", str(rank)]
        command += ["--main_process_ip", machines[0][2], "--num_processes", "2", "--mixed_precision", "no"]
        log = open(f"{flags['output_dir']}.{rank}.log", "w")
        env = environment(2, GLOO_SOCKET_IFNAME=interface)
        command += ["train_clm.py", *arguments(flags)]
        started.append(subprocess.Popen(command, cwd=PROJECT, env=env, stdout=log, stderr=log))
    return started


def log_of(flags, rank) -> str:
    return Path(f"{flags['output_dir']}.{rank}.log").read_text()


def workers(namespace) -> dict[int, str]:
    """{process id: command line} of the training processes on a machine."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids}
    return {pid: line for pid, line in lines.items() if "train_clm.py" in line and "launch" not in line}


@pytest.mark.slow
def test_two_machines_equal_one_process(machines, workspace):
    flags = settings(workspace, "two")
    for rank, process in enumerate(start(machines, flags)):
        assert process.wait(PATIENCE) == 0, log_of(flags, rank)[-3000:]
    assert "2 processes (MULTI_CPU)" in log_of(flags, 0)
    single = settings(workspace, "one", per_device_train_batch_size=8)
    assert forked.run("train_clm.py", single).returncode == 0
    assert_same_metrics(single["output_dir"], flags["output_dir"])
    assert (workspace / "two" / "model.safetensors").exists()


@pytest.mark.slow
def test_lost_machine_ends_the_run_and_the_same_command_resumes_it(machines, workspace):
    """All processes of one machine are killed, later those of the other. Each time the survivor names the
    lost machine and fails."""
    flags = settings(workspace, "killed", max_train_steps=300, save_steps=5, eval_steps=100)
    for killed in (1, 0):
        before = newest_checkpoint(flags)
        processes = start(machines, flags)
        deadline = time.monotonic() + PATIENCE
        while newest_checkpoint(flags) == before:
            assert time.monotonic() < deadline and processes[0].poll() is None, log_of(flags, 0)[-3000:]
            time.sleep(0.05)
        processes[killed].kill()
        for pid in workers(machines[killed][0]):
            os.kill(pid, signal.SIGKILL)
        since = time.monotonic()
        assert processes[1 - killed].wait(PATIENCE) != 0
        print(f"machine {killed} was killed, the other ended {time.monotonic() - since:.1f} s later")
        processes[killed].wait(PATIENCE)
        address, survivor = re.escape(machines[killed][2]), log_of(flags, 1 - killed)
        assert re.search(rf"\[{address}\].*by peer|by peer \[{address}\]", survivor), survivor[-3000:]
        assert not workers(machines[0][0]) and not workers(machines[1][0])

    for rank, process in enumerate(start(machines, flags)):
        assert process.wait(PATIENCE) == 0, log_of(flags, rank)[-3000:]
    assert "continues at step" in log_of(flags, 0)  # it resumed
    steps = [line["step"] for line in metrics(flags["output_dir"]) if "loss/train" in line]
    assert steps == list(range(1, 301))


@pytest.mark.slow
def test_elastic_run_equals_an_uninterrupted_one(machines, workspace):
    """With elastic.sh on both. One machine is killed during a step and the other continues with twice the
    micro-batches; after the same command on the first, both continue. This happens NODE_KILLS times, once by
    default. The fourth kill is that of the rendezvous host: then both end, and both are started again."""
    kills, rng = int(os.environ.get("NODE_KILLS", 1)), random.Random(0)
    flags = settings(workspace, "elastic", max_train_steps=100_000, save_steps=5, eval_steps=100_000,
                     optimizer_type="adamw", learning_rate=5e-4, lr_scheduler_type="constant")  # fmt: skip
    launchers, since = [start_elastic(machines, i, flags) for i in (0, 1)], time.monotonic()
    both = saved_by(2, launchers, flags)
    for kill in range(1, kills + 1):
        killed = 0 if kill == 4 else 1
        time.sleep(rng.uniform(0, 0.2))
        end_machine(machines[killed], launchers[killed])
        if killed == 0:
            assert launchers[1].wait(PATIENCE) != 0
            launchers[0] = start_elastic(machines, 0, flags)
        alone = saved_by(1, launchers[:1], flags, after=both)
        launchers[1] = start_elastic(machines, 1, flags)
        both = saved_by(2, launchers, flags, after=alone)
        print(f"kill {kill}: one saved step {alone}, two {both}, {time.monotonic() - since:.0f} s")
    for launcher in launchers:
        launcher.send_signal(signal.SIGTERM)
    for launcher in launchers:
        launcher.wait(PATIENCE)
    lines = [line for line in metrics(flags["output_dir"]) if "loss/train" in line]
    steps = newest_checkpoint(flags)
    assert [line["step"] for line in lines[:steps]] == list(range(1, steps + 1))
    straight = flags | {"output_dir": workspace / "straight", "max_train_steps": steps}
    assert forked.run("train_clm.py", straight, 2).returncode == 0
    expected = [line for line in metrics(straight["output_dir"]) if "loss/train" in line]
    for a, b in zip(lines[:steps], expected, strict=True):
        assert a["loss/train"] == pytest.approx(b["loss/train"], rel=1e-5), (a, b)


def start_elastic(machines, index, flags):
    """Start elastic.sh on a machine. Its hostname is its name, so the rendezvous host recognizes itself."""
    name, interface, _ = machines[index]
    command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"']
    command += ["sh", "bash", "accelerate_configs/clusters/elastic.sh"]
    env = environment(2, GLOO_SOCKET_IFNAME=interface, ACCELERATE_MIXED_PRECISION="no", PROCESSES="2")
    env |= {"HOST": machines[0][0], "NODES": "1:2", "GPUS": "1"}
    env["RENDEZVOUS"] = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"  # seconds
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    with open(f"{flags['output_dir']}.{index}.log", "a") as log:
        return subprocess.Popen([*command, "train_clm.py", *arguments(flags)], cwd=PROJECT, env=env,
                                stdout=log, stderr=log)  # fmt: skip


def end_machine(machine, launcher):
    pids = subprocess.run(["ip", "netns", "pids", machine[0]], capture_output=True, text=True).stdout.split()
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)
    launcher.wait(PATIENCE)


def saved_by(processes, launchers, flags, after=0) -> int:
    """Wait for a checkpoint that this number of processes saved. Returns its step."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and all(launcher.poll() is None for launcher in launchers):
        with contextlib.suppress(OSError, ValueError):  # being written
            start = json.loads(Path(flags["output_dir"], "args.json").read_text())["starts"][-1]
            step = newest_checkpoint(flags)
            if start["processes"] == processes and step > max(after, start["step"]):
                return step
        time.sleep(0.02)
    raise AssertionError(log_of(flags, 0)[-3000:] + log_of(flags, 1)[-3000:])


def newest_checkpoint(flags) -> int:
    checkpoints = Path(flags["output_dir"]).glob("checkpoints/step-*")
    return max((int(path.name[5:]) for path in checkpoints), default=0)
