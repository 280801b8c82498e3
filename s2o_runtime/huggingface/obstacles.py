"""What a layer of full attention may ask of its attention function that S2O cannot do: it stays dense with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from s2o_runtime.config import HEAD_DIMS


def layer_obstacle(query: Tensor, key: Tensor, value: Tensor, call: Mapping[str, Any]) -> str | None:
    """Why S2O cannot do the attention of a layer, whatever the prompt; None if it can.

    Args:
        query: [B, Hq, Lq, D]; key: [B, Hkv, Lk, D]; value: [B, Hkv, Lk, Dv].
        call: what the layer passes to transformers' attention function besides, by name.
    """
    return _obstacle(query.shape[3], value.shape[3])


def _obstacle(query_dim: int, value_dim: int) -> str | None:
    widest = max(query_dim, value_dim)
    if widest > HEAD_DIMS[-1]:
        return f"head_dim {widest} is not supported by the kernel (up to {HEAD_DIMS[-1]})"
    return None


def foreseen_obstacle(module: nn.Module, config: Any) -> str | None:
    """What `layer_obstacle` will say of a layer, as far as its attention module and the configuration tell.

    Args:
        module: the attention module; its parameters need not be in memory.
        config: the model's transformers configuration.
    """
    query_dim = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None) or 0
    value_dim = getattr(module, "v_head_dim", None) or query_dim
    return _obstacle(query_dim, value_dim)
