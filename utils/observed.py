"""Runs a script for utils/check.py and notes facts that the script does not log.

    python utils/observed.py NOTES SIGNAL STEP SCRIPT flags

The run sends itself SIGNAL after STEP; 0: no signal. It appends JSON lines to the file NOTES:
    step, random, variables   after each step: whether it drew random numbers; local variables of main
    step, unequal             at each save by several processes: the state that differs between them
"""

import hashlib
import json
import os
import runpy
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object


def main() -> None:
    notes, number, last, sys.argv = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    from utils.display.log import Log  # as the script imports it
    from utils.state.checkpoints import Checkpoints
    from utils.state.stateful import collect_state
    from utils.steps import Steps

    log_step, save, seed, seeded = Log.add, Checkpoints.save, Steps.seed, []

    def note(accelerator, **line):
        if accelerator.is_main_process:
            with open(notes, "a") as file:
                file.write(json.dumps(line) + "\n")

    def seed_and_remember(self, step):
        seed(self, step)
        seeded[:] = [torch.get_rng_state()]

    def step_and_stop(self, step, *positional):
        log_step(self, step, *positional)
        random = bool(seeded) and not torch.equal(seeded[0], torch.get_rng_state())
        variables = {}
        if self.accelerator.num_processes == 1:  # a state_dict may wait for the other processes
            texts = {name: text_of(value) for name, value in sys._getframe(1).f_locals.items()}
            variables = {name: text for name, text in texts.items() if text is not None}
        note(self.accelerator, step=step, random=random, variables=variables)
        if number and step == last:
            os.kill(os.getpid(), number)

    def save_and_compare(self, step, *positional, **named):
        save(self, step, *positional, **named)
        if self.accelerator.num_processes > 1:
            states = {name: collect_state(name, obj, self.model) for name, obj in self.objects.items()}
            texts = [f"{record} {text_of(tensors)}" for record, tensors in states.values()]
            by_process = zip(states, *gather_object([texts]), strict=True)
            unequal = [name for name, *texts in by_process if len({*texts}) > 1]
            note(self.accelerator, step=step, unequal=unequal)

    Steps.seed, Log.add, Checkpoints.save = seed_and_remember, step_and_stop, save_and_compare
    runpy.run_path(sys.argv[0], run_name="__main__")


def text_of(value) -> str | None:
    """A text that changes with the value: of a number, text, tensor, module, collection, or an object with
    a state_dict whose class the script defines. None for other values."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return str(value.item())
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"tensor {[*value.shape]} {hashlib.sha256(content).hexdigest()[:12]}"
    if isinstance(value, int | float | str | None):
        return repr(value)
    if isinstance(value, torch.nn.Module) or type(value).__module__ == "__main__":
        value = value.state_dict() if hasattr(value, "state_dict") else value
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple | set):
        texts = [text_of(item) for item in value]
        return None if None in texts else f"[{', '.join(texts)}]"
    return None


if __name__ == "__main__":
    main()
