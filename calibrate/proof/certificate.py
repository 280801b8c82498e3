"""What is stated of a finished choice, from what its certify prompts showed: bounds, each with its confidence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from calibrate.proof.sample import LayerSample, LengthSample
from calibrate.proof.statistics import mean_bound, next_bound, share_interval
from calibrate.recipe import Budget, Recipe
from s2o_runtime.config import LayerConfig
from s2o_runtime.profile.record import (
    CertifiedDomain,
    CertifiedLayer,
    CertifiedLength,
    CertifiedRetrieval,
    ContinuedBound,
)

CONFIDENCE = 0.95  # of each bound for a layer's mean error, and of the interval for retrieval
NEXT_PROMPT = 0.95  # asked for: the probability that the next prompt keeps within what is stated for prompts
FEWEST = 2  # prompts of a length below which nothing can be bounded
FLOOR = 0.1  # of its limit; an error below it counts as this much, so that rounding does not pass for spread
RUNGS = (0.8, 0.65, 0.5, 0.35)  # shares of its budget that a layer over its limit is tried with


@dataclass(frozen=True)
class Look:
    """One look at a layer: the share of the budget it ran with, and the bound for its mean error."""

    share: float
    bound: float


def look_confidence(share: float) -> float:
    """How certain the bound of one look is: half of the error probability is the first look's, the rungs share half.

    A dense layer has no error but rounding, so the look at it takes no share.
    """
    risk = (1 - CONFIDENCE) / 2
    return 1 - (risk if share == 1.0 else risk / len(RUNGS))


def look_bound(errors: Sequence[float], share: float, limit: float, config: LayerConfig) -> float:
    """The bound of one look for the mean of errors, of all rows or some.

    Logarithms of errors that are next to nothing say nothing about those that matter, and would blow up the bound. So
    errors below `FLOOR` times the limit count as that much, which can only raise their mean.

    Args:
        errors: Of each prompt, in the limit's unit.
        share: Of the layer's budget, by which the look is known (`look_confidence`).
        limit: The error the layer may have.
        config: What it ran. A dense layer's rounding is bounded as it is.
    """
    floor = 0.0 if config.is_dense else FLOOR * limit
    return mean_bound([max(error, floor) for error in errors], look_confidence(share))


def certificate_of(
    length: int,
    seen: LengthSample,
    *,
    recipe: Recipe,
    limits: Sequence[float],
    configs: Sequence[LayerConfig],
    looks: Sequence[Sequence[Look]],
) -> CertifiedLength:
    """What a length's prompts certify.

    Args:
        length: In tokens.
        seen: What was measured of what the layers were left with.
        recipe: Its budget, which has the unit of errors.
        limits, configs: The error each layer may have, and what it was left with.
        looks: At each layer, the first one first; the last is what is in `seen`.
    """
    budget = recipe.budget
    layers = tuple(_layer(*of_layer, recipe) for of_layer in zip(seen.layers, looks, limits, configs, strict=True))
    shares = shares_of_limits(seen, budget, limits, configs)
    kls = [max(0.0, agreement.kl) for agreement in seen.agreements]
    worst = [max(of_layers) for of_layers in zip(*_worst(seen), strict=True)]
    lowest = next_bound([-agreement.top1 for agreement in seen.agreements], NEXT_PROMPT)
    return CertifiedLength(
        length=length,
        prompts=len(seen.prompts),
        tokens=len(seen.prompts) * length,
        layers=layers,
        mean_kl=statistics.fmean(kls),
        mean_kl_bound=_mean_kl_bound(kls, budget),
        kl=next_bound(kls, NEXT_PROMPT),
        top1=replace(lowest, value=None if lowest.value is None else -lowest.value),
        error_over_limit=next_bound([max(of_prompt, default=0.0) for of_prompt in shares], NEXT_PROMPT),
        worst=next_bound(worst, NEXT_PROMPT),
        retrieval=retrieval_of(seen),
        noise_floor=seen.noise_floor,
        domains=_domains(seen, shares),
    )


def shares_of_limits(
    seen: LengthSample, budget: Budget, limits: Sequence[float], configs: Sequence[LayerConfig]
) -> list[list[float]]:
    """For each prompt the errors of the layers over their limits; of those that are not dense and have a limit."""
    of_layers = [
        [error / limit for error in layer.errors(budget)]
        for layer, limit, config in zip(seen.layers, limits, configs, strict=True)
        if limit and not config.is_dense
    ]
    return [[of_layer[prompt] for of_layer in of_layers] for prompt in range(len(seen.prompts))]


def retrieval_of(seen: LengthSample) -> CertifiedRetrieval | None:
    """What became of the needles of a length's prompts; None if no prompt asks for any."""
    if not any(prompt.answers for prompt in seen.prompts):
        return None
    found, kept = (sum(getattr(agreement, name) for agreement in seen.agreements) for name in ("found", "kept"))
    low, high = share_interval(kept, found, CONFIDENCE)
    return CertifiedRetrieval(found=found, kept=kept, low=low, high=high)


def _layer(
    seen: LayerSample, looks: Sequence[Look], limit: float, config: LayerConfig, recipe: Recipe
) -> CertifiedLayer:
    budget, share = recipe.budget, looks[-1].share
    return CertifiedLayer(
        mean=statistics.fmean(seen.errors(budget)),
        bound=_finite(looks[-1].bound),
        bound_last=_finite(look_bound(seen.last_errors(budget), share, limit, config)),
        continued=tuple(
            ContinuedBound(new_tokens=new_tokens, bound=_finite(look_bound(errors, share, limit, config)))
            for new_tokens, errors in seen.continued_errors(budget).items()
        ),
        first_bound=_finite(looks[0].bound),
        rung=looks[-1].share if len(looks) > 1 else None,
        density=seen.density,
        limit=limit,
        rel_mse=seen.rel_mse if budget.kind == "mse" else None,
        binds=recipe.binds(limit),
    )


def _mean_kl_bound(kls: Sequence[float], budget: Budget) -> float | None:
    """As for a layer's mean error, a KL below `FLOOR` times the budget counts as that much."""
    return _finite(mean_bound([max(kl, FLOOR * budget.value) for kl in kls], CONFIDENCE)) if budget.is_kl else None


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


def _worst(seen: LengthSample) -> list[list[float]]:
    """For each layer its prompts' quantiles of row errors."""
    return [[prompt.worst for prompt in layer.prompts] for layer in seen.layers]


def _domains(seen: LengthSample, shares: Sequence[Sequence[float]]) -> tuple[CertifiedDomain, ...]:
    """Each kind of text by itself, in alphabetical order."""
    by_domain: dict[str, list[int]] = {}
    for number, prompt in enumerate(seen.prompts):
        by_domain.setdefault(prompt.domain, []).append(number)
    return tuple(
        CertifiedDomain(
            domain=domain,
            prompts=len(numbers),
            kl=max(0.0, statistics.fmean(seen.agreements[number].kl for number in numbers)),
            error_over_limit=max(
                (statistics.fmean(of_layer) for of_layer in zip(*(shares[n] for n in numbers), strict=True)),
                default=0.0,
            ),
        )
        for domain, numbers in sorted(by_domain.items())
    )
