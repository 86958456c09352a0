"""What a training run will need, before it is started: memory per device, FLOPs, communication, time.

    python -m utils.display.plan --model_type gpt2 --block_size 1024 --per_device_train_batch_size 16 \
        --devices 8 --device_name "NVIDIA H100" --precision bf16 --mfu 0.4 --tokens 10e9
"""

import argparse

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig
from transformers.initialization import no_init_weights

from utils.display.progress import readable
from utils.display.throughput import flops_per_token, peak_flops
from utils.learning.configuration import MODEL_CLASSES
from utils.learning.fused_head import chunk_rows
from utils.learning.model import use_one_kernel_gelu


def run_without_data(config, rows: int, block_size: int, kind: str, bf16: bool):
    """(model, its last hidden states [B, T, D], bytes of each tensor that autograd keeps for backward)"""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor  # the tensor too: its address must not be used again
        return tensor

    with FakeTensorMode(), no_init_weights():
        model = MODEL_CLASSES[kind].from_config(config).train()
        model.tie_weights()
        use_one_kernel_gelu(model)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            hidden = model.base_model(input_ids=torch.zeros(rows, block_size, dtype=torch.long))[0]
    sizes = [tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in weights]
    return model, hidden, sizes


def estimate(config, rows: int, block_size: int, *, kind: str = "causal", bf16: bool = False,
             accumulation: int = 1, devices: int = 1, sharding: str = "ddp", device_type: str = "cpu",
             predicted: float = 1.0) -> dict[str, float]:  # fmt: skip
    """Bytes per device, FLOPs per token and bytes sent per update, for float32 weights and AdamW.

    kind: as in learning/model.py; sharding: "ddp" or "fsdp" (all of it); predicted: the share of positions
    that pass the head (masked LM).

    The model's forward pass runs on tensors without data: activations are what autograd keeps for that very
    architecture (a compiled model keeps less). Off the CPU, attention is taken to be fused and dropout masks,
    one byte per element there, are left out. Raises RuntimeError for a model that looks into its data."""
    if device_type != "cpu":
        values = config.to_dict()
        off = {name: 0.0 for name, share in values.items() if "drop" in name and isinstance(share, float)}
        config = type(config)(**values | off)
    model, hidden, sizes = run_without_data(config, rows, block_size, kind, bf16)
    parameters, head = sum(p.numel() for p in model.parameters()), model.get_output_embeddings().weight
    activations, positions = sum(sizes), rows * block_size * predicted
    half = 2 if bf16 else 0  # bytes of a second copy in bfloat16
    loss = min(chunk_rows(device_type, len(head)), positions) * len(head) * (4 + half)  # a chunk's logits
    loss += head.numel() * (4 + 2 * half)  # the head's gradient is made in the forward pass
    loss += positions * head.shape[1] * (2 * hidden.element_size() + half)  # the head's input, its gradient
    if device_type == "cpu":
        # glibc's heap holds on to freed blocks below 32 MiB, sometimes more and sometimes less
        activations += 0.3 * sum(size for size in sizes if size < 2**25)
        loss += head.numel() * half  # oneDNN's own arrangement of the weight
    shards, copies = devices if sharding == "fsdp" else 1, 0
    if devices > 1:  # DDP: buckets beside the gradients; FSDP: weights and gradients of a gathered unit
        layers = [child for m in model.modules() if isinstance(m, torch.nn.ModuleList) for child in m]
        units = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        copies = 4 * parameters if sharding == "ddp" else 2 * max(units + [head.numel()]) * (half or 4)
    gradients = 4 * parameters / shards
    forward_peak = activations + loss + (gradients if accumulation > 1 else 0)
    tied = head is model.get_input_embeddings().weight
    backward_peak = gradients + (8 * head.numel() if tied else 0)  # the lookups' gradient and the sum
    sent = (devices - 1) / devices * parameters
    # ring all-reduce: reduce and gather; FSDP: gather forward and backward, reduce, for each micro-batch
    sent *= 2 * 4 if sharding == "ddp" else 3 * (half or 4) * accumulation
    return {
        "parameters": parameters, "weights": 4 * parameters / shards, "gradients": gradients,
        "optimizer": 8 * parameters / shards, "activations": activations, "loss": loss, "copies": copies,
        "peak": 12 * parameters / shards + copies + max(forward_peak, backward_peak),
        "flops_per_token": flops_per_token(model, block_size, predicted), "sent_per_update": sent,
        "tokens_per_update": rows * block_size * accumulation * devices,
    }  # fmt: skip


def describe(plan: dict, flops_per_second: float | None = None, tokens: float = 0) -> str:
    """The estimate as a table. flops_per_second: of all devices as used, peak times utilisation."""
    parts = ("weights", "gradients", "optimizer", "activations", "loss", "copies")
    lines = [
        f"parameters         {plan['parameters'] / 1e6:10,.1f} M",
        *(f"{part:<18} {plan[part] / 2**20:10,.0f} MiB" for part in parts),
        # the peak is less than the sum: gradients grow while activations go
        f"peak per device    {plan['peak'] / 2**20:10,.0f} MiB  (libraries come on top)",
        f"FLOPs per token    {plan['flops_per_token'] / 1e6:10,.0f} M",
        f"tokens per update  {plan['tokens_per_update']:10,}",
        f"sent per update    {plan['sent_per_update'] / 2**20:10,.0f} MiB  by each device",
    ]
    if flops_per_second:
        rate = flops_per_second / plan["flops_per_token"]
        lines.append(f"tokens per second  {rate:10,.0f}")
        lines.append(f"seconds per update {plan['tokens_per_update'] / rate:10,.3f}")
        if tokens:
            hours = tokens / rate / 3600
            lines.append(f"hours              {hours:10,.1f}  for {readable(tokens / 1e9)} B tokens")
    return "\n".join(lines)


if __name__ == "__main__":
    show = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show)
    parser.add_argument("--model_type", default="gpt2")
    parser.add_argument("--model_name_or_path", help="instead: a folder with config.json or a Hub id")
    parser.add_argument("--config_overrides", default="", help="n_layer=4,n_embd=256,vocab_size=8192")
    parser.add_argument("--kind", default="causal", choices=list(MODEL_CLASSES))
    parser.add_argument("--predicted", type=float, default=1.0, help="share of positions (masked LM)")
    parser.add_argument("--block_size", type=int, default=1024)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "no"])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--sharding", default="ddp", choices=["ddp", "fsdp"])
    parser.add_argument("--device_name", default="cpu", help="NVIDIA H100, TPU v4, ...: for its peak")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the bf16 peak that is used")
    parser.add_argument("--tokens", type=float, default=0, help="of the whole run, for its hours")
    args = parser.parse_args()
    try:
        made = AutoConfig.from_pretrained if args.model_name_or_path else AutoConfig.for_model
        config = made(args.model_name_or_path or args.model_type)
        if args.config_overrides:
            config.update_from_string(args.config_overrides)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    plan = estimate(
        config, args.per_device_train_batch_size, args.block_size, kind=args.kind,
        bf16=args.precision == "bf16", accumulation=args.gradient_accumulation_steps,
        devices=args.devices, sharding=args.sharding, predicted=args.predicted,
        device_type="cpu" if args.device_name == "cpu" else "cuda",
    )  # fmt: skip
    peak = peak_flops(args.device_name)
    hint = ': --device_name "NVIDIA H100" for a GPU, which attends in less memory'
    hint = hint if args.device_name == "cpu" else ""
    rows = f"{args.per_device_train_batch_size} rows of {args.block_size:,} tokens"
    print(f"{rows}, {args.precision}, on one {args.device_name}{hint}")
    print(describe(plan, peak and peak * args.mfu * args.devices, args.tokens))
