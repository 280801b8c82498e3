"""Algorithm 1 in plain torch: the order in which a segment visits its prefix, and estimates of what it leaves out.

The paper ranks keys by their score with the mean query of the segment. Here the segment may be cut into parts whose
mean queries each rank the keys, adjacent keys may be ranked together, and the ranking's weights estimate what the keys
that are not visited would add (docs/how-it-works.md). With one representative and a grain of 1 the order is the
paper's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call import cap_scores


class RankedPrefix(NamedTuple):
    """The order in which a segment visits its prefix of P keys, in steps of `grain` adjacent keys."""

    order: Tensor  # int64 [P], key positions, most important first
    # [P / grain + 1], the sum of the ranking's weights over the keys after the first n steps of the order, in any unit
    mass: Tensor
    values: Tensor  # [P / grain + 1, Dv], the same sum of weights times values
    grain: int

    def rest(self, keys: int) -> tuple[Tensor, Tensor]:
        """Return mass [] and weighted values [Dv] of the keys after the first `keys` of the order."""
        return self.mass[keys // self.grain], self.values[keys // self.grain]


def make_representatives(q: Tensor, part: int, first_position: int = 0, start: int = 0) -> Tensor:
    """Average the queries [..., S, D] of each part of a segment: its representatives [..., R, D].

    The last of the parts of `part` queries may be shorter. Queries before `start`, the first key that counts, are
    padding, and parts that are all padding are left out. Source: Algorithm 1, line 7, for one part.
    """
    means = []
    for begin in range(0, q.shape[-2], part):
        rows = q[..., max(begin, start - first_position) : begin + part, :]
        if rows.shape[-2]:
            means.append(rows.mean(-2))
    return torch.stack(means, -2)


def log_weights(representatives: Tensor, k: Tensor, grain: int = 1, softcap: float | None = None) -> Tensor:
    """Compute the logarithm of the weight of each step of `grain` adjacent keys [..., P, D]: [..., P / grain].

    Each representative [..., R, D], scaled, gives a softmax over the prefix. The weight of a key is its largest one,
    the weight of a step the sum over its keys. Sinks have no part in it: they say nothing of which key is more
    important. A key with a score that is NaN or infinite weighs infinitely much, and nothing in the softmax of others:
    rows that see it may be NaN, so it must be visited.
    """
    scores = cap_scores(representatives @ k.transpose(-1, -2), softcap)
    finite = scores.isfinite()
    log_sum = scores.masked_fill(~finite, float("-inf")).logsumexp(-1, keepdim=True)
    largest = torch.where(finite, scores - log_sum, float("inf")).amax(-2)
    return largest.view(*largest.shape[:-1], -1, grain).logsumexp(-1)


def order_of(weights: Tensor, grain: int = 1) -> Tensor:
    """Order the keys by falling weight [..., P / grain] of their step (Algorithm 1, line 19): int64 [..., P]."""
    steps = weights.argsort(dim=-1, descending=True, stable=True)
    return (steps[..., None] * grain + torch.arange(grain, device=weights.device)).flatten(-2)


def rank(
    representatives: Tensor, k: Tensor, v: Tensor, grain: int = 1, first: int = 0, softcap: float | None = None
) -> RankedPrefix:  # fmt: skip
    """Rank a segment's prefix, k [P, D] and v [P, Dv], whose first key stands at position `first`.

    representatives: [R, D], scaled.
    """
    weights = log_weights(representatives, k, grain, softcap)
    order = order_of(weights, grain)
    steps = order[::grain] // grain
    mass = (weights - weights.amax()).exp()[steps]
    means = v.view(-1, grain, v.shape[1]).mean(1)[steps]
    return RankedPrefix(order + first, _sum_suffixes(mass), _sum_suffixes(mass[:, None] * means), grain)


def _sum_suffixes(terms: Tensor) -> Tensor:
    """Sum over the first dimension from each entry to the end, with a last entry of 0: [N + 1, ...]."""
    return torch.cat([terms.flip(0).cumsum(0).flip(0), torch.zeros_like(terms[:1])])
