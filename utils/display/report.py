"""Where a run's numbers go: metrics.jsonl, dashboards, the bar or lines on the terminal."""

import sys
from pathlib import Path

from utils.devices import memory_of, peak_memory
from utils.display.curves import draw_curves
from utils.display.metrics import MetricsLog
from utils.display.progress import Progress, duration
from utils.display.throughput import Throughput, peak_flops
from utils.display.trackers import log_to_trackers, start_trackers
from utils.io.files import set_aside


class Report:
    """Made when the run starts or resumes, on all processes; only the first writes.

    flops: per token; launch: as doctor.launch_facts; settings: for dashboards; offset: bytes of metrics.jsonl
    that a resume keeps; publisher: its events are logged too."""

    def __init__(self, args, accelerator, steps, state, flops, launch, settings, offset, publisher):
        self.accelerator, self.steps, self.publisher = accelerator, steps, publisher
        main, lines, step = accelerator.is_main_process, Path(args.output_dir, "metrics.jsonl"), state["step"]
        if main and args.resume_from_checkpoint == "none" and lines.exists():
            set_aside(lines)
            print(f"run        begins anew: the previous metrics were moved to replaced-{lines.name}")
        self.metrics = MetricsLog(args.output_dir, offset, main, step, state.get("origin"), launch)
        project = Path(sys.modules[type(args).__module__].__file__).stem
        start_trackers(accelerator, project, args.output_dir, settings, step)
        peak = (peak_flops(launch["device"]) or 0) * launch["processes"]
        self.throughput = Throughput(steps, flops, peak or None, step=step, seconds=state["seconds"])
        self.progress = Progress(steps.last, step, main)
        publisher.say = self.progress.write  # above the bar

    def changes(self, step: int, changes: dict) -> None:
        """changes: {line: name of an event or None} for each difference from the run so far."""
        for line, event in changes.items():
            self.accelerator.print(line)
            if event:
                self.metrics.write({"step": step, "event": event})

    def rehearsed(self, seconds: float) -> None:
        """Print how long the run will take, and the memory of the rehearsed steps. seconds: of a step."""
        left = seconds * self.steps.tokens_before(self.steps.last) / self.steps.tokens_before(1)
        rate, device = f"{1000 * seconds:,.0f} ms a step", self.accelerator.device
        lines = [f"time       about {duration(left)} here, at {rate}; evaluations and saves come on top"]
        if peak := peak_memory(device):
            room = memory_of(device) / 2**30
            lines.append(f"memory     {peak / 2**30:,.1f} GiB at the peak of these steps, of {room:,.1f} GiB")
        self.accelerator.print(*lines, sep="\n")

    def training(self, step: int, state: dict, record: dict, skipped: list, epochs: dict) -> None:
        """Log a record of training; update skipped_updates and seen in `state`. skipped: for each of the last
        steps 1 if it was skipped, else 0; epochs: of each data set."""
        steps = self.steps
        for done, skip in enumerate(skipped, step - len(skipped) + 1):
            if skip:
                samples = [steps.rows_before(done - 1), steps.rows_before(done)]  # first, end
                self.metrics.write({"step": done, "event": "skipped_update", "positions": samples})
                state["skipped_updates"] += 1
        for name in [name for name, epoch in epochs.items() if epoch >= 1 and name not in state["seen"]]:
            self.metrics.write({"step": step, "event": "repeats", "source": name})
            self.progress.write(f"data       {name}: first epoch done, rows repeat")
            state["seen"].append(name)
        counts = {"step": step, "epoch": steps.epoch(step)}
        counts |= {f"epoch/{name}": epoch for name, epoch in epochs.items()}
        counts |= {"samples": steps.rows_before(step), "tokens": steps.tokens_before(step)}
        record = counts | record | {"skipped_updates": state["skipped_updates"]}
        self.log_record(record | self.throughput.measure(step))

    def show(self, samples: list[str]) -> None:
        """After an evaluation: show samples and redraw the curves."""
        for text in samples:
            self.progress.write(text)
        if self.accelerator.is_main_process:
            draw_curves(self.metrics.path.parent)

    def log_record(self, record: dict) -> None:
        """Log a record of training or evaluation with its step; 0-d tensors become numbers."""
        self.pushes(record["step"])
        scalars = {key: value.item() for key, value in record.items() if getattr(value, "ndim", 1) == 0}
        record = record | scalars
        self.metrics.write(record)
        log_to_trackers(self.accelerator, record)
        self.progress.update(record["step"], record, self.throughput.eta, self.publisher.status)

    def pushes(self, step: int) -> None:
        for event in self.publisher.poll():
            self.metrics.write({"step": step, **event})
