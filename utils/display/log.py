"""The log of a run: lines and a progress bar on the terminal, metrics.jsonl, curves.png, trackers.

All processes make the same calls; only the main process writes and prints.
"""

import dataclasses
import inspect
import json
import math
import os
import shlex
import shutil
import sys
from pathlib import Path

from tqdm.auto import tqdm

from utils.devices import compiled_graphs, is_xla, peak_memory
from utils.display.curves import draw_curves
from utils.display.metrics import (
    Metrics,
    by_set,
    duration,
    finite,
    format_metric,
    log_to_trackers,
    newest,
    readable,
    start_trackers,
)
from utils.display.start import environment_of, launch_facts, start_lines
from utils.display.throughput import Throughput, flops_per_token, peak_flops
from utils.io.files import replacing
from utils.io.text import visible, without_secrets
from utils.learning.model import compare_with_default, example_prompt, pipeline_tag
from utils.learning.optim import Means, describe_groups
from utils.learning.xla_attention import attention_name

SHOWN = {  # name in a printed line: metric, format
    "eval loss": ("loss/eval", ".4f"),
    "perplexity": ("perplexity", ",.2f"),
    "accuracy": ("accuracy", ".1%"),
    "tok/s": ("tokens_per_second", ",.0f"),
}
BAR_FORMAT = "{n_fmt}/{total_fmt} {percentage:3.0f}% |{bar:24}| {elapsed}, left {remaining}, {rate_fmt}"
UNCERTAIN = 0.1  # standard error of the evaluation loss; about the relative standard error of the perplexity
TRY = {  # commands that try a saved model: {pipeline: {label: what follows the prompt}}
    "text-generation": {"generate": ', do_sample=False, repetition_penalty=1.2)[0]["generated_text"]',
                        "sample": ', do_sample=True, temperature=0.8)[0]["generated_text"]'},
    "fill-mask": {"fill": ")"},
}  # fmt: skip


class Log:
    """The log of a run. guard: the UpdateGuard of its optimizers. losses: the names of the losses for `add`.

    facts: {name: value} for the model card. evaluated: the last step whose evaluation is in metrics.jsonl, or
    None. finished: True if an earlier start completed this run."""

    def __init__(self, args, accelerator, steps, guard, *losses: str):
        self.args, self.accelerator, self.steps, self.guard = args, accelerator, steps, guard
        self.means, self.writes = Means(accelerator, *losses), accelerator.is_main_process
        self.hub = self.metrics = self.throughput = self.progress = None  # set by `start`
        self.facts, self.evaluated, self.finished = {}, None, False
        self.skipped, self.advised = 0, False  # skipped updates; whether the advice on few rows was printed

    def state_dict(self) -> dict:
        return {"means": self.means.state_dict(), "guard": self.guard.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.means.load_state_dict(state["means"])
        self.guard.load_state_dict(state["guard"])

    def start(self, step: int, model, optimizer, tokenizer, hub) -> None:
        """Starts the log at `step`: drops the records of later steps, and prints the settings of the run."""
        args, accelerator, self.hub = self.args, self.accelerator, hub
        lm = accelerator.unwrap_model(model, keep_torch_compile=False).lm
        launch = launch_facts(accelerator, attention_name(lm.config, args))
        self.metrics = Metrics(args, step, self.writes)
        self.finished = self.metrics.args_json.get("finished") == step == self.steps.last
        results, self.evaluated = newest(self.metrics.lines, "loss/eval")
        self.skipped = sum(line.get("event") == "skipped_update" for line in self.metrics.lines)
        peak = (peak_flops(launch["device"]) or 0) * launch["processes"]
        flops = flops_per_token(lm, args.block_size, getattr(args, "mlm_probability", 1.0))
        self.throughput = Throughput(self.steps, flops, peak or None, step, self.metrics.seconds)
        self.progress = Progress(self.steps.last, step, self.writes)
        settings = without_secrets(dataclasses.asdict(args))
        script = Path(os.path.relpath(inspect.getsourcefile(type(args))))
        self.facts = dict(
            step=step, last=self.steps.last, results=results, launch=launch, parameters=lm.num_parameters(),
            repo_id=hub.repo_id, tried=self.metrics.args_json.get("tried", ""), sample="",
            pipeline_tag=pipeline_tag(lm), model_type=lm.config.model_type, mask_token=tokenizer.mask_token,
            settings=settings, script=str(script), optimizer=describe_groups(optimizer),
            command=without_secrets(shlex.join(["python", str(script), *sys.argv[1:]])),
        )  # fmt: skip
        self._count(step)
        if self.finished:
            text = f"{args.output_dir}: this run is finished ({step} steps), nothing to do"
            return accelerator.print(f"{text}. For a new run give another --output_dir.")
        if self.writes:
            size = compare_with_default(args, lm, tokenizer)
            lines = start_lines(args, accelerator, self.steps, step, size, self.facts)
            self.progress.write("\n".join([*lines, *self.metrics.changes(launch)]))
            rows = getattr(self.steps.rows, "prepared", None)
            self.metrics.start(step, settings, rows, launch, environment_of())
            with replacing(Path(args.output_dir, script.name)) as copy:
                shutil.copyfile(script, copy)
        start_trackers(accelerator, script.stem, args.output_dir, self.metrics.run_id, settings, step)

    def timed(self, name: str):
        """A context whose time does not count for tokens/s. name: "evaluation" or "save"."""
        return self.throughput.excluding(name)

    def add(self, step: int, losses, skipped) -> None:
        """Call it after each step. losses [names]: of this step and process. skipped: 0-d, of guard.check."""
        self.means.add(losses, skipped)
        self._count(step)
        self.progress.update(step)

    def train(self, step: int, learning_rate: float, **numbers) -> None:
        """Logs a record of the steps since the last one, with the newest gradient norm. numbers: more 0-d
        tensors, whose means over processes are logged."""
        steps, means = self.steps, self.means.read(grad_norm=self.guard.norm, **numbers)
        skipped = self.guard.read()
        for update, skip in enumerate(skipped, step - len(skipped) + 1):
            if skip:
                rows = [steps.rows_before(update - 1), steps.rows_before(update)]  # first, end
                event = {"step": step, "event": "skipped_update", "update": update, "positions": rows}
                self.metrics.write(event)
                self.skipped += 1
        record = {"step": step, "epoch": steps.epoch(step)}
        record |= {f"epoch/{name}": epoch for name, epoch in steps.epochs(step).items()}
        record |= {"samples": steps.rows_before(step), "tokens": steps.tokens_before(step)}
        record |= means | {"learning_rate": learning_rate, "skipped_updates": self.skipped}
        record |= self.throughput.measure(step)
        if peak := peak_memory(self.accelerator.device):
            record["peak_memory"] = peak
        self._record(record)

    def evaluation_due(self, step: int) -> bool:
        """True every eval_steps, at the last step, and with eval_at_start at step 0; False if metrics.jsonl
        already has this evaluation."""
        due = self.steps.due(step, self.args.eval_steps) and (step or self.args.eval_at_start)
        return bool(due) and self.evaluated != step

    def evaluation(self, step: int, record: dict, samples=()) -> None:
        """Logs a record of an evaluation, prints samples of the model's output, and redraws the curves."""
        errors = finite(by_set(record, "loss/eval_stderr")).values()  # None for a single row
        error = max((math.inf if error is None else error for error in errors), default=0)
        if error > UNCERTAIN and not self.advised:
            self.advised = True
            size = "unknown" if error == math.inf else f"{error:.0%}"
            few = f"the standard error of the perplexity is {size}, as few rows are evaluated"
            remedy = "a larger --validation_fraction or --eval_dataset_name gives more rows"
            remedy += "; --max_eval_samples 0 evaluates all rows" * bool(self.args.max_eval_samples)
            self.progress.write(f"advice     {few}: {remedy}")
        self.evaluated, self.facts["results"] = step, record
        self._record({"step": step, "tokens": self.steps.tokens_before(step)} | record)
        if samples:
            prompt = samples[0].splitlines()[0].removeprefix("> ").partition("  ->  ")[0]
            self.facts |= {"tried": prompt, "sample": visible(samples[0]) if step else ""}
        for text in samples if step or self.args.model_name_or_path else ():  # random weights print noise
            self.progress.write(text)
        if self.writes:
            draw_curves(self.args.output_dir)

    def finish(self, step: int) -> None:
        """Prints the results and the commands to try next or, after a stop signal, how to resume."""
        self.progress.bar.close()
        self.accelerator.end_training()
        stopped = step < self.steps.last
        if not stopped and not self.finished:
            self.metrics.finish(step, self.facts["tried"])
        if self.writes:
            line = f"Stopped at step {step} of {self.steps.last} and saved; run the same command to resume."
            print(line if stopped else self._summary(step))
            if self.hub.published:
                print(f"Published: {self.hub.published}")

    def _count(self, step: int) -> None:
        counts = {"step": step, "tokens": self.steps.tokens_before(step)}
        self.facts |= counts | {"seconds": self.throughput.seconds}

    def _record(self, record: dict) -> None:
        """Writes a record of training or evaluation to metrics.jsonl, the trackers and the terminal."""
        scalars = {key: value.item() for key, value in record.items() if getattr(value, "ndim", 1) == 0}
        record = record | scalars
        self.metrics.write(record)
        log_to_trackers(self.accelerator, record)
        self.progress.update(record["step"], record, self.throughput.eta, self.hub.status)

    def _summary(self, step: int) -> str:
        facts, folder = self.facts, self.args.output_dir
        results = {"steps": step, "tokens": facts["tokens"], "training time": duration(facts["seconds"])}
        results |= {"compiled graphs": compiled_graphs()} if is_xla() else {}
        results |= facts["results"] | {"model": self.hub.published or folder}
        results["curves"] = f"{folder}/curves.png"
        text = example_prompt(facts).replace("[MASK]", facts["mask_token"] or "[MASK]")
        # JSON writes double quotes: the shell needs the single quotes.
        words = facts["pipeline_tag"], folder, text
        tag, model, text = (json.dumps(word, ensure_ascii=False) for word in words)
        code = f"from transformers import pipeline; print(pipeline({tag}, {model})({text}"
        quiet = "TRANSFORMERS_VERBOSITY=error"  # hides advice to install kernels
        commands = {label: f"{quiet} {shlex.join(['python', '-c', f'{code}{ending})'])}"
                    for label, ending in TRY[facts["pipeline_tag"]].items()}
        evaluate = ["python", facts["script"], "--output_dir", folder, "--eval_only", "true"]
        commands["evaluate"] = shlex.join([*evaluate, "--max_eval_samples", "0"])
        commands["publish"] = None if self.hub.published else self.hub.command()
        names = ", ".join(facts["settings"]["dataset_name"])
        lines = [f"{facts['model_type']} on {names}", *_table(results)]
        return "\n".join([*lines, "Next:", *_table(without_secrets(commands))])


class Progress:
    """On the main process, prints a line per log interval and evaluation, and on a terminal a bar below."""

    def __init__(self, total_steps: int, step: int = 0, is_main_process: bool = True):
        self.total_steps, self.is_main_process = total_steps, is_main_process
        options = dict(dynamic_ncols=True, bar_format=BAR_FORMAT, smoothing=0)
        hidden = not (is_main_process and on_terminal())
        self.bar = tqdm(total=total_steps, initial=step, disable=hidden, **options)

    def update(self, step: int, record: dict | None = None, eta: float | None = None, hub: str = "") -> None:
        """Moves the bar and prints a record, if any. eta: seconds left. hub: the status of pushes."""
        if not self.is_main_process:
            return
        self.bar.update(step - self.bar.n)
        if record is None:
            return
        train = "loss/train_plain" if "loss/train_plain" in record else "loss/train"
        shown = {"loss": (train, ".4f"), **SHOWN}
        texts = {name: format_metric(record, *metric) for name, metric in shown.items()}
        if math.isfinite(record.get("loss/eval_stderr") or math.nan):  # for a single set of several rows
            texts["eval loss"] += f" ± {record['loss/eval_stderr']:.4f}"
        texts |= {"left": "" if eta is None else duration(eta), "hub": hub}  # fit a narrow terminal
        texts["skipped"] = str(record.get("skipped_updates") or "")
        texts["mfu"] = format_metric(record, "mfu", ".1%").strip("-")
        line = "  ".join(f"{name} {text}" for name, text in texts.items() if text)
        self.write(f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  {line}")

    def write(self, text: str) -> None:
        """Prints above the bar."""
        if self.is_main_process:
            text = visible(text)
            tqdm.write(text, file=sys.stdout) if not self.bar.disable else print(text, flush=True)


def on_terminal() -> bool:
    """True if stderr, where bars are drawn, is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def print_evaluation(args, accelerator, record: dict) -> None:
    """Prints the results of --eval_only as a table, then as a line of JSON."""
    names = ", ".join(args.eval_dataset_name or args.dataset_name)
    title = without_secrets(f"{args.model_name_or_path} evaluated on {names}")
    accelerator.print(title, *_table(record), "as JSON:", json.dumps(finite(record)), sep="\n")


def _table(values: dict) -> list[str]:
    """A line for each value that is finite, and not None."""
    texts = {name: readable(value) for name, value in finite(values).items() if value is not None}
    return [f"  {name:<16}  {text}" for name, text in texts.items()]
