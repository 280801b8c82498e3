"""Prompts on their way through a model: one decoder layer at a time, all prompts before the next layer.

What a layer does row by row (its norms, its MLP) is done in pieces of `ROWS` rows: the MLP of a 7B model alone would
take 15 GB at 131072 tokens. The result is the same, up to how a product of that many rows is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from calibrate.model.forwards import replaced_forwards
from calibrate.model.models import LoadedModel
from s2o_runtime.errors import ModelError
from s2o_runtime.huggingface import hf
from s2o_runtime.huggingface.hf import implementations, set_implementations
from s2o_runtime.identity import device_of, geometry, numbered_modules

ROWS = 16384
Calls = Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]  # of layers: positional arguments, and others by name
BY_ROWS = ("input_layernorm", "post_attention_layernorm", "mlp")  # parts of a decoder layer: [B, L, H] -> [B, L, H]


@dataclass(frozen=True)
class Stream:
    """One prompt before its next layer.

    prompt: its index in the list that was given. hidden: the hidden state, [1, L, H] in the model's dtype. calls: what
    each decoder layer is called with besides: positional arguments, and others by name.
    """

    prompt: int
    hidden: Tensor
    calls: Calls

    def through(self, layer: nn.Module, number: int) -> Stream:
        """The prompt after one decoder layer.

        Raises:
            ModelError: Its hidden state is not finite there.
        """
        arguments, named = self.calls[number]
        output = layer(self.hidden, *arguments, **named)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        check_finite(hidden, "hidden state", number, self.prompt)
        return replace(self, hidden=hidden)


@dataclass(frozen=True)
class DecoderLayer:
    """One layer of a model's decoder.

    number: which one it is. row: its row in a profile's tables, None for a layer that has no full attention; attention:
    its attention module, if it has a row.
    """

    number: int
    row: int | None
    module: nn.Module
    attention: nn.Module | None

    @property
    def device(self) -> torch.device:
        """Where the layer runs: the layers of a model may be on several GPUs."""
        return device_of(self.module)

    def dense(self, stream: Stream) -> Stream:
        """The prompt after the layer as the model has it."""
        return stream.through(self.module, self.number)

    def patched(self, stream: Stream, state: hf.LayerState) -> Stream:
        """The prompt after the layer with S2O in its attention, which the layer must have."""
        assert self.attention is not None
        hf.attach(self.attention, state)
        try:
            return stream.through(self.module, self.number)
        finally:
            hf.detach(self.attention)


def decoder_layers(model: Any) -> list[DecoderLayer]:
    """All layers of a model's decoder, in order.

    Raises:
        ModelError: They cannot be found, or a layer of full attention has no attention module.
    """
    modules = layer_list(model)
    served = numbered_modules(model)
    row_of = {number: row for row, (number, _) in enumerate(served)}
    attention_of = dict(served)
    return [
        DecoderLayer(number, row_of.get(number), module, attention_of.get(number))
        for number, module in enumerate(modules)
    ]


def decoder_of(model: Any) -> Any:
    """The part of a model that embeds tokens and holds the decoder layers."""
    decoder = model.get_decoder()
    return decoder.model if decoder is model or hasattr(decoder, "lm_head") else decoder  # Llama 4's own is itself


def layer_list(model: Any) -> nn.ModuleList:
    """The module list that holds a decoder's layers. Raises ModelError if there is no such list."""
    expected = geometry(model.config).decoder_layers
    for child in decoder_of(model).children():
        if isinstance(child, nn.ModuleList) and len(child) == expected:
            return child
    raise ModelError(
        f"the decoder of {type(model).__name__} has no list of {expected} layers: the architecture is not supported"
    )


def begin(loaded: LoadedModel, prompts: Sequence[Tensor], calls: dict[int, Calls] | None = None) -> list[Stream]:
    """The prompts before the first layer, with the masks of the model's attention implementation.

    Args:
        loaded: the model.
        prompts: token ids, int64 [L] each. Those of one length share positions and masks.
        calls: what layers were called with besides, by length, for other prompts under the same implementation; what
            is new is added.
    """
    device, layers = loaded.weights.device, layer_list(loaded.model)
    decoder = decoder_of(loaded.model)
    calls = {} if calls is None else calls
    streams = []
    with loaded.weights.on_device(*beside_layers(loaded.model)):
        for index, ids in enumerate(prompts):
            hidden, layer_calls = _layer_inputs(decoder, layers, ids.to(device))
            streams.append(Stream(index, hidden, calls.setdefault(len(ids), layer_calls)))
    return streams


def beside_layers(model: Any) -> list[nn.Module]:
    """The parts of a decoder that are no layers: embeddings, positions, norms."""
    layers = layer_list(model)
    return [part for part in decoder_of(model).children() if part is not layers]


@contextmanager
def layer_on_device(loaded: LoadedModel, layer: DecoderLayer) -> Iterator[nn.Module]:
    """A decoder layer, its parameters on the device inside the block, and its parts that work row by row in pieces."""
    with loaded.weights.on_device(layer.module):
        parts = [part for name, part in layer.module.named_children() if name in BY_ROWS]
        with replaced_forwards({part: partial(_in_pieces, part.forward) for part in parts}):
            yield layer.module


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Inside the block the model computes attention by the function that transformers knows by this name."""
    previous = implementations(model)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        set_implementations(previous)


def use_attention(model: Any, name: str) -> None:
    """Let the model compute attention by this function from now on; nothing is done where it does already."""
    if {implementation for _, implementation in implementations(model)} != {name}:
        model.set_attn_implementation(name)


def check_finite(tensor: Tensor, what: str, layer: int, prompt: int) -> None:
    """Check that a tensor holds neither inf nor NaN.

    Raises:
        ModelError: It does; the error names layer and prompt.
    """
    if not bool(tensor.isfinite().all()):
        raise ModelError(
            f"layer {layer}, prompt {prompt}: the {what} holds inf or NaN, expected finite {tensor.dtype} numbers: "
            "check that the model's weights are whole and meant for this type"
        )


class _ReachedError(Exception):
    """The last decoder layer was reached."""


def _layer_inputs(decoder: Any, layers: nn.ModuleList, ids: Tensor) -> tuple[Tensor, Calls]:
    """What the decoder calls its layers with: the first one's hidden state, and what each gets besides.

    No layer runs. What a layer gets besides the hidden state (masks of its kind, positions) does not depend on the
    layers before it.
    """
    calls: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []
    hidden: list[Tensor] = []

    def record(*arguments: Any, **named: Any) -> Tensor:
        first: Tensor = arguments[0] if arguments else named.pop("hidden_states")
        hidden.append(first)
        calls.append((arguments[1:], named))
        if len(calls) == len(layers):
            raise _ReachedError
        return first

    with replaced_forwards(dict.fromkeys(layers, record)):
        try:
            decoder(input_ids=ids[None], use_cache=False)
        except _ReachedError:
            return hidden[0], calls
    raise ModelError(
        f"{type(decoder).__name__} calls {len(calls)} of its {len(layers)} layers: the architecture is not supported"
    )


def _in_pieces(forward: Callable[..., Tensor], rows: Tensor, *arguments: Any, **named: Any) -> Tensor:
    if rows.dim() < 3 or rows.shape[1] <= ROWS or arguments or named:
        return forward(rows, *arguments, **named)
    out = torch.empty_like(rows)
    for first in range(0, rows.shape[1], ROWS):
        out[:, first : first + ROWS] = forward(rows[:, first : first + ROWS])
    return out
