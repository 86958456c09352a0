"""The lm-evaluation-harness on models of both scripts with the tasks of docs/harness, without network."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from tests import forked
from tests.harness.difference import chain
from tests.runs import PATIENCE, PROJECT, TINY, environment, write_corpus
from tests.test_train_mlm import write_english

NEEDED = "in an environment with tests/harness/requirements.txt"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason=NEEDED)
HARNESS = PROJECT / "docs/harness"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a causal model, a ModernBERT, a RoBERTa and docs/, where the page's commands run."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "docs").symlink_to(PROJECT / "docs")
    text = write_english(folder / "english.jsonl")
    small = "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64"
    masked = {"dataset_name": text, "config_overrides": small, "prompts": ["none"]}
    causal = {"dataset_name": write_corpus(folder / "corpus.jsonl"), "max_train_steps": 40, "eval_steps": 40}
    runs = {"clm": causal, "mlm": masked, "roberta": masked | {"model_type": "roberta"}}
    for name, changes in runs.items():
        script = "train_clm.py" if name == "clm" else "train_mlm.py"
        places = {"cache_dir": folder / "cache" / name, "output_dir": folder / "runs" / name}
        done = forked.run(script, {**TINY, **changes, **places})
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


def lm_eval(folder, module, *words, fails=False):
    """Run the harness. Returns {task: results}, or stderr if it must fail."""
    line = [sys.executable, "-m", module, "run", *map(str, words), "--include_path", HARNESS]
    env = environment(PYTHONPATH=str(PROJECT), HF_DATASETS_OFFLINE="1", HF_HOME=str(folder / "hf"))
    done = subprocess.run([*line, "--output_path", folder / "scores.json"], cwd=folder, env=env,
                          capture_output=True, text=True, timeout=PATIENCE)  # fmt: skip
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-3000:]
    if fails:
        return done.stderr
    newest = max(folder.glob("scores*.json"), key=lambda file: file.stat().st_mtime)
    return json.loads(newest.read_text())["results"]


def test_lm_eval_perplexity_matches_ours(folder):
    """The chain of changes begins at the number of --eval_only and ends at the harness's, within 0.01 %."""
    out = forked.run("docs.harness.documents", [folder / "runs/clm", folder / "validation.jsonl"])
    assert out.returncode == 0, out.stderr[-2000:]
    (rows,) = (folder / "cache/clm").glob("rows-*/validation-00000.npy")
    evaluation = {**TINY, "dataset_name": folder / "corpus.jsonl", "cache_dir": folder / "cache/clm",
                  "output_dir": folder / "runs/clm", "eval_only": True, "max_eval_samples": 0}  # fmt: skip
    done = forked.run("train_clm.py", evaluation)
    assert done.returncode == 0, done.stderr[-2000:]
    scores = lm_eval(folder, "lm_eval", "--model", "hf", "--model_args", "pretrained=runs/clm", "--tasks",
                     "validation", "completion", "--batch_size", 16, "--device", "cpu")  # fmt: skip
    ours = chain(folder / "runs/clm", folder / "validation.jsonl", rows)
    first, *_, last = [value for name, value in ours.items() if "perplexity" not in name]
    theirs = scores["validation"]
    assert theirs["bits_per_byte,none"] == pytest.approx(last, rel=1e-4)
    assert theirs["word_perplexity,none"] == pytest.approx(ours["word perplexity"], rel=1e-3)
    assert json.loads(done.stdout.splitlines()[-1])["bits_per_byte"] == pytest.approx(first, rel=1e-4)
    share = share_right("completion", log_probability, AutoModelForCausalLM, folder / "runs/clm")
    assert scores["completion"]["acc,none"] == pytest.approx(share)


def test_masked_model_type_scores_words(folder):
    """The harness's own type refuses a ModernBERT and scores a RoBERTa as if it were causal."""
    words = "--tasks", "words", "--device", "cpu", "--model_args"
    output = lm_eval(folder, "lm_eval", "--model", "hf", *words, "pretrained=runs/mlm", fails=True)
    assert "Unrecognized configuration class" in output and "ModernBertConfig" in output
    assert "words" in lm_eval(folder, "lm_eval", "--model", "hf", *words, "pretrained=runs/roberta")
    for run in "runs/mlm", "runs/roberta":
        scores = lm_eval(folder, "docs.harness.masked", "--model", "masked", *words, f"pretrained={run}")
        share = share_right("words", pseudo_log_likelihood, AutoModelForMaskedLM, folder / run)
        assert scores["words"]["acc,none"] == pytest.approx(share)


def share_right(task, score, kind, path) -> float:
    """The share of a task's lines whose answer has the highest score."""
    model, tokenizer = kind.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    lines = [json.loads(line) for line in (HARNESS / f"{task}.jsonl").read_text().splitlines()]
    return np.mean([
        line["answer"] == np.argmax([score(model, tokenizer, line["text"], end) for end in line["choices"]])
        for line in lines
    ])  # fmt: skip


def log_probability(model, tokenizer, before, answer):
    """Log-probability of an answer's tokens, encoded together with the text before it."""
    start = len(tokenizer(before)["input_ids"])
    ids = tokenizer(before + answer, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        log_probabilities = model(ids).logits.log_softmax(-1)[0, start - 1 : -1]
    return log_probabilities.gather(1, ids[0, start:, None]).sum().item()


@torch.no_grad()
def pseudo_log_likelihood(model, tokenizer, before, answer):
    """Sum over the answer's tokens of the log-probability of the token when it alone is masked."""
    encoded, total = tokenizer(before + answer, return_offsets_mapping=True), 0.0
    for place, (start, end) in enumerate(encoded["offset_mapping"]):
        if end > max(start, len(before)):
            ids = torch.tensor([encoded["input_ids"]])
            true = ids[0, place].item()
            ids[0, place] = tokenizer.mask_token_id
            total += model(ids).logits[0, place].log_softmax(-1)[true].item()
    return total
