"""Layers share a study exactly if no budget tells them apart."""

import itertools

import pytest
import torch

from calibrate.curves.curves import TAUS, Curve, RankingConfig, overhead
from calibrate.search.allocate import SearchConstraints
from calibrate.search.choose import APART, BUDGETS, groups

SEGMENTS = (512, 1024)


def layer(costs, budget=1.0):
    """A layer of two equal heads. costs: for every segment, what it costs at each of `BUDGETS` times its budget."""
    found = {}
    for segment, of_segment in zip(SEGMENTS, costs, strict=True):
        mse = torch.full((2, len(TAUS)), 1e9, dtype=torch.float64)
        density = torch.ones(2, len(TAUS), dtype=torch.float64)
        method = RankingConfig(segment)
        for index, (share, cost) in enumerate(zip(BUDGETS, of_segment, strict=True)):
            mse[:, index] = 0.99 * share * budget  # both heads can just afford it
            density[:, index] = cost - overhead(method, "none")
        zero = torch.zeros_like(mse)
        found[segment] = {method: Curve(mse, torch.full_like(mse, 1e9), zero, zero, density, 1.0)}
    return found


def grouped(costs, budgets=None):
    budgets = budgets or [1.0] * len(costs)
    layers = [layer(each, budget) for each, budget in zip(costs, budgets, strict=True)]
    return groups(layers, budgets, SearchConstraints())


@pytest.mark.parametrize("segment", range(2))
@pytest.mark.parametrize("budget", range(3))
def test_one_budget_at_one_segment_tells_layers_apart(segment, budget):
    """Costs fall with the budget, so the others differ a little too, but less than what counts."""
    base = [[0.9, 0.7, 0.5] for _ in SEGMENTS]
    other = [list(each) for each in base]
    other[segment][budget] -= APART * 1.1
    assert grouped([base, other]) == [[0], [1]]
    other[segment][budget] += APART * 0.2
    assert grouped([base, other]) == [[0, 1]]


def test_errors_count_relative_to_the_budget():
    """One layer's errors are a thousand times the other's, and so is what it may have."""
    even = [[0.5] * 3] * 2
    assert grouped([even, even], budgets=[1.0, 1e-3]) == [[0, 1]]
    layers = [layer(even, 1.0), layer(even, 1e-3)]
    assert groups(layers, [1.0, 1.0], SearchConstraints()) == [
        [0, 1]
    ]  # the second has the same costs at every larger budget
    assert groups(layers, [1e-3, 1e-3], SearchConstraints()) == [[0], [1]]


@pytest.mark.parametrize("seed", [0, 3, 7])
def test_no_group_is_wider_than_allowed_and_no_two_would_fit_together(seed):
    generator = torch.Generator().manual_seed(seed)
    count = 3 + seed
    table = torch.rand(count, 2, 3, generator=generator, dtype=torch.float64) * 0.15 + 0.3
    table = table.sort(dim=-1, descending=True).values
    table = torch.cat([table, table[:1] - APART / 100])  # so near to the first layer that these two share at least
    count += 1
    groups = grouped(table.tolist())
    assert sorted(index for group in groups for index in group) == list(range(count))
    assert all(group == sorted(group) for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)

    def width(group):
        of_group = table[list(group)].flatten(1)
        return float((of_group.amax(0) - of_group.amin(0)).max())

    assert all(width(group) < APART for group in groups)
    assert all(width(one + other) >= APART for one, other in itertools.combinations(groups, 2))
    assert len(groups) < count
