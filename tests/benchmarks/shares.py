"""Muon's iteration on several CPU processes: processor seconds of each, and what it is sent.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.shares --processes 1 2 4

Each process has the matrices of a GPT-2 and the same gradients, in float32. Seconds are those of the process
with the most, in the iteration alone (without sending), and its share of those of one process.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from tests import forked
from tests.benchmarks.measure import machine


def worker(folder, args):
    import torch
    import torch.distributed as dist

    from tests.collectives import Collectives
    from utils.learning import muon

    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    width, seconds, iterate = args.width, [], muon.orthogonalize

    def timed(stack):
        start = time.process_time()
        result = iterate(stack)
        seconds.append(time.process_time() - start)
        return result

    muon.orthogonalize, muon.PRECISION["cpu"] = timed, torch.float32
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)] * args.layers
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = muon.MuonAdamW([{"params": weights, "momentum": 0.95, "weight_decay": 0.0}], lr=0.01)
    for _ in range(1 + args.steps):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        with Collectives() as counted:
            optimizer.step()
    each, sent = len(seconds) // (1 + args.steps), sum(size for _, size in counted.open[0].values())
    expected = 4 * sum(weight.numel() for weight in weights) if dist.is_initialized() else 0
    assert sent == expected, (sent, expected)
    found = {"seconds": sum(seconds[each:]) / args.steps, "sent": sent}
    Path(folder, f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, args)
    print(f"{args.layers} layers of width {args.width}. {machine()}\n")
    print("| processes | processor seconds of the iteration | of one's | MB of updates |\n|---|---|---|---|")
    shape, alone = ["--layers", args.layers, "--width", args.width, "--steps", args.steps], None
    for n in args.processes:
        with tempfile.TemporaryDirectory() as folder:
            words = ["--worker", folder, *shape]
            done = forked.run("tests.benchmarks.shares", words, n)
            assert done.returncode == 0, done.stderr[-2000:]
            found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(n)]
        most = max(each["seconds"] for each in found)
        alone = alone or most
        print(f"| {n} | {most:.3f} | {most / alone:.2f} | {found[0]['sent'] / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
