"""What a run prints of its model at evaluations, against the model that it saves; prompts made of rows."""

import re

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, BertTokenizerFast

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
        card = "".join((run / "README.md").read_text().split())
        assert ("".join(f">{prompt.splitlines()[-1]}{text}".split()) in card) == (prompt == prompts[0])
    assert "def main():" not in said[: said.index("step 3/6")]  # before any training it would be noise


def test_a_finished_run_suggests_the_same_prompt_again(tmp_path):
    data = write_corpus(tmp_path / "a.jsonl")
    first, again = (trained(tmp_path, "train_clm.py", dataset_name=data, prompts=["rows"]) for _ in range(2))
    line = re.search(r"^  generate .*$", first, re.M)[0]
    assert "this run is finished" in again and line in again and "import numpy" not in line
    example = re.search(r'\)\((".*"), do_sample', line)[1]
    assert f"print(model({example}))" in (tmp_path / "run/README.md").read_text()


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
            tokenizer.decode([token]).strip() or {"\n": "\\n"}.get(tokenizer.decode([token]), "▁")
            for token in ids
        ]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_prompts_from_rows_are_whole_words_of_them(kind):
    text = "import os\nprint(os.getcwd())\nfor name in os.listdir('.'):\n    print(name)\n" * 9
    if kind == "wordpiece":
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
        pieces = trainers.WordPieceTrainer(vocab_size=60, special_tokens=special)
        backend.train_from_iterator([text], pieces)
        tokenizer = BertTokenizerFast(tokenizer_object=backend)
    else:
        algorithm = ("unigram", 60, "roberta") if kind == "unigram" else ("bpe", 300, "gpt2")
        tokenizer = train_tokenizer([text], *algorithm)
    ids, masked = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.uint16), kind != "bpe"
    rows = PackedRows([ids], 96)
    prompts = chosen_prompts(["rows"], {"": rows}, tokenizer, masked)
    assert len(prompts) == min(3, len(rows))
    for prompt in prompts:
        words = prompt.split()
        assert len(words) == 8 and [*filter(lambda word: word == "[MASK]", words)] == ["[MASK]"] * masked
        assert {*re.findall(r"\w+|#", prompt)} - {"MASK"} <= {*re.findall(r"\w+", text)}, prompt
    if not masked:  # white space stays
        assert all(prompt in text for prompt in prompts)


def test_prompts_from_rows_of_a_language_without_spaces():
    text = "我们今天去公园散步然后回家吃饭看书睡觉" * 20
    tokenizer = train_tokenizer([text], "bpe", 300, "gpt2")
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.uint16)
    for masked in (False, True):
        for prompt in chosen_prompts(["rows"], {"": PackedRows([ids], 16)}, tokenizer, masked):
            assert len(prompt.replace(" [MASK]", "?")) == 16 and ("[MASK]" in prompt) == masked
