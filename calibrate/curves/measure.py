"""Measure the curves and the sensitivities of every layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from calibrate.curves import torch_pass, trace_pass
from calibrate.curves.curves import (
    Curve,
    Curves,
    RankingConfig,
    Shape,
    combine_curves,
    estimate_overhead,
    fixed_cost,
    pack,
    unpack,
)
from calibrate.journal import Journal, gpu_key
from calibrate.model import layers
from calibrate.model.estimate import wrap_out_of_memory
from calibrate.model.layers import Captured
from calibrate.model.models import LoadedModel
from calibrate.model.sensitivity import AnsweredText, Sensitivity, measure_sensitivity
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.questions import ask_about
from calibrate.recipe import SAMPLED_ROWS, Recipe
from calibrate.timing import FAILURES, measure_medians
from calibrate.work.executor import Executor, WorkerState, WorkItem, measure_items, open_executor, split_among_workers
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import KEY_BLOCK, MAX_TAU, REPRESENTATIVES, LayerConfig
from s2o_runtime.devices import DeviceIdentity, launch_on
from s2o_runtime.identity import Geometry
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.tiles import list_candidate_tiles

CURVES, PARTS, RANKING_COST, SENSITIVITY = "curves", "curves of prompts", "ranking cost", "sensitivity"  # journal kinds
STAGE = "curves"
ROUNDS = 5
SENSITIVITY_PROMPTS = 4  # one of each kind of the built-in text; single prompts differ by a factor of two to three
SENSITIVITY_TOKENS = 4096  # of each, its first ones and questions about them: a backward pass needs memory

LayersCurves = dict[int, list[Curves]]  # length -> layer by layer
Entries = Sequence[tuple[Mapping[str, Any], Any]]  # keys and values of one kind in a journal


def measure_model(
    model: LoadedModel | Executor,
    prompts: Mapping[int, Sequence[Prompt]],
    shapes: Mapping[int, Sequence[Shape]],
    recipe: Recipe,
    journal: Journal,
    on_step: Callable[..., object],
) -> LayersCurves:
    """Measure the mean curves over the prompts of every length, for every ranking of a recipe and every tile shape.

    Curves in the journal are not measured again, whatever GPU they were measured on and with whatever further shapes;
    if it holds everything the model does not run at all.

    Args:
        model: runs the prompts; a loaded model does so in this process.
        prompts, shapes: calibration prompts, and shapes of the tiles that may run, by length.
        on_step: called for every layer and length, and once for all that the journal has, as `show_progress`'s step.

    Raises:
        ResourceError: the GPU's memory ran out, or the journal cannot be written.
    """
    with open_executor(model) as executor:
        splits: dict[int, list[tuple[str, ...]]] = {}  # the prompts of a length as workers share them, by their hashes
        for length, length_prompts in prompts.items():
            executor.register_prompts(length_prompts)
            shares = split_among_workers(executor, length_prompts)
            splits[length] = [tuple(prompt.sha256 for prompt in share) for share in shares]
        keys = {
            (layer, length): {
                "layer": layer,
                "prompts": [prompt for share in splits[length] for prompt in share],
                "shapes": [[shape.block_m, shape.stride] for shape in shapes[length]],
                **make_recipe_key(recipe, length),
            }
            for layer in range(executor.geometry.layers)
            for length in prompts
        }
        stored_keys = journal.keys(CURVES)
        entries: dict[tuple[int, int], Any] = {
            name: journal.get(CURVES, stored_key)
            for name, key in keys.items()
            if (stored_key := _find_with_all_shapes(key, stored_keys))
        }
        if entries:
            on_step(f"are in {journal.path.name}", len(entries), known=True)
        parts: defaultdict[tuple[int, int], dict[tuple[str, ...], Iterable[Curves]]] = defaultdict(dict)

        def make_part_key(layer: int, length: int, share: Sequence[str]) -> dict[str, Any]:
            return {**keys[layer, length], "of": list(share)}

        def add_part(item: LayerCurves, prompt_curves: Iterable[Curves]) -> None:
            """Remember curves of some prompts; the mean over all prompts takes their place in the journal."""
            name, split = (item.layer, item.length), splits[item.length]
            parts[name][item.prompts] = prompt_curves
            if len(parts[name]) == len(split):
                layer_parts = parts.pop(name)
                entries[name] = combine_prompts([curves for share in split for curves in layer_parts[share]])
                replaced = [(PARTS, make_part_key(*name, share)) for share in split]
                journal.put_all(CURVES, [(keys[name], entries[name])], instead_of=replaced)
                on_step()

        tracks: list[list[LayerCurves]] = []
        missing = [name for name in keys if name not in entries]
        by_worker = [
            (length, split[:number], share) for length, split in splits.items() for number, share in enumerate(split)
        ]
        for length, earlier, share in by_worker:
            tracks.append([])
            for layer in (layer for layer, missing_length in missing if missing_length == length):
                item = LayerCurves(layer, length, share, sum(map(len, earlier)), tuple(shapes[length]), recipe)
                if (packed_parts := journal.get(PARTS, make_part_key(layer, length, share))) is None:
                    tracks[-1].append(item)
                else:  # an earlier run was ended between the workers' parts
                    add_part(item, map(unpack, packed_parts))
        for item, prompt_curves in executor.spread(tracks):
            if len(splits[item.length]) > 1:
                packed = [pack(curves, torch.float64) for curves in prompt_curves]
                journal.put(PARTS, make_part_key(item.layer, item.length, item.prompts), packed)
            add_part(item, prompt_curves)
        costs = {length: measure_ranking_cost(executor, length, recipe, journal) for length in prompts}
        layer_numbers = range(executor.geometry.layers)
    return {length: [unpack(entries[layer, length], costs[length]) for layer in layer_numbers] for length in prompts}


def _find_with_all_shapes(key: Mapping[str, Any], stored_keys: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the key if the journal has it, else the last one there that has further shapes; None without one."""
    if key in stored_keys:
        return dict(key)
    containing = (
        other
        for other in reversed(stored_keys)
        if other == {**key, "shapes": other["shapes"]} and all(shape in other["shapes"] for shape in key["shapes"])
    )
    return next(containing, None)


def make_recipe_key(recipe: Recipe, length: int) -> dict[str, Any]:
    """Return a recipe's part of a key of curves."""
    key: dict[str, Any] = {"segments": list(recipe.select_segments(length)), "lookbacks": list(recipe.lookbacks)}
    key["rows"] = SAMPLED_ROWS
    if last_rows := recipe.count_last_rows(length):
        key["last_rows"] = last_rows
    if recipe.kv_cache_dtype != "auto":
        key["kv_cache_dtype"] = recipe.kv_cache_dtype
    return key


def combine_prompts(prompt_curves: Sequence[Curves]) -> list[dict[str, Any]]:
    """Return the mean curves over some prompts, as a journal keeps them."""
    return pack({key: combine_curves([curves[key] for curves in prompt_curves]) for key in prompt_curves[0]})


@dataclass(frozen=True)
class LayerCurves(WorkItem):
    """Measurement of the curves of a layer, by its row in a profile, on each of some prompts of a length, by hashes.

    before: how many prompts of the length come before these, which other workers have.
    """

    layer: int
    length: int
    prompts: tuple[str, ...]
    before: int
    shapes: tuple[Shape, ...]
    recipe: Recipe
    stage: str = STAGE

    @property
    def affinity(self) -> Hashable:
        return self.length, self.prompts

    def __str__(self) -> str:
        return f"curves of layer {self.layer} at {self.length} tokens"

    def run(self, worker: WorkerState) -> list[Curves]:
        weights = worker.loaded.weights
        with wrap_out_of_memory(weights.device, self.length, weights.held, f"measuring layer {self.layer}"):
            forward = get_forward(worker, self.prompts)
            inputs = (captured.cached(self.recipe.kv_cache_dtype) for captured in forward.inputs(self.layer))
            numbered = (replace(captured, prompt=self.before + captured.prompt) for captured in inputs)
            prompt_curves = [measure_prompt(captured, self.shapes, self.recipe) for captured in numbered]
            forward.finish()
        return prompt_curves


def get_forward(worker: WorkerState, prompts: tuple[str, ...]) -> layers.DenseForward:
    """Return the forward pass of these prompts through the dense model; a worker keeps it and goes on with it."""
    worker.attend_with(layers.NAME)

    def begin() -> layers.DenseForward:
        ids = [worker.prompts[prompt].ids for prompt in prompts]
        return layers.DenseForward(worker.loaded, ids, worker.cached("calls of dense layers", dict))

    return worker.cached((STAGE, prompts), begin)


def measure_prompt(prompt: Captured, shapes: Sequence[Shape], recipe: Recipe) -> Curves:
    """Measure the curves of one layer on one prompt, for all rankings of a recipe."""
    curves: dict[tuple[RankingConfig, Shape], Curve] = {}
    length = int(prompt.q.shape[2])
    for segment in recipe.select_segments(length):
        rankings = [RankingConfig(segment, count, back) for back in recipe.lookbacks for count in REPRESENTATIVES]
        curves |= measure(prompt, rankings, shapes, recipe.count_last_rows(length))
    return curves


def measure(prompt: Captured, rankings: Sequence[RankingConfig], shapes: Sequence[Shape], last_rows: int = 0) -> Curves:
    """Measure one prompt's curves at one layer as `torch_pass.measure` does, with the kernel where it can."""
    if trace_pass.supports(prompt):
        with launch_on(prompt.q.device):  # a model on several GPUs has layers on others than the current one
            return trace_pass.measure(prompt, rankings, shapes, last_rows)
    return torch_pass.measure(prompt, rankings, shapes, last_rows)


def measure_ranking_cost(executor: Executor, length: int, recipe: Recipe, journal: Journal) -> float:
    """Measure `fixed_cost` at a length; it is estimated without a GPU, and where the GPU cannot run the call."""
    if executor.device.kind != "cuda":
        return fixed_cost(length)
    return float(measure_items([RankingCost.from_recipe(executor.geometry, length, recipe)], executor, journal)[0])


def read_stored_cost(
    entries: Entries,
    geometry: Geometry,
    device: DeviceIdentity,
    length: int,
    recipe: Recipe,
) -> float:
    """Return `measure_ranking_cost` from a journal's entries; `fixed_cost` if there is none for this length and GPU."""
    key = {**RankingCost.from_recipe(geometry, length, recipe).key, **gpu_key(device)}
    return next((float(value) for entry, value in entries if entry == key), fixed_cost(length))


@dataclass(frozen=True)
class RankingCost(WorkItem):
    """Measurement of `measure_ranking_cost`; heads: query heads, KV heads, head dim."""

    length: int
    segment: int
    heads: tuple[int, int, int]
    stage: str = "ranking cost"
    kind: ClassVar[str] = RANKING_COST
    timed: ClassVar[bool] = True

    @classmethod
    def from_recipe(cls, geometry: Geometry, length: int, recipe: Recipe) -> RankingCost:
        heads = geometry.query_heads, geometry.kv_heads, geometry.head_dim
        return cls(length, recipe.select_segments(length)[-1], heads)

    @property
    def key(self) -> dict[str, Any]:
        return {"length": self.length, "segment": self.segment, "grain": KEY_BLOCK, "heads": list(self.heads)}

    def __str__(self) -> str:
        return f"cost of ranking {self.length} tokens"

    def run(self, worker: WorkerState) -> float:
        """Time a call that stops as early as it can, less the time of its pairs and `overhead`; at least 0."""
        device, (query_heads, kv_heads, head_dim) = worker.loaded.weights.device, self.heads
        candidates = list_candidate_tiles(head_dim, torch.cuda.get_device_capability(device))
        tile = next((tile for tile in candidates if self.segment % tile.rows == 0), None)
        if tile is None:
            return fixed_cost(self.length)
        q, k, v = (
            torch.randn(1, self.length, heads, head_dim, dtype=torch.bfloat16, device=device).transpose(1, 2)
            for heads in (query_heads, kv_heads, kv_heads)
        )
        config = LayerConfig.uniform(query_heads, tau=MAX_TAU, segment=self.segment, tile=tile)
        calls = {"s2o": partial(s2o_attention, q, k, v, config), "dense": partial(dense_attention, q, k, v)}
        try:
            seconds = measure_medians(calls, device, ROUNDS)
            stats = s2o_attention(q, k, v, config, return_stats=True).stats
        except FAILURES:
            return fixed_cost(self.length)
        assert stats is not None
        overhead_share = estimate_overhead(RankingConfig(self.segment), "none")
        return max(0.0, seconds["s2o"] / seconds["dense"] - float(stats.density.mean()) - overhead_share)


def measure_on_prompts(
    model: LoadedModel | Executor, prompts: Mapping[int, Sequence[Prompt]], recipe: Recipe, journal: Journal
) -> Sensitivity:
    """Measure the sensitivity of every layer and head, unless the journal has it.

    Calibration prompts of the longest length of at most `SENSITIVITY_TOKENS` are used, or the beginnings of the
    shortest ones. Raises what `measure_sensitivity` and the journal raise.
    """
    length = max((length for length in prompts if length <= SENSITIVITY_TOKENS), default=min(prompts))
    used = prompts[length][:SENSITIVITY_PROMPTS]
    hashes = tuple(prompt.sha256 for prompt in used)
    item = PromptsSensitivity(hashes, min(length, SENSITIVITY_TOKENS), recipe.seed)
    with open_executor(model) as executor:
        executor.register_prompts(used)
        return tuple(map(tuple, measure_items([item], executor, journal)[0]))


@dataclass(frozen=True)
class PromptsSensitivity(WorkItem):
    """Measurement of the sensitivity of every layer and head on the first tokens of some prompts."""

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
        texts = [
            join_questions(worker.loaded.tokenizer, worker.prompts[prompt].ids[: self.tokens])
            for prompt in self.prompts
        ]
        return measure_sensitivity(worker.loaded, texts, self.seed)


def join_questions(tokenizer: Any, ids: Tensor) -> AnsweredText:
    """Return a text, int64 [L], with all questions about it and their answers behind it."""
    joined: list[int] = ids.tolist()
    rows: list[int] = []
    for question in ask_about(tokenizer, joined):
        joined += question.ids
        rows += range(len(joined) - 1, len(joined) - 1 + len(question.answer))
        joined += question.answer
    return AnsweredText(torch.tensor(joined), len(ids), torch.tensor(rows))
