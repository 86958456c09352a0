"""Twelve deliberate faults, each made in a copy of the project: the fast tests of the part must fail.

    python -m tests.mutations                        # prints a table, about ten minutes; 1 if one lives
    python -m tests.mutations "guard off" --control  # this one alone, after its tests without any fault
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.runs import PROJECT


@dataclass
class Fault:
    name: str
    file: str
    old: str  # found exactly once
    new: str
    tests: str  # of tests/, with the words of -k

    def command(self) -> list[str]:
        file, _, words = self.tests.partition(" ")
        line = [sys.executable, "-m", "pytest", f"tests/{file}", "-n", "0", "-x", "-q"]
        return [*line, "-p", "no:cacheprovider", *(["-k", words] if words else [])]


FAULTS = [
    Fault("wrong decay group", "utils/learning/optim.py",
          "(plain if parameter.ndim < 2 or norm_or_bias else decayed)",
          "(plain if name.endswith('bias') else decayed)",
          "test_optim.py no_bias_and_no_norm"),
    Fault("evaluation counts padding", "train_clm.py",
          '[row_numbers.cpu() >= 0]', '[row_numbers.cpu() >= -1]',
          "test_train_clm.py evaluation_is_the_sum"),
    Fault("schedule steps twice", "train_clm.py",
          "schedule.step()\n", "schedule.step() or schedule.step()\n",
          "test_train_clm.py linear_schedule"),
    Fault("resume one row off", "train_clm.py",
          "args, steps.rows_before(step), ", "args, steps.rows_before(step) + (step > 0), ",
          "test_crash.py one_process"),
    Fault("masks at special tokens", "data/batches/masking.py",
          "(rows >= 0)[:, None] & ~self.is_special[ids]", "(rows >= 0)[:, None] & (ids >= 0)",
          "test_masking.py"),
    Fault("checksum not compared", "utils/io/files.py",
          "            if checksum_file(folder / name) != entry:",
          "            if False:", "test_checkpoint.py damage"),
    Fault("push of a mixed state", "utils/publishing/hub.py",
          "shutil.copyfile(self.output_dir / name, folder / name)",
          "os.link(self.output_dir / name, folder / name)",
          "test_hub.py newer_snapshots"),
    Fault("signal lost", "utils/state/stop_signals.py",
          "self.answer = requested()", "self.answer = 0",
          "test_preemption.py one_signal"),
    Fault("guard off", "utils/learning/optim.py",
          "skip = ~torch.isfinite(norm)", "skip = torch.zeros_like(norm, dtype=torch.bool)",
          "test_optim.py bad_update"),
    Fault("loss divided twice", "train_clm.py",
          "accelerator.backward(loss / ", "accelerator.backward(loss / len(micro_batches) / ",
          "test_train_clm.py does_not_depend_on_its_split"),
    Fault("order with a repeated row", "data/batches/order.py",
          "rows[outside] = encrypt(rows[outside])", "rows[outside] = 0",
          "test_order.py"),
    Fault("tied weights apart", "utils/learning/model.py",
          "model.lm.tie_weights()", 'model.lm.lm_head = __import__("copy").deepcopy(model.lm.lm_head)',
          "test_fsdp.py saved_model_is_complete"),
]  # fmt: skip


def failed(fault: Fault, folder: Path) -> tuple[str, str]:
    """The first test that fails, "" if none does, and the output. AssertionError where no test ran."""
    done = subprocess.run(fault.command(), cwd=folder, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    found = re.search(r"^(?:FAILED|ERROR) \S*?::(\S+)", done.stdout, re.M)
    assert bool(found) == bool(done.returncode), done.stdout[-3000:]
    return found[1] if found else "", done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of faults; none: all")
    parser.add_argument("--control", action="store_true", help="first run the tests without any fault")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if not args.names or fault.name in args.names]
    survived = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "project")
        shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns(".git", "runs", "cache", ".venv*"))
        if args.control:
            for fault in chosen:
                test, output = failed(fault, folder)
                assert not test, f"fails without a fault: {output[-3000:]}"
        print("| fault | in | seconds | the first test that fails |\n|---|---|---|---|")
        for fault in chosen:
            file, began = folder / fault.file, time.monotonic()
            text = file.read_text()
            assert text.count(fault.old) == 1, f"{fault.name}: {fault.old} is not once in {fault.file}"
            file.write_text(text.replace(fault.old, fault.new))
            test, _ = failed(fault, folder)
            file.write_text(text)
            survived += not test
            seconds = time.monotonic() - began
            print(f"| {fault.name} | `{fault.file}` | {seconds:.0f} | {test or '**none**'} |", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} faults are found")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
