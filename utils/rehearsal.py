"""Everything that a long run will need, done once before the first step: a run that fails at its last line,
because of a missing folder or a typo, has cost days."""

import contextlib
import math
import shutil

from utils.devices import forget_peak, timed
from utils.publishing.export import export_model, not_loaded
from utils.state.checkpoint import Checkpoints
from utils.xla import is_xla

SLOW = 10  # seconds of a first step after which the user is told what is going on


def rehearse(run) -> None:
    """Updates, evaluates, samples and saves once. run: a Run that has what it trains."""
    with rehearsal(run.resume.checkpoints, run.edits) as folder:
        if failure := export_model(run.accelerator, run.model, run.data.tokenizer, folder):
            raise RuntimeError(f"preflight: the model cannot be saved: {failure}")
        if names := not_loaded(folder) if run.accelerator.is_main_process else []:
            print(f"warning: transformers does not load the saved model as it is: {len(names)} weights have "
                  f"other names or shapes than its own, first {names[0]}; an edit has changed the layers")
        if not is_xla():  # there it would compile graphs of its own, and the first step comes at once
            first = next(run.data.batches(run.steps, run.step))
            run.report.rehearsed(rehearse_updates(run.accelerator, first, run.seed_step, run.edits))
        run.evaluations.measure(quick=True)
        run.evaluations.samples(quick=True)


@contextlib.contextmanager
def rehearsal(checkpoints, edits):
    """Inside the block the run may update, evaluate and save in the folder that this yields. Afterwards the
    model and all that is kept are restored from a real checkpoint, or `edits` raises.

    Reserves the memory for background saves of `checkpoints`."""
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
    checkpoints.reserve(edits.model, edits.keep)  # while the optimizer has its state
    rehearsed.load("auto", edits.model, edits.keep)
    edits.check_restored(before)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)


def rehearse_updates(accelerator, micro_batches, seed_step, edits) -> float:
    """Seconds of an update. Warns about doubtful edits; ValueError for wrong ones."""

    def once():
        seed_step()  # as in the loop, where each process draws other numbers
        edits.update(micro_batches)
        edits.check_step(accelerator)

    before = edits.optimizer_checksums()
    forget_peak(accelerator.device)
    # The first call compiles. All processes make the same number of calls, as gradients are all-reduced.
    if (first := timed(once)) > SLOW:
        accelerator.print(f"preflight  the first step took {first:.0f} s; three more follow, then a save")
    seconds = [timed(once) for _ in range(2)]
    for name, sums in edits.optimizer_checksums().items():
        if sums == before[name]:
            cause = "it makes no step yet, or no loss depends on them"
            accelerator.print(f"warning: {name} has moved none of its weights: {cause}.")
    edits.check_weights(accelerator)
    backward = accelerator.backward
    accelerator.backward = lambda loss, **more: backward(loss * math.inf, **more)
    try:
        once()
    except (AttributeError, TypeError, RuntimeError) as error:
        cause = f"update: fails where the gradient is not finite ({str(error).splitlines()[0]})"
        raise ValueError(f"{cause}: the guard drops it, so skip weights whose grad is None.") from error
    finally:
        del accelerator.backward
    if names := edits.check_weights(accelerator):
        accelerator.print(f"warning: a gradient that is not finite gets into {names[0]}: change weights only "
                          "after the guard has checked the gradient, and only with a guard.")
    return min(seconds)
