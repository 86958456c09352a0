"""Divides work on matrices between processes: each computes some matrices and sends the results."""

import torch
import torch.distributed as dist


def share(work, stacks, shapes: list[tuple], processes, sharded: bool):
    """Yields work(stack) for each stack of matrices [n, r, c]. work: a function of any number of matrices.

    shapes: (n, r, c) of each stack. processes: a process group. sharded: each process has some rows of every
    matrix, as with FSDP, and gets these rows of the results; else each has all rows. An all-to-all per stack
    exchanges the results, during the work on the next stack. Before the work on sharded matrices, another
    all-to-all gives each process complete matrices."""
    size, rank, jobs, results = processes.size(), processes.rank(), [], []
    for stack, (_, r, c), counts in zip(stacks, shapes, share_out(shapes, size), strict=True):
        shard = -(-r // size)  # rows per process, as torch.chunk divides
        rows = [len(range(r)[p * shard : (p + 1) * shard]) if sharded else r for p in range(size)]
        # Elements exchanged with each process: of the matrices computed by this process; of its rows.
        matrix_sizes, row_sizes = [counts[rank] * n * c for n in rows], [n * rows[rank] * c for n in counts]
        matrices = stack.split(counts)[rank]
        if sharded:
            received = stack.new_empty(sum(matrix_sizes))
            dist.all_to_all_single(received, stack.flatten(), matrix_sizes, row_sizes, processes)
            parts = zip(received.split(matrix_sizes), rows, strict=True)
            matrices = torch.cat([part.view(counts[rank], n, c) for part, n in parts], dim=1)
        jobs.append((matrices, stack.shape, rows, matrix_sizes, row_sizes))
    for matrices, shape, rows, matrix_sizes, row_sizes in jobs:
        done = work(matrices)
        sent = torch.cat([part.flatten() for part in (done.split(rows, 1) if sharded else [done] * size)])
        result, sizes = done.new_empty(shape), (row_sizes, matrix_sizes)
        handle = dist.all_to_all_single(result.view(-1), sent, *sizes, processes, async_op=True)
        results.append((handle, result))
    for handle, result in results:
        handle.wait()
        yield result


def share_out(shapes: list[tuple], processes: int) -> list[list[int]]:
    """For each stack, how many matrices each process computes: dealt in turn, the costliest first."""
    counts, dealt = [[]] * len(shapes), 0
    for i in sorted(range(len(shapes)), key=lambda i: iteration_flops(*shapes[i][1:]), reverse=True):
        counts[i] = [len(range((p - dealt) % processes, shapes[i][0], processes)) for p in range(processes)]
        dealt += shapes[i][0]
    return counts


def iteration_flops(r: int, c: int) -> int:
    """FLOPs of Muon's five iterations on an r x c matrix."""
    return 10 * min(r, c) ** 2 * (2 * max(r, c) + min(r, c))
