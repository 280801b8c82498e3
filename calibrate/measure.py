"""First pass: every layer's curves at every length, one layer of the model at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, repeat
from typing import Any

from calibrate import capture, rivals
from calibrate.capture import Captured
from calibrate.curves import Curve, Method, Shape, Way, mean_curve, measure, packed, unpacked
from calibrate.journal import Journal
from calibrate.memory import within_memory
from calibrate.models import LoadedModel
from calibrate.prompts import Prompt
from calibrate.recipe import Recipe
from calibrate.search import Curves

LayersCurves = dict[int, list[Curves]]  # length -> layer by layer


def measure_model(
    loaded: LoadedModel,
    prompts: Mapping[int, Sequence[Prompt]],
    shapes: Mapping[int, Sequence[Shape]],
    recipe: Recipe,
    journal: Journal,
    on_step: Callable[[], None],
) -> LayersCurves:
    """The mean curves over the prompts of every length, of every way to rank and every tile shape.

    What the journal knows is not measured again; if it knows everything the model does not run at all.
    `on_step` is called for every layer and length.
    """
    found: LayersCurves = {length: [] for length in prompts}
    layers = range(loaded.geometry.layers)
    keys = {
        (layer, length): _key(layer, prompts[length], shapes[length], recipe.segments_for(length), recipe)
        for layer in layers
        for length in prompts
    }
    known = all(journal.get("curves", key) is not None for key in keys.values())
    ids = [prompt.ids for each in prompts.values() for prompt in each]
    captured: Iterable[Iterator[Captured]] = repeat(iter(()), len(layers)) if known else capture.layers(loaded, ids)
    for layer, of_layer in enumerate(captured):
        for length, each in prompts.items():
            some = islice(of_layer, len(each))
            with within_memory(loaded.weights.device, length, loaded.weights.held, f"measuring layer {layer}"):
                value = journal.remember(
                    "curves", keys[layer, length], partial(_measured, some, shapes[length], recipe)
                )
                for _ in some:  # those the journal knew still have to pass the layer
                    pass
            found[length].append(unpacked(value))
            on_step()
    return found


def _measured(prompts: Iterator[Captured], shapes: Sequence[Shape], recipe: Recipe) -> list[dict[str, Any]]:
    parts: dict[tuple[Way, Shape | None], list[Curve]] = {}
    others = rivals.settings_of(recipe.method)
    for index, prompt in enumerate(prompts):
        for segment in recipe.segments_for(int(prompt.q.shape[2])):
            ranked = [Method(segment, each, grain) for each in recipe.representatives for grain in recipe.grains]
            for key, curve in measure(prompt, ranked, shapes).items():
                parts.setdefault(key, []).append(curve)
        for settings, curve in rivals.measure(prompt, others, timed=index == 0).items():
            parts.setdefault((settings, None), []).append(curve)
    return packed({key: mean_curve(curves) for key, curves in parts.items()})


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
        **others_key(recipe),
    }


def others_key(recipe: Recipe) -> dict[str, Any]:
    """What a measurement depends on if heads may choose other methods than S2O."""
    others = rivals.settings_of(recipe.method)
    return {"others": [str(each) for each in others]} if others else {}
