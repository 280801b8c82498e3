import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.curves.curves import TAUS, Curve, RankingConfig, overhead
from calibrate.search.allocate import (
    ErrorWeights,
    SearchConstraints,
    allocate,
    allocate_each,
    allocate_together,
    points_of,
)
from s2o_runtime.config import HeadConfig

METHOD = RankingConfig(1024)
EXTRA = overhead(METHOD, "none")


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
    return allocate({METHOD: curve(heads)}, budget_mse)


def test_the_budget_goes_where_it_saves_most():
    allocation = spend([[(1.0, 0.2)], [(1.0, 0.6)]], 0.5)  # the sum over two heads may reach 1
    assert allocation.heads == (HeadConfig(TAUS[0], 1024), HeadConfig(segment=1024, mode="dense"))
    assert (allocation.mse, allocation.density) == (0.5, 0.6)
    assert allocation.cost == pytest.approx(0.6 + EXTRA / 2)


def test_a_budget_may_be_spent_to_its_last_bit():
    """The steepest step costs all there is; a flatter one that costs less would keep others from it."""
    allocation = spend([[(0.9, 0.5)], [(1.0, 0.2)]], 0.5)
    assert (allocation.mse, allocation.density) == (0.5, 0.6)


def test_a_head_whose_ranking_costs_more_than_it_saves_is_dense():
    assert spend([[(0.0, 1.0 - EXTRA / 2)]], 1.0).heads[0].mode == "dense"
    assert spend([[(0.0, 1.0 - EXTRA * 2)]], 1.0).heads[0].mode == "s2o"


def test_heads_choose_representatives_and_tail_where_they_pay():
    """Three heads: the first needs many representatives, the second a tail, the third neither."""
    many = RankingConfig(1024, 16)
    plain = curve([[(1.0, 0.2)], [(1.0, 0.2)], [(0.1, 0.2)]])
    tailed = dataclasses.replace(plain, tail_mse=torch.tensor([[1.0], [0.1], [0.1]]).double().expand(3, len(TAUS)))
    ranked = curve([[(0.1, 0.2)], [(1.0, 0.2)], [(0.1, 0.2)]])
    allocation = allocate({METHOD: tailed, many: ranked}, 0.101)
    assert [(head.representatives, head.tail) for head in allocation.heads] == [(16, "none"), (1, "mean"), (1, "none")]
    assert allocation.density == pytest.approx(0.2)
    costs = [overhead(many, "none"), overhead(METHOD, "mean"), overhead(METHOD, "none")]
    assert min(costs) == costs[2]
    assert allocation.cost == pytest.approx(0.2 + sum(costs) / 3)


points = st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.05, 0.99)), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(heads=st.lists(points, min_size=1, max_size=4), budget=st.floats(0.0, 1.0))
def test_the_budget_holds_and_the_result_is_near_the_best_possible(heads, budget):
    allocation = spend(heads, budget)
    assert allocation.mse <= budget + 1e-12
    best = min(
        sum(cost for _, cost in combination) / len(heads)
        for combination in itertools.product(
            *[[(0.0, 1.0), *((error, share + EXTRA) for error, share in head)] for head in heads]
        )
        if sum(error for error, _ in combination) / len(heads) <= budget
    )
    # the convex relaxation misses at most what one head's last step is worth
    assert best - 1e-12 <= allocation.cost <= best + 1.0 / len(heads)


def test_several_budgets_are_each_spent_as_if_alone():
    generator = torch.Generator().manual_seed(0)
    heads = torch.rand(5, 4, 2, generator=generator).tolist()
    curves = {METHOD: curve(heads), RankingConfig(1024, 16): curve(heads[::-1])}
    budgets = [0.0, 0.05, 0.2, 1.0]
    assert allocate_each(curves, budgets, SearchConstraints(("none",))) == [
        allocate(curves, budget, SearchConstraints(("none",))) for budget in budgets
    ]


def test_a_head_whose_rows_go_wrong_gets_no_such_point():
    spared = curve([[(0.1, 0.5), (0.2, 0.3)]])
    rows = torch.tensor([[0.375, 0.6]]).double()
    spared = dataclasses.replace(spared, worst=torch.cat([rows, torch.zeros(1, len(TAUS) - 2)], 1))
    limits = (None, 0.5, 0.375, 0.3)
    chosen = {limit: allocate({METHOD: spared}, 1.0, SearchConstraints(worst_rows=limit)).density for limit in limits}
    assert chosen == {None: 0.3, 0.5: 0.5, 0.375: 0.5, 0.3: 1.0}  # a head may be exactly at the limit
    assert not any(head.tail == "mean" for head in allocate({METHOD: spared}, 1e10, SearchConstraints(("none",))).heads)


def test_no_head_spends_more_than_its_cap():
    """Of four equal parts of the budget a head takes at most `head_cap`, the best point that still fits."""
    curves = {METHOD: curve([[(0.5, 0.8), (2.0, 0.2)], [(4.0, 0.3)], [(4.0, 0.3)], [(4.0, 0.3)]])}
    densities = {
        cap: allocate(curves, 0.5, SearchConstraints(head_cap=cap)).density for cap in (math.inf, 4.0, 2.0, 1.0)
    }
    assert densities == {math.inf: 0.8, 4.0: 0.8, 2.0: 0.95, 1.0: 0.95}


def test_layers_share_a_budget_by_weight():
    """What one layer leaves the other may spend; an error that weighs more buys less."""
    layers = [{METHOD: curve([[(1.0, 0.2)], [(1.0, 0.2)]])}, {METHOD: curve([[(1.0, 0.6)], [(1.0, 0.6)]])}]
    alone = [allocate(curves, 0.5).density for curves in layers]
    assert alone == [0.6, 0.8]  # one head of two in each
    together = allocate_together(layers, [ErrorWeights(), ErrorWeights()], 0.5)
    assert [allocation.density for allocation in together] == [0.2, 1.0]
    weighted = allocate_together(layers, [ErrorWeights(4.0), ErrorWeights()], 0.5)
    assert [allocation.density for allocation in weighted] == [1.0, 0.6]


def int8_curve(floor, points):
    """A curve of int8 scores: one head that visits all keys errs by `floor`, and less cheaply by (mse, density)."""
    of_head = curve([points])
    mse = of_head.mse.clone()
    mse[:, -1] = floor
    return dataclasses.replace(of_head, mse=mse)


def test_int8_scores_are_paid_for_before_anything_is_skipped():
    int8 = RankingConfig(1024, scores="int8")
    curves = {int8: int8_curve(0.25, [(0.75, 0.2)])}
    dense = allocate(curves, 0.5)
    assert (dense.heads[0].mode, dense.mse) == ("dense", 0.25)
    assert allocate(curves, 0.75).heads[0] == HeadConfig(TAUS[0], 1024)
    assert allocate(curves, 0.1).mse == 0.25  # cannot be: the choice then gives int8 scores up


def test_a_tail_may_err_less_than_all_keys_in_int8():
    """Then that is what int8 scores cost at least, so that a head's points still rise in error."""
    int8 = RankingConfig(1024, scores="int8")
    without_tail = curve([[(0.25, 0.8), (0.75, 0.2)]])
    tail = torch.full_like(without_tail.mse, 1e9)
    tail[0, 0] = 0.2
    curves = {int8: dataclasses.replace(without_tail, tail_mse=tail)}
    errors = [point.mse for point in points_of(curves, 0, SearchConstraints())]
    assert errors == sorted(errors)
    assert errors[0] == 0.2
    assert allocate(curves, 0.75).density == 0.2


def test_more_budget_is_never_denser():
    torch.manual_seed(0)
    mse = torch.rand(6, len(TAUS), dtype=torch.float64).cumsum(1)
    density = torch.rand(6, len(TAUS), dtype=torch.float64).sort(1, descending=True).values
    curves = {METHOD: Curve(mse, mse + 1, 0 * mse, 0 * mse, density, 1.0)}
    shares = [allocate(curves, budget).cost for budget in (0.0, 0.1, 0.3, 1.0, 3.0, 100.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(float(density.min(1).values.mean()) + EXTRA)
