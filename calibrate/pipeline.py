"""calibrate(): prompts -> curves -> choices -> proof -> certificate -> profile.

Four passes over the model, each one layer at a time: curves of every layer, times of what the search tries, the proof
of the model as it will run on the prompts that layers are adjusted on, and the certificate on prompts of its own. A
budget in KL takes one more for the layers' sensitivities, and up to five to find what they may spend.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from calibrate.curves.curves import Shape
from calibrate.curves.measure import LayersCurves, measure_model
from calibrate.curves.sensitivities import measured_sensitivity
from calibrate.journal import Journal
from calibrate.model.models import LoadedModel, load, load_tokenizer
from calibrate.model.self_test import self_test
from calibrate.model.sensitivity import Sensitivity
from calibrate.progress import PhaseClock, progress_bar
from calibrate.prompts.prompts import PromptSet, load_prompts
from calibrate.proof.candidate import Candidate
from calibrate.proof.certify import certify, proven_again
from calibrate.proof.kl_pass import KlPass
from calibrate.proof.kl_search import within_kl
from calibrate.proof.recorded import record_of
from calibrate.proof.tighten import Proven, prove_and_tighten
from calibrate.recipe import Recipe
from calibrate.search.choice import Choice
from calibrate.search.choose import Chosen, choose
from calibrate.search.crossover import with_crossover
from calibrate.search.study import open_storage
from calibrate.search.tiles import tiles_for
from calibrate.versions import versions
from s2o_runtime.config import TileConfig
from s2o_runtime.devices import DeviceIdentity, identify
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, save_profile

log = logging.getLogger("calibrate")

TilesByLength = Mapping[int, tuple[TileConfig, ...]]


@dataclass(frozen=True, kw_only=True)
class Result(Proven):
    """A finished calibration: what was proven, and what was made of it.

    profile: With its record. written: Whether the profile was saved. seconds: What each phase took. journal_reused:
    How many measurements an earlier run had made.
    """

    profile: Profile
    written: bool
    seconds: dict[str, float]
    journal_reused: int


def calibrate(recipe: Recipe, *, progress: bool = True, loaded: LoadedModel | None = None) -> Result:
    """Run a recipe.

    The same recipe continues an interrupted run: what was measured is in the recipe's journal.

    Args:
        recipe: What to calibrate, on what, and within which budget.
        progress: Whether to show progress bars.
        loaded: The recipe's model, if it is loaded already; on the recipe's device.

    Returns:
        What was chosen and proven. The profile is saved as `recipe.out` only if the held-out proof holds or
        `recipe.allow_regression` is set.

    Raises:
        ModelError: The model cannot be loaded, is not supported, or gives inf or NaN.
        InputError: The prompts or the journal do not fit the recipe, or memory ran out.
    """
    clock = PhaseClock()
    trust = recipe.trust_remote_code
    if loaded is None:
        tokenizer = load_tokenizer(recipe.model, random_weights=recipe.random_weights, trust_remote_code=trust)
    else:
        tokenizer = loaded.tokenizer
    prompts = load_prompts(recipe, tokenizer)  # cheap to get wrong, so before the weights
    open_storage(recipe.storage)  # so is this
    if loaded is None:
        loaded = load(
            recipe.model,
            recipe.device,
            random_weights=recipe.random_weights,
            seed=recipe.seed,
            trust_remote_code=trust,
        )
    self_test(loaded)
    device = identify(torch.device(recipe.device))
    for folder in (recipe.out.parent, recipe.journal_path.parent):
        folder.mkdir(parents=True, exist_ok=True)

    with Journal.open(recipe.journal_path, journal_identity(loaded, device)) as journal:
        run = _Run(recipe, loaded, prompts, device, journal, progress)
        with clock.phase("measuring"):
            tiles = _worthwhile_tiles(run)
            curves = _curves(run, tiles)
            sensitivity = (
                measured_sensitivity(loaded, prompts.calibration, recipe, journal) if recipe.budget.is_kl else None
            )
        with clock.phase("searching"):
            candidate = _candidate(run, _choices(run, curves, tiles, sensitivity))
            kl_passes: dict[int, tuple[KlPass, ...]] = {}
            if recipe.budget.is_kl:
                candidate, kl_passes = within_kl(loaded, prompts.held_out, candidate, progress=progress)
        with clock.phase("proving"):
            proven = prove_and_tighten(loaded, prompts.held_out, candidate, progress=progress)
            proven = replace(proven, kl_passes=kl_passes)
        if prompts.certify and proven.met:
            with clock.phase("certifying"):
                certified = certify(loaded, prompts.certify, proven, progress=progress)
                proven = proven_again(loaded, prompts.held_out, proven, certified, progress=progress)
        reused = journal.reused

    profile = replace(proven.candidate.profile(), record=record_of(recipe, prompts, proven))
    written = proven.met or recipe.allow_regression
    if written:
        save_profile(profile, recipe.out)
    return Result(
        candidate=proven.candidate,
        proofs=proven.proofs,
        problems=proven.problems,
        certificates=proven.certificates,
        kl_passes=proven.kl_passes,
        profile=profile,
        written=written,
        seconds=clock.seconds,
        journal_reused=reused,
    )


@dataclass(frozen=True)
class _Run:
    """What every stage of one calibration is given."""

    recipe: Recipe
    loaded: LoadedModel
    prompts: PromptSet
    device: DeviceIdentity
    journal: Journal
    progress: bool

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.recipe.device)


def _worthwhile_tiles(run: _Run) -> TilesByLength:
    """The tiles that get trials at each length."""
    geometry, segments_for = run.loaded.geometry, run.recipe.segments_for
    return {
        length: tiles_for(
            geometry,
            run.device,
            run.torch_device,
            length=length,
            segments=segments_for(length),
            journal=run.journal,
        ).worthwhile
        for length in run.recipe.lengths
    }


def _curves(run: _Run, tiles: TilesByLength) -> LayersCurves:
    """The curves of every layer at every length, for each shape that its tiles have."""
    shapes = {
        length: tuple(sorted({Shape.of(tile) for tile in of_length}, key=lambda shape: (shape.block_m, shape.stride)))
        for length, of_length in tiles.items()
    }
    steps = run.loaded.geometry.layers * len(run.recipe.lengths)
    with progress_bar("measuring curves", steps, "layer", shown=run.progress) as step:
        curves = measure_model(run.loaded, run.prompts.calibration, shapes, run.recipe, run.journal, step)
    if run.journal.reused:
        log.info("resumed: %d measurements reused", run.journal.reused)
    return curves


def _choices(
    run: _Run, curves: LayersCurves, tiles: TilesByLength, sensitivity: Sensitivity | None
) -> dict[int, Chosen]:
    """What each layer shall do at every length; on a GPU with the length below which its tile is slower than dense."""
    with progress_bar("searching", None, "trial", shown=run.progress) as step:
        chosen = choose(
            run.loaded,
            curves,
            tiles,
            prompts=run.prompts,
            recipe=run.recipe,
            device=run.device,
            journal=run.journal,
            on_trial=step,
            sensitivity=sensitivity,
        )
    if run.device.kind != "cuda":
        return chosen
    geometry, device = run.loaded.geometry, run.torch_device
    return {
        length: replace(
            of_length, choices=[_with_crossover(choice, length, geometry, device) for choice in of_length.choices]
        )
        for length, of_length in chosen.items()
    }


def _candidate(run: _Run, chosen: dict[int, Chosen]) -> Candidate:
    """The search's choices as the first candidate for a proof."""
    return Candidate(
        recipe=run.recipe,
        model_name=run.loaded.name,
        geometry=run.loaded.geometry,
        fingerprint=run.loaded.fingerprint,
        device=run.device,
        chosen=chosen,
    )


def _with_crossover(choice: Choice, length: int, geometry: Geometry, device: torch.device) -> Choice:
    """The choice with its tile's crossovers; one that was faster than dense at its length does not go dense there."""
    faster_at = None if choice.config.is_dense else length
    return replace(choice, tile=with_crossover(choice.config, geometry, device, choice.allocation.density, faster_at))


def journal_identity(loaded: LoadedModel, device: DeviceIdentity) -> dict[str, Any]:
    """What a journal's measurements hold for."""
    return {
        "model": {"name": loaded.name, "fingerprint": loaded.fingerprint, **loaded.geometry.as_json()},
        "device": {"kind": device.kind, "name": device.name, "sm_count": device.sm_count},
        "versions": {name: text for name, text in versions().items() if name in ("s2o", "torch", "triton")},
    }
