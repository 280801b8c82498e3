"""Run the model patched with each method on every task."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from calibrate.evaluation import score
from calibrate.evaluation.plan import DENSE, PROMPTS, RETRIEVAL, EvaluationPlan, baseline_of, config_of
from calibrate.evaluation.tasks import Case, build, cases
from calibrate.journal import Journal
from calibrate.model.layers import attention_implementation
from calibrate.model.models import LoadedModel
from calibrate.progress import progress_bar
from calibrate.prompts.prompt import Prompt
from s2o_runtime.config import LayerConfig
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.devices import identify
from s2o_runtime.errors import InputError, ResourceError
from s2o_runtime.huggingface import hf
from s2o_runtime.identity import attention_modules
from s2o_runtime.profile import Profile, load_profile
from s2o_runtime.tiles import candidate_tiles

if TYPE_CHECKING:
    from scripts.bench.baselines.run import BaselineStats
    from scripts.bench.baselines.settings import Baseline

DIGEST = 16  # hexadecimal digits that name a profile's content
BASELINE = "s2o_baseline"  # the attention function that runs one, and the attribute of a module that says which


@dataclass(frozen=True)
class Variant:
    """One way to run a model.

    Args:
        name: what reports call it.
        identity: what results are kept under in the journal; a profile's changes with its content.
        states: the state of each attention layer, in order. Without states the model is dense, with the fastest
            attention that torch has.
        baseline: what computes every layer's prefill instead of S2O; then there are no states.
        last: with a baseline, what each attention layer did in the last prefill; None for one that it leaves dense.
        profile: what the states are of, if they are those of a profile.
    """

    name: str
    identity: str
    states: tuple[hf.LayerState, ...] = ()
    baseline: Baseline | None = None
    profile: Profile | None = None
    last: dict[nn.Module, BaselineStats | None] = field(default_factory=dict)

    @property
    def budget(self) -> str | None:
        """The budget that a profile was calibrated for, such as "rel_mse 0.001"."""
        recorded = None if self.profile is None else self.profile.record.budget
        return None if recorded is None else f"{recorded.kind} {recorded.value:g}"

    def attention_speedup(self, length: int) -> float | None:
        """How much faster than dense a profile's layers were timed together at a length; None if one was not here."""
        record = None if self.profile is None else self.profile.record
        lengths = () if record is None or record.retiled else record.predicted or ()  # retiled: another GPU's times
        layers = [layer for one in lengths if one.length == length for layer in one.layers or ()]
        times = [(one.dense_seconds, one.seconds) for one in layers if one.dense_seconds and one.seconds]
        if not layers or len(times) < len(layers):
            return None
        dense, seconds = map(math.fsum, zip(*times, strict=True))
        return dense / seconds


@dataclass(frozen=True)
class RunStats:
    """What the layers did in the last prefill.

    Args:
        density: query-key pairs computed over causal pairs, the mean over heads and layers.
        dense: how many layers ran dense for each reason.
    """

    density: float
    dense: dict[str, int]


def variants(plan: EvaluationPlan, loaded: LoadedModel) -> list[Variant]:
    """Dense, every profile and every setting of a plan, ready to run.

    Raises:
        ProfileError: If a profile does not fit the model.
    """
    names = iter(plan.variant_names)
    compared = [Variant(next(names), DENSE)]
    for path in plan.profiles:
        profile = load_profile(path)
        hf.patch(loaded.model, profile, drift="off")  # once: states are kept, so that changing variants costs nothing
        states = tuple(hf.layer_states(loaded.model))
        hf.unpatch(loaded.model)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST]
        compared.append(Variant(next(names), digest, states, profile=profile))
    device = identify(loaded.weights.device)
    tiles = candidate_tiles(loaded.geometry.head_dim, device.capability) if device.kind == "cuda" else ()
    for setting in plan.settings:
        name, baseline = next(names), baseline_of(setting)
        if baseline is not None:
            compared.append(Variant(name, name, baseline=baseline))
        else:
            config = config_of(setting, loaded.geometry.query_heads, tiles)
            compared.append(Variant(name, name, uniform_states(config, loaded.geometry.layers)))
    return compared


def uniform_states(config: LayerConfig, layers: int) -> tuple[hf.LayerState, ...]:
    """The states of a model's layers if all have one configuration, at every length."""
    return tuple(hf.LayerState(index, lambda keys: config, min_length=0) for index in range(layers))


@contextmanager
def running(model: Any, variant: Variant) -> Iterator[None]:
    """Run the model as a variant inside the block; afterwards it is as it was.

    Raises:
        InputError: Inside the block, if the variant's baseline cannot compute a layer.
    """
    hf.register()
    modules = attention_modules(model)
    AttentionInterface.register(BASELINE, _baseline_forward)
    AttentionMaskInterface.register(BASELINE, hf.s2o_mask)
    with attention_implementation(model, hf.NAME if variant.baseline is None else BASELINE):
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


def _baseline_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers that runs the module's baseline for prompts, S2O's own for all else."""
    variant: Variant | None = module.__dict__.get(BASELINE)
    call: hf.PrefillCall | None = getattr(attention_mask, hf.CALL, None)
    baseline = None if variant is None else variant.baseline
    if variant is not None and baseline is not None and baseline.runs_dense(int(module.layer_idx)):  # type: ignore[arg-type]
        variant.last[module], baseline = None, None
    if variant is None or baseline is None or call is None or call.window is not None:
        return hf.s2o_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    from scripts.bench.baselines.run import HEAD_DIM, baseline_attention  # `baseline_of` has found the folder

    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    obstacle = "padded prompts" if call.kv_start is not None else hf.scoring_of(scale, kwargs).beyond_sdpa
    if query.shape[3] > HEAD_DIM:
        obstacle = f"a head_dim of {query.shape[3]}, over {HEAD_DIM}"
    if obstacle is not None:
        raise InputError(f"{variant.name} cannot compute {obstacle}: leave this setting out")
    keys = call.q_offset + query.shape[2]  # a static cache is longer than what it holds
    out, stats = baseline_attention(query, key[:, :, :keys], value[:, :, :keys], baseline, scale=scale)
    variant.last[module] = stats
    return out.transpose(1, 2).contiguous(), None


def run_stats(variant: Variant) -> RunStats:
    """What a variant's layers did since `running` began."""
    densities = [1.0 if state.last is None else float(state.last.density.mean()) for state in variant.states]
    densities += [1.0 if stats is None else float(stats.density.mean()) for stats in variant.last.values()]
    reasons: dict[str, int] = {}
    for state in variant.states:
        for (path, reason), _ in sorted(state.counts.items()):
            if path == "dense" and reason != DenseReason.DECODE:
                reasons[reason] = reasons.get(reason, 0) + 1
    return RunStats(sum(densities) / len(densities) if densities else 1.0, reasons)


POSITIONS = 512  # of a prompt at which predictions are compared with the dense model's


def evaluate(
    plan: EvaluationPlan,
    loaded: LoadedModel,
    compared: Sequence[Variant],
    user_prompts: Sequence[Prompt],
    journal: Journal,
    *,
    progress: bool,
) -> None:
    """Measure what a plan asks for. Afterwards the journal has an entry for each task, variant and prompt.

    Args:
        plan: what to measure.
        loaded: the model, unpatched.
        compared: the variants, dense first.
        user_prompts: the prompts of the user's own file.
        journal: where results are kept; what it has is not measured again.
        progress: whether to show a progress bar.

    Raises:
        InputError: If the GPU's memory does not suffice.
    """
    planned = cases(plan, user_prompts)
    with progress_bar("evaluating", len(planned) * len(compared), "prompt", shown=progress) as step:
        to_do = [[one for one in compared if _missing(case, one, compared[0], journal)] for case in planned]
        if stored := sum(len(compared) - len(missing) for missing in to_do):
            step(f"are in {journal.path.name}", stored, known=True)
        for case, missing in zip(planned, to_do, strict=True):
            if missing:
                prompt, asked = build(case, plan, loaded.tokenizer, user_prompts)
                run = _CaseRun(case, prompt, asked, plan, loaded, compared, journal)
                for _ in run.measure(missing):
                    step(f"{', '.join(case.tasks)} at {case.length} tokens")


def _missing(case: Case, variant: Variant, dense: Variant, journal: Journal) -> list[str]:
    """The tasks of a case that a variant still has to do. Dense always agrees with itself."""
    return [
        task
        for task in case.tasks
        if not (task == "agreement" and variant is dense) and journal.get(task, case.key(variant.identity)) is None
    ]


@dataclass(frozen=True)
class _CaseRun:
    """One prompt, the number of the question of each of its answers, and what it takes to run variants on it."""

    case: Case
    prompt: Prompt
    asked: Sequence[int]
    plan: EvaluationPlan
    loaded: LoadedModel
    compared: Sequence[Variant]
    journal: Journal

    def measure(self, missing: Sequence[Variant]) -> Iterator[None]:
        """Measure the variants that are missing in the journal, one at each step.

        Where a variant is to be compared with dense, dense runs too, whether or not it is missing.
        """
        dense = self.compared[0]
        dense_log_probs: Tensor | None = None
        compares = any("agreement" in _missing(self.case, variant, dense, self.journal) for variant in missing)
        for variant in self.compared:
            tasks = _missing(self.case, variant, dense, self.journal)
            is_reference = variant is dense and compares
            if not tasks and not is_reference:
                continue
            with _within_memory(variant, self.case):
                if self.case.tasks == ("time",):
                    results = self._times(variant)
                else:
                    results, dense_log_probs = self._scores(variant, tasks, is_reference, dense_log_probs)
            for task, result in results.items():
                self.journal.put(task, self.case.key(variant.identity), result)
            if variant in missing:
                yield

    def _times(self, variant: Variant) -> dict[str, Any]:
        with running(self.loaded.model, variant):
            result = score.first_token(self.loaded, self.prompt.ids, self.plan.repeats)
            return {"time": result | asdict(run_stats(variant))}

    def _scores(
        self, variant: Variant, tasks: Sequence[str], is_reference: bool, dense_log_probs: Tensor | None
    ) -> tuple[dict[str, Any], Tensor | None]:
        """The results of one pass by task, and the predictions that further variants are compared with.

        A greedy answer follows the variant's prompt, but is itself read with dense attention, as decoding always is.
        """
        with running(self.loaded.model, variant):
            forward = score.ForwardPass(self.loaded, self.prompt.ids, cache="greedy" in tasks)
            if is_reference:
                dense_log_probs = score.reference(forward, self._positions())
            results = {task: self._score(task, forward, dense_log_probs) for task in tasks if task != "greedy"}
            stats = asdict(run_stats(variant))
        if "greedy" in tasks:
            by_dense = self.journal.get("greedy", self.case.key(self.compared[0].identity))
            results["greedy"] = (
                score.greedy_answer(self.loaded, forward)
                if by_dense is None  # dense comes first
                else score.greedy_prefix(forward, by_dense["tokens"])
            )
        return {task: result | stats for task, result in results.items()}, dense_log_probs

    def _score(self, task: str, forward: score.ForwardPass, dense_log_probs: Tensor | None) -> dict[str, Any]:
        if task in (*RETRIEVAL, PROMPTS):
            return score.answers(forward, self.prompt) | {"asked": self.asked}
        if task == "perplexity":
            return score.negative_log_likelihood(forward)
        assert dense_log_probs is not None  # dense comes first
        return score.agreement(forward, self._positions(), dense_log_probs)

    def _positions(self) -> Tensor:
        """The positions [R] at which predictions are compared: equally many of each part of the prompt, by the seed."""
        rng = random.Random(f"{self.plan.seed}/{self.case.length}/{self.case.sample}/positions")
        parts = [range(first, last) for first, last in pairwise(score.bucket_edges(self.case.length))]
        chosen = [rng.sample(part, min(len(part), POSITIONS // score.BUCKETS)) for part in parts]
        return torch.tensor(sorted(position for part in chosen for position in part))


@contextmanager
def _within_memory(variant: Variant, case: Case) -> Iterator[None]:
    """Turn running out of GPU memory into an error that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"GPU memory ran out while {variant.name} read {case.length} tokens: use shorter --lengths or a smaller "
            "model; what was measured is kept"
        ) from error
