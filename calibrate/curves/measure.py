"""Measure the curves and the sensitivities of every layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from calibrate.curves import torch_pass, trace_pass
from calibrate.curves.curves import (
    Curve,
    Curves,
    RankingConfig,
    Shape,
    fixed_cost,
    mean_curve,
    overhead,
    packed,
    unpacked,
    with_fixed_cost,
)
from calibrate.journal import Journal, taken_on
from calibrate.model import layers
from calibrate.model.estimate import within_memory
from calibrate.model.layers import Captured
from calibrate.model.models import LoadedModel
from calibrate.model.sensitivity import Sensitivity, sensitivity
from calibrate.prompts.prompt import Prompt
from calibrate.recipe import Recipe
from calibrate.timing import FAILURES, medians
from calibrate.work.executor import Executor, WorkerState, WorkItem, executor_of, measured, shares
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import GRAIN, MAX_TAU, REPRESENTATIVES, LayerConfig
from s2o_runtime.devices import DeviceIdentity, launching_on
from s2o_runtime.identity import Geometry
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.tiles import candidate_tiles

RANKING_COST = "ranking cost"  # of entries in a journal
ROUNDS = 5


def ranking_cost(executor: Executor, length: int, recipe: Recipe, journal: Journal) -> float:
    """The share of dense attention's time that every head's ranking takes at a length beside `costs.overhead`.

    On a GPU it is measured once and kept in the journal; elsewhere, and where the GPU cannot run the call, it is
    `costs.fixed_cost`.
    """
    if executor.device.kind != "cuda":
        return fixed_cost(length)
    return float(measured([_item(executor.geometry, length, recipe)], executor, journal)[0])


def _item(geometry: Geometry, length: int, recipe: Recipe) -> RankingCost:
    ranking = RankingConfig(recipe.segments_for(length)[-1])
    return RankingCost(length, ranking, (geometry.query_heads, geometry.kv_heads, geometry.head_dim))


@dataclass(frozen=True)
class RankingCost(WorkItem):
    """The measurement of `ranking_cost` as an item of work; heads: query heads, KV heads, head dim."""

    length: int
    ranking: RankingConfig
    heads: tuple[int, int, int]
    stage: str = "ranking cost"
    kind: ClassVar[str] = RANKING_COST
    timed: ClassVar[bool] = True

    @property
    def key(self) -> dict[str, Any]:
        return {"length": self.length, "segment": self.ranking.segment, "grain": GRAIN, "heads": list(self.heads)}

    def __str__(self) -> str:
        return f"cost of ranking {self.length} tokens"

    def run(self, worker: WorkerState) -> float:
        return _measured(worker.loaded.geometry, worker.loaded.weights.device, self.length, self.ranking)


def stored_cost(
    entries: Sequence[tuple[Mapping[str, Any], Any]],
    geometry: Geometry,
    device: DeviceIdentity,
    length: int,
    recipe: Recipe,
) -> float:
    """The same from a journal's entries of `KIND`; `costs.fixed_cost` if there is none for this length and GPU."""
    key = {**_item(geometry, length, recipe).key, **taken_on(device)}
    return next((float(value) for entry, value in entries if entry == key), fixed_cost(length))


def _measured(geometry: Geometry, device: torch.device, length: int, ranking: RankingConfig) -> float:
    """From a call that stops as early as it can: its time less that of the pairs it computes and of `overhead`."""
    tiles = [
        tile
        for tile in candidate_tiles(geometry.head_dim, torch.cuda.get_device_capability(device))
        if ranking.segment % tile.rows == 0
    ]
    if not tiles:
        return fixed_cost(length)
    q, k, v = (
        torch.randn(1, length, heads, geometry.head_dim, dtype=torch.bfloat16, device=device).transpose(1, 2)
        for heads in (geometry.query_heads, geometry.kv_heads, geometry.kv_heads)
    )
    config = LayerConfig.uniform(geometry.query_heads, tau=MAX_TAU, segment=ranking.segment, tile=tiles[0])
    try:
        seconds = medians(
            {"s2o": partial(s2o_attention, q, k, v, config), "dense": partial(dense_attention, q, k, v)}, device, ROUNDS
        )
        stats = s2o_attention(q, k, v, config, return_stats=True).stats
    except FAILURES:
        return fixed_cost(length)
    assert stats is not None
    return beside(seconds["s2o"] / seconds["dense"], float(stats.density.mean()), ranking)


def beside(share: float, density: float, ranking: RankingConfig) -> float:
    """What a call takes, as a share of dense attention's time, beside its pairs and `overhead`; not below 0."""
    return max(0.0, share - density - overhead(ranking, "none"))


def measure(
    prompt: Captured, rankings: Sequence[RankingConfig], shapes: Sequence[Shape], last_rows: int = 0
) -> dict[tuple[RankingConfig, Shape], Curve]:
    """One prompt's curves at one layer.

    Args:
        prompt: the layer's q, k and v.
        rankings: all of one segment length.
        shapes: of the tiles that may run the layer.
        last_rows: so many rows at the prompt's end are dense, whatever the threshold (`LayerConfig.last_rows`).

    Returns:
        A curve for every ranking and shape.
    """
    if trace_pass.supports(prompt):
        with launching_on(prompt.q.device):  # a model on several GPUs has layers on others than the current one
            return trace_pass.measure(prompt, rankings, shapes, last_rows)
    return torch_pass.measure(prompt, rankings, shapes, last_rows)


STAGE = "curves"
LayersCurves = dict[int, list[Curves]]  # length -> layer by layer


def measure_model(
    model: LoadedModel | Executor,
    prompts: Mapping[int, Sequence[Prompt]],
    shapes: Mapping[int, Sequence[Shape]],
    recipe: Recipe,
    journal: Journal,
    on_step: Callable[..., object],
) -> LayersCurves:
    """The mean curves over the prompts of every length, for every ranking and every tile shape.

    What the journal holds is not measured again, whatever GPU it was measured on and with whatever further shapes; if
    it holds everything the model does not run at all.

    Args:
        model: who runs it, or a loaded model, which then runs in this process.
        prompts: calibration prompts by length.
        shapes: of the tiles that may run, by length.
        recipe: says which segments and scores there are.
        journal: where curves are kept.
        on_step: called for every layer and length, and once for all that the journal has, as `progress_bar`'s step.

    Raises:
        ResourceError: the GPU's memory ran out, or the journal cannot be written.
    """
    with executor_of(model) as executor:
        layers = range(executor.geometry.layers)
        keys = {
            (layer, length): {
                "layer": layer,
                "prompts": [prompt.sha256 for prompt in prompts[length]],
                "shapes": [[shape.block_m, shape.stride] for shape in shapes[length]],
                **recipe_key(recipe, length),
            }
            for layer in layers
            for length in prompts
        }
        entries: dict[tuple[int, int], Any] = {}
        stored_keys = journal.keys("curves")
        for name, key in keys.items():
            if (stored_key := _with_all_shapes(key, stored_keys)) and (
                entry := journal.get("curves", stored_key)
            ) is not None:
                entries[name] = entry
        if entries:
            on_step(f"are in {journal.path.name}", len(entries), known=True)
        for length_prompts in prompts.values():
            executor.register_prompts(length_prompts)
        parts = _Parts(prompts, keys, journal)
        tracks = [
            [
                item
                for layer in layers
                if (layer, length) not in entries
                for item in [LayerCurves(layer, length, hashes, tuple(shapes[length]), recipe)]
                if not parts.has(item)
            ]
            for length, length_prompts in prompts.items()
            for share in shares(executor, length_prompts)
            for hashes in [tuple(prompt.sha256 for prompt in share)]
        ]
        for layer, length in parts.complete():  # an earlier run was ended before it put them together
            entries[layer, length] = parts.whole(layer, length)
            on_step()
        for item, prompt_curves in executor.spread(tracks):
            parts.put(item, prompt_curves)
            if (entry := parts.whole(item.layer, item.length)) is not None:
                entries[item.layer, item.length] = entry
                on_step()
        fixed_costs = {length: ranking_cost(executor, length, recipe, journal) for length in prompts}
    return {
        length: [with_fixed_cost(unpacked(entries[layer, length]), fixed_costs[length]) for layer in layers]
        for length in prompts
    }


@dataclass(frozen=True)
class LayerCurves(WorkItem):
    """The curves of one layer at one length for some of its calibration prompts.

    layer: its row in a profile's tables. prompts: their hashes. Its result is, for each prompt, the curves as `packed`
    packs them in float64.
    """

    layer: int
    length: int
    prompts: tuple[str, ...]
    shapes: tuple[Shape, ...]
    recipe: Recipe
    stage: str = STAGE

    @property
    def affinity(self) -> Hashable:
        return self.length, self.prompts

    def __str__(self) -> str:
        return f"curves of layer {self.layer} at {self.length} tokens"

    def run(self, worker: WorkerState) -> list[list[dict[str, Any]]]:
        weights = worker.loaded.weights
        with within_memory(weights.device, self.length, weights.held, f"measuring layer {self.layer}"):
            forward = dense_forward(worker, self.prompts)
            prompt_curves = [
                packed(of_prompt(captured.cached(self.recipe.kv_cache_dtype), self.shapes, self.recipe), torch.float64)
                for captured in forward.inputs(self.layer)
            ]
            forward.finish()
        return prompt_curves


class _Parts:
    """What is measured of layers for some of their prompts, until all of them are there.

    Args:
        prompts: by length.
        keys: of whole layers in the journal, by layer and length.
        journal: where parts are kept until there is the whole, which takes their place.
    """

    KIND = "curves of prompts"

    def __init__(
        self,
        prompts: Mapping[int, Sequence[Prompt]],
        keys: Mapping[tuple[int, int], Mapping[str, Any]],
        journal: Journal,
    ) -> None:
        self._keys, self._journal = keys, journal
        self._prompts = {
            length: [prompt.sha256 for prompt in length_prompts] for length, length_prompts in prompts.items()
        }
        self._known: dict[tuple[int, int], dict[str, Any]] = {}
        self._put: dict[tuple[int, int], list[dict[str, Any]]] = {}

    def has(self, item: LayerCurves) -> bool:
        """Whether an earlier run left this part."""
        prompt_curves = self._journal.get(self.KIND, self._key(item))
        if prompt_curves is not None:
            self._remember(item, prompt_curves)
        return prompt_curves is not None

    def put(self, item: LayerCurves, prompt_curves: Any) -> None:
        """Keep a part."""
        if len(item.prompts) < len(self._prompts[item.length]):
            self._journal.put(self.KIND, self._key(item), prompt_curves)
        self._remember(item, prompt_curves)

    def complete(self) -> list[tuple[int, int]]:
        """The layers and lengths of which all parts are there."""
        return [name for name, measured in self._known.items() if len(measured) == len(self._prompts[name[1]])]

    def whole(self, layer: int, length: int) -> Any | None:
        """The mean over all prompts, as the journal has it from now on; None if some are missing."""
        measured = self._known[layer, length]
        if len(measured) < len(self._prompts[length]):
            return None
        entry = combined([unpacked(measured[prompt]) for prompt in self._prompts[length]])
        parts = [(self.KIND, key) for key in self._put.pop((layer, length))]
        self._journal.put_all("curves", [(self._keys[layer, length], entry)], instead_of=parts)
        del self._known[layer, length]
        return self._journal.get("curves", self._keys[layer, length])

    def _remember(self, item: LayerCurves, prompt_curves: Any) -> None:
        name = item.layer, item.length
        self._known.setdefault(name, {}).update(zip(item.prompts, prompt_curves, strict=True))
        self._put.setdefault(name, []).append(self._key(item))

    def _key(self, item: LayerCurves) -> dict[str, Any]:
        return {**self._keys[item.layer, item.length], "of": list(item.prompts)}


def dense_forward(worker: WorkerState, prompts: tuple[str, ...]) -> layers.DenseForward:
    """The forward pass of these prompts through the dense model that a worker keeps."""
    loaded = worker.loaded
    layers.register()
    worker.attend_with(layers.NAME)

    def begin() -> layers.DenseForward:
        ids = [worker.prompts[prompt].ids for prompt in prompts]
        return layers.DenseForward(loaded, ids, worker.cached("calls of dense layers", dict))

    return worker.cached((STAGE, prompts), begin)


def of_prompt(prompt: Captured, shapes: Sequence[Shape], recipe: Recipe) -> Curves:
    """The curves of one layer on one prompt."""
    curves: dict[tuple[RankingConfig, Shape], Curve] = {}
    length = int(prompt.q.shape[2])
    last_rows = recipe.last_rows_at(length)
    for segment in recipe.segments_for(length):
        rankings = [RankingConfig(segment, count, scores) for scores in recipe.scores for count in REPRESENTATIVES]
        curves |= measure(prompt, rankings, shapes, last_rows)
    return curves


def combined(prompt_curves: Sequence[Curves]) -> list[dict[str, Any]]:
    """The mean curves over some prompts, as a journal keeps them."""
    return packed({key: mean_curve([curves[key] for curves in prompt_curves]) for key in prompt_curves[0]})


def _with_all_shapes(key: Mapping[str, Any], stored_keys: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The key if the journal has it, or the last one there that has further shapes; None if there is none."""
    rest = {**key, "shapes": None}
    containing = (
        other
        for other in reversed(stored_keys)
        if {**other, "shapes": None} == rest and all(shape in other["shapes"] for shape in key["shapes"])
    )
    return dict(key) if key in stored_keys else next(containing, None)


def recipe_key(recipe: Recipe, length: int) -> dict[str, Any]:
    """What a key of curves says of the recipe."""
    key: dict[str, Any] = {
        "segments": list(recipe.segments_for(length)),
        "scores": list(recipe.scores),
    }
    if last_rows := recipe.last_rows_at(length):
        key["last_rows"] = last_rows
    if recipe.kv_cache_dtype != "auto":
        key["kv_cache_dtype"] = recipe.kv_cache_dtype
    return key


SENSITIVITY = "sensitivity"  # of entries in the journal
PROMPTS = 4  # one of each kind of the built-in text; single prompts differ by a factor of two to three
TOKENS = 2048  # of each, its first ones: a backward pass needs memory


def measured_sensitivity(
    model: LoadedModel | Executor, prompts: Mapping[int, Sequence[Prompt]], recipe: Recipe, journal: Journal
) -> Sensitivity:
    """The sensitivity of every layer and head, from the journal if it is there.

    Args:
        model: who runs it, or a loaded model, which then runs in this process.
        prompts: calibration prompts by length. Those of the longest length of at most `TOKENS` are used, or the
            beginnings of the shortest ones.
        recipe: says the seed.
        journal: where it is kept.

    Raises:
        ModelError: inf or NaN came up in the model.
        ResourceError: The GPU's memory ran out, or the journal cannot be written.
    """
    length = max((length for length in prompts if length <= TOKENS), default=min(prompts))
    chosen = prompts[length][:PROMPTS]
    item = PromptsSensitivity(tuple(prompt.sha256 for prompt in chosen), min(length, TOKENS), recipe.seed)
    with executor_of(model) as executor:
        executor.register_prompts(chosen)
        return _typed(measured([item], executor, journal)[0])


@dataclass(frozen=True)
class PromptsSensitivity(WorkItem):
    """The sensitivity of every layer and head on the first tokens of some prompts, as an item of work."""

    prompts: tuple[str, ...]
    tokens: int
    seed: int
    stage: str = "sensitivity"
    kind: ClassVar[str] = SENSITIVITY

    @property
    def key(self) -> dict[str, Any]:
        return {"prompts": list(self.prompts), "tokens": self.tokens, "seed": self.seed}

    def __str__(self) -> str:
        return "sensitivity of all layers"

    def run(self, worker: WorkerState) -> Sensitivity:
        return sensitivity(
            worker.loaded, [worker.prompts[prompt].ids[: self.tokens] for prompt in self.prompts], self.seed
        )


def stored_sensitivity(
    entries: Sequence[tuple[Mapping[str, Any], Any]], prompts: set[str | None]
) -> Sensitivity | None:
    """The sensitivity last measured on some of these prompts; None without one.

    Args:
        entries: of this kind in a journal.
        prompts: the hashes of the prompts that a profile was calibrated on.
    """
    for key, value in reversed(entries):
        if set(key["prompts"]) <= prompts:
            return _typed(value)
    return None


def _typed(value: Any) -> Sensitivity:
    return tuple(tuple(float(head) for head in layer) for layer in value)
