"""The scripts in a notebook, where accelerate's notebook_launcher forks processes from a running Python."""

import json
import re
import shlex
import subprocess
import sys

from tests import forked
from tests.forked import free_port
from tests.runs import PATIENCE, PROJECT, TINY, environment, metrics, write_corpus
from train_clm import PRESETS, TrainArgs
from utils.flags import parse_args

LINES = (PROJECT / "docs/recipes.md").read_text().rpartition("```py\n")[2].partition("```")[0]
AFTER = 'print("and the notebook goes on")'


def cell(tmp_path, **changes):
    """The lines of docs/recipes.md with a small dataset, batch and other folders."""
    left_out = "keywords", "config_overrides", "prompts"
    settings = {name: value for name, value in TINY.items() if name not in left_out}
    settings |= {"dataset_name": str(write_corpus(tmp_path / "corpus.jsonl")), "model_type": "llama",
                 "cache_dir": str(tmp_path / "cache"), "output_dir": str(tmp_path / "run")}  # fmt: skip
    settings |= {"dataset_name": [settings["dataset_name"]], **changes}
    lines, count = re.subn(r"TrainArgs\(.*model_type=\"llama\".*\)", f"TrainArgs(**{settings!r})", LINES)
    assert count == 1 and lines.endswith("num_processes=2)\n")
    return lines.replace("processes=2", f"processes=2, use_port='{free_port()}'") + AFTER


def test_notebook_launcher_returns_after_training(tmp_path):
    words = [sys.executable, "-c", cell(tmp_path)]
    done = subprocess.run(
        words, cwd=PROJECT, env=environment(2), timeout=PATIENCE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "and the notebook goes on" in done.stdout
    assert metrics(tmp_path / "run")[-1]["step"] == 6
    [manifest] = tmp_path.glob("cache/rows-*/manifest.json")
    account = json.loads(manifest.read_text())["accounting"]["train"]
    assert account["read"] == 60 and account["filtered"] == 0  # the default's keywords are off
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["model_type"] == "llama" and config["num_hidden_layers"] == 4
    assert config["intermediate_size"] == 344 and "conv_L_cache" not in config
    _, script, *words = shlex.split(re.search(r"^ +evaluate +(.*)$", done.stdout, re.M)[1])
    args = parse_args(TrainArgs, PRESETS, argv=words)
    assert script == "train_clm.py" and args.eval_only and args.output_dir == str(tmp_path / "run")
    assert args.max_eval_samples == 0 and args.vocab_size == TINY["vocab_size"]


def test_notebook_launcher_with_one_process(tmp_path):
    words = [sys.executable, "-c", cell(tmp_path).replace("num_processes=2", "num_processes=1")]
    env = {name: value for name, value in environment().items() if name != "ACCELERATE_USE_CPU"}
    done = subprocess.run(words, cwd=PROJECT, env=env, timeout=PATIENCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "and the notebook goes on" in done.stdout and metrics(tmp_path / "run")[-1]["step"] == 6


def test_mistake_in_a_notebook_is_one_message(tmp_path):
    done = forked.run_code(cell(tmp_path, learning_rate=-1.0), env=environment(2))
    assert "learning_rate: must be greater than 0, is -1.0." in done.stderr
    assert done.returncode and "notebook goes on" not in done.stdout


def test_notebook_kernel_arguments_are_ignored(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["site-packages/ipykernel_launcher.py", "-f", "kernel-1.json"])
    assert parse_args(TrainArgs, PRESETS) == parse_args(TrainArgs, PRESETS, [])


def test_notebook_signal_handler_is_restored(tmp_path):
    code = f"""
import signal
before = signal.getsignal(signal.SIGINT)
from train_clm import TrainArgs, main
settings = dict(dataset_name=[{str(write_corpus(tmp_path / "corpus.jsonl"))!r}], keywords=[], vocab_size=512,
                cache_dir={str(tmp_path / "cache")!r}, output_dir={str(tmp_path / "run")!r})
for change in (dict(show=1), dict(learning_rate=-1)):
    try:
        main(args=TrainArgs(**settings, **change))
    except SystemExit as end:
        print("status", end.code)
    assert signal.getsignal(signal.SIGINT) is before, change
"""
    done = forked.run_code(code)
    assert done.returncode == 0 and "status 2" in done.stdout, done.stderr[-4000:]
