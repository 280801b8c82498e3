"""Algorithm 1 in plain torch: which keys of the prefix matter to a segment, and what those not visited would bring.

The paper ranks keys by their score with the mean query of the segment. Here several parts of the segment may each
rank them, adjacent keys may be ranked together, and the ranking's own weights estimate the keys it leaves out
(docs/method.md). With one representative and a grain of 1 the order is the paper's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Ranking(NamedTuple):
    """A segment's order of its prefix of P keys, in steps of `grain` adjacent keys.

    order: [P] positions, most important first.
    mass, values: [P / grain + 1] and [P / grain + 1, D], the sum of the ranking's weights, and of weights times
        values, over what comes after so many steps of the order; in any unit, and the last entry is 0.
    """

    order: Tensor
    mass: Tensor
    values: Tensor
    grain: int

    def rest(self, keys: int) -> tuple[Tensor, Tensor]:
        """Mass [] and weighted values [D] of the keys after the first `keys` of the order."""
        return self.mass[keys // self.grain], self.values[keys // self.grain]


def segment_representative(q: Tensor, first_position: int, start: int) -> Tensor:
    """Algorithm 1, line 7: the mean of a segment's queries [..., S, D], without those before `start`: [..., D]."""
    return q[..., max(0, start - first_position) :, :].mean(-2)


def part_means(q: Tensor, part: int, first_position: int = 0, start: int = 0) -> Tensor:
    """The representatives of a segment [..., R, D]: means of `part` queries each, without those before `start`.

    q: [..., S, D], of which the last part may be short; parts that are all padding are left out.
    """
    means = []
    for begin in range(0, q.shape[-2], part):
        rows = q[..., max(begin, start - first_position) : begin + part, :]
        if rows.shape[-2]:
            means.append(rows.mean(-2))
    return torch.stack(means, -2)


def log_weights(representatives: Tensor, k: Tensor, grain: int = 1) -> Tensor:
    """What each step of `grain` adjacent keys weighs, as a logarithm: [..., P / grain].

    representatives: [..., R, D], scaled; k: [..., P, D]. A key weighs as much as in that softmax over the
    prefix, one for each representative, where it weighs most.
    """
    scores = representatives @ k.transpose(-1, -2)
    largest = (scores - scores.logsumexp(-1, keepdim=True)).amax(-2)
    return largest.view(*largest.shape[:-1], -1, grain).logsumexp(-1)


def order_of(weights: Tensor, grain: int = 1) -> Tensor:
    """Algorithm 1, line 19: the keys [..., P] by falling weight of their step; weights: [..., P / grain]."""
    steps = weights.argsort(dim=-1, descending=True, stable=True)
    return (steps[..., None] * grain + torch.arange(grain, device=weights.device)).flatten(-2)


def rank(representatives: Tensor, k: Tensor, v: Tensor, grain: int = 1, first: int = 0) -> Ranking:
    """A segment's ranking of the prefix k, v [P, D], whose first key stands at `first`."""
    weights = log_weights(representatives, k, grain)
    order = order_of(weights, grain)
    steps = order[::grain] // grain
    heavy = (weights - weights.amax()).exp()[steps]
    means = v.view(-1, grain, v.shape[1]).mean(1)[steps]
    return Ranking(order + first, _suffix_sums(heavy), _suffix_sums(heavy[:, None] * means), grain)


def _suffix_sums(terms: Tensor) -> Tensor:
    """Sums over the first dimension from each entry to the end, and a 0 for behind the end: [N + 1, ...]."""
    return torch.cat([terms.flip(0).cumsum(0).flip(0), torch.zeros_like(terms[:1])])
