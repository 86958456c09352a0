"""Divides work on matrices over processes: each computes some of them and sends the others the results."""

import torch
import torch.distributed as dist


def share(work, stacks, shapes: list[tuple], processes, sharded: bool):
    """Yields work(stack) for each of these stacks of matrices [n, r, c]; work takes any number of matrices.

    shapes: (n, r, c) of each stack. processes: a group. sharded: each process holds some rows of every
    matrix, as with FSDP, and gets these rows of the results; else each holds all. An all-to-all per stack
    exchanges the results during the work on the next stack; sharded matrices need another one before."""
    size, me, jobs, results = processes.size(), processes.rank(), [], []
    for stack, (_, r, c), count in zip(stacks, shapes, share_out(shapes, size), strict=True):
        cut, mine = -(-r // size), stack.split(count)[me]  # cut: rows of a shard, as torch.chunk makes them
        held = [len(range(r)[p * cut : (p + 1) * cut]) if sharded else r for p in range(size)]
        of_mine, of_rows = [count[me] * rows * c for rows in held], [n * held[me] * c for n in count]
        if sharded:
            parts = stack.new_empty(sum(of_mine))
            dist.all_to_all_single(parts, stack.flatten(), of_mine, of_rows, processes)
            parts = zip(parts.split(of_mine), held, strict=True)
            mine = torch.cat([part.view(count[me], rows, c) for part, rows in parts], dim=1)
        jobs.append((mine, stack.shape, held, of_mine, of_rows))
    for mine, shape, held, of_mine, of_rows in jobs:
        done = work(mine)
        sent = torch.cat([part.flatten() for part in (done.split(held, 1) if sharded else [done] * size)])
        result = done.new_empty(shape)
        handle = dist.all_to_all_single(result.view(-1), sent, of_rows, of_mine, processes, async_op=True)
        results.append((handle, result))
    for handle, result in results:
        handle.wait()
        yield result


def share_out(shapes: list[tuple], processes: int) -> list[list[int]]:
    """How many matrices of each stack each process computes: dealt out in turn, the costliest first."""
    counts, dealt = [[]] * len(shapes), 0
    for i in sorted(range(len(shapes)), key=lambda i: iteration_flops(*shapes[i][1:]), reverse=True):
        counts[i] = [len(range((p - dealt) % processes, shapes[i][0], processes)) for p in range(processes)]
        dealt += shapes[i][0]
    return counts


def iteration_flops(r: int, c: int) -> int:
    """FLOPs of Muon's five iterations of a matrix."""
    return 10 * min(r, c) ** 2 * (2 * max(r, c) + min(r, c))
