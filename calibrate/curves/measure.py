"""The first stage: every layer's curves at every length, one layer of the model at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, repeat
from typing import Any

from calibrate.curves import baselines
from calibrate.curves.curves import Curve, Curves, Method, Ranking, Shape, mean_curve, packed, unpacked, with_fixed_cost
from calibrate.curves.passes import measure
from calibrate.curves.ranking_cost import ranking_cost
from calibrate.journal import Journal
from calibrate.model import capture
from calibrate.model.capture import Captured
from calibrate.model.memory import within_memory
from calibrate.model.models import LoadedModel
from calibrate.prompts.prompt import Prompt
from calibrate.recipe import Recipe

LayersCurves = dict[int, list[Curves]]  # length -> layer by layer


def measure_model(
    loaded: LoadedModel,
    prompts: Mapping[int, Sequence[Prompt]],
    shapes: Mapping[int, Sequence[Shape]],
    recipe: Recipe,
    journal: Journal,
    on_step: Callable[[], None],
) -> LayersCurves:
    """The mean curves over the prompts of every length, for every ranking and every tile shape.

    What the journal holds is not measured again; if it holds everything the model does not run at all.

    Args:
        loaded: the model.
        prompts: calibration prompts by length.
        shapes: of the tiles that may run, by length.
        recipe: says which segments, representatives, grains and baselines there are.
        journal: where curves are kept.
        on_step: called for every layer and length.

    Raises:
        ResourceError: the GPU's memory ran out, or the journal cannot be written.
    """
    curves: LayersCurves = {length: [] for length in prompts}
    layers = range(loaded.geometry.layers)
    keys = {
        (layer, length): _key(layer, prompts[length], shapes[length], recipe.segments_for(length), recipe)
        for layer in layers
        for length in prompts
    }
    all_known = all(journal.get("curves", key) is not None for key in keys.values())
    ids = [prompt.ids for of_length in prompts.values() for prompt in of_length]
    captured: Iterable[Iterator[Captured]] = repeat(iter(()), len(layers)) if all_known else capture.layers(loaded, ids)
    fixed_costs = {
        length: ranking_cost(loaded.geometry, loaded.weights.device, length, recipe, journal) for length in prompts
    }
    for layer, inputs in enumerate(captured):
        for length, of_length in prompts.items():
            inputs_of_length = islice(inputs, len(of_length))
            with within_memory(loaded.weights.device, length, loaded.weights.held, f"measuring layer {layer}"):
                measured = partial(_measured, inputs_of_length, shapes[length], recipe)
                entry = journal.remember("curves", keys[layer, length], measured)
                for _ in inputs_of_length:  # the model's stream moves on only if all inputs are taken
                    pass
            curves[length].append(with_fixed_cost(unpacked(entry), fixed_costs[length]))
            on_step()
    return curves


def _measured(prompts: Iterator[Captured], shapes: Sequence[Shape], recipe: Recipe) -> list[dict[str, Any]]:
    """The mean curves of one layer over some prompts, as a journal keeps them."""
    curves: dict[tuple[Method, Shape | None], list[Curve]] = {}
    settings = baselines.settings_of(recipe.method)
    for index, prompt in enumerate(prompts):
        for segment in recipe.segments_for(int(prompt.q.shape[2])):
            rankings = [Ranking(segment, count, grain) for count in recipe.representatives for grain in recipe.grains]
            for key, curve in measure(prompt, rankings, shapes).items():
                curves.setdefault(key, []).append(curve)
        for setting, curve in baselines.measure(prompt, settings, timed=index == 0).items():
            curves.setdefault((setting, None), []).append(curve)
    return packed({key: mean_curve(of_prompts) for key, of_prompts in curves.items()})


def _key(
    layer: int, prompts: Sequence[Prompt], shapes: Sequence[Shape], segments: Sequence[int], recipe: Recipe
) -> dict[str, Any]:
    return {
        "layer": layer,
        "prompts": [prompt.sha256 for prompt in prompts],
        "shapes": [[shape.block_m, shape.stride] for shape in shapes],
        "segments": list(segments),
        "representatives": list(recipe.representatives),
        "grains": list(recipe.grains),
        **baselines_key(recipe),
    }


def baselines_key(recipe: Recipe) -> dict[str, Any]:
    """What a measurement's key says of baselines: nothing if heads may not choose any."""
    settings = baselines.settings_of(recipe.method)
    return {"baselines": [str(setting) for setting in settings]} if settings else {}
