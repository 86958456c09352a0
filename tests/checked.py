"""utils/check.py with forked runs (tests/forked.py), a second or two each; and edited project copies."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from tests.forked import start_all
from tests.runs import PATIENCE, PROJECT, TINY, arguments, environment
from utils.check import Check

# Settings of the tiny masked model, beside TINY.
MASKED = {
    "model_type": "roberta",
    "config_overrides": "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,"
    "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
}  # fmt: skip
_start = threading.Lock()  # starting changes the environment for a moment


class ForkedCheck(Check):
    """The check of folder/script with the tiny model. corpus: flags of the data; flags: further ones."""

    def __init__(self, folder: Path, script: str, corpus: dict, limit: float = PATIENCE, **flags):
        runs, path = folder / "runs", [*sys.path]
        runs.mkdir()
        kind = MASKED if script == "train_mlm.py" else {}
        super().__init__(folder / script, arguments({**TINY, **kind, **corpus, **flags}), runs, limit)
        sys.path[:] = path  # the script puts its folder there

    def launch(self, words, log, processes):
        env = environment(processes, ACCELERATE_USE_CPU="true")
        with _start:
            started = start_all(self.script.parent, words[0], words[1:], log, processes, env=env)
        for process in started:
            process.join(self.limit)
        statuses = [process.exitcode for process in started]
        for process in started:
            process.kill()
        return None if None in statuses else next((status for status in statuses if status), 0)


def copy_project(folder: Path) -> Path:
    """Copy the scripts and what they import, with the compiled modules, so that a test can edit them."""
    for part in ("accelerate_configs", "data", "utils"):
        half_written = shutil.ignore_patterns("*.pyc.*")  # by another worker
        shutil.copytree(PROJECT / part, folder / part, ignore=half_written)
    for script in PROJECT.glob("train_*.py"):
        shutil.copy2(script, folder)
    return folder


def apply(diff: Path, folder: Path, *options: str) -> None:
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # a folder outside any repository
    command = ["git", "apply", *options, str(diff)]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
