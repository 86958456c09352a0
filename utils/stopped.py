"""Runs a script that gets a signal after step 6, between two saves, for utils/check.py.

    python utils/stopped.py SIGNAL SCRIPT flags
"""

import os
import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    number, sys.argv = int(sys.argv[1]), sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    from utils.display.log import Log  # the script's own

    log_step = Log.step

    def step_and_stop(self, step):
        log_step(self, step)
        while step == 6 and not Path(self.args.output_dir, "checkpoints/step-00000004").exists():
            time.sleep(0.01)  # it is written in the background
        if step == 6:
            os.kill(os.getpid(), number)

    Log.step = step_and_stop
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
