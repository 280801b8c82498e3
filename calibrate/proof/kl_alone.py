"""What layers cost in KL by themselves: a correction of their sensitivities, measured with S2O's own errors.

A sensitivity takes the errors of rows for unrelated. Those of late layers are, to a few percent; those of early layers
may not be (on the demo model the first layer costs nine times what is predicted). So adjacent layers are patched by
themselves, a few groups of them, while the rest is dense.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch

from calibrate.journal import Journal
from calibrate.model.layerwise import LayerwiseForward
from calibrate.model.logits import logits_on_device
from calibrate.model.memory import within_memory
from calibrate.model.models import LoadedModel
from calibrate.model.streams import DecoderLayer, Stream, begin
from calibrate.prompts.prompt import Prompt
from calibrate.proof.agreement import compare
from calibrate.proof.steps import KIND, LayerRun, layer_state
from calibrate.search.allocate import Weights
from calibrate.search.choose import Chosen
from calibrate.work.executor import Executor, executor_of, shares
from calibrate.work.items import WorkerState, WorkItem
from calibrate.work.measured import measured
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


def kl_alone(
    model: LoadedModel | Executor,
    prompts: Sequence[Prompt],
    configs: Sequence[LayerConfig],
    journal: Journal | None = None,
) -> Alone:
    """The KL of each group of layers if only that runs its configuration.

    Args:
        model: Who runs it, or a loaded model, which then runs in this process.
        prompts: Of one length, at least one.
        configs: What each layer runs.
        journal: Where it is kept, and found again; None if nowhere.

    Returns:
        The KL of each of `layer_groups`, mean over the prompts, in nats per token, and that of the first layer with
        S2O's kernel and nothing skipped: what rounding in another order does.

    Raises:
        ModelError: inf or NaN came up.
        ResourceError: The GPU's memory ran out.
    """
    runs = tuple(map(LayerRun, configs))
    with executor_of(model) as executor:
        executor.know(prompts)
        items = [
            AlonePrompts(prompts[0].length, tuple(prompt.sha256 for prompt in share), runs)
            for share in shares(executor, prompts)
        ]
        of_prompts = [kls for of_share in measured(items, executor, journal) for kls in of_share]
    means = [statistics.fmean(kls) for kls in zip(*of_prompts, strict=True)]
    return tuple(max(0.0, kl) for kl in means[:-1]), max(0.0, means[-1])


@dataclass(frozen=True)
class AlonePrompts(WorkItem):
    """Some prompts with each group of layers patched by itself, as an item of work.

    Its result is, for each prompt, the KL of each group and that of rounding alone, in nats per token.
    """

    length: int
    prompts: tuple[str, ...]
    runs: tuple[LayerRun, ...]
    stage: str = "alone"
    kind: ClassVar[str] = KIND
    tiled: ClassVar[bool] = True

    @property
    def affinity(self) -> Hashable:
        return self.prompts

    @property
    def key(self) -> dict[str, object]:
        runs = hashlib.sha256("/".join(run.digest for run in self.runs).encode()).hexdigest()
        return {"stage": self.stage, "length": self.length, "prompts": list(self.prompts), "runs": runs}

    def __str__(self) -> str:
        return f"groups of layers by themselves on {len(self.prompts)} prompts of {self.length} tokens"

    @torch.no_grad()
    def run(self, worker: WorkerState) -> list[list[float]]:
        hf.register()
        worker.attend_with(hf.NAME)
        loaded, configs = worker.loaded, [run.config for run in self.runs]
        prompts = [worker.prompts[prompt] for prompt in self.prompts]
        groups: list[Mapping[int | None, LayerConfig]] = [
            {layer: configs[layer] for layer in group} for group in layer_groups(len(configs))
        ]
        variants: list[Mapping[int | None, LayerConfig]] = [
            {},
            *groups,
            {0: _nothing_skipped(configs[0])},
        ]  # first the dense
        begun = begin(loaded, [prompt.ids for prompt in prompts])
        forward = LayerwiseForward(loaded, [stream for stream in begun for _ in variants])
        for layer in forward.layers:
            ways = [
                partial(_patched, variant[layer.row]) if layer.row in variant else None
                for _ in prompts
                for variant in variants
            ]
            what = f"measuring layer {layer.number} by itself"
            with within_memory(loaded.weights.device, self.length, loaded.weights.held, what):
                forward.move(ways)
        results = []
        with logits_on_device(loaded) as logits:
            for index, prompt in enumerate(prompts):
                dense, *others = forward.streams[index * len(variants) : (index + 1) * len(variants)]
                results.append([compare(prompt, dense.hidden, other.hidden, logits).kl for other in others])
        return results


def _patched(config: LayerConfig, layer: DecoderLayer, stream: Stream) -> Stream:
    return layer.patched(stream, layer_state(layer, LayerRun(config)))


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
    head = HeadConfig(0.0, config.segment)
    return replace(config, heads=(head,) * len(config.heads))
