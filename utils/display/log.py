"""What a run says, a record at a time: lines and a bar on the terminal, metrics.jsonl, curves.png, trackers.

All processes make the same calls; only the main process writes and prints. With eval_only nothing is written.
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

from utils import xla
from utils.devices import peak_memory
from utils.display.curves import draw_curves
from utils.display.facts import environment_of, launch_facts, start_lines
from utils.display.metrics import Metrics, by_set, finite, newest
from utils.display.progress import Progress, bar, duration, readable
from utils.display.throughput import Throughput, flops_per_token, peak_flops
from utils.display.trackers import log_to_trackers, start_trackers
from utils.io.files import replacing
from utils.io.secrets import without_secrets
from utils.io.terminal import visible
from utils.learning.model import EXAMPLES, pipeline_tag
from utils.learning.optim import describe_groups
from utils.learning.xla_attention import attention_name

UNSURE = 0.1  # standard error of an evaluation's loss, which is the relative one of the perplexity
TRY = {  # the commands that try a saved model: their labels, options of pipeline()
    "text-generation": {"generate": ", do_sample=False, repetition_penalty=1.2",
                        "sample": ", do_sample=True, temperature=0.8"},
    "fill-mask": {"fill": ""},
}  # fmt: skip


class Log:
    """The run from `step` on.

    facts: what the model card says. evaluated: the last step whose evaluation is in metrics.jsonl, or None.
    finished: an earlier start has done the last step and said so."""

    def __init__(self, args, accelerator, steps, step: int, model, optimizer, tokenizer, hub):
        self.args, self.accelerator, self.steps, self.hub = args, accelerator, steps, hub
        lm = accelerator.unwrap_model(model, keep_torch_compile=False).lm
        launch = launch_facts(accelerator, attention_name(lm.config, args))
        self.advised = False  # whether few rows were told
        self.metrics = Metrics(args, step, accelerator.is_main_process and not args.eval_only)
        self.finished = not args.eval_only and self.metrics.finished == step == steps.last
        kept = self.metrics.kept
        results, self.evaluated = newest(kept, "loss/eval")
        self.skipped = sum(line.get("event") == "skipped_update" for line in kept)
        peak = (peak_flops(launch["device"]) or 0) * launch["processes"]
        flops = flops_per_token(lm, args.block_size, getattr(args, "mlm_probability", 1.0))
        self.throughput = Throughput(steps, flops, peak or None, step=step, seconds=self.metrics.seconds)
        self.progress = Progress(steps.last, step, accelerator.is_main_process and not args.eval_only)
        self.facts = dict(
            step=step, last=steps.last, results=results, launch=launch, parameters=lm.num_parameters(),
            repo_id=hub.repo_id, tried=self.metrics.known.get("tried", ""), sample="",
            pipeline_tag=pipeline_tag(lm), model_type=lm.config.model_type, mask_token=tokenizer.mask_token,
            settings=without_secrets(dataclasses.asdict(args)),
            script=os.path.relpath(inspect.getsourcefile(type(args))),
            optimizer=[line.removeprefix("optimizer  ") for line in describe_groups(optimizer)],
        )  # fmt: skip
        command = ["python", self.facts["script"], *sys.argv[1:]]
        self.facts["command"] = without_secrets(shlex.join(command))
        self._count(step)
        if not args.eval_only:
            self._start(step, optimizer, launch)

    def _start(self, step: int, optimizer, launch: dict) -> None:
        settings, accelerator = self.facts["settings"], self.accelerator
        if self.finished:
            again = "A new run needs another --output_dir."
            text = f"{self.args.output_dir}: this run is finished, {step} steps; nothing to do. {again}"
            return accelerator.print(text)
        if accelerator.is_main_process:
            lines = start_lines(self.args, accelerator, self.steps, step, optimizer, self.facts)
            self.progress.write("\n".join([*lines, *self.metrics.changes(launch)]))
            rows = getattr(self.steps.rows, "prepared", None)
            self.metrics.start(step, settings, rows, launch, environment_of())
            script = Path(self.facts["script"])
            with replacing(Path(self.args.output_dir, script.name)) as copy:
                shutil.copyfile(script, copy)
        project = Path(self.facts["script"]).stem
        start_trackers(accelerator, project, self.args.output_dir, self.metrics.run_id, settings, step)

    def bar(self, batches):
        """The batches of an evaluation behind a bar, which a terminal shows while they last."""
        return bar(batches, "evaluating", is_main_process=self.accelerator.is_main_process)

    def timed(self, name: str):
        """What runs inside is left out of tokens/s: "evaluation" or "save"."""
        return self.throughput.apart(name)

    def step(self, step: int) -> None:
        """After each step."""
        self._count(step)
        self.progress.update(step)

    def train(self, step: int, means: dict, learning_rate: float, skipped: list[int]) -> None:
        """A record of training. means: losses and grad_norm; skipped: for each update since the last record 1
        if it was skipped, else 0."""
        steps, main = self.steps, self.metrics
        for done, skip in enumerate(skipped, step - len(skipped) + 1):
            if skip:
                positions = [steps.rows_before(done - 1), steps.rows_before(done)]  # of rows: first, end
                main.write({"step": step, "event": "skipped_update", "update": done, "positions": positions})
                self.skipped += 1
        record = {"step": step, "epoch": steps.epoch(step)}
        record |= {f"epoch/{name}": epoch for name, epoch in steps.epochs(step).items()}
        record |= {"samples": steps.rows_before(step), "tokens": steps.tokens_before(step)}
        record |= means | {"learning_rate": learning_rate, "skipped_updates": self.skipped}
        record |= self.throughput.measure(step)
        if peak := peak_memory(self.accelerator.device):
            record["peak_memory"] = peak
        self._record(record)

    def evaluation(self, step: int, record: dict, samples=()) -> None:
        """A record of an evaluation, samples of what the model can do, and new curves."""
        if self.args.eval_only:
            of = f"{self.args.model_name_or_path} ({self.facts['model_type']})"
            rows = ", ".join(self.args.eval_dataset_name or self.args.dataset_name)
            after = f", after step {step}" * bool(step)
            lines = [without_secrets(f"{of} evaluated on {rows}{after}"), *_table(record)]
            return self.accelerator.print(*lines, json.dumps(finite(record)), sep="\n")
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
        if step < self.steps.last or self.evaluated != step:
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
        results |= {"compiled graphs": xla.compiled_graphs()} if xla.is_xla() else {}
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


def _table(values: dict) -> list[str]:
    """A line for each value, without what is missing or not finite."""
    known = {name: readable(value) for name, value in finite(values).items() if value is not None}
    return [f"  {name:<16}  {text}" for name, text in known.items()]
