"""calibrate(): prompts -> curves -> choices -> proof -> profile. No stage reaches back."""

from __future__ import annotations

import logging
import platform
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import torch
from tqdm import tqdm

import s2o_runtime
from calibrate import capture
from calibrate.crossover import with_crossover
from calibrate.models import LoadedModel, load, load_tokenizer
from calibrate.prompts import PromptSet, load_prompts
from calibrate.recipe import Recipe
from calibrate.search import Choice, LayerSearch, as_dense, search
from calibrate.verify import LayerProof, PrefillTimes, prove, time_prefill
from s2o_runtime.gpu import DeviceIdentity, identify
from s2o_runtime.profile import Profile, save_profile

TIGHTENINGS = 3  # of one layer at one length; the last one makes it dense
TIGHTEN_TO = 0.9  # aim this far under the budget after a layer was over it

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class Result:
    """A finished calibration: the profile, what was chosen at every length and layer, and the proof."""

    profile: Profile
    choices: dict[int, list[Choice]]
    proofs: dict[int, tuple[LayerProof, ...]]
    times: dict[int, PrefillTimes]
    met: bool
    seconds: float
    failures: int


def calibrate(recipe: Recipe, *, progress: bool = True) -> Result:
    """Run a recipe. Writes `recipe.out` only if the held-out error meets the budget at every layer and length."""
    began = time.monotonic()
    prompts = load_prompts(recipe, load_tokenizer(recipe.model))  # cheap to get wrong, so before the weights
    loaded = load(recipe.model, recipe.device)
    device = identify(torch.device(recipe.device))
    choices, failures = _choose(loaded, prompts, recipe, device, progress)
    if device.kind == "cuda":
        choices = _with_crossovers(choices, loaded, recipe)
    tightenings: Counter[tuple[int, int]] = Counter()  # a layer's change shifts what later layers see, and their error
    while True:
        proofs = _prove(loaded, _draft(loaded, recipe, device, choices), prompts, progress)
        over = _over_budget(proofs, recipe)
        places = [place for place in over if tightenings[place] < TIGHTENINGS]
        if not places:
            break
        log.info("held-out error is over budget in %d places: tightening them", len(places))
        tightenings.update(places)
        for length, layer in places:
            choice, last = choices[length][layer], tightenings[length, layer] == TIGHTENINGS
            tightened = choice.tightened(TIGHTEN_TO / over[length, layer])
            choices[length][layer] = as_dense(choice) if last else tightened
    profile = _draft(loaded, recipe, device, choices)
    times = time_prefill(loaded, profile, prompts.held_out)
    profile = replace(profile, record=_record(recipe, prompts, choices, proofs, times, device))
    if not over:
        recipe.out.parent.mkdir(parents=True, exist_ok=True)
        save_profile(profile, recipe.out)
    return Result(profile, choices, proofs, times, not over, time.monotonic() - began, failures)


def _choose(
    loaded: LoadedModel, prompts: PromptSet, recipe: Recipe, device: DeviceIdentity, progress: bool
) -> tuple[dict[int, list[Choice]], int]:
    """Measure and search every layer at every length, one layer of the model at a time."""
    flat = [(length, prompt) for length in recipe.lengths for prompt in prompts.calibration[length]]
    choices: dict[int, list[Choice]] = {length: [] for length in recipe.lengths}
    failures = 0
    total = loaded.geometry.layers * len(recipe.lengths) * recipe.trials
    with tqdm(total=total, desc="calibrating", unit="trial", disable=not progress) as bar:
        for layer, captured in enumerate(capture.layers(loaded.model, [prompt.ids for _, prompt in flat])):
            for length in recipe.lengths:
                of_length = [c for (each, _), c in zip(flat, captured, strict=True) if each == length]
                work = LayerSearch(of_length, recipe, device)
                seed = recipe.seed + layer
                choices[length].append(search(work, seed, _advance(bar, layer, length, work)))
                failures += work.failures
    return choices, failures


def _with_crossovers(
    choices: dict[int, list[Choice]], loaded: LoadedModel, recipe: Recipe
) -> dict[int, list[Choice]]:  # fmt: skip
    def crossed(choice: Choice) -> Choice:
        tile = with_crossover(choice.config, loaded.geometry, torch.device(recipe.device))
        return replace(choice, tile=tile)

    return {length: [crossed(choice) for choice in layers] for length, layers in choices.items()}


def _advance(bar: Any, layer: int, length: int, work: LayerSearch) -> Callable[[], None]:
    def advance() -> None:
        best = min((work.cost(choice) for choice in work.tried.values()), default=float("nan"))
        text = f"{best * 1e3:.2f} ms" if work.on_gpu else f"cost {best:.3f}"
        bar.set_postfix_str(f"layer {layer}, length {length}, best {text}", refresh=False)
        bar.update()

    return advance


def _draft(loaded: LoadedModel, recipe: Recipe, device: DeviceIdentity, choices: dict[int, list[Choice]]) -> Profile:
    layers = tuple(tuple(choice.config for choice in choices[length]) for length in recipe.lengths)
    return Profile(loaded.name, loaded.geometry, loaded.fingerprint, device, recipe.lengths, layers).validate()


def _prove(
    loaded: LoadedModel, profile: Profile, prompts: PromptSet, progress: bool
) -> dict[int, tuple[LayerProof, ...]]:
    total = sum(len(of_length) for of_length in prompts.held_out.values())
    with tqdm(total=total, desc="proving on held-out prompts", unit="prompt", disable=not progress) as bar:
        return prove(loaded, profile, prompts.held_out, lambda: _tick(bar))


def _tick(bar: Any) -> None:
    bar.update()


def _over_budget(proofs: dict[int, tuple[LayerProof, ...]], recipe: Recipe) -> dict[tuple[int, int], float]:
    """(length, layer) -> error over budget, where that is above 1."""
    ratios = {
        (length, index): layer.error(recipe.budget) / recipe.budget.value
        for length, layers in proofs.items()
        for index, layer in enumerate(layers)
    }
    return {place: ratio for place, ratio in ratios.items() if not ratio <= 1.0}


def _record(
    recipe: Recipe,
    prompts: PromptSet,
    choices: dict[int, list[Choice]],
    proofs: dict[int, tuple[LayerProof, ...]],
    times: dict[int, PrefillTimes],
    device: DeviceIdentity,
) -> dict[str, Any]:
    """How the profile was made and what was shown. Times appear only where they were the objective, on a GPU;
    without them the same inputs give the same bytes."""
    on_gpu = device.kind == "cuda"
    return {
        "budget": {"kind": recipe.budget.kind, "value": recipe.budget.value, "scope": "layer"},
        "objective": "latency" if on_gpu else "predicted latency",
        "recipe": recipe.record(),
        "data": prompts.record(),
        "versions": versions(),
        "predicted": [
            {
                "length": length,
                "layers": [
                    {name: getattr(choice.allocation, name) for name in ("mse", "density", "cost")}
                    | ({"seconds": choice.seconds, "dense_seconds": choice.dense_seconds} if on_gpu else {})
                    for choice in choices[length]
                ],
            }
            for length in recipe.lengths
        ],
        "held_out": [
            {
                "length": length,
                "layers": [{"mse": each.mse, "rel_mse": each.rel_mse, "density": each.density} for each in layers],
            }
            | (
                {"prefill_seconds": times[length].patched, "dense_prefill_seconds": times[length].dense}
                if on_gpu
                else {}
            )
            for length, layers in proofs.items()
        ],
    }


def versions() -> dict[str, str]:
    """Versions of what had a part in the result."""
    libraries = ("torch", "triton", "transformers", "optuna")
    return {"s2o": s2o_runtime.__version__, "python": platform.python_version()} | {
        name: metadata.version(name) for name in libraries
    }
