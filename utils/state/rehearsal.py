"""Everything that a long run will need, done once before it starts.

A run that fails at its last line, over a missing folder or a typo, has cost days; this costs seconds.
"""

import contextlib
import math
import shutil

from utils.devices import forget_peak, timed
from utils.state.checkpoint import Checkpoints
from utils.state.training_state import digest, freeze, reshard


@contextlib.contextmanager
def rehearsal(accelerator, model, keep: dict, checkpoints, edits):
    """Inside the block the run may update, evaluate and complete; afterwards the model and all that is
    kept are as they were, bit for bit.

    A real checkpoint is written before, in the folder that this yields, and read back after; RuntimeError
    where they differ, and what `edits` raises. Memory for background saves of `checkpoints` is taken."""
    folder = checkpoints.folder.parent / ".preflight"
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    accelerator.wait_for_everyone()
    rehearsed, things = Checkpoints(accelerator, folder), {"model": model, **keep}
    reshard(model)
    before = {name: digest(*freeze(thing, model)) for name, thing in things.items()}
    rehearsed.save(0, model, keep, extra={}, final=True)
    yield folder
    edits.check()
    model.zero_grad(set_to_none=True)
    checkpoints.reserve(model, keep)  # before the optimizer's state is gone again
    rehearsed.load("auto", model, keep)
    edits.check_restored()
    reshard(model)
    if different := [name for name in before if before[name] != digest(*freeze(things[name], model))]:
        cause = "what was written to a checkpoint and read back differs from what was saved"
        raise RuntimeError(f"preflight: {cause}: {', '.join(different)}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)


def rehearse_updates(accelerator, update, micro_batches, seed_step, edits) -> float:
    """Seconds of a step. Says what of an edit is doubtful; ValueError for what is wrong."""

    def once():
        seed_step()  # or all processes would draw the same numbers, as they do not in the loop
        update(micro_batches)
        edits.check_frozen(accelerator)

    forget_peak(accelerator.device)
    # The first call compiles. Every process makes as many, because gradients are exchanged.
    _, *seconds = (timed(once) for _ in range(3))
    for name in edits.idle_optimizers():
        cause = "it makes no step yet, or nothing that is trained depends on them"
        accelerator.print(f"warning: {name} has moved no weight: {cause}.")
    edits.check_weights(accelerator)
    backward = accelerator.backward
    accelerator.backward = lambda loss, **more: backward(loss * math.inf, **more)
    try:
        once()
    except (AttributeError, TypeError, RuntimeError) as error:
        cause = f"update: fails where the gradient is not finite ({str(error).splitlines()[0]})"
        raise ValueError(f"{cause}: the guard drops it, pass over weights whose grad is None.") from error
    finally:
        del accelerator.backward
    if names := edits.check_weights(accelerator):
        rule = "nothing may move weights before the guard has judged it, or without a guard"
        accelerator.print(f"warning: a gradient that is not finite gets into {names[0]}: {rule}.")
    return min(seconds)
