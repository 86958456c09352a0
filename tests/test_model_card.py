"""The model card: its metadata as the Hub reads it, its tables and its code."""

import ast
import re
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from utils.publishing.model_card import repo_name, write_model_card

FACTS = {
    "parameters": 12_345, "step": 100, "last": 100, "tokens": 2_000_000, "seconds": 90.0,
    "pipeline_tag": "text-generation", "model_type": "gpt2",
    "launch": {"processes": 2, "device": "cpu", "precision": "float32", "attention": "sdpa",
               "compiler": "no"},
    "settings": {"dataset_name": ["ada/text"], "learning_rate": 3e-4, "prompts": ["a\n"]},
    "command": "python train_clm.py --dataset_name ada/text",
    "optimizer": ["AdamW, learning rate 0.04, weight decay 0: 17 tensors", "Muon, learning rate 0.005"],
    "results": {"loss/eval": 2.5, "perplexity": 12.18, "bits_per_byte": float("nan"), "eval_tokens": 4000},
}  # fmt: skip


def write(folder, facts=None, **settings):
    """Write the card of FACTS with these changes."""
    facts = FACTS | (facts or {})
    facts["settings"] = facts["settings"] | settings
    args = SimpleNamespace(output_dir=str(folder), hub_model_id="ada/my: model", push_to_hub=False)
    write_model_card(args, facts, None)


def snippets(folder):
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)


def test_prompt_is_quoted_in_the_code(tmp_path):
    prompt = 'a "b"\n\\'
    write(tmp_path, prompts=[prompt])
    tree = ast.parse(snippets(tmp_path)[0])
    assert prompt in [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]


def test_metadata_of_the_card(tmp_path):
    """As huggingface_hub reads it; dataset and base model are on the Hub."""
    write(tmp_path, model_name_or_path="openai-community/gpt2")
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.datasets == ["ada/text"] and data.base_model == "openai-community/gpt2"
    text = (tmp_path / "README.md").read_text()
    assert "| command | `python train_clm.py --dataset_name ada/text` |\n" in text
    assert "weight decay 0: 17 tensors<br>Muon, learning rate 0.005 |\n" in text
    assert "curves.png" not in text and "has not finished" not in text and "nan" not in text


SEVERAL = {
    "loss/eval/wiki": 2.5, "perplexity/wiki": 12.18, "loss/eval/my books": 11.0825,
    "perplexity/my books": 65023.6, "eval_tokens/my books": 4000, "loss/eval/new": None,
}  # fmt: skip
TABLES = {
    "several sets": (SEVERAL, [
        "| on held-out text | wiki | my books | new |", "|---|---|---|---|",
        "| loss/eval | 2.5 | 11.08 | - |", "| perplexity | 12.18 | 65,024 | - |",
        "| eval_tokens | - | 4,000 | - |"]),
    "one set": ({"loss/eval": 11.0825, "perplexity": 65023.6, "eval_tokens": 4000}, [
        "| on held-out text | last evaluation |", "|---|---|", "| loss/eval | 11.08 |",
        "| perplexity | 65,024 |", "| eval_tokens | 4,000 |"]),
}  # fmt: skip


@pytest.mark.parametrize("results, table", TABLES.values(), ids=TABLES)
def test_results_table_of_the_card(tmp_path, results, table):
    write(tmp_path, {"results": results})
    card = ModelCard.load(tmp_path / "README.md")
    assert re.findall(r"^\|.*", card.content, re.M)[:5] == table


def test_card_of_an_unfinished_run_on_local_files(tmp_path):
    """The metadata names no local folder, as the Hub would refuse that."""
    (tmp_path / "curves.png").touch()
    facts = {"step": 7, "results": {}, "repo_id": "ada/model"}
    write(tmp_path, facts, dataset_name=f"{tmp_path}/text.jsonl", model_name_or_path=str(tmp_path))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.datasets is None and card.data.base_model is None
    assert str(tmp_path) not in card.content.split("---")[1]
    for expected in ("step 7 of 100", "(curves.png)", 'model="ada/model"', "Not evaluated yet"):
        assert expected in card.content


@pytest.mark.parametrize("folder", ["runs/my run (2)", "a b..c", "a -b", "-x-", "日本", "x.git", "y" * 200])
def test_repository_name_from_any_folder(folder):
    name = repo_name(SimpleNamespace(hub_model_id=None, output_dir=folder))
    validate_repo_id(name)
    assert name and repo_name(SimpleNamespace(hub_model_id="ada/x", output_dir=folder)) == "ada/x"
