"""The order of rows is a permutation in each epoch, computed from (seed, epoch, position) alone."""

import numpy as np
import pytest

from data.batches.order import epochs_and_rows, evaluation_order, evaluation_rows, permuted
from data.batches.rows import PackedRows


def order(n: int, seed: int, start: int, stop: int) -> list[tuple]:
    """Returns (position, epoch, row) for positions start to stop."""
    rows = PackedRows([np.zeros(n, np.uint16)], 1)
    return [key[:3] for key in rows.keys(start, stop, seed)]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000, 4097])
def test_every_row_comes_once_per_epoch(n):
    keys = order(n, seed=3, start=0, stop=3 * n)
    for epoch in range(3):
        rows = [row for _, e, row in keys if e == epoch]
        assert sorted(rows) == list(range(n))
    assert [position for position, _, _ in keys] == list(range(3 * n))


def test_resuming_at_any_position_continues_the_same_order():
    keys = order(1000, seed=1, start=0, stop=2500)
    for start in (0, 1, 999, 1000, 1001, 2499, 2500):
        assert order(1000, seed=1, start=start, stop=2500) == keys[start:]


def test_seed_and_epoch_change_the_order():
    positions = np.arange(5000)
    orders = [permuted(positions, 5000, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0), (2**40, 0)]]
    for i, a in enumerate(orders):
        for b in orders[:i]:  # independent orders agree in about 1 place, Poisson distributed
            assert (a == b).sum() < 12


def test_the_order_is_uniform():
    """Over 4,000 seeds: chi-square with 99 degrees of freedom below its 1 - 1e-9 quantile."""
    counts = np.zeros((10, 10))
    for seed in range(4000):
        for position, row in enumerate(permuted(np.arange(10), 10, seed, 0)):
            counts[position, row] += 1
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 200
    neighbours = permuted(np.arange(100_000), 100_000, 5, 0)
    assert abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]) < 0.02


def test_ten_billion_rows_need_no_memory():
    rows = epochs_and_rows(7 * 10**9, 7 * 10**9 + 1000, 10**10, seed=0)[1].tolist()
    assert len(set(rows)) == 1000 and 0 <= min(rows) and max(rows) < 10**10


def test_evaluation_has_every_row_once_and_pads_the_last_batch():
    order = evaluation_order([*range(9), 12], 4)
    assert [row for _, _, row, _ in order] == [position for position, *_ in order] == [*range(9), 12, -1, -1]
    assert {(epoch, source) for _, epoch, _, source in order} == {(0, 0)}
    assert len(evaluation_order([*range(8)], 4)) == 8


def test_evaluation_samples_are_random_and_nested():
    drawn = evaluation_rows(1000, 100)
    assert len(set(drawn)) == 100 and drawn == sorted(drawn) and 0 <= drawn[0] and drawn[-1] < 1000
    assert set(evaluation_rows(1000, 40)) < set(drawn) == set(evaluation_rows(1000, 100))
    assert np.histogram(drawn, 5, (0, 1000))[0].min() > 8  # uniform: 20 are expected in each fifth
    first = {row for _, _, row in order(1000, seed=3, start=0, stop=100)}  # rows of the first training steps
    assert len(first & set(drawn)) < 30
    for most in (0, 1000, 1001):
        assert evaluation_rows(1000, most) == list(range(1000))
