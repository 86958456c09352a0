"""What each kind of model shows: the numbers of an evaluation, samples, card, a command to try it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from utils.display.progress import bar
from utils.display.samples import DECODING, MASK, ROWS, beginnings, complete_prompts, fill_masks
from utils.learning.evaluation import evaluation_metrics, sums_over_dataset


@dataclass(frozen=True)
class Task:
    pipeline_tag: str  # of transformers and the Hub
    losses: tuple[str, ...]  # metrics that add up to the loss; the first one is per predicted token
    samples: Callable[..., list[str]]  # (accelerator, model, tokenizer, prompts, quick) -> texts to print
    headline: tuple[str, ...]  # metrics in the commit message of a push
    label: str  # of the command that tries the model
    prompt: str  # for that command, and for the card if the run has no prompts
    options: str = ""  # of the pipeline's call: ", name=value" each


CAUSAL = Task(
    pipeline_tag="text-generation",
    losses=("loss/eval",),
    samples=complete_prompts,
    headline=("loss/eval", "perplexity"),
    label="generate",
    prompt="import numpy as np",
    options="".join(f", {name}={value}" for name, value in DECODING.items()),
)
MASKED = Task(
    pipeline_tag="fill-mask",
    losses=("loss/mlm", "loss/nsp"),
    samples=fill_masks,
    headline=("loss/eval", "accuracy"),
    label="fill",
    prompt=f"It is {MASK}.",
)


class Evaluations:
    """Evaluates the script's model. Modules in keep, such as an average of the weights, are in eval mode too.

    evaluate: the script's function of a batch."""

    def __init__(self, accelerator, task: Task, model, keep: dict, evaluate, data, prompts: list):
        self.accelerator, self.task, self.model, self.data = accelerator, task, model, data
        self.modules = [thing for thing in (model, *keep.values()) if isinstance(thing, nn.Module)]
        self.evaluate, self.prompts = evaluate, prompts
        if prompts == ROWS:
            rows = next(iter(data.evals.values()))
            self.prompts = beginnings(rows, data.tokenizer, masked=MASK in task.prompt)

    def measure(self, names=(), stopped=lambda: 0, quick: bool = False) -> dict | None:
        """The metrics of these sets, or of all, as they are logged. None if `stopped()` ended it early.
        quick: of a single batch, to see that it works. ValueError if evaluate then counts padding."""
        record, sets, main = {}, self.data.evals, self.accelerator.is_main_process
        if unknown := set(names) - sets.keys():
            raise ValueError(f"run.evaluate: no evaluation set {unknown.pop()}; there are {', '.join(sets)}")
        for name in [name for name in sets if not names or name in names]:
            batches = self.data.evaluation(name)
            batches = [next(iter(batches))] if quick else bar(batches, "evaluating", is_main_process=main)
            totals = sums_over_dataset(self.accelerator, self.modules, batches, self.evaluate, stopped)
            if totals is None:
                return None
            if quick:
                self._check_padding(name)
            metrics = evaluation_metrics(totals, self.task.losses, sets[name].bytes_per_token)
            record |= {f"{key}/{name}" if name else key: value for key, value in metrics.items()}
        return record

    def _check_padding(self, name: str) -> None:
        of_padding = [self.data.padding(name)]
        totals = sums_over_dataset(self.accelerator, self.modules, of_padding, self.evaluate)
        if counted := [key for key, total in totals.items() if total.count or abs(total.sum) > 0]:
            raise ValueError(f"evaluate: counts padding in {', '.join(counted)}. Where batch['row'] is -1, "
                             "sums and counts must be 0; return sums and counts, not means.")

    def samples(self, quick: bool = False) -> list[str]:
        return self.task.samples(self.accelerator, self.model, self.data.tokenizer, self.prompts, quick=quick)
