"""What still holds after an edit of a script? Runs it short, on the CPU, in several ways, and compares.

    python -m utils.check train_clm.py                        # the script as it is, with its defaults
    python -m utils.check train_mlm.py --next_sentence true   # flags of the script

A line for each: what was compared, the largest difference, and if it does not hold what to look for. Exit
status 1 if one does not. What changes no number in twelve steps is not seen.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from utils import compare
from utils.io.mistakes import user_mistakes

SHORT = dict(max_train_steps=12, logging_steps=1, eval_steps=5, save_steps=4, save_total_limit=9,
             max_train_samples=512, max_eval_samples=16, per_device_eval_batch_size=8, num_warmup_steps=0.5,
             prompts="none", report_to="none", push_to_hub="false")  # fmt: skip
ROWS = {1: ("4", "2"), 2: ("2", "2")}  # processes -> rows of a micro-batch, micro-batches: 8 rows per step
LOST = "state that Checkpoints lacks, random numbers that are no function of (seed, step), eval() left on"
APART = "what depends on the process: random numbers, a mean of means, gradients, a part that one skips"
UNSAVED = "a part of the loss that the saved model lacks (or an evaluation that is meant to be another)"


class Check:
    """script: its path; flags: of the user; folder: an empty one for the runs; limit: seconds of a run, 0: as
    the first one decides. failed: what does not hold."""

    def __init__(self, script, flags: list[str], folder: Path, limit: float = 0):
        self.script, self.folder, self.limit = Path(script).resolve(), Path(folder), limit
        self.first, self.failed = self.folder / "whole", []  # the undisturbed run, with which all is compared
        spec = importlib.util.spec_from_file_location(f"checked_{self.script.stem}", self.script)
        self.module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        args = compare.settings(self.module, flags)
        no_first_rows = getattr(args, "next_sentence", False) or len(args.dataset_name) > 1
        short = {name: value for name, value in SHORT.items() if hasattr(args, name)
                 and not (name == "max_train_samples" and no_first_rows)}  # fmt: skip
        given = {word.partition("=")[0] for word in flags}
        # Where the loss rises, as in so few steps at the default rates, rounding grows from step to step.
        short |= {name: getattr(args, name) / 10 for name in ("learning_rate", "muon_learning_rate")
                  if hasattr(args, name) and f"--{name}" not in given}  # fmt: skip
        self.flags = [*flags, *(word for name, value in short.items() for word in (f"--{name}", str(value)))]

    def run(self, name: str, *more: str, processes: int = 1, stop: int = 0) -> int | None:
        """Runs the script in folder/name, its output is added to folder/name.log. stop: a signal to stop it.
        Returns the exit status, None if it did not end."""
        rows, parts = ROWS[processes]
        flags = [*self.flags, "--output_dir", str(self.folder / name), "--per_device_train_batch_size", rows]
        words = [str(self.script), *flags, "--gradient_accumulation_steps", parts, *more]
        if stop or processes > 1:
            words = [str(Path(__file__).with_name("observed.py")), str(int(stop)), *words]
        return self.launch(words, self.folder / f"{name}.log", processes)

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

    def whole(self) -> list[str]:
        """All of it, two runs at a time; returns what does not hold."""
        started = time.monotonic()
        problem = self._broken("whole", self.run("whole"))
        self._say("undisturbed", problem, f"a run of {time.monotonic() - started:.0f} s")
        if problem:
            return self.failed
        self.limit = self.limit or 60 + 5 * (time.monotonic() - started)
        kill, term = (self._resumed, signal.SIGKILL), (self._resumed, signal.SIGTERM)
        parts = {"one checkpoint": (self._one_checkpoint,), "killed, resumed": kill, "stopped, resumed": term,
                 "two processes": (self._two_processes,), "--eval_only": (self._evaluated,)}  # fmt: skip
        with ThreadPoolExecutor(2) as pool:
            results = {what: pool.submit(*part) for what, part in parts.items()}
            for what, result in results.items():
                self._say(what, *result.result())
        self._say("the saved model", *self._saved_model())  # alone, as it silences stdout meanwhile
        return self.failed

    def _say(self, what: str, problem: str, compared: str = "", look_for: str = "") -> None:
        self.failed += [what] * bool(problem)
        text = f"DOES NOT HOLD: {problem}{'; look for ' * bool(look_for)}{look_for}"
        print(f"{what:<18}", text if problem else f"holds: {compared}", flush=True)

    def _broken(self, name: str, status: int | None, expected: tuple = (0,)) -> str:
        """Why a run did not end as expected, or ""."""
        if status is None:
            return f"a run did not end in {self.limit:.0f} s; look for a collective that one process skips"
        last = " | ".join((self.folder / f"{name}.log").read_text().strip().splitlines()[-3:])
        return "" if status in expected else f"a run ended with status {status}: {last}"

    # Each part returns what does not hold, or "", and then what was compared and what to look for

    def _one_checkpoint(self) -> tuple:
        checkpoint = self.first / "checkpoints/step-00000008"  # where no evaluation is due
        problem = compare.odd_state(checkpoint) if checkpoint.exists() else ""
        return problem, "schedules drive the optimizers, nothing shares memory with weights"

    def _resumed(self, stop: int) -> tuple:
        name = signal.Signals(stop).name
        problem = self._broken(name, self.run(name, stop=stop), (-stop, 128 + stop))
        if problem := problem or self._broken(name, self.run(name)):
            return (problem,)
        problem, compared = compare.metrics_difference(self.first, self.folder / name)
        problem = problem or compare.checkpoint_difference(self.first, self.folder / name)
        return problem, f"{compared}, the same bits in checkpoints", LOST

    def _two_processes(self) -> tuple:
        config = json.loads((self.first / "config.json").read_text())
        if drops := [key for key, value in config.items() if "drop" in key and value and value is not True]:
            return "", f"not compared, as each process draws its own {', '.join(drops)}"
        if problem := self._broken("two", self.run("two", processes=2)):
            return (problem,)
        if (apart := self.folder / "two/apart").exists():
            return f"the processes' weights differ after step {apart.read_text()}", "", APART
        problem, compared = compare.metrics_difference(self.first, self.folder / "two", 1e-3)
        return problem, f"{compared}, the same weights on both", APART

    def _evaluated(self) -> tuple:
        key, loss = compare.evaluation_loss(self.first)
        if problem := self._broken("whole", self.run("whole", "--eval_only", "true")):
            return (problem,)
        found = json.loads((self.folder / "whole.log").read_text().strip().splitlines()[-1])[key]
        return *compare.values(key, found, loss, 1e-6), "state of the evaluation that no checkpoint has"

    def _saved_model(self) -> tuple:
        key, loss = compare.evaluation_loss(self.first)
        args = compare.settings(self.module, [*self.flags, "--output_dir", str(self.first)])
        found = compare.loss_by_transformers(self.module, args)
        return *compare.values(f"{key}, by transformers alone,", found, loss, 1e-4), UNSAVED


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(f"{__doc__}\nusage: python -m utils.check SCRIPT [flags of the script]")
    with user_mistakes(), tempfile.TemporaryDirectory() as scratch:
        sys.exit(bool(Check(sys.argv[1], sys.argv[2:], Path(scratch)).whole()))
