"""Counts the collectives of a run and their bytes.

    torchrun --nproc_per_node 4 tests/collectives.py OUTPUT train_clm --max_train_steps 4

runs `python train_clm.py --max_train_steps 4` and writes the records of each process to OUTPUT/0.json to
OUTPUT/3.json; with FSDP as in tests/fsdp_on_cpu.py. `counted_run` forks such a run.
"""

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import forked  # noqa: I001
from tests.runs import arguments, fsdp_environment


class Collectives(TorchDispatchMode):
    """Counts the collectives of its thread: {"alltoall_base_ bfloat16": [calls, bytes]}, by phases.

    For a reduction, scatter or broadcast the bytes are those of the full tensor, for a gather or all-to-all
    those that a process receives."""

    def __init__(self):
        super().__init__()
        self.records = []  # (phase, collectives) of finished phases
        self.open = [{}]  # the collectives of nested phases

    @contextlib.contextmanager
    def phase(self, name):
        self.open.append({})
        try:
            yield
        finally:
            self.records.append((name, self.open.pop()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors are dispatched again
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        if function.namespace == "c10d":
            self._count(name, args[1 if name in ("_reduce_scatter_base_", "scatter_") else 0])
        elif function.namespace == "_c10d_functional" and "wait" not in name and "wrap" not in name:
            self._count(name, result)
        return result

    def _count(self, name, tensors):
        tensors = [leaf for leaf in tree_leaves(tensors) if torch.is_tensor(leaf)]
        kind = str(tensors[0].dtype)[6:] if tensors else ""
        calls, size = self.open[-1].get(f"{name} {kind}", (0, 0))
        self.open[-1][f"{name} {kind}"] = calls + 1, size + sum(tensor.nbytes for tensor in tensors)


def counted_run(folder, script, flags, processes, sharded=False) -> list[list]:
    """Returns the records of each process: [(phase, collectives)]."""
    folder.mkdir()
    words = [folder, script, *arguments(flags)]
    env = fsdp_environment(processes) if sharded else None
    done = forked.run("tests/collectives.py", words, processes, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def watch(counted, owner, name, phase):
    """Counts each call of `owner.name` as a phase."""
    call = getattr(owner, name)

    def watched(*args, **kwargs):
        with counted.phase(phase):
            return call(*args, **kwargs)

    setattr(owner, name, watched)


def watch_loop(counted, log_class, steps_class):
    """Phases "evaluation" and "save", which the log times, and "step", from its seed to its end."""
    seed, ends, timed = steps_class.seed, log_class.add, log_class.timed

    @contextlib.contextmanager
    def timed_phase(self, name):
        with timed(self, name), counted.phase(name):
            yield

    def begins(self, step):
        if len(counted.open) == 2:  # directly within "all", not the seed of an evaluation
            self.counted_step = counted.phase("step")
            self.counted_step.__enter__()
        seed(self, step)

    def ended(self, step, *more):
        self.steps.counted_step.__exit__(None, None, None)
        ends(self, step, *more)

    steps_class.seed, log_class.add, log_class.timed = begins, ended, timed_phase


def main():
    folder, script = Path(sys.argv.pop(1)), sys.argv.pop(1)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    from utils.display.log import Log
    from utils.learning.optim import Means
    from utils.state.checkpoints import Checkpoints
    from utils.state.stop_signals import StopSignals
    from utils.steps import Steps

    counted = Collectives()
    watch_loop(counted, Log, Steps)
    for owner, name, phase in [
        (Checkpoints, "load", "load"), (Log, "start", "start"), (Log, "finish", "end"),
        (Means, "read", "log"), (StopSignals, "stop_requested", "stop"),
    ]:  # fmt: skip
        watch(counted, owner, name, phase)
    with counted.phase("all"), counted:
        try:
            importlib.import_module(script).main.__wrapped__()  # entry_point would end the process
        except SystemExit as end:
            if end.code:
                raise
    (folder / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(counted.records))
    sys.stdout.flush()
    os._exit(0)  # as entry_point does, which says why


if __name__ == "__main__":
    main()
