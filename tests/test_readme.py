"""What the README claims: its loop is the script's, its files exist, its edits run."""

import re
import shutil
import subprocess
import sys
import textwrap

import pytest

import train_clm
import train_mlm
from tests.runs import PROJECT, TINY, arguments, environment, write_corpus
from utils.config import parse_args

README = (PROJECT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)


def test_the_loop_is_the_scripts():
    loop = next(code for kind, code in BLOCKS if kind == "python" and "accumulate" in code)
    script = (PROJECT / "train_clm.py").read_text()
    assert textwrap.indent(loop, "    ", lambda line: line.strip()) in script


def test_every_file_of_the_tree_exists():
    tree = next(code for kind, code in BLOCKS if kind == "text" and "accelerate_configs/" in code)
    folder = ""
    for line in tree.splitlines():
        names = re.findall(r"[\w/]+(?:\.py|/)(?= |$)", line.split("   ")[0] if line[0] == " " else line)
        if line[0] != " " and names and names[0].endswith("/"):
            folder = names[0]
        for name in names:
            assert (PROJECT / name).exists() or (PROJECT / folder / name).exists(), name
    modules = {file.name for part in ("data", "utils") for file in (PROJECT / part).glob("[a-z]*.py")}
    assert not {name for name in modules if name not in tree}, "missing in the README's tree"


def test_every_path_and_flag_of_its_commands_exists():
    for file in re.findall(r"accelerate_configs/\w+\.\w+|tests/[\w/]+\.\w+|(?<!\S)train_\w+\.py", README):
        assert (PROJECT / file).exists(), file
    for script, line in re.findall(r"(train_[cm]lm)\.py (--[^`|\n]+)", README):
        module = {"train_clm": train_clm, "train_mlm": train_mlm}[script]
        parse_args(module.TrainArgs, module.PRESETS, line.split())


EDITS = [code for kind, code in BLOCKS if kind == "diff"]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.splitlines()[0].strip("# "))
def test_the_edits_run(edit, tmp_path):
    """Each edit of the README, made in a copy of the project, trains for two steps."""
    first, *lines = edit.splitlines()
    copy = tmp_path / "project"
    shutil.copytree(
        PROJECT, copy, ignore=shutil.ignore_patterns(".git", "runs", "cache", "__pycache__", ".venv")
    )
    file = copy / first.strip("# ")
    old = "".join(line[1:] + "\n" for line in lines if line[0] in " -")
    new = "".join(line[1:] + "\n" for line in lines if line[0] in " +")
    source = file.read_text()
    assert source.count(old) == 1, old
    file.write_text(source.replace(old, new))
    flags = {**TINY, "dataset_name": write_corpus(tmp_path / "corpus.jsonl"), "max_train_steps": 2,
             "cache_dir": tmp_path / "cache", "output_dir": tmp_path / "run"}  # fmt: skip
    if first.endswith("corpus.py"):
        flags |= {"dataset_name": "tales"}
    result = subprocess.run(
        [sys.executable, "train_clm.py", *arguments(flags)], cwd=copy, env=environment(), capture_output=True,
        text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"step": 2' in metrics and ("weight_norm" in metrics) == ("weight_norm" in edit)
