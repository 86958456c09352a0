"""nanoGPT's train.py and train_clm.py on the same .bin files: loss on all of val.bin against seconds.

    git clone https://github.com/karpathy/nanoGPT
    python -m tests.benchmarks.nanogpt --nanogpt nanoGPT --small --picture docs/nanogpt.png
    python -m tests.benchmarks.nanogpt --nanogpt nanoGPT        # a GPU, GPT-2 124M

The first takes half an hour on a CPU. The text is that of train_clm.py's default; --data takes a folder with
train.bin, val.bin and their tokenizer. The contenders run in turn, each in a separate process, on the same
number of tokens: nanoGPT; its model, AdamW and schedule in train_clm.py; the same model with train_clm.py's
optimizer and schedule; with --small also train_clm.py's default model, with a quarter of the steps of four
times the rows (AdamW learns more in small steps). Each saves models during training; one function computes
their losses. Seconds are of training alone. The seconds "to the goal" end where the line between two losses
passes nanoGPT's last one.
"""

import argparse
import importlib.util
import itertools
import math
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tests.benchmarks.measure import PROJECT, draw, print_table
from utils.display.metrics import read_metrics
from utils.flags import parse_args

POINTS = 10  # models that each contender saves
WARMUP, LAST_RATE = 0.04, 0.1  # of nanoGPT's schedule, as shares of the steps and of the peak


@dataclass
class Size:
    layers: int
    width: int
    heads: int
    block: int  # T
    rows: int  # of a micro-batch
    micro_batches: int  # of a step
    steps: int
    rate: float  # AdamW's peak


SMALL = Size(layers=4, width=128, heads=4, block=128, rows=8, micro_batches=1, steps=2000, rate=2e-3)
LARGE = Size(layers=12, width=768, heads=12, block=1024, rows=16, micro_batches=8, steps=1000, rate=6e-4)
Models = list[tuple[int, float, Path]]  # step, seconds of training, where the model is


def write_bins(folder: Path) -> None:
    """The rows of train_clm.py's default, one after the other, as nanoGPT's prepare.py writes ids."""

    import train_clm
    from data.load import load_rows

    folders = ["--cache_dir", str(folder / "cache"), "--output_dir", str(folder / "none")]
    args = parse_args(train_clm.TrainArgs, train_clm.PRESETS, folders)
    tokenizer, train, evals = load_rows(args)
    tokenizer.save_pretrained(folder)
    for name, rows in ("train", train), ("val", evals[""]):
        rows.ids(np.arange(len(rows))).astype(np.uint16).tofile(folder / f"{name}.bin")


def read_bin(path: Path) -> np.ndarray:
    return np.fromfile(path, np.uint16)


def run(command: list[str], folder: Path, log: Path, each_line=lambda line: None) -> None:
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with open(log, "w") as file, subprocess.Popen(command, cwd=folder, **pipe) as process:
        for line in process.stdout:
            file.write(line)
            each_line(line)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}\n{log.read_text()[-2000:]}")


def train_nanogpt(source: Path, data: Path, out: Path, size: Size) -> Models:
    """nanoGPT overwrites its checkpoint, so each is copied when the next line is printed."""
    work, gpu, every = out / "work", torch.cuda.is_available(), size.steps // POINTS
    (work / "data" / "text").mkdir(parents=True)
    for name in ("train.py", "model.py", "configurator.py"):
        (work / name).symlink_to(source / name)
    for name in ("train.bin", "val.bin"):
        (work / "data" / "text" / name).symlink_to(data / name)
    vocab_size = 1 + max(int(read_bin(data / name).max()) for name in ("train.bin", "val.bin"))
    (work / "data" / "text" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
    settings = dict(
        out_dir="out", dataset="text", eval_interval=every, eval_iters=1, log_interval=1, bias=True,
        n_layer=size.layers, n_head=size.heads, n_embd=size.width, block_size=size.block, dropout=0.0,
        batch_size=size.rows, gradient_accumulation_steps=size.micro_batches, learning_rate=size.rate,
        min_lr=LAST_RATE * size.rate, max_iters=size.steps, lr_decay_iters=size.steps,
        warmup_iters=int(WARMUP * size.steps), always_save_checkpoint=True, compile=gpu,
        device="cuda" if gpu else "cpu", dtype="bfloat16" if gpu else "float32",
    )  # fmt: skip
    times, saved = [], []

    def watch(line: str) -> None:
        if match := re.match(r"iter \d+: loss .*, time ([\d.]+)ms", line):
            if times and len(times) % every == 0:  # the checkpoint after len(times) steps
                saved.append((len(times), shutil.copy(work / "out" / "ckpt.pt", out / f"{len(times)}.pt")))
            times.append(float(match[1]) / 1000)

    flags = [f"--{name}={value}" for name, value in settings.items()]
    run([sys.executable, "train.py", *flags], work, out / "log.txt", watch)
    usual = statistics.median(times)  # replaces the time of steps that include an evaluation
    seconds = np.cumsum([usual if step % every == 0 else time for step, time in enumerate(times)])
    return [(step, float(seconds[step - 1]), Path(path)) for step, path in saved]


def train_ours(data: Path, out: Path, size: Size, flags: list[str]) -> Models:
    every, shards, log = size.steps // POINTS, data / "shards", out.with_suffix(".log")
    if not shards.exists():
        words = [data / "*.bin", shards, "--tokenizer_name", data]
        run([sys.executable, "-m", "data.convert", *map(str, words)], PROJECT, log)
    settings = dict(
        dataset_name=shards,
        block_size=size.block, per_device_train_batch_size=size.rows,
        gradient_accumulation_steps=size.micro_batches, max_train_steps=size.steps, logging_steps=every,
        eval_steps=size.steps, save_steps=every, save_total_limit=POINTS, eval_at_start=False, prompts="none",
        keywords="none", keytokens="none", output_dir=out, cache_dir=out / "cache",
    )  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    start = [sys.executable]
    if torch.cuda.is_available():
        config = PROJECT / "accelerate_configs" / "single_gpu.yaml"
        start += ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    run([*start, "train_clm.py", *words, *flags], PROJECT, log)
    models, seconds, tokens = [], 0.0, 0
    for line in read_metrics(out):
        if "tokens_per_second" in line:
            seconds += (line["tokens"] - tokens) / line["tokens_per_second"]
            tokens = line["tokens"]
            models.append((line["step"], seconds, out / f"checkpoints/step-{line['step']:08d}"))
    return models


def load_nanogpt(source: Path, path: Path):
    spec = importlib.util.spec_from_file_location("nanogpt_model", source / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model = module.GPT(module.GPTConfig(**checkpoint["model_args"]))
    model.load_state_dict({name.removeprefix("_orig_mod."): x for name, x in checkpoint["model"].items()})
    return lambda ids: model(ids, ids)[0]  # without targets it computes only the last position


def load_ours(path: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).eval()
    return lambda ids: model(ids).logits


@torch.no_grad()
def loss_of(logits_of, data: Path, block: int) -> float:
    """Mean cross-entropy over val.bin, in rows of T + 1 that overlap by one, so all ids but the first."""
    ids = torch.from_numpy(read_bin(data / "val.bin").astype(np.int64))
    rows, total = ids.unfold(0, block + 1, block), 0.0  # [n, T + 1]
    for part in rows.split(16):
        logits = logits_of(part[:, :-1]).float()
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return total / (len(rows) * block)


def seconds_to(goal: float, points: list[tuple[int, float, float]]) -> float:
    """Seconds until the line between two points (step, seconds, loss) passes the goal; nan if none does."""
    for (_, start, high), (_, end, low) in itertools.pairwise([(0, 0.0, math.inf), *points]):
        if low <= goal:
            return end - (end - start) * (goal - low) / (high - low)
    return math.nan


def contenders(size: Size, small: bool) -> dict[str, list[str]]:
    """{name: flags of train_clm.py}."""
    shape = f"n_layer={size.layers},n_embd={size.width},n_head={size.heads},activation_function=gelu"
    shape += ",resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
    model = ["--model_type", "gpt2", "--config_overrides", shape]
    adamw = f"--optimizer_type adamw --learning_rate {size.rate} --adam_beta2 0.95 --weight_decay 0.1 "
    adamw += "--lr_scheduler_type cosine_with_min_lr "
    adamw += f"--lr_scheduler_kwargs min_lr_rate={LAST_RATE} --num_warmup_steps {WARMUP}"
    muon = f"--learning_rate 1e-2 --muon_learning_rate 5e-3 --num_warmup_steps {WARMUP}"  # --preset gpt2's
    flags = {
        "ours, the same model and AdamW": [*model, *adamw.split()],
        "ours, the same model, Muon": [*model, *muon.split()],
    }
    return flags | ({"ours, our default": []} if small else {})


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout")
    parser.add_argument("--small", action="store_true", help="1.3 M parameters, rows of 128 tokens")
    parser.add_argument("--steps", type=int, help="instead of 2,000, or on a GPU 1,000")
    parser.add_argument("--data", type=Path, help="a folder with train.bin, val.bin and a tokenizer")
    parser.add_argument("--picture", help="a .png of loss against seconds")
    args = parser.parse_args()
    size, source, curves = SMALL if args.small else LARGE, args.nanogpt.absolute(), {}
    size.steps = args.steps or size.steps
    ours = contenders(size, args.small)
    with tempfile.TemporaryDirectory() as scratch:
        data = args.data.absolute() if args.data else Path(scratch, "data")
        if not args.data:
            write_bins(data)
        for name in ("nanoGPT's train.py", *ours):
            out = Path(scratch, re.sub(r"\W+", "-", name))
            out.mkdir()
            if name in ours:
                its_size = size if ours[name] else replace(size, rows=4 * size.rows, steps=size.steps // 4)
                models, load = train_ours(data, out, its_size, ours[name]), load_ours
            else:
                models = train_nanogpt(source, data, out, size)
                load = lambda path: load_nanogpt(source, path)  # noqa: E731
            curves[name] = [(step, at, loss_of(load(path), data, size.block)) for step, at, path in models]
            shutil.rmtree(out)
            print(name, curves[name], flush=True)
    lines = {name: dict(zip(("steps", "seconds", "loss"), curve[-1], strict=True))
             for name, curve in curves.items()}  # fmt: skip
    goal = next(iter(lines.values()))["loss"]
    for name, curve in curves.items():
        lines[name]["to goal"] = seconds_to(goal, curve)
    columns = {"steps": "steps", "seconds": "seconds of training", "loss": "loss, all of val.bin",
               "to goal": "seconds to the goal"}  # fmt: skip
    ratios = {"seconds": "ratio", "to goal": "ratio to the goal"}
    print_table(f"nanoGPT and train_clm.py, {size}", lines, columns, ratios)
    if args.picture:
        lines = {name: [[point[1:] for point in points]] for name, points in curves.items()}
        draw({"seconds of training": lines}, "loss, all of val.bin", args.picture)


if __name__ == "__main__":
    main()
