"""What layers cost in KL by themselves: a correction of their sensitivities, measured with S2O's own errors.

A sensitivity takes the errors of rows for unrelated. Those of late layers are, to a few percent; those of early layers
may not be (on the demo model the first layer costs nine times what is predicted). So adjacent layers are patched by
themselves, a few groups of them, while the rest is dense.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from calibrate.model.logits import logits_on_device
from calibrate.model.memory import within_memory
from calibrate.model.models import LoadedModel
from calibrate.model.streams import Stream, attention_implementation, begin, decoder_layers, layer_on_device
from calibrate.prompts.prompts import Prompt
from calibrate.proof.agreement import compare
from calibrate.proof.verify import PatchableLayer
from calibrate.search.allocate import Weights
from calibrate.search.choose import Chosen
from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.huggingface import hf

GROUPS = 8  # at most; each is one more stream of hidden states for each prompt
ALONE = 2  # the first layers, which are groups of their own where not all layers are
FURTHEST = 16.0  # a correction is by this factor at most
LEAST = 0.1  # of what was measured counts, however large the noise of rounding is

Alone = tuple[tuple[float, ...], float]  # KL of each group in nats per token, and that of rounding alone


def layer_groups(layers: int) -> list[range]:
    """Adjacent layers that are measured together, in their order."""
    if layers <= GROUPS:
        return [range(layer, layer + 1) for layer in range(layers)]
    count, rest = GROUPS - ALONE, layers - ALONE
    edges = [ALONE + rest * number // count for number in range(count + 1)]
    return [range(layer, layer + 1) for layer in range(ALONE)] + [range(first, end) for first, end in pairwise(edges)]


@torch.no_grad()
def kl_alone(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    configs: Sequence[LayerConfig],
    on_step: Callable[[], object] = lambda: None,
) -> Alone:
    """The KL of each group of layers if only that runs its configuration.

    Args:
        loaded: The model.
        prompts: Of one length, at least one.
        configs: What each layer runs.
        on_step: Called after each layer.

    Returns:
        The KL of each of `layer_groups`, mean over the prompts, in nats per token, and that of the first layer with
        S2O's kernel and nothing skipped: what rounding in another order does.

    Raises:
        ModelError: inf or NaN came up.
        ResourceError: The GPU's memory ran out.
    """
    hf.register()
    groups, device = layer_groups(len(configs)), loaded.weights.device
    patched_by: list[Mapping[int, LayerConfig]] = [{layer: configs[layer] for layer in group} for group in groups]
    patched_by.append({0: _nothing_skipped(configs[0])})
    with attention_implementation(loaded.model, hf.NAME):
        dense = begin(loaded, [prompt.ids for prompt in prompts])
        variants: list[list[Stream]] = [dense] * len(patched_by)
        for of_decoder in decoder_layers(loaded.model):
            index, number = of_decoder.row, of_decoder.number
            with (
                layer_on_device(loaded, of_decoder) as module,
                within_memory(device, prompts[0].length, loaded.weights.held, f"measuring layer {number} by itself"),
            ):
                before, dense = dense, [stream.through(module, number) for stream in dense]
                for variant, (streams, patched) in enumerate(zip(variants, patched_by, strict=True)):
                    if index is not None and index in patched and of_decoder.attention is not None:
                        layer = PatchableLayer(index, number, module, of_decoder.attention, device)
                        state = layer.state(patched[index])
                        variants[variant] = [layer.patched(stream, state) for stream in streams]
                    elif streams is before:  # what is not patched yet is what the dense model is
                        variants[variant] = dense
                    else:
                        variants[variant] = [stream.through(module, number) for stream in streams]
            if index is not None:
                on_step()
        with logits_on_device(loaded) as logits:
            kls = [
                statistics.fmean(
                    compare(prompt, one.hidden, other.hidden, logits).kl
                    for prompt, one, other in zip(prompts, dense, streams, strict=True)
                )
                for streams in variants
            ]
    return tuple(max(0.0, kl) for kl in kls[:-1]), max(0.0, kls[-1])


def corrected(chosen: Chosen, alone: Alone) -> Chosen:
    """What was chosen, with the weights of its layers as their groups were measured.

    Args:
        chosen: With a budget in KL; what it predicts is compared.
        alone: What was measured of its configurations.
    """
    kls, noise = alone
    weights: list[Weights] = [choice.weights for choice in chosen.choices]
    for group, kl in zip(layer_groups(len(weights)), kls, strict=True):
        predicted = sum(weights[layer].layer * chosen.choices[layer].spent for layer in group) / len(weights)
        if predicted > 0 and kl > 0:
            factor = min(max(max(kl - noise, LEAST * kl) / predicted, 1 / FURTHEST), FURTHEST)
            for layer in group:
                weights[layer] = replace(weights[layer], layer=weights[layer].layer * factor)
    choices = [replace(choice, weights=weight) for choice, weight in zip(chosen.choices, weights, strict=True)]
    return replace(chosen, choices=choices)


def _nothing_skipped(config: LayerConfig) -> LayerConfig:
    head = HeadConfig(0.0, config.heads[0].segment)
    return replace(config, heads=(head,) * len(config.heads))
