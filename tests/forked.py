"""Runs of a script as processes forked from one that has imported torch and transformers: 8 s less for each.

    process = start(folder, "train_clm.py", {"max_train_steps": 6}, log)
    process.pid, process.kill(), process.join(), process.exitcode
    done = run("train_clm.py", {"max_train_steps": 6})         # to the end, as tests.runs.run
    done = run("data.prepare", ["--output_dir", "shards"])

Each run is a separate process with its own environment, folder and output, and can be killed. It imports the
project's modules again from `folder`, which may hold an edited copy. Unlike runs that people start, all share
one seed of Python's hashes. Without `picture` a run draws no curves.png and warns about it, as if matplotlib
were broken: drawing takes three times as long as the rest of a small run.
"""

import itertools
import multiprocessing
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

from huggingface_hub import constants

from tests.runs import PATIENCE, PROJECT, arguments, environment

OURS = ("data", "utils", "train_clm", "train_mlm")
READ_AT_IMPORT = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE")

context = multiprocessing.get_context("forkserver")
_servers = {}  # fork servers by the environment in which they imported the libraries
_ports = itertools.count()


def free_port() -> int:
    """A port below the system's ephemeral range, so that it is still free when it is used later. Each process
    of tests draws from a hundred ports."""
    for _ in range(100):
        port = 12_000 + 100 * (os.getpid() % 200) + next(_ports) % 100
        with socket.socket() as candidate, suppress(OSError):
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            candidate.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


def start(
    folder, program: str, flags: dict | list, log, processes: int = 1, rank: int = 0, port: int = 0,
    *, env: dict | None = None, errors=None, cwd=None, picture: bool = False, stdin=os.devnull,
):  # fmt: skip
    """Start process `rank` of `processes`. program: a script of `folder`, or a module as for python -m.
    env: its complete environment instead of the usual one. errors: a file for stderr; default: the log.
    cwd: default `folder`. stdin: a file or a FIFO."""
    env = environment(processes) if env is None else env
    if processes > 1:
        env = env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {name: str(processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        env |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    words = arguments(flags) if isinstance(flags, dict) else [str(word) for word in flags]
    Path(log).touch()
    files = str(stdin), str(log), str(errors or log)
    places = str(folder), str(cwd or folder)
    process = context.Process(target=_run, args=(places, program, words, files, env, picture))
    early = {name: env[name] for name in READ_AT_IMPORT if env.get(name, "0") != "0"}
    server = _servers.setdefault(tuple(early.items()), forkserver.ForkServer())
    server.set_forkserver_preload(["tests.preloaded"])
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    clean = {name: value for name, value in environment(PYTHONPATH=path).items()
             if name not in READ_AT_IMPORT}  # fmt: skip
    with (mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
          mock.patch.dict(os.environ, clean | early, clear=True)):  # environment of a new server
        process.start()
    return process


def start_all(folder, program: str, flags: dict | list, log, processes: int, **settings) -> list:
    """Start all processes of one run."""
    port = free_port()
    ranks = range(processes)
    return [start(folder, program, flags, log, processes, rank, port, **settings) for rank in ranks]


def finish(processes: list, log, timeout: float = PATIENCE) -> None:
    """Wait for the processes. Raises AssertionError with the end of the log if one of them failed."""
    for process in processes:
        process.join(timeout)
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert statuses == [0] * len(processes), f"exit {statuses}: {Path(log).read_text()[-4000:]}"


def start_code(code: str, words: list, folder: Path) -> tuple:
    """Start `code` as python -c does. Returns the process and the log of its output, a file in `folder`."""
    script = Path(tempfile.mkstemp(".py", dir=folder)[1])
    script.write_text(code)
    log = script.with_suffix(".log")
    return start(PROJECT, str(script), words, log), log


def wait_for(process, log: Path, text: str) -> None:
    """Wait until the process has printed `text`."""
    while text not in log.read_text():
        assert process.is_alive() or text in log.read_text(), log.read_text()
        time.sleep(0.01)


def run(
    program: str, flags: dict | list, processes: int = 1, folder=PROJECT, env: dict | None = None,
    picture: bool = False,
) -> subprocess.CompletedProcess:  # fmt: skip
    """Run to the end. Returns what subprocess.run returns; the status is that of the first failed process."""
    with tempfile.TemporaryDirectory() as outputs:
        out, errors = Path(outputs, "out"), Path(outputs, "errors")
        settings = {"env": env, "errors": errors, "picture": picture}
        started = start_all(folder, program, flags, out, processes, **settings)
        for process in started:
            process.join(PATIENCE)
        statuses = [process.exitcode for process in started]
        for process in started:
            process.kill()
        assert None not in statuses, f"it did not end in {PATIENCE} s: {errors.read_text()[-4000:]}"
        status = next((status for status in statuses if status), 0)
        output = re.sub(r"\[Gloo\] Rank.*\n", "", out.read_text())  # torch 2.9 prints who is connected
        return subprocess.CompletedProcess([program, flags], status, output, errors.read_text())


def run_code(code: str, words=(), processes: int = 1, **settings) -> subprocess.CompletedProcess:
    """Run `code` as python -c does, or as torchrun starts several processes."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "code.py")
        script.write_text(code)
        return run(str(script), list(words), processes, **settings)


def _run(places, program, words, files, env, picture):
    """Run `program` in the forked process."""
    os.dup2(os.open(files[0], os.O_RDONLY), 0)
    sys.stdin = open(0)
    for descriptor, file in enumerate(files[1:], 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    assert "tests.preloaded" in sys.modules, "the server could not import it"
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    constants.HF_HUB_DISABLE_XET = env.get("HF_HUB_DISABLE_XET") == "1"  # as an import would set it now
    sys.dont_write_bytecode = False  # or each run would compile all modules again
    if not picture:
        sys.modules["matplotlib.figure"] = None  # importing it fails
    os.environ.clear()
    os.environ.update(env)
    folder = places[0]
    os.chdir(places[1])
    sys.path[:] = [folder, *(path for path in sys.path if path not in ("", str(PROJECT), folder))]
    sys.argv = [program, *words]
    if "PYTHONUNBUFFERED" in env:
        sys.stdout.reconfigure(line_buffering=True)
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
