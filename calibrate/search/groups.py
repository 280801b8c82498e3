"""Layers alike enough to share one search: those whose curves cost nearly the same whatever the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sklearn.cluster import AgglomerativeClustering

from calibrate.curves.curves import Curve, RankingConfig
from calibrate.search.allocate import SearchConstraints, allocate_each

BUDGETS = (0.1, 1.0, 10.0)  # times a layer's own
APART = 0.08  # of dense attention's time: layers whose costs differ by more than this somewhere are searched apart


def groups(
    layers: Sequence[Mapping[int, Mapping[RankingConfig, Curve]]],
    budgets: Sequence[float],
    constraints: SearchConstraints,
) -> list[list[int]]:
    """Layers grouped by complete linkage: no two layers of a group are further apart than `APART`.

    Args:
        layers: of each layer, by segment, the curves of what its heads may choose.
        budgets: each layer's, as mean squared error.
        constraints: what heads may choose.

    Returns:
        Layer numbers, group by group, each ascending, the groups by their first layer.
    """
    if len(layers) < 2:
        return [[layer] for layer in range(len(layers))]
    costs = [
        [
            allocation.cost
            for curves in by_segment.values()
            for allocation in allocate_each(curves, [share * budget for share in BUDGETS], constraints)
        ]
        for by_segment, budget in zip(layers, budgets, strict=True)
    ]
    clustering = AgglomerativeClustering(
        n_clusters=None, metric="chebyshev", linkage="complete", distance_threshold=APART
    )
    labels = clustering.fit_predict(costs).tolist()
    return [
        [layer for layer, layer_label in enumerate(labels) if layer_label == label] for label in dict.fromkeys(labels)
    ]
