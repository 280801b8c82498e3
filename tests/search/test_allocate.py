"""An error budget is spent over heads: within it, monotonically, and nearly as well as trying every combination."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.curves.curves import TAUS, Curve, RankingConfig, estimate_overhead
from calibrate.search.allocate import ErrorWeights, SearchConstraints, allocate, allocate_together, list_points
from s2o_runtime.config import HeadConfig

RANKING = RankingConfig(1024)
EXTRA = estimate_overhead(RANKING, "none")


def curve(heads):
    """A curve from a list of heads, each a list of (mse, density) for the first thresholds; the rest cost too much."""
    mse = torch.full((len(heads), len(TAUS)), 1e9, dtype=torch.float64)
    density = torch.ones(len(heads), len(TAUS), dtype=torch.float64)
    for h, points in enumerate(heads):
        for t, (error, share) in enumerate(points):
            mse[h, t], density[h, t] = error, share
    none = torch.zeros_like(mse)
    return Curve(mse, torch.full_like(mse, 1e9), none, none, density, 1.0)


def spend(heads, budget_mse):
    return allocate({RANKING: curve(heads)}, budget_mse)


def test_the_budget_goes_where_it_saves_most():
    allocation = spend([[(1.0, 0.2)], [(1.0, 0.6)]], 0.5)  # the sum over two heads may reach 1
    assert allocation.heads == (HeadConfig(TAUS[0], 1024), HeadConfig(segment=1024, mode="dense"))
    assert (allocation.mse, allocation.density) == (0.5, 0.6)
    assert allocation.cost == pytest.approx(0.6 + EXTRA / 2)
    # a budget may be spent to its last bit: the steepest step costs all there is
    assert spend([[(0.9, 0.5)], [(1.0, 0.2)]], 0.5).density == 0.6
    # points between hull corners are bought with the rest, which is spent once, and no head pays twice
    assert spend([[(0.4, 0.9), (2.0, 0.05)]] * 2, 0.3).mse == 0.2
    assert spend([[(0.4, 0.4), (0.6, 0.38), (2.0, 0.05)]], 0.65).mse == 0.6
    # an error that weighs more saves less for its price
    weighted = allocate({RANKING: curve([[(0.5, 0.2)], [(1.0, 0.25)]])}, 1.0, weights=ErrorWeights(1.0, (4.0, 1.0)))
    assert [point.density for point in weighted.points] == [1.0, 0.25]
    # a head whose ranking costs more than it saves is dense
    assert [spend([[(0.0, 1.0 - EXTRA * x)]], 1.0).heads[0].mode for x in (0.5, 2)] == ["dense", "s2o"]


def test_heads_choose_representatives_and_tail_where_they_pay():
    """Three heads: the first needs many representatives, the second a tail, the third neither."""
    many = RankingConfig(1024, 16)
    plain = curve([[(1.0, 0.2)], [(1.0, 0.2)], [(0.1, 0.2)]])
    tailed = replace(plain, tail_mse=torch.tensor([[1.0], [0.1], [0.1]]).double().expand(3, len(TAUS)))
    ranked = curve([[(0.1, 0.2)], [(1.0, 0.2)], [(0.1, 0.2)]])
    allocation = allocate({RANKING: tailed, many: ranked}, 0.101)
    assert [(head.representatives, head.tail) for head in allocation.heads] == [(16, "none"), (1, "mean"), (1, "none")]
    costs = [estimate_overhead(many, "none"), estimate_overhead(RANKING, "mean"), estimate_overhead(RANKING, "none")]
    assert min(costs) == costs[2]
    assert allocation.cost == pytest.approx(0.2 + sum(costs) / 3)


head_points = st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.05, 0.99)), min_size=1, max_size=4)
instances = st.lists(st.tuples(head_points, st.floats(0.1, 4.0)), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(instances, st.floats(0.01, 1.0), st.sampled_from([1e9, 2.0, 1.0, 0.5]), st.floats(1.0, 3.0))
def test_an_allocation_is_within_its_limits_monotone_and_nearly_the_best(instance, budget, head_cap, more):
    """Of heads with weights of their own; the best is found by trying every combination."""
    heads, weights = zip(*instance, strict=True)

    def spend_on(budget):
        constraints = SearchConstraints(("none",), head_cap=head_cap)
        return allocate({RANKING: curve(heads)}, budget, constraints, ErrorWeights(7.0, weights))

    for head in range(len(heads)):
        points = list_points({RANKING: curve(heads)}, head, SearchConstraints())
        assert all(near.mse <= far.mse and near.cost > far.cost for near, far in itertools.pairwise(points))
    allocation = spend_on(budget)
    spent = [weight * point.mse for weight, point in zip(weights, allocation.points, strict=True)]
    assert sum(spent) / len(heads) <= budget + 1e-12
    assert max(spent) <= head_cap * budget + 1e-12
    options = [
        [(0.0, 1.0), *((e * w, density + EXTRA) for e, density in points if e * w <= head_cap * budget * (1 - 1e-12))]
        for points, w in zip(heads, weights, strict=True)
    ]
    best = min(
        sum(cost for _, cost in combination) / len(heads)
        for combination in itertools.product(*options)
        if sum(error for error, _ in combination) / len(heads) <= budget
    )
    # the convex relaxation misses at most the worth of one head's last step; where nothing competes, nothing
    assert allocation.cost <= best + (1.0 / len(heads) if len(heads) > 1 else 1e-12)
    if len(heads) == 1:
        assert spend_on(more * budget).cost <= allocation.cost + 1e-12
    cheapest = sum(min(cost for _, cost in points) for points in options) / len(heads)
    assert head_cap < 1e9 or spend_on(1e3).cost == pytest.approx(cheapest)  # all that can be saved


def test_more_budget_is_never_slower():
    torch.manual_seed(0)
    mse = torch.rand(6, len(TAUS), dtype=torch.float64).cumsum(1)
    density = torch.rand(6, len(TAUS), dtype=torch.float64).sort(1, descending=True).values
    curves = {RANKING: Curve(mse, mse + 1, 0 * mse, 0 * mse, density, 1.0)}
    costs = [allocate(curves, budget).cost for budget in (0.0, 0.1, 0.3, 1.0, 3.0, 100.0)]
    assert costs == sorted(costs, reverse=True)


def test_constraints_leave_points_out():
    spared = curve([[(0.1, 0.5), (0.2, 0.3)]])
    rows = torch.tensor([[0.375, 0.6]]).double()
    spared = replace(spared, worst=torch.cat([rows, torch.zeros(1, len(TAUS) - 2)], 1))
    limits = (None, 0.5, 0.375, 0.3)
    chosen = {limit: allocate({RANKING: spared}, 1.0, SearchConstraints(worst_rows=limit)).density for limit in limits}
    assert chosen == {None: 0.3, 0.5: 0.5, 0.375: 0.5, 0.3: 1.0}  # a head may be exactly at the limit
    without_tails = allocate({RANKING: spared}, 1e10, SearchConstraints(("none",)))
    assert all(head.tail == "none" for head in without_tails.heads)


def test_layers_share_a_budget_by_weight():
    """Budget that one layer leaves is the other's; an error that weighs more buys less."""
    layers = [{RANKING: curve([[(1.0, 0.2)], [(1.0, 0.2)]])}, {RANKING: curve([[(1.0, 0.6)], [(1.0, 0.6)]])}]
    assert [allocate(curves, 0.5).density for curves in layers] == [0.6, 0.8]  # one head of two in each
    for weight, densities in ((1.0, [0.2, 1.0]), (4.0, [1.0, 0.6])):
        together = allocate_together(layers, [ErrorWeights(weight), ErrorWeights()], 0.5, [SearchConstraints()] * 2)
        assert [allocation.density for allocation in together] == densities
