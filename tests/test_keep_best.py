"""`--keep_best true`: output_dir/best is the model of the lowest evaluation loss, whatever came after it."""

import json
import math
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from data.rows import PackedRows
from tests.forked import finish, start, start_all
from tests.runs import PROJECT, TINY, metrics, write_corpus
from tests.shard_data import all_ids

# Too high a rate: the loss falls, and rises again.
RISING = {"keep_best": True, "optimizer_type": "adamw", "lr_scheduler_type": "constant",
          "learning_rate": 2.0, "num_warmup_steps": 0, "max_grad_norm": 0, "max_train_steps": 8,
          "eval_steps": 1, "save_steps": 4, "max_eval_samples": 0, "keytokens": "none",
          "eval_at_start": False}  # fmt: skip


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best")
    return TINY | RISING | {"dataset_name": write_corpus(folder / "c.jsonl"), "cache_dir": folder / "cache"}


def losses(output_dir) -> dict[int, float]:
    return {line["step"]: line["loss/eval"] for line in metrics(output_dir) if "loss/eval" in line}


@pytest.mark.parametrize("processes", [1, 2])
def test_the_best_model_is_kept_through_worse_evaluations_and_a_kill(flags, processes, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    flags = flags | {"output_dir": run, "per_device_train_batch_size": 8 // processes}
    killed = start_all(PROJECT, "train_clm.py", flags, log, processes)
    while not (run / "checkpoints" / "step-00000004").exists() and any(p.is_alive() for p in killed):
        time.sleep(0.01)
    for process in killed:
        process.kill()
        process.join()
    finish(start_all(PROJECT, "train_clm.py", flags, log, processes), log)

    found = losses(run)
    best = min(found, key=found.get)
    assert len(found) == 8 and best < 8, found
    told = json.loads((run / "best" / "best.json").read_text())
    assert (told["step"], told["loss/eval"]) == (best, found[best])
    assert f"best, of step {best}" in log.read_text()
    model = AutoModelForCausalLM.from_pretrained(run / "best").eval()
    rows = PackedRows([np.load(next(flags["cache_dir"].glob("rows*/validation-*.npy")))], flags["block_size"])
    with torch.no_grad():
        ids = torch.from_numpy(all_ids(rows).astype("int64"))
        assert math.isclose(model(ids, labels=ids).loss.item(), found[best], rel_tol=1e-5)


def test_losses_on_other_rows_are_not_compared(flags, tmp_path):
    """Then the first evaluation on the new rows is the best of them."""
    log, run = tmp_path / "log", tmp_path / "run"
    flags = flags | {"output_dir": run}
    finish([start(PROJECT, "train_clm.py", flags, log)], log)
    state = json.loads(next((run / "checkpoints").glob("*4/state.json")).read_text())
    assert state["extra"]["state"]["best"]["step"] <= 4
    fewer = flags | {"max_eval_samples": 8, "resume_from_checkpoint": run / "checkpoints" / "step-00000004"}
    finish([start(PROJECT, "train_clm.py", fewer, log)], log)
    found = {step: loss for step, loss in losses(run).items() if step > 4}
    assert json.loads((run / "best" / "best.json").read_text())["step"] == min(found, key=found.get)
