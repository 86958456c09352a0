"""What stands where: the training in the scripts, the parts below them; and how a script ends."""

import ast

import pytest

from tests import forked
from tests.forked import run_code
from tests.runs import PROJECT, TINY, write_corpus


def test_nothing_behind_the_scripts_trains():
    """No backward, no step of optimizer or schedule, no clipping in utils: they stand in the scripts."""
    for script in ("train_clm.py", "train_mlm.py"):
        written = (PROJECT / script).read_text()
        for verb in ("accelerator.backward(", "optimizer.step()", "optimizer.zero_grad()", "schedule.step()",
                     "clip_grad_norm_(", "guard.check(", "Accelerator(", "accelerator.gather(",
                     "checkpoints.save(", "checkpoints.load(", "hub.push(step)"):  # fmt: skip
            assert verb in written, (script, verb)
    for path in PROJECT.glob("utils/**/*.py"):
        text = path.read_text()
        for verb in ("accelerator.backward(", "optimizer.step()", "schedule.step()", "clip_grad_norm_("):
            assert verb not in text, (path, verb)


def test_imports_never_run_back_up():
    """utils/io imports nothing of the project; data nothing else of utils, utils nothing of data, neither a
    script; the rooms of utils build on each other."""
    rooms = "io devices launch flags learning state display publishing".split()
    for path in [*PROJECT.glob("data/**/*.py"), *PROJECT.glob("utils/**/*.py")]:
        here = path.relative_to(PROJECT).parts
        names = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            assert parts[0] not in ("train_clm", "train_mlm"), (path, name)
            if parts[0] in ("data", "utils"):
                assert parts[0] == here[0] or parts[:2] == ["utils", "io"], (path, name)
            if parts[0] == "utils" and here[0] == "utils" and len(here) == 3 and here[1] in rooms:
                assert parts[1] in rooms[: rooms.index(here[1]) + 1], (path, name)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_main_that_leaves_by_itself_has_the_status_that_it_says(processes):
    code = """
import sys
sys.path.insert(0, ".")
from utils.entry import entry_point

@entry_point
def main():
    if sys.argv[1] == "full":
        with open("/dev/full", "w") as file:
            file.write("x")
    sys.exit({"nothing": None, "seven": 7, "told": "told"}[sys.argv[1]])

main()
"""
    for word, status in {"nothing": 0, "seven": 7, "told": 1, "full": 1}.items():
        done = run_code(code, [word], processes)
        assert (done.returncode, "told" in done.stderr) == (status, word == "told")
    assert "no space is left; make room and run the same command again" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_room_in_memory_is_one_message(tmp_path):
    flags = TINY | {
        "model_type": "gpt2", "config_overrides": "n_embd=16777216,n_head=2,n_layer=1",
        "dataset_name": write_corpus(tmp_path / "corpus.jsonl", 30), "cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "run",
    }  # fmt: skip
    done = forked.run("train_clm.py", flags)
    assert done.returncode == 1
    assert done.stderr == (
        "error: out of memory with 8 rows of 32 tokens: --per_device_train_batch_size 4 "
        "--gradient_accumulation_steps 2 takes the same rows per step, also to resume; or choose a smaller "
        "model\n"
    )
