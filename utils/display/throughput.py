"""Speed of a run: tokens per second, model FLOPs utilisation (MFU), time left."""

import contextlib
import os
import re
import time
from collections import Counter

import torch
from torch import nn

from utils.learning.configuration import setting

# Peak TFLOP/s of dense matrix products in bf16 (fp16 for chips without bf16), without sparsity, from the
# makers' data sheets. A device is what torch calls one: a die of an MI250X, which has two, a core of a TPU v2
# or v3, a chip of later TPUs. The first name that occurs in the device's name is used.
PEAK_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989,
    "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10G": 70, "A10": 125,
    "L40S": 362, "L40": 181, "L4": 121, "V100": 125, "T4": 65,
    "RTX 6000 Ada": 364, "RTX A6000": 155, "RTX 4090": 165, "RTX 3090": 71,
    "MI325X": 1307, "MI300X": 1307, "MI250X": 191.5, "MI250": 181, "MI210": 181,
    "TPU v6e": 918, "TPU v5p": 459, "TPU v5litepod": 197, "TPU v5e": 197, "TPU v4": 275,
    "TPU v3": 61.5, "TPU v2": 22.5,
}  # fmt: skip


def device_name(device: torch.device) -> str:
    """The name of a device: "NVIDIA H100 80GB HBM3", "TPU v5litepod-8", "cpu", ..."""
    if device.type == "xla":
        from torch_xla.runtime import device_type

        if device_type() != "TPU":
            return f"XLA's {device_type()} device"
        return f"TPU {os.environ.get('TPU_ACCELERATOR_TYPE') or os.environ.get('ACCELERATOR_TYPE') or '?'}"
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)  # of torch.cuda, torch.xpu
    return get_name(device) if get_name else device.type


def peak_flops(name: str) -> float | None:
    """Peak FLOP/s of one device by its name; None if it is unknown, of a laptop, or a part of a GPU (MIG)."""
    if re.search(r"laptop|\bMIG\b", name, re.IGNORECASE):
        return None
    peaks = (peak for chip, peak in PEAK_TFLOPS.items() if re.search(rf"\b{chip}\b", name, re.IGNORECASE))
    return 1e12 * peak if (peak := next(peaks, None)) else None


def flops_per_token(model: nn.Module, block_size: int, head_share: float = 1.0) -> float:
    """Training FLOPs per token: 6 N + 12 L D T (PaLM, arXiv 2204.02311, appendix B; also nanoGPT's estimate).

    6 N: a multiply-add is two operations, done once in the forward and twice in the backward pass. N is the
    number of parameters that each token is multiplied with: without token, position and type embeddings, and
    with the head (tied or not) for the share `head_share` of positions that are predicted.
    12 L D T: queries times keys and weights times values, over T positions in L attention layers of width
    D = heads x head size; not halved for causal masks. Call it before FSDP shards the parameters."""
    head = getattr(model.get_output_embeddings(), "weight", None)  # some models have no head
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - {head}
    parameters = sum(p.numel() for p in set(model.parameters()) - embeddings)
    parameters -= (1 - head_share) * (0 if head is None else head.numel())
    names = "hidden_size", "num_attention_heads", "head_dim", "num_hidden_layers", "layer_types"
    hidden, heads, head_size, layers, types = (setting(model.config, name) for name in names)
    if types:  # layers of other types have no attention matrix
        layers = sum(kind not in ("conv", "linear_attention", "moe") for kind in types)
    if not (heads and layers):  # a state-space model
        return 6 * parameters
    return 6 * parameters + 12 * layers * (heads * head_size if head_size else hidden) * block_size


class Throughput:
    """Tokens per second over the last log interval, MFU, and the time left.

    Tokens are rows x T over all processes, padding included. mfu = flops_per_token * tokens/s / peak.
    peak: bf16 FLOP/s of all devices, whatever the precision, or None. seconds: of the run before a resume."""

    def __init__(self, steps, flops_per_token=0.0, peak: float | None = None, step=0, seconds=0.0):
        self.steps, self.flops_per_token, self.peak, self.measured = steps, flops_per_token, peak, 0
        self.tokens, self.run_start = steps.tokens_before(step), time.perf_counter() - seconds
        self.interval_start = time.perf_counter()
        self.excluded = Counter()  # {"evaluation" or "save": seconds in this log interval}

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, over all resumes, with evaluations and saves."""
        return time.perf_counter() - self.run_start

    @contextlib.contextmanager
    def excluding(self, name: str):
        """For evaluations and saves: their time counts for the time left, but not for tokens/s."""
        start = time.perf_counter()
        yield
        self.excluded[name] += time.perf_counter() - start

    def measure(self, step: int) -> dict:
        """The record of a log interval. "save_seconds": how long training waited for saves.

        Call it after the loss was read: until then the device may still compute."""
        now, saving, before = time.perf_counter(), self.excluded["save"], self.tokens
        training = max(now - self.interval_start - self.excluded.total(), 1e-9)
        if self.measured < 2:  # the mean speed is taken from the second interval on: the first one compiles
            self.first = self.interval_start, before
        self.measured += 1
        self.tokens, self.interval_start, self.excluded = self.steps.tokens_before(step), now, Counter()
        rate = max(self.tokens - before, 1) / training
        mfu = round(self.flops_per_token * rate / self.peak, 4) if self.peak else None
        record = {"seconds": round(self.seconds, 3), "tokens_per_second": round(rate, 1), "mfu": mfu}
        return record | ({"save_seconds": round(saving, 3)} if saving else {})

    @property
    def eta(self) -> float | None:
        """Seconds left at the mean speed, with evaluations and saves; None before the first `measure`."""
        if self.measured:
            start, tokens = self.first
            left = self.steps.tokens_before(self.steps.last) - self.tokens
            return left * (self.interval_start - start) / max(self.tokens - tokens, 1)
