"""Why the first steps are slow, told while they are: a first step without an end, threads that wait for each
other on busy cores, and models that transformers computes without their kernels."""

import logging
import os
import re
import threading
import time

import torch
from tqdm.auto import tqdm

from utils.devices import granted_cores

FIRST, AGAIN = 10, 30  # seconds until the first line about a step that has not ended, and between the others
SLOW = 3  # times what matrix products suggest; the default run takes 1.5 to 2 times
NOTICED = 0.5  # seconds of a step that are worth a line
LARGE, SMALL = 1024, 192  # sizes of products: threads meet once in a long time, or every few microseconds


class FirstSteps:
    """Watches the first steps: call `begin` before each and `end` after it, also after they are over.

    flops: of a step, in this process; say: prints a line; device: of the model."""

    def __init__(self, flops: float, device: torch.device, say):
        self.flops, self.device, self.say = flops, device, say
        self.seconds, self.over, self.start, self.watched = [], threading.Event(), 0.0, False

    def begin(self) -> None:
        self.start = time.perf_counter()
        if not self.watched:
            self.watched = True
            threading.Thread(target=self._wait, daemon=True).start()

    def end(self) -> None:
        self.over.set()
        if len(self.seconds) == 3:
            return
        self.seconds.append(time.perf_counter() - self.start)
        if len(self.seconds) == 3 and self.device.type == "cpu":  # the first one allocates and may compile
            if line := why_slow(min(self.seconds[1:]), self.flops):
                self.say(line)

    def _wait(self):
        due = FIRST
        while not self.over.wait(min(FIRST, 1)):
            if (spent := time.perf_counter() - self.start) >= due:
                self.say(f"step       the first one has taken {spent:.0f} s so far")
                due = spent + AGAIN


def why_slow(seconds: float, flops: float) -> str | None:
    """A line if a step of the CPU takes longer than it has to. flops: of the step. Takes a sixth of a second.

    Large products show what the cores give now, with these threads. Small ones show what it costs that the
    threads wait for each other after each operation, as they do in a step."""
    if seconds < NOTICED:
        return None
    threads = torch.get_num_threads()
    (rate, _), (_, cores) = _products(LARGE, 0.1), _products(SMALL, 0.05)
    times, busy = seconds / (flops / rate), f"on busy cores (load {_load()} of {granted_cores()})"
    taken = f"slow       a step takes {seconds:,.1f} s, {times:,.0f} x what matrix products suggest"
    if times > SLOW and threads > 1 and cores < 0.8 * threads:
        return f"{taken}: {threads} threads share {cores:.1f} {busy}: OMP_NUM_THREADS=1 may be faster"
    if times > SLOW:
        return f"{taken}: most of it goes to the model's other operations"
    if cores < 0.5 * threads:
        return f"slow       other processes compute, too: this one gets {cores:.1f} of {threads} cores {busy}"
    return None


def _products(size: int, seconds: float) -> tuple[float, float]:
    """FLOP/s of matrix products for so long, and the cores that this process got meanwhile."""
    a, b = torch.ones(size, size), torch.ones(size, size)
    torch.mm(a, b)
    count, wall, cpu = 0, time.perf_counter(), time.process_time()
    while not count or time.perf_counter() - wall < seconds:  # a busy machine may take longer for nothing
        torch.mm(a, b)
        count += 1
    spent = time.perf_counter() - wall
    return 2 * size**3 * count / spent, (time.process_time() - cpu) / spent


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


class SlowPaths(logging.Handler):
    """Shows transformers' warnings that it lacks a model's kernels, a line for each package that is missing.
    Its other records are shown from `shown` on."""

    def __init__(self):
        super().__init__()
        self.shown, self.told = logging.ERROR, set()

    def emit(self, record):
        text = record.getMessage()
        if re.search(r"fast path|falling back to .*(implementation|PyTorch)|much slower", text, re.I):
            missing = re.search(r"because `([\w.-]+)` is not installed", text)
            cause = f"{missing[1]} is not installed: correct, but slow" if missing else text.split(". ")[0]
            if cause not in self.told:
                self.told.add(cause)
                tqdm.write(f"slow       transformers computes this model in plain PyTorch, as {cause}")
        elif record.levelno >= self.shown:
            logging.getLogger("transformers").handle(record)


_slow_paths = SlowPaths()  # loggers belong to the process


def show_slow_paths(shown: int) -> None:
    """From now on. shown: the level from which transformers' other messages are shown."""
    _slow_paths.shown = shown
    for name in ("transformers.models", "transformers.integrations"):
        logger = logging.getLogger(name)
        logger.setLevel(min(shown, logging.WARNING))
        logger.propagate = False
        if _slow_paths not in logger.handlers:
            logger.addHandler(_slow_paths)
