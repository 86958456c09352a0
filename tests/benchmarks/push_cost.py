"""What pushing costs: step times of train_clm.py without pushes, and on a network so slow that one push takes
ten save intervals, in turn.

    python -m tests.benchmarks.push_cost

The server runs in this process, the training in others. Expect a ratio within 2 % where cores are free; on a
busy machine raise --rounds and look at the spread of the rounds first.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.measure import print_table
from tests.hub_server import Fault, HubServer
from tests.runs import PROJECT, TINY, arguments, write_corpus

SIZES = "num_hidden_layers=2,hidden_size=128,num_attention_heads=4,num_key_value_heads=4,head_dim=32"


def step_seconds(hub: HubServer, folder: Path, args: argparse.Namespace, push: bool) -> list[float]:
    """Seconds of each step, evaluations and saves left out, the first ones too."""
    flags = {
        **TINY, "config_overrides": SIZES, "dataset_name": folder / "corpus.jsonl", "block_size": 128,
        "cache_dir": folder / "cache", "output_dir": folder / ("pushing" if push else "quiet"),
        "max_train_steps": args.steps, "save_steps": args.save_steps, "eval_steps": args.steps,
        "push_to_hub": push, "resume_from_checkpoint": "none",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "train_clm.py", *arguments(flags)], cwd=PROJECT, env=hub.env(folder / "home"),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (flags["output_dir"] / "metrics.jsonl").read_text().splitlines())
    tokens = flags["per_device_train_batch_size"] * flags["block_size"]
    return [tokens / line["tokens_per_second"] for line in lines if line.get("tokens_per_second")][10:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save_steps", type=int, default=20)
    parser.add_argument("--slowness", type=float, default=10, help="save intervals that one push takes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--xet", action="store_true", help="upload as default installs do, not through LFS")
    parser.add_argument("--append", help="a file that the table is appended to, such as README.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_corpus(folder / "corpus.jsonl")
        with HubServer(folder / "server", xet=args.xet) as hub:
            interval = statistics.median(step_seconds(hub, folder, args, push=False)) * args.save_steps
            rate = (folder / "quiet/model.safetensors").stat().st_size / (args.slowness * interval)
            hub.faults.append(Fault("PUT /lfs|POST /xet/v1/xorbs", "slow", rate=rate, times=float("inf")))
            print(f"a save every {interval:.2f} s, uploads at {rate / 1e6:.2f} MB/s", flush=True)
            rounds = []
            for i in range(args.rounds):
                pushed = len(hub.commits("ada/pushing"))
                quiet = statistics.median(step_seconds(hub, folder, args, push=False))
                pushing = statistics.median(step_seconds(hub, folder, args, push=True))
                pushed = len(hub.commits("ada/pushing")) - pushed
                rounds.append((1e3 * quiet, 1e3 * pushing, pushing / quiet, pushed))
                saves = -(-args.steps // args.save_steps)
                print(f"round {i + 1}: median step {1e3 * quiet:.2f} ms, {1e3 * pushing:.2f} ms pushing; "
                      f"{pushed} revisions of {saves} saves", flush=True)  # fmt: skip
            last = hub.commits("ada/pushing")[-1]["title"]
    quiet, pushing, ratio, pushed = (statistics.median(column) for column in zip(*rounds, strict=True))
    print_table(
        f"{args.steps} steps, one push takes {args.slowness:g} save intervals, medians of {args.rounds} "
        f"rounds; last revision: {last}",
        {"quiet": {"ms": quiet}, "pushing": {"ms": pushing, "ratio": ratio, "pushed": pushed}},
        {"ms": "median step ms", "ratio": "ratio within a round", "pushed": "revisions"}, {}, args.append,
    )  # fmt: skip


if __name__ == "__main__":
    main()
