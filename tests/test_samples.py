"""The samples that a run prints at evaluations, compared with the model that it saves."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from tests import forked
from tests.checked import MASKED
from tests.runs import TINY, write_corpus, write_english


def trained(folder, script, processes=1, **flags) -> str:
    """Train to the end. Returns stdout."""
    flags = TINY | {"cache_dir": folder / "cache", "output_dir": folder / "run", "block_size": 64} | flags
    done = forked.run(script, flags, processes)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_samples_equal_greedy_generation(tmp_path):
    prompts = ["import os\nimport sys", "def main():"]
    data, run = write_corpus(tmp_path / "a.jsonl"), tmp_path / "run"
    output = trained(tmp_path, "train_clm.py", 2, dataset_name=data, prompts=prompts)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    at_the_end = "".join(output[output.index("step 6/6  eval") :].split())
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=48, do_sample=False, repetition_penalty=1.2)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert "".join(f"{prompt.splitlines()[-1]}{text}".split()) in at_the_end
        card = "".join((run / "README.md").read_text().split())
        assert ("".join(f">{prompt.splitlines()[-1]}{text}".split()) in card) == (prompt == prompts[0])
    assert "def main():" not in output[: output.index("step 3/6")]  # before training they would be noise


def test_finished_run_suggests_the_same_prompt(tmp_path):
    data = write_corpus(tmp_path / "a.jsonl")
    first, again = (trained(tmp_path, "train_clm.py", dataset_name=data, prompts=["rows"]) for _ in range(2))
    line = re.search(r"^  generate .*$", first, re.M)[0]
    assert "this run is finished" in again and line in again and "import numpy" not in line
    example = re.search(r'\)\((".*"), do_sample', line)[1]
    assert f"print(model({example}))" in (tmp_path / "run/README.md").read_text()


ONE, TWO = "The [MASK] of an object.", "It is [MASK] [MASK]."


@pytest.mark.parametrize("prompts", [[ONE, TWO], [ONE], [TWO]])
def test_masks_are_filled_with_the_top_tokens(prompts, tmp_path):
    data, run = write_english(tmp_path / "a.jsonl"), tmp_path / "run"
    output = trained(tmp_path, "train_mlm.py", dataset_name=data, prompts=prompts, **MASKED)
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    lines = re.findall(r"^(.*)  ->  (.*)$", output[output.index("step 6/6  eval") :], re.M)
    assert [prompt for prompt, _ in lines] == [x for x in prompts for _ in range(x.count("[MASK]"))]
    expected = []
    for prompt in prompts:
        inputs = tokenizer(prompt.replace("[MASK]", tokenizer.mask_token), return_tensors="pt")
        places = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten()
        with torch.no_grad():
            expected += model(**inputs).logits[0, places].topk(5).indices.tolist()
    for (_, guesses), ids in zip(lines, expected, strict=True):
        assert re.sub(r" \d+%(, |$)", "|", guesses).split("|")[:-1] == [
            tokenizer.decode([token]).strip() or {"\n": "\\n"}.get(tokenizer.decode([token]), "▁")
            for token in ids
        ]


@pytest.mark.parametrize("script", ["train_clm.py", "train_mlm.py"])
def test_default_samples_begin_like_evaluation_rows(script, tmp_path):
    data = write_english(tmp_path / "a.jsonl")
    more = MASKED if script == "train_mlm.py" else {}
    output = trained(tmp_path, script, dataset_name=data, prompts=["rows"], **more)
    text = "".join("".join(json.loads(line)["text"] for line in open(data)).split())
    lines = re.findall(r"^> (.*)$|^(.*)  ->  ", output[output.index("step 6/6  eval") :], re.M)
    assert len(lines) == 3
    for line in map("".join, lines):
        parts = ["".join(part.replace("\\n", "").split()) for part in line.split("[MASK]")]
        assert len(parts) == 1 + (script == "train_mlm.py") and all(part in text for part in parts), line
