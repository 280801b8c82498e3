"""KL of layers by themselves, and a search for the scale of spending that gives a KL.

A sensitivity takes the errors of rows for unrelated. Those of late layers are, to a few percent; those of early layers
may not be (on the demo model the first layer costs nine times what is predicted). So layers are weighed by the KL that
they cost by themselves, with S2O's own errors (`measure_isolated_kl`): one group of adjacent layers is patched at a
time, and the rest is dense.

A few passes find the scale: log KL is nearly linear in the logarithm of what is spent, so a secant through them does
(`propose_scale`).
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from calibrate.journal import Journal
from calibrate.model.layers import DecoderLayer, Through
from calibrate.model.models import LoadedModel
from calibrate.prompts.prompt import Prompt
from calibrate.proof.layers import LayerConfigAt, ProofItem, compare_variants, make_layer_state
from calibrate.search.allocate import ErrorWeights
from calibrate.search.choose import SearchResult
from calibrate.work.executor import Executor, WorkerState, measure_items, open_executor, split_among_workers
from s2o_runtime.config import HeadConfig, LayerConfig

PASSES = 3
GROUPS = 8  # at most; each is one more stream of hidden states for each prompt
ALONE = 2  # the first layers, which are groups of their own where not all layers are
MAX_FACTOR = 16.0  # a correction of weights, and a step from one scale to the next, is by this factor at most
MIN_SIGNAL = 0.1  # of a measured KL counts, however large the noise of rounding is
NEAR = 1.12  # a pass that is within this factor of what is aimed at needs no further one
SLOPES = (0.5, 2.0)  # of log KL over log scale; a secant outside of it is noise, of rounding or of whole steps

IsolatedKls = tuple[tuple[float, ...], float]  # KL of each group in nats per token, and that of rounding alone


@dataclass(frozen=True)
class KlTrial:
    """One pass: the scale of spending, the predicted KL, and the measured KL in nats per token."""

    scale: float
    predicted: float
    kl: float


def group_layers(layers: int) -> list[range]:
    """Return groups of adjacent layers that are measured together, in their order."""
    if layers <= GROUPS:
        return [range(layer, layer + 1) for layer in range(layers)]
    count, rest = GROUPS - ALONE, layers - ALONE
    edges = [ALONE + rest * number // count for number in range(count + 1)]
    return [range(layer, layer + 1) for layer in range(ALONE)] + [range(first, end) for first, end in pairwise(edges)]


def measure_isolated_kl(
    model: LoadedModel | Executor,
    prompts: Sequence[Prompt],
    configs: Sequence[LayerConfig],
    journal: Journal | None = None,
) -> IsolatedKls:
    """Measure the KL of each group of layers if only that runs its configuration.

    Args:
        model: an executor, or a loaded model, which then runs in this process.
        prompts: of one length, at least one.
        configs: of each layer.
        journal: keeps the results; None to keep none.

    Returns:
        The KL of each of `group_layers`, mean over the prompts, in nats per token, and that of the first layer with
        S2O's kernel and nothing skipped: the effect of rounding in another order.

    Raises:
        ModelError: inf or NaN came up.
        ResourceError: The GPU's memory ran out.
    """
    layer_configs = tuple(map(LayerConfigAt, configs))
    with open_executor(model) as executor:
        executor.register_prompts(prompts)
        items = [
            IsolatedKl(prompts[0].length, tuple(prompt.sha256 for prompt in share), layer_configs)
            for share in split_among_workers(executor, prompts)
        ]
        prompt_kls = [kls for share_kls in measure_items(items, executor, journal) for kls in share_kls]
    means = [statistics.fmean(kls) for kls in zip(*prompt_kls, strict=True)]
    return tuple(max(0.0, kl) for kl in means[:-1]), max(0.0, means[-1])


@dataclass(frozen=True)
class IsolatedKl(ProofItem):
    """Some prompts with each group of layers patched by itself, as an item of work.

    Its result is, for each prompt, the KL of each group and that of rounding alone, in nats per token.
    """

    prompts: tuple[str, ...]
    configs: tuple[LayerConfigAt, ...]
    stage: str = field(default="alone", kw_only=True)  # the word of journals

    @property
    def affinity(self) -> Hashable:
        return self.prompts

    @property
    def inputs(self) -> dict[str, object]:
        configs = hashlib.sha256("/".join(config.digest for config in self.configs).encode()).hexdigest()
        return {"prompts": list(self.prompts), "runs": configs}

    def __str__(self) -> str:
        return f"groups of layers by themselves on {len(self.prompts)} prompts of {self.length} tokens"

    def run(self, worker: WorkerState) -> list[list[float]]:
        self.use_s2o(worker)
        configs = [config.config for config in self.configs]
        nothing_skipped = (HeadConfig(0.0, configs[0].segment),) * len(configs[0].heads)
        variants: list[Mapping[Any, LayerConfig]] = [
            *({layer: configs[layer] for layer in group} for group in group_layers(len(configs))),
            {0: replace(configs[0], heads=nothing_skipped)},
        ]

        def patch(variant: Mapping[Any, LayerConfig], layer: DecoderLayer) -> Through | None:
            if layer.row not in variant:
                return None
            config = LayerConfigAt(variant[layer.row])
            return lambda layer, stream: layer.patched(stream, make_layer_state(layer, config))

        agreements = compare_variants(
            worker.loaded,
            [worker.prompts[prompt] for prompt in self.prompts],
            [partial(patch, variant) for variant in variants],
            lambda layer: self.within_memory(worker, f"measuring {layer} by itself"),
        )
        return [[agreement.kl for agreement in of_prompt] for of_prompt in agreements]


def correct_weights(chosen: SearchResult, isolated: IsolatedKls) -> SearchResult:
    """Scale the weights of layers so that they predict the KL that was measured of their groups.

    Args:
        chosen: with weights in KL.
        isolated: the measurements of its configurations.
    """
    kls, noise = isolated
    weights: list[ErrorWeights] = [choice.weights for choice in chosen.choices]
    for group, kl in zip(group_layers(len(weights)), kls, strict=True):
        predicted = sum(weights[layer].layer * chosen.choices[layer].spent for layer in group) / len(weights)
        if predicted > 0 and kl > 0:
            factor = min(max(max(kl - noise, MIN_SIGNAL * kl) / predicted, 1 / MAX_FACTOR), MAX_FACTOR)
            for layer in group:
                weights[layer] = replace(weights[layer], layer=weights[layer].layer * factor)
    choices = [replace(choice, weights=weight) for choice, weight in zip(chosen.choices, weights, strict=True)]
    return replace(chosen, choices=choices)


def propose_scale(passes: Sequence[KlTrial], aim: float) -> float:
    """Propose the scale that should give the KL aimed at, by a secant through the two passes that are nearest to it.

    Args:
        passes: so far; the first pass is at a scale of 1.
        aim: nats per token, above 0.
    """
    if not passes:
        return 1.0
    nearest = sorted(passes, key=lambda trial: _measure_distance(trial, aim))[:2]
    slope = 1.0
    if len(nearest) == 2 and min(trial.kl for trial in nearest) > 0 and nearest[0].scale != nearest[1].scale:
        rise = math.log(nearest[0].kl / nearest[1].kl)
        slope = min(max(rise / math.log(nearest[0].scale / nearest[1].scale), SLOPES[0]), SLOPES[1])
    kl = max(nearest[0].kl, 1e-30)
    step = math.exp(math.log(aim / kl) / slope)
    return nearest[0].scale * min(max(step, 1 / MAX_FACTOR), MAX_FACTOR)


def is_close_enough(passes: Sequence[KlTrial], aim: float, most: float) -> bool:
    """Return True if a pass is close enough to the KL aimed at, and within `most`."""
    return any(_measure_distance(trial, aim) <= math.log(NEAR) and trial.kl <= most for trial in passes)


def choose_scale(passes: Sequence[KlTrial], aim: float, most: float) -> float:
    """Choose the scale to prove: of the pass nearest to the aim among those within `most`; if none is, the secant's."""
    within = [trial for trial in passes if trial.kl <= most]
    return min(within, key=lambda trial: _measure_distance(trial, aim)).scale if within else propose_scale(passes, aim)


def _measure_distance(trial: KlTrial, aim: float) -> float:
    return abs(math.log(max(trial.kl, 1e-30) / aim))
