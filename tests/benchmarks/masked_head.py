"""Masked LM with the head on the predicted positions only, against the head on all positions.

    python -m tests.benchmarks.masked_head --steps 3                      # RoBERTa, vocabulary 50k, T = 512
    python -m tests.benchmarks.masked_head --layers 2 --width 128 --rounds 1

Both take the same masked rows and the same AdamW; each runs in a process of its own, in turn.
"""

from tests.benchmarks.measure import ADAMW, Clock, compared, peak_memory, print_table

SHAPE = {"vocab_size": 50265, "layers": 4, "width": 256, "block_size": 512, "batch_size": 4, "steps": 6}


def contender(kind: str, args) -> dict:
    import torch
    from transformers import AutoConfig, AutoModelForMaskedLM, set_seed

    from utils.learning.losses import MaskedLMLoss
    from utils.learning.optim import build_optimizer

    set_seed(0)
    config = AutoConfig.for_model(
        "roberta", vocab_size=args.vocab_size, num_hidden_layers=args.layers, hidden_size=args.width,
        num_attention_heads=args.width // 64, intermediate_size=4 * args.width, hidden_dropout_prob=0.0,
        max_position_embeddings=args.block_size + 2, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    lm = AutoModelForMaskedLM.from_config(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MaskedLMLoss(lm).to(device)
    optimizer = build_optimizer(lm, ADAMW)
    shape = args.batch_size, args.block_size
    slots = round(0.15 * args.block_size)
    clock = Clock()
    clock.start()
    for _ in range(args.steps):
        input_ids = torch.randint(5, args.vocab_size, shape).to(device)
        positions = torch.rand(shape).argsort(1)[:, :slots].sort(1).values.to(device)  # [B, K]
        labels = input_ids.gather(1, positions)
        if kind == "sparse head":
            batch = {"input_ids": input_ids, "slots": positions, "slot_labels": labels}
            loss = model(batch)["loss_sums"][0] / labels.numel()
        else:
            all_labels = torch.full_like(input_ids, -100).scatter(1, positions, labels)
            loss = lm(input_ids=input_ids, labels=all_labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
    mib = peak_memory() / 2**20
    return clock.report(args.batch_size * args.block_size) | {"mib": mib, "loss": loss.item()}


def main():
    args, lines = compared(__doc__, contender, ("full head", "sparse head"), SHAPE, rounds=5)
    print_table(
        f"RoBERTa {args.layers} x {args.width}, vocabulary {args.vocab_size}, {args.batch_size} rows of "
        f"{args.block_size} tokens, medians of {args.rounds} runs in turn",
        lines,
        {"tokens_per_second": "tokens/s", "cpu_per_step": "CPU s per step", "mib": "peak MiB",
         "loss": "last loss"},
        {"tokens_per_second": "step rate ratio", "cpu_per_step": "CPU ratio", "mib": "memory ratio"},
        args.append,
    )  # fmt: skip


if __name__ == "__main__":
    main()
