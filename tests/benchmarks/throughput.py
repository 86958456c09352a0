"""A training step of ours, HF Trainer's and a plain loop's, with the same model, rows, batch and schedule.

    python -m tests.benchmarks.throughput --contenders trainer ours --steps 8
    python -m tests.benchmarks.throughput --vocab_size 8192 --contenders plain trainer ours ours-bf16
    python -m tests.benchmarks.throughput --model_type modernbert --block_size 1024 --batch_size 2
    python -m tests.benchmarks.throughput --command peer="python other.py --steps 50" --command_tokens 51200

Each contender runs in a separate process, in turn, --rounds times. The table has medians over the rounds and
ratios to the first line. Contenders: ours, trainer (at its defaults), tuned (fused AdamW, tf32,
torch_compile), plain (forward with labels, backward, clip, torch.optim.AdamW), each also with -bf16. Masked
models predict --mlm_probability of the tokens: ours projects only these, the others all positions. The time
of a --command includes its start.
"""

import argparse
import json
import sys
import tempfile

from tests.benchmarks.measure import ADAMW, Clock, T, interleaved, peak_memory, print_table

EVAL_ROWS = 64
SHAPE = {"vocab_size": 50257, "layers": 4, "width": 256, "batch_size": 8, "block_size": T, "steps": 12}


def build(args):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    heads, T = args.width // 64, args.block_size
    if args.model_type == "gpt2":
        config = AutoConfig.for_model(
            "gpt2", n_layer=args.layers, n_embd=args.width, n_head=heads, n_positions=T, resid_pdrop=0.0,
            vocab_size=args.vocab_size, bos_token_id=0, eos_token_id=0, embd_pdrop=0.0, attn_pdrop=0.0,
            use_cache=False,
        )  # fmt: skip
        return AutoModelForCausalLM.from_config(config)
    special = {"intermediate_size": args.width * 3 // 2, "cls_token_id": 0, "sep_token_id": 2}
    if args.model_type == "roberta":
        special = {"intermediate_size": 4 * args.width, "hidden_dropout_prob": 0.0}
        special |= {"attention_probs_dropout_prob": 0.0}
    config = AutoConfig.for_model(
        args.model_type, vocab_size=args.vocab_size, num_hidden_layers=args.layers, hidden_size=args.width,
        num_attention_heads=heads, max_position_embeddings=T + 2, bos_token_id=0, pad_token_id=1,
        eos_token_id=2, **special,
    )  # fmt: skip
    return AutoModelForMaskedLM.from_config(config)


def columns(rows, args) -> dict:
    """input_ids and labels, int64 [rows, T]; for masked models also slots and slot_labels [rows, K]."""
    import torch

    ids = torch.from_numpy(rows)
    if args.model_type == "gpt2":
        return {"input_ids": ids, "labels": ids}
    ids = 5 + ids % (args.vocab_size - 5)  # 4 is the mask
    slots = torch.rand(ids.shape).argsort(1)[:, : int(args.mlm_probability * ids.shape[1])].sort(1).values
    hidden = ids.gather(1, slots)
    labels = torch.full_like(ids, -100).scatter(1, slots, hidden)
    return {"input_ids": ids.scatter(1, slots, 4), "labels": labels, "slots": slots, "slot_labels": hidden}


def contender(kind: str, args) -> dict:
    """Train in this process. Returns the measurements."""
    import numpy as np
    import torch
    from transformers import set_seed

    bf16, kind = kind.endswith("-bf16"), kind.removesuffix("-bf16")
    # Tokens with Zipf's frequencies: learnable, and the same for all contenders.
    shape = args.steps * args.batch_size + EVAL_ROWS, args.block_size
    draws = np.random.default_rng(0).zipf(1.3, shape) % args.vocab_size
    set_seed(0)
    data, model, clock = columns(draws, args), build(args), Clock()
    held_out = {name: data[name][:EVAL_ROWS] for name in ("input_ids", "labels")}
    rows = {name: column[EVAL_ROWS:] for name, column in data.items()}
    train = {"ours": train_ours, "trainer": train_with_trainer, "tuned": train_tuned, "plain": train_plainly}
    train[kind](model, rows, args, bf16, clock)
    report = clock.report(args.batch_size * args.block_size)
    peak = peak_memory() / 2**20  # before the evaluation
    model.eval()
    with torch.no_grad():
        losses = [model(**batch).loss.item() for batch in batches(held_out, 8, model.device)]
    return report | {"mib": peak, "eval_loss": sum(losses) / len(losses)}


def batches(rows, size, device):
    for start in range(0, len(rows["input_ids"]), size):
        yield {name: column[start : start + size].to(device) for name, column in rows.items()}


def train_ours(lm, rows, args, bf16, clock):
    import numpy as np
    import torch
    from accelerate import Accelerator

    from data.batches.rows import PackedRows
    from data.load import train_loader
    from utils.learning.kernels import use_fast_products, use_one_kernel_gelu
    from utils.learning.losses import CausalLMLoss, MaskedLMLoss
    from utils.learning.model import to_device
    from utils.learning.optim import Means, UpdateGuard, build_optimizer, build_schedule

    settings = argparse.Namespace(per_device_train_batch_size=args.batch_size, seed=0)
    accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no")
    use_fast_products(args.block_size)
    use_one_kernel_gelu(lm)
    masked = "slots" in rows
    model = MaskedLMLoss(lm) if masked else CausalLMLoss(lm)
    to_device(model, accelerator)
    optimizer = build_optimizer(model, ADAMW)
    schedule = build_schedule(optimizer, ADAMW, args.steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    names = ["loss/train_mlm"] if masked else ["loss/train", "loss/train_plain"]
    guard, means = UpdateGuard(accelerator, optimizer), Means(accelerator, *names)

    def update(batch):  # the scripts' step without row weights, of one micro-batch
        if masked:
            losses = model(batch)["loss_sums"] / (batch["slot_labels"] != -100).sum()
            loss = losses.sum()
        else:
            loss, row_losses = model(batch)
            losses = torch.stack([loss.detach(), row_losses.mean()])
        accelerator.backward(loss)
        skipped = guard.check(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        means.add(losses, skipped)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        ours = batches(rows, args.batch_size, accelerator.device)
        if not masked:  # rows from disk
            ids = rows["input_ids"].numpy().astype(np.uint16 if args.vocab_size <= 2**16 else np.uint32)
            np.save(f"{folder}/rows.npy", ids.ravel())
            packed = PackedRows([np.load(f"{folder}/rows.npy", mmap_mode="r")], args.block_size)
            ours = accelerator.prepare(train_loader(packed, settings, 0, args.steps * args.batch_size))
        clock.start()
        for batch in ours:
            update(batch)
            clock.step()


def train_with_trainer(lm, rows, args, bf16, clock, **more):
    """more: TrainingArguments."""
    import torch
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    class Steps(TrainerCallback):
        def on_train_begin(self, *_, **__):
            clock.start()

        def on_step_end(self, *_, **__):
            clock.step()

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_train_batch_size=args.batch_size, max_steps=args.steps, learning_rate=1e-3,
            weight_decay=0.1, warmup_steps=2, lr_scheduler_type="linear", max_grad_norm=1.0, bf16=bf16,
            save_strategy="no", report_to="none", disable_tqdm=True, train_sampling_strategy="sequential",
            use_cpu=not torch.accelerator.is_available(), **more,
        )  # fmt: skip
        data = Dataset.from_dict({name: rows[name].numpy() for name in ("input_ids", "labels")})
        collator = default_data_collator
        Trainer(lm, settings, train_dataset=data, data_collator=collator, callbacks=[Steps()]).train()


def train_tuned(lm, rows, args, bf16, clock):
    import torch

    torch.set_float32_matmul_precision("high")  # same as tf32=True, which CPUs refuse
    train_with_trainer(lm, rows, args, bf16, clock, optim="adamw_torch_fused", torch_compile=True)


def train_plainly(lm, rows, args, bf16, clock):
    import torch
    from transformers import get_linear_schedule_with_warmup

    device = str(torch.accelerator.current_accelerator() or "cpu")
    lm.to(device)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, args.steps)
    clock.start()
    rows = {name: rows[name] for name in ("input_ids", "labels")}
    for batch in batches(rows, args.batch_size, device):
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = lm(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.step()


def main():
    show = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show)
    parser.add_argument("--contenders", nargs="*", default=["trainer", "ours"])
    parser.add_argument("--model_type", default="gpt2", choices=["gpt2", "roberta", "modernbert"])
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mlm_probability", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--command", action="append", default=[], metavar="NAME=COMMAND LINE",
                        help="timed beside ours")
    parser.add_argument("--command_tokens", type=int, default=0, help="tokens each --command trains on")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        print(json.dumps(contender(args.contender, args)))
        return
    shape = [f"--{name}={getattr(args, name)}" for name in ("model_type", "mlm_probability", *SHAPE)]
    program = [sys.executable, "-m", "tests.benchmarks.throughput", *shape, "--contender"]
    commands = {name: [*program, name] for name in args.contenders}
    commands |= {name: ["sh", "-c", line] for name, line in (item.split("=", 1) for item in args.command)}
    lines = interleaved(commands, args.rounds)
    for name, numbers in lines.items():
        if name not in args.contenders and args.command_tokens:
            numbers["tokens_per_second"] = args.command_tokens / numbers["wall"]
    print_table(
        f"{args.model_type} {args.layers} x {args.width}, vocabulary {args.vocab_size}, {args.batch_size} "
        f"rows of {args.block_size} tokens, {args.steps} steps, medians of {args.rounds} runs in turn",
        lines,
        {
            "tokens_per_second": "tokens/s", "cpu_per_step": "CPU s per step", "cpu": "CPU s of the run",
            "mib": "peak MiB", "first_step": "first step s", "to_first_step": "start to first step s",
            "eval_loss": "validation loss",
        },
        {"tokens_per_second": "tokens/s ratio", "cpu_per_step": "CPU ratio", "mib": "memory ratio"},
    )  # fmt: skip


if __name__ == "__main__":
    main()
