"""A whole step of train_mlm.py against HF Trainer's: ModernBERT, the same weights, masked rows and AdamW.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.masked_step

HF Trainer is at its defaults otherwise: the head on all positions, transformers' sdpa. Each runs in a process
of its own, in turn. The loss is that of other rows after the last step, calculated by the same code.
"""

from tests.benchmarks.measure import ADAMW, Clock, compared, peak_memory, print_table
from tests.benchmarks.throughput import train_with_trainer

SHAPE = {"vocab_size": 8192, "layers": 6, "width": 128, "window": 128, "block_size": 1024, "batch_size": 2,
         "steps": 8}  # fmt: skip


def modernbert(args):
    from transformers import AutoConfig, AutoModelForMaskedLM

    config = AutoConfig.for_model(
        "modernbert", vocab_size=args.vocab_size, num_hidden_layers=args.layers, hidden_size=args.width,
        num_attention_heads=args.width // 64, intermediate_size=args.width * 3 // 2, pad_token_id=0,
        bos_token_id=1, eos_token_id=1, cls_token_id=1, sep_token_id=1,
        max_position_embeddings=args.block_size, local_attention=args.window,
    )  # fmt: skip
    return AutoModelForMaskedLM.from_config(config)


def contender(kind: str, args) -> dict:
    import numpy as np
    import torch
    from transformers import set_seed

    set_seed(0)
    lm, B, T, clock = modernbert(args), args.batch_size, args.block_size, Clock()
    ids = 3 + np.random.default_rng(0).zipf(1.3, ((args.steps + 2) * B, T)) % (args.vocab_size - 3)
    ids = torch.from_numpy(ids)
    slots = torch.rand(ids.shape).argsort(1)[:, : int(0.3 * T)].sort(1).values  # [rows, K]
    hidden = ids.gather(1, slots)
    read, n = ids.scatter(1, slots, 2), args.steps * B  # 2 is the mask
    labels = torch.full_like(ids, -100).scatter(1, slots, hidden)
    if kind == "ours":
        rows = {"input_ids": read[:n], "slots": slots[:n], "slot_labels": hidden[:n]}
        train_ours(lm, rows, args, clock)
    else:
        rows = {"input_ids": read[:n].numpy(), "labels": labels[:n].numpy()}
        train_with_trainer(lm, rows, args, False, clock, train_sampling_strategy="sequential")
    report = clock.report(B * T) | {"mib": peak_memory() / 2**20}
    lm.eval()
    with torch.no_grad():
        return report | {"loss": lm(read[n:].to(lm.device), labels=labels[n:].to(lm.device)).loss.item()}


def train_ours(lm, rows, args, clock):  # update is that of train_mlm.py, one micro-batch a step
    from accelerate import Accelerator

    from utils.learning.kernels import use_fast_products, use_one_kernel_gelu
    from utils.learning.losses import MaskedLMLoss
    from utils.learning.model import to_device
    from utils.learning.optim import Means, UpdateGuard, build_optimizer, build_schedule

    accelerator = Accelerator()
    use_fast_products(args.block_size)
    use_one_kernel_gelu(lm)
    model = MaskedLMLoss(lm)
    to_device(model, accelerator)
    optimizer = build_optimizer(model, ADAMW)
    schedule = build_schedule(optimizer, ADAMW, args.steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    guard, means = UpdateGuard(accelerator, optimizer), Means(accelerator, "loss/train_mlm")
    clock.start()
    for start in range(0, len(rows["slots"]), args.batch_size):
        part = slice(start, start + args.batch_size)
        batch = {name: column[part].to(accelerator.device) for name, column in rows.items()}
        losses = model(batch)["loss_sums"] / (batch["slot_labels"] != -100).sum()
        accelerator.backward(losses.sum())
        means.add(losses, guard.check(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.step()


def main():
    args, lines = compared(__doc__, contender, ("trainer", "ours"), SHAPE, rounds=3)
    print_table(
        f"ModernBERT {args.layers} x {args.width}, window {args.window}, vocabulary {args.vocab_size}, "
        f"{args.batch_size} rows of {args.block_size} tokens, medians of {args.rounds} runs in turn",
        lines,
        {"tokens_per_second": "tokens/s", "cpu_per_step": "CPU s per step", "mib": "peak MiB",
         "loss": "validation loss"},
        {"tokens_per_second": "step rate ratio", "cpu_per_step": "CPU ratio", "mib": "memory ratio"},
        args.append,
    )  # fmt: skip


if __name__ == "__main__":
    main()
