"""The curves of one prompt at one layer, by whichever pass this device and dtype allow.

One pass over the prefix gives the whole threshold axis: on a GPU the trace kernel (`trace_pass.py`), elsewhere plain
torch (`torch_pass.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from calibrate.curves import torch_pass, trace_pass
from calibrate.curves.curves import Curve, RankingConfig, Shape
from calibrate.model.layers import Captured
from s2o_runtime.devices import launching_on


def measure(
    prompt: Captured, rankings: Sequence[RankingConfig], shapes: Sequence[Shape], last_rows: int = 0
) -> dict[tuple[RankingConfig, Shape], Curve]:
    """One prompt's curves at one layer.

    Args:
        prompt: the layer's q, k and v.
        rankings: all of one segment length.
        shapes: of the tiles that may run the layer.
        last_rows: so many rows at the prompt's end are dense, whatever the threshold (`LayerConfig.last_rows`).

    Returns:
        A curve for every ranking and shape.
    """
    if trace_pass.supports(prompt):
        with launching_on(prompt.q.device):  # a model on several GPUs has layers on others than the current one
            return trace_pass.measure(prompt, rankings, shapes, last_rows)
    return torch_pass.measure(prompt, rankings, shapes, last_rows)
