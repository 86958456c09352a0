"""A resumed run whose data were changed or deleted."""

import json
import shutil

from tests import forked
from tests.runs import PATIENCE, PROJECT, TINY, metrics, write_corpus

FILES = ("model.safetensors", "tokenizer.json", "tokenizer_config.json")


def test_a_resumed_run_keeps_its_rows_when_its_data_change_or_are_gone(tmp_path):
    """Bit-identically, from the cache and with one line of output. Without the cache the run stops."""
    corpus, output_dir, cache = tmp_path / "corpus.jsonl", tmp_path / "run", tmp_path / "cache"
    flags = TINY | {"dataset_name": corpus, "cache_dir": cache, "prompts": "none", "output_dir": output_dir}

    def start(status=0) -> str:
        (tmp_path / "log").unlink(missing_ok=True)
        process = forked.start(PROJECT, "train_clm.py", flags, tmp_path / "log")
        process.join(PATIENCE)
        text = (tmp_path / "log").read_text()
        assert process.exitcode == status, text
        return text

    def result() -> list:
        return [metrics(output_dir), *((output_dir / name).read_bytes() for name in FILES)]

    before = write_corpus(corpus).read_text()
    assert "the rows of this run's first start" not in start()
    expected = result()
    for change in ("edited", "gone", "and no cache"):
        shutil.rmtree(output_dir / "checkpoints" / "step-00000006")
        corpus.write_text(before + json.dumps({"content": "new " * 3000}) + "\n")
        if change == "gone":
            corpus.unlink()
        if change == "and no cache":
            shutil.rmtree(cache)
            log = start(2)
            assert "dataset_name: the rows have other content" in log and "Traceback" not in log
        else:
            line = f"data       using the rows of this run's first start; {corpus} is not read again"
            assert start().count(line) == 1
            assert result() == expected, change
