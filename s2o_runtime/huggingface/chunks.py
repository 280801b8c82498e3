"""A prefill fed to a layer in chunks, as a server feeds long prompts: every chunk is a call behind those before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from s2o_runtime.huggingface.layers import LayerState
from s2o_runtime.shapes import CallShape


def prefill_in_chunks(
    state: LayerState, query: Tensor, key: Tensor, offset: int, compute: Callable[[slice, int], Tensor]
) -> Tensor:
    """Compute a prefill chunk by chunk, and let the layer's observer see it as one.

    Args:
        state: of the layer; its `chunk` is the queries of all calls but the last. Its `last_density` is that of the
            whole prefill afterwards.
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lk, D].
        offset: the position of the first query.
        compute: computes some of the queries behind so many keys, and leaves what it did in `state.last`.

    Returns:
        [B, Hq, Lq, D].
    """
    assert state.chunk is not None
    q_len, chunk, observer = query.shape[2], state.chunk, state.observer
    outputs, computed, causal = [], 0.0, 0
    state.observer, state.last_density = None, None
    try:
        for begin in range(0, q_len, chunk):
            end = min(begin + chunk, q_len)
            outputs.append(compute(slice(begin, end), offset + end))
            pairs = CallShape(1, 1, 1, end - begin, offset + end, 1, 1).causal_pairs
            computed += pairs * state.density
            causal += pairs
    finally:
        state.observer = observer
    state.last_density = computed / causal
    return torch.cat(outputs, 2)
