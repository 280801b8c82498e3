"""Attention modules that somebody watches: what reaches them, and what is computed there, is up to who watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from s2o_runtime.errors import ModelError
from s2o_runtime.huggingface.hf import s2o_attention_forward, s2o_mask, scoring_of
from s2o_runtime.huggingface.obstacles import layer_obstacle
from s2o_runtime.scoring import Scoring

NAME = "s2o_watched"
WATCH = "s2o_watch"

Watch = Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]  # q, k, v [1, H, L, D] -> the output [1, Hq, L, Dv]


def register() -> None:
    """Make transformers know the attention implementation `NAME`, with which modules can be watched."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, s2o_mask)


@contextmanager
def watched(attention: nn.Module, watch: Watch) -> Iterator[None]:
    """Inside the block an attention module of full attention computes what `watch` gives."""
    attention.__dict__[WATCH] = watch
    try:
        yield
    finally:
        del attention.__dict__[WATCH]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What the module's watch gives; modules that nobody watches stay what they are."""
    watch: Watch | None = module.__dict__.get(WATCH)
    if watch is None:
        return s2o_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    obstacle = layer_obstacle(query, key, value, kwargs)
    if obstacle is not None:
        raise ModelError(f"layer {module.layer_idx} cannot run S2O ({obstacle}): the model is not supported")
    scoring = scoring_of(query.shape[3] ** -0.5 if scaling is None else scaling, kwargs)
    return watch(query, key, value, scoring).transpose(1, 2).contiguous(), None
