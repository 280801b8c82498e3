"""The dense and the patched model's logits, and how far apart they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from calibrate.model.layers import beside_layers, decoder_of, layer_list, replaced_forwards
from calibrate.model.models import LoadedModel
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


ROWS = 512  # positions whose logits exist at once: 512 x 152064 in float32 are 0.3 GB
LOGITS = 1 << 25  # numbers of logits at once, of a vocabulary that is so small that more positions have no more


class Agreement(NamedTuple):
    """How alike two models predict the next token, position by position.

    kl: float64 [R], KL(dense || other) in nats. dense_tokens, tokens: int64 [R], the most likely token of each.
    """

    kl: Tensor
    dense_tokens: Tensor
    tokens: Tensor

    @property
    def same(self) -> Tensor:
        """Where both find the same token most likely (top-1), bool [R]."""
        return self.dense_tokens == self.tokens


def agreement(dense: Tensor, other: Tensor) -> Agreement:
    """Compare the predictions of two models at the same positions.

    Args:
        dense: the dense model's log-probabilities, float32 [R, V].
        other: the other model's, float32 [R, V].

    Returns:
        How alike they are at each position, on the device of `dense`.
    """
    kl = (dense.exp() * (dense - other)).sum(-1, dtype=torch.float64)
    return Agreement(kl, dense.argmax(-1), other.argmax(-1))


def rows_at_once(vocabulary: int) -> int:
    """How many positions' logits exist at once: a small vocabulary's work is otherwise that of launching kernels."""
    return max(ROWS, LOGITS // vocabulary)


@torch.no_grad()
def timed_prefill(model: Any, ids: Tensor, *, use_cache: bool) -> float:
    """Time one prefill, until the first token behind the prompt is known.

    Args:
        model: a model whose weights are all on the device.
        ids: the prompt's token ids, int64 [L].
        use_cache: whether the keys and values are kept, as generation needs them.

    Returns:
        Seconds by the clock.
    """
    device = next(model.parameters()).device
    ids = ids[None].to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    logits = model(input_ids=ids, use_cache=use_cache, logits_to_keep=1).logits
    int(logits[0, -1].argmax())  # waits for the GPU
    return time.perf_counter() - start
