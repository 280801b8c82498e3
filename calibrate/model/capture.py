"""The queries, keys and values of a model, one decoder layer and one prompt at a time.

Attention is dense while inputs are captured, so what is measured at one layer does not disturb the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from calibrate.model.models import LoadedModel
from calibrate.model.streams import Stream, attention_implementation, begin, check_finite, layer_on_device
from s2o_runtime.huggingface.hf import scoring_of
from s2o_runtime.identity import attention_modules
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.scoring import Scoring

NAME = "s2o_capture"
SINK = "s2o_capture_sink"


@dataclass(frozen=True)
class Captured:
    """One prompt's attention inputs at one layer.

    q: [1, Hq, L, D] and k, v: [1, Hkv, L, D] and [1, Hkv, L, Dv], in the model's dtype. scale: What q k^T is multiplied
    by. layer: The layer's index. prompt: The prompt's index in the list that was given. softcap, sinks: As in
    `s2o_runtime.scoring.Scoring`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    layer: int = 0
    prompt: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def scoring(self) -> Scoring:
        """What the layer makes of the products of q and k."""
        return Scoring(self.scale, self.softcap, self.sinks)


@torch.no_grad()
def layers(loaded: LoadedModel, prompts: list[Tensor]) -> Iterator[Iterator[Captured]]:
    """Run prompts through the model and capture what reaches attention.

    A prompt runs through a layer when its inputs are asked for, so that the inputs of one prompt exist at a time;
    prompts that were not asked for run before the next layer. The hidden states of all prompts stay on the device.

    Args:
        loaded: The model.
        prompts: Token ids, int64 [L] each.

    Yields:
        For each layer in turn, an iterator over the attention inputs of every prompt.

    Raises:
        ModelError: inf or NaN came up; it names layer and prompt.
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
    for prompt in range(len(streams)):
        streams[prompt], captured = _through(layer, attention, index, streams[prompt])
        yield captured
        del captured  # else it would live through the next prompt's turn


def _through(layer: nn.Module, attention: nn.Module, index: int, stream: Stream) -> tuple[Stream, Captured]:
    captured: list[Captured] = []

    def keep(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> None:
        for name, tensor in (("queries", q), ("keys", k), ("values", v)):
            check_finite(tensor, f"tensor of {name}", index, stream.prompt)
        scale, softcap, sinks = scoring
        assert scale is not None
        captured.append(Captured(q, k, v, scale, index, stream.prompt, softcap, sinks))

    attention.__dict__[SINK] = keep
    try:
        return stream.through(layer, index), captured[0]
    finally:
        del attention.__dict__[SINK]


def _no_mask(**call: Any) -> None:
    """The mask of a single unpadded prompt: causal attention needs none."""


def _capture_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    scoring = scoring_of(scaling, kwargs)
    module.__dict__[SINK](query, key, value, scoring)
    out = dense_attention(query, key, value, **scoring.arguments())
    return out.transpose(1, 2).contiguous(), None
