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

from calibrate.model.models import LoadedModel
from s2o_runtime.errors import ModelError

ROWS = 16384
BY_ROWS = ("input_layernorm", "post_attention_layernorm", "mlp")  # parts of a decoder layer: [B, L, H] -> [B, L, H]


@dataclass(frozen=True)
class Stream:
    """One prompt before its next layer.

    prompt: Its index in the list that was given. hidden: The hidden state, [1, L, H] in the model's dtype. call: What
    every layer is called with besides.
    """

    prompt: int
    hidden: Tensor
    call: Mapping[str, Any]

    def through(self, layer: nn.Module, index: int) -> Stream:
        """The prompt after one decoder layer.

        Raises:
            ModelError: Its hidden state is not finite there.
        """
        output = layer(self.hidden, **self.call)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        check_finite(hidden, "hidden state", index, self.prompt)
        return replace(self, hidden=hidden)


def begin(loaded: LoadedModel, prompts: Sequence[Tensor]) -> list[Stream]:
    """The prompts before the first layer, with the mask of the model's attention implementation.

    Args:
        loaded: The model.
        prompts: Token ids, int64 [L] each. Those of one length share positions and mask.
    """
    decoder, device = loaded.model.get_decoder(), loaded.weights.device
    calls: dict[int, dict[str, Any]] = {}
    streams = []
    with loaded.weights.on_device(decoder.embed_tokens):
        for index, ids in enumerate(prompts):
            hidden, call = _first_layer_inputs(decoder, ids.to(device))
            streams.append(Stream(index, hidden, calls.setdefault(len(ids), call)))
    return streams


@contextmanager
def layer_on_device(loaded: LoadedModel, index: int) -> Iterator[nn.Module]:
    """Decoder layer `index`, its parameters on the device inside the block."""
    layer: nn.Module = loaded.model.get_decoder().layers[index]
    with loaded.weights.on_device(layer):
        parts = [layer.get_submodule(name) for name in BY_ROWS]
        for part in parts:
            part.__dict__["forward"] = partial(_in_pieces, part.forward)
        try:
            yield layer
        finally:
            for part in parts:
                del part.__dict__["forward"]


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Inside the block the model computes attention by the function that transformers knows by this name."""
    previous = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


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
    """The first decoder layer was reached; its inputs are in `hidden` and `call`."""

    def __init__(self, hidden: Tensor, call: dict[str, Any]) -> None:
        self.hidden, self.call = hidden, call


def _first_layer_inputs(decoder: Any, ids: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """What the decoder calls its first layer with: the hidden state, and the rest by name."""

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        raise _ReachedError(hidden, kwargs)

    hook = decoder.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        decoder(input_ids=ids[None], use_cache=False)
    except _ReachedError as reached:
        return reached.hidden, reached.call
    finally:
        hook.remove()
    raise AssertionError("the model ran without calling its first decoder layer")


def _in_pieces(forward: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    if rows.shape[1] <= ROWS:
        return forward(rows)
    out = torch.empty_like(rows)
    for first in range(0, rows.shape[1], ROWS):
        out[:, first : first + ROWS] = forward(rows[:, first : first + ROWS])
    return out
