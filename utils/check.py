"""Checks an edited script by runs of twelve steps on the CPU: killed, resumed, on two processes, ...

    python -m utils.check train_clm.py                        # the script with its default settings
    python -m utils.check train_mlm.py --next_sentence true   # the script with these flags

Prints a line per check: what was compared and the largest difference, or what fails and what to look for. The
exit status is 1 if a check fails. --keep does not delete the runs' folders. Mistakes that show only on GPUs,
under FSDP or after twelve steps are missed.
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

SHORT_RUN = dict(max_train_steps=12, logging_steps=1, eval_steps=5, save_steps=4, save_total_limit=9,
                 max_train_samples=512, max_eval_samples=20, per_device_eval_batch_size=8,
                 num_warmup_steps=0.5, prompts="none", report_to="none", push_to_hub="false")  # fmt: skip
BATCHES = {1: ("4", "2"), 2: ("2", "2")}  # processes: (rows per micro-batch, micro-batches); 8 rows per step
STOPS = {signal.SIGKILL: 6, signal.SIGTERM: 10}  # sent after this step; saves are at 4, 8, 12
OTHER_STEPS = ("--logging_steps", "5", "--eval_steps", "3", "--save_steps", "6")
MICRO_BATCHES = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4")
INVARIANT = ("loss", "grad_norm", "learning_rate")  # metrics that may not depend on the micro-batch size
RANDOM = "; not compared after step 0: training draws random numbers, and each process draws its own"
# What to look for if a check fails.
RESUMING = "state that is not given to Checkpoints, random numbers without steps.seed, a model left in eval()"
PROCESSES = "random numbers, means of means, padding or gradients per process; code that one process skips"
SIDE_EFFECTS = "gradients, random numbers or changed weights that a log line or an evaluation leaves behind"
EVALUATION = "evaluation state that no checkpoint holds, random numbers in the evaluation, a missing eval()"
SAVED_MODEL = "a part of the loss that the saved model lacks, unless your evaluation is meant to differ"


class Check:
    """script: its path. flags: the user's flags for it. folder: an empty folder for the runs. limit: seconds
    after which a run is killed; 0: set from the duration of the first run. failed: names of failed checks."""

    def __init__(self, script, flags: list[str], folder: Path, limit: float = 0):
        self.script, self.folder, self.limit = Path(script).resolve(), Path(folder), limit
        self.first, self.failed = self.folder / "first", []  # first: the undisturbed run, the reference
        self.clocks = set()  # metrics that differ between two undisturbed runs, such as a time
        self.unseeded = False  # their losses differ, too
        if not self.script.is_file():
            raise ValueError(f"{script}: no such script. Name one, such as train_clm.py.")
        spec = importlib.util.spec_from_file_location(f"checked_{self.script.stem}", self.script)
        self.module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        args = compare.settings(self.module, flags)
        pairs = getattr(args, "next_sentence", False)
        no_first_rows = pairs or len(args.dataset_name) > 1
        short = {name: value for name, value in SHORT_RUN.items() if hasattr(args, name)
                 and not (name == "max_train_samples" and no_first_rows)}  # fmt: skip
        flag_names = {word.partition("=")[0] for word in flags}
        # In twelve steps at the default rates the loss rises, and rounding errors grow from step to step.
        short |= {name: getattr(args, name) / 10 for name in ("learning_rate", "muon_learning_rate")
                  if hasattr(args, name) and f"--{name}" not in flag_names}  # fmt: skip
        short = (word for name, value in short.items() for word in (f"--{name}", str(value)))
        self.flags = without_repeats([*flags, *short])
        self.eval_seed = str(args.seed + (not pairs))  # sentence pairs of an evaluation depend on the seed

    def run(self, name: str, *more: str, processes: int = 1, stop: int = 0) -> int | None:
        """Runs the script with output_dir folder/name. Its output is appended to folder/name.log, and the
        notes of observed.py to folder/name.jsonl, or name-stopped.jsonl. stop: a signal that stops the run.
        Returns the exit status, or None after the time limit."""
        rows, micro_batches = BATCHES[processes]
        flags = [*self.flags, "--output_dir", str(self.folder / name), "--per_device_train_batch_size", rows]
        flags = without_repeats([*flags, "--gradient_accumulation_steps", micro_batches, *more])
        notes, step = self.folder / f"{name}{'-stopped' * bool(stop)}.jsonl", STOPS.get(stop, 0)
        words = [str(Path(__file__).with_name("observed.py")), str(notes), str(int(stop)), str(step)]
        return self.launch([*words, str(self.script), *flags], self.folder / f"{name}.log", processes)

    def launch(self, words: list[str], log: Path, processes: int) -> int | None:
        """words: a script and its arguments."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [sys.executable, *(launcher if processes > 1 else []), *words]
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        with open(log, "a") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
            try:
                return process.wait(self.limit or None)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)

    def run_all(self) -> list[str]:
        """Runs all checks, two runs at a time, and returns the names of those that fail."""
        started = time.monotonic()
        problem = self._run_to_end("first")
        self._report("undisturbed", problem, f"a run of {time.monotonic() - started:.0f} s")
        if problem:
            return self.failed
        self.limit = self.limit or 60 + 5 * (time.monotonic() - started)
        kill, term = signal.SIGKILL, signal.SIGTERM
        seed = "--eval_only", "true", "--seed", self.eval_seed
        checks = {  # name: (the run, which returns why it failed or ""; the comparison of its results)
            "one checkpoint": (None, self._compare_checkpoint),
            "killed, resumed": (partial(self._stop_and_resume, kill), partial(self._compare_resumed, kill)),
            "stopped, resumed": (partial(self._stop_and_resume, term), partial(self._compare_resumed, term)),
            "two processes": (partial(self._run_to_end, "two", processes=2), self._compare_processes),
            "other steps": (partial(self._run_to_end, "other", *OTHER_STEPS), self._compare_other_steps),
            "--eval_only": (partial(self._run_to_end, "first", *seed), self._compare_evaluation),
            "the saved model": (None, self._compare_saved_model),
        }
        with ThreadPoolExecutor(2) as pool:
            runs = {name: pool.submit(run) for name, (run, _) in checks.items() if run}
            for name, (_, comparison) in checks.items():
                problem = runs[name].result() if name in runs else ""
                if self.unseeded and name in ("two processes", "other steps", "--eval_only"):
                    print(f"{name:<18} not compared, as two undisturbed runs differ already", flush=True)
                    continue
                self._report(name, *((problem,) if problem else comparison()))
        return self.failed

    def _report(self, name: str, problem: str, compared: str = "", look_for: str = "") -> None:
        self.failed += [name] * bool(problem)
        text = f"DOES NOT HOLD: {problem}{'; look for ' * bool(look_for)}{look_for}"
        print(f"{name:<18}", text if problem else f"holds: {compared}", flush=True)

    # Runs: each returns why it did not end as expected, or "".

    def _run_to_end(self, name: str, *flags: str, expected: tuple = (0,), **options) -> str:
        status = self.run(name, *flags, **options)
        if status is None:
            return f"a run did not end in {self.limit:.0f} s; look for a collective that one process skips"
        last = " | ".join((self.folder / f"{name}.log").read_text().strip().splitlines()[-3:])
        return "" if status in expected else f"a run ended with status {status}: {last}"

    def _stop_and_resume(self, stop: int) -> str:
        name = signal.Signals(stop).name
        return self._run_to_end(name, stop=stop, expected=(-stop, 128 + stop, 0)) or self._run_to_end(name)

    # Comparisons: each returns the problem or "", then what was compared and what to look for.

    def _compare_checkpoint(self) -> tuple:
        checkpoint = self.first / "checkpoints/step-00000008"  # a step without an evaluation
        problem = compare.state_problem(checkpoint) if checkpoint.exists() else ""
        return problem, "schedules drive the optimizers, no state shares memory with weights"

    def _compare_resumed(self, stop: int) -> tuple:
        name, last = signal.Signals(stop).name, max(compare.read_notes(self.folder / "first.jsonl", "random"))
        if last < STOPS[stop]:
            return "", f"not stopped, as the run ends after step {last}"
        run, step = self.folder / name, read_args(self.folder / name)["starts"][-1]["step"]
        where = f"{name} after step {STOPS[stop]}, resumed from {step}: "
        if not step:
            return f"{where}it started from scratch", "", "a checkpoint that is not loaded"
        before, _ = compare.differences(compare.records(self.first, step - 1), compare.records(run, step - 1))
        self.clocks |= before.keys()
        if losses := [text for metric, text in before.items() if metric.startswith("loss")]:
            self.unseeded = True
            return f"before the stop {losses[0]}", "", "random numbers from an unseeded generator"
        unequal, summary = self._differences(name)
        notes = (self.folder / f"{file}.jsonl" for file in ("first", f"{name}-stopped", name))
        problems = [compare.variables_difference(*notes), summary * bool(unequal),
                    compare.checkpoint_difference(self.first, run)]  # fmt: skip
        if any(problems):
            return where + "; ".join(filter(None, problems)), "", RESUMING
        ignored = f"; not compared, as different before the stop, too: {', '.join(before)}" * bool(before)
        return "", f"{where}{summary}, the same bits in checkpoints, the same local variables{ignored}"

    def _compare_processes(self) -> tuple:
        for step, names in compare.read_notes(self.folder / "two.jsonl", "unequal").items():
            if names:
                return f"after step {step} {', '.join(names)} differ between processes", "", PROCESSES
        random = any(compare.read_notes(self.folder / "first.jsonl", "random").values())
        limits = dict(last=0 if random else math.inf, tolerance=compare.by_processes)
        unequal, summary = self._differences("two", **limits)
        compared = f"{summary}, the same state on both{RANDOM * random}"
        if unequal and not any(metric.startswith(INVARIANT) for metric in unequal):
            if problem := self._run_to_end("micro", *MICRO_BATCHES):
                return (problem,)
            if unequal.keys() <= self._differences("micro", **limits)[0].keys():
                why = "which depends on the size of a micro-batch on one process, too"
                return "", f"{compared}; not compared: {', '.join(unequal)}, {why}"
        return summary * bool(unequal), compared, PROCESSES

    def _differences(self, name: str, last: float = math.inf, **tolerance) -> tuple:
        """Differences between the metrics of the undisturbed run and of run `name`, up to step `last`."""
        both = (compare.records(run, last) for run in (self.first, self.folder / name))
        return compare.differences(*both, self.clocks, **tolerance)

    def _compare_other_steps(self) -> tuple:
        runs = self.first, self.folder / "other"
        rates, other_rates = ({line["step"]: line["learning_rate"] for line in compare.records(run)
                               if "learning_rate" in line} for run in runs)  # fmt: skip
        same_rates = all(rates.get(step) == rate for step, rate in other_rates.items())
        if max(rates) != max(other_rates) or not same_rates:
            return "", "not compared, as evaluations decide the learning rate or the last step"
        problem = compare.checkpoint_difference(*runs, weights=True)
        return problem, "the same weights where it logs, evaluates and saves at other steps", SIDE_EFFECTS

    def _compare_evaluation(self) -> tuple:
        record = json.loads((self.folder / "first.log").read_text().strip().splitlines()[-1])
        missing = sorted(self._evaluation().keys() - record.keys() - self.clocks)  # such as an average's loss
        unequal, summary = compare.differences([self._evaluation()], [record], [*self.clocks, *missing], 1e-6)
        skipped = f"; not compared, as output_dir holds the model alone: {', '.join(missing)}" * bool(missing)
        return summary * bool(unequal), f"with seed {self.eval_seed}: {summary}{skipped}", EVALUATION

    def _compare_saved_model(self) -> tuple:
        args = compare.settings(self.module, without_repeats([*self.flags, "--output_dir", str(self.first)]))
        loss = {"loss": next(iter(by_set(self._evaluation(), "loss/eval").values()))}  # on the first set
        saved_loss = {"loss": compare.loss_by_transformers(self.module, args)}
        unequal, summary = compare.differences([loss], [saved_loss], tolerance=1e-4)
        return summary * bool(unequal), f"loss by transformers alone: {summary}", SAVED_MODEL

    def _evaluation(self) -> dict:
        """The last evaluation of the undisturbed run."""
        return newest(compare.records(self.first), "loss/eval")[0]


def without_repeats(words: list[str]) -> list[str]:
    """Flags and their values, without earlier occurrences of a repeated flag."""
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
