"""What people are shown of each kind of model: an evaluation's numbers, samples, card, what to try next."""

from collections.abc import Callable
from dataclasses import dataclass

from utils.display.samples import MASK, complete_prompts, fill_masks
from utils.learning.evaluation import masked_metrics, perplexity_metrics


@dataclass(frozen=True)
class Task:
    pipeline_tag: str  # of transformers and the Hub
    metrics: Callable[[dict, float], dict]  # (sums and counts, bytes per token) -> what is logged
    samples: Callable[..., list[str]]  # (accelerator, model, tokenizer, prompts, quick) -> texts to print
    headline: tuple[str, ...]  # metrics in the message of a push
    label: str  # of the command that tries the model
    prompt: str  # for that command, and for the card where the run has none


def completions(accelerator, model, tokenizer, prompts, quick=False) -> list[str]:
    """The last line of each prompt and what follows; quick: two tokens, to see that it works."""
    texts = complete_prompts(accelerator, model, tokenizer, prompts, max_new_tokens=2 if quick else 48)
    pairs = zip(prompts, texts, strict=False)  # one process completes, the others have none
    return [f"{prompt.strip().splitlines()[-1]}\n{text.rstrip()}\n" for prompt, text in pairs]


CAUSAL = Task(
    "text-generation", perplexity_metrics, completions, ("loss/eval", "perplexity"),
    label="generate", prompt="import numpy as np",
)  # fmt: skip
MASKED = Task(
    "fill-mask", lambda totals, bytes_per_token: masked_metrics(totals),
    lambda *what, quick=False: fill_masks(*what), ("loss/eval", "accuracy"),
    label="fill", prompt=f"It is {MASK}.",
)  # fmt: skip
