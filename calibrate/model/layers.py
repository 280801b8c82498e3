"""Run a model one decoder layer at a time, and capture what reaches its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from calibrate.model.models import LoadedModel
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.dense import fastest_dense_attention
from s2o_runtime.call import Scoring
from s2o_runtime.config import KvCacheDtype, LayerConfig
from s2o_runtime.errors import ModelError
from s2o_runtime.huggingface import hf
from s2o_runtime.huggingface.hf import get_implementations, s2o_attention_forward, s2o_mask, set_implementations
from s2o_runtime.huggingface.layers import TransformersCall
from s2o_runtime.identity import geometry, get_device_of, number_modules
from s2o_runtime.quantisation import round_as_cached
from s2o_runtime.reference.dense import dense_attention

NAME = "s2o_override"  # the attention implementation, and the attribute of a module that holds its function
ROWS = 16384  # positions that an MLP or a norm computes at a time
BY_ROWS = ("input_layernorm", "post_attention_layernorm", "mlp")  # parts of a decoder layer: [B, L, H] -> [B, L, H]
Attention = Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]  # q, k, v [1, H, L, D] -> the output [1, Hq, L, Dv]
Calls = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]  # of layers: positional arguments, and others by name


@contextmanager
def replace_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward passes of modules inside the block; their hooks run as before."""
    # accelerate replaces forward passes too, to spread a model over GPUs: its own come back after the block
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, function in forwards.items():
        module.__dict__["forward"] = function
    try:
        yield
    finally:
        for module, forward in before.items():
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward


@contextmanager
def override_attention(attention: nn.Module, function: Attention) -> Iterator[None]:
    """Let an attention module of full attention compute this function inside the block."""
    attention.__dict__[NAME] = function
    try:
        yield
    finally:
        del attention.__dict__[NAME]


def _compute_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute the module's own function; modules without one stay what they are."""
    function: Attention | None = module.__dict__.get(NAME)
    if function is None:
        return s2o_attention_forward(module, query, key, value, attention_mask, **options)
    call = TransformersCall(module, query, key, value, attention_mask, options).check_supported()
    return function(query, key, value, call.scoring).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _compute_attention)
AttentionMaskInterface.register(NAME, s2o_mask)


@dataclass(frozen=True)
class Stream:
    """One prompt before its next layer.

    prompt: its index in the list that was given. hidden: the hidden state, [1, L, H] in the model's dtype. calls: what
    each decoder layer is called with besides.
    """

    prompt: int
    hidden: Tensor
    calls: Calls

    def through(self, layer: nn.Module, number: int, cache: Any = None) -> Stream:
        """Run one decoder layer. Raises ModelError if the hidden state is not finite behind it.

        cache: has the keys and values before these tokens, and gets theirs; None keeps none.
        """
        arguments, named = self.calls[number]
        output = layer(self.hidden, *arguments, **named | ({} if cache is None else {"past_key_values": cache}))
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        check_finite(hidden, "hidden state", number, self.prompt)
        return replace(self, hidden=hidden)


@dataclass(frozen=True)
class DecoderLayer:
    """Decoder layer `number`. `row`: its row in a profile's tables, and `attention`: None without full attention."""

    number: int
    row: int | None
    module: nn.Module
    attention: nn.Module | None

    @property
    def device(self) -> torch.device:
        """The device of the layer: the layers of a model may be on several GPUs."""
        return get_device_of(self.module)

    def dense(self, stream: Stream, cache: Any = None) -> Stream:
        """Run the layer as the model has it."""
        return stream.through(self.module, self.number, cache)

    def patched(self, stream: Stream, state: hf.LayerState) -> Stream:
        """Run the layer with S2O in its attention, which the layer must have."""
        assert self.attention is not None
        hf.attach(self.attention, state)
        try:
            return stream.through(self.module, self.number)
        finally:
            hf.detach(self.attention)


def list_decoder_layers(model: Any) -> list[DecoderLayer]:
    """List all layers of a model's decoder. Raises ModelError if one of full attention has no attention module."""
    attention = dict(number_modules(model))
    rows = {number: row for row, number in enumerate(attention)}
    modules = enumerate(find_layer_list(model))
    return [DecoderLayer(number, rows.get(number), module, attention.get(number)) for number, module in modules]


def get_decoder(model: Any) -> Any:
    """Return the part of a model that embeds tokens and holds the decoder layers."""
    decoder = model.get_decoder()
    return decoder.model if decoder is model or hasattr(decoder, "lm_head") else decoder  # Llama 4's own is itself


def find_layer_list(model: Any) -> nn.ModuleList:
    """Return the module list that holds a decoder's layers. Raises ModelError if there is no such list."""
    expected = geometry(model.config).decoder_layers
    for child in get_decoder(model).children():
        if isinstance(child, nn.ModuleList) and len(child) == expected:
            return child
    raise ModelError(
        f"the decoder of {type(model).__name__} has no list of {expected} layers: the architecture is not supported"
    )


def list_other_parts(model: Any) -> list[nn.Module]:
    """List the parts of a decoder that are no layers: embeddings, positions, norms."""
    layers = find_layer_list(model)
    return [part for part in get_decoder(model).children() if part is not layers]


@torch.no_grad()
def begin(
    loaded: LoadedModel, prompts: Sequence[Tensor], calls: dict[int, Calls] | None = None, behind: int = 0
) -> list[Stream]:
    """Embed prompts, int64 [L] each, with the masks of the model's attention implementation.

    calls: the layers' calls by length, which all prompts of it share; those of new lengths are added. behind: tokens
    that come before each of the prompts, whose keys and values will be in a cache.
    """
    device, layers = loaded.weights.device, find_layer_list(loaded.model)
    calls = {} if calls is None else calls
    cache = DynamicCache(config=loaded.model.config) if behind else None
    for layer in () if cache is None else cache.layers:
        if hasattr(layer, "update"):  # one of linear attention has no keys
            layer.update(*[torch.empty(1, 1, behind, 1, device=device)] * 2)  # masks follow from the length alone
    streams = []
    with loaded.weights.put_on_device(*list_other_parts(loaded.model)):
        for index, ids in enumerate(prompts):
            hidden, layer_calls = _record_layer_inputs(get_decoder(loaded.model), layers, ids.to(device), cache)
            streams.append(Stream(index, hidden, calls.setdefault(len(ids), layer_calls)))
    return streams


@contextmanager
def put_layer_on_device(loaded: LoadedModel, layer: DecoderLayer) -> Iterator[nn.Module]:
    """Put a layer's parameters on the device inside the block; its parts that work row by row run in pieces."""
    with loaded.weights.put_on_device(layer.module), run_in_pieces([layer.module]):
        yield layer.module


def run_in_pieces(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Let the parts of decoder layers that work row by row run in pieces inside the block."""
    parts = [part for module in modules for name, part in module.named_children() if name in BY_ROWS]
    return replace_forwards({part: partial(_run_in_pieces, part.forward) for part in parts})


@contextmanager
def with_attention(model: Any, name: str) -> Iterator[None]:
    """Let the model compute attention by the function that transformers knows by this name, inside the block."""
    previous = get_implementations(model)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        set_implementations(previous)


def use_attention(model: Any, name: str) -> None:
    """Let the model compute attention by this function from now on; nothing is done where it does already."""
    if {implementation for _, implementation in get_implementations(model)} != {name}:
        model.set_attn_implementation(name)


def check_finite(tensor: Tensor, what: str, layer: int, prompt: int) -> None:
    """Raise ModelError with layer and prompt if a tensor holds inf or NaN."""
    if not bool(tensor.isfinite().all()):
        raise ModelError(
            f"layer {layer}, prompt {prompt}: the {what} holds inf or NaN, expected finite {tensor.dtype} numbers: "
            "check that the model's weights are whole and meant for this type"
        )


class _ReachedError(Exception):
    """The last decoder layer was reached."""


def _record_layer_inputs(decoder: Any, layers: nn.ModuleList, ids: Tensor, cache: Any) -> tuple[Tensor, Calls]:
    """Return the first layer's hidden state, and what the decoder calls each layer with behind a cache. None runs."""
    # what a layer gets besides the hidden state (masks of its kind, positions) does not depend on layers before it
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hidden: list[Tensor] = []

    def record(*arguments: Any, **named: Any) -> Tensor:
        first: Tensor = arguments[0] if arguments else named.pop("hidden_states")
        hidden.append(first)
        calls.append((arguments[1:], named))
        if len(calls) == len(layers):
            raise _ReachedError
        return first

    with replace_forwards(dict.fromkeys(layers, record)):
        try:
            decoder(input_ids=ids[None], past_key_values=cache, use_cache=False)
        except _ReachedError:
            return hidden[0], calls
    raise ModelError(
        f"{type(decoder).__name__} calls {len(calls)} of its {len(layers)} layers: the architecture is not supported"
    )


def _run_in_pieces(forward: Callable[..., Tensor], rows: Tensor, *arguments: Any, **named: Any) -> Tensor:
    if rows.dim() < 3 or rows.shape[1] <= ROWS or arguments or named:
        return forward(rows, *arguments, **named)
    out = torch.empty_like(rows)
    for first in range(0, rows.shape[1], ROWS):
        out[:, first : first + ROWS] = forward(rows[:, first : first + ROWS])
    return out


Through = Callable[[DecoderLayer, Stream], Stream]  # runs a layer in another way than the model's


class LayerwiseForward:
    """Prompts on their way through a model: `streams`, before layer `number` of `layers`."""

    def __init__(self, loaded: LoadedModel, streams: Sequence[Stream]) -> None:
        self._loaded, self.streams = loaded, list(streams)
        self.layers, self.number = list_decoder_layers(loaded.model), 0

    @property
    def next_layer(self) -> DecoderLayer:
        """The layer that comes next."""
        return self.layers[self.number]

    @torch.no_grad()
    def move_each(self, through: Through | Sequence[Through | None] | None = None) -> Iterator[int]:
        """Move the streams through the next layer, its parameters on the device, and yield the index of each after it.

        through: runs the layer, for all streams or for each; None where it runs as the model has it.
        """
        layer = self.next_layer
        self.number += 1
        per_stream = through if isinstance(through, Sequence) else [through] * len(self.streams)
        with put_layer_on_device(self._loaded, layer):
            for index, run in enumerate(per_stream):
                self.streams[index] = (run or DecoderLayer.dense)(layer, self.streams[index])
                yield index

    def move(self, through: Through | Sequence[Through | None] | None = None) -> None:
        """Move all streams through the next layer, as `move_each` does."""
        for _ in self.move_each(through):
            pass


@dataclass(frozen=True)
class Captured:
    """One prompt's attention inputs at one layer.

    q: [1, Hq, L, D] and k, v: [1, Hkv, L, D] and [1, Hkv, L, Dv], in the model's dtype. scale: factor of q k^T. layer:
    its row in a profile's tables. prompt: its index in the list that was given. softcap, sinks: as in
    `s2o_runtime.call.Scoring`. exact: the keys and values before they were rounded; None if they were not. out: dense
    attention's output of exact keys and values, [1, Hq, L, Dv]; None if it is not known.
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
    out: Tensor | None = None

    def cached(self, kv_cache_dtype: KvCacheDtype) -> Captured:
        """Round the keys and values as a server's cache of this type does."""
        if kv_cache_dtype == "auto":
            return self
        k, v = (round_as_cached(tensor, kv_cache_dtype) for tensor in (self.k, self.v))
        return replace(self, k=k, v=v, exact=(self.k, self.v))

    def truth(self) -> Tensor:
        """Return the dense attention that errors are taken from, of keys and values that were not rounded."""
        if self.out is not None:
            return self.out
        return dense_attention(self.q, *(self.exact or (self.k, self.v)), **self.scoring.arguments())

    @property
    def scoring(self) -> Scoring:
        """The layer's scale, soft cap and sinks."""
        return Scoring(self.scale, self.softcap, self.sinks)

    def s2o(self, config: LayerConfig) -> Callable[[], Tensor]:
        """Return a call of S2O's attention with these inputs."""
        return partial(s2o_attention, self.q, self.k, self.v, config, **self.scoring.arguments())

    def dense(self) -> Tensor:
        """Compute the fastest dense attention of these inputs."""
        return fastest_dense_attention(self.q, self.k, self.v, self.scoring)


def capture_layers(loaded: LoadedModel, prompts: list[Tensor]) -> Iterator[Iterator[Captured]]:
    """Run prompts, int64 [L] each, through the model and capture what reaches attention, of one prompt at a time.

    Yields for each layer of full attention an iterator over the attention inputs of every prompt. Raises ModelError
    with the layer if inf or NaN came up, or S2O cannot do its attention.
    """
    with with_attention(loaded.model, NAME):
        forward = DenseForward(loaded, prompts)
        for row in range(loaded.geometry.layers):
            yield forward.inputs(row)
        forward.finish()


class DenseForward:
    """Prompts on their way through the dense model, whose attention implementation is `NAME` meanwhile.

    A prompt moves through a layer when its inputs there are asked for; those that were not asked for move before any
    others are. Prompts and calls are as `begin` takes them.
    """

    def __init__(self, loaded: LoadedModel, prompts: Sequence[Tensor], calls: dict[int, Calls] | None = None) -> None:
        self._loaded, self._prompts, self._calls = loaded, prompts, calls
        self._forward: LayerwiseForward | None = None
        self._open: Iterator[Captured] = iter(())  # inputs of which some may not have been asked for

    def inputs(self, row: int) -> Iterator[Captured]:
        """Return every prompt's attention inputs at a layer of full attention."""
        return (captured for captured in self.inputs_up_to(row) if captured.layer == row)

    def inputs_up_to(self, row: int) -> Iterator[Captured]:
        """Return every prompt's attention inputs at all layers of full attention on its way to one, that one's last."""
        self.finish()
        self._open = self._capture_up_to(self._loaded.geometry.get_layer_number(row))
        return self._open

    def finish(self) -> None:
        """Let all prompts move through the layer whose inputs were asked for last."""
        for _ in self._open:
            pass

    def _capture_up_to(self, number: int) -> Iterator[Captured]:
        if self._forward is None or self._forward.number > number:
            self._forward = LayerwiseForward(self._loaded, begin(self._loaded, self._prompts, self._calls))
        while self._forward.number <= number:
            yield from _capture_next(self._forward)


def _capture_next(forward: LayerwiseForward) -> Iterator[Captured]:
    """Move through the next layer; yield what reaches its attention, if that is full attention."""
    attention, row = forward.next_layer.attention, forward.next_layer.row
    if attention is None or row is None:
        forward.move()
        return
    captured: list[Captured] = []

    def capture(layer: DecoderLayer, stream: Stream) -> Stream:
        def keep(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
            for name, tensor in (("queries", q), ("keys", k), ("values", v)):
                check_finite(tensor, f"tensor of {name}", layer.number, stream.prompt)
            scale, softcap, sinks = scoring
            assert scale is not None
            out = dense_attention(q, k, v, **scoring.arguments())
            captured.append(Captured(q, k, v, scale, row, stream.prompt, softcap, sinks, out=out))
            return out

        captured.clear()
        with override_attention(attention, keep):
            after = layer.dense(stream)
        if not captured:
            raise ModelError(
                f"layer {layer.number} does not call transformers' attention function: the architecture is not "
                "supported"
            )
        return after

    for _ in forward.move_each(capture):
        yield captured.pop(0)
