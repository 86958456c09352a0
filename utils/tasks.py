"""What people are shown of each kind of model: an evaluation's numbers, samples, card, what to try next."""

from collections.abc import Callable
from dataclasses import dataclass

from utils.display.samples import DECODING, MASK, complete_prompts, fill_masks
from utils.learning.evaluation import masked_metrics, perplexity_metrics


@dataclass(frozen=True)
class Task:
    pipeline_tag: str  # of transformers and the Hub
    metrics: Callable[[dict, float], dict]  # (sums and counts, bytes per token) -> what is logged
    samples: Callable[..., list[str]]  # (accelerator, model, tokenizer, prompts, quick) -> texts to print
    headline: tuple[str, ...]  # metrics in the message of a push
    label: str  # of the command that tries the model
    prompt: str  # for that command, and for the card where the run has none
    options: str = ""  # of its call, ", name=value" each


CAUSAL = Task(
    "text-generation", perplexity_metrics, complete_prompts, ("loss/eval", "perplexity"),
    label="generate", prompt="import numpy as np",
    options="".join(f", {name}={value}" for name, value in DECODING.items()),
)  # fmt: skip
MASKED = Task(
    "fill-mask", lambda totals, bytes_per_token: masked_metrics(totals),
    fill_masks, ("loss/eval", "accuracy"),
    label="fill", prompt=f"It is {MASK}.",
)  # fmt: skip
