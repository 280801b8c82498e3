"""Compute the dense and the patched model's logits, and how far apart they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from calibrate.model.layers import find_layer_list, get_decoder, list_other_parts, replace_forwards
from calibrate.model.models import LoadedModel
from s2o_runtime.errors import ModelError

ROWS = 512  # positions whose logits exist at once: 512 x 152064 in float32 are 0.3 GB
LOGITS = 1 << 25  # numbers of logits at once, of a vocabulary that is so small that more positions have no more
Logits = Callable[[Tensor], Tensor]  # hidden states [1, R, H] -> logits [1, R, V]


@contextmanager
def put_logits_on_device(loaded: LoadedModel) -> Iterator[Logits]:
    """Put all behind the last layer on the device inside the block; yield its function of hidden states [1, R, H]."""
    model = loaded.model
    with loaded.weights.put_on_device(*list_other_parts(model), model.get_output_embeddings()):
        norm = getattr(get_decoder(model), "norm", None)
        head = model.get_output_embeddings()

        def run_without_layers(rows: Tensor) -> Tensor:
            # decoders of older versions want a tuple of their layers, of which a tensor is none: it leads to errors
            for output in (rows, (rows,)):
                with suppress(IndexError, RuntimeError):
                    logits = _run_replaced(model, rows, *find_layer_list(model), output=output)
                    if logits.shape[:2] == rows.shape[:2]:
                        return logits
            raise ModelError(
                f"{type(model).__name__} gives no logits of its hidden states: the architecture is not supported"
            )

        yield _choose_quicker(None if norm is None else lambda rows: head(norm(rows)), run_without_layers)


def get_logits(model: Any) -> Logits:
    """Return the function from hidden states behind the last norm, [1, R, H], to logits, of a model on the device."""

    def run_without_decoder(rows: Tensor) -> Tensor:
        return _run_replaced(model, rows, get_decoder(model), output=BaseModelOutputWithPast(last_hidden_state=rows))

    return _choose_quicker(model.get_output_embeddings(), run_without_decoder)


def _run_replaced(model: Any, rows: Tensor, *modules: torch.nn.Module, output: Any) -> Tensor:
    """Compute the whole model's logits where these modules return `output`, made of rows [1, R, H]."""
    ids = torch.zeros(rows.shape[:2], dtype=torch.int64, device=rows.device)  # any: no layer sees them
    with replace_forwards(dict.fromkeys(modules, lambda *arguments, **named: output)):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _choose_quicker(short: Logits | None, whole: Logits) -> Logits:
    """Return `short` if it gives what `whole` gives for the first rows, else `whole`, milliseconds slower a call."""
    chosen: list[Logits] = []

    def logits(rows: Tensor) -> Tensor:
        if chosen:
            return chosen[0](rows)
        out = whole(rows)
        chosen.append(short if short is not None and torch.equal(short(rows).to(out.device), out) else whole)
        return out

    return logits


class Agreement(NamedTuple):
    """Agreement of two models' predictions of the next token, position by position.

    kl: float64 [R], KL(dense || other) in nats. dense_tokens, tokens: int64 [R], the most likely token of each.
    """

    kl: Tensor
    dense_tokens: Tensor
    tokens: Tensor

    @property
    def same(self) -> Tensor:
        """Positions where both find the same token most likely (top-1), bool [R]."""
        return self.dense_tokens == self.tokens


def compare_log_probs(dense: Tensor, other: Tensor) -> Agreement:
    """Compare two models' log-probabilities at the same positions, float32 [R, V], on the device of `dense`."""
    kl = (dense.exp() * (dense - other)).sum(-1, dtype=torch.float64)
    return Agreement(kl, dense.argmax(-1), other.argmax(-1))


def count_rows_at_once(vocabulary: int) -> int:
    """Return how many positions' logits exist at once."""
    return max(ROWS, LOGITS // vocabulary)  # a small vocabulary's work is otherwise that of launching kernels


@torch.no_grad()
def time_prefill(model: Any, ids: Tensor, *, use_cache: bool) -> float:
    """Time one prefill of token ids, int64 [L], in seconds, until the first token behind the prompt is known.

    use_cache: whether the keys and values are kept, as generation needs them.
    """
    device = next(model.parameters()).device
    ids = ids[None].to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    logits = model(input_ids=ids, use_cache=use_cache, logits_to_keep=1).logits
    int(logits[0, -1].argmax())  # waits for the GPU
    return time.perf_counter() - start
