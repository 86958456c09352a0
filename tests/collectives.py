"""What the processes of a run send each other, and how long its parts take.

    torchrun --nproc_per_node 4 tests/collectives.py OUTPUT train_clm --max_train_steps 4

makes the run of `python train_clm.py --max_train_steps 4` and leaves OUTPUT/0.json to 3.json, the records of
each process; with FSDP as in tests/fsdp_on_cpu.py. `counted_run` forks such a run.
"""

import contextlib
import importlib
import json
import os
import sys
import time
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

    Bytes: of the whole that is reduced, scattered or broadcast; of what a process gets by a gather or an
    all-to-all."""

    def __init__(self):
        super().__init__()
        self.records = []  # (phase, wall seconds, processor seconds, collectives) of those that have ended
        self.open = [{}]  # the collectives of phases within each other

    @contextlib.contextmanager
    def phase(self, name):
        self.open.append({})
        wall, processor = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            seconds = time.perf_counter() - wall, time.process_time() - processor
            self.records.append((name, *seconds, self.open.pop()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it comes again as what that is made of
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


def counted_run(folder, script, flags, processes, sharded=False, timeout=300) -> list[list]:
    """The records of each process."""
    folder.mkdir()
    words = [folder, script, *arguments(flags)]
    env = fsdp_environment(processes) if sharded else None
    done = forked.run("tests/collectives.py", words, processes, timeout=timeout, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def watch(counted, owner, name, phase):
    """From now on a call of this function or method is a phase, unless made within such a call."""
    call, within = getattr(owner, name), []

    def watched(*args, **kwargs):
        if within:
            return call(*args, **kwargs)
        within.append(True)
        try:
            with counted.phase(phase):
                return call(*args, **kwargs)
        finally:
            within.pop()

    setattr(owner, name, watched)


def watch_steps(counted, run_class, data_class):
    """Phases: what a step needs before it begins, and from seed_step (not an evaluation's) to next_step."""
    seed_step, next_step, batches = run_class.seed_step, run_class.next_step, data_class.batches

    def begins(self):
        if len(counted.open) == 2:  # within "all" alone
            self.counted_step = counted.phase("step")
            self.counted_step.__enter__()
        with counted.phase("seeding"):
            seed_step(self)

    def ends(self):
        next_step(self)
        self.counted_step.__exit__(None, None, None)

    def taken(self, *args):
        rows, batch = batches(self, *args), True
        while batch:
            with counted.phase("rows"):
                batch = next(rows, None)
            if batch:
                yield batch

    run_class.seed_step, run_class.next_step, data_class.batches = begins, ends, taken


def main():
    folder, script = Path(sys.argv.pop(1)), sys.argv.pop(1)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    import data.open
    from data.batches import Data
    from utils import resume
    from utils.learning.optim import Means
    from utils.run import Run
    from utils.state.checkpoint import Checkpoints

    counted = Collectives()
    watch_steps(counted, Run, Data)
    for owner, name, phase in [
        (data.open, "open_sources", "open"), (data.open, "prepare", "prepare"), (Run, "start", "start"),
        (resume, "lock_output_dir", "lock"), (Checkpoints, "load", "load"), (Run, "evaluate", "evaluation"),
        (Run, "save", "save"), (Run, "finish", "end"), (Means, "read", "log"),
    ]:  # fmt: skip
        watch(counted, owner, name, phase)
    with counted.phase("all"), counted:
        importlib.import_module(script).main()
    (folder / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(counted.records))


if __name__ == "__main__":
    main()
