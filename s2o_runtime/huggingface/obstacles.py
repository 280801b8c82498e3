"""What a layer of full attention may ask of its attention function that S2O cannot do yet, and why it then stays dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def layer_obstacle(query: Tensor, key: Tensor, value: Tensor, call: Mapping[str, Any]) -> str | None:
    """Why S2O cannot do the attention of a layer, whatever the prompt; None if it can.

    Args:
        query: [B, Hq, Lq, D]; key: [B, Hkv, Lk, D]; value: [B, Hkv, Lk, Dv].
        call: what the layer passes to transformers' attention function besides, by name.
    """
    if call.get("softcap") is not None:
        return f"the scores are soft-capped at {call['softcap']:g}"
    if call.get("s_aux") is not None:
        return "the layer has learned sinks"
    if query.shape[3] != value.shape[3]:
        return f"the head dim of queries and keys is {query.shape[3]}, that of values {value.shape[3]}"
    return None


def needs_eager(call: Mapping[str, Any]) -> bool:
    """Whether torch's SDPA cannot do the attention of a layer either, so that its model's own eager code must."""
    return call.get("softcap") is not None or call.get("s_aux") is not None
