"""Loss on the complete validation set after a number of steps and seconds.

    python -m tests.benchmarks.learning --seeds 5 --picture docs/learning.png      # hours: complete runs
    python -m tests.benchmarks.learning --script mlm --contenders before default
    python -m tests.benchmarks.learning --contenders before "high: --learning_rate 4e-3" --seeds 1
    python -m tests.benchmarks.learning --unigram cache/rows-*/     # the score of token frequencies alone

Contenders run in turn, each in a separate process, seed after seed. They are names of CONTENDERS below, or
"name: flags". All seeds evaluate the same documents. Seconds are of training, without evaluations and saves.
"to the goal" means the first evaluation that reaches the final loss of the first contender.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.benchmarks.measure import PROJECT, draw, print_table
from utils.display.metrics import read_metrics

# The defaults before Muon, with every setting that matters.
BEFORE = {
    "clm": "--model_type gpt2 --optimizer_type adamw --learning_rate 2e-3 --num_warmup_steps 0.036 "
    "--lr_scheduler_type cosine --weight_decay 0.1 --adam_beta2 0.95 --max_train_steps 2800 "
    "--block_size 128 --per_device_train_batch_size 8 --vocab_size 4096 "
    "--config_overrides n_layer=4,n_embd=192,n_head=6,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
    "mlm": "--optimizer_type adamw --learning_rate 2e-3 --num_warmup_steps 0.0334 --lr_scheduler_type cosine "
    "--weight_decay 0.1 --adam_beta2 0.95 --max_train_steps 6000 --mlm_probability 0.15",
}
MUON = "--optimizer_type muon --muon_learning_rate 5e-3 --learning_rate 1e-2"  # from a small sweep
GPT2 = (  # the default before its shape was chosen by measurements
    "--preset gpt2 --per_device_train_batch_size 8 --max_train_steps 4000 --num_warmup_steps 0.036 "
    "--eval_steps 1000 --keytokens plt pd sk fit predict plot import numpy pandas array self"
)
CONTENDERS = {
    "clm": {
        "before": BEFORE["clm"],
        "muon, 60 % of the steps": f"{BEFORE['clm']} {MUON} --max_train_steps 1680",
        "gpt2, 8 rows": GPT2,
        "lfm2": "--model_type lfm2 --config_overrides "
        "full_attn_idxs=[1,3],conv_L_cache=4,block_auto_adjust_ff_dim=false",
        "default": "",
    },
    "mlm": {"before": BEFORE["mlm"], "default, 70 % of the steps": "--max_train_steps 4900", "default": ""},
}


def run_script(script: str, name: str, flags: list[str], seed: int, out: Path, common: list[str]) -> list:
    """Train. Returns a dict for each evaluation: step, seconds of training so far, loss over all validation
    rows, bits per byte or accuracy; the last one also has the processor seconds of the run."""
    places = ["--output_dir", str(out), "--cache_dir", str(out.parent / "cache"), "--seed", str(seed)]
    program = [str(PROJECT / f"train_{script}.py")]
    command = [sys.executable, *program, *flags, "--max_eval_samples", "0", *common, *places]
    log = out.with_suffix(".log")
    with open(log, "w") as file:
        process = subprocess.Popen(command, cwd=PROJECT, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"{shlex.join(command)}: status {status}\n{log.read_text()[-2000:]}")
    points, seconds, tokens = [], 0.0, 0
    for line in read_metrics(out):
        if "tokens_per_second" in line:
            seconds += (line["tokens"] - tokens) / line["tokens_per_second"]
            tokens = line["tokens"]
        if "loss/eval" in line:
            point = dict(step=line["step"], seconds=seconds, loss=line["loss/eval"])
            points.append(point | {key: line[key] for key in ("bits_per_byte", "accuracy") if line.get(key)})
    points[-1]["processor_seconds"] = usage.ru_utime + usage.ru_stime
    return points


def unigram(folder: Path, T: int) -> str:
    """The score of a model that knows only the token frequencies, on the validation rows of a folder of
    prepared tokens. Training has to beat it."""
    train, validation = (np.concatenate([np.load(file) for file in sorted(folder.glob(f"{split}-*.npy"))])
                         for split in ("train", "validation"))  # fmt: skip
    predicted = validation[: len(validation) // T * T].reshape(-1, T)[:, 1:].ravel()
    size = int(max(train.max(), validation.max())) + 1
    counts = np.bincount(train[: len(train) // T * T], minlength=size) + 1  # add-one smoothing
    loss = -np.log(counts / counts.sum())[predicted].mean()
    share = np.bincount(predicted).max() / len(predicted)
    return (f"{folder}: loss {loss:.4f}, perplexity {math.exp(loss):.1f} on {len(predicted):,} tokens; "
            f"always guessing the most frequent token is right {share:.1%} of the time")  # fmt: skip


def summary(curves: dict[str, list[list[dict]]]) -> dict[str, dict]:
    """{contender: numbers of the table}, means over seeds. curves: {contender: a curve per seed}."""
    first, lines = next(iter(curves.values())), {}
    for name, runs in curves.items():
        ends = [curve[-1] for curve in runs]
        line = {key: statistics.mean(end[key] for end in ends) for key in ends[0]}
        if len(runs) > 1:  # paired by seed, as rows come in the same order
            pairs = [end["loss"] - other[-1]["loss"] for end, other in zip(ends, first, strict=True)]
            line["spread"] = statistics.stdev(end["loss"] for end in ends)
            line["change"] = statistics.mean(pairs)
            line["error"] = statistics.stdev(pairs) / math.sqrt(len(pairs))
        reached = [next((point for point in curve if point["loss"] <= goal[-1]["loss"]), None)
                   for curve, goal in zip(runs, first, strict=True)]  # fmt: skip
        if all(reached):
            line["goal_steps"] = statistics.mean(point["step"] for point in reached)
            line["goal_seconds"] = statistics.mean(point["seconds"] for point in reached)
        lines[name] = line
    return lines


def main():
    show = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show)
    parser.add_argument("--script", choices=["clm", "mlm"], default="clm")
    parser.add_argument("--contenders", nargs="*", help='names of this file, or "name: flags"')
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--flags", default="", help="of every contender, such as a smaller size")
    parser.add_argument("--output_dir", help="keeps runs and curves.json; what is there is not run again")
    parser.add_argument("--picture", help="a .png of loss against steps and seconds")
    parser.add_argument("--unigram", nargs="+", type=Path, help="folders of prepared tokens; no runs")
    args = parser.parse_args()
    if args.unigram:
        return print(*[unigram(folder, 128) for folder in args.unigram], sep="\n")
    known, chosen = CONTENDERS[args.script], {}
    for item in args.contenders or known:
        name, _, flags = item.partition(":")
        if ":" not in item and name not in known:
            parser.error(f"{name}: no such contender; known: {', '.join(known)}")
        chosen[name] = flags if ":" in item else known[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.output_dir or scratch).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        curves = {name: [] for name in chosen}
        for seed in range(1, args.seeds + 1):
            for name, flags in chosen.items():
                file = folder / f"{args.script}-{name}-{seed}.json"
                if not file.exists():
                    words, common = shlex.split(flags), shlex.split(args.flags)
                    points = run_script(args.script, name, words, seed, file.with_suffix(""), common)
                    file.write_text(json.dumps(points))
                curves[name].append(json.loads(file.read_text()))
    print_table(
        f"train_{args.script}.py {args.flags}, {args.seeds} seeds, means",
        summary(curves),
        {"step": "steps", "seconds": "seconds of training", "processor_seconds": "processor seconds in all",
         "loss": "loss, whole validation set", "spread": "its standard deviation over seeds",
         "change": "minus the first line's, of the same seeds", "error": "standard error of that",
         "bits_per_byte": "bits per byte", "accuracy": "hidden tokens found",
         "goal_steps": "steps to the goal", "goal_seconds": "seconds to the goal"},
        {"processor_seconds": "processor seconds ratio", "bits_per_byte": "bits ratio",
         "goal_seconds": "seconds ratio, goal"},
    )  # fmt: skip
    if args.picture:
        panels = {label: {name: [[(point[x], point["loss"]) for point in curve[1:]] for curve in runs]
                          for name, runs in curves.items()}
                  for x, label in (("step", "steps"), ("seconds", "seconds of training"))}  # fmt: skip
        draw(panels, "loss, all validation rows", args.picture)


if __name__ == "__main__":
    main()
