"""Two machines: two network namespaces of this host, joined by a cable, one launch command in each.

On the CPU with gloo. What this cannot show: NCCL, fast networks, clocks that differ.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked
from tests.runs import PROJECT, TINY, arguments, environment, metrics, write_corpus

BOUND = 60  # seconds: a machine ends that soon after another has died (gloo sees the closed connection)


@pytest.fixture(scope="module")
def machines():
    """[(namespace, interface, address)] of two machines."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = f"p{os.getpid() % 100_000}"
    names = [f"{tag}-a", f"{tag}-b"]
    found = [(name, f"{name}0", f"10.77.0.{i + 1}") for i, name in enumerate(names)]
    added = [subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True) for name in names]
    if any(done.returncode for done in added):
        pytest.skip(f"no network namespaces here: {added[0].stderr.strip()}")
    try:
        (a, on_a, _), (b, on_b, _) = found
        ip("link", "add", on_a, "netns", a, "type", "veth", "peer", "name", on_b, "netns", b)
        for name, interface, address in found:
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield found
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


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
    """The same command on each machine, but for its rank, as one does on a cluster."""
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
    """{process id: command line} of what runs on a machine."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids}
    return {pid: line for pid, line in lines.items() if "train_clm.py" in line and "launch" not in line}


@pytest.mark.slow
def test_two_machines_train_like_one_process(machines, workspace):
    flags = settings(workspace, "two")
    for rank, process in enumerate(start(machines, flags)):
        assert process.wait(240) == 0, log_of(flags, rank)[-3000:]
    assert "2 processes on 2 machines" in log_of(flags, 0)
    one = settings(workspace, "one", per_device_train_batch_size=8)
    assert forked.run("train_clm.py", one).returncode == 0
    for a, b in zip(metrics(one["output_dir"]), metrics(flags["output_dir"]), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            rel = 1e-4 if "stderr" in key else 1e-5  # a small difference of large numbers
            assert a[key] == pytest.approx(b[key], rel=rel), (a, b)
    assert (workspace / "two" / "model.safetensors").exists()


@pytest.mark.slow
def test_when_a_machine_dies_the_other_ends_and_the_same_command_continues(machines, workspace):
    """Everything on one machine is killed, then on the other: each time the survivor names it and fails."""
    flags = settings(workspace, "killed", max_train_steps=300, save_steps=5, eval_steps=100)
    for killed in (1, 0):
        before = newest_checkpoint(flags)
        processes = start(machines, flags)
        deadline = time.monotonic() + 240
        while newest_checkpoint(flags) == before:
            assert time.monotonic() < deadline and processes[0].poll() is None, log_of(flags, 0)[-3000:]
            time.sleep(0.05)
        processes[killed].kill()
        for pid in workers(machines[killed][0]):
            os.kill(pid, signal.SIGKILL)
        since = time.monotonic()
        assert processes[1 - killed].wait(BOUND) != 0
        print(f"machine {killed} was killed, the other ended {time.monotonic() - since:.1f} s later")
        processes[killed].wait(10)
        address, survivor = re.escape(machines[killed][2]), log_of(flags, 1 - killed)
        assert re.search(rf"\[{address}\].*by peer|by peer \[{address}\]", survivor), survivor[-3000:]
        assert not workers(machines[0][0]) and not workers(machines[1][0])

    for rank, process in enumerate(start(machines, flags)):
        assert process.wait(240) == 0, log_of(flags, rank)[-3000:]
    assert "are done" in log_of(flags, 0)  # it did not begin anew
    steps = [line["step"] for line in metrics(flags["output_dir"]) if "loss/train" in line]
    assert steps == list(range(1, 301))


def newest_checkpoint(flags) -> int:
    found = Path(flags["output_dir"]).glob("checkpoints/step-*")
    return max((int(path.name[5:]) for path in found), default=0)
