"""What the benchmarks share: processes timed in turn, steps timed within them, one table for each."""

import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

PROJECT = Path(__file__).resolve().parents[2]
T = 128  # tokens per row
ADAMW = SimpleNamespace(  # settings of the loops that are measured
    optimizer_type="adamw", learning_rate=1e-3, weight_decay=0.1, adam_beta2=0.999,
    lr_scheduler_type="linear", lr_scheduler_kwargs=None, num_warmup_steps=2, muon_learning_rate=1e-2,
)  # fmt: skip


def timed_run(command: list[str]) -> dict:
    """Wall and CPU seconds, peak MiB of the process, and its last line, if that is a JSON object."""
    with tempfile.TemporaryFile("w+") as out:
        start = time.time()
        process = subprocess.Popen(command, cwd=PROJECT, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
        found = {
            "wall": time.time() - start,
            "cpu": usage.ru_utime + usage.ru_stime,
            "mib": usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
        }
        out.seek(0)
        last = (out.read().strip().splitlines() or [""])[-1]
    said = json.loads(last) if last.startswith("{") else {}
    if "stepped_at" in said:
        said["to_first_step"] = said.pop("stepped_at") - start
    return found | said


def interleaved(commands: dict[str, list[str]], rounds: int) -> dict[str, dict]:
    """{name: {what: median}} over `rounds` runs of each command, in turn and never two at once."""
    runs = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            runs[name].append(timed_run(command))
    return {
        name: {key: statistics.median(r[key] for r in found) for key in found[0]}
        for name, found in runs.items()
    }


def print_table(
    title: str, lines: dict[str, dict], columns: dict[str, str], ratio_of: dict[str, str], append=None
):
    """Markdown, with the machine named; added to the file `append`, too, such as README.md.

    lines: name -> numbers. columns: key -> heading; ratio_of: key -> heading of its ratio to the first line.
    What no line has gets no column.
    """
    first = next(iter(lines.values()))
    present = set().union(*lines.values())
    columns = {key: heading for key, heading in columns.items() if key in present}
    ratio_of = {key: heading for key, heading in ratio_of.items() if key in present}
    text = [
        f"{title}. {machine()}", "",
        "| | " + " | ".join([*columns.values(), *ratio_of.values()]) + " |",
        "|---" * (1 + len(columns) + len(ratio_of)) + "|",
    ]  # fmt: skip
    for name, found in lines.items():
        cells = [_number(found[key]) if key in found else "" for key in columns]
        cells += [
            f"{found[key] / first[key]:.2f} x" if key in found and key in first else ""
            for key in ratio_of
        ]
        text.append(f"| {name} | " + " | ".join(cells) + " |")
    print("\n".join(text), flush=True)
    if append:
        with open(append, "a", encoding="utf-8") as file:
            file.write("\n" + "\n".join(text) + "\n")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def machine() -> str:
    import torch

    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), name
        )
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    return f"{name}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"


def peak_memory() -> float:
    """Bytes at the most so far: of the accelerator, or where it does not tell, or is none, of the process."""
    import torch

    if torch.accelerator.is_available() and hasattr(torch.accelerator, "max_memory_allocated"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return torch.accelerator.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)


class Clock:
    """Wall and CPU seconds of each optimizer step, with the device's work in it."""

    def __init__(self):
        self.marks = []

    def start(self):
        self.marks.append((time.perf_counter(), time.process_time()))

    def step(self):
        import torch

        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.marks.append((time.perf_counter(), time.process_time()))
        if len(self.marks) == 2:
            self.stepped_at = time.time()

    def report(self, tokens: int) -> dict:
        wall, cpu = (
            [b[i] - a[i] for a, b in zip(self.marks, self.marks[1:], strict=False)] for i in (0, 1)
        )
        rest = slice(1, None) if len(wall) > 1 else slice(None)
        return {
            "stepped_at": self.stepped_at, "first_step": wall[0],
            "tokens_per_second": tokens / statistics.median(wall[rest]),
            "cpu_per_step": statistics.median(cpu[rest]),
        }  # fmt: skip
