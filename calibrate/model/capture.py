"""The queries, keys and values of a model, one decoder layer and one prompt at a time.

Attention is dense while inputs are captured, so what is measured at one layer does not disturb the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from calibrate.model.layerwise import LayerwiseForward
from calibrate.model.models import LoadedModel
from calibrate.model.streams import (
    Calls,
    DecoderLayer,
    Stream,
    attention_implementation,
    begin,
    check_finite,
)
from calibrate.model.watched import NAME, register, watched
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.dense import fastest_dense_attention
from s2o_runtime.config import KvCacheDtype, LayerConfig
from s2o_runtime.errors import ModelError
from s2o_runtime.quantisation import as_cached
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.scoring import Scoring


@dataclass(frozen=True)
class Captured:
    """One prompt's attention inputs at one layer.

    q: [1, Hq, L, D] and k, v: [1, Hkv, L, D] and [1, Hkv, L, Dv], in the model's dtype. scale: what q k^T is multiplied
    by. layer: its row in a profile's tables. prompt: the prompt's index in the list that was given. softcap, sinks: as
    in `s2o_runtime.scoring.Scoring`. exact: the keys and values before they were rounded; None if they were not.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    layer: int = 0
    prompt: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    exact: tuple[Tensor, Tensor] | None = None

    def cached(self, kv_cache_dtype: KvCacheDtype) -> Captured:
        """The inputs as S2O reads them from a server's cache of this type."""
        if kv_cache_dtype == "auto":
            return self
        k, v = (as_cached(tensor, kv_cache_dtype) for tensor in (self.k, self.v))
        return replace(self, k=k, v=v, exact=(self.k, self.v))

    def truth(self) -> Tensor:
        """The dense attention that errors are taken from, of keys and values that were not rounded."""
        return dense_attention(self.q, *(self.exact or (self.k, self.v)), **self.scoring.arguments())

    @property
    def scoring(self) -> Scoring:
        """What the layer makes of the products of q and k."""
        return Scoring(self.scale, self.softcap, self.sinks)

    def s2o(self, config: LayerConfig) -> Callable[[], Tensor]:
        """A call of S2O's attention with these inputs."""
        return partial(s2o_attention, self.q, self.k, self.v, config, **self.scoring.arguments())

    def dense(self) -> Tensor:
        """The fastest dense attention of these inputs."""
        return fastest_dense_attention(self.q, self.k, self.v, self.scoring)


def layers(loaded: LoadedModel, prompts: list[Tensor]) -> Iterator[Iterator[Captured]]:
    """Run prompts through the model and capture what reaches attention.

    A prompt runs through a layer when its inputs are asked for, so that the inputs of one prompt exist at a time;
    prompts that were not asked for run before the next layer. The hidden states of all prompts stay on the device.

    Args:
        loaded: the model.
        prompts: token ids, int64 [L] each.

    Yields:
        For each layer of full attention in turn, an iterator over the attention inputs of every prompt.

    Raises:
        ModelError: inf or NaN came up, or S2O cannot do the attention of a layer; it names the layer.
    """
    register()
    with attention_implementation(loaded.model, NAME):
        forward = DenseForward(loaded, prompts)
        for row in range(loaded.geometry.layers):
            yield forward.inputs(row)
        forward.finish()


class DenseForward:
    """Prompts on their way through the dense model, which gives the attention inputs of any layer.

    The model computes attention by `watched.NAME` while a pass is under way.

    Args:
        loaded: the model.
        prompts: token ids, int64 [L] each.
        calls: as `begin` takes them.
    """

    def __init__(
        self, loaded: LoadedModel, prompts: Sequence[Tensor], calls: dict[int, Calls] | None = None
    ) -> None:  # fmt: skip
        self._loaded, self._prompts, self._calls = loaded, prompts, calls
        self._forward: LayerwiseForward | None = None
        self._open: Iterator[Captured] | None = None  # prompts of which some may not have moved through their layer

    def inputs(self, row: int) -> Iterator[Captured]:
        """The attention inputs of every prompt at a layer of full attention, which they move through.

        A prompt runs when its inputs are asked for; those that were not asked for run before the next layer.
        """
        forward = self._before(self._number(row))
        while forward.number < self._number(row):
            for _ in self._through_next(forward):
                pass
        self._open = self._through_next(forward)
        return self._open

    def inputs_up_to(self, row: int) -> Iterator[Captured]:
        """The attention inputs of every prompt at all layers of full attention that it moves through to get to one.

        The last are those of that layer.
        """
        forward = self._before(self._number(row))
        while forward.number <= self._number(row):
            yield from self._through_next(forward)

    def finish(self) -> None:
        """Let all prompts move through the layer whose inputs were asked for last."""
        for _ in self._open or ():
            pass
        self._open = None

    def _number(self, row: int) -> int:
        return self._loaded.geometry.layer_number(row)

    @torch.no_grad()
    def _before(self, number: int) -> LayerwiseForward:
        """The forward pass, before this decoder layer or one that comes earlier."""
        self.finish()
        if self._forward is None or self._forward.number > number:
            self._forward = LayerwiseForward(self._loaded, begin(self._loaded, self._prompts, self._calls))
        return self._forward

    def _through_next(self, forward: LayerwiseForward) -> Iterator[Captured]:
        """Move through the next layer; what reaches its attention, if that is full attention."""
        if forward.next_layer.attention is None:
            forward.move()
            return
        captured: list[Captured] = []

        def through(layer: DecoderLayer, stream: Stream) -> Stream:
            stream, inputs = _through(layer, stream)
            captured.append(inputs)
            return stream

        for _ in forward.moving(through):
            yield captured.pop()


def _through(layer: DecoderLayer, stream: Stream) -> tuple[Stream, Captured]:
    captured: list[Captured] = []
    row = layer.row
    assert layer.attention is not None
    assert row is not None

    def keep(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        for name, tensor in (("queries", q), ("keys", k), ("values", v)):
            check_finite(tensor, f"tensor of {name}", layer.number, stream.prompt)
        scale, softcap, sinks = scoring
        assert scale is not None
        captured.append(Captured(q, k, v, scale, row, stream.prompt, softcap, sinks))
        return dense_attention(q, k, v, **scoring.arguments())

    with watched(layer.attention, keep):
        stream = stream.through(layer.module, layer.number)
    if not captured:
        raise ModelError(
            f"layer {layer.number} does not call transformers' attention function: the architecture is not supported"
        )
    return stream, captured[0]
