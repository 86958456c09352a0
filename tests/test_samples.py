"""What a run prints of its model at evaluations, against the model that it saves; prompts made of rows."""

import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from data.batches.rows import PackedRows
from data.tokens.tokenizer import train_tokenizer
from tests import forked
from tests.checked import MASKED
from tests.runs import TINY, write_corpus, write_english
from utils.display.samples import chosen_prompts


def trained(folder, script, processes=1, **flags) -> str:
    """What it prints."""
    flags = TINY | {"cache_dir": folder / "cache", "output_dir": folder / "run", "block_size": 64} | flags
    done = forked.run(script, flags, processes)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_prompts_are_completed_by_the_most_likely_tokens(tmp_path):
    prompts = ["import os\nimport sys", "def main():"]
    data, run = write_corpus(tmp_path / "a.jsonl"), tmp_path / "run"
    said = trained(tmp_path, "train_clm.py", 2, dataset_name=data, prompts=prompts)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    at_the_end = "".join(said[said.index("step 6/6  eval") :].split())
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=48, do_sample=False, repetition_penalty=1.2)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert "".join(f"{prompt.splitlines()[-1]}{text}".split()) in at_the_end
    assert "def main():" not in said[: said.index("step 3/6")]  # before any training it would be noise


def test_masks_are_filled_with_the_most_likely_tokens(tmp_path):
    prompts = ["The [MASK] of an object.", "It is [MASK] [MASK]."]
    data, run = write_english(tmp_path / "a.jsonl"), tmp_path / "run"
    said = trained(tmp_path, "train_mlm.py", dataset_name=data, prompts=prompts, **MASKED)
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    lines = re.findall(r"^(.*)  ->  (.*)$", said[said.index("step 6/6  eval") :], re.M)
    assert [prompt for prompt, _ in lines] == [prompts[0], prompts[1], prompts[1]]
    expected = []
    for prompt in prompts:
        inputs = tokenizer(prompt.replace("[MASK]", tokenizer.mask_token), return_tensors="pt")
        places = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten()
        with torch.no_grad():
            expected += model(**inputs).logits[0, places].topk(5).indices.tolist()
    for (_, guesses), ids in zip(lines, expected, strict=True):
        assert re.sub(r" \d+%(, |$)", "|", guesses).split("|")[:-1] == [
            tokenizer.decode([token]).strip() or "▁" for token in ids
        ]


@pytest.mark.parametrize("masked", [False, True])
def test_prompts_from_rows_are_their_first_tokens(masked):
    text = "import os\nprint(os.getcwd())\nfor name in os.listdir('.'):\n    print(name)\n" * 9
    tokenizer = train_tokenizer([text], *(("unigram", 60, "roberta") if masked else ("bpe", 300, "gpt2")))
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.uint16)
    prompts = chosen_prompts(["rows"], {"": PackedRows([ids], 32)}, tokenizer, masked)
    assert len(prompts) == 3
    rows = [len(ids) // 32 * i // 3 for i in range(3)]
    for prompt, row in zip(prompts, rows, strict=True):
        kept = [ids[row * 32 :][part] for part in ((slice(8), slice(9, 16)) if masked else (slice(16),))]
        assert prompt == " [MASK] ".join(tokenizer.decode(part).strip() for part in kept)
