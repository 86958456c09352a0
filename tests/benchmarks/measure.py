"""Shared by the benchmarks: timed processes and steps, and a table of the results."""

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
ADAMW = SimpleNamespace(  # optimizer settings of the measured loops
    optimizer_type="adamw", learning_rate=1e-3, weight_decay=0.1, adam_beta2=0.999,
    lr_scheduler_type="linear", lr_scheduler_kwargs=None, num_warmup_steps=2, muon_learning_rate=1e-2,
)  # fmt: skip


def timed_run(command: list[str]) -> dict:
    """Run a command. Returns its wall and CPU seconds, peak MiB, and its last line if it is a JSON object."""
    with tempfile.TemporaryFile("w+") as out:
        start = time.time()
        process = subprocess.Popen(command, cwd=PROJECT, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
        measured = {
            "wall": time.time() - start,
            "cpu": usage.ru_utime + usage.ru_stime,
            "mib": usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
        }
        out.seek(0)
        last = (out.read().strip().splitlines() or [""])[-1]
    report = json.loads(last) if last.startswith("{") else {}
    if "stepped_at" in report:
        report["to_first_step"] = report.pop("stepped_at") - start
    return measured | report


def interleaved(commands: dict[str, list[str]], rounds: int) -> dict[str, dict]:
    """{name: {quantity: median}} over `rounds` runs of each command, one after the other in turn."""
    runs = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            runs[name].append(timed_run(command))
    return {
        name: {key: statistics.median(r[key] for r in measured) for key in measured[0]}
        for name, measured in runs.items()
    }


def print_table(title: str, lines: dict[str, dict], columns: dict[str, str], ratio_of: dict[str, str]):
    """Print a Markdown table that names the machine.

    lines: {name: numbers}; columns: {key: heading}; ratio_of: {key: heading of the ratio to the first line}.
    Keys that no line has get no column.
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
    for name, numbers in lines.items():
        cells = [_number(numbers[key]) if key in numbers else "" for key in columns]
        cells += [
            f"{numbers[key] / first[key]:.2f} x" if key in numbers and key in first else ""
            for key in ratio_of
        ]
        text.append(f"| {name} | " + " | ".join(cells) + " |")
    print("\n".join(text), flush=True)


def draw(panels: dict[str, dict[str, list]], ylabel: str, file: str) -> None:
    """Save a picture. panels: {x label: {name: curves of the runs}}; a curve is a list of (x, y)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 4 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, (xlabel, lines) in zip(axes, panels.items(), strict=True):
        for number, (name, curves) in enumerate(lines.items()):
            for i, curve in enumerate(curves):
                label = name if i == 0 else None
                panel.plot(*zip(*curve, strict=True), color=f"C{number}", label=label, lw=1.2, marker=".")
        panel.set_xlabel(xlabel)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel(ylabel)
    axes[0].legend()
    figure.savefig(file, dpi=110)


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
    """Peak bytes so far on the accelerator. Without one, or if it has no counter: of the process."""
    import torch

    if torch.accelerator.is_available() and hasattr(torch.accelerator, "max_memory_allocated"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return torch.accelerator.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)


class Clock:
    """Measures wall and CPU seconds of each optimizer step, and waits for the device's work."""

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
