"""One process compared with several at the same rows per process, and the bytes that they send.

    python -m tests.benchmarks.scaling --processes 1 2 --steps 6
    python -m tests.benchmarks.scaling --optimizer_type muon --processes 1 2 4 --layers 6 --width 384

A communication hook of DistributedDataParallel counts the gradient bytes of an update: in theory 4 per
parameter in float32, independent of gradient accumulation. Processes share this machine's cores. With Muon it
also measures the main process's processor seconds of the iteration per step, without communication.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from types import SimpleNamespace

from tests.benchmarks.measure import ADAMW, Clock, T, interleaved, print_table


def worker(args) -> dict | None:
    import torch
    from accelerate import Accelerator
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    from utils.learning import muon
    from utils.learning.losses import CausalLMLoss
    from utils.learning.optim import build_optimizer

    set_seed(0)
    iterate, iteration = muon.orthogonalize, 0.0

    def timed(stack):
        nonlocal iteration
        start = time.process_time()
        result = iterate(stack)
        iteration += time.process_time() - start
        return result

    muon.orthogonalize = timed
    accelerator = Accelerator()
    config = AutoConfig.for_model(
        "gpt2", n_layer=args.layers, n_embd=args.width, n_head=args.width // 64, n_positions=T,
        vocab_size=args.vocab_size, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    lm = AutoModelForCausalLM.from_config(config)
    model = CausalLMLoss(lm).to(accelerator.device)
    settings = SimpleNamespace(**{**vars(ADAMW), "optimizer_type": args.optimizer_type})
    model, optimizer = accelerator.prepare(model, build_optimizer(model, settings))
    sent = 0

    def count(group, bucket):
        nonlocal sent
        sent += bucket.buffer().nbytes
        return allreduce_hook(group, bucket)

    if accelerator.num_processes > 1:
        model.register_comm_hook(None, count)
    clock = Clock()
    clock.start()
    for _ in range(args.steps):
        for left in reversed(range(args.accumulation)):
            input_ids = torch.randint(args.vocab_size, (args.batch_size, T), device=accelerator.device)
            with accelerator.no_sync(model) if left else nullcontext():
                accelerator.backward(model({"input_ids": input_ids})[0] / args.accumulation)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
    accelerator.wait_for_everyone()
    report = clock.report(args.batch_size * T * args.accumulation * accelerator.num_processes)
    rank, theory = accelerator.process_index, 4 * lm.num_parameters() * (accelerator.num_processes > 1)
    accelerator.end_training()
    report |= {"sent": sent / args.steps / 1e6, "theory": theory / 1e6}
    report |= {"iteration": iteration / args.steps} if iteration else {}
    return report if rank == 0 else None


SHAPE = {"vocab_size": 8192, "layers": 4, "width": 256, "batch_size": 8, "accumulation": 1, "steps": 8}


def main():
    show = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show)
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--optimizer_type", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.report:  # torch.distributed.run mixes the processes' output, so a worker reports in a file
        if report := worker(args):
            with open(args.report, "w", encoding="utf-8") as file:
                json.dump(report, file)
        return
    flags = [f"--{name}={getattr(args, name)}" for name in ("optimizer_type", *SHAPE)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        commands = {}
        for n in args.processes:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
            module = ["-m", "tests.benchmarks.scaling", *flags, "--report", f"{folder}/{n}.json"]
            line = " ".join([*launch, *module])
            commands[f"{n} processes"] = ["sh", "-c", f"{line} >&2 && cat {folder}/{n}.json"]
        if not _has_gpu():
            os.environ["ACCELERATE_USE_CPU"] = "true"
        lines = interleaved(commands, args.rounds)
    print_table(
        f"GPT-2 {args.layers} x {args.width}, vocabulary {args.vocab_size}, {args.batch_size} rows of {T} "
        f"tokens per process, accumulation {args.accumulation}, medians of {args.rounds} runs in turn",
        lines,
        {
            "tokens_per_second": "tokens/s", "cpu": "CPU s of the run",
            "mib": "peak MiB of the largest process",
            "sent": "gradient MB per update", "theory": "in theory", "iteration": "CPU s of Muon's iteration",
        },
        {"tokens_per_second": "tokens/s ratio", "mib": "memory ratio", "iteration": "iteration ratio"},
    )  # fmt: skip


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
