"""What layers cost in KL by themselves, and at which scale a KL comes out as aimed at.

A sensitivity takes the errors of rows for unrelated. Those of late layers are, to a few percent; those of early layers
may not be (on the demo model the first layer costs nine times what is predicted). So layers are weighed by what they
cost by themselves, with S2O's own errors (`isolated_kl`): one group of adjacent layers is patched at a time, and the
rest is dense.

A few passes find the scale: log KL is nearly linear in the logarithm of what is spent, so a secant through them does
(`next_scale`).
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

import torch

from calibrate.journal import Journal
from calibrate.model.layers import DecoderLayer, LayerwiseForward, Stream, begin
from calibrate.model.logits import logits_on_device
from calibrate.model.models import LoadedModel
from calibrate.prompts.prompt import Prompt
from calibrate.proof.layers import LayerSetting, ProofItem, compare, layer_state
from calibrate.search.allocate import ErrorWeights
from calibrate.search.choose import Chosen
from calibrate.work.executor import Executor, WorkerState, executor_of, measured, shares
from s2o_runtime.config import HeadConfig, LayerConfig

PASSES = 3
GROUPS = 8  # at most; each is one more stream of hidden states for each prompt
ALONE = 2  # the first layers, which are groups of their own where not all layers are
FURTHEST = 16.0  # a correction of weights, and a step from one scale to the next, is by this factor at most
LEAST = 0.1  # of what was measured counts, however large the noise of rounding is
CLOSE = 1.12  # a pass that is within this factor of what is aimed at needs no further one
SLOPES = (0.5, 2.0)  # of log KL over log scale; a secant outside of it is noise, of rounding or of whole steps

IsolatedKls = tuple[tuple[float, ...], float]  # KL of each group in nats per token, and that of rounding alone


@dataclass(frozen=True)
class KlTrial:
    """One pass: what of the KL aimed at was predicted to be spent, the predicted KL, and the KL that was measured."""

    scale: float
    predicted: float
    kl: float


def layer_groups(layers: int) -> list[range]:
    """Adjacent layers that are measured together, in their order."""
    if layers <= GROUPS:
        return [range(layer, layer + 1) for layer in range(layers)]
    count, rest = GROUPS - ALONE, layers - ALONE
    edges = [ALONE + rest * number // count for number in range(count + 1)]
    return [range(layer, layer + 1) for layer in range(ALONE)] + [range(first, end) for first, end in pairwise(edges)]


def isolated_kl(
    model: LoadedModel | Executor,
    prompts: Sequence[Prompt],
    configs: Sequence[LayerConfig],
    journal: Journal | None = None,
) -> IsolatedKls:
    """The KL of each group of layers if only that runs its configuration.

    Args:
        model: who runs it, or a loaded model, which then runs in this process.
        prompts: of one length, at least one.
        configs: what each layer runs.
        journal: where it is kept, and found again; None if nowhere.

    Returns:
        The KL of each of `layer_groups`, mean over the prompts, in nats per token, and that of the first layer with
        S2O's kernel and nothing skipped: what rounding in another order does.

    Raises:
        ModelError: inf or NaN came up.
        ResourceError: The GPU's memory ran out.
    """
    runs = tuple(map(LayerSetting, configs))
    with executor_of(model) as executor:
        executor.register_prompts(prompts)
        items = [
            IsolatedKl(prompts[0].length, tuple(prompt.sha256 for prompt in share), runs)
            for share in shares(executor, prompts)
        ]
        prompt_kls = [kls for share_kls in measured(items, executor, journal) for kls in share_kls]
    means = [statistics.fmean(kls) for kls in zip(*prompt_kls, strict=True)]
    return tuple(max(0.0, kl) for kl in means[:-1]), max(0.0, means[-1])


@dataclass(frozen=True)
class IsolatedKl(ProofItem):
    """Some prompts with each group of layers patched by itself, as an item of work.

    Its result is, for each prompt, the KL of each group and that of rounding alone, in nats per token.
    """

    prompts: tuple[str, ...]
    runs: tuple[LayerSetting, ...]
    stage: str = field(default="alone", kw_only=True)  # the word of journals

    @property
    def affinity(self) -> Hashable:
        return self.prompts

    @property
    def inputs(self) -> dict[str, object]:
        runs = hashlib.sha256("/".join(run.digest for run in self.runs).encode()).hexdigest()
        return {"prompts": list(self.prompts), "runs": runs}

    def __str__(self) -> str:
        return f"groups of layers by themselves on {len(self.prompts)} prompts of {self.length} tokens"

    @torch.no_grad()
    def run(self, worker: WorkerState) -> list[list[float]]:
        self.patching(worker)
        loaded, configs = worker.loaded, [run.config for run in self.runs]
        prompts = [worker.prompts[prompt] for prompt in self.prompts]
        nothing_skipped = HeadConfig(0.0, configs[0].segment)
        variants: list[Mapping[Any, LayerConfig]] = [
            {},  # first the dense
            *({layer: configs[layer] for layer in group} for group in layer_groups(len(configs))),
            {0: replace(configs[0], heads=(nothing_skipped,) * len(configs[0].heads))},
        ]
        begun = begin(loaded, [prompt.ids for prompt in prompts])
        forward = LayerwiseForward(loaded, [stream for stream in begun for _ in variants])
        for layer in forward.layers:
            layer_passes = [
                partial(_patched, variant[layer.row]) if layer.row in variant else None
                for _ in prompts
                for variant in variants
            ]
            with self.within_memory(worker, f"measuring layer {layer.number} by itself"):
                forward.move(layer_passes)
        results = []
        with logits_on_device(loaded) as logits:
            for index, prompt in enumerate(prompts):
                dense, *others = forward.streams[index * len(variants) : (index + 1) * len(variants)]
                results.append([compare(prompt, dense.hidden, other.hidden, logits).kl for other in others])
        return results


def _patched(config: LayerConfig, layer: DecoderLayer, stream: Stream) -> Stream:
    return layer.patched(stream, layer_state(layer, LayerSetting(config)))


def corrected(chosen: Chosen, isolated: IsolatedKls) -> Chosen:
    """What was chosen, with the weights of its layers as their groups were measured.

    Args:
        chosen: with weights in KL; what they predict is compared.
        isolated: what was measured of its configurations.
    """
    kls, noise = isolated
    weights: list[ErrorWeights] = [choice.weights for choice in chosen.choices]
    for group, kl in zip(layer_groups(len(weights)), kls, strict=True):
        predicted = sum(weights[layer].layer * chosen.choices[layer].spent for layer in group) / len(weights)
        if predicted > 0 and kl > 0:
            factor = min(max(max(kl - noise, LEAST * kl) / predicted, 1 / FURTHEST), FURTHEST)
            for layer in group:
                weights[layer] = replace(weights[layer], layer=weights[layer].layer * factor)
    choices = [replace(choice, weights=weight) for choice, weight in zip(chosen.choices, weights, strict=True)]
    return replace(chosen, choices=choices)


def next_scale(passes: Sequence[KlTrial], aim: float) -> float:
    """The scale at which the KL should be what is aimed at: a secant through the two passes that are nearest to it.

    Args:
        passes: what was measured; the first pass is at a scale of 1.
        aim: nats per token, above 0.
    """
    if not passes:
        return 1.0
    nearest = sorted(passes, key=lambda one: _distance(one, aim))[:2]
    slope = 1.0
    if len(nearest) == 2 and min(one.kl for one in nearest) > 0 and nearest[0].scale != nearest[1].scale:
        rise = math.log(nearest[0].kl / nearest[1].kl)
        slope = min(max(rise / math.log(nearest[0].scale / nearest[1].scale), SLOPES[0]), SLOPES[1])
    kl = max(nearest[0].kl, 1e-30)
    step = math.exp(math.log(aim / kl) / slope)
    return nearest[0].scale * min(max(step, 1 / FURTHEST), FURTHEST)


def close_enough(passes: Sequence[KlTrial], aim: float, most: float) -> bool:
    """Whether the best pass is close enough to what is aimed at, and within `most`."""
    return any(_distance(one, aim) <= math.log(CLOSE) and one.kl <= most for one in passes)


def best_scale(passes: Sequence[KlTrial], aim: float, most: float) -> float:
    """The scale to prove: of the pass nearest to the aim among those within `most`; if none is, the secant's."""
    within = [one for one in passes if one.kl <= most]
    return min(within, key=lambda one: _distance(one, aim)).scale if within else next_scale(passes, aim)


def _distance(one: KlTrial, aim: float) -> float:
    return abs(math.log(max(one.kl, 1e-30) / aim))
