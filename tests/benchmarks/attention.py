"""ModernBERT's forward and backward pass by transformers' sdpa and by blocks, `attn_implementation local`.

    python -m tests.benchmarks.attention                                        # 22 layers of one head
    python -m tests.benchmarks.attention --width 768 --lengths 1024 --rounds 1  # the shape of ModernBERT base

Both take the same rows and weights, the head on all of them, each in a process of its own, in turn. CPU
seconds are less disturbed by neighbours than the clock's. Memory is what steps add to a process that has made
one of 64 tokens: "of tensors" in one more run where each gets memory of its own (glibc's malloc), as what
malloc keeps of freed ones is often more than they are. The first steps, in which malloc grows, count little
among eight.
"""

import argparse
import json
import os
import sys

from tests.benchmarks.measure import Clock, interleaved, peak_memory, print_table


def modernbert(args, positions: int):
    from transformers import AutoConfig, AutoModelForMaskedLM

    config = AutoConfig.for_model(
        "modernbert", vocab_size=args.vocab_size, num_hidden_layers=args.layers, hidden_size=args.width,
        num_attention_heads=args.width // 64, intermediate_size=args.width * 3 // 2, pad_token_id=0,
        bos_token_id=1, eos_token_id=1, cls_token_id=1, sep_token_id=1,
        max_position_embeddings=positions, local_attention=args.window,
    )  # fmt: skip
    return AutoModelForMaskedLM.from_config(config)


def contender(name: str, args) -> dict:
    import torch
    from transformers import set_seed

    from utils.learning import local_attention  # noqa: F401  registers it

    set_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = modernbert(args, max(args.lengths)).to(device)
    lm.set_attn_implementation(name)
    (T,) = args.lengths
    ids = torch.randint(2, args.vocab_size, (args.batch_size, T), device=device)

    def step(ids):
        with torch.autocast(device, torch.bfloat16, enabled=args.bf16):
            loss = lm(input_ids=ids, labels=ids).loss
        loss.backward()
        lm.zero_grad()
        return loss

    step(ids[:1, :64])
    before = peak_memory()
    clock = Clock()
    clock.start()
    for _ in range(args.steps):
        loss = step(ids)
        clock.step()
    found = clock.report(ids.numel())
    return found | {"mib": (peak_memory() - before) / 2**20, "loss": loss.item(), "load": os.getloadavg()[0]}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shape = {"vocab_size": 512, "layers": 22, "width": 64, "window": 128, "batch_size": 1, "steps": 8}
    for name, default in shape.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 4096], help="tokens per row")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--append", help="a file that the tables are appended to")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(contender(args.one, args)))
        return
    flags = [f"--{name}={getattr(args, name)}" for name in shape] + ["--bf16"] * args.bf16
    for length in args.lengths:
        command = [sys.executable, "-m", "tests.benchmarks.attention", *flags, f"--lengths={length}", "--one"]
        commands = {name: [*command, name] for name in ("sdpa", "local")}
        measured = interleaved(commands, args.rounds)
        apart = ["env", "MALLOC_MMAP_THRESHOLD_=65536"]
        for name, found in interleaved({name: [*apart, *commands[name]] for name in commands}, 1).items():
            measured[name]["tensors"] = found["mib"]
        print_table(
            f"ModernBERT {args.layers} x {args.width}, window {args.window}, {args.batch_size} rows of "
            f"{length} tokens, medians of {args.rounds} runs in turn",
            measured,
            {"tokens_per_second": "tokens/s", "cpu_per_step": "CPU s per step", "tensors": "MiB of tensors",
             "mib": "MiB of the process", "loss": "loss", "load": "load"},
            {"tokens_per_second": "step rate ratio", "cpu_per_step": "CPU ratio", "tensors": "of tensors",
             "mib": "of the process"},
            args.append,
        )  # fmt: skip


if __name__ == "__main__":
    main()
