"""A run that begins from another run's checkpoint: --resume_from_checkpoint runs/a/..."""

from safetensors.torch import load_file

from tests import forked
from tests.runs import TINY, metrics, write_corpus


def test_branch_continues_like_the_original_run(tmp_path):
    flags = TINY | {"dataset_name": write_corpus(tmp_path / "corpus.jsonl"), "cache_dir": tmp_path / "cache"}

    def train(name, **changes):
        return forked.run("train_clm.py", flags | changes | {"output_dir": tmp_path / name})

    done = train("a")
    assert done.returncode == 0, done.stderr[-3000:]
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    origin = {"resume_from_checkpoint": tmp_path / "a/checkpoints/step-00000003"}
    done = train("b", **origin)
    assert done.returncode == 0, done.stderr[-3000:]
    assert before == {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    expected = [line for line in metrics(tmp_path / "a") if line["step"] > 3 - ("loss/eval" in line)]
    assert metrics(tmp_path / "b") == expected  # the branch also evaluates its first step
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)
    again = train("b", **origin, max_train_steps=6)  # the same command
    assert again.returncode == 0 and "this run is finished" in again.stdout, again.stdout + again.stderr
    done = train("a", **origin)
    assert done.returncode == 2 and "is not the newest of its run, step-00000006" in done.stderr
    for change in ("learning_rate: 0.002 in the run, 9.0 now", "max_train_steps: 6 in the run, 9 now"):
        done = train("c", **origin | {change.partition(":")[0]: 9})
        assert done.returncode == 2 and change in done.stderr, done.stderr
        assert "a/checkpoints/step-00000003 holds a run with other settings" in done.stderr
