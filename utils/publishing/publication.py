"""The model as others get it: saved for transformers with its card, the best one, milestones, pushes."""

import inspect
import json
import math
import os
import shlex
from pathlib import Path

from utils import xla
from utils.display.metrics import finite
from utils.display.progress import duration, summarize
from utils.display.samples import ROWS
from utils.io.files import write_json
from utils.io.secrets import without_secrets
from utils.learning.compiled import compilations
from utils.publishing.export import export_model, keep_milestone, list_milestones, milestone_steps
from utils.publishing.model_card import write_model_card
from utils.publishing.publisher import upload_command
from utils.publishing.remote import refuse_another, repo_name
from utils.state.folders import set_aside_newer, step_of


class Publication:
    """Made when the run starts, on all processes.

    settings: without secrets, as they may be shown; facts: for the card; prompts: texts or none; kept_step:
    the step before the decay, which is saved too. `milestones`: steps whose models are kept for good.
    `models`: how many models will be added to the folder."""

    def __init__(self, args, accelerator, task, publisher, settings: dict, facts: dict, datasets: list[str],
                 prompts, steps, kept_step: int):
        self.accelerator, self.task, self.publisher = accelerator, task, publisher
        self.settings, self.prompts, self.folder = settings, prompts, args.output_dir
        self.dataset, self.name = ", ".join(datasets), repo_name(args)
        self.script = os.path.relpath(inspect.getsourcefile(type(args)))
        every = steps.every(args.save_steps)
        saves = [*range(every, steps.last, every), kept_step, steps.last]
        self.milestones = milestone_steps(args.milestones, steps.last, saves)
        new = self.milestones.difference(map(step_of, list_milestones(self.folder)))
        self.models = 1 + args.keep_best + len(new)
        self.facts = dict(
            facts, model_name=self.name.split("/")[-1], datasets=datasets, pipeline_tag=task.pipeline_tag,
            repo_id=publisher.models and publisher.models.repo_id, base_model=settings["model_name_or_path"])

    def start(self, step: int, auto: bool) -> None:
        """Start uploading, on the first process; set milestones after `step` aside. step: where the run
        continues; auto: it is the newest. ValueError if a bucket has another run's checkpoints."""
        if self.accelerator.is_main_process:
            refuse_another(self.publisher.checkpoints, self.folder, math.inf if auto else step)
            set_aside_newer(list_milestones(self.folder), step)
            self.publisher.start()

    def finished_before(self, step: int, results: dict, timeout: float) -> bool:
        """Say so, and push what was cut off; the Hub gets nothing twice. False: nothing is left to do."""
        again = "A new run needs another --output_dir."
        self.accelerator.print(f"{self.folder}: this run is finished, {step} steps; nothing to do. {again}")
        self.push(step, results)
        if not self.publisher.finish(timeout):
            raise SystemExit(1)
        return False

    def save_model(self, model, tokenizer, state: dict, steps) -> str:
        """Export the model to output_dir with its card. Returns "", or why that failed."""
        step = state["step"]

        def write_card():
            example = own_mask((self.prompts or [self.task.prompt])[0], tokenizer)
            write_model_card(
                self.folder, step=step, max_steps=steps.last, ended=state.get("ended"), example=example,
                tokens=steps.tokens_before(step), seconds=state["seconds"], results=state["eval"],
                branch=state.get("origin"), settings=self.settings, **self.facts)

        return export_model(self.accelerator, model, tokenizer, self.folder, write_card)

    def keep_milestone(self, model, tokenizer, step: int) -> None:
        if step in self.milestones:
            keep_milestone(self.accelerator, model, tokenizer, self.folder, step)
            self.publisher.push_milestones()

    def keep_best(self, model, data, state: dict, record: dict) -> None:
        """Save the model if its loss on the first evaluation set is the lowest so far, over the same rows."""
        first = next(iter(data.evals))
        loss = record.get(f"loss/eval/{first}" if first else "loss/eval")
        if loss is None:  # only other sets were evaluated
            return
        rows = [next(iter(data.fingerprints["eval"].values())), self.settings["max_eval_samples"]]
        folder, best = Path(self.folder) / "best", state.get("best")
        same_rows = best and best["rows"] == rows and (folder / "best.json").exists()  # not on a new machine
        lowest = loss < (best["loss"] if same_rows else math.inf)
        if lowest and not export_model(self.accelerator, model, data.tokenizer, folder):
            state["best"] = {"step": state["step"], "loss": loss, "rows": rows}
            if self.accelerator.is_main_process:
                write_json(folder / "best.json", {"step": state["step"], **finite(record)})

    def push(self, step: int, results: dict) -> None:
        """Push the saved model; the task's main results go into the commit message."""
        known = self.task.headline
        shown = {k: v for k, v in results.items() if k.startswith(known) and "_stderr" not in k}
        self.publisher.push(step, shown)

    def summary(self, state: dict, steps, tokenizer) -> str:
        """Results, and commands to try next: printed at the end and written to summary.json."""
        folder, settings, step, best = self.folder, self.settings, state["step"], state.get("best")
        results = {"steps": step, "tokens": steps.tokens_before(step), "time": duration(state["seconds"])}
        results |= {"compiled graphs": xla.compiled_graphs()} if xla.is_xla() else compilations.summary()
        results |= {name: value for name, value in finite(state["eval"]).items() if value is not None}
        results |= {"model": folder, "curves": f"{folder}/curves.png"}
        results |= {"best model": f"{folder}/best, of step {best['step']}"} if best else {}
        prompt = own_mask(self.prompts[0] if settings["prompts"] == ROWS else self.task.prompt, tokenizer)
        # As in JSON, with double quotes: the shell needs the single ones.
        words = self.task.pipeline_tag, folder, prompt
        tag, model, text = (json.dumps(word, ensure_ascii=False) for word in words)
        pipe = f"from transformers import pipeline; print(pipeline({tag}, {model})"
        generate = ["python", "-c", f"{pipe}({text}{self.task.options}))"]
        evaluate = ["python", self.script, "--output_dir", folder, "--eval_only", "true"]
        evaluate += [] if settings["streaming"] else ["--max_eval_samples", "0"]
        commands = {self.task.label: shlex.join(generate), "evaluate": shlex.join(evaluate)}
        commands |= {"publish": upload_command(self.name, folder)}
        title = f"{settings['model_type']} on {self.dataset}"
        return summarize(folder, title, results, without_secrets(commands))


def own_mask(prompt: str, tokenizer) -> str:
    """The prompt with the tokenizer's own mask token."""
    return prompt.replace("[MASK]", tokenizer.mask_token or "[MASK]")
