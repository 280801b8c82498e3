"""The curves of baselines: what each setting of another paper's method does to every head of a layer, and its cost.

Such a setting has no threshold axis, so it is run, and becomes a curve of one point. Heads may be given to it as to any
point of S2O's curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from calibrate.curves.costs import baseline_cost
from calibrate.curves.curves import Curve, head_norms
from calibrate.curves.row_errors import row_errors, tile_worst, worst_of
from calibrate.model.capture import Captured
from calibrate.timing import medians
from s2o_runtime.baselines.run import HEAD_DIM, attend, baseline_attention, select
from s2o_runtime.baselines.settings import PBS, Baseline, FlashPrefill, Prism, SkipSoftmax, Sparge
from s2o_runtime.reference.dense import dense_attention

ROUNDS = 2

# what heads may choose from; SpargeAttn's own search is over the same three: tau, theta, lambda. Its first block is
# kept: most models attend to their first keys whatever the text, and the means of a block's keys do not show that
_PBS = tuple(PBS(keep) for keep in (0.7, 0.8, 0.9, 0.95, 0.99))
_SPARGE = tuple(
    Sparge(keep, similarity, skip, first=1)
    for keep, similarity, skip in product((0.5, 0.7, 0.85, 0.95, 0.98), (0.2, 0.6), (None, -6.0))
)
_FLASH_PREFILL = tuple(FlashPrefill(alpha) for alpha in (0.3, 0.12, 0.03, 0.01, 0.001))
_PRISM = tuple(Prism(keep) for keep in (0.7, 0.8, 0.9, 0.95, 0.99))
_SKIP_SOFTMAX = tuple(SkipSoftmax(factor, block) for factor, block in product((1e3, 5e3, 2e4, 1e5), (64, 128)))
_SETTINGS: dict[str, tuple[Baseline, ...]] = {
    "s2o": (),
    "flash-prefill": _FLASH_PREFILL,
    "prism": _PRISM,
    "pbs": _PBS,
    "sparge": _SPARGE,
    "skip-softmax": _SKIP_SOFTMAX,
    "auto": (*_FLASH_PREFILL, *_PRISM, *_PBS, *_SPARGE, *_SKIP_SOFTMAX),
}


def settings_of(method: str) -> tuple[Baseline, ...]:
    """The settings of baselines that `--method` lets heads choose from."""
    return _SETTINGS[method]


def supports(prompt: Captured) -> bool:
    """Whether baselines can run this model's heads."""
    head_dims_fit = prompt.v.shape[3] == prompt.q.shape[3] <= HEAD_DIM
    return head_dims_fit and prompt.scoring.beyond_sdpa is None


@torch.no_grad()
def measure(prompt: Captured, settings: Sequence[Baseline], timed: bool) -> dict[Baseline, Curve]:
    """One prompt's errors and densities with each setting, for every head.

    Args:
        prompt: the layer's q, k and v.
        settings: of any baselines.
        timed: on a GPU, whether their cost is measured too; on a CPU it is always predicted.

    Returns:
        A curve of one point for each setting; none if baselines cannot run these heads.
    """
    if not settings or not supports(prompt):
        return {}
    dense = dense_attention(prompt.q, prompt.k, prompt.v, scale=prompt.scale)
    power = float(head_norms(dense).mean()) / prompt.q.shape[3]
    on_gpu = prompt.q.is_cuda
    dense_seconds = None
    if timed and on_gpu:
        call = partial(dense_attention, prompt.q, prompt.k, prompt.v, scale=prompt.scale)
        dense_seconds = medians({"dense": call}, prompt.q.device, ROUNDS)["dense"]
    curves = {}
    for setting in settings:
        out, stats = baseline_attention(prompt.q, prompt.k, prompt.v, setting, scale=prompt.scale)
        mse = torch.stack([_squared(ours, truth) for ours, truth in zip(out[0], dense[0], strict=True)])
        worst = worst_of(tile_worst(row_errors(out, dense)[0]))
        density = stats.density
        cost = None
        if dense_seconds is not None:
            cost = _cost(prompt, setting, density, dense_seconds)
        elif not on_gpu:
            cost = baseline_cost(density)
        mse, worst, density = (t.double().cpu().reshape(-1, 1) for t in (mse, worst, density))
        curves[setting] = Curve(mse, mse, worst, worst, density, power, None if cost is None else cost.cpu()[:, None])
    return curves


def _squared(out: Tensor, truth: Tensor) -> Tensor:
    return (out.float() - truth.float()).square().mean()


def _cost(prompt: Captured, setting: Baseline, density: Tensor, dense_seconds: float) -> Tensor:
    """Each head's time over its dense time: all heads alike for selecting, for attending by their density."""
    q, k, v, scale = prompt.q, prompt.k, prompt.v, prompt.scale
    selection = select(q, k, setting, scale=scale)
    times = medians(
        {
            "select": partial(select, q, k, setting, scale=scale),
            "attend": partial(attend, q, k, v, selection, scale=scale),
        },
        q.device,
        ROUNDS,
    )
    return (times["select"] + times["attend"] * density / density.mean()) / dense_seconds
