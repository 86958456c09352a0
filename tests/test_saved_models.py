"""The models of short runs, used as the model card, the summary of the run and the Keras example say."""

import ast
import re
import shlex
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from tests import forked
from tests.runs import PROJECT, arguments, metrics, write_corpus
from train_clm import PRESETS

ROBERTA = "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64"
KINDS = {
    "clm": ("train_clm.py", {}), "mlm": ("train_mlm.py", {}),
    "roberta": ("train_mlm.py", {"model_type": "roberta", "config_overrides": ROBERTA}),
}  # fmt: skip


def python(*words):
    """Run `python words...`, forked."""
    run = forked.run_code if words[0] == "-c" else forked.run
    return run(words[1], words[2:]) if words[0] in ("-m", "-c") else run(words[0], words[1:])


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    """A run of 12 steps with the default settings, apart from the data and the model size of RoBERTa."""
    script, changes = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param) / "it's a folder"  # printed commands must quote it
    folder.mkdir()
    flags = {"dataset_name": write_corpus(folder / "corpus.jsonl"), "keywords": "none", "vocab_size": 1024,
             "cache_dir": folder / "cache", "output_dir": folder / "run", **changes}  # fmt: skip
    flags |= {"prompts": ["# scatter plot of x against y"]} if request.param == "clm" else {}
    done = python(script, "--max_train_steps", "12", *arguments(flags))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return SimpleNamespace(path=folder / "run", out=done.stdout, kind=request.param)


def test_defaults_give_no_warning_and_samples_start_after_training(saved):
    """Key tokens that the tokenizer splits are reported only if the user chose them."""
    sample = "# scatter plot of x against y" if saved.kind == "clm" else "  ->  "
    assert metrics(saved.path)[-1]["step"] == 12
    before, after = re.split(r"^step 12/12  loss.*$", saved.out, flags=re.M)
    assert re.search(r"^step  0/12  eval loss", before, re.M) and sample not in before and sample in after
    assert "keytokens" not in saved.out and "warning" not in saved.out
    if saved.kind == "clm":
        flags = {"dataset_name": saved.path.parent / "corpus.jsonl", "keywords": "none", "vocab_size": 1024,
                 "cache_dir": saved.path.parent / "cache", "show": 1}  # fmt: skip
        done = python("train_clm.py", "--keytokens", "import", "quagga", *arguments(flags))
        assert "ignored, because the tokenizer splits them: 'quagga'" in done.stdout, done.stderr


def test_checkpoint_loads_like_the_exported_model(saved):
    """It is complete, with the same configuration. No weight is missing or newly initialized."""
    checkpoint = saved.path / "checkpoints" / "step-00000012"
    kind = AutoModelForCausalLM if saved.kind == "clm" else AutoModelForMaskedLM
    model, loading = kind.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(loading.values()), loading
    exported = kind.from_pretrained(saved.path)
    assert type(model) is type(exported) and model.config.to_dict() == exported.config.to_dict() | {
        "_name_or_path": str(checkpoint)}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in exported.state_dict().items())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    task, prompt = ("text-generation", "import") if saved.kind == "clm" else ("fill-mask", "It is [MASK].")
    options = {"do_sample": False} if saved.kind == "clm" else {}
    first, second = (pipeline(task, str(folder))(prompt, **options) for folder in (checkpoint, saved.path))
    assert first == second


def test_snippets_of_the_card_run(saved, capsys, monkeypatch):
    monkeypatch.chdir(PROJECT)
    snippets = re.findall(r"```python\n(.*?)```", (saved.path / "README.md").read_text(), re.S)
    assert snippets
    for snippet in snippets:
        exec(compile(ast.parse(snippet), "card", "exec"), {})
    assert ("generated_text" if saved.kind == "clm" else "token_str") in capsys.readouterr().out


def test_commands_of_the_summary_run(saved):
    """Except the one that publishes: tests/test_hub.py."""
    for name in (["generate", "sample"] if saved.kind == "clm" else ["fill"]) + ["evaluate"]:
        words = shlex.split(re.search(rf"^ *{name} +(?:\w+=error )?python (.*)$", saved.out, re.M)[1])
        done = python(*words)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr[-2000:]


def test_pipeline_accepts_prompts_up_to_the_context_length(saved):
    """By default the pipeline generates 256 new tokens; the model has 128 positions."""
    if saved.kind != "clm":
        pytest.skip("fills, does not generate")
    pipe = pipeline("text-generation", model=str(saved.path))
    positions = pipe.model.config.max_position_embeddings
    for prompt in PRESETS["laptop"]["prompts"]:
        assert pipe(prompt)[0]["generated_text"].startswith(prompt)
    ids = pipe.tokenizer("x = 1\n" * 200)["input_ids"]
    for length in (1, 2, positions - 2, positions - 1):
        prompt = pipe.tokenizer.decode(ids[:length])
        text = pipe(prompt)[0]["generated_text"]
        assert len(pipe.tokenizer(prompt)["input_ids"]) == length and text.startswith(prompt)


def test_fill_mask_pipeline_as_in_the_keras_example(saved):
    """RoBERTa's pad id must stay 1, as its positions count from there."""
    if saved.kind == "clm":
        pytest.skip("generates, does not fill")
    unmasker = pipeline("fill-mask", model=str(saved.path))
    assert len(unmasker("Goal of my life is to [MASK].")) == 5
    tokenizer = AutoTokenizer.from_pretrained(saved.path)
    if saved.kind == "roberta":
        special = tokenizer.cls_token_id, tokenizer.pad_token_id, tokenizer.sep_token_id
        assert special == (0, 1, 2) and tokenizer.mask_token_id == 4
    assert not [token for token in tokenizer.get_vocab() if "\n" in token and token.strip("\n▁")]


def test_masked_model_can_be_fine_tuned_as_classifier(saved):
    """As run_glue.py of transformers does: only the classifier is new, and all weights learn."""
    if saved.kind == "clm":
        pytest.skip("a masked model's score")
    config = AutoConfig.from_pretrained(saved.path, num_labels=2)
    kind, masked = AutoModelForSequenceClassification, AutoModelForMaskedLM.from_pretrained(saved.path)
    torch.manual_seed(1)  # initializes the classifier
    model, loading = kind.from_pretrained(saved.path, config=config, output_loading_info=True)
    assert all(name.startswith("classifier.") for name in loading["missing_keys"])
    for name, value in masked.base_model.state_dict().items():
        assert torch.equal(model.base_model.state_dict()[name], value), name
    texts = ["The file is read.", "It raises an error if it is not."]
    batch = AutoTokenizer.from_pretrained(saved.path)(texts, padding=True, return_tensors="pt")
    batch["labels"] = torch.tensor([0, 1])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(300):  # enough on every machine
        loss = model(**batch).loss
        if loss < 0.1:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1
