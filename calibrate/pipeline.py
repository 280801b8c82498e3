"""The stages of a calibration: prompts -> curves -> choices -> proof -> certificate -> profile.

Each is a pass over the model, one layer at a time. The proof runs the model as it will run, on the prompts that layers
are adjusted on; where the certificate does not hold at once, it looks at a length again with less. A budget of answers
is certified first: its proof only takes from layers, and what is proven is measured once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from calibrate.compiling import start_compiling, with_tiles
from calibrate.curves.curves import Shape
from calibrate.curves.measure import measure_model, measure_on_prompts, measure_prompt
from calibrate.journal import Journal
from calibrate.model.layers import Captured
from calibrate.model.models import LoadedModel, load, load_config, load_tokenizer
from calibrate.model.self_test import SEGMENTS, choose_test_config, run_self_test
from calibrate.progress import PhaseClock, show_progress
from calibrate.prompts.prompts import load_prompts
from calibrate.proof.adjust import make_slower_dense, prove_and_adjust, remeasure
from calibrate.proof.certify import TextGroups, certify, check_groups
from calibrate.proof.certify_answers import certify_answers
from calibrate.proof.state import Candidate, make_record
from calibrate.proof.verify import Prompts, Prover
from calibrate.proof.weigh import check_noise, make_answer_budgets, scale_to_answers
from calibrate.recipe import DEFAULT_BUDGET, Recipe
from calibrate.search.choice import LayerBudget, make_constraints
from calibrate.search.choose import SearchResult, choose
from calibrate.search.study import open_storage
from calibrate.search.tiles import LONGEST, Layer, choose_tiles, draw_inputs, measure_crossovers
from calibrate.versions import collect_versions
from calibrate.work.executor import Executor, open_local_executor
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.warmup import warmup
from s2o_runtime.config import REPRESENTATIVES, HeadConfig, LayerConfig
from s2o_runtime.devices import DeviceIdentity, get_capability
from s2o_runtime.errors import InputError, S2OError
from s2o_runtime.identity import geometry, split_fingerprint
from s2o_runtime.profile import Profile, save_profile
from s2o_runtime.tiles import list_candidate_tiles

log = logging.getLogger("calibrate")


@dataclass(frozen=True, kw_only=True)
class Result(Candidate):
    """A finished calibration: the proof with its profile and report."""

    profile: Profile  # with its record
    written: bool  # whether the profile was saved
    seconds: dict[str, float]  # of each phase
    journal_reused: int  # measurements of earlier runs
    report: Any = None  # the `calibrate.report.contents.Report`; None if it failed
    report_files: tuple[Path, ...] = ()
    report_failure: str = ""  # why the report, or its pictures, failed; empty if they did not


def calibrate(
    recipe: Recipe,
    *,
    progress: bool = True,
    loaded: LoadedModel | None = None,
    expected: Mapping[str, float] = MappingProxyType({}),
) -> Result:
    """Run a recipe: load, capture and measure curves, allocate and search, prove, certify and write the profile.

    Args:
        recipe: the model, the prompts, the budget and all other options. Its journal continues an interrupted run.
        progress: whether to show progress bars.
        loaded: the recipe's model, if it is loaded already; on the recipe's device.
        expected: the seconds that phases are expected to take, for progress.

    Returns:
        The choices and their proof. The profile is saved only if the proof holds or `recipe.allow_regression` is set.

    Raises what `calibrate.api.calibrate` does.
    """
    clock = PhaseClock(expected)
    with ExitStack() as stack:
        # Kernels compile while prompts are made, weights are read and the model is tested.
        wait_for_kernels = stack.enter_context(start_compiling(_list_first_calls(recipe, loaded)))
        with clock.time_phase("making prompts", progress):
            tokenizer = load_tokenizer(recipe.model, **recipe.loading) if loaded is None else loaded.tokenizer
            prompts = load_prompts(recipe, tokenizer)
            open_storage(recipe.storage)
            check_certifiable(recipe, texts := count_groups(prompts.certify))
        # A disk that takes no folder is found before the weights are loaded.
        recipe.out.parent.mkdir(parents=True, exist_ok=True)
        executor: Executor
        if recipe.is_distributed:
            from calibrate.work.cluster import connect_cluster

            by_length = chain.from_iterable(purpose.values() for purpose in prompts.by_purpose)
            executor = stack.enter_context(connect_cluster(recipe, list(chain.from_iterable(by_length))))
        else:
            if loaded is None:
                with clock.time_phase("loading the model", progress):
                    loaded = load(recipe.model, recipe.device, seed=recipe.seed, **recipe.loading)
            with clock.time_phase("testing the model's attention", progress):
                run_self_test(loaded)
            executor = stack.enter_context(open_local_executor(loaded))
        journal = stack.enter_context(
            Journal.open(recipe.journal_path, make_journal_identity(executor, executor.device))
        )
        prover, held_out = Prover(executor, journal, recipe.chunk, progress), prompts.held_out
        log.info("calibrating for %s", executor.device)
        holds_answers = recipe.budget.kind == "kl"
        if holds_answers:
            with clock.time_phase("measuring noise", progress):
                recipe = check_noise(prover, held_out, recipe, DEFAULT_BUDGET.value)

        with clock.time_phase("measuring"):
            wait_for_kernels()  # tiles are timed next, on a GPU that does nothing else
            tiles = {
                length: choose_tiles(executor, length=length, segments=recipe.select_segments(length), journal=journal)
                for length in recipe.lengths
            }
            by_size = attrgetter("block_m", "stride")
            shapes = {length: sorted({*map(Shape.from_tile, tiles[length])}, key=by_size) for length in recipe.lengths}
            steps = executor.geometry.layers * len(recipe.lengths)
            with show_progress("measuring curves", steps, "layer", shown=progress) as step:
                curves = measure_model(executor, prompts.calibration, shapes, recipe, journal, step)
            if journal.reused:
                log.info("resumed: %d measurements reused", journal.reused)
        if holds_answers:
            with clock.time_phase("weighing layers by answers", progress):
                sensitivity = measure_on_prompts(executor, prompts.calibration, recipe, journal)
                budgets = make_answer_budgets(prover, held_out, curves, tiles, sensitivity, recipe)
        else:
            budgets = {
                length: [LayerBudget.from_recipe(layer, recipe) for layer in layers]
                for length, layers in curves.items()
            }
        with clock.time_phase("searching"):
            with show_progress("searching", None, "trial", shown=progress) as step:
                chosen = choose(
                    executor, curves, tiles, budgets, prompts=prompts, recipe=recipe, journal=journal, on_trial=step
                )
            if executor.device.kind == "cuda":  # on a CPU nothing is timed
                chosen = _with_crossovers(executor, chosen, journal)
            model = executor.name, executor.geometry, executor.fingerprint, executor.device
            candidate = Candidate(recipe, *model, chosen)
        if holds_answers:
            with clock.time_phase("measuring answers", progress):
                candidate = scale_to_answers(prover, held_out, candidate)
            if prompts.certify:
                with clock.time_phase("certifying", progress):
                    candidate = certify_answers(prover, prompts.certify, candidate)
        missed = candidate.problems
        with clock.time_phase("proving"):
            proven = prove_and_adjust(prover, held_out, candidate, texts)
        if proven.met:
            # The record is of what is written, so whatever changes after the proof is measured again.
            certified = make_slower_dense(proven)
            if prompts.certify and not holds_answers:
                with clock.time_phase("certifying"):
                    certified = certify(prover, prompts.certify, certified)
                    proven = remeasure(prover, held_out, proven, certified)
            elif certified is not proven:
                with clock.time_phase("measuring again"):
                    proven = remeasure(prover, held_out, proven, certified)
        proven = replace(proven, problems=(*missed, *proven.problems))

        profile = replace(proven.build_profile(), record=make_record(prompts, proven).to_json())
        written = proven.met or recipe.allow_regression  # the record says that the proof failed
        if written:
            save_profile(profile, recipe.out)
        return Result(
            **{part.name: getattr(proven, part.name) for part in fields(proven)}, profile=profile, written=written,
            seconds=clock.seconds, journal_reused=journal.reused,
        )  # fmt: skip


def _list_first_calls(recipe: Recipe, loaded: LoadedModel | None) -> list[Callable[[], object]]:
    """Return calls that need the kernels of the model's test, of tiles, curves and layers with the tile tried first.

    Inputs are random, of the model's sizes. None without a GPU of this process's. A model whose layers are called in
    another way compiles its own later.
    """
    device = torch.device(recipe.device)
    if device.type != "cuda" or recipe.is_distributed:
        return []
    if loaded is None:
        options = {"random_weights": recipe.random_weights, "trust_remote_code": recipe.trust_remote_code}
        shape = geometry(load_config(recipe.model, **options))
    else:
        shape = loaded.geometry
    tested = choose_test_config(shape, device)
    longest = min(max(recipe.lengths), LONGEST)
    segments = recipe.select_segments(longest)
    candidates = list_candidate_tiles(shape.head_dim, get_capability(device))
    tiles = [tile for tile in candidates if not any(segment % tile.rows for segment in segments)]
    if tested is None or not tiles:
        return []
    heads = shape.query_heads
    segment = segments[0]  # kernels are those of any segment, and a shorter one takes less memory
    last_rows = recipe.count_last_rows(longest)
    layers = with_tiles(LayerConfig.uniform(heads, segment=segment), tiles)
    for tail in make_constraints(recipe).tails:
        one, many = (HeadConfig(1.0, segment, representatives=count, tail=tail) for count in REPRESENTATIVES)
        for first in (one, replace(one, mode="dense")):
            layers.append(LayerConfig((first, *[many] * (heads - 1)), tiles[0], last_rows=last_rows))
        layers.append(LayerConfig((many,) * heads, tiles[0]))  # as crossovers are measured

    def make_inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
        return draw_inputs(shape, length, length, torch.bfloat16, device)

    def run_test(padded: bool) -> None:
        start = torch.zeros(1, dtype=torch.int64, device=device) if padded else None
        s2o_attention(*make_inputs(SEGMENTS * tested.segment), tested, kv_start=start)

    def run_curves() -> None:
        shapes = {Shape.from_tile(tile) for tile in tiles if tile.block_m == tiles[0].block_m}
        prompt = Captured(*make_inputs(longest), shape.head_dim**-0.5)
        measure_prompt(prompt, sorted(shapes, key=attrgetter("stride")), recipe)

    def try_call(call: Callable[[], None]) -> None:
        with suppress(S2OError):  # the model's own call reports what is wrong
            call()

    calls: list[Callable[[], None]] = [partial(run_test, False), partial(run_test, True), run_curves]
    run_layer = partial(warmup, kv_heads=shape.kv_heads, head_dim=shape.head_dim, device=device)
    calls += [partial(run_layer, layer) for layer in layers]
    return [partial(try_call, call) for call in calls]


def count_groups(prompts: Prompts) -> dict[int, int]:
    """Return how many groups of text the prompts of each length are."""
    return {length: len(TextGroups.from_prompts(length_prompts)) for length, length_prompts in prompts.items()}


def check_certifiable(recipe: Recipe, texts: Mapping[int, int], counts: str = "") -> None:
    """Raise InputError if texts are too few for the certificate that is asked for.

    texts: by length, how many groups of text certify it, or at most do. counts: the beginning of the error's sentence.
    """
    if recipe.num_certify and not recipe.allow_regression:
        for length in recipe.all_lengths:
            if problem := check_groups(length, texts.get(length, 0)):
                raise InputError(f"{counts}{problem}: {problem.kind.value}, or say --allow-regression")


def _with_crossovers(
    executor: Executor, chosen: Mapping[int, SearchResult], journal: Journal
) -> dict[int, SearchResult]:
    """Return the choices with the lengths below which their tiles are slower than dense attention on the GPU."""
    plans = {(length, index): plan for length, result in chosen.items() for index, plan in enumerate(result.choices)}
    tiles = measure_crossovers(
        executor, {at: Layer(plan.config, at[0], plan.allocation.density) for at, plan in plans.items()}, journal
    )
    crossed = {at: replace(plan, point=plan.point._replace(tile=tiles[at])) for at, plan in plans.items()}
    return {
        length: replace(result, choices=[plan for at, plan in crossed.items() if at[0] == length])
        for length, result in chosen.items()
    }


def make_journal_identity(model: LoadedModel | Executor, device: DeviceIdentity) -> dict[str, Any]:
    """Return the model, the kind of device and the versions that a journal's measurements hold for."""
    return {
        "model": {"name": model.name, **split_fingerprint(model.fingerprint), **model.geometry.as_json()},
        "device": {"kind": device.kind},  # keys of times say which GPU
        "versions": {name: text for name, text in collect_versions().items() if name not in ("python", "optuna")},
    }
