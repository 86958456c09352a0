"""Runs a script for utils/check.py, which wants to know more of a run than the script writes.

    python utils/observed.py SIGNAL SCRIPT flags

SIGNAL: sent after step 6, between two saves; 0: none. Where processes have different weights at a save, its
step is written to output_dir/apart: gradients that are not all-reduced show there first.
"""

import hashlib
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from accelerate.utils import gather_object


def main() -> None:
    number, sys.argv = int(sys.argv[1]), sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    from utils.display.log import Log  # the script's own
    from utils.state.checkpoints import Checkpoints

    log_step, save = Log.step, Checkpoints.save

    def step_and_stop(self, step):
        log_step(self, step)
        while number and step == 6 and not Path(self.args.output_dir, "checkpoints/step-00000004").exists():
            time.sleep(0.01)  # it is written in the background
        if number and step == 6:
            os.kill(os.getpid(), number)

    def save_and_compare(self, step, *how, **named):
        save(self, step, *how, **named)
        digest = hashlib.sha256()
        for weight in self.model.parameters():
            digest.update(weight.detach().flatten().view(torch.uint8).numpy())
        apart = Path(self.args.output_dir, "apart")
        if len({*gather_object([digest.hexdigest()])}) > 1 and not apart.exists():
            apart.write_text(str(step))

    Log.step, Checkpoints.save = step_and_stop, save_and_compare
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
