"""Explains the difference between the harness's bits per byte and those of --eval_only, change by change.

    python -m tests.harness.difference runs/clm validation.jsonl cache/rows-*/validation-00000.npy

The numbers are computed from the saved model, without the harness and without our evaluation.
"""

import json
import math
import re
import sys

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = 32  # per forward pass


@torch.inference_mode()
def nats(model, windows) -> np.ndarray:
    """The losses in nats of all targets of the windows (inputs, targets); targets follow the last inputs."""
    windows = sorted(windows, key=lambda window: len(window[0]))
    losses = []
    for start in range(0, len(windows), ROWS):
        part = windows[start : start + ROWS]
        longest = max(len(inputs) for inputs, _ in part)
        ids = torch.tensor([[*inputs, *[0] * (longest - len(inputs))] for inputs, _ in part])
        for row, (inputs, targets) in zip(model(ids).logits.log_softmax(-1), part, strict=True):
            logits = row[len(inputs) - len(targets) : len(inputs)]
            losses.append(-logits.gather(1, torch.tensor(targets)[:, None])[:, 0].double().numpy())
    return np.concatenate(losses)


def chain(run: str, documents: str, rows_file: str) -> dict[str, float]:
    """{change: bits per byte after it}, and then the "byte perplexity" and "word perplexity" of the last."""
    model = AutoModelForCausalLM.from_pretrained(run).eval()
    tokenizer = AutoTokenizer.from_pretrained(run)
    eos, T = tokenizer.eos_token_id, tokenizer.model_max_length
    with open(documents, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.encode_special_tokens = True  # a text that holds <|endoftext|> does not end there
    ours = [plain.encode(text, add_special_tokens=False).ids for text in texts]
    theirs = [tokenizer(text)["input_ids"] for text in texts]
    stream = [token for tokens in ours for token in [*tokens, eos]]
    ids = np.load(rows_file).astype(int)
    assert stream == ids.tolist(), "other documents than those of the rows"
    rows = ids[: len(ids) // T * T].reshape(-1, T)
    size = sum(len(text.encode()) for text in texts)

    def rolling(tokens):
        """Windows of T targets, each predicted from the previous token on. The last window is shorter and has
        as many tokens before it as fit."""
        inputs, windows = [eos, *tokens[:-1]], []
        for at in range(0, len(tokens), T):
            end = min(at + T, len(tokens))
            windows.append((inputs[max(end - T, 0) : end], tokens[at:end]))
        return windows

    def bits(windows, tokens):
        return nats(model, windows).mean() * tokens / size / math.log(2)

    scores = {
        "rows of T, all but the first token of each (--eval_only)":
            bits([(row[:-1], row[1:]) for row in rows.tolist()], len(stream)),
        "the same text, every token":
            bits(rolling(stream), len(stream)),
        "every document for itself":
            bits([window for tokens in ours for window in rolling([*tokens, eos])], len(stream)),
        "its end not predicted":
            bits([window for tokens in ours for window in rolling(tokens)], len(stream) - len(ours)),
    }  # fmt: skip
    scores["special tokens where a text writes them (lm_eval)"] = last = bits(
        [window for tokens in theirs for window in rolling(tokens)], sum(map(len, theirs))
    )
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    return scores | {"byte perplexity": 2**last, "word perplexity": 2 ** (last * size / words)}


if __name__ == "__main__":
    before = None
    for name, value in chain(*sys.argv[1:]).items():
        change = f"{value / before - 1:+8.2%}" if before and "perplexity" not in name else ""
        print(f"{name:<58} {value:10.5f} {change}", flush=True)
        before = value
