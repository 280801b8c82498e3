"""From hidden states to logits, as the model itself does it: with its last norm, its scaling and its soft cap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from calibrate.model.forwards import replaced_forwards
from calibrate.model.models import LoadedModel
from calibrate.model.streams import beside_layers, decoder_of, layer_list
from s2o_runtime.errors import ModelError

Logits = Callable[[Tensor], Tensor]


@contextmanager
def logits_on_device(loaded: LoadedModel) -> Iterator[Logits]:
    """What follows the last decoder layer, its parameters on the device inside the block.

    Yields:
        A function from hidden states behind the last layer, [1, R, H], to logits, [1, R, V].
    """
    model = loaded.model
    with loaded.weights.on_device(*beside_layers(model), model.get_output_embeddings()):
        norm = getattr(decoder_of(model), "norm", None)
        head = model.get_output_embeddings()
        yield _quickest(
            None if norm is None else lambda rows: head(norm(rows)), lambda rows: _behind_layers(model, rows)
        )


def logits_of(model: Any) -> Logits:
    """What a model with all of its weights makes of the hidden states behind its last norm: [1, R, H] -> [1, R, V]."""

    def whole(rows: Tensor) -> Tensor:
        outputs = BaseModelOutputWithPast(last_hidden_state=rows)
        with replaced_forwards({decoder_of(model): lambda *arguments, **named: outputs}):
            logits: Tensor = model(input_ids=_any_tokens(rows), use_cache=False).logits
        return logits

    return _quickest(model.get_output_embeddings(), whole)


def _behind_layers(model: Any, rows: Tensor) -> Tensor:
    """The whole model's logits if its last layer returned these rows, [1, R, H]. No layer runs."""
    outputs: tuple[Any, ...] = (rows, (rows,))  # decoders of older versions want a tuple of their layers
    for output in outputs:
        with (
            replaced_forwards(dict.fromkeys(layer_list(model), partial(_returned, output))),
            suppress(IndexError, RuntimeError),  # what a tensor that was taken for a tuple leads to
        ):
            logits: Tensor = model(input_ids=_any_tokens(rows), use_cache=False).logits
            if logits.shape[:2] == rows.shape[:2]:
                return logits
    raise ModelError(f"{type(model).__name__} gives no logits of its hidden states: the architecture is not supported")


def _any_tokens(rows: Tensor) -> Tensor:
    """As many tokens as there are rows, [1, R]: which ones does not matter, no layer sees them."""
    return torch.zeros(rows.shape[:2], dtype=torch.int64, device=rows.device)


def _returned(output: Any, *arguments: Any, **named: Any) -> Any:
    return output


def _quickest(short: Logits | None, whole: Logits) -> Logits:
    """`short` if it gives what `whole` gives for the first rows, else `whole`, which costs milliseconds a call."""
    chosen: list[Logits] = []

    def logits(rows: Tensor) -> Tensor:
        if chosen:
            return chosen[0](rows)
        out = whole(rows)
        chosen.append(short if short is not None and torch.equal(short(rows).to(out.device), out) else whole)
        return out

    return logits
