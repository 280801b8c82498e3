"""The certificate of a finished choice, measured on prompts that had no part in choosing it.

Every layer's mean error is within its limit at every length (`bounds`). A layer whose bound is over its limit is tried
with less of what it spends, on the same inputs, and becomes dense only if the last fraction does not hold. Later layers
see the adjusted layer, not the reduced one. Reduced layers only err less.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from calibrate.prompts.prompt import Prompt
from calibrate.proof.answers import PromptAnswers
from calibrate.proof.bounds import (
    CONFIDENCE,
    SPEND_FRACTIONS,
    bound_mean,
    compute_attempt_confidence,
    compute_share_interval,
)
from calibrate.proof.layers import PromptAgreement
from calibrate.proof.state import Candidate, Problem, ProblemKind
from calibrate.proof.verify import LayerProof, LengthProof, Prompts, Prover
from calibrate.recipe import Recipe
from calibrate.record import CertifiedDomain, CertifiedLayer, CertifiedLength, CertifiedRetrieval
from calibrate.search.choice import CalibrationDense
from s2o_runtime.fields import group_by_key, pluralize

MIN_GROUPS = 3  # of text, below which no mean is bounded: Student's quantile for two is above 6
HOPELESS = 1.2  # times the limit: a fraction is skipped if the first bound predicts that its own would be above that

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class TextGroups:
    """Prompts grouped by the text that most of them is: those of one novel are as dependent as its chapters."""

    members: tuple[tuple[int, ...], ...]  # of each group the numbers of its prompts
    kinds: tuple[str, ...]  # the kind of text of each group

    @classmethod
    def from_prompts(cls, prompts: Sequence[Prompt]) -> TextGroups:
        """Group prompts, in the order of the groups' first ones; a prompt whose group is not known is one."""
        keys = [(prompt.domain, prompt.group or number) for number, prompt in enumerate(prompts)]
        members = group_by_key((key, number) for number, key in enumerate(keys))
        kinds = tuple(prompts[numbers[0]].domain for numbers in members.values())
        return cls(tuple(map(tuple, members.values())), kinds)

    def __len__(self) -> int:
        return len(self.members)

    def mean_per_group(self, values: Sequence[float]) -> list[float]:
        """Return the mean value of each group's prompts."""
        return [statistics.fmean(values[number] for number in numbers) for numbers in self.members]


def certify(prover: Prover, prompts: Prompts, proven: Candidate) -> Candidate:
    """Certify what was proven, with less of what layers spend where it does not hold as it is.

    Args:
        prover, prompts: measures the certify prompts, by length in tokens.
        proven: a proof that holds.

    Returns:
        The candidate with its certificate, as reduced for it, and a problem for each length where nothing can be
        stated, retrieval does not hold, or a budget is shown to be broken.
    """
    candidate, certificates = proven, dict[int, CertifiedLength]()
    problems = list[Problem | None](proven.problems)
    with prover.show_progress("certifying", len(candidate.lengths)) as shown:
        for length in candidate.lengths:  # one after another: the hidden states of all prompts are in memory
            length_prompts = prompts.get(length, ())
            if problem := check_groups(length, len(groups := TextGroups.from_prompts(length_prompts))):
                problems.append(problem)
                continue
            means = MeanCertifier(candidate, length, groups)
            needles = proven.proofs[length].needles
            compared = needles is None or needles[1] > 0  # else the dense model finds too few for any claim
            _, proofs = shown.prove(
                candidate, {length: length_prompts}, means.revise, timed=False, compared=compared, stage="certifying"
            )
            candidate = means.result()
            certificates[length] = build_certificate(length, proofs[length], means)
            problems.append(find_lost_retrieval(length, certificates[length].retrieval, candidate.recipe))
    return replace(
        candidate,
        certificates=dict(sorted(certificates.items())),
        problems=tuple(problem for problem in problems if problem),
    )


class MeanCertifier:
    """Finds for each layer at a length how much it may spend so that its mean error is shown to be within its limit.

    Attributes:
        candidate: as it was adjusted.
        layers: the certificate of each layer, by its row in the profile.
        proofs: the measurements of layers with their certified share; none of those that are dense.
    """

    def __init__(self, candidate: Candidate, length: int, groups: TextGroups) -> None:
        self.candidate, self._length, self._groups = candidate, length, groups
        self.layers: dict[int, CertifiedLayer] = {}
        self.proofs: dict[int, LayerProof] = {}
        self._fraction, self._first_bound = 0, 0.0  # of the layer that is being tried

    def revise(self, candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
        """Return the candidate with less for a layer whose bound is over its limit, and then the one as adjusted again.

        `Prover.prove` revises by it.
        """
        if layer in self.layers:
            return None
        recipe, limit = candidate.recipe, candidate.limits[length, layer]
        config, fraction = candidate.layer_config(layer, length), SPEND_FRACTIONS[self._fraction]
        confidence = compute_attempt_confidence(fraction, recipe, candidate.geometry.layers)
        errors = proof.errors(recipe.budget)
        bound = bound_mean(self._groups.mean_per_group(errors), self._groups.kinds, confidence)
        is_first = candidate is self.candidate
        self._first_bound = bound if is_first else self._first_bound
        holds = bound <= limit or config.is_dense
        if not holds:
            log.info("layer %d at %d tokens: the bound of its error is %.2e, limit %.2e", layer, length, bound, limit)
            for step in range(self._fraction + 1, len(SPEND_FRACTIONS)):
                lower = self._reduce(self.candidate, layer, SPEND_FRACTIONS[step])
                is_hopeless = SPEND_FRACTIONS[step] * self._first_bound > HOPELESS * limit
                # the last fraction is always tried: bounds need not shrink in proportion
                is_tried = not is_hopeless or step == len(SPEND_FRACTIONS) - 1
                if is_tried and lower.layer_config(layer, length) != config:
                    self._fraction = step
                    return lower
        if holds and not config.is_dense:
            self.proofs[layer] = proof
        self.layers[layer] = CertifiedLayer(
            mean=statistics.fmean(errors) if holds else 0.0,
            bound=keep_finite(bound) if holds else 0.0,
            spent=(None if fraction == 1 else fraction) if holds else 0.0,
            density=proof.density if holds else 1.0,
            limit=limit,
            rel_mse=proof.rel_mse if holds and recipe.budget.kind == "mse" else None,
            binds=recipe.binds(limit),
        )
        self._fraction = 0
        return None if is_first else self.candidate  # later layers see this one as adjusted

    def result(self) -> Candidate:
        """Return the candidate whose layers at this length spend what is certified."""
        candidate = self.candidate
        for layer, certified in self.layers.items():
            if certified.spent is not None:
                candidate = self._reduce(candidate, layer, certified.spent)
        return candidate

    def _reduce(self, candidate: Candidate, layer: int, share: float) -> Candidate:
        return candidate.with_share(layer, self._length, share, CalibrationDense.OVER_BOUND)


def check_groups(length: int, groups: int) -> Problem | None:
    """Return the problem of certify prompts of too few groups of text to state anything; None if they are enough."""
    if groups >= MIN_GROUPS:
        return None
    text = (
        f"at {length} tokens not proven: {pluralize(groups, 'group')} of text to certify on allow no statement, "
        f"{MIN_GROUPS} are the fewest"
    )
    return Problem(ProblemKind.TOO_FEW, length, text)


def build_certificate(length: int, proof: LengthProof, means: MeanCertifier) -> CertifiedLength:
    """Build the certificate of one length; proof: the certify prompts' measurements of layers as they were adjusted."""
    shares = [
        [error / limit for error in layer_proof.errors(means.candidate.recipe.budget)]
        for layer, layer_proof in means.proofs.items()
        if (limit := means.layers[layer].limit)
    ]
    layers = tuple(means.layers[layer] for layer in range(len(proof.layers)))
    entry = describe_prompts(length, proof.prompts, proof.agreements, shares)
    return replace(entry, mean_kl=keep_finite(proof.kl), layers=layers)


def describe_prompts(
    length: int,
    prompts: Sequence[Prompt],
    agreements: Sequence[PromptAgreement | PromptAnswers],
    shares: Sequence[Sequence[float]] | None = None,
) -> CertifiedLength:
    """Return a certificate that says what the prompts are, which needles they keep, and each kind's KL and error.

    shares: of each layer that is not dense, each prompt's error over the limit; None where layers have no claim.
    """
    groups = TextGroups.from_prompts(prompts)
    by_domain = group_by_key((prompt.domain, number) for number, prompt in enumerate(prompts))

    def find_largest(numbers: Sequence[int]) -> float | None:
        means = (statistics.fmean(layer[number] for number in numbers) for layer in shares or ())
        return None if shares is None else max(means, default=0.0)

    domains = tuple(
        CertifiedDomain(
            domain=domain,
            prompts=len(numbers),
            groups=groups.kinds.count(domain),
            kl=keep_finite(statistics.fmean(max(agreements[number].kl, 0.0) for number in numbers)),
            error_over_limit=find_largest(numbers),
        )
        for domain, numbers in sorted(by_domain.items())
    )
    return CertifiedLength(
        length=length,
        prompts=len(prompts),
        groups=len(groups),
        tokens=len(prompts) * length,
        retrieval=count_retrieval(prompts, agreements),
        domains=domains,
    )


def keep_finite(value: float) -> float | None:
    """Return a number as JSON has it: None where it is not finite."""
    return value if math.isfinite(value) else None


def count_retrieval(
    prompts: Sequence[Prompt], agreements: Sequence[PromptAgreement | PromptAnswers]
) -> CertifiedRetrieval | None:
    """Count the needles that a length's prompts keep; None if no prompt asks for any."""
    if not any(prompt.answers for prompt in prompts):
        return None
    found, kept = (sum(getattr(agreement, name) for agreement in agreements) for name in ("found", "kept"))
    low, high = compute_share_interval(kept, found, CONFIDENCE)
    return CertifiedRetrieval(found=found, kept=kept, low=low, high=high)


def find_lost_retrieval(length: int, retrieval: CertifiedRetrieval | None, recipe: Recipe) -> Problem | None:
    """Return the problem of a length whose certificate rules out that enough needles are kept; None otherwise."""
    if retrieval is None or not retrieval.found or retrieval.high is None or retrieval.high >= recipe.needles:
        return None
    return Problem(
        ProblemKind.LOST_NEEDLES,
        length,
        f"at {length} tokens the patched model keeps {retrieval.kept} of the {retrieval.found} needles that dense finds"
        f", so with {CONFIDENCE:.0%} confidence no more than {retrieval.high:.0%}; {recipe.needles:.0%} are asked for",
    )
