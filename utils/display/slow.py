"""What is told of a run's time: a guess before the first step; by the first steps how long the run will take
and the memory that it needs; while they last, why they are slow: a step without an end, threads that wait
for each other on busy cores."""

import threading
import time

import psutil
import torch

from utils.devices import forget_peak, granted_cores, memory_of, peak_memory
from utils.display.progress import duration

STEPS = 3  # that are watched and waited for
FIRST, AGAIN = 10, 30  # seconds until the first line about a step that has not ended, and between the others
NOTICED = 0.5  # seconds of a step that are worth a line
GRANTED = 0.6  # of a core for each thread: with less they wait for each other


def guess(flops: float, device: torch.device, precision: str) -> str:
    """A line on the time of so many FLOPs of a model, at half of the speed of matrix products, as measured
    here. precision: accelerate's word."""
    size, products = 512 if device.type == "cpu" else 2048, 8
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    matrix = torch.ones(size, size, dtype=kind, device=device)
    for times in (1, products):  # the first one loads kernels
        began = time.perf_counter()
        for _ in range(times):
            product = torch.mm(matrix, matrix)
        product[0, 0].item()  # waits for the device
    rate = products * 2 * size**3 / (time.perf_counter() - began)
    return f"time       roughly {duration(2 * flops / rate)}, by the speed of matrix products here"


class FirstSteps:
    """Watches the first steps: call `begin` before each and `end` after it, also after they are over.

    device: of the model; say: prints a line."""

    def __init__(self, device: torch.device, say):
        self.device, self.say = device, say
        self.seconds, self.over, self.start, self.watched = [], threading.Event(), 0.0, False
        forget_peak(device)

    def begin(self) -> None:
        self.start = time.perf_counter()
        if not self.watched:
            self.watched = True
            threading.Thread(target=self._wait, daemon=True).start()

    def end(self, left: int) -> None:
        """left: the number of steps after this one."""
        self.over.set()
        if len(self.seconds) == STEPS:
            return
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.seconds.append(time.perf_counter() - self.start)
        if len(self.seconds) == STEPS:
            self._tell(self.seconds[1:], left)  # the first one allocates and may compile

    def _tell(self, seconds: list[float], left: int) -> None:
        mean = sum(seconds) / len(seconds)
        left = f"{duration(mean * left)} left, at {1000 * mean:,.0f} ms a step"
        self.say(f"time       about {left}; evaluations and saves come on top")
        if peak := peak_memory(self.device):
            room = memory_of(self.device) / 2**30
            self.say(f"memory     {peak / 2**30:,.1f} GiB at the peak of these steps, of {room:,.1f} GiB")
        if self.device.type == "cpu" and (line := why_slow(min(seconds))):
            self.say(line)

    def _wait(self):
        due = FIRST
        while not self.over.wait(min(FIRST, 1)):
            if (spent := time.perf_counter() - self.start) >= due:
                self.say(f"step       the first one has taken {spent:.0f} s so far")
                due = spent + AGAIN


def why_slow(seconds: float) -> str | None:
    """A line if a step of so many seconds waits for busy cores. Small matrix products show it in a twentieth
    of a second: there, as in a step, the threads meet after each operation."""
    if seconds < NOTICED:
        return None
    matrix, wall, cpu = torch.ones(192, 192), time.perf_counter(), time.process_time()
    while (spent := time.perf_counter() - wall) < 0.05:
        torch.mm(matrix, matrix)
    threads, cores = torch.get_num_threads(), (time.process_time() - cpu) / spent
    if cores >= GRANTED * threads:
        return None
    load = f"load {psutil.getloadavg()[0]:.1f} of {granted_cores()}"
    remedy = "OMP_NUM_THREADS=1 may be faster" if threads > 1 else "other processes compute, too"
    return f"slow       {threads} thread{'s' * (threads > 1)} on {cores:.1f} busy cores ({load}): {remedy}"
