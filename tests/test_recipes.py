"""docs/recipes.md: the commands of each table run from top to bottom, at small sizes and on a local Hub."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest

from tests import forked
from tests.hub_data import publish
from tests.hub_server import HubServer
from tests.runs import PROJECT, arguments, write_corpus
from tests.test_presets import SIZE
from tests.test_readme import COMMAND, LEFT_OUT

PAGE = (PROJECT / "docs/recipes.md").read_text()
_, *SECTIONS = PAGE.split("\n## ")
TINY = arguments({
    "config_overrides": SIZE, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 1, "max_train_steps": 2, "num_warmup_steps": 1, "logging_steps": 1,
    "max_eval_samples": 4, "vocab_size": 600,
})  # fmt: skip
MORE = {  # words appended to a command with this beginning; other training commands get TINY
    "python -m data.tokens.tokenizer": ["--vocab_size", "600"],
    "python -m data.prepare --dataset_name Salesforce/wikitext": ["--output_dir", "shards"],  # not gs://
    "python train_mlm.py --preset wikitext-roberta --dataset_name records-": [*TINY, "--block_size", "32"],
    "python train_mlm.py --preset wikitext-bert-nsp --dataset_name Salesforce/wikitext:validation --model_na":
        TINY[2:],  # the model's own sizes
    "accelerate launch --config_file mine.yaml": [*TINY, "--output_dir", "runs/mine"],
    "accelerate launch --cpu": [*TINY, "--output_dir", "runs/cpu"],
}
OUTPUTS = {  # a pattern in the output of a command with this beginning
    "python -m data.prepare --dataset_name transformersbook": r"\d+ of 90 documents, \d+ without a key",
    "python train_clm.py --preset codeparrot --show": r"What the model is fed",
    "python train_clm.py --preset codeparrot --push": r"this run is finished",
    "python -m data.convert wikiTokenizedValid": r"train: 38 rows .*\n.*validation: 2 rows ",
    "python train_mlm.py --preset wikitext-bert-nsp --show": r"next_sentence_label \d",
    "from datasets import": r"repo_name: python/cpython\npath: .*\ncopies: 1\nsize: \d+\ncontent: ",
    "from transformers": r"\[\[0\.\d+, 0\.\d+\]\]",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory, hub_port, _home):
    """(a copy of the project with the files that readers of the four tutorials have, its environment)"""
    folder = tmp_path_factory.mktemp("recipes") / "project"
    shutil.copytree(PROJECT, folder, ignore=LEFT_OUT)
    shutil.copytree(PROJECT / "tests/tfrecords", folder / "records")
    write_corpus(folder / "corpus.jsonl")
    (folder / "mine.yaml").write_text((PROJECT / "accelerate_configs/cpu.yaml").read_text())
    ids = np.random.default_rng(0).integers(10, 500, (40, 128))
    pairs = {"input_ids": ids, "token_type_ids": (np.arange(128) >= 64) * np.ones_like(ids),
             "next_sentence_label": [0, 1] * 20, "attention_mask": np.ones_like(ids)}  # fmt: skip
    datasets.Dataset.from_dict(pairs).save_to_disk(folder / "wikiTokenizedValid.hf")
    with HubServer(tmp_path_factory.mktemp("hub"), hub_port, home=_home) as hub:
        publish(hub)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        yield folder, hub.env() | {"PATH": path, "OMP_NUM_THREADS": "1"}


def steps(section: str) -> list[str]:
    """The commands of a section in their order, without those marked with †, then its lines of Python."""
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
    cells = "\n".join(cells for original, cells in rows if "†" not in original)
    return re.findall(rf"`({COMMAND}[^`]*)`", cells) + re.findall(r"```py\n(.*?)```", section, re.S)


def run(step: str, folder: Path, env: dict):
    step = step.replace(" user/", " ada/")  # a user of the local Hub
    start = max((start for start in MORE if step.startswith(start)), key=len, default=None)
    small = MORE[start] if start else TINY if re.search(r"train_[cm]lm\.py", step) else []
    if small and " train_clm.py" in step and "--preset" not in step:
        sizes = f"{SIZE},num_key_value_heads=2"
        small = [*small, "--dataset_name", "corpus.jsonl", "--keywords", "none", "--config_overrides", sizes]
    if "\n" in step:
        return forked.run_code(step, folder=folder, env=env)
    words = shlex.split(step)
    if words[:2] == ["python", "-c"]:
        return forked.run_code(words[2], folder=folder, env=env)
    if words[0] == "python":
        what, *flags = words[1 + (words[1] == "-m") :]
        return forked.run(what, flags + small, folder=folder, env=env)
    line = " ".join([step, *map(shlex.quote, small)])
    return subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True)


LAUNCHES = pytest.mark.slow  # five launches, each of which imports torch


@pytest.mark.parametrize("number", [0, 1, 2, pytest.param(3, marks=LAUNCHES)])
def test_recipe_runs_from_top_to_bottom(number, project):
    for step in steps(SECTIONS[number]):
        if "notebook_launcher" in step:
            continue  # tests/test_notebook.py runs these lines
        done = run(step, *project)
        log = f"{step}\n{done.stdout}{done.stderr[-3000:]}"
        assert done.returncode == 0 and (done.stdout.strip() or step.startswith("git")), log
        for pattern in [pattern for start, pattern in OUTPUTS.items() if step.startswith(start)]:
            assert re.search(pattern, done.stdout), log


def test_skipped_commands_need_missing_hardware_or_accounts():
    """Also, each beginning in MORE and OUTPUTS is on the page."""
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    marked = "\n".join(cell for original, cell in rows if "†" in original)
    missing = r"(tpu|rocm|single_gpu|multi_gpu|fsdp)\.yaml|--multi_gpu|torchrun|hf auth login"
    for command in re.findall(rf"`({COMMAND}[^`]*)`", marked):
        assert re.search(missing, command), command
    for start in (*MORE, *OUTPUTS):
        assert any(step.startswith(start) for section in SECTIONS for step in steps(section)), start
