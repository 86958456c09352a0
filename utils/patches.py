"""Patches of transformers and accelerate, all in this file. Each names the version that needs it and why;
delete it when the library no longer does."""

import dataclasses
import threading

import torch.distributed as dist
from transformers import masking_utils

# Per thread, as some TPUs run two processes as threads of one. ModelLoss sets it around each forward pass.
in_forward = threading.local()  # .rows_in_order: this forward's rows have positions 0, 1, 2, ...
_search = masking_utils.find_packed_sequence_indices  # transformers' own


def skip_search_for_documents() -> None:
    """transformers 5.24 looks for positions that start again within a row (packed documents). That waits for
    the device in each forward, and with torch.compile it prevents the causal kernel. A batch without
    position_ids has none: nothing is searched while `in_forward.rows_in_order` is set."""
    masking_utils.find_packed_sequence_indices = _search_unless_in_order


def _search_unless_in_order(position_ids):
    return None if getattr(in_forward, "rows_in_order", False) else _search(position_ids)


def wait_on_cpus(accelerator) -> None:
    """accelerate 1.15 passes GPU numbers to the barrier of processes that run on CPUs: it fails or hangs on a
    machine with fewer GPUs than processes."""
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        accelerator.wait_for_everyone = dist.barrier


def keep_losses_in_float32(accelerator) -> None:
    """accelerate 1.15 lets FSDP2 round to bfloat16 what the model returns: an evaluation's 5.7065 becomes
    5.7090, a training loss of 4.68 becomes 4.66."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if getattr(policy, "output_dtype", None) is not None:
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)
