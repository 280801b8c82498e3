"""The certificate: what is stated of a finished choice, measured on prompts that had no part in choosing it.

Every layer's error is bounded from above with a stated confidence. A layer whose bound is over its limit is tried again
on the same inputs with less of its budget, down the fixed rungs of a ladder, past those that its first bound makes
hopeless, and becomes dense below the last one. That chooses by the certify prompts after all, so the looks at a layer
share the error probability: half of it belongs to the first look, the rest to the rungs in equal parts. All bounds that
can be looked at then hold together with the stated confidence (Bonferroni), whichever is taken, and the ladder can
begin at the top, where most layers stop.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from calibrate.prompts.prompt import Prompt
from calibrate.proof.adjust import Proven, scaled
from calibrate.proof.bounds import CONFIDENCE, RUNGS, Look, look_bound, mean_bound, next_bound, share_interval
from calibrate.proof.judge import (
    kl_over_budget,
    kl_shown_over_budget,
    layers_over_limit,
    lost_needles,
    retrieval_lost,
    slower_layers,
    slower_than_dense,
)
from calibrate.proof.sample import LayerSample, LengthSample, sample
from calibrate.proof.state import Candidate, LengthAndLayer, Problem, lengths_of
from calibrate.proof.verify import Prover
from calibrate.recipe import Budget, Recipe
from calibrate.search.choice import DenseReason
from s2o_runtime.config import LayerConfig
from s2o_runtime.profile.record import (
    CertifiedDomain,
    CertifiedLayer,
    CertifiedLength,
    CertifiedRetrieval,
    ContinuedBound,
)

HOPELESS = 1.5  # times the limit: a rung is passed over if the first bound says that its own would be above that
NEXT_PROMPT = 0.95  # asked for: the probability that the next prompt keeps within what is stated for prompts
FEWEST = 2  # prompts of a length below which nothing can be bounded

log = logging.getLogger("calibrate")


@dataclass
class Ladder:
    """Decides for each layer at each length what it is left with. It is what `sample` revises by.

    looks: What was seen of each layer at each length, first look first.
    """

    looks: dict[LengthAndLayer, list[Look]] = field(default_factory=dict)
    _begun: dict[LengthAndLayer, Candidate] = field(default_factory=dict)  # at each first look

    def revise(self, candidate: Candidate, length: int, layer: int, seen: LayerSample) -> Candidate | None:
        """What to measure instead of this candidate on the same inputs; None to accept it."""
        looks = self.looks.setdefault((length, layer), [])
        begun = self._begun.setdefault((length, layer), candidate)
        config, limit = candidate.layer_config(layer, length), candidate.limits[length, layer]
        share = (1.0, *RUNGS, 0.0)[len(looks)]
        bound = look_bound(seen.errors(candidate.recipe.budget), seen.kinds, share)
        looks.append(Look(0.0 if looks and config.is_dense else share, bound))
        if bound <= limit or config.is_dense:
            return None
        log.info("layer %d at %d tokens: the bound of its error is %.2e, limit %.2e", layer, length, bound, limit)
        for rung in RUNGS[len(looks) - 1 :]:
            lower = with_share(begun, candidate, length, layer, rung)
            hopeless = rung * looks[0].bound > HOPELESS * limit and rung != RUNGS[-1]
            if lower.layer_config(layer, length) != config and not hopeless:
                return lower
            looks.append(Look(rung, bound))  # not taken: so little less changes no head, or would not do
        return with_share(begun, candidate, length, layer, 0.0)


def with_share(begun: Candidate, candidate: Candidate, length: int, layer: int, share: float) -> Candidate:
    """The candidate in which a layer spends a share of what it spent in `begun`; with none it is dense."""
    return candidate.with_layer(layer, length, *scaled(begun, length, layer, share, DenseReason.OVER_BOUND))


def certify(prover: Prover, prompts: Mapping[int, Sequence[Prompt]], proven: Proven) -> Proven:
    """Certify what was proven, and make layers more careful whose bound is over their limit.

    Args:
        prover: What measures it.
        prompts: The certify prompts by length; lengths with fewer than `FEWEST` are not certified.
        proven: A proof that holds.

    Returns:
        What is left of the candidate, with the certificate, and with a problem for each length where retrieval does
        not hold, or where a budget in KL is shown to be broken.

    Raises:
        ModelError: inf or NaN came up in the model.
        ResourceError: The GPU's memory ran out.
    """
    candidate, certificates, ladder = proven.candidate, dict[int, CertifiedLength](), Ladder()
    lengths = [length for length in candidate.lengths if len(prompts.get(length, ())) >= FEWEST]
    problems: list[Problem | None] = []
    with prover.bar("certifying", len(lengths)) as step:
        for length in lengths:  # one after another: the hidden states of all prompts are in memory
            candidate, seen = sample(
                prover.executor,
                length,
                prompts[length],
                candidate,
                ladder.revise,
                step,
                chunk=candidate.recipe.chunk,
                journal=prover.journal,
            )
            layers = range(prover.geometry.layers)
            certificates[length] = certificate_of(
                length,
                seen,
                recipe=candidate.recipe,
                limits=[candidate.limits[length, layer] for layer in layers],
                configs=[candidate.layer_config(layer, length) for layer in layers],
                looks=[ladder.looks[length, layer] for layer in layers],
            )
            kls = [max(0.0, agreement.kl) for agreement in seen.agreements]
            problems += [
                retrieval_lost(length, certificates[length].retrieval, candidate.recipe),
                kl_shown_over_budget(length, kls, seen.kinds, candidate.recipe),
            ]
    return replace(
        proven,
        candidate=candidate,
        certificates=dict(sorted(certificates.items())),
        problems=(*proven.problems, *(problem for problem in problems if problem)),
    )


def proven_again(prover: Prover, proven: Proven, certified: Proven) -> Proven:
    """Measure the lengths again that changed since the proof; layers, and then lengths, that became slower than dense
    become dense.

    The prompts are those that layers were adjusted on, and no layer is tightened: densities, times and predictions in
    the record are to be of what is written. What is certified of a layer holds all the more if it becomes dense.
    Needles that are lost now, or a KL over its budget, although layers became more careful, are problems:
    `s2o-profile verify` would find them.

    Args:
        prover: What measures them.
        proven, certified: As the proof left it, and as it is after the certificate and `without_slower_layers`.
    """
    lengths = frozenset(
        length for (length, layer), config in certified.configs.items() if config != proven.configs[length, layer]
    )
    candidate, proofs = certified.candidate, dict(certified.proofs)
    looked = False
    while lengths:
        _, measured = prover.prove("measuring what changed since", lengths, candidate)
        proofs |= measured
        layers = frozenset() if looked else slower_layers(candidate, measured)  # once: times that tie vary
        looked = True
        candidate, lengths = _without_slower(candidate, layers, lengths_of(slower_than_dense(candidate, measured)))
    recipe = candidate.recipe
    problems = (*lost_needles(proofs, recipe), *kl_over_budget(proofs, recipe))
    return replace(certified, candidate=candidate, proofs=proofs, problems=(*certified.problems, *problems))


def without_slower_lengths(prover: Prover, proven: Proven) -> Proven:
    """Time is no reason to fail: what the last attempt at the proof left slower than dense becomes dense.

    Of a length whose prefill is slower those layers become dense whose attention is; all, if no layer alone is slower.
    """
    slower = lengths_of(slower_than_dense(proven.candidate, proven.proofs))
    if not slower:
        return proven
    candidate, _ = _without_slower(proven.candidate, slower_layers(proven.candidate, proven.proofs), slower)
    left = replace(proven, candidate=candidate, problems=layers_over_limit(proven.candidate, proven.proofs))
    return proven_again(prover, proven, left)


def without_slower_layers(proven: Proven) -> Proven:
    """With dense layers where attention was measured slower than dense; what was measured stays that of before."""
    candidate, _ = _without_slower(proven.candidate, slower_layers(proven.candidate, proven.proofs), frozenset())
    return replace(proven, candidate=candidate)


def _without_slower(
    candidate: Candidate, layers: Collection[LengthAndLayer], lengths: frozenset[int]
) -> tuple[Candidate, frozenset[int]]:
    """The candidate with these slower layers dense, and of these slower lengths all layers where none of those is; and
    the lengths at which it changed."""
    for length, layer in sorted(layers):
        log.info("layer %d at %d tokens is slower than dense: it becomes dense", layer, length)
    of_layers = frozenset(length for length, _ in layers)
    candidate = with_dense_layers(candidate, layers, DenseReason.SLOWER_ATTENTION)
    whole = {(length, layer) for length, layer in candidate.configs if length in lengths - of_layers}
    return with_dense_layers(candidate, whole, DenseReason.SLOWER_PREFILL), of_layers | lengths


def with_dense_layers(candidate: Candidate, places: Collection[LengthAndLayer], why_dense: DenseReason) -> Candidate:
    """The candidate with these layers dense at these lengths; at all others every layer keeps what it has."""
    if not places:
        return candidate
    changed = candidate
    for (length, layer), config in candidate.configs.items():
        if (length, layer) in places:
            changed = changed.with_layer(layer, length, *scaled(candidate, length, layer, 0.0, why_dense))
        elif length not in candidate.chosen and (length, layer) not in candidate.tightened:
            changed = changed.with_layer(layer, length, config, None)  # or other buckets would be interpolated now
    return changed


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
    by_prompt = zip(*(layer.prompts for layer in seen.layers), strict=True)
    lowest = next_bound([-agreement.top1 for agreement in seen.agreements], NEXT_PROMPT)
    return CertifiedLength(
        length=length,
        prompts=len(seen.prompts),
        tokens=len(seen.prompts) * length,
        layers=layers,
        mean_kl=statistics.fmean(kls),
        mean_kl_bound=_finite(mean_bound(kls, seen.kinds, CONFIDENCE)) if budget.is_kl else None,
        kl=next_bound(kls, NEXT_PROMPT),
        top1=replace(lowest, value=None if lowest.value is None else -lowest.value),
        error_over_limit=next_bound([max(of_prompt, default=0.0) for of_prompt in shares], NEXT_PROMPT),
        worst=next_bound([max(one.worst for one in of_prompt) for of_prompt in by_prompt], NEXT_PROMPT),
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
        bound_last=_finite(look_bound(seen.last_errors(budget), seen.kinds, share)),
        continued=tuple(
            ContinuedBound(new_tokens=new_tokens, bound=_finite(look_bound(errors, seen.kinds, share)))
            for new_tokens, errors in seen.continued_errors(budget).items()
        ),
        first_bound=_finite(looks[0].bound),
        rung=looks[-1].share if len(looks) > 1 else None,
        density=seen.density,
        limit=limit,
        rel_mse=seen.rel_mse if budget.kind == "mse" else None,
        binds=recipe.binds(limit),
    )


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


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
