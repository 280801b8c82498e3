"""The certificate of a budget of answers, measured on prompts that had no part in choosing what layers may err.

With the certificate's confidence, for prompts like these, kinds of text in equal parts: the mean of the smaller of the
answers' KL and `CAP` times the budget is at most the budget, and no more than a share of prompts is above `CAP` times
it. The questions of one prompt, and the prompts of one group of text, are one value. Where it does not hold, all layers
spend less, on the same prompts.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from calibrate.prompts.prompt import Prompt
from calibrate.proof.answers import PromptAnswers, find_worst_eighth, measure_answers
from calibrate.proof.bounds import (
    CONFIDENCE,
    SPEND_FRACTIONS,
    bound_mean,
    bound_share,
    compute_attempt_confidence,
    compute_mean_of_kinds,
)
from calibrate.proof.certify import TextGroups, check_groups, describe_prompts, find_lost_retrieval, keep_finite
from calibrate.proof.state import Candidate, Problem, ProblemKind
from calibrate.proof.verify import Prompts, Prover
from calibrate.proof.weigh import measure_noise, spend_answers
from calibrate.record import CertifiedAnswers, CertifiedLength

CAP = 10.0  # times the budget: a prompt above it counts with so much in the mean, and by itself
SKEW = 2  # times as much confidence: KLs of single prompts are skewed (docs/results/coverage-answers.txt)
FALL = 0.8  # the power of what layers spend that a bound falls with, but for the noise: 0.6 to 1.3 in five calibrations
EIGHTH_ROOM = 2.0  # times the budget that answers about one eighth of the prompts may have in the mean

log = logging.getLogger("calibrate")


def certify_answers(prover: Prover, prompts: Prompts, candidate: Candidate) -> Candidate:
    """Certify the answers behind a candidate, with less of what layers spend where that does not hold.

    Args:
        prover, prompts: measures the certify prompts, by length in tokens.
        candidate: as scaled to answers. Layers that its proof makes more careful do not weaken the certificate.

    Returns:
        The candidate with its certificate, as reduced for it, and a problem for each length where the budget or
        retrieval is not shown.
    """
    certificates, problems = dict[int, CertifiedLength](), list[Problem | None]()
    for length in candidate.lengths:
        length_prompts = prompts.get(length, ())
        if problem := check_groups(length, len(TextGroups.from_prompts(length_prompts))):
            problems.append(problem)
            continue
        candidate, certificates[length] = _certify_length(prover, length_prompts, candidate)
        problems.append(find_budget_missed(certificates[length], candidate.recipe.budget.value))
        problems.append(find_lost_retrieval(length, certificates[length].retrieval, candidate.recipe))
    certificates = dict(sorted(certificates.items()))
    return replace(candidate, certificates=certificates, problems=tuple(problem for problem in problems if problem))


def _certify_length(
    prover: Prover, prompts: Sequence[Prompt], candidate: Candidate
) -> tuple[Candidate, CertifiedLength]:
    """Return the candidate that spends as much as can be certified, and its certificate; of the least if none can."""
    length, budget, bound, tried = prompts[0].length, candidate.recipe.budget.value, 0.0, SPEND_FRACTIONS[0]
    noise, stays = measure_noise(prover, prompts), 0.0
    for fraction in SPEND_FRACTIONS:
        expected = bound * (stays + (1 - stays) * (fraction / tried) ** FALL)
        if fraction != SPEND_FRACTIONS[-1] and expected > budget:
            continue
        reduced = candidate if fraction == 1 else spend_answers(candidate, length, fraction)
        (answers,) = measure_answers(prover, prompts, [reduced])
        confidence = compute_attempt_confidence(fraction, candidate.recipe, SKEW)
        certified = build_answer_certificate(prompts, answers, budget, confidence)
        bound, tried = certified.bound or 0.0, fraction
        stays = min((noise or 0.0) / max(certified.mean or 0.0, 1e-30), 1.0)  # the noise's share, whatever is spent
        spent, quoted = None if fraction == 1 else fraction, None if prover.executor.resident else True
        certified = replace(certified, noise=noise, spent=spent, quoted=quoted)
        entry = replace(describe_prompts(length, prompts, answers), answers=certified)
        log.info("%d tokens at %.0f%% of what layers spend: %s", length, 100 * fraction, certified)
        if find_budget_missed(entry, budget) is None:
            break
    return reduced, entry


def build_answer_certificate(
    prompts: Sequence[Prompt], answers: Sequence[PromptAnswers], budget: float, confidence: float
) -> CertifiedAnswers:
    """Return what prompts of one length show of the answers about them.

    budget: in nats per token. confidence: of the bound of the mean.
    """
    groups = TextGroups.from_prompts(prompts)
    kls = [max(prompt.kl, 0.0) for prompt in answers]  # NaN stays
    values = groups.mean_per_group([kl if math.isnan(kl) else min(kl, CAP * budget) for kl in kls])
    above = sum(not all(kls[number] <= CAP * budget for number in numbers) for numbers in groups.members)
    return CertifiedAnswers(
        mean=compute_mean_of_kinds(groups.mean_per_group(kls), groups.kinds),
        bound=keep_finite(bound_mean(values, groups.kinds, confidence)),
        worst_eighth=find_worst_eighth(answers),
        second_turn=statistics.fmean(kl for prompt in answers for kl in prompt.second),
        above=above,
        share_above=1 - bound_share(len(groups), above, 1 - CONFIDENCE),
    )


def find_budget_missed(entry: CertifiedLength, budget: float) -> Problem | None:
    """Return the problem of a length whose certificate does not keep to the budget of answers; None if it does."""
    certified, length = entry.answers or CertifiedAnswers(), entry.length or 0
    for what, value, allowed in (
        ("the bound of the answers' mean KL", certified.bound, budget),
        ("the mean KL of answers about the worst eighth of the prompts", certified.worst_eighth, EIGHTH_ROOM * budget),
    ):
        if value is None or not value <= allowed:
            found = "not finite" if value is None else f"{value:.1e} nats per token"
            text = f"at {length} tokens {what} is {found}, {allowed:.1e} is allowed"
            return Problem(ProblemKind.NOT_SHOWN, length, text)
    return None
