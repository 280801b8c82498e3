"""The queries, keys and values of a model, one decoder layer at a time.

Hidden states of all prompts move through the model together, layer by layer. Attention is dense on the way, so
what is measured at one layer does not disturb the next, and only one layer's q, k, v exist at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from s2o_runtime.dense import dense_attention
from s2o_runtime.identity import attention_modules

NAME = "s2o_capture"
SINK = "s2o_capture_sink"


@dataclass(frozen=True)
class Captured:
    """One prompt's attention inputs at one layer: q [1, Hq, L, D]; k, v [1, Hkv, L, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


class _ReachedError(Exception):
    """The first decoder layer was reached; its inputs are in `args` and `kwargs`."""

    def __init__(self, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        self.hidden, self.kwargs = hidden, kwargs


@torch.no_grad()
def layers(model: Any, prompts: list[Tensor]) -> Iterator[list[Captured]]:
    """For each layer in turn, the attention inputs of every prompt (token ids [L])."""
    device = next(model.parameters()).device
    with _capturing(model):
        streams = [_first_layer_inputs(model, ids.to(device)) for ids in prompts]
        for layer, attention in zip(model.get_decoder().layers, attention_modules(model), strict=True):
            captured: list[Captured] = []
            attention.__dict__[SINK] = captured
            try:
                streams = [(_hidden(layer(hidden, **kwargs)), kwargs) for hidden, kwargs in streams]
            finally:
                del attention.__dict__[SINK]
            yield captured


def _first_layer_inputs(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Any]]:
    decoder = model.get_decoder()

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        raise _ReachedError(hidden, kwargs)

    hook = decoder.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        decoder(input_ids=ids[None], use_cache=False)
    except _ReachedError as reached:
        return reached.hidden, reached.kwargs
    finally:
        hook.remove()
    raise AssertionError("the model ran without calling its first decoder layer")


def _hidden(output: Any) -> Tensor:
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


@contextmanager
def _capturing(model: Any) -> Iterator[None]:
    AttentionInterface.register(NAME, _capture_forward)
    AttentionMaskInterface.register(NAME, _no_mask)
    previous = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


def _no_mask(**call: Any) -> None:
    """Prompts are single and unpadded: causal attention needs no mask."""


def _capture_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    sink: list[Captured] | None = module.__dict__.get(SINK)
    if sink is not None:
        sink.append(Captured(query, key, value, scaling))
    out = dense_attention(query, key, value, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
