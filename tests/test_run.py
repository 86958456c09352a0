"""The layers of the project, and the exit status of a script."""

import ast

import pytest

from tests import forked
from tests.forked import run_code
from tests.runs import PROJECT, TINY, write_corpus


def test_import_layers():
    """utils/io imports nothing else of the project, data only utils/io, utils not data, and none a script. A
    folder of utils imports only those before it in the list."""
    layers = "io devices launch flags learning state display publishing".split()
    for path in [*PROJECT.glob("data/**/*.py"), *PROJECT.glob("utils/**/*.py")]:
        place = path.relative_to(PROJECT).parts
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
                assert parts[0] == place[0] or parts[:2] == ["utils", "io"], (path, name)
            if parts[0] == "utils" and place[0] == "utils" and len(place) == 3 and place[1] in layers:
                assert parts[1] in layers[: layers.index(place[1]) + 1], (path, name)


@pytest.mark.parametrize("processes", [1, 2])
def test_exit_status_of_main(processes):
    code = """
import sys
sys.path.insert(0, ".")
from utils.entry import entry_point

@entry_point
def main():
    if sys.argv[1] == "full":
        with open("/dev/full", "w") as file:
            file.write("x")
    sys.exit({"nothing": None, "seven": 7, "text": "text"}[sys.argv[1]])

main()
"""
    for word, status in {"nothing": 0, "seven": 7, "text": 1, "full": 1}.items():
        done = run_code(code, [word], processes)
        assert (done.returncode, "text" in done.stderr) == (status, word == "text")
    assert "no space is left; make room and run the same command again" in done.stderr
    assert "Traceback" not in done.stderr


def test_out_of_memory_is_one_message(tmp_path):
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
