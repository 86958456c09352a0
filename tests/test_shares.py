"""Muon's iteration is divided among processes. Each update is that of one process, computed and sent once."""

import json

import pytest

from tests import forked

# Each process has an optimizer that shares the iteration and a reference that does not, with equal gradients.
# Weights begin at 0 without decay, so they are sums of updates. The report holds their largest difference,
# relative to a matrix's largest entry, and the matrices that this process iterated and the bytes that it sent
# in the last step.
PROCESS = """
import json, os, sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from tests.collectives import Collectives
from utils.learning import muon

folder, layout, dtype, local = Path(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3]), int(sys.argv[4])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ |= {"LOCAL_WORLD_SIZE": str(local), "LOCAL_RANK": str(rank % local)}
dist.init_process_group("gloo")
muon.PRECISION["cpu"] = dtype
iterated, iterate = [], muon.orthogonalize
muon.orthogonalize = lambda stack: (iterated.append(len(stack)), iterate(stack))[1]

def cut(tensor):
    if layout == "whole":
        return tensor
    grid, cuts = ((size,), [Shard(0)]) if layout == "rows" else ((2, size // 2), [Replicate(), Shard(0)])
    return distribute_tensor(tensor, init_device_mesh("cpu", grid), cuts)

shapes = [(8, 24), (8, 8), (24, 8), (8, 24), (5, 7), (1, 6), (24, 8), (8, 24), (5, 4, 6)]  # 5 experts
def optimizer_of(weights):
    return muon.MuonAdamW([{"params": weights, "momentum": 0.95, "lr": 0.01, "weight_decay": 0.0}], lr=0.01)

shared = [torch.nn.Parameter(cut(torch.zeros(shape))) for shape in shapes]
alone = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
ours, reference = optimizer_of(shared), optimizer_of(alone)
reference._processes = lambda weight: None
torch.manual_seed(1)
for step in range(5):
    bad = torch.tensor(float(step == 3))
    ours.found_inf = reference.found_inf = bad
    for a, b in zip(shared, alone):
        b.grad = torch.randn_like(b) * (torch.nan if bad else 1)
        a.grad = cut(b.grad.clone())
    before = [b.detach().clone() for b in alone]
    reference.step()
    iterated.clear()
    with Collectives() as counted:
        ours.step()
    assert not bad or all(map(torch.equal, before, alone))
full = [a.full_tensor() if isinstance(a, DTensor) else a for a in shared]
buffers = [ours.state[a]["momentum_buffer"] for a in shared]
assert all(buffer.shape == a.shape and type(buffer) is type(a.data) for buffer, a in zip(buffers, shared))
difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(full, alone))
report = {"difference": difference, "iterated": sum(iterated), "sent": counted.open[0]}
(folder / f"{rank}.json").write_text(json.dumps(report))
dist.barrier()
dist.destroy_process_group()
"""
SHAPES, ELEMENTS, EXPERTS = 5, 3 * 192 + 2 * 192 + 64 + 35 + 6, 5 * 24


@pytest.mark.parametrize("processes, layout, local, dtype", [
    (2, "whole", 2, "float32"), (4, "whole", 4, "bfloat16"), (4, "whole", 2, "float32"),
    (2, "rows", 2, "bfloat16"), (4, "rows", 4, "float32"), (4, "replicas", 4, "float32"),
])  # fmt: skip
def test_shared_muon_updates_equal_one_process(tmp_path, processes, layout, local, dtype):
    """Layouts: whole, as under DDP, on machines of `local` processes; rows, as FSDP shards them; replicas,
    two groups of shards. A step with a gradient that is not finite changes nothing. Each update is sent once;
    those of sharded experts are not sent, as each process has complete experts."""
    done = forked.run_code(PROCESS, [tmp_path, layout, dtype, local], processes)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    # As many matrices at a time as a process has: a product may round otherwise, in bfloat16 by 2**-8.
    assert max(each["difference"] for each in reports) < (1e-6 if dtype == "float32" else 2**-8)
    size = {"float32": 4, "bfloat16": 2}[dtype]
    copies = processes // local if layout == "whole" else 2 if layout == "replicas" else 1
    assert sum(each["iterated"] for each in reports) == (8 + 5) * copies  # each matrix once per copy
    for each in reports:
        [(name, (calls, each["bytes"]))] = each["sent"].items()
        assert name == f"alltoall_base_ {dtype}"
        assert calls == (SHAPES + 1 if layout == "whole" else 2 * SHAPES)
    total = sum(each["bytes"] for each in reports)
    if layout == "whole":
        assert [each["bytes"] for each in reports] == [(ELEMENTS + EXPERTS) * size] * processes
    else:  # rows to who iterates, updates back
        assert total == 2 * ELEMENTS * size * copies
