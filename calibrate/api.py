"""The calibrator as a Python call, and the plan and run that s2o-calibrate shares with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrate.machine import check_files, find_gpu, resolve_recipe, wrap_write_errors
from calibrate.options import read_options
from calibrate.progress import PhaseClock, format_duration
from calibrate.recipe import OPTIONS, Recipe, check_limit
from s2o_runtime.errors import ConfigError, ModelError, ResourceError, get_first_line

if TYPE_CHECKING:
    from calibrate.model.estimate import Estimate
    from calibrate.model.models import LoadedModel
    from calibrate.model.preflight import Preflight
    from calibrate.pipeline import Result
    from s2o_runtime.devices import DeviceIdentity

LARGE = 1e9  # parameters of a model for whose run a CPU is hardly enough

log = logging.getLogger("calibrate")


class Plan(NamedTuple):
    """A run whose options fit the model and the machine, and what is known of it before the model is loaded."""

    recipe: Recipe
    device: DeviceIdentity
    preflight: Preflight
    estimate: Estimate
    prompts: str = ""  # of a dry run, the number of prompts beside the number that is needed, in words


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
    loaded = expected = None
    if not isinstance(model, (str, Recipe)):
        recipe, loaded, expected = _plan_loaded(model, tokenizer, options)
    elif tokenizer is not None and not (isinstance(tokenizer, str) and isinstance(model, str)):
        raise ConfigError("calibrate() got a tokenizer and a model by name: give the tokenizer's folder or hub id")
    elif isinstance(model, str):
        options |= {"model": model} | ({"tokenizer": tokenizer} if tokenizer else {})
        plan = make_plan(read_options(OPTIONS, options, "calibrate()"), progress=progress)
        recipe, expected = plan.recipe, plan.estimate
    elif options:
        raise ConfigError(f"calibrate() got a recipe and {', '.join(options)}: give a recipe or a model with options")
    else:
        recipe = check_files(model.validate())
    result = run(recipe, progress=progress, loaded=loaded, estimate=expected)
    if result.report_failure:
        log.warning("%s", result.report_failure)
    return result


def _plan_loaded(model: Any, tokenizer: Any, options: Mapping[str, Any]) -> tuple[Recipe, LoadedModel, Estimate]:
    from calibrate.model.estimate import ModelSizes, estimate
    from calibrate.model.models import from_memory
    from s2o_runtime.layer_kinds import get_max_positions

    for name in ("device", "random_weights", "trust_remote_code"):
        if name in options:
            raise ConfigError(f"calibrate() got a model in memory and {name}, which it has already: leave {name} out")
    loaded = from_memory(model, tokenizer)
    given = {**options, "model": loaded.name, "device": str(loaded.weights.device)}
    recipe, device = resolve_recipe(read_options(OPTIONS, given, "calibrate()"))
    check_limit(max(recipe.all_lengths), get_max_positions(loaded.model.config))
    return recipe, loaded, estimate(recipe, ModelSizes.from_model(loaded.model, recipe.device), loaded.geometry, device)


def make_plan(
    options: Mapping[str, Any], *, dry_run: bool = False, progress: bool = True, in_model: bool = False
) -> Plan:
    """Check options against the machine and the model, cheap checks first, and estimate the run.

    Args:
        options: those that were given, in the types of `Recipe`'s fields.
        dry_run: whether nothing is going to run, so that the sizes of an alias suffice, which ship, and a GPU that is
            named by target_gpu need not be here.
        progress: whether to tell on standard error that a scheduler is waited for.
        in_model: whether the profile goes into the model's folder.

    Raises what `calibrate` does.
    """
    gpu = find_gpu(options["target_gpu"]) if dry_run and options.get("target_gpu") else None
    if gpu is not None and not {"gpus", "scheduler"} & options.keys():  # it is an option of many workers elsewhere
        options = {name: value for name, value in options.items() if name != "target_gpu"}
    recipe, device = resolve_recipe(options, gpu, in_model=in_model)

    from calibrate.model.estimate import estimate
    from calibrate.model.models import is_gguf, load_config, load_tokenizer
    from calibrate.model.preflight import make_preflight
    from s2o_runtime.layer_kinds import get_max_positions

    shipped = dry_run or recipe.random_weights
    config = load_config(recipe.model, random_weights=shipped, trust_remote_code=recipe.trust_remote_code)
    if recipe.tokenizer is not None or is_gguf(recipe.model):
        load_tokenizer(recipe.model, **recipe.loading)
    check_limit(max(recipe.all_lengths), get_max_positions(config))
    if recipe.storage is not None:
        from calibrate.search.study import check_storage

        check_storage(recipe.storage)
    if recipe.scheduler is not None:
        from calibrate.work.cluster import CONNECT_TIMEOUT_S, connect

        waiting = f"waiting for scheduler {recipe.scheduler}, at most {CONNECT_TIMEOUT_S:g} s"
        with PhaseClock().time_phase(waiting, progress):
            connect(recipe.scheduler).close()
    seen = make_preflight(
        recipe.model, config, device=recipe.device, lengths=recipe.lengths, random_weights=recipe.random_weights,
        memory=device.memory_bytes if gpu else 0,
    )  # fmt: skip
    expected = estimate(recipe, seen.sizes, seen.geometry, device)
    warn_without_gpu(recipe.model, seen, expected.total, device)
    return Plan(recipe, device, seen, expected, _count_prompts(recipe) if dry_run else "")


def warn_without_gpu(model: str, preflight: Preflight, seconds: float, device: DeviceIdentity) -> None:
    """Warn of a large model without a GPU."""
    if device.kind != "cuda" and preflight.sizes.parameters > LARGE:
        log.warning(
            f"{model} has {preflight.sizes.parameters / 1e9:.1f} billion parameters and this run has no GPU: it takes "
            f"about {format_duration(seconds)}; take fewer and shorter prompts (--lengths, --num-certify), or "
            "calibrate on a GPU, for which the plan is --dry-run --target-gpu H100"
        )


def _count_prompts(recipe: Recipe) -> str:
    """Return the number of prompts of each length beside the number that is needed, in words.

    Raises InputError if a prompt file is bad, or they are too few for the run.
    """
    from calibrate.model.models import find_shipped_config, load_config, load_tokenizer
    from calibrate.pipeline import check_certifiable, count_groups
    from calibrate.prompts.documents import FOUND, read_documents
    from calibrate.prompts.prompts import load_prompts

    # the most groups that there can be, each prompt of a text of its own
    check_certifiable(recipe, dict.fromkeys(recipe.all_lengths, recipe.num_certify))
    others = recipe.held_out + recipe.num_certify
    needed = {length: others + recipe.num_prompts * (length in recipe.lengths) for length in recipe.all_lengths}
    is_alias = find_shipped_config(recipe.model)
    is_endless = bool(set(recipe.used_domains) - set(FOUND))  # generated text
    try:
        if is_alias and not is_endless:
            load_config(recipe.model, random_weights=recipe.random_weights)  # fails at once without a way to the Hub
        tokenizer = None if is_alias and is_endless else load_tokenizer(recipe.model, **recipe.loading)
    except (ModelError, ResourceError):
        if not is_alias:
            raise
        read_documents(recipe.prompts or ())
        return f"not read: the tokenizer of {recipe.model} cannot be loaded here"
    sets = () if is_endless else load_prompts(recipe, tokenizer).by_purpose
    counts = {length: sum(len(lengths.get(length, ())) for lengths in sets) for length in needed} if sets else needed
    text = ", ".join(f"{counts[length]} of {needed[length]} needed at {length}" for length in sorted(needed))
    if sets:
        check_certifiable(recipe, count_groups(sets[-1]), f"prompts: {text}; ")
    return text


def run(
    recipe: Recipe,
    *,
    progress: bool,
    command: str | None = None,
    loaded: LoadedModel | None = None,
    estimate: Estimate | None = None,
) -> Result:
    """Run a recipe and write the report, with the `command` line if there was one, beside its profile."""
    from calibrate import pipeline
    from calibrate.report.contents import make_report
    from calibrate.report.page import write_report

    with wrap_write_errors(recipe.out):
        expected = estimate.seconds if estimate else {}
        result = pipeline.calibrate(recipe, progress=progress, loaded=loaded, expected=expected)
    try:
        result = replace(result, report=make_report(result, command))
        files, failure = write_report(result.report, result.recipe.out)
        return replace(result, report_files=tuple(files), report_failure=failure)
    except Exception as error:  # a report that fails, for whatever reason, takes no profile away
        return replace(result, report_failure=f"the report cannot be written ({get_first_line(error)})")
