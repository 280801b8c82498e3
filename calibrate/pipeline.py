"""calibrate(): prompts -> curves -> choices -> proof -> certificate -> profile.

Four passes over the model, each one layer at a time: curves of every layer, times of what the search tries, the proof
of the model as it will run on the prompts that layers are adjusted on, and the certificate on prompts of its own. Where
the certificate does not hold at once, it looks at a length again with less.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from calibrate.compiling import compiling
from calibrate.curves.curves import Shape
from calibrate.curves.measure import LayersCurves, measure_model, of_prompt
from calibrate.journal import Journal
from calibrate.model.layers import Captured
from calibrate.model.models import LoadedModel, load, load_config, load_tokenizer
from calibrate.model.self_test import SEGMENTS, never_stops, self_test
from calibrate.progress import PhaseClock, progress_bar
from calibrate.prompts.prompt import Prompt, PromptSet
from calibrate.prompts.prompts import load_prompts
from calibrate.proof.adjust import Proven, prove_and_adjust
from calibrate.proof.certify import (
    TextGroups,
    certify,
    check_groups,
    remeasure,
    without_slower_layers,
    without_slower_lengths,
)
from calibrate.proof.record import record_of
from calibrate.proof.state import Candidate
from calibrate.proof.verify import Prover
from calibrate.recipe import Recipe
from calibrate.search.choice import Choice
from calibrate.search.choose import Chosen, choose
from calibrate.search.study import open_storage
from calibrate.search.tiles import LONGEST, Layer, crossovers, random_inputs, tiles_for
from calibrate.versions import versions
from calibrate.work.executor import Executor, StageWork, local_executor
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import TileConfig
from s2o_runtime.devices import DeviceIdentity, capability
from s2o_runtime.errors import InputError, S2OError
from s2o_runtime.identity import geometry, split_fingerprint
from s2o_runtime.profile import Profile, save_profile
from s2o_runtime.tiles import candidate_tiles

log = logging.getLogger("calibrate")

TilesByLength = Mapping[int, tuple[TileConfig, ...]]


@dataclass(frozen=True, kw_only=True)
class Result(Proven):
    """A finished calibration: what was proven, and what was made of it.

    profile: with its record. written: whether the profile was saved. seconds: what each phase took. journal_reused:
    How many measurements an earlier run had made. work: the measurements of this run by stage, and how long they took
    of all workers together. report, report_files: the `calibrate.report.contents.Report` and where it was written;
    None and none where it was not. report_failure: why it, or its pictures, were not; empty if they were.
    """

    profile: Profile
    written: bool
    seconds: dict[str, float]
    journal_reused: int
    work: Mapping[str, StageWork] = field(default_factory=dict)
    report: Any = None
    report_files: tuple[Path, ...] = ()
    report_failure: str = ""


def calibrate(
    recipe: Recipe,
    *,
    progress: bool = True,
    loaded: LoadedModel | None = None,
    expected: Mapping[str, float] = MappingProxyType({}),
) -> Result:
    """Run a recipe.

    The same recipe continues an interrupted run: what was measured is in the recipe's journal.

    Args:
        recipe: what to calibrate, on what, and within which budget.
        progress: whether to show progress bars.
        loaded: the recipe's model, if it is loaded already; on the recipe's device.
        expected: the seconds that phases are expected to take, for progress.

    Returns:
        What was chosen and proven. The profile is saved as `recipe.out` only if the held-out proof holds or
        `recipe.allow_regression` is set.

    Raises:
        ModelError: The model cannot be loaded, is not supported, or gives inf or NaN.
        InputError: The prompts or the journal do not fit the recipe.
        ConfigError: The recipe does not fit the machine, or the workers.
        ResourceError: Memory ran out, or another resource is missing.
    """
    clock = PhaseClock(expected)
    with compiling(_first_calls(recipe, loaded)) as compiled:
        with clock.phase("making prompts", progress):
            tokenizer = load_tokenizer(recipe.model, **recipe.loading) if loaded is None else loaded.tokenizer
            prompts = load_prompts(recipe, tokenizer)
            open_storage(recipe.storage)
            check_certifiable(recipe, prompts.certify)
        recipe.out.parent.mkdir(parents=True, exist_ok=True)
        with (
            _executor(recipe, loaded, prompts, clock, progress, compiled) as executor,
            Journal.open(recipe.journal_path, journal_identity(executor, executor.device)) as journal,
        ):
            log.info("calibrating for %s", executor.device)
            return _calibrated(_Run(recipe, executor, prompts, journal, progress), clock)


def _first_calls(recipe: Recipe, loaded: LoadedModel | None) -> list[Callable[[], object]]:
    """Calls that need the kernels of the model's test and of its curves, on random inputs of the model's sizes.

    None without a GPU of this process's. A model whose layers are called in another way compiles its own later.
    """
    device = torch.device(recipe.device)
    if device.type != "cuda" or recipe.is_distributed:
        return []
    if loaded is None:
        options = {"random_weights": recipe.random_weights, "trust_remote_code": recipe.trust_remote_code}
        shape = geometry(load_config(recipe.model, **options))
    else:
        shape = loaded.geometry
    tested = never_stops(shape, device)
    if tested is None:
        return []

    def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
        return random_inputs(shape, length, length, torch.bfloat16, device)

    def tests(padded: bool) -> None:
        start = torch.zeros(1, dtype=torch.int64, device=device) if padded else None
        s2o_attention(*inputs(SEGMENTS * tested.segment), tested, kv_start=start)

    def curves() -> None:
        segments = recipe.segments_for(max(recipe.lengths))
        tiles = [
            tile
            for tile in candidate_tiles(shape.head_dim, capability(device))
            if not any(segment % tile.rows for segment in segments)
        ]
        shapes = {Shape.of(tile) for tile in tiles if tile.block_m == tiles[0].block_m}
        prompt = Captured(*inputs(min(max(recipe.lengths), LONGEST)), shape.head_dim**-0.5)
        of_prompt(prompt, sorted(shapes, key=lambda shape: shape.stride), recipe)

    def tried(call: Callable[[], None]) -> None:
        with suppress(S2OError):  # what is wrong is said where the model itself is called
            call()

    return [partial(tried, call) for call in (partial(tests, False), partial(tests, True), curves)]


def check_certifiable(recipe: Recipe, certify: Mapping[int, Sequence[Prompt]], counts: str = "") -> None:
    """Raise InputError, before the weights are loaded, if prompts are too few for the certificate that is asked for.

    counts: of the prompts, for the message.
    """
    if recipe.num_certify and not recipe.allow_regression:
        for length in recipe.all_lengths:
            if problem := check_groups(length, certify.get(length, ())):
                before = f"prompts: {counts}; " if counts else ""
                raise InputError(f"{before}{problem}: {problem.kind.value}, or say --allow-regression")


def _calibrated(run: _Run, clock: PhaseClock) -> Result:
    """From the tiles to the profile."""
    recipe, executor, prompts, journal, progress = run.recipe, run.executor, run.prompts, run.journal, run.progress
    prover, held_out = Prover(executor, journal, recipe.chunk, progress), prompts.held_out
    with clock.phase("measuring"):
        tiles = _worthwhile_tiles(run)
        curves = _curves(run, tiles)
    with clock.phase("searching"):
        candidate = _candidate(run, _choices(run, curves, tiles))
    with clock.phase("proving"):
        texts = {length: len(TextGroups.from_prompts(of_length)) for length, of_length in prompts.certify.items()}
        proven = prove_and_adjust(prover, held_out, candidate, texts)
        proven = without_slower_lengths(prover, held_out, proven)
    if proven.met:
        certified = without_slower_layers(proven)
        if prompts.certify:
            with clock.phase("certifying"):
                certified = certify(prover, prompts.certify, certified)
                proven = remeasure(prover, held_out, proven, certified)
        elif certified.candidate is not proven.candidate:
            with clock.phase("measuring again"):
                proven = remeasure(prover, held_out, proven, certified)

    profile = replace(proven.candidate.build_profile(), record=record_of(recipe, prompts, proven))
    written = proven.met or recipe.allow_regression
    if written:
        save_profile(profile, recipe.out)
    return Result(
        **vars(proven),
        profile=profile,
        written=written,
        seconds=clock.seconds,
        journal_reused=journal.reused,
        work=executor.work,
    )


@contextmanager
def _executor(
    recipe: Recipe,
    loaded: LoadedModel | None,
    prompts: PromptSet,
    clock: PhaseClock,
    progress: bool,
    compiled: Callable[[], None],
) -> Iterator[Executor]:
    """Who runs the recipe: the workers that it names, or this process, once the first kernels are compiled."""
    if recipe.is_distributed:
        from calibrate.work.cluster import cluster_executor

        with cluster_executor(recipe, _of_run(prompts)) as executor:
            yield executor
        return
    if loaded is None:
        with clock.phase("loading the model", progress):
            loaded = load(recipe.model, recipe.device, seed=recipe.seed, **recipe.loading)
    with clock.phase("testing the model's attention", progress):
        compiled()
        self_test(loaded)
    with local_executor(loaded) as executor:
        yield executor


def _of_run(prompts: PromptSet) -> list[Prompt]:
    """All prompts of a run."""
    return [
        prompt
        for by_length in prompts.by_purpose
        for prompts_of_length in by_length.values()
        for prompt in prompts_of_length
    ]


@dataclass(frozen=True)
class _Run:
    """What every stage is given."""

    recipe: Recipe
    executor: Executor
    prompts: PromptSet
    journal: Journal
    progress: bool


def _worthwhile_tiles(run: _Run) -> TilesByLength:
    """The tiles that get trials at each length."""
    return {
        length: tiles_for(run.executor, length=length, segments=run.recipe.segments_for(length), journal=run.journal)
        for length in run.recipe.lengths
    }


def _curves(run: _Run, tiles: TilesByLength) -> LayersCurves:
    """The curves of every layer at every length, for the shapes of the tiles."""
    shapes = {
        length: sorted(set(map(Shape.of, length_tiles)), key=lambda shape: (shape.block_m, shape.stride))
        for length, length_tiles in tiles.items()
    }
    steps = run.executor.geometry.layers * len(run.recipe.lengths)
    with progress_bar("measuring curves", steps, "layer", shown=run.progress) as step:
        curves = measure_model(run.executor, run.prompts.calibration, shapes, run.recipe, run.journal, step)
    if run.journal.reused:
        log.info("resumed: %d measurements reused", run.journal.reused)
    return curves


def _choices(run: _Run, curves: LayersCurves, tiles: TilesByLength) -> dict[int, Chosen]:
    """What each layer shall do at every length; on a GPU with the length below which its tile is slower than dense."""
    with progress_bar("searching", None, "trial", shown=run.progress) as step:
        chosen = choose(
            run.executor,
            curves,
            tiles,
            prompts=run.prompts,
            recipe=run.recipe,
            journal=run.journal,
            on_trial=step,
        )
    if run.executor.device.kind != "cuda":
        return chosen
    crossed = crossovers(
        run.executor,
        {
            (length, layer): crossing(choice, length)
            for length, length_choices in chosen.items()
            for layer, choice in enumerate(length_choices.choices)
        },
        run.journal,
    )
    return {
        length: replace(
            length_choices,
            choices=[
                replace(choice, point=choice.point._replace(tile=crossed[length, layer]))
                for layer, choice in enumerate(length_choices.choices)
            ],
        )
        for length, length_choices in chosen.items()
    }


def crossing(choice: Choice, length: int) -> Layer:
    """What a layer's crossovers depend on; one that was faster than dense at its length does not go dense there."""
    return Layer(choice.config, choice.allocation.density, None if choice.config.is_dense else length)


def _candidate(run: _Run, chosen: dict[int, Chosen]) -> Candidate:
    """The search's choices as the first candidate for a proof."""
    return Candidate(
        recipe=run.recipe,
        model_name=run.executor.name,
        geometry=run.executor.geometry,
        fingerprint=run.executor.fingerprint,
        device=run.executor.device,
        chosen=chosen,
    )


def journal_identity(model: LoadedModel | Executor, device: DeviceIdentity) -> dict[str, Any]:
    """What a journal's measurements hold for."""
    return {
        "model": {"name": model.name, **split_fingerprint(model.fingerprint), **model.geometry.as_json()},
        "device": {"kind": device.kind},  # keys of times say which GPU
        "versions": {name: text for name, text in versions().items() if name not in ("python", "optuna")},
    }
