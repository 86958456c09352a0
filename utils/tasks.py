"""What people are shown of each kind of model: an evaluation's numbers, samples, card, what to try next."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from utils.display.progress import bar
from utils.display.samples import DECODING, MASK, complete_prompts, fill_masks
from utils.learning.evaluation import masked_metrics, perplexity_metrics, sums_over_dataset


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


class Evaluations:
    """evaluate: the script's function of a batch; modules in keep, such as an average, are evaluated, too."""

    def __init__(self, accelerator, task: Task, model, keep: dict, evaluate, data, prompts: list):
        self.accelerator, self.task, self.model, self.data = accelerator, task, model, data
        self.modules = [thing for thing in (model, *keep.values()) if isinstance(thing, nn.Module)]
        self.evaluate, self.prompts = evaluate, prompts

    def measure(self, names=(), stopped=lambda: 0) -> dict | None:
        """What is logged of these sets, or of all; None where `stopped()`, a stop signal, ended it early."""
        record, sets, main = {}, self.data.evals, self.accelerator.is_main_process
        if unknown := set(names) - sets.keys():
            raise ValueError(f"run.evaluate: no evaluation set {unknown.pop()}; there are {', '.join(sets)}")
        for name in [name for name in sets if not names or name in names]:
            batches = bar(self.data.evaluation(name), "evaluating", is_main_process=main)
            totals = sums_over_dataset(self.accelerator, self.modules, batches, self.evaluate, stopped)
            if totals is None:
                return None
            metrics = self.task.metrics(totals, sets[name].bytes_per_token)
            record |= {f"{key}/{name}" if name else key: value for key, value in metrics.items()}
        return record

    def samples(self, quick: bool = False) -> list[str]:
        return self.task.samples(self.accelerator, self.model, self.data.tokenizer, self.prompts, quick=quick)

    def rehearse(self) -> None:
        """A batch of each set, and short samples: what would fail later fails here."""
        for name, rows in self.data.evals.items():
            first = [next(iter(self.data.evaluation(name)))]
            totals = sums_over_dataset(self.accelerator, self.modules, first, self.evaluate)
            self.task.metrics(totals, rows.bytes_per_token)
        self.samples(quick=True)
