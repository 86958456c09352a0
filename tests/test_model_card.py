"""The model card: its metadata as the Hub reads it, its lines for using the model as a newcomer runs them."""

import json
import re

import pytest
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from utils.publishing.model_card import END, write_model_card

CARD = {
    "model_name": "my: model", "parameters": 12_345, "datasets": ["ada/text"], "step": 100, "max_steps": 100,
    "tokens": 2_000_000, "seconds": 90.0,
    "launch": {"processes": 2, "device": "cpu", "precision": "float32", "attention": "sdpa",
               "compiler": "no"},
    "settings": {"learning_rate": 3e-4, "prompts": ["a\n"]},
    "results": {"loss/eval": 2.5, "perplexity": 12.18, "bits_per_byte": float("nan"), "eval_tokens": 4000},
}  # fmt: skip

GPT2 = {"pipeline_tag": "text-generation", "model_type": "gpt2", "example": "x"}


@pytest.mark.parametrize("kind", ["text-generation", "fill-mask", "sentence pairs"])
def test_how_to_use_it_runs(tmp_path, kind, capsys):
    words = Tokenizer(models.WordLevel({"<s>": 0, "<pad>": 1, "a": 2, "b": 3, "<mask>": 4}, unk_token="b"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<s>", "bos_token": "<s>", "mask_token": "<mask>"}
    sizes = {"vocab_size": 5, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    pairs = kind == "sentence pairs"
    if kind == "text-generation":
        model, example = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, **sizes)), "a \"b\"\n"
    else:
        sizes |= {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        make = (BertConfig, BertForPreTraining) if pairs else (RobertaConfig, RobertaForMaskedLM)
        model, example = make[1](make[0](**sizes)), "a <mask> b"
    model.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(tmp_path)
    card = CARD | {"model_type": model.config.model_type, "example": example}
    card["settings"] = CARD["settings"] | {"next_sentence": pairs}
    write_model_card(tmp_path, pipeline_tag=kind if not pairs else "fill-mask", **card)
    lines = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.S)
    exec(lines[0], {})
    assert ("generated_text" if kind == "text-generation" else "token_str") in capsys.readouterr().out
    assert len(lines) == 1 + pairs
    if pairs:
        exec(lines[1], {})
        assert sum(json.loads(capsys.readouterr().out)[0]) == pytest.approx(1)


def test_metadata(tmp_path):
    """As the Hub's own reader finds it: data set and base model that the Hub has."""
    write_model_card(tmp_path, base_model="openai-community/gpt2", **CARD, **GPT2)
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.datasets == ["ada/text"] and data.base_model == "openai-community/gpt2"
    text = (tmp_path / "README.md").read_text()
    assert "curves.png" not in text and "has not finished" not in text and "nan" not in text


def test_several_evaluation_sets(tmp_path):
    """A column each."""
    results = {
        "loss/eval/wiki": 2.5, "perplexity/wiki": 12.18, "loss/eval/my books": 11.0825,
        "perplexity/my books": 65023.6, "eval_tokens/my books": 4000, "loss/eval/new": None,
    }  # fmt: skip
    write_model_card(tmp_path, **{**CARD, **GPT2, "results": results})
    card = ModelCard.load(tmp_path / "README.md")
    table = re.findall(r"^\|.*", card.content, re.M)[:5]
    assert table == [
        "| on held-out text | wiki | my books | new |", "|---|---|---|---|",
        "| loss/eval | 2.5 | 11.08 | - |", "| perplexity | 12.18 | 65,024 | - |",
        "| eval_tokens | - | 4,000 | - |",
    ]  # fmt: skip


def test_one_evaluation_set(tmp_path):
    results = {"loss/eval": 11.0825, "perplexity": 65023.6, "eval_tokens": 4000}
    write_model_card(tmp_path, **{**CARD, **GPT2, "results": results})
    table = re.findall(r"^\|.*", (tmp_path / "README.md").read_text(), re.M)[:5]
    assert table == [
        "| on held-out text | last evaluation |", "|---|---|", "| loss/eval | 11.08 |",
        "| perplexity | 65,024 |", "| eval_tokens | 4,000 |",
    ]  # fmt: skip


def test_unfinished_run_on_local_files(tmp_path):
    """No folder reaches the metadata, as the Hub would refuse it."""
    (tmp_path / "curves.png").touch()
    changes = {"datasets": [f"{tmp_path}/text.jsonl"], "step": 7, "results": {}, "base_model": str(tmp_path)}
    write_model_card(tmp_path, repo_id="ada/model", **{**CARD, **GPT2, **changes})
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.datasets is None and card.data.base_model is None
    assert str(tmp_path) not in card.content.split("---")[1]
    for expected in ("step 7 of 100", "(curves.png)", 'model="ada/model"', "Not evaluated yet"):
        assert expected in card.content


def test_what_the_user_wrote_stays(tmp_path, caplog):
    """A README.md of theirs, whatever it holds, and what they add below the card."""
    readme, beside = tmp_path / "README.md", tmp_path / "MODEL_CARD.md"
    write_model_card(tmp_path, **CARD, **GPT2)
    card = readme.read_bytes()
    assert card.endswith(END)
    readme.write_bytes(card + b"\n## Mine\n\xff\n")
    for step in (101, 102):
        write_model_card(tmp_path, **CARD | {"step": step}, **GPT2)
    assert b"| optimizer steps | 102 |" in readme.read_bytes()
    assert readme.read_bytes().endswith(END + b"\n## Mine\n\xff\n") and readme.read_bytes().count(END) == 1
    assert not beside.exists() and not caplog.text

    readme.write_bytes(b"# Mine alone\n\xff")
    for _ in range(2):
        write_model_card(tmp_path, **CARD, **GPT2)
    assert (readme.read_bytes(), beside.read_bytes()) == (b"# Mine alone\n\xff", card)
    assert caplog.text.count(f"{readme} is yours and stays as it is: the model card is {beside}") == 1
    beside.write_bytes(b"Mine, too")
    write_model_card(tmp_path, **CARD, **GPT2)
    assert (readme.read_bytes(), beside.read_bytes()) == (b"# Mine alone\n\xff", b"Mine, too")
