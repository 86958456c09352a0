"""What grows with the number of processes: seconds and messages of each part of a run.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.growth --processes 2 4 8 16

A tiny model trains on so many CPU processes, is continued by as many from its first checkpoint, and by half
as many. Rows per step stay the same. Milliseconds are those of a processor, as the processes share its cores:
the mean of all processes, and the main one's, which alone writes files. Messages are the collectives that
each process takes part in, bytes what it gets by them. Without imports, which are those of one process.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

from tests.benchmarks.measure import machine
from tests.collectives import counted_run
from tests.runs import TINY, write_corpus

PHASES = {
    "rows": "open and prepare rows (they are there)", "lock": "lock the folder",
    "load": "look for a checkpoint", "start": "start", "evaluation": "evaluate", "stop": "agree on a stop",
    "step": "a step", "log": "log", "save": "save, the last time", "end": "end",
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--fsdp", action="store_true", help="instead of DDP")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        columns = {n: measured(Path(folder), n, args) for n in args.processes}
    kind = "FSDP" if args.fsdp else "DDP"
    print(f"{kind}, processor ms of a process (of the main one), messages, bytes. {machine()}\n")
    print("| | " + " | ".join(f"{n} processes" for n in columns) + " |\n" + "|---" * (1 + len(columns)) + "|")
    for name in next(iter(columns.values())):
        print(f"| {name} | " + " | ".join(found[name] for found in columns.values()) + " |", flush=True)


def measured(folder: Path, processes: int, args) -> dict[str, str]:
    rows = max(args.processes)
    output, again = folder / f"run-{processes}", folder / f"again-{processes}"
    flags = TINY | {
        "dataset_name": folder / "corpus.jsonl", "cache_dir": folder / "cache", "output_dir": output,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": rows // processes,
        "max_train_steps": args.steps, "save_steps": args.steps // 2, "eval_steps": args.steps,
        "logging_steps": args.steps, "per_device_eval_batch_size": 4,
    }  # fmt: skip
    if not (folder / "corpus.jsonl").exists():
        write_corpus(folder / "corpus.jsonl")
        counted_run(folder / "cached", "train_clm", flags | {"output_dir": folder / "first"}, 1)
    first = counted_run(folder / f"first-{processes}", "train_clm", flags, processes, args.fsdp)
    cells = {told: cell(first, phase) for phase, told in PHASES.items()}
    shutil.rmtree(output / f"checkpoints/step-{args.steps:08d}")
    shutil.copytree(output, again)
    same = counted_run(folder / f"same-{processes}", "train_clm", flags, processes, args.fsdp)
    half = flags | {"output_dir": again, "gradient_accumulation_steps": 2 * rows // processes}
    sharded = args.fsdp and processes > 2  # else by one process, whole
    fewer = counted_run(folder / f"half-{processes}", "train_clm", half, processes // 2, sharded)
    cells["load by as many"], cells["load by half as many"] = cell(same, "load"), cell(fewer, "load")
    return cells | {"all of the run": cell(first, "all", messages=False)}


def cell(records, phase, messages=True) -> str:
    """The median of the phase's times, without the first if there are some."""
    found = [[record for record in of_one if record[0] == phase] for of_one in records]
    found = [of_one[1:] if len(of_one) > 2 else of_one for of_one in found]
    own = [1e3 * statistics.median(record[2] for record in of_one) for of_one in found if of_one]
    text = f"{statistics.mean(own):,.1f} ({own[0]:,.1f})"
    calls, sent = (sum(numbers[i] for numbers in found[0][-1][3].values()) for i in (0, 1))
    return text + (f", {calls}, {sent:,}" if messages and calls else "")


if __name__ == "__main__":
    main()
