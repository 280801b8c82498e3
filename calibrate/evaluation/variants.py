"""Variants of one model that an evaluation compares: dense, with a profile, with one setting for all layers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from calibrate.evaluation.plan import DENSE, EvaluationPlan
from calibrate.evaluation.settings import baseline_of, config_of
from calibrate.model.layers import attention_implementation
from calibrate.model.models import LoadedModel
from calibrate.record import read_record
from s2o_runtime.config import LayerConfig
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.devices import identify
from s2o_runtime.errors import InputError
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
        recorded = None if self.profile is None else read_record(self.profile).budget
        return None if recorded is None else f"{recorded.kind} {recorded.value:g}"

    def attention_speedup(self, length: int) -> float | None:
        """How much faster than dense a profile's layers were timed together at a length; None if one was not here."""
        record = None if self.profile is None else read_record(self.profile)
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
