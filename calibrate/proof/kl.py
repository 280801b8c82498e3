"""KL of groups of layers by themselves, and a search for the scale of spending that gives a KL.

A sensitivity takes the errors of rows for unrelated. Those of late layers are, to a few percent; those of early layers
may not be (on the demo model the first layer costs nine times what is predicted). So layers are weighed by the KL that
they cost by themselves, with S2O's own errors: one group of adjacent layers is patched at a time, the rest is dense.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from calibrate.journal import Journal
from calibrate.model.layers import DecoderLayer, Through
from calibrate.prompts.prompt import Prompt
from calibrate.proof.layers import LayerConfigAt, ProofItem, compare_variants, make_layer_state
from calibrate.search.choose import SearchResult
from calibrate.work.executor import Executor, WorkerState, measure_items, split_among_workers
from s2o_runtime.config import HeadConfig, LayerConfig

PASSES = 3
GROUPS = 8  # at most; each is one more stream of hidden states for each prompt
ALONE = 2  # the first layers, which are groups of their own where not all layers are
MAX_FACTOR = 16.0  # a correction of weights, and a step from one scale to the next, is by this factor at most
MIN_SIGNAL = 0.1  # of a measured KL counts, however large the noise of rounding is
NEAR = 1.12  # a pass that is within this factor of what is aimed at needs no further one
SLOPES = (0.5, 2.0)  # of log KL over log scale; a secant outside of it is noise, of rounding or of whole steps

IsolatedKls = tuple[tuple[float, ...], float]  # KL of each group in nats per token, and that of rounding alone


def group_layers(layers: int) -> list[range]:
    """Return groups of adjacent layers that are measured together, in their order."""
    if layers <= GROUPS:
        return [range(layer, layer + 1) for layer in range(layers)]
    count, rest = GROUPS - ALONE, layers - ALONE
    edges = [*range(ALONE), *(ALONE + rest * number // count for number in range(count + 1))]
    return [range(first, end) for first, end in pairwise(edges)]


def measure_isolated_kl(
    executor: Executor, prompts: Sequence[Prompt], configs: Sequence[LayerConfig], journal: Journal | None = None
) -> IsolatedKls:
    """Measure the KL of each group of layers if only that runs its configuration, mean over prompts of one length.

    Returns:
        The KL of each of `group_layers`, in nats per token, and that of the first layer with S2O's kernel and nothing
        skipped: the effect of rounding in another order.

    Raises:
        ModelError: inf or NaN came up.
        ResourceError: The GPU's memory ran out.
    """
    executor.register_prompts(prompts)
    layer_configs = tuple(map(LayerConfigAt, configs))
    items = [
        IsolatedKl(prompts[0].length, tuple(prompt.sha256 for prompt in share), layer_configs)
        for share in split_among_workers(executor, prompts)
    ]
    prompt_kls = [kls for share_kls in measure_items(items, executor, journal) for kls in share_kls]
    *means, rounding = (max(0.0, statistics.fmean(kls)) for kls in zip(*prompt_kls, strict=True))
    return tuple(means), rounding


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
        first = self.configs[0].config
        nothing_skipped = (HeadConfig(0.0, first.segment),) * len(first.heads)
        variants: list[dict[int, LayerConfigAt]] = [
            *({layer: self.configs[layer] for layer in group} for group in group_layers(len(self.configs))),
            {0: LayerConfigAt(replace(first, heads=nothing_skipped))},
        ]

        def patch(variant: dict[int, LayerConfigAt], layer: DecoderLayer) -> Through | None:
            config = None if layer.row is None else variant.get(layer.row)
            if config is None:
                return None
            return lambda layer, stream: layer.patched(stream, make_layer_state(layer, config))

        agreements = compare_variants(
            worker.loaded,
            [worker.prompts[prompt] for prompt in self.prompts],
            [partial(patch, variant) for variant in variants],
            lambda layer: self.within_memory(worker, f"measuring {layer} by itself"),
        )
        return [[agreement.kl for agreement in of_prompt] for of_prompt in agreements]


def correct_weights(chosen: SearchResult, isolated: IsolatedKls) -> SearchResult:
    """Scale the weights of layers, in KL, so that they predict the KL that was measured of their groups."""
    kls, noise = isolated
    choices = list(chosen.choices)
    for group, kl in zip(group_layers(len(choices)), kls, strict=True):
        predicted = sum(choices[layer].weights.layer * choices[layer].spent for layer in group) / len(choices)
        if predicted > 0 and kl > 0:
            factor = min(max(max(kl - noise, MIN_SIGNAL * kl) / predicted, 1 / MAX_FACTOR), MAX_FACTOR)
            for layer in group:
                weights = choices[layer].weights
                choices[layer] = replace(choices[layer], weights=replace(weights, layer=weights.layer * factor))
    return replace(chosen, choices=choices)


class KlTrial(NamedTuple):
    """One pass: the scale of spending, and the KL that it gave in nats per token."""

    scale: float
    kl: float


def find_scale(measure_kl: Callable[[float], float], aim: float, most: float) -> tuple[float, list[KlTrial]]:
    """Find the scale of spending that gives a KL, in at most `PASSES` passes from a scale of 1 on.

    log KL is nearly linear in the logarithm of what is spent, so a secant through the two nearest passes finds it.

    Args:
        measure_kl: returns the KL at a scale.
        aim: nats per token, above 0.
        most: the KL that a pass may have to be taken.

    Returns:
        The scale of the pass nearest to the aim among those within `most`; if none is, the secant's. And the passes.
    """

    def measure_distance(trial: KlTrial) -> float:
        return abs(math.log(max(trial.kl, 1e-30) / aim))

    trials: list[KlTrial] = []
    scale, within = 1.0, list[KlTrial]()
    while len(trials) < PASSES and not any(measure_distance(trial) <= math.log(NEAR) for trial in within):
        trials.append(KlTrial(scale, measure_kl(scale)))
        within = [trial for trial in trials if trial.kl <= most]
        near, *others = sorted(trials, key=measure_distance)[:2]
        slope = 1.0
        if others and min(near.kl, others[0].kl) > 0 and near.scale != others[0].scale:
            rise = math.log(near.kl / others[0].kl)
            slope = min(max(rise / math.log(near.scale / others[0].scale), SLOPES[0]), SLOPES[1])
        step = math.exp(math.log(aim / max(near.kl, 1e-30)) / slope)
        scale = near.scale * min(max(step, 1 / MAX_FACTOR), MAX_FACTOR)
    return (min(within, key=measure_distance).scale if within else scale), trials
