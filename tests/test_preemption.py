"""Stop signals, sent to running and launched scripts."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked
from tests.runs import PATIENCE, PROJECT

# Stands in for a training script: steps of 50 ms, some seconds to save.
JOB = """
import os, sys, time
from accelerate import Accelerator
from tests.runs import PATIENCE
from utils.state.stop_signals import StopSignals, handle_stop_signals, received_signal, restore_handlers

def main():
    handle_stop_signals()
    print("pid", os.getpid(), flush=True)
    accelerator = Accelerator(cpu=True)
    if sys.argv[1] == "prepare":
        print("ready", flush=True)
        time.sleep(PATIENCE)
    stop = StopSignals(accelerator)
    print("ready", flush=True)
    for step in range(20 * PATIENCE):
        time.sleep(0.05)
        if number := stop.stop_requested():
            assert received_signal() in (0, number)
            print(f"process {accelerator.process_index} stops at {step} by {number}", flush=True)
            time.sleep(float(sys.argv[2]))
            print("saved", flush=True)
            accelerator.wait_for_everyone()
            stop.exit_if_stopped(finished=True)  # changes nothing
            restore_handlers()
            stop.exit_if_stopped(finished=False)

handle_stop_signals(importing=True)
if __name__ == "__main__":
    main()
"""

# Imitates accelerate's TPU launcher (accelerate/commands/launch.py, torch_xla's xmp.spawn) without a TPU: it
# imports the script and calls its main in a thread of a spawned process.
TPU_LAUNCHER = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

def child(argv):
    import job
    sys.argv = argv
    with ThreadPoolExecutor(1) as threads:
        try:
            threads.submit(job.main).result()
        except SystemExit as stop:
            return stop.code

if __name__ == "__main__":
    import job
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        sys.exit(processes.submit(child, sys.argv).result())
"""


class Job:
    """A running script, forked or started by a launcher. A launcher that is a module is forked, too; one that
    is a file imports the script."""

    def __init__(self, folder, *launcher, arguments=("train", "0.5")):
        (folder / "job.py").write_text(JOB)
        self.log = folder / "log"
        self.launched = None
        env = os.environ | {"PYTHONPATH": f"{PROJECT}:{folder}", "ACCELERATE_USE_CPU": "true"}
        if not launcher:
            self.process = forked.start(PROJECT, str(folder / "job.py"), arguments, self.log)
        elif not launcher[0].endswith(".py"):
            words = [*launcher[1:], "job.py", *arguments]
            self.process = forked.start(PROJECT, launcher[0], words, self.log, env=env, cwd=folder)
        else:
            self.process = self.launched = subprocess.Popen(
                [sys.executable, *launcher, *arguments], cwd=folder, env=env,
                stdout=open(self.log, "w"), stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self):
        return self.log.read_text()

    def wait_for(self, text, times=1):
        deadline = time.monotonic() + PATIENCE
        while self.output.count(text) < times:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    @property
    def workers(self):
        return [int(pid) for pid in re.findall(r"pid (\d+)", self.output)]

    def end(self):
        """Wait for the launcher and the workers. Returns the launcher's exit status."""
        if self.launched:
            status = self.launched.wait(PATIENCE)
        else:
            self.process.join(PATIENCE)
            status = self.process.exitcode
        deadline = time.monotonic() + PATIENCE
        while any(Path(f"/proc/{pid}").exists() for pid in self.workers):
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)
        return status


ACCELERATE = ("accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no", "--cpu")  # fmt: skip
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stop_signal_saves_and_sets_the_exit_status(tmp_path, number, status):
    """Also if it arrives twice within a second, from a scheduler and from a launcher."""
    job = Job(tmp_path)
    job.wait_for("ready")
    os.kill(job.process.pid, number)
    time.sleep(0.1)
    os.kill(job.process.pid, number)
    assert job.end() == status, job.output
    assert job.output.count("saved") == 1 and job.output.count("a second signal stops at once") == 1


def test_second_signal_stops_at_once(tmp_path):
    job = Job(tmp_path, arguments=("train", str(PATIENCE)))
    job.wait_for("ready")
    os.kill(job.process.pid, signal.SIGINT)
    job.wait_for("stops at")
    time.sleep(1.2)
    os.kill(job.process.pid, signal.SIGINT)
    assert job.end() == 130 and "saved" not in job.output


def test_signal_before_training_stops_at_once(tmp_path):
    job = Job(tmp_path, arguments=("prepare", "0"))
    job.wait_for("ready")
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.end() == 143 and "nothing to save" in job.output


@pytest.mark.parametrize("stop", [signal.SIGTERM, "terminal"])
def test_run_saves_when_accelerate_launch_is_stopped(tmp_path, stop):
    """The launcher dies and forwards no signal; Ctrl-C in a terminal reaches both. The project's folder may
    have the launcher's name."""
    folder = tmp_path / "accelerate-lm"
    folder.mkdir()
    job = Job(folder, *ACCELERATE, arguments=("train", "2"))
    job.wait_for("ready")
    for pid in [job.process.pid, *job.workers] if stop == "terminal" else [job.process.pid]:
        os.kill(pid, signal.SIGINT if stop == "terminal" else stop)
    job.end()
    number = 2 if stop == "terminal" else 15
    assert f"by {number}" in job.output and "saved" in job.output and "second signal," not in job.output


def test_processes_stop_at_the_same_step(tmp_path):
    """Although only one of them receives the signal."""
    job = Job(tmp_path, *TORCHRUN)
    job.wait_for("ready", times=2)
    os.kill(job.workers[1], signal.SIGTERM)
    job.end()
    stops = re.findall(r"process \d stops at (\d+) by 15", job.output)
    assert len(stops) == 2 and stops[0] == stops[1] and job.output.count("saved") == 2, job.output


def test_signal_reaches_the_child_of_a_tpu_launcher(tmp_path):
    """main() runs in a thread of a child process, to which the launcher forwards no signal."""
    launcher = tmp_path / "accelerate/commands/launch.py"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(TPU_LAUNCHER)
    job = Job(tmp_path, str(launcher))
    job.wait_for("ready")
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.end() == 143, job.output
    assert "saved" in job.output
