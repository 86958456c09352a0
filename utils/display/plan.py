"""What a training run will need, before it is started: memory per device, bytes that are sent, hours.

    python -m utils.display.plan --per_device_train_batch_size 16 --devices 8 --device_name "NVIDIA H100"

Time is that of computing alone. What is sent, and where it costs time: docs/scaling.md.
"""

import argparse

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.initialization import no_init_weights

from utils.display.progress import quiet_libraries, readable
from utils.display.throughput import flops_per_token, peak_flops
from utils.learning.configuration import MODEL_CLASSES, configure
from utils.learning.fused_head import chunk_rows
from utils.learning.kernels import use_one_kernel_gelu
from utils.learning.muon import hidden_matrices

MACHINE = 8  # devices of one, which divide Muon's iteration under DDP


def measure(config, rows, block_size, kind, bf16, fsdp, device_type, predicted) -> dict:
    """The memory of a micro-batch: what autograd saves in a forward pass on fake tensors (compiled it saves
    less), and what the head takes. Except on the CPU attention is fused and dropout has no masks."""
    values, kept = config.to_dict(), {}
    if device_type != "cpu":
        off = {name: 0.0 for name, share in values.items() if "drop" in name and isinstance(share, float)}
        config = type(config)(**values | off)

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor  # keeps it alive, so that its address is not reused
        return tensor

    with FakeTensorMode(), no_init_weights():
        gathered = torch.bfloat16 if bf16 and fsdp else torch.float32  # autocast keeps a copy of float32
        model = MODEL_CLASSES[kind].from_config(config, dtype=gathered).train()
        model.tie_weights()
        use_one_kernel_gelu(model)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            hidden = model.base_model(input_ids=torch.zeros(rows, block_size, dtype=torch.long))[0]
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    sizes = [tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in weights]
    head, positions = model.get_output_embeddings().weight, rows * block_size * predicted
    half = 2 if bf16 else 0  # bytes of a second copy in bfloat16
    loss = min(chunk_rows(device_type, len(head)), positions) * len(head) * (4 + half)  # a chunk's logits
    loss += head.numel() * (4 + 2 * half)  # the head's gradient is made in the forward pass
    loss += positions * head.shape[1] * (2 * hidden.element_size() + half)  # the head's input, its gradient
    activations = sum(sizes)
    if device_type == "cpu":
        # glibc's heap keeps freed blocks below 32 MiB: a part of them, which varies.
        activations += 0.3 * sum(size for size in sizes if size < 2**25)
        loss += head.numel() * half  # oneDNN keeps a reordered copy of the weight
    blocks = [child for m in model.modules() if isinstance(m, torch.nn.ModuleList) for child in m]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "blocks": [sum(p.numel() for p in block.parameters()) for block in blocks],
        "head": head.numel(),
        "tied": head is model.get_input_embeddings().weight,
        "matrices": hidden_matrices(model),
        "activations": activations,
        "loss": loss,
        "flops_per_token": flops_per_token(model, block_size, predicted),
    }


def estimate(config, rows: int, block_size: int, *, kind: str = "causal", bf16: bool = False,
             accumulation: int = 1, devices: int = 1, sharding: str = "ddp", device_type: str = "cpu",
             predicted: float = 1.0, optimizer: str = "adamw") -> dict:
    """Bytes per device, FLOPs per token and bytes sent per update, for float32 weights.

    kind: as in learning/model.py; sharding: "ddp" or "fsdp" (of everything); predicted: the share of
    positions that pass the head (masked LM); optimizer: "adamw" or "muon". RuntimeError for a model whose
    forward pass reads its data."""
    fsdp, ddp, several = sharding == "fsdp", sharding == "ddp" and devices > 1, accumulation > 1
    model = measure(config, rows, block_size, kind, bf16, fsdp, device_type, predicted)
    moved = sum(weight.numel() for weight in model["matrices"]) if optimizer == "muon" else 0
    parameters, blocks, wire, shards = model["parameters"], model["blocks"], 2 if bf16 else 4, devices**fsdp
    root, weights = parameters - sum(blocks), 4 * parameters / shards
    copies, sent = weights if ddp and several else 0, 8 * parameters  # a ring sends all gradients twice
    if fsdp:  # gathered: two blocks, one block's gradients; a block twice per micro-batch, the rest once
        copies = wire * (2 * root + 3 * max(blocks, default=0) + parameters * several)
        sent = wire * (accumulation * (2 * parameters - root) + parameters)
    sharing = devices if fsdp else min(devices, MACHINE)  # Muon's iteration
    sent = sent * (1 - 1 / devices) + wire * moved * (1 - 1 / sharing) * (2 / devices if fsdp else 1)
    forward = model["activations"] + model["loss"] + (weights if ddp or several and not fsdp else 0)
    backward = weights + 8 * model["head"] * model["tied"]  # the gradient of the lookups, and the sum
    update = weights + 3 * wire * moved / shards  # matrices, updates to send, received updates
    state = 2 * weights - 4 * moved / shards
    peak = weights + state + copies + max(forward, backward, update)
    plan = dict(weights=weights, gradients=weights, optimizer=state, copies=copies, peak=peak)
    plan |= dict(sent_per_update=sent, tokens_per_update=rows * block_size * accumulation * devices)
    return model | plan


def describe(plan: dict, rate: float = 0, tokens: float = 0) -> str:
    """The estimate as a table. rate: FLOP/s of all devices; tokens: of the whole run."""
    lines = [("parameters", plan["parameters"] / 1e6, ".1f", "M")]
    parts = ["weights", "gradients", "optimizer", "activations", "loss", "copies"]
    lines += [(part, plan[part] / 2**20, ".0f", "MiB") for part in parts]
    # The peak is less than the sum: activations are freed while gradients are made.
    lines += [("peak per device", plan["peak"] / 2**20, ".0f", "MiB  (libraries come on top)")]
    lines += [("FLOPs per token", plan["flops_per_token"] / 1e6, ".0f", "M")]
    lines += [("tokens per update", plan["tokens_per_update"], "", "")]
    lines += [("sent per update", plan["sent_per_update"] / 2**20, ".0f", "MiB  by each device")]
    if rate:
        speed, run = rate / plan["flops_per_token"], f"for {readable(tokens / 1e9)} B tokens"
        lines += [("tokens per second", speed, ".0f", "")]
        lines += [("seconds per update", plan["tokens_per_update"] / speed, ".3f", "")]
        lines += [("hours", tokens / speed / 3600, ".1f", f" {run}")]
    lines = [line for line in lines if line[1]]
    return "\n".join(f"{name:<18} {value:10,{digits}} {unit}".rstrip() for name, value, digits, unit in lines)


def main():
    prog, layout = "python -m utils.display.plan", argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=layout, allow_abbrev=False)
    for name, default, what in [
        ("model_type", "gpt2", ""), ("config_overrides", "", "as in the scripts, and vocab_size"),
        ("model_name_or_path", "", "instead: a folder with config.json or a Hub id"),
        ("kind", [*MODEL_CLASSES], ""), ("predicted", 1.0, "share of positions (masked LM)"),
        ("per_device_train_batch_size", 8, ""), ("gradient_accumulation_steps", 1, ""),
        ("block_size", 1024, ""), ("precision", ["bf16", "no"], ""), ("sharding", ["ddp", "fsdp"], ""),
        ("optimizer_type", ["adamw", "muon"], ""), ("tokens", 0.0, "of the whole run, for its hours"),
        ("device_name", "cpu", "NVIDIA H100, TPU v4, ...: for its peak"),
        ("mfu", 0.4, "share of the bf16 peak that computing uses"), ("devices", 1, ""),
    ]:  # fmt: skip
        choices, first = (default, default[0]) if isinstance(default, list) else (None, default)
        what = f"{what} (default: {first or 'none'})".strip()
        parser.add_argument(f"--{name}", type=type(first), default=first, choices=choices, help=what)
    args = parser.parse_args()
    quiet_libraries()
    config, _, problems = configure(args, args.kind)
    problems += [f"{name}: must be greater than 0, is {value}." for name, value in vars(args).items()
                 if isinstance(value, int | float) and value <= 0 and name != "tokens"]
    if problems:
        parser.exit(2, "\n".join(problems) + "\n")
    rows, cpu = args.per_device_train_batch_size, args.device_name == "cpu"
    rate = (peak_flops(args.device_name) or 0) * args.mfu
    hint = ': --device_name "NVIDIA H100" for a GPU, whose attention takes less memory' if cpu else ""
    hint = f"; speeds are estimates, at {args.mfu:.0%} of its peak" if rate else hint
    name, batch = args.model_name_or_path or args.model_type, f"{rows} rows of {args.block_size:,} tokens"
    print(f"{name}, {args.optimizer_type}, {batch}, {args.precision}, on {args.devices} x "
          f"{args.device_name}{hint}")
    plan = estimate(
        config, rows, args.block_size, kind=args.kind, bf16=args.precision == "bf16", devices=args.devices,
        accumulation=args.gradient_accumulation_steps, sharding=args.sharding, predicted=args.predicted,
        device_type="cpu" if cpu else "cuda", optimizer=args.optimizer_type,
    )  # fmt: skip
    print(describe(plan, rate * args.devices, args.tokens))


if __name__ == "__main__":
    main()
