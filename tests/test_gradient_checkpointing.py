"""Gradient checkpointing changes no number of a run, also with dropout."""

import pytest

from tests.forked import finish, start_all
from tests.runs import DROPOUT, PROJECT, TINY, metrics, write_corpus

MASKED = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64"
SCRIPTS = {
    "train_clm.py": DROPOUT,
    "train_mlm.py": {"config_overrides": MASKED + ",mlp_dropout=0.1", "prompts": ["none"]},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return {"dataset_name": write_corpus(folder / "corpus.jsonl"), "cache_dir": folder / "cache"}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("processes", [1, 2])
def test_gradient_checkpointing_gives_the_same_run(script, processes, data, tmp_path):
    flags = {**TINY, **data, "max_train_steps": 3, **SCRIPTS[script]}
    if script == "train_mlm.py":
        del flags["keywords"]
    lines = []
    for again in ("false", "true"):
        run_flags = {**flags, "output_dir": tmp_path / again, "gradient_checkpointing": again}
        log = tmp_path / f"{again}.log"
        finish(start_all(PROJECT, script, run_flags, log, processes), log)
        lines.append(metrics(tmp_path / again))
    assert lines[0] == lines[1] and lines[0][-1]["step"] == 3
