"""Everything that a long run will need, done once before it starts.

A run that fails at its last line, over a missing folder or a typo, has cost days; this costs seconds.
"""

import contextlib
import math
import shutil

from utils.devices import forget_peak, timed
from utils.state.checkpoint import Checkpoints


@contextlib.contextmanager
def rehearsal(checkpoints, edits):
    """Inside the block the run may update, evaluate and save in the folder that this yields; afterwards the
    model and all that is kept are as they were, read back from a real checkpoint, or `edits` raises.

    Takes the memory for background saves of `checkpoints`."""
    accelerator, folder = checkpoints.accelerator, checkpoints.folder.parent / ".preflight"
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    accelerator.wait_for_everyone()
    rehearsed, before = Checkpoints(accelerator, folder), edits.kept()
    rehearsed.save(0, edits.model, edits.keep, extra={}, final=True)
    yield folder
    edits.check()
    edits.model.zero_grad(set_to_none=True)
    checkpoints.reserve(edits.model, edits.keep)  # before the optimizer's state is gone again
    rehearsed.load("auto", edits.model, edits.keep)
    edits.check_restored(before)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)


def rehearse_updates(accelerator, micro_batches, seed_step, edits) -> float:
    """Seconds of a step. Says what of an edit is doubtful; ValueError for what is wrong."""

    def once():
        seed_step()  # or all processes would draw the same numbers, as they do not in the loop
        edits.update(micro_batches)
        edits.check_step(accelerator)

    forget_peak(accelerator.device)
    # The first call compiles. Every process makes as many, because gradients are exchanged.
    _, *seconds = (timed(once) for _ in range(3))
    for name in edits.idle_optimizers():
        accelerator.print(f"warning: {name} has moved no weight: it makes no step yet, or nothing that is "
                          "trained depends on them.")  # fmt: skip
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
        accelerator.print(f"warning: a gradient that is not finite gets into {names[0]}: nothing may move "
                          "weights before the guard has judged it, or without a guard.")
    return min(seconds)
