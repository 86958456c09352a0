"""What still holds after an edit of a script? Runs it short, on the CPU, in several ways, and compares.

    python -m utils.check train_clm.py                        # the script as it is, with its defaults
    python -m utils.check train_mlm.py --next_sentence true   # flags of the script

A line for each: what was compared, the largest difference, and if it does not hold what to look for. Exit
status 1 if one does not. --keep leaves the runs' folders. What changes nothing in twelve steps is not seen.
"""

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from utils import compare
from utils.display.metrics import by_set, newest, read_args
from utils.io.mistakes import user_mistakes

SHORT = dict(max_train_steps=12, logging_steps=1, eval_steps=5, save_steps=4, save_total_limit=9,
             max_train_samples=512, max_eval_samples=20, per_device_eval_batch_size=8, num_warmup_steps=0.5,
             prompts="none", report_to="none", push_to_hub="false")  # fmt: skip
ROWS = {1: ("4", "2"), 2: ("2", "2")}  # processes -> rows of a micro-batch, micro-batches: 8 rows per step
STOPS = {signal.SIGKILL: 6, signal.SIGTERM: 10}  # after which step: between two saves; near the end
OTHER_STEPS = ("--logging_steps", "5", "--eval_steps", "3", "--save_steps", "6")
MICRO_BATCHES = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4")
PROMISED = ("loss", "grad_norm", "learning_rate")  # metrics that do not depend on micro-batches
RANDOM = "; not compared after step 0: training draws random numbers, each process others"
LOST = "state that Checkpoints lacks, random numbers that are no function of (seed, step), eval() left on"
APART = "what depends on the process: random numbers, means of means, padding, gradients, a skipped part"
LEFT = "gradients, random numbers or changed weights that a log line or an evaluation leaves behind"
SEEDED = "state of the evaluation that no checkpoint has, random numbers in it, dropout without eval()"
UNSAVED = "a part of the loss that the saved model lacks (or an evaluation that is meant to be another)"


class Check:
    """script: its path; flags: of the user; folder: an empty one for the runs; limit: seconds of a run, 0: as
    the first one decides. failed: what does not hold."""

    def __init__(self, script, flags: list[str], folder: Path, limit: float = 0):
        self.script, self.folder, self.limit = Path(script).resolve(), Path(folder), limit
        self.first, self.failed = self.folder / "first", []  # the undisturbed run, with which all is compared
        self.clocks = set()  # metrics that differ between two runs before anything disturbs them
        spec = importlib.util.spec_from_file_location(f"checked_{self.script.stem}", self.script)
        self.module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        args = compare.settings(self.module, flags)
        pairs = getattr(args, "next_sentence", False)
        no_first_rows = pairs or len(args.dataset_name) > 1
        short = {name: value for name, value in SHORT.items() if hasattr(args, name)
                 and not (name == "max_train_samples" and no_first_rows)}  # fmt: skip
        given = {word.partition("=")[0] for word in flags}
        # Where the loss rises, as in so few steps at the default rates, rounding grows from step to step.
        short |= {name: getattr(args, name) / 10 for name in ("learning_rate", "muon_learning_rate")
                  if hasattr(args, name) and f"--{name}" not in given}  # fmt: skip
        short = (word for name, value in short.items() for word in (f"--{name}", str(value)))
        self.flags = last_ones([*flags, *short])
        self.eval_seed = str(args.seed + (not pairs))  # the seed draws the sentence pairs to evaluate

    def run(self, name: str, *more: str, processes: int = 1, stop: int = 0) -> int | None:
        """Runs the script in folder/name, its output is added to folder/name.log, and what observed.py sees
        to folder/name.jsonl, or name-stopped.jsonl. stop: a signal to stop it. Returns the exit status, None
        if it did not end."""
        rows, parts = ROWS[processes]
        flags = [*self.flags, "--output_dir", str(self.folder / name), "--per_device_train_batch_size", rows]
        flags = last_ones([*flags, "--gradient_accumulation_steps", parts, *more])
        notes, step = self.folder / f"{name}{'-stopped' * bool(stop)}.jsonl", STOPS.get(stop, 0)
        words = [str(Path(__file__).with_name("observed.py")), str(notes), str(int(stop)), str(step)]
        return self.launch([*words, str(self.script), *flags], self.folder / f"{name}.log", processes)

    def launch(self, words: list[str], log: Path, processes: int) -> int | None:
        """words: a script and its arguments."""
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [sys.executable, *(several if processes > 1 else []), *words]
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        with open(log, "a") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
            try:
                return process.wait(self.limit or None)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)

    def run_all(self) -> list[str]:
        """All of it, two runs at a time; returns what does not hold."""
        started = time.monotonic()
        problem = self._ended("first")
        self._say("undisturbed", problem, f"a run of {time.monotonic() - started:.0f} s")
        if problem:
            return self.failed
        self.limit = self.limit or 60 + 5 * (time.monotonic() - started)
        kill, term = signal.SIGKILL, signal.SIGTERM
        seed = "--eval_only", "true", "--seed", self.eval_seed
        parts = {  # what is said: its runs, which return what went wrong in them, and their comparison
            "one checkpoint": (None, self._one_checkpoint),
            "killed, resumed": (partial(self._stopped, kill), partial(self._resumed, kill)),
            "stopped, resumed": (partial(self._stopped, term), partial(self._resumed, term)),
            "two processes": (partial(self._ended, "two", processes=2), self._two_processes),
            "other steps": (partial(self._ended, "other", *OTHER_STEPS), self._other_steps),
            "--eval_only": (partial(self._ended, "first", *seed), self._evaluated),
            "the saved model": (None, self._saved_model),
        }
        with ThreadPoolExecutor(2) as pool:
            runs = {what: pool.submit(run) for what, (run, _) in parts.items() if run}
            for what, (_, comparison) in parts.items():
                problem = runs[what].result() if what in runs else ""
                self._say(what, *((problem,) if problem else comparison()))
        return self.failed

    def _say(self, what: str, problem: str, compared: str = "", look_for: str = "") -> None:
        self.failed += [what] * bool(problem)
        text = f"DOES NOT HOLD: {problem}{'; look for ' * bool(look_for)}{look_for}"
        print(f"{what:<18}", text if problem else f"holds: {compared}", flush=True)

    # Runs: each returns why it did not end as expected, or ""

    def _ended(self, name: str, *flags: str, expected: tuple = (0,), **how) -> str:
        status = self.run(name, *flags, **how)
        if status is None:
            return f"a run did not end in {self.limit:.0f} s; look for a collective that one process skips"
        last = " | ".join((self.folder / f"{name}.log").read_text().strip().splitlines()[-3:])
        return "" if status in expected else f"a run ended with status {status}: {last}"

    def _stopped(self, stop: int) -> str:
        name = signal.Signals(stop).name
        return self._ended(name, stop=stop, expected=(-stop, 128 + stop, 0)) or self._ended(name)

    # Comparisons: each returns what does not hold, or "", and then what was compared and what to look for

    def _one_checkpoint(self) -> tuple:
        checkpoint = self.first / "checkpoints/step-00000008"  # where no evaluation is due
        problem = compare.odd_state(checkpoint) if checkpoint.exists() else ""
        return problem, "schedules drive the optimizers, nothing shares memory with weights"

    def _resumed(self, stop: int) -> tuple:
        name, last = signal.Signals(stop).name, max(compare.read_notes(self.folder / "first.jsonl", "random"))
        if last < STOPS[stop]:
            return "", f"not stopped, as the run ends after step {last}"
        run, step = self.folder / name, read_args(self.folder / name)["starts"][-1]["step"]
        where = f"{name} after step {STOPS[stop]}, resumed from {step}: "
        if not step:
            return f"{where}it began anew", "", "a checkpoint that is not loaded"
        before, _ = compare.differences(compare.records(self.first, step - 1), compare.records(run, step - 1))
        self.clocks |= before.keys()
        if losses := [text for metric, text in before.items() if metric.startswith("loss")]:
            return f"before any stop {losses[0]}", "", "random numbers that no seed decides"
        unequal, summary = self._differences(name)
        notes = (self.folder / f"{file}.jsonl" for file in ("first", f"{name}-stopped", name))
        problems = [summary * bool(unequal), compare.checkpoint_difference(self.first, run),
                    compare.variables_difference(*notes)]  # fmt: skip
        if any(problems):
            return where + "; ".join(filter(None, problems)), "", LOST
        ignored = f"; not compared, as different before the stop, too: {', '.join(before)}" * bool(before)
        return "", f"{where}{summary}, the same bits in checkpoints, the same local variables{ignored}"

    def _two_processes(self) -> tuple:
        for step, names in compare.read_notes(self.folder / "two.jsonl", "unequal").items():
            if names:
                return f"after step {step} {', '.join(names)} differ between the processes", "", APART
        random = any(compare.read_notes(self.folder / "first.jsonl", "random").values())
        limits = dict(last=0 if random else math.inf, tolerance=compare.by_processes)
        unequal, summary = self._differences("two", **limits)
        compared = f"{summary}, the same state on both{RANDOM * random}"
        if unequal and not any(metric.startswith(PROMISED) for metric in unequal):
            if problem := self._ended("micro", *MICRO_BATCHES):
                return (problem,)
            if unequal.keys() <= self._differences("micro", **limits)[0].keys():
                why = "which depends on the size of a micro-batch on one process, too"
                return "", f"{compared}; not compared: {', '.join(unequal)}, {why}"
        return summary * bool(unequal), compared, APART

    def _differences(self, name: str, last: float = math.inf, **tolerance) -> tuple:
        """Of the undisturbed run's metrics and another's, up to step `last`."""
        both = (compare.records(run, last) for run in (self.first, self.folder / name))
        return compare.differences(*both, self.clocks, **tolerance)

    def _other_steps(self) -> tuple:
        runs = self.first, self.folder / "other"
        rates, others = ({line["step"]: line["learning_rate"] for line in compare.records(run)
                          if "learning_rate" in line} for run in runs)  # fmt: skip
        if max(rates) != max(others) or any(rates.get(step) != rate for step, rate in others.items()):
            return "", "not compared, as evaluations decide the learning rate or the last step"
        problem = compare.checkpoint_difference(*runs, weights=True)
        return problem, "the same weights where it logs, evaluates and saves at other steps", LEFT

    def _evaluated(self) -> tuple:
        record = json.loads((self.folder / "first.log").read_text().strip().splitlines()[-1])
        beside = sorted(self._evaluation().keys() - record.keys() - self.clocks)  # of what output_dir lacks
        unequal, summary = compare.differences([self._evaluation()], [record], [*self.clocks, *beside], 1e-6)
        skipped = f"; not compared, as it evaluates the model alone: {', '.join(beside)}" * bool(beside)
        return summary * bool(unequal), f"with seed {self.eval_seed}: {summary}{skipped}", SEEDED

    def _saved_model(self) -> tuple:
        args = compare.settings(self.module, last_ones([*self.flags, "--output_dir", str(self.first)]))
        loss = {"loss": next(iter(by_set(self._evaluation(), "loss/eval").values()))}  # of the first set
        saved_loss = {"loss": compare.loss_by_transformers(self.module, args)}
        unequal, summary = compare.differences([loss], [saved_loss], tolerance=1e-4)
        return summary * bool(unequal), f"loss by transformers alone: {summary}", UNSAVED

    def _evaluation(self) -> dict:
        """The last one of the undisturbed run."""
        return newest(compare.records(self.first), "loss/eval")[0]


def last_ones(words: list[str]) -> list[str]:
    """Flags and their values; of a flag that is repeated only the last."""
    flags = {}
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0].replace("-", "_")
            flags.pop(flag, None)
        flags.setdefault(flag, []).append(word)
    return [word for group in flags.values() for word in group]


def main(words: list[str]) -> int:
    keep, folder = "--keep" in words, tempfile.mkdtemp(prefix="check-")
    script, *flags = (word for word in words if word != "--keep")
    try:
        with user_mistakes():
            return int(bool(Check(script, flags, Path(folder)).run_all()))
    finally:
        print(f"the runs are in {folder}") if keep else shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(f"{__doc__}\nusage: python -m utils.check SCRIPT [--keep] [flags of the script]")
    sys.exit(main(sys.argv[1:]))
