"""The output of a run with control characters in the data, ASCII terminals and closed pipes; ~ in paths."""

import json
import shutil
import subprocess
import sys

from tests.runs import PATIENCE, PROJECT, TINY, arguments, environment, metrics, write_corpus


def train(cwd, flags, **env):
    words = [sys.executable, str(PROJECT / "train_clm.py"), *arguments(TINY | {"prompts": "rows"} | flags)]
    return subprocess.run(words, cwd=cwd, capture_output=True, env=environment(**env), timeout=PATIENCE)


def test_escape_codes_in_data_do_not_reach_the_terminal(tmp_path):
    noise = " \x1b]0;OWNED\x07\x1b[2J Привет \x9b8m ± "
    texts = [noise.join(str(i * j) for j in range(60)) for i in range(60)]
    with open(tmp_path / "a.jsonl", "w") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    for more in ({}, {"show": 2, "output_dir": "shown"}):
        done = train(tmp_path, {"dataset_name": "a.jsonl"} | more, PYTHONIOENCODING="ascii")
        assert done.returncode == 0, done.stderr[-2000:]
        printed = (done.stdout + done.stderr).decode("ascii")
        assert "\\x1b" in printed and not {"\x1b", "\x07", "\x9b"} & {*printed}
    # A message may hold text of the data, too: here the name of a column.
    (tmp_path / "b.jsonl").write_text(json.dumps({"\x1b[8mbody": "a"}))
    done = train(tmp_path, {"dataset_name": "b.jsonl", "output_dir": "other"})
    assert done.returncode == 2 and b"\\x1b[8mbody" in done.stderr and b"\x1b" not in done.stderr


def test_closed_pipe_and_deleted_output_dir_do_not_end_a_run(tmp_path):
    """As by `python train_clm.py | head` and `rm -r`, after the first save."""
    run, last = tmp_path / "run", 200
    flags = TINY | {"dataset_name": write_corpus(tmp_path / "a.jsonl"), "cache_dir": tmp_path / "cache",
                    "output_dir": run, "max_train_steps": last, "save_steps": last, "eval_steps": last}
    words = [sys.executable, str(PROJECT / "train_clm.py"), *arguments(flags)]
    with open(tmp_path / "errors", "w") as errors:
        process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True)
        next(line for line in process.stdout if f"step   2/{last}" in line)
        process.stdout.close()
        shutil.rmtree(run.rename(tmp_path / "deleted"))  # renamed first, as the run writes meanwhile
    assert process.wait(PATIENCE) == 0, (tmp_path / "errors").read_text()
    assert (tmp_path / "errors").read_text().count("\n") == 1
    steps = [line["step"] for line in metrics(run) if "loss/train" in line]
    assert steps == [*range(1, last + 1)] and (run / "model.safetensors").exists()


def test_tilde_is_expanded_in_every_path(tmp_path):
    home, cwd = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    cwd.mkdir()
    write_corpus(home / "a.jsonl")
    flags = {"dataset_name": "~/a.jsonl", "cache_dir": "~/cache", "output_dir": "~/run"}
    done = train(cwd, flags | {"prompts": "none"}, HOME=str(home))
    assert done.returncode == 0, done.stderr[-2000:]
    assert (home / "run" / "model.safetensors").exists() and (home / "cache").exists()
    model = {"model_name_or_path": "~/run", "tokenizer_name": "~/run", "config_overrides": ""}
    for more in (model | {"output_dir": "~/further"}, {"eval_only": "true"}):
        done = train(cwd, flags | {"prompts": "none"} | more, HOME=str(home))
        assert done.returncode == 0, done.stderr[-2000:]
    assert (home / "further" / "config.json").exists() and not list(cwd.iterdir())
