"""Measure how a model's answers change with an error in the attention of each head, by one backward pass.

To second order, KL(dense || patched) of the next token is half the error's quadratic form with the Fisher information.
Its diagonal is used, as if the errors of rows and heads were uncorrelated: it gives the ratio of layers and heads well
and the whole several times too small, because errors of rows add up where an answer reads them. For one head it is the
square of g, the gradient of the answers' log-probability with respect to the head's attention output, where each token
is drawn from what the model itself predicts at its position:

    KL per answer token = sum over layers and heads of 0.5 * E|g|^2 * mse / tokens, |g|^2 summed over D and over the
    rows before the questions: those behind them are exact.

The pass goes layer by layer, like every other (`layers.py`): forward without a graph, where only each layer's input
is kept, in host memory; then backward, where each layer runs again from its input. So a model of any size needs the
parameters and the activations of one layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.model.estimate import wrap_out_of_memory
from calibrate.model.layers import (
    NAME,
    DecoderLayer,
    LayerwiseForward,
    Stream,
    begin,
    check_finite,
    override_attention,
    put_layer_on_device,
    with_attention,
)
from calibrate.model.logits import ROWS, put_logits_on_device
from calibrate.model.models import LoadedModel
from s2o_runtime.call import Scoring, cap_scores, softmax
from s2o_runtime.errors import ModelError


@dataclass(frozen=True)
class AnsweredText:
    """A text and questions about it with their answers, as one sequence.

    ids: int64 [L], of all. text: tokens before the first question. rows: int64 [R], those before each answer's tokens.
    """

    ids: Tensor
    text: int
    rows: Tensor


Sensitivity = tuple[tuple[float, ...], ...]  # of each layer and head: nats per token for each unit of the head's mse


def measure_sensitivity(loaded: LoadedModel, texts: Sequence[AnsweredText], seed: int) -> Sensitivity:
    """Measure the cost in KL of the answers of each head's mean squared error, the mean over texts.

    texts: attention's backward pass is dense, so a few thousand tokens each are meant. seed: of the tokens that are
    drawn; the same seed gives the same result.

    Raises:
        ModelError: inf or NaN came up; it names layer and prompt.
        ResourceError: The GPU's memory ran out.
    """
    longest = max(len(text.ids) for text in texts)
    device, held = loaded.weights.device, loaded.weights.held
    costs: list[tuple[float, ...]] = []
    with with_attention(loaded.model, NAME):
        with torch.no_grad():
            forward = LayerwiseForward(loaded, begin(loaded, [text.ids for text in texts]))
            inputs: list[list[Tensor]] = []  # of each layer, the hidden state of each text
            for _ in forward.layers:
                inputs.append([stream.hidden.cpu() for stream in forward.streams])
                forward.move()
        gradients = _compute_answer_gradients(loaded, forward.streams, texts, seed)
        for layer in reversed(forward.layers):
            with (
                put_layer_on_device(loaded, layer),
                wrap_out_of_memory(device, longest, held, f"weighing layer {layer.number}"),
            ):
                head_costs = []
                for number, (stream, hidden) in enumerate(zip(forward.streams, inputs.pop(), strict=True)):
                    before = replace(stream, hidden=hidden.to(device))
                    gradients[number], outputs = _run_backward(layer, before, gradients[number])
                    head_costs += [_sum_costs(output, texts[number]) for output in outputs]
            if layer.attention is not None:
                costs.append(tuple(torch.stack(head_costs).mean(0).tolist()))
    return tuple(reversed(costs))


def _compute_answer_gradients(
    loaded: LoadedModel, streams: Sequence[Stream], texts: Sequence[AnsweredText], seed: int
) -> list[Tensor]:
    """Compute the gradient of drawn answers' log-probability by each text's last hidden state, [1, L, H]."""
    generator = torch.Generator().manual_seed(seed)
    gradients = []
    with put_logits_on_device(loaded) as logits, torch.enable_grad():
        for stream, text in zip(streams, texts, strict=True):
            gradient = torch.zeros_like(stream.hidden)
            for numbers in torch.split(text.rows.to(stream.hidden.device), ROWS):
                rows = stream.hidden[:, numbers].detach().requires_grad_()
                log_p = logits(rows)[0].float().log_softmax(-1)
                drawn = _draw_tokens(log_p.detach(), generator)
                gradient[:, numbers] = torch.autograd.grad(log_p.gather(1, drawn[:, None]).sum(), rows)[0]
            gradients.append(gradient)
    return gradients


def _sum_costs(gradient: Tensor, text: AnsweredText) -> Tensor:
    """Return what a head's mse costs each answer token, float64 [Hq], by a gradient [1, Hq, L, D] of all answers."""
    squares = gradient[0, :, : text.text].double().square().sum((1, 2))
    return 0.5 * squares / len(text.rows)


def _draw_tokens(log_p: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token int64 [R] for each row of log-probabilities float32 [R, V], alike on every device."""
    uniform = torch.rand(len(log_p), 1, generator=generator).to(log_p.device)
    cumulated = log_p.exp().cumsum(-1)
    drawn = torch.searchsorted(cumulated, uniform * cumulated[:, -1:])
    return drawn.clamp_(max=log_p.shape[1] - 1)[:, 0]


def _run_backward(layer: DecoderLayer, before: Stream, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Run the backward pass of one layer, given the gradient with respect to the hidden state behind it, [1, L, H].

    Returns:
        The gradient with respect to the hidden state before the layer, and that with respect to the attention output,
        [1, Hq, L, D]; nothing for a layer without full attention.
    """
    hidden = before.hidden.detach().requires_grad_()
    outputs: list[Tensor] = []

    def keep(*call: Any) -> Tensor:
        outputs.append(_attend(*call))
        return outputs[-1]

    with torch.enable_grad(), nullcontext() if layer.attention is None else override_attention(layer.attention, keep):
        after = replace(before, hidden=hidden).through(layer.module, layer.number).hidden
    if not all(output.requires_grad for output in outputs):  # quantised q, k and v
        raise _without_gradients(layer)
    to_hidden, *to_outputs = torch.autograd.grad(
        after, (hidden, *outputs), gradient.to(after.device), allow_unused=True
    )
    for to_output in to_outputs:
        if to_output is None:  # a quantised output projection
            raise _without_gradients(layer)
        check_finite(to_output, "gradient of attention", layer.number, before.prompt)
    return to_hidden, to_outputs


def _without_gradients(layer: DecoderLayer) -> ModelError:
    return ModelError(
        f"layer {layer.number}: its weights let no gradient through, which a sensitivity needs: use a checkpoint "
        "that is not quantised"
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Compute dense causal attention of q, k, v [1, H, L, D], through which gradients flow."""
    scale, softcap, sinks = scoring
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    assert scale is not None
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
    products = (query @ key.transpose(2, 3)).float() * scale
    scores = cap_scores(products, softcap).masked_fill(later, float("-inf"))
    weights = softmax(scores, None if sinks is None else sinks.float().view(1, -1, 1, 1))
    return weights.to(value.dtype) @ value
