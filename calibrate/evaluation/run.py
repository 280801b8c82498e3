"""Run the model patched with each method on every task."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from calibrate.evaluation import score
from calibrate.evaluation.plan import AGREEMENT, DENSE, TIME, EvaluationPlan, configure_layer, find_baseline
from calibrate.evaluation.ruler import RulerQuestion
from calibrate.evaluation.tasks import AnyPrompt, Case, build, list_cases
from calibrate.journal import Journal
from calibrate.model.layers import with_attention
from calibrate.model.models import LoadedModel
from calibrate.progress import show_progress
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.retrieval import encode
from calibrate.recipe import DEFAULT_LAST_ROWS, LAST_PART
from calibrate.record import read_record
from s2o_runtime.config import LayerConfig
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.devices import identify
from s2o_runtime.errors import InputError, ResourceError
from s2o_runtime.files import hash_file
from s2o_runtime.huggingface import hf
from s2o_runtime.identity import list_attention_modules
from s2o_runtime.profile import Profile, load_profile
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.tiles import list_candidate_tiles

if TYPE_CHECKING:
    from scripts.bench.baselines.run import BaselineStats
    from scripts.bench.baselines.settings import Baseline

BASELINE = "s2o_baseline"  # the attention function that runs one, and the attribute of a module that holds its variant


@dataclass(frozen=True)
class Variant:
    """One way to run a model; without states and baseline it is dense, with the fastest attention that torch has."""

    name: str  # in reports
    identity: str  # its name in the journal; a profile's changes with its content
    states: tuple[hf.LayerState, ...] = ()  # of each attention layer, in order
    baseline: Baseline | None = None  # computes every layer's prefill instead of S2O; then there are no states
    profile: Profile | None = None  # that the states are of, if there is one
    # with a baseline, what each attention layer did in the last prefill; None for one that it leaves dense
    last: dict[nn.Module, BaselineStats | None] = field(default_factory=dict)

    @property
    def budget(self) -> str | None:
        """The budget that a profile was calibrated for, such as "rel_mse 0.001"."""
        recorded = None if self.profile is None else read_record(self.profile).budget
        return None if recorded is None else f"{recorded.kind} {recorded.value:g}"

    def attention_speedup(self, length: int) -> float | None:
        """Return dense seconds over a profile's, of all layers at a length; None if one was not timed here."""
        record = None if self.profile is None else read_record(self.profile)
        lengths = () if record is None or record.retiled else record.predicted or ()  # retiled: another GPU's times
        layers = [layer for at in lengths if at.length == length for layer in at.layers or ()]
        dense, seconds = ([getattr(layer, name) for layer in layers] for name in ("dense_seconds", "seconds"))
        return math.fsum(dense) / math.fsum(seconds) if layers and all((*dense, *seconds)) else None


def list_variants(plan: EvaluationPlan, loaded: LoadedModel) -> list[Variant]:
    """List dense, every profile and every setting of a plan. Raises ProfileError if one does not fit the model."""
    names = iter(plan.variant_names)
    compared = [Variant(next(names), DENSE)]
    for path in plan.profiles:
        profile = load_profile(path)
        # once: states are kept, so that changing variants costs nothing; S2O is evaluated, whatever a score reads
        hf.patch(loaded.model, profile, drift="off", reads="answers")
        states = tuple(hf.get_layer_states(loaded.model))
        hf.unpatch(loaded.model)
        compared.append(Variant(next(names), hash_file(path), states, profile=profile))
    device = identify(loaded.weights.device)
    tiles = list_candidate_tiles(loaded.geometry.head_dim, device.capability) if device.kind == "cuda" else ()
    for name, setting in zip(names, plan.settings, strict=True):
        if (baseline := find_baseline(setting)) is not None:
            compared.append(Variant(name, name, baseline=baseline))
        else:
            config = configure_layer(setting, loaded.geometry.query_heads, tiles)
            compared.append(Variant(name, name, repeat_config(config, loaded.geometry.layers)))
    return compared


def repeat_config(config: LayerConfig, layers: int) -> tuple[hf.LayerState, ...]:
    """Return the states of a model's layers that all have one configuration, at every length."""
    return tuple(hf.LayerState(index, lambda keys: config, min_length=0) for index in range(layers))


@contextmanager
def run_as(model: Any, variant: Variant) -> Iterator[None]:
    """Run the model as a variant inside the block. A layer that its baseline cannot compute raises InputError there."""
    hf.register()
    modules = list_attention_modules(model)
    AttentionInterface.register(BASELINE, _run_baseline)
    AttentionMaskInterface.register(BASELINE, hf.s2o_mask)
    with with_attention(model, hf.NAME if variant.baseline is None else BASELINE):
        try:
            variant.last.clear()
            for module in modules if variant.baseline else ():
                setattr(module, BASELINE, variant)
            for module, state in zip(modules, variant.states, strict=False):  # dense has none
                state.counts.clear()
                state.last = None
                hf.attach(module, state)
            yield
        finally:
            for module in modules:
                hf.detach(module)
                module.__dict__.pop(BASELINE, None)


def _run_baseline(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute prompts by the module's baseline, and all else as S2O's attention function does."""
    variant: Variant | None = module.__dict__.get(BASELINE)
    call: hf.PrefillCall | None = getattr(attention_mask, hf.CALL, None)
    baseline = None if variant is None else variant.baseline
    if variant and baseline and baseline.runs_dense(int(module.layer_idx)):  # type: ignore[arg-type]
        variant.last[module], baseline = None, None
    if variant is None or baseline is None or call is None or call.window is not None:
        return hf.s2o_attention_forward(module, query, key, value, attention_mask, **options)
    from scripts.bench.baselines.run import HEAD_DIM, baseline_attention  # `find_baseline` has found the folder

    scoring = hf.TransformersCall(module, query, key, value, attention_mask, options).scoring
    obstacle = "padded prompts" if call.kv_start is not None else scoring.beyond_sdpa
    if query.shape[3] > HEAD_DIM:
        obstacle = f"a head_dim of {query.shape[3]}, over {HEAD_DIM}"
    if obstacle is not None:
        raise InputError(f"{variant.name} cannot compute {obstacle}: leave this setting out")
    keys = call.q_offset + query.shape[2]  # a static cache is longer than what it holds
    key, value = key[:, :, :keys], value[:, :, :keys]
    out, stats = baseline_attention(query, key, value, baseline, scale=scoring.scale)
    if rows := min(DEFAULT_LAST_ROWS, query.shape[2] // LAST_PART):  # as exact as S2O's, which answer
        out[:, :, -rows:] = dense_attention(query[:, :, -rows:], key, value, scale=scoring.scale)
    variant.last[module] = stats
    return out.transpose(1, 2).contiguous(), None


def collect_run_stats(variant: Variant) -> dict[str, Any]:
    """Collect what a variant's layers did since `run_as` began, as fields of its results.

    density: query-key pairs computed over causal pairs, the mean of heads and layers. dense: layers by dense reason.
    """
    densities = [1.0 if state.last is None else float(state.last.density.mean()) for state in variant.states]
    densities += [1.0 if stats is None else float(stats.density.mean()) for stats in variant.last.values()]
    calls = [call for state in variant.states for call in sorted(state.counts)]
    reasons = Counter(reason for path, reason in calls if path == "dense" and reason != DenseReason.DECODE)
    return {"density": sum(densities) / len(densities) if densities else 1.0, "dense": dict(reasons)}


@dataclass(frozen=True)
class Evaluation:
    """A plan with all that it runs on."""

    plan: EvaluationPlan
    loaded: LoadedModel  # unpatched
    compared: Sequence[Variant]  # dense first
    user_prompts: Sequence[Prompt]  # of the user's own files
    journal: Journal  # keeps the results; what it has is not measured again


def evaluate(evaluation: Evaluation, *, progress: bool) -> None:
    """Measure what the journal lacks of a plan. Raises ResourceError if the GPU's memory does not suffice."""
    plan, compared, journal = evaluation.plan, evaluation.compared, evaluation.journal
    pairs = [
        (case, variant)
        for case in list_cases(plan, evaluation.user_prompts)
        for variant in compared[case.task == AGREEMENT :]  # dense agrees with itself
    ]
    missing = [(case, variant) for case, variant in pairs if not journal.get(case.task, case.key(variant.identity))]
    with show_progress("evaluating", len(pairs), "prompt", shown=progress) as step:
        if stored := len(pairs) - len(missing):
            step(f"are in {journal.path.name}", stored, known=True)
        for case, group in groupby(missing, itemgetter(0)):
            variant = compared[0]
            try:
                prompt = build(case, plan, evaluation.loaded.tokenizer, evaluation.user_prompts)
                reference = _predict_densely(evaluation, case, prompt) if case.task == AGREEMENT else None
                for _, variant in group:
                    result = _measure(evaluation, case, prompt, variant, reference)
                    journal.put(case.task, case.key(variant.identity), result)
                    step(f"{case.task} at {case.length} tokens")
            except torch.OutOfMemoryError as error:
                raise ResourceError(
                    f"GPU memory ran out while {variant.name} read {case.length} tokens: use shorter --lengths or "
                    "a smaller model; what was measured is kept"
                ) from error


def _predict_densely(evaluation: Evaluation, case: Case, prompt: AnyPrompt) -> tuple[Tensor, Tensor]:
    """Return the positions [R] at which predictions are compared, and the dense model's `log_probs` there [R, V]."""
    positions = score.sample_positions(case.length, case.rng(evaluation.plan, "positions"))
    with run_as(evaluation.loaded.model, evaluation.compared[0]):
        forward = score.ForwardPass(evaluation.loaded, prompt.ids)
    return positions, torch.cat(list(forward.log_probs(positions)))


def _measure(
    evaluation: Evaluation, case: Case, prompt: AnyPrompt, variant: Variant, reference: tuple[Tensor, Tensor] | None
) -> dict[str, Any]:
    """Return a variant's result on a prompt: its time, what differs from dense's predictions, or its answers."""
    loaded = evaluation.loaded
    with run_as(loaded.model, variant):
        if case.task == TIME:
            return score.time_first_token(loaded, prompt.ids, evaluation.plan.repeats) | collect_run_stats(variant)
        forward = score.ForwardPass(loaded, prompt.ids, cache=isinstance(prompt, RulerQuestion))
        stats = collect_run_stats(variant)
    # behind the variant's prompt, but read with dense attention, as decoding always is
    if isinstance(prompt, RulerQuestion):
        dense = evaluation.journal.get(case.task, case.key(DENSE))  # nearly what a variant writes
        draft = encode(loaded.tokenizer, dense["text"]) if dense else prompt.answer
        return score.score_ruler(loaded, forward, prompt, draft) | stats
    if reference is not None:
        return score.compare_predictions(forward, *reference) | stats
    return score.score_answers(forward, prompt) | stats
