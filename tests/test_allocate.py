import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.allocate import DENSE, allocate
from calibrate.curves import TAUS, Curve


def curve(heads):
    """A curve from a list of heads, each a list of (mse, density) for the first thresholds; the rest cost too much."""
    mse = torch.full((len(heads), len(TAUS)), 1e9, dtype=torch.float64)
    density = torch.ones(len(heads), len(TAUS), dtype=torch.float64)
    for h, points in enumerate(heads):
        for t, (error, share) in enumerate(points):
            mse[h, t], density[h, t] = error, share
    return Curve(mse, density, 1.0)


def test_the_budget_goes_where_it_saves_most():
    made = allocate(curve([[(1.0, 0.2)], [(1.0, 0.6)]]), budget_mse=0.5)  # the sum over two heads may reach 1
    assert [point.tau for point in made.points] == [0, DENSE]
    assert (made.mse, made.density) == (0.5, 0.6)
    assert made.taus == (TAUS[0], None)


def test_nothing_is_spent_without_a_budget():
    made = allocate(curve([[(1.0, 0.2)]]), budget_mse=0.0)
    assert made.taus == (None,)
    assert (made.mse, made.density) == (0.0, 1.0)


def test_an_error_free_point_is_taken_without_a_budget():
    assert allocate(curve([[(0.0, 0.4), (1.0, 0.1)]]), budget_mse=0.0).density == 0.4


def test_more_budget_is_never_denser():
    torch.manual_seed(0)
    mse = torch.rand(6, len(TAUS), dtype=torch.float64).cumsum(1)
    density = torch.rand(6, len(TAUS), dtype=torch.float64).sort(1, descending=True).values
    shares = [allocate(Curve(mse, density, 1.0), budget).density for budget in (0.0, 0.1, 0.3, 1.0, 3.0, 100.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(float(density.min(1).values.mean()))


points = st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.05, 0.99)), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(heads=st.lists(points, min_size=1, max_size=4), budget=st.floats(0.0, 1.0))
def test_the_budget_holds_and_the_result_is_near_the_best_possible(heads, budget):
    made = allocate(curve(heads), budget)
    assert made.mse <= budget + 1e-12
    best = min(
        sum(density for _, density in combination) / len(heads)
        for combination in itertools.product(*[[(0.0, 1.0), *head] for head in heads])
        if sum(error for error, _ in combination) / len(heads) <= budget
    )
    # the convex relaxation misses at most what one head's last step is worth
    assert best - 1e-12 <= made.density <= best + 1.0 / len(heads)
