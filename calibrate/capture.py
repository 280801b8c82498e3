"""The queries, keys and values of a model, one decoder layer and one prompt at a time.

Attention is dense on the way, so what is measured at one layer does not disturb the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from calibrate.models import LoadedModel
from calibrate.streams import Stream, attention_implementation, begin, check_finite, layer_on_device
from s2o_runtime.dense import dense_attention
from s2o_runtime.identity import attention_modules

NAME = "s2o_capture"
SINK = "s2o_capture_sink"


@dataclass(frozen=True)
class Captured:
    """One prompt's attention inputs at one layer: q [1, Hq, L, D]; k, v [1, Hkv, L, D].

    prompt: its place in the list that was given.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    layer: int = 0
    prompt: int = 0


@torch.no_grad()
def layers(loaded: LoadedModel, prompts: list[Tensor]) -> Iterator[Iterator[Captured]]:
    """For each layer in turn, the attention inputs of every prompt (token ids [L]).

    A prompt runs through the layer when its inputs are asked for, so that those of other prompts need not exist;
    prompts that were not asked for run before the next layer. The hidden states of all stay on the device.
    Raises ModelError naming layer and prompt if inf or NaN come up.
    """
    AttentionInterface.register(NAME, _capture_forward)
    AttentionMaskInterface.register(NAME, _no_mask)
    with attention_implementation(loaded.model, NAME):
        streams = begin(loaded, prompts)
        for index, attention in enumerate(attention_modules(loaded.model)):
            with layer_on_device(loaded, index) as layer:
                captured = _prompts_through(layer, attention, index, streams)
                yield captured
                for _ in captured:
                    pass


@torch.no_grad()
def _prompts_through(
    layer: nn.Module, attention: nn.Module, index: int, streams: list[Stream]
) -> Iterator[Captured]:  # fmt: skip
    for place in range(len(streams)):
        streams[place], captured = _through(layer, attention, index, streams[place])
        yield captured
        del captured  # else it would live through the next prompt's turn


def _through(layer: nn.Module, attention: nn.Module, index: int, stream: Stream) -> tuple[Stream, Captured]:
    found: list[Captured] = []

    def keep(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        for name, tensor in (("queries", q), ("keys", k), ("values", v)):
            check_finite(tensor, f"tensor of {name}", index, stream.prompt)
        found.append(Captured(q, k, v, scale, index, stream.prompt))

    attention.__dict__[SINK] = keep
    try:
        return stream.through(layer, index), found[0]
    finally:
        del attention.__dict__[SINK]


def _no_mask(**call: Any) -> None:
    """Prompts are single and unpadded: causal attention needs no mask."""


def _capture_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    module.__dict__[SINK](query, key, value, scaling)
    out = dense_attention(query, key, value, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
