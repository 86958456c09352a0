"""What a run says, a record at a time: lines and a bar on the terminal, metrics.jsonl, curves.png, trackers.

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
from utils.learning.model import EXAMPLES, beside_default, pipeline_tag
from utils.learning.optim import Means, describe_groups
from utils.learning.xla_attention import attention_name

SHOWN = {  # name in the line -> metric, format
    "eval loss": ("loss/eval", ".4f"),
    "perplexity": ("perplexity", ",.2f"),
    "accuracy": ("accuracy", ".1%"),
    "tok/s": ("tokens_per_second", ",.0f"),
}
BAR_FORMAT = "{n_fmt}/{total_fmt} {percentage:3.0f}% |{bar:24}| {elapsed}, left {remaining}, {rate_fmt}"
UNSURE = 0.1  # standard error of an evaluation's loss, which is the relative one of the perplexity
TRY = {  # the commands that try a saved model: their labels, options of pipeline()
    "text-generation": {"generate": ", do_sample=False, repetition_penalty=1.2",
                        "sample": ", do_sample=True, temperature=0.8"},
    "fill-mask": {"fill": ""},
}  # fmt: skip


class Log:
    """All that a run says. losses: the names of those that `add` is given; guard: of the run's optimizers.

    facts: what the model card says. evaluated: the last step whose evaluation is in metrics.jsonl, or None.
    finished: an earlier start has done the last step and said so."""

    def __init__(self, args, accelerator, steps, guard, *losses: str):
        self.args, self.accelerator, self.steps, self.guard = args, accelerator, steps, guard
        self.means, self.writes = Means(accelerator, *losses), accelerator.is_main_process
        self.hub = self.metrics = self.throughput = self.progress = None  # made by `start`
        self.facts, self.evaluated, self.finished = {}, None, False
        self.skipped, self.advised = 0, False  # updates; whether few evaluated rows were told

    def state_dict(self) -> dict:
        return {"means": self.means.state_dict(), "guard": self.guard.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.means.load_state_dict(state["means"])
        self.guard.load_state_dict(state["guard"])

    def start(self, step: int, model, optimizer, tokenizer, hub) -> None:
        """The run from `step` on: drops records of later steps, and prints what will be done."""
        args, accelerator, self.hub = self.args, self.accelerator, hub
        lm = accelerator.unwrap_model(model, keep_torch_compile=False).lm
        launch = launch_facts(accelerator, attention_name(lm.config, args))
        self.metrics = Metrics(args, step, self.writes)
        self.finished = self.metrics.finished == step == self.steps.last
        results, self.evaluated = newest(self.metrics.kept, "loss/eval")
        self.skipped = sum(line.get("event") == "skipped_update" for line in self.metrics.kept)
        peak = (peak_flops(launch["device"]) or 0) * launch["processes"]
        flops = flops_per_token(lm, args.block_size, getattr(args, "mlm_probability", 1.0))
        seconds = self.metrics.seconds
        self.throughput = Throughput(self.steps, flops, peak or None, step=step, seconds=seconds)
        self.progress = Progress(self.steps.last, step, self.writes)
        self.facts = dict(
            step=step, last=self.steps.last, results=results, launch=launch, parameters=lm.num_parameters(),
            size=beside_default(args, lm, tokenizer),
            repo_id=hub.repo_id, tried=self.metrics.known.get("tried", ""), sample="",
            pipeline_tag=pipeline_tag(lm), model_type=lm.config.model_type, mask_token=tokenizer.mask_token,
            settings=without_secrets(dataclasses.asdict(args)),
            script=os.path.relpath(inspect.getsourcefile(type(args))),
            optimizer=[line.removeprefix("optimizer  ") for line in describe_groups(optimizer)],
        )  # fmt: skip
        command = ["python", self.facts["script"], *sys.argv[1:]]
        self.facts["command"] = without_secrets(shlex.join(command))
        self._count(step)
        if self.finished:
            again = "A new run needs another --output_dir."
            text = f"{args.output_dir}: this run is finished, {step} steps; nothing to do. {again}"
            return accelerator.print(text)
        self._begin(step, optimizer)

    def _begin(self, step: int, optimizer) -> None:
        settings, launch = self.facts["settings"], self.facts["launch"]
        if self.writes:
            lines = start_lines(self.args, self.accelerator, self.steps, step, optimizer, self.facts)
            self.progress.write("\n".join([*lines, *self.metrics.changes(launch)]))
            rows = getattr(self.steps.rows, "prepared", None)
            self.metrics.start(step, settings, rows, launch, environment_of())
            script = Path(self.facts["script"])
            with replacing(Path(self.args.output_dir, script.name)) as copy:
                shutil.copyfile(script, copy)
        project, output_dir = Path(self.facts["script"]).stem, self.args.output_dir
        start_trackers(self.accelerator, project, output_dir, self.metrics.run_id, settings, step)

    def timed(self, name: str):
        """What runs inside is left out of tokens/s: "evaluation" or "save"."""
        return self.throughput.apart(name)

    def add(self, step: int, losses, skipped) -> None:
        """After each step. losses [names]: the step's, on this process; skipped, 0-d: as guard.check says."""
        self.means.add(losses, skipped)
        self._count(step)
        self.progress.update(step)

    def train(self, step: int, learning_rate: float, **numbers) -> None:
        """A record of the steps since the last one, with the norm of the newest gradient. numbers: other 0-d
        tensors, of which the mean over processes is logged."""
        steps, means = self.steps, self.means.read(grad_norm=self.guard.norm, **numbers)
        skipped = self.guard.read()
        for done, skip in enumerate(skipped, step - len(skipped) + 1):
            if skip:
                rows = [steps.rows_before(done - 1), steps.rows_before(done)]  # first, end
                event = {"step": step, "event": "skipped_update", "update": done, "positions": rows}
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
        """Every eval_steps, at the last step, and at step 0 with eval_at_start; once, also over resumes."""
        due = self.steps.due(step, self.args.eval_steps) and (step or self.args.eval_at_start)
        return bool(due) and self.evaluated != step

    def evaluation(self, step: int, record: dict, samples=()) -> None:
        """A record of an evaluation, samples of what the model can do, and new curves."""
        errors = finite(by_set(record, "loss/eval_stderr")).values()  # None: of a single row
        error = max((math.inf if error is None else error for error in errors), default=0)
        if error > UNSURE and not self.advised:
            self.advised = True
            size = "unknown" if error == math.inf else f"{error:.0%}"
            more = "a larger --validation_fraction or --eval_dataset_name gives more"
            more += "; --max_eval_samples 0 takes all of them" * bool(self.args.max_eval_samples)
            few = f"few rows are evaluated: the perplexity's error is {size}"
            self.progress.write(f"advice     {few}; {more}")
        self.evaluated, self.facts["results"] = step, record
        self._record({"step": step, "tokens": self.steps.tokens_before(step)} | record)
        if samples:
            prompt = samples[0].splitlines()[0].removeprefix("> ").partition("  ->  ")[0]
            self.facts |= {"tried": prompt, "sample": visible(samples[0]) if step else ""}
        for text in samples if step or self.args.model_name_or_path else ():  # else they are noise
            self.progress.write(text)
        if self.accelerator.is_main_process:
            draw_curves(self.args.output_dir)

    def finish(self, step: int) -> None:
        """Results and commands to try next; after a stop signal how to resume."""
        self.progress.close()
        self.accelerator.end_training()
        if step < self.steps.last:
            where = f"at step {step} of {self.steps.last}"
            lines = [f"Stopped {where} and saved; run the same command to resume."]
            return self.accelerator.print(*lines, *self._published(), sep="\n")
        if not self.finished:
            self.metrics.finish(step, self.facts["tried"])
        if self.accelerator.is_main_process:
            print(self._summary(step))

    def _count(self, step: int) -> None:
        counts = {"step": step, "tokens": self.steps.tokens_before(step)}
        self.facts |= counts | {"seconds": self.throughput.seconds}

    def _record(self, record: dict) -> None:
        """Of training or evaluation, with its step; 0-d tensors become numbers."""
        scalars = {key: value.item() for key, value in record.items() if getattr(value, "ndim", 1) == 0}
        record = record | scalars
        self.metrics.write(record)
        log_to_trackers(self.accelerator, record)
        self.progress.update(record["step"], record, self.throughput.eta, self.hub.status)

    def _summary(self, step: int) -> str:
        facts, folder = self.facts, self.args.output_dir
        results = {"steps": step, "tokens": facts["tokens"], "time": duration(facts["seconds"])}
        results |= {"compiled graphs": compiled_graphs()} if is_xla() else {}
        results |= facts["results"] | {"model": self.hub.published or folder}
        results["curves"] = f"{folder}/curves.png"
        text = facts["tried"] or EXAMPLES[facts["pipeline_tag"]]
        text = text.replace("[MASK]", facts["mask_token"] or "[MASK]")
        # As in JSON, with double quotes: the shell needs the single ones.
        words = facts["pipeline_tag"], folder, text
        tag, model, text = (json.dumps(word, ensure_ascii=False) for word in words)
        code = f"from transformers import pipeline; print(pipeline({tag}, {model})({text}"
        quiet = "TRANSFORMERS_VERBOSITY=error"  # no advice to install kernels
        commands = {label: f"{quiet} {shlex.join(['python', '-c', f'{code}{options}))'])}"
                    for label, options in TRY[facts["pipeline_tag"]].items()}
        evaluate = ["python", facts["script"], "--output_dir", folder, "--eval_only", "true"]
        commands["evaluate"] = shlex.join([*evaluate, "--max_eval_samples", "0"])
        commands["publish"] = None if self.hub.published else self.hub.command()
        names = ", ".join(facts["settings"]["dataset_name"])
        lines = [f"{facts['model_type']} on {names}", *_table(results)]
        lines += ["Next:", *_table(without_secrets(commands))]
        return "\n".join([*lines, *self._published()])

    def _published(self) -> list[str]:
        return [f"Published: {self.hub.published}"] * bool(self.hub.published)


class Progress:
    """On the main process: a line per log interval and evaluation; on a terminal a bar below them."""

    def __init__(self, total_steps: int, step: int = 0, is_main_process: bool = True):
        self.total_steps, self.is_main_process = total_steps, is_main_process
        options = dict(dynamic_ncols=True, bar_format=BAR_FORMAT, smoothing=0)
        hidden = not (is_main_process and on_terminal())
        self.bar = tqdm(total=total_steps, initial=step, disable=hidden, **options)

    def update(self, step: int, record: dict | None = None, eta: float | None = None, hub: str = "") -> None:
        """Move the bar; show a record of training or evaluation, seconds left, the status of pushes."""
        if not self.is_main_process:
            return
        self.bar.update(step - self.bar.n)
        if record is None:
            return
        train = "loss/train_plain" if "loss/train_plain" in record else "loss/train"
        shown = {"loss": (train, ".4f"), **SHOWN}
        texts = {name: format_metric(record, *how) for name, how in shown.items()}
        if math.isfinite(record.get("loss/eval_stderr") or math.nan):  # with a single set of several rows
            texts["eval loss"] += f" ± {record['loss/eval_stderr']:.4f}"
        texts |= {"left": "" if eta is None else duration(eta), "hub": hub}  # these fit a narrow terminal
        texts["skipped"] = str(record.get("skipped_updates") or "")
        texts["mfu"] = format_metric(record, "mfu", ".1%").strip("-")
        line = "  ".join(f"{name} {text}" for name, text in texts.items() if text)
        self.write(f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  {line}")

    def write(self, text: str) -> None:
        """Print above the bar."""
        if self.is_main_process:
            text = visible(text)
            tqdm.write(text, file=sys.stdout) if not self.bar.disable else print(text, flush=True)

    def close(self) -> None:
        self.bar.close()


def on_terminal() -> bool:
    """Whether stderr, where bars go, is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def print_evaluation(args, accelerator, record: dict) -> None:
    """What --eval_only found: lines to read, then all of it as JSON."""
    rows = ", ".join(args.eval_dataset_name or args.dataset_name)
    title = without_secrets(f"{args.model_name_or_path} evaluated on {rows}")
    accelerator.print(title, *_table(record), json.dumps(finite(record)), sep="\n")


def _table(values: dict) -> list[str]:
    """A line for each value, without what is missing or not finite."""
    known = {name: readable(value) for name, value in finite(values).items() if value is not None}
    return [f"  {name:<16}  {text}" for name, text in known.items()]
