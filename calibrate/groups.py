"""Layers alike enough to share one study: those whose curves cost nearly the same whatever the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from sklearn.cluster import AgglomerativeClustering

from calibrate.allocate import Allowed, allocate
from calibrate.curves import Curve, Way

BUDGETS = (0.1, 1.0, 10.0)  # times a layer's own
APART = 0.08  # of dense attention's time: layers whose costs differ by more than this somewhere are studied apart


def groups(
    layers: Sequence[Mapping[int, Mapping[Way, Curve]]], budgets: Sequence[float], allowed: Allowed
) -> list[list[int]]:
    """Layer numbers, group by group, each ascending, the groups by their first layer.

    layers: of each layer, by segment, the curves of what its heads may choose; budgets: each layer's, as mean squared
    error. Complete linkage: no two layers of a group are further apart than `APART`.
    """
    if len(layers) < 2:
        return [[index] for index in range(len(layers))]
    costs = np.array(
        [
            [
                allocate(curves, share * budget, allowed).cost
                for curves in of_segment.values()
                for share in BUDGETS
            ]
            for of_segment, budget in zip(layers, budgets, strict=True)
        ]
    )  # fmt: skip
    clustering = AgglomerativeClustering(
        n_clusters=None, metric="chebyshev", linkage="complete", distance_threshold=APART
    )
    labels = clustering.fit_predict(costs).tolist()
    return [[i for i, each in enumerate(labels) if each == label] for label in dict.fromkeys(labels)]
