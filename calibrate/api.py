"""The calibrator as a Python call, and the steps that s2o-calibrate shares with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrate.machine import check_files, draft, gpu_named, on_this_machine, writing
from calibrate.options import read_all
from calibrate.progress import PhaseClock, duration
from calibrate.recipe import OPTIONS, Recipe, check_limit
from s2o_runtime.errors import ConfigError, ModelError, ResourceError, first_line

if TYPE_CHECKING:
    from calibrate.model.estimate import Estimate
    from calibrate.model.models import LoadedModel
    from calibrate.model.preflight import Preflight
    from calibrate.pipeline import Result
    from s2o_runtime.devices import DeviceIdentity

LARGE = 1e9  # parameters of a model for whose run a CPU is hardly enough

log = logging.getLogger("calibrate")


class Planned(NamedTuple):
    """A run whose options fit the model and the machine, and what is known of it before the model is loaded.

    prompts: of a rehearsal, how many there are of how many that are needed, in words.
    """

    recipe: Recipe
    device: DeviceIdentity
    preflight: Preflight
    estimate: Estimate
    prompts: str = ""


def calibrate(model: Any, tokenizer: Any = None, *, progress: bool = True, **options: Any) -> Result:
    """Calibrate a model on this machine and write its profile and report, as s2o-calibrate does.

    Run again with the same options, it continues an interrupted run; with another budget, it measures nothing again.

    Args:
        model: an alias such as "demo", a local folder, a GGUF file or a hub id; a `Recipe`, which is run as it is; or a
            transformers model in memory, quantised or not, with adapters or without, on one GPU or spread over several
            that are alike. That one is measured where it is and as it is.
        tokenizer: of a model in memory; the processor of a model with further inputs will do. Of a model by name, the
            folder or hub id of a tokenizer to use in place of the model's.
        progress: show progress bars on standard error.
        **options: by the names of the command's flags, with underscores: docs/options.md lists them with their
            defaults. Values are Python's own (lengths=(1024, 2048)) or the texts of the flags (time_limit="5m").

    Returns:
        The result: its `profile`, whether the proof was `met` and the profile `written`, and the `problems`, if not.

    Raises:
        ConfigError: an option is not known, is out of range, or does not fit another or this machine.
        InputError: the prompts or the journal do not fit.
        ModelError: the model cannot be found or has parts that cannot be calibrated.
        ResourceError: GPU memory or the disk does not suffice, or another run writes the journal.

    Example:
        >>> from calibrate import calibrate
        >>> calibrate("demo", budget_rel_mse=1e-3, lengths=(1024, 2048), out="p.safetensors").written  # doctest: +SKIP
        True
    """
    if not isinstance(model, (str, Recipe)):
        return _calibrate_loaded(model, tokenizer, options, progress)
    if tokenizer is not None and not (isinstance(tokenizer, str) and isinstance(model, str)):
        raise ConfigError("calibrate() got a tokenizer and a model by name: give the tokenizer's folder or hub id")
    options |= {"tokenizer": tokenizer} if tokenizer else {}
    if isinstance(model, Recipe):
        if options:
            raise ConfigError(
                f"calibrate() got a recipe and {', '.join(options)}: give a recipe or a model with options"
            )
        return warned(finished(check_files(model.validate()), progress=progress))
    plan = planned(read_all(OPTIONS, {"model": model, **options}, "calibrate()"), progress=progress)
    return warned(finished(plan.recipe, progress=progress, estimate=plan.estimate))


def _calibrate_loaded(model: Any, tokenizer: Any, options: Mapping[str, Any], progress: bool) -> Result:
    from calibrate.model.estimate import ModelSizes, estimate
    from calibrate.model.models import in_memory
    from s2o_runtime.layer_kinds import positions

    own = [name for name in ("device", "random_weights", "trust_remote_code") if name in options]
    if own:
        raise ConfigError(f"calibrate() got a model in memory and {own[0]}, which it has already: leave {own[0]} out")
    loaded = in_memory(model, tokenizer, options.get("model"))
    given = read_all(OPTIONS, {**options, "model": loaded.name, "device": str(loaded.weights.device)}, "calibrate()")
    draft(given)
    recipe, device = on_this_machine(given)
    check_limit(max(recipe.all_lengths), positions(loaded.model.config))
    expected = estimate(recipe, ModelSizes.of(loaded.model, recipe.device), loaded.geometry, device)
    return warned(finished(recipe, progress=progress, loaded=loaded, estimate=expected))


def warned(result: Result) -> Result:
    """Return the result, after a warning if its report failed."""
    if result.report_failure:
        log.warning("%s", result.report_failure)
    return result


def planned(options: Mapping[str, Any], *, rehearsed: bool = False, progress: bool = True) -> Planned:
    """Check options against the model and this machine; what is cheap to get wrong is checked first.

    Args:
        options: those that were given, in the types of `Recipe`'s fields.
        rehearsed: whether nothing is going to run, so that the sizes of an alias suffice, which ship, and a GPU that is
            named by target_gpu need not be here; prompts are counted then.
        progress: whether to say what is waited for.

    Raises:
        ConfigError, InputError, ModelError, ResourceError: as `calibrate` does.
    """
    gpu = gpu_named(options["target_gpu"]) if rehearsed and options.get("target_gpu") else None
    if gpu is not None and not {"gpus", "scheduler"} & options.keys():
        options = {name: value for name, value in options.items() if name != "target_gpu"}
    recipe = draft(options)

    from calibrate.model.estimate import estimate
    from calibrate.model.models import is_gguf, load_config, load_tokenizer
    from calibrate.model.preflight import preflight
    from s2o_runtime.layer_kinds import positions

    shipped = rehearsed or recipe.random_weights
    config = load_config(recipe.model, random_weights=shipped, trust_remote_code=recipe.trust_remote_code)
    if recipe.tokenizer is not None or is_gguf(recipe.model):
        load_tokenizer(recipe.model, **recipe.loading)
    recipe, device = on_this_machine(options, gpu)
    check_limit(max(recipe.all_lengths), positions(config))
    if recipe.storage is not None:
        from calibrate.search.study import check_storage

        check_storage(recipe.storage)
    if recipe.scheduler is not None:
        from calibrate.work.cluster import CONNECT_TIMEOUT_S, connect

        with PhaseClock().phase(f"waiting for scheduler {recipe.scheduler}, at most {CONNECT_TIMEOUT_S:g} s", progress):
            connect(recipe.scheduler).close()
    seen = preflight(
        recipe.model, config, device=recipe.device, lengths=recipe.lengths, random_weights=recipe.random_weights,
        memory=device.memory_bytes if gpu else 0,
    )  # fmt: skip
    expected = estimate(recipe, seen.sizes, seen.geometry, device)
    warn_without_gpu(recipe.model, seen, expected.total, device)
    return Planned(recipe, device, seen, expected, _count_prompts(recipe) if rehearsed else "")


def warn_without_gpu(model: str, preflight: Preflight, seconds: float, device: DeviceIdentity) -> None:
    """Warn of a large model without a GPU."""
    if device.kind != "cuda" and preflight.sizes.parameters > LARGE:
        log.warning(
            "%s has %.1f billion parameters and this run has no GPU: it takes about %s; take fewer and shorter prompts "
            "(--lengths, --num-certify), or calibrate on a GPU, for which the plan is --dry-run --target-gpu H100",
            model,
            preflight.sizes.parameters / 1e9,
            duration(seconds),
        )


def _count_prompts(recipe: Recipe) -> str:
    """How many prompts of each length there are of how many that are needed.

    Raises:
        InputError: a prompt file is bad, or they are too few for the run.
    """
    from calibrate.model.models import load_config, load_tokenizer, shipped_sizes
    from calibrate.pipeline import check_certifiable
    from calibrate.prompts.documents import FOUND, read_documents
    from calibrate.prompts.prompts import load_prompts

    others = recipe.held_out + recipe.num_certify
    needed = {length: others + recipe.num_prompts * (length in recipe.lengths) for length in recipe.all_lengths}
    is_alias, endless = shipped_sizes(recipe.model), set(recipe.used_domains) - set(FOUND)  # what is generated
    try:
        if is_alias and not endless:
            load_config(recipe.model, random_weights=recipe.random_weights)  # fails at once without a way to the Hub
        tokenizer = None if is_alias and endless else load_tokenizer(recipe.model, **recipe.loading)
    except (ModelError, ResourceError):
        if not is_alias:
            raise
        read_documents(recipe.prompts or ())
        return f"not read: the tokenizer of {recipe.model} cannot be loaded here"
    sets = () if endless else load_prompts(recipe, tokenizer).by_purpose
    there = {length: sum(len(lengths.get(length, ())) for lengths in sets) for length in needed} if sets else needed
    text = ", ".join(f"{there[length]} of {needed[length]} needed at {length}" for length in sorted(needed))
    if sets:
        check_certifiable(recipe, sets[-1], text)
    return text


def finished(
    recipe: Recipe,
    *,
    progress: bool,
    command: str | None = None,
    loaded: LoadedModel | None = None,
    estimate: Estimate | None = None,
) -> Result:
    """Run a recipe and write the report beside its profile, or where it would be.

    Args:
        recipe: what to calibrate.
        progress: show progress bars on standard error.
        command: the command line that the report says it was made with, if there was one.
        loaded: the recipe's model, if it is loaded already.
        estimate: what the run is expected to take, for progress.
    """
    from calibrate import pipeline
    from calibrate.report.contents import report_of
    from calibrate.report.page import write_report

    expected = estimate.seconds if estimate else {}
    with writing(recipe.out):
        result = pipeline.calibrate(recipe, progress=progress, loaded=loaded, expected=expected)
    try:
        result = replace(result, report=report_of(recipe, result, command=command))
        files, failure = write_report(result.report, recipe.out)
        return replace(result, report_files=tuple(files), report_failure=failure)
    except Exception as error:  # a report that fails, whatever of, takes no profile away
        return replace(result, report_failure=f"the report cannot be written ({first_line(error)})")
