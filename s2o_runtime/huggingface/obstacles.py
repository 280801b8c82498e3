"""What a layer of full attention may ask of its attention function that S2O cannot do: it stays dense with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from s2o_runtime.layer_kinds import text_config


def layer_obstacle(query: Tensor, key: Tensor, value: Tensor, call: Mapping[str, Any]) -> str | None:
    """Why S2O cannot do the attention of a layer, whatever the prompt; None if it can.

    Args:
        query: [B, Hq, Lq, D]; key: [B, Hkv, Lk, D]; value: [B, Hkv, Lk, Dv].
        call: what the layer passes to transformers' attention function besides, by name.
    """
    return _obstacle(call, query.shape[3], value.shape[3])


def _obstacle(call: Mapping[str, Any], query_dim: int, value_dim: int) -> str | None:
    if call.get("softcap") is not None:
        return f"the scores are soft-capped at {call['softcap']:g}"
    if call.get("s_aux") is not None:
        return "the layer has learned sinks"
    if query_dim != value_dim:
        return f"the head dim of queries and keys is {query_dim}, that of values {value_dim}"
    return None


def needs_eager(call: Mapping[str, Any]) -> bool:
    """Whether torch's SDPA cannot do the attention of a layer either, so that its model's own eager code must."""
    return call.get("softcap") is not None or call.get("s_aux") is not None


def foreseen_obstacle(module: nn.Module, config: Any) -> str | None:
    """What `layer_obstacle` will say of a layer, as far as its attention module and the configuration tell.

    Args:
        module: the attention module; its parameters need not be in memory.
        config: the model's transformers configuration.
    """
    config = text_config(config)
    call = {"softcap": getattr(config, "attn_logit_softcapping", None), "s_aux": getattr(module, "sinks", None)}
    query_dim = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None) or 0
    value_dim = getattr(module, "v_head_dim", None) or query_dim
    return _obstacle(call, query_dim, value_dim)
