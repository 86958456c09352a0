"""Samples of what a model can do, printed at each evaluation: completed prompts, filled masks."""

import contextlib
import re

import numpy as np
import torch
from accelerate.utils import DistributedType
from transformers import GenerationConfig

from utils.io.terminal import in_one_line
from utils.learning.configuration import setting
from utils.learning.losses import eval_mode

# Always the most likely token. The scores of tokens that have occurred are divided by 1.2 (CTRL, arXiv
# 1909.05858, section 4.1), or small or young models would repeat one phrase forever.
DECODING = {"do_sample": False, "repetition_penalty": 1.2}
MASK = "[MASK]"  # in prompts, replaced by the tokenizer's own mask token
MOST_LINES = 12  # of a completion
ROWS = ["rows"]  # the setting prompts: take words of evaluation rows


def chosen_prompts(prompts: list[str], eval_rows: dict, tokenizer, masked: bool) -> list[str]:
    """The prompts, or for ROWS eight words of each of three evaluation rows; masked: one is hidden."""
    if prompts != ROWS:
        return prompts
    rows = next(iter(eval_rows.values()))
    numbers = np.unique([len(rows) * i // 3 for i in range(3)])
    ids = rows.columns(numbers, 0 * numbers)["input_ids"]
    chosen = []
    for text in tokenizer.batch_decode(ids, skip_special_tokens=True):
        words = re.findall(r"\s*\S+", text)[1:-1][:8]  # a row may begin and end inside one
        words = words if len(words) == 8 else list(text.strip("\ufffd")[:16])  # no spaces, or few
        text = "".join([*words[:4], f" {MASK}", *words[5:]] if masked else words).strip()
        chosen.append(re.sub(r"\s+", " ", text) if masked else text)  # a line for each mask
    return chosen


@contextlib.contextmanager
def _for_samples(accelerator, model):
    """The transformers model, uncompiled: each length of a text would compile another graph. Of its
    generation_config only the tokens that end a text count: other entries, such as stop_strings, need more
    than a model and may be of a decoding that transformers no longer has."""
    lm = accelerator.unwrap_model(model, keep_torch_compile=False).lm
    eager, saved = torch.compiler.set_stance("force_eager"), getattr(lm, "generation_config", None)
    lm.generation_config = GenerationConfig(eos_token_id=getattr(saved, "eos_token_id", None))
    try:
        with eval_mode(lm), torch.no_grad(), eager, accelerator.autocast():
            yield lm
    finally:
        lm.generation_config = saved


def complete_prompts(accelerator, model, tokenizer, prompts: list[str], eval_rows: dict) -> list[str]:
    """The last line of each prompt, behind "> ", and its completion. [] on other processes than the first,
    under FSDP (nobody holds all weights), on XLA (each length is a graph)."""
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.XLA)
    if sharded or not accelerator.is_main_process:
        return []
    texts, most = [], 48
    with _for_samples(accelerator, model) as lm:
        positions = setting(lm.config, "max_position_embeddings") or tokenizer.model_max_length
        for prompt in chosen_prompts(prompts, eval_rows, tokenizer, masked=False):
            ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
            ids = ids[:, -max(positions - most, 1) :].to(accelerator.device)  # [1, prompt tokens]
            options = {"max_new_tokens": min(most, positions - ids.shape[1]), **DECODING}
            options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": tokenizer.eos_token_id}
            new = lm.generate(ids, **options)[0, ids.shape[1] :]
            text = tokenizer.decode(new, skip_special_tokens=True).rstrip()
            text = re.sub(r"\n\s*\n", "\n\n", text)  # young models give many blank lines
            lines = text.splitlines()[:MOST_LINES]
            texts.append("\n".join([f"> {prompt.strip().splitlines()[-1]}", *lines, ""]))
    return texts


def fill_masks(accelerator, model, tokenizer, prompts: list[str], eval_rows: dict) -> list[str]:
    """A line per mask, with its most likely tokens and their probabilities. [] on all processes but the
    first, and under FSDP. All prompts are one batch of fixed shape, one graph on XLA."""
    prompts = chosen_prompts(prompts, eval_rows, tokenizer, masked=True)
    if accelerator.distributed_type == DistributedType.FSDP or not accelerator.is_main_process or not prompts:
        return []
    texts, lines = [prompt.replace(MASK, tokenizer.mask_token) for prompt in prompts], []
    # Truncated and padded here: the tokenizer would remember such options, and save them with the model.
    ids = [{"input_ids": tokenizer(text)["input_ids"][: tokenizer.model_max_length]} for text in texts]
    inputs = tokenizer.pad(ids, return_tensors="pt")  # [prompts, T]
    places = (inputs["input_ids"] == tokenizer.mask_token_id).nonzero().tolist()
    with _for_samples(accelerator, model) as lm:
        out = lm(**inputs.to(accelerator.device))
    logits = out["logits" if "logits" in out else "prediction_logits"].float().cpu()  # [prompts, T, V]
    for row, place in places:
        scores, ids = logits[row, place].softmax(-1).topk(5)
        words = (tokenizer.decode([i]).strip() or in_one_line(tokenizer.convert_ids_to_tokens(i))
                 for i in ids.tolist())  # fmt: skip
        guesses = ", ".join(f"{word} {score:.0%}" for word, score in zip(words, scores.tolist(), strict=True))
        lines.append(f"{prompts[row]}  ->  {guesses}")
    return lines
