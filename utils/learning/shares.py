"""Work on matrices, shared out over processes: each does some of them, whole, and sends the others what they
hold of the results."""

import math
from functools import cache

import torch
import torch.distributed as dist


def share(work, stacks, shapes: tuple, processes, sharded: bool):
    """Yields work(stack) of each of these stacks of matrices [n, r, c]; work takes any number of matrices.

    shapes: (n, r, c) of each stack. processes: a group. sharded: each holds some rows of every matrix, as
    FSDP cuts them, [n, rows, c], and gets those of the results; else each holds all. One all-to-all, of
    sharded matrices one before it, too."""
    size, me = processes.size(), processes.rank()
    counts = share_out(shapes, size)
    held = [_rows(r, size) if sharded else [r] * size for _, r, _ in shapes]
    parts = (stack.split(count) for stack, count in zip(stacks, counts, strict=True))  # by who does them
    known = [(count, rows, c) for count, rows, (*_, c) in zip(counts, held, shapes, strict=True)]
    if sharded:
        mine = [[(count[me], rows[p], c) for p in range(size)] for count, rows, c in known]
        mine = [torch.cat(rows, dim=1) for rows in exchange(parts, mine, processes)]
    else:
        mine = [part[me] for part in parts]
    done = map(work, mine)
    done = [x.split(rows, dim=1) if sharded else [x] * size for x, rows in zip(done, held, strict=True)]
    theirs = [[(count[p], rows[me], c) for p in range(size)] for count, rows, c in known]
    yield from map(torch.cat, exchange(done, theirs, processes))


@cache
def share_out(shapes: tuple, processes: int) -> list[list[int]]:
    """Of each stack, how many matrices each process does: the costliest first, each to who has least to do.
    Costs are those of Muon's iteration."""
    counts, costs = [[0] * processes for _ in shapes], [0] * processes
    products = [min(r, c) ** 2 * (2 * max(r, c) + min(r, c)) for _, r, c in shapes]
    for i in sorted(range(len(shapes)), key=products.__getitem__, reverse=True):
        for _ in range(shapes[i][0]):
            process = costs.index(min(costs))
            costs[process] += products[i]
            counts[i][process] += 1
    return counts


def _rows(r: int, processes: int) -> list[int]:
    """Of a matrix of r rows those that each process has: as torch.chunk cuts."""
    most = -(-r // processes)
    return [max(0, min(most, r - p * most)) for p in range(processes)]


def exchange(parts, shapes: list, processes) -> list[list]:
    """parts: lists with a tensor for each process; shapes: lists with the shape of what each process sends
    here. Returns that, in such lists, by one all-to-all."""
    outgoing = [*zip(*parts, strict=True)]  # by process
    sizes = [[math.prod(shape) for shape in of_one] for of_one in zip(*shapes, strict=True)]
    given, taken = [sum(part.numel() for part in of_one) for of_one in outgoing], [*map(sum, sizes)]
    flat = torch.cat([part.flatten() for of_one in outgoing for part in of_one])
    received = flat.new_empty(sum(taken))
    dist.all_to_all_single(received, flat, taken, given, processes)
    pieces = received.split([size for of_one in sizes for size in of_one])
    return [[piece.view(shape) for piece, shape in zip(pieces[i :: len(shapes)], of_one, strict=True)]
            for i, of_one in enumerate(shapes)]  # fmt: skip
