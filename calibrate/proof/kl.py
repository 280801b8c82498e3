"""A budget in KL: allocate from the curves, prove, compare with the budget, and allocate again at another scale.

A sensitivity takes the errors of rows for unrelated. Those of late layers are, to a few percent; those of early layers
may not be (on the demo model the first layer costs nine times what is predicted). So layers are first weighed by what
they cost by themselves, with S2O's own errors (`isolated_kl`): one group of adjacent layers is patched at a time, and
the rest is dense.

Then a few passes find the scale: log KL is nearly linear in the logarithm of what is spent, so a secant through them
does (`next_scale`). A pass is the adjust stage's measurement, with its tightening of layers and without times. What is
aimed at is the budget less its margin, which is left for prompts that were not seen.
"""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from calibrate.journal import Journal
from calibrate.model.layerwise import LayerwiseForward
from calibrate.model.logits import logits_on_device
from calibrate.model.models import LoadedModel
from calibrate.model.streams import DecoderLayer, Stream, begin
from calibrate.progress import progress_bar
from calibrate.prompts.prompt import Prompt
from calibrate.proof.adjust import tighten_layer
from calibrate.proof.layers import LayerSetting, ProofItem, compare, layer_state
from calibrate.proof.state import Candidate, KlTrial
from calibrate.proof.verify import Prover
from calibrate.search.allocate import ErrorWeights
from calibrate.search.choose import Chosen
from calibrate.work.executor import Executor, WorkerState, executor_of, measured, shares
from s2o_runtime.config import HeadConfig, LayerConfig

WEIGHINGS = 2
NEAR = 1.3  # times what was predicted: layers by themselves that cost no more than this were weighed near the budget
PASSES = 3
GROUPS = 8  # at most; each is one more stream of hidden states for each prompt
ALONE = 2  # the first layers, which are groups of their own where not all layers are
FURTHEST = 16.0  # a correction of weights, and a step from one scale to the next, is by this factor at most
LEAST = 0.1  # of what was measured counts, however large the noise of rounding is
CLOSE = 1.12  # a pass that is within this factor of what is aimed at needs no further one
SLOPES = (0.5, 2.0)  # of log KL over log scale; a secant outside of it is noise, of rounding or of whole steps

IsolatedKls = tuple[tuple[float, ...], float]  # KL of each group in nats per token, and that of rounding alone

log = logging.getLogger("calibrate")


def within_kl(prover: Prover, candidate: Candidate) -> tuple[Candidate, dict[int, tuple[KlTrial, ...]]]:
    """Find the allocation whose KL on the adjust prompts is the budget less its margin.

    Args:
        prover: what measures it.
        candidate: what the search chose, for a budget in KL.

    Returns:
        The candidate to prove, whose calibrated lengths spend what the passes found, and the passes of each length.

    Raises:
        ModelError: inf or NaN came up in the model.
        ResourceError: The GPU's memory ran out.
    """
    recipe = candidate.recipe
    begun = _weighed(prover, candidate)
    most, aim = recipe.budget.value, recipe.budget.value * recipe.margin
    passes: dict[int, list[KlTrial]] = {length: [] for length in recipe.lengths}
    ended: set[int] = set()
    for number in range(1, PASSES + 1):
        scales = {length: next_scale(passes[length], aim) for length in recipe.lengths if length not in ended}
        tried = {length: begun[length].sharing(recipe, scale) for length, scale in scales.items()}
        if number > 1:  # a scale at which no head changes would measure the same
            ended |= {length for length, chosen in tried.items() if _same(chosen, candidate.chosen[length])}
            tried = {length: chosen for length, chosen in tried.items() if length not in ended}
        if not tried:
            break
        candidate = replace(candidate, chosen={**candidate.chosen, **tried})
        title = f"searching for the KL, pass {number}"
        _, proofs = prover.prove(title, tried, candidate, tighten_layer, timed=False)
        for length, chosen in tried.items():
            passes[length].append(KlTrial(scales[length], chosen.predicted_kl, proofs[length].kl))
            log.info("%d tokens: %s, aimed at %.2e", length, passes[length][-1], aim)
        ended |= {length for length in tried if close_enough(passes[length], aim, most)}
    final = {
        length: begun[length].sharing(recipe, best_scale(passes_of_length, aim, most))
        for length, passes_of_length in passes.items()
    }
    return replace(candidate, chosen=final), {
        length: tuple(passes_of_length) for length, passes_of_length in passes.items()
    }


def _weighed(prover: Prover, candidate: Candidate) -> dict[int, Chosen]:
    """What was chosen at each calibrated length, with layers weighed by what they cost by themselves."""
    weighed = dict(candidate.chosen)
    for length in candidate.recipe.lengths:
        for _ in range(WEIGHINGS):  # the first one may be at errors far from those that the budget allows
            configs = [choice.config for choice in weighed[length].choices]
            with progress_bar(f"weighing layers at {length} tokens", 1, "pass", shown=prover.progress) as step:
                isolated = isolated_kl(prover.executor, prover.held_out[length], configs, prover.journal)
                step()
            log.info("%d tokens: groups of layers by themselves have a KL of %s, rounding %.1e", length, *isolated)
            ratio = sum(isolated[0]) / max(weighed[length].predicted_kl, 1e-30)
            weighed[length] = corrected(weighed[length], isolated).sharing(candidate.recipe, 1.0)
            if 1 / NEAR <= ratio <= NEAR:
                break
    return weighed


def _same(chosen: Chosen, other: Chosen) -> bool:
    """Whether every layer is the same in both."""
    return [choice.config for choice in chosen.choices] == [choice.config for choice in other.choices]


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
        chosen: with a budget in KL; what it predicts is compared.
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
