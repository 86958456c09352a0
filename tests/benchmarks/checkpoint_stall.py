"""How long training stands still for a checkpoint, and how long writing takes.

    python -m tests.benchmarks.checkpoint_stall --gigabytes 1.5 --folder /where/checkpoints/go

Background saves beside copying the same bytes once in memory, a foreground save beside `dd conv=fsync` of
the same bytes; medians of some rounds, each pair in turn.
"""

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator

from tests.benchmarks.measure import print_table
from utils.state.checkpoints import Checkpoints


def seconds(function, *args):
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--append", help="a file that the table is appended to, such as README.md")
    args = parser.parse_args()

    accelerator = Accelerator()
    device = accelerator.device
    layers = max(1, round(args.gigabytes * 1e9 / 12 / 1024**2))  # 3 float32 tensors of 1024 x 1024 for each
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():  # as after a step, without taking one
        moments = {"exp_avg": torch.rand_like(parameter), "exp_avg_sq": torch.rand_like(parameter)}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    tensors = [p.detach() for p in model.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    size = sum(tensor.nbytes for tensor in tensors)
    target = [torch.empty(t.shape, dtype=t.dtype, pin_memory=device.type == "cuda") for t in tensors]

    def copy():
        for there, here in zip(target, tensors, strict=True):
            there.copy_(here, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    seconds(copy)  # into pages that the system must find first
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    steps = SimpleNamespace(last=args.rounds, rows_before=lambda step: step)
    things = dict(model=model, optimizer=optimizer)

    def checkpoints(name):
        settings = SimpleNamespace(output_dir=str(folder / name), save_total_limit=1, eval_only=False)
        return Checkpoints(settings, accelerator, steps, "", [], **things)

    background, foreground = checkpoints("background"), checkpoints("foreground")
    first = {"seconds": seconds(background.save, 0)}
    background.wait()
    dd = ["dd", "if=/dev/zero", f"of={folder}/dd", "bs=16M", f"count={size >> 24}", "conv=fsync"]
    rows = []
    for step in range(1, args.rounds + 1):
        copied, stalled = seconds(copy), seconds(background.save, step)
        background.wait()
        written = seconds(foreground.save, step, True)
        shutil.rmtree(folder / "foreground")
        rows.append((copied, stalled, seconds(lambda: subprocess.run(dd, capture_output=True)), written))
        (folder / "dd").unlink()
    shutil.rmtree(folder)
    copied, stalled, dumped, written = (statistics.median(column) for column in zip(*rows, strict=True))
    print_table(
        f"A checkpoint of {size / 1e9:.2f} GB, {len(tensors)} tensors, medians of {args.rounds} rounds",
        {
            "copy in memory": {"seconds": copied},
            "first background save": first | {"copy": first["seconds"] / copied},
            "background save": {"seconds": stalled, "copy": stalled / copied},
            "dd with fsync": {"seconds": dumped},
            "foreground save": {"seconds": written, "dd": written / dumped},
        },
        {"seconds": "training stands still, s", "copy": "over the copy", "dd": "over dd"}, {}, args.append,
    )  # fmt: skip


if __name__ == "__main__":
    main()
