"""Everything that a long run will need at some time, done once before it starts.

A run that fails at its last line, over a missing folder or a typo, has cost days; this costs seconds.
"""

import contextlib
import shutil

import torch

from utils.publishing.export import export_model
from utils.state.checkpoint import Checkpoints
from utils.state.training_state import reshard


@contextlib.contextmanager
def rehearsal(accelerator, model, optimizer, guard, tokenizer, checkpoints):
    """Inside the block the run may update, evaluate and complete; afterwards everything is as it was, bit for
    bit.

    A real checkpoint is written before and read back after, and the weights are compared with a copy; so
    saving and loading are rehearsed too, and so is the export for transformers. Raises RuntimeError where
    they differ. checkpoints: those of the run; the memory for its background saves is taken.
    """
    folder = checkpoints.folder.parent / ".preflight"
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    accelerator.wait_for_everyone()
    rehearsed = Checkpoints(accelerator, folder, save_total_limit=1, background=False)
    before = [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]
    guard_before = guard.state_dict()
    rehearsed.save(0, model, optimizer, extra={}, final=True)
    export_model(accelerator, model, tokenizer, folder)
    yield
    optimizer.zero_grad()
    checkpoints.reserve(model, optimizer)  # before the optimizer's state is gone again
    rehearsed.load("auto", model, optimizer)
    guard.load_state_dict(guard_before)
    if reshard(model):
        optimizer.state.clear()  # torch's sharded saving has filled it with zeros and one step
    same = all(torch.equal(a, b.detach().cpu()) for a, b in zip(before, model.parameters(), strict=True))
    if not same or optimizer.state:
        raise RuntimeError(
            "preflight: a checkpoint that was written and read back differs from what was saved"
        )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)
