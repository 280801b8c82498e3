"""Other methods beside S2O: what each of their settings does to every head of a layer, and what it costs.

A setting of another method has no threshold axis, so it is run, and stands as a curve of one point. Heads may be given
to it like to any point of S2O's curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from calibrate.capture import Captured
from calibrate.costs import rival_cost
from calibrate.curves import Curve, head_norms, worst_of
from calibrate.timing import medians
from calibrate.worst import row_errors, tile_worst
from s2o_runtime.baselines.run import HEAD_DIM, attend, baseline_attention, select
from s2o_runtime.baselines.settings import PBS, Baseline, Sparge
from s2o_runtime.dense import dense_attention

ROUNDS = 2

# what heads may choose from; SpargeAttn's own search is over the same three: tau, theta, lambda
_PBS = tuple(PBS(keep) for keep in (0.7, 0.8, 0.9, 0.95, 0.99))
_SPARGE = tuple(
    Sparge(keep, similarity, skip)
    for keep, similarity, skip in product((0.5, 0.7, 0.85, 0.95, 0.98), (0.2, 0.6), (None, -6.0))
)
_SETTINGS: dict[str, tuple[Baseline, ...]] = {"s2o": (), "pbs": _PBS, "sparge": _SPARGE, "auto": (*_PBS, *_SPARGE)}


def settings_of(method: str) -> tuple[Baseline, ...]:
    """The settings of other methods that `--method` lets heads choose from."""
    return _SETTINGS[method]


def supports(prompt: Captured) -> bool:
    """Whether other methods can run this model's heads."""
    return prompt.q.shape[3] <= HEAD_DIM


@torch.no_grad()
def measure(prompt: Captured, settings: Sequence[Baseline], timed: bool) -> dict[Baseline, Curve]:
    """One prompt's errors and densities with each setting, for every head. timed: on a GPU, what they cost too."""
    if not settings or not supports(prompt):
        return {}
    dense = dense_attention(prompt.q, prompt.k, prompt.v, scale=prompt.scale)
    power = float(head_norms(dense).mean()) / prompt.q.shape[3]
    on_gpu = prompt.q.is_cuda
    seconds = None
    if timed and on_gpu:
        call = partial(dense_attention, prompt.q, prompt.k, prompt.v, scale=prompt.scale)
        seconds = medians({"dense": call}, prompt.q.device, ROUNDS)["dense"]
    found = {}
    for each in settings:
        out, stats = baseline_attention(prompt.q, prompt.k, prompt.v, each, scale=prompt.scale)
        mse = torch.stack([_squared(ours, truth) for ours, truth in zip(out[0], dense[0], strict=True)])
        worst = worst_of(tile_worst(row_errors(out, dense)[0])[..., None])
        density = stats.density
        cost = None
        if seconds is not None:
            cost = _cost(prompt, each, density, seconds)
        elif not on_gpu:
            cost = rival_cost(density)
        mse, worst, density = (t.double().cpu().reshape(-1, 1) for t in (mse, worst, density))
        found[each] = Curve(mse, mse, worst, worst, density, power, None if cost is None else cost.cpu()[:, None])
    return found


def _squared(out: Tensor, truth: Tensor) -> Tensor:
    return (out.float() - truth.float()).square().mean()


def _cost(prompt: Captured, settings: Baseline, density: Tensor, dense: float) -> Tensor:
    """Each head's time over its dense time: all heads alike for selecting, for attending by their density."""
    q, k, v, scale = prompt.q, prompt.k, prompt.v, prompt.scale
    selection = select(q, k, settings, scale=scale)
    times = medians(
        {
            "select": partial(select, q, k, settings, scale=scale),
            "attend": partial(attend, q, k, v, selection, scale=scale),
        },
        q.device,
        ROUNDS,
    )
    return (times["select"] + times["attend"] * density / density.mean()) / dense
