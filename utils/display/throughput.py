"""How fast a run is: tokens per second, model FLOPs utilisation (MFU), time left."""

import contextlib
import os
import re
import time
from collections import Counter

import torch
from torch import nn

from utils.learning.configuration import setting

# Dense matrix-multiply peak in TFLOP/s with bf16 inputs (fp16 where the chip has no bf16), without sparsity,
# from the makers' public data sheets. "Device" is what torch calls one: one of the two dies of an MI250X, one
# core of a TPU v2 or v3, one chip of later TPUs. The first name found in the device's name counts.
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
    """The name PEAK_TFLOPS is searched with: "NVIDIA H100 80GB HBM3", "TPU v5litepod-8", "cpu", ..."""
    if device.type == "xla":
        from torch_xla.runtime import device_type

        if device_type() != "TPU":
            return f"XLA's {device_type()} device"
        return f"TPU {os.environ.get('TPU_ACCELERATOR_TYPE') or os.environ.get('ACCELERATOR_TYPE') or '?'}"
    named = getattr(torch.get_device_module(device), "get_device_name", None)  # of torch.cuda, torch.xpu
    return named(device) if named else device.type


def peak_flops(name: str) -> float | None:
    """FLOP/s of one device by its name; None if it is unknown, a laptop's, or a part of one (MIG)."""
    if re.search(r"laptop|\bMIG\b", name, re.IGNORECASE):
        return None
    peaks = (peak for known, peak in PEAK_TFLOPS.items() if re.search(rf"\b{known}\b", name, re.IGNORECASE))
    return 1e12 * peak if (peak := next(peaks, None)) else None


def flops_per_token(model: nn.Module, block_size: int, head_share: float = 1.0) -> float:
    """Training FLOPs per token: 6 N + 12 L D T (PaLM, arXiv 2204.02311, appendix B; nanoGPT's estimate, too).

    6 N: two for each multiply-add, once forward and twice backward. N counts the parameters that every token
    is multiplied with: the head (tied or not; for the share `head_share` of positions, those predicted), not
    the lookups (token, position and type embeddings).
    12 L D T: queries times keys, weights times values, over T positions in L attention layers, width
    D = heads x head size; not halved as the mask is causal. Take it before FSDP shards the parameters."""
    head = getattr(model.get_output_embeddings(), "weight", None)  # some models have none
    lookups = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - {head}
    parameters = sum(p.numel() for p in set(model.parameters()) - lookups)
    parameters -= (1 - head_share) * (0 if head is None else head.numel())
    names = "hidden_size", "num_attention_heads", "head_dim", "num_hidden_layers", "layer_types"
    hidden, heads, head_size, layers, types = (setting(model.config, name) for name in names)
    if types:  # the others have no products over positions
        layers = sum(kind not in ("conv", "linear_attention", "moe") for kind in types)
    if not (heads and layers):  # a state-space model
        return 6 * parameters
    return 6 * parameters + 12 * layers * (heads * head_size if head_size else hidden) * block_size


class Throughput:
    """Tokens per second over the last log interval, MFU, and the time left of the run.

    Tokens are rows x T over all processes, padding included. mfu = flops_per_token * tokens/s / peak.
    peak: bf16 FLOP/s of all devices, whatever the precision, or None. seconds: of the run before a resume."""

    def __init__(self, steps, flops_per_token=0.0, peak: float | None = None, *, step=0, seconds=0.0):
        self.steps, self.flops_per_token, self.peak, self.measured = steps, flops_per_token, peak, 0
        self.tokens, self.run_start = steps.tokens_before(step), time.perf_counter() - seconds
        self.interval_start = time.perf_counter()
        self.apart_seconds = Counter()  # by name, in this log interval

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, with evaluation and saving, over all resumes."""
        return time.perf_counter() - self.run_start

    @contextlib.contextmanager
    def apart(self, name: str):
        """For evaluation and saving: this time counts for the time left, but not for tokens/s."""
        start = time.perf_counter()
        yield
        self.apart_seconds[name] += time.perf_counter() - start

    def measure(self, step: int) -> dict:
        """The record of a log interval; "save_seconds" is how long training waited for a save.

        Call it after the device has finished (after reading the loss), or it would time the queueing only."""
        now, saving, before = time.perf_counter(), self.apart_seconds["save"], self.tokens
        spent = max(now - self.interval_start - self.apart_seconds.total(), 1e-9)
        if self.measured < 2:  # the first interval includes compilation: the second one replaces it
            self.first = self.interval_start, before
        self.measured += 1
        self.tokens, self.interval_start, self.apart_seconds = self.steps.tokens_before(step), now, Counter()
        rate = max(self.tokens - before, 1) / spent
        mfu = round(self.flops_per_token * rate / self.peak, 4) if self.peak else None
        record = {"seconds": round(self.seconds, 3), "tokens_per_second": round(rate, 1), "mfu": mfu}
        return record | ({"save_seconds": round(saving, 3)} if saving else {})

    @property
    def eta(self) -> float | None:
        """Seconds left at the mean speed, evaluations and saves included; None before the first `measure`."""
        if self.measured:
            start, tokens = self.first
            left = self.steps.tokens_before(self.steps.last) - self.tokens
            return left * (self.interval_start - start) / max(self.tokens - tokens, 1)
