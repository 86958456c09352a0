"""What a run does at each evaluation: the numbers of every set, and samples."""

from torch import nn

from utils.display.progress import bar
from utils.learning.evaluation import sums_over_dataset


class Evaluations:
    """evaluate: the script's function of a batch; modules in keep, such as an average, are evaluated, too."""

    def __init__(self, accelerator, task, model, keep: dict, evaluate, data, prompts: list):
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
