"""Text samples: rows as the model gets them (--show), completed prompts, filled masks."""

import contextlib
import copy
import re

import numpy as np
import torch
from accelerate.utils import DistributedType
from transformers import FillMaskPipeline, GenerationConfig, TextGenerationPipeline

from utils.io.text import in_one_line, visible
from utils.learning.losses import eval_mode, keytoken_row_weights

# Greedy decoding. The scores of tokens that have occurred are divided by 1.2 (CTRL, arXiv 1909.05858, section
# 4.1), as small models, and models early in training, would repeat one phrase forever.
DECODING = {"do_sample": False, "repetition_penalty": 1.2}
MASK = "[MASK]"  # in prompts; replaced by the tokenizer's mask token
MAX_TOKENS, MAX_LINES = 48, 12  # of a completion


def show_rows(args, accelerator, loader, tokenizer, keytokens=None) -> None:
    """Prints the first args.show rows of a run as the first process gets them. All processes call it.

    loader: the training loader from position 0. keytokens [V]: 1 at key tokens; None if rows have no weights.
    """
    shown = 0
    for batch in accelerator.prepare(loader):
        if keytokens is not None and keytokens.any():
            batch["weight"] = keytoken_row_weights(batch["input_ids"], keytokens, args.keytoken_alpha)
        if not shown:
            columns = (f"{name} {str(column.dtype).removeprefix('torch.')} {[*column.shape]}"
                       for name, column in batch.items())  # fmt: skip
            accelerator.print(f"What the model is fed. A batch is {', '.join(columns)}.")
        for values in zip(*(column.tolist() for column in batch.values()), strict=True):
            if shown == args.show:
                return
            accelerator.print(_described(dict(zip(batch, values, strict=True)), tokenizer))
            shown += 1


def _described(row: dict, tokenizer) -> str:
    """The text of a row, with all special tokens, and the tokens to predict."""
    facts = {name: value for name, value in row.items() if not isinstance(value, list)}
    lines = ["", ", ".join(f"{name} {value:g}" for name, value in facts.items())]
    padding = row.get("attention_mask", []).count(0)  # at the end of the row
    ids = row["input_ids"][: len(row["input_ids"]) - padding]
    lines.append(visible(tokenizer.decode(ids, clean_up_tokenization_spaces=False)))
    if "slots" in row:
        hidden = dict(zip(row["slots"], row["slot_labels"], strict=True))
        positions = sorted(position for position, label in hidden.items() if label != -100)
        words = (f"{position} {tokenizer.decode([hidden[position]]).strip()!r}" for position in positions)
        lines.append(f"to predict, by position: {', '.join(words)}")
    return "\n".join(lines)


class FillMask(FillMaskPipeline):
    """transformers' fill-mask pipeline, which also takes BertForPreTraining: its logits have another name."""

    def _forward(self, model_inputs):
        out = super()._forward(model_inputs)
        out["logits"] = out["logits"] if "logits" in out else out["prediction_logits"]
        return out


def row_beginnings(eval_rows: dict, tokenizer, masked: bool) -> list[str]:
    """Prompts: the first 16 tokens of three evaluation rows as text; masked: with [MASK] as the ninth."""
    rows = next(iter(eval_rows.values()))
    numbers = np.unique([len(rows) * i // 3 for i in range(3)])
    ids = rows.columns(numbers, 0 * numbers)["input_ids"][:, :16]
    if not masked:
        return tokenizer.batch_decode(ids, skip_special_tokens=True)
    parts = (tokenizer.batch_decode(part, skip_special_tokens=True) for part in (ids[:, :8], ids[:, 9:]))
    return [in_one_line(f" {MASK} ".join(texts)) for texts in zip(*parts, strict=True)]


@contextlib.contextmanager
def _pipeline(kind, accelerator, model, tokenizer):
    """A pipeline with the transformers model in eval mode, and not compiled: each length would be a graph.

    From its generation_config only the end-of-text tokens are used: others, such as stop_strings, need more
    than a model, or belong to a decoding method that transformers no longer has."""
    lm = accelerator.unwrap_model(model, keep_torch_compile=False).lm
    eager, saved = torch.compiler.set_stance("force_eager"), getattr(lm, "generation_config", None)
    lm.generation_config = GenerationConfig(eos_token_id=getattr(saved, "eos_token_id", None))
    try:
        with eval_mode(lm), torch.no_grad(), eager, accelerator.autocast():
            # A copy of the tokenizer: it remembers truncation, and would save that with the model.
            yield kind(model=lm, tokenizer=copy.deepcopy(tokenizer), device=accelerator.device)
    finally:
        lm.generation_config = saved


def _can_sample(accelerator) -> bool:
    """True on the main process, except under FSDP, where no process has all weights, and on XLA, where each
    text length is a graph."""
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.XLA)
    return accelerator.is_main_process and not sharded


def complete_prompts(accelerator, model, tokenizer, prompts: list[str], eval_rows: dict) -> list[str]:
    """The last line of each prompt, after "> ", and its completion. [] if `_can_sample` is False."""
    if not prompts or not _can_sample(accelerator):
        return []
    prompts = row_beginnings(eval_rows, tokenizer, masked=False) if prompts == ["rows"] else prompts
    options = DECODING | {"max_new_tokens": min(MAX_TOKENS, tokenizer.model_max_length * 3 // 4)}
    options |= dict(return_full_text=False, add_special_tokens=False, handle_long_generation="hole")
    with _pipeline(TextGenerationPipeline, accelerator, model, tokenizer) as complete:
        answers = complete(prompts, **options)
    texts = []
    for prompt, [answer] in zip(prompts, answers, strict=True):
        text = re.sub(r"\n\s*\n", "\n\n", answer["generated_text"].rstrip())  # drops blank lines
        *_, last_line = ["", *prompt.strip().splitlines()]
        texts.append("\n".join([f"> {last_line}", *text.splitlines()[:MAX_LINES], ""]))
    return texts


def fill_masks(accelerator, model, tokenizer, prompts: list[str], eval_rows: dict) -> list[str]:
    """A line per mask: its most likely tokens and their probabilities. [] if `_can_sample` is False."""
    if not prompts or not _can_sample(accelerator):
        return []
    prompts = row_beginnings(eval_rows, tokenizer, masked=True) if prompts == ["rows"] else prompts
    with _pipeline(FillMask, accelerator, model, tokenizer) as fill:
        texts = [prompt.replace(MASK, tokenizer.mask_token) for prompt in prompts]
        answers = fill(texts, tokenizer_kwargs={"truncation": True})
    answers = answers if len(texts) > 1 else [answers]  # the pipeline unpacks a list of one text
    lines = []
    for prompt, answer in zip(prompts, answers, strict=True):
        for guesses in answer if isinstance(answer[0], list) else [answer]:
            words = (guess["token_str"].strip() or tokenizer.convert_ids_to_tokens(guess["token"])
                     for guess in guesses)  # fmt: skip
            scores = (f"{guess['score']:.0%}" for guess in guesses)
            texts = (f"{in_one_line(word)} {score}" for word, score in zip(words, scores, strict=True))
            lines.append(f"{prompt}  ->  {', '.join(texts)}")
    return lines
