"""Our step against HF Trainer's and a plain loop's: same model, rows, batch, schedule and clipping.

    python -m tests.benchmarks.throughput --contenders trainer ours --steps 8
    python -m tests.benchmarks.throughput --vocab_size 8192 --contenders plain trainer ours ours-bf16
    python -m tests.benchmarks.throughput --command peer="python other.py --steps 50" --command_tokens 51200

Each contender runs in a process of its own, in turn, --rounds times; the table holds medians over the rounds
and ratios to the first line. Contenders: ours, trainer (at its defaults), tuned (fused AdamW, tf32,
torch_compile), plain (forward with labels,
backward, clip, torch.optim.AdamW), each also with -bf16. A --command is timed as a whole, its start included.
"""

import argparse
import json
import sys
import tempfile

from tests.benchmarks.measure import ADAMW, Clock, T, interleaved, peak_memory, print_table

EVAL_ROWS = 64


# ---- One contender, in its own process


def contender(kind: str, args) -> dict:
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    bf16, kind = kind.endswith("-bf16"), kind.removesuffix("-bf16")
    # Words with Zipf's frequencies: something to learn, and the same for everyone.
    draws = (
        np.random.default_rng(0).zipf(1.3, (args.steps * args.batch_size + EVAL_ROWS, args.block_size))
        % args.vocab_size
    )
    held_out, rows = torch.from_numpy(draws[:EVAL_ROWS]), draws[EVAL_ROWS:]
    set_seed(0)
    config = AutoConfig.for_model(
        "gpt2", n_layer=args.layers, n_embd=args.width, n_head=args.width // 64,
        n_positions=args.block_size,
        vocab_size=args.vocab_size,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    clock = Clock()
    {"ours": train_ours, "trainer": train_with_trainer, "tuned": train_tuned, "plain": train_plainly}[kind](
        model, rows, args, bf16, clock
    )
    report = clock.report(args.batch_size * args.block_size)
    peak = peak_memory() / 2**20  # before the evaluation, which is not the subject
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        losses = [
            model(batch.to(device), labels=batch.to(device)).loss.item() for batch in held_out.split(8)
        ]
    return report | {"mib": peak, "eval_loss": sum(losses) / len(losses)}


def train_ours(lm, rows, args, bf16, clock):
    import numpy as np
    import torch
    from accelerate import Accelerator

    from data.batches.rows import PackedRows
    from data.load import train_loader
    from utils.learning.kernels import use_fast_products, use_one_kernel_gelu
    from utils.learning.losses import CausalLMLoss
    from utils.learning.model import to_device
    from utils.learning.optim import Means, UpdateGuard, build_optimizer, build_schedule

    settings = argparse.Namespace(per_device_train_batch_size=args.batch_size, seed=0)
    accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no")
    use_fast_products(args.block_size)
    use_one_kernel_gelu(lm)
    model = CausalLMLoss(lm)
    to_device(model, accelerator)
    optimizer = build_optimizer(model, ADAMW)
    schedule = build_schedule(optimizer, ADAMW, args.steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    guard, means = UpdateGuard(accelerator, optimizer), Means(accelerator, "loss/train", "loss/train_plain")

    def update(batch):  # that of train_clm.py, without row weights
        loss, row_losses = model(batch)
        accelerator.backward(loss)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        skipped = guard.check(grad_norm)
        means.add(torch.stack([loss.detach(), row_losses.mean()]), skipped)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        ids = rows.astype(np.uint16 if args.vocab_size <= 2**16 else np.uint32).ravel()
        np.save(f"{folder}/rows.npy", ids)
        ours = PackedRows([np.load(f"{folder}/rows.npy", mmap_mode="r")], args.block_size)
        batches = accelerator.prepare(train_loader(ours, settings, 0, args.steps * args.batch_size))
        clock.start()
        for batch in batches:
            update(batch)
            clock.step()


def train_with_trainer(lm, rows, args, bf16, clock, **more):
    """rows: what is read and predicted, or a dictionary of both. more: TrainingArguments."""
    import torch
    from datasets import Dataset
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
    )

    class Steps(TrainerCallback):
        def on_train_begin(self, *_, **__):
            clock.start()

        def on_step_end(self, *_, **__):
            clock.step()

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_train_batch_size=args.batch_size, max_steps=args.steps, learning_rate=1e-3,
            weight_decay=0.1, warmup_steps=2, lr_scheduler_type="linear", max_grad_norm=1.0, bf16=bf16,
            save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(), **more,
        )  # fmt: skip
        columns = rows if isinstance(rows, dict) else {"input_ids": rows, "labels": rows}
        data = Dataset.from_dict(columns)
        Trainer(
            lm, settings, train_dataset=data, data_collator=default_data_collator, callbacks=[Steps()]
        ).train()


def train_tuned(lm, rows, args, bf16, clock):
    import torch

    torch.set_float32_matmul_precision("high")  # what tf32=True does, which a CPU refuses
    train_with_trainer(lm, rows, args, bf16, clock, optim="adamw_torch_fused", torch_compile=True)


def train_plainly(lm, rows, args, bf16, clock):
    import torch
    from transformers import get_linear_schedule_with_warmup

    device = str(torch.accelerator.current_accelerator() or "cpu")
    lm.to(device)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, args.steps)
    clock.start()
    for batch in torch.from_numpy(rows).split(args.batch_size):
        batch = batch.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = lm(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.step()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contenders", nargs="*", default=["trainer", "ours"])
    parser.add_argument("--vocab_size", type=int, default=50257)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=8, help="rows")
    parser.add_argument("--block_size", type=int, default=T, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--command", action="append", default=[], metavar="NAME=COMMAND LINE", help="timed beside ours"
    )
    parser.add_argument(
        "--command_tokens", type=int, default=0, help="tokens that each --command trains on"
    )
    parser.add_argument("--append", help="a file that the table is appended to, such as README.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(contender(args.one, args)))
        return
    shape = [
        f"--{name}={getattr(args, name)}"
        for name in ("vocab_size", "layers", "width", "batch_size", "block_size", "steps")
    ]
    commands = {
        name: [sys.executable, "-m", "tests.benchmarks.throughput", "--one", name, *shape]
        for name in args.contenders
    }
    commands |= {
        name: ["sh", "-c", line] for name, line in (item.split("=", 1) for item in args.command)
    }
    lines = interleaved(commands, args.rounds)
    for name, found in lines.items():
        if name not in args.contenders and args.command_tokens:
            found["tokens_per_second"] = args.command_tokens / found["wall"]
    print_table(
        f"GPT-2 {args.layers} x {args.width}, vocabulary {args.vocab_size}, {args.batch_size} rows of "
        f"{args.block_size} tokens, {args.steps} steps, medians of {args.rounds} runs in turn",
        lines,
        {
            "tokens_per_second": "tokens/s", "cpu_per_step": "CPU s per step", "cpu": "CPU s of the run",
            "mib": "peak MiB", "first_step": "first step s", "to_first_step": "start to first step s",
            "eval_loss": "validation loss",
        },
        {"tokens_per_second": "tokens/s ratio", "cpu_per_step": "CPU ratio", "mib": "memory ratio"},
        args.append,
    )  # fmt: skip


if __name__ == "__main__":
    main()
