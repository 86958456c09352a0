"""Runs of a script as processes forked from one that has imported torch and transformers: 8 s less for each.

    process = start(folder, "train_clm.py", {"max_train_steps": 6}, log)
    process.pid, process.kill(), process.join(), process.exitcode

Each is a process of its own, with its own environment, folder and output, that can be killed. The project's
modules are imported anew from `folder`, which may hold an edited copy. All share one seed of Python's hashes,
which runs that people start do not.
"""

import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path
from unittest import mock

from tests.runs import PROJECT, arguments, environment

OURS = ("data", "utils", "train_clm", "train_mlm")
HUB = ("huggingface_hub",)  # which reads the environment when it is imported

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.preloaded"])


def start(folder, script: str, flags: dict, log, processes: int = 1, rank: int = 0, port: int = 0, hub=None):
    """The running process, number `rank` of several. hub: the environment of a client of HubServer."""
    env = environment(processes) if hub is None else environment(processes, **hub, HF_HUB_OFFLINE="0")
    if processes > 1:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {name: str(processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        env |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    process = context.Process(target=_run, args=(str(folder), script, arguments(flags), str(log), env))
    with mock.patch.dict(os.environ, environment(PYTHONPATH=str(PROJECT))):  # of the server, at its start
        process.start()
    return process


def start_all(folder, script: str, flags: dict, log, processes: int, hub=None) -> list:
    """All processes of one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [start(folder, script, flags, log, processes, rank, port, hub) for rank in range(processes)]


def finish(processes: list, log, timeout: float = 120) -> None:
    """Waits; AssertionError with the end of the log if one of them fails."""
    for process in processes:
        process.join(timeout)
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert statuses == [0] * len(processes), f"exit {statuses}: {Path(log).read_text()[-4000:]}"


def _run(folder, script, words, log, env):
    """In the forked process."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    assert "tests.preloaded" in sys.modules, "the server could not import it"
    anew = OURS + HUB * ("HF_ENDPOINT" in env)
    for name in [name for name in sys.modules if name.split(".")[0] in anew]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[:] = [folder, *(path for path in sys.path if path not in ("", str(PROJECT), folder))]
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
