"""Why a proof failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from calibrate.proof.certificate import CONFIDENCE
from calibrate.proof.statistics import mean_lower_bound
from calibrate.proof.verify import LengthProof
from calibrate.recipe import Recipe
from s2o_runtime.profile.record import CertifiedRetrieval


class ProblemKind(Enum):
    """What did not hold, each with what to change, by the command's flags."""

    OVER_LIMIT = "allow more error or calibrate on more prompts (--num-prompts)"
    LOST_NEEDLES = "allow less error, a smaller --worst-rows, or ask for fewer needles (--keep-needles)"
    SLOWER = "calibrate for longer prompts (--lengths), or leave these dense"
    OVER_KL = "calibrate on more prompts (--num-prompts)"


@dataclass(frozen=True)
class Problem:
    """One thing that a proof found wrong at a length in tokens; as text it is the sentence that says so."""

    kind: ProblemKind
    length: int
    text: str

    def __str__(self) -> str:
        return self.text


def lengths_of(problems: Iterable[Problem], kind: ProblemKind | None = None) -> frozenset[int]:
    """The lengths that problems are at, of one kind or of all."""
    return frozenset(problem.length for problem in problems if kind in (None, problem.kind))


def over_limit(length: int, layer: int, error: float, limit: float) -> Problem:
    """A layer's error is over its limit; both are in the budget's unit."""
    text = f"layer {layer} at {length} tokens has an error of {error:.2e}, {limit:.2e} is allowed"
    return Problem(ProblemKind.OVER_LIMIT, length, text)


def lost_needles(proofs: Mapping[int, LengthProof], recipe: Recipe) -> tuple[Problem, ...]:
    """The lengths at which the patched model keeps too few needles.

    One may be lost where not all are asked for: of few it is a large share, and says little of many.
    """

    def least(needles: int) -> float:
        return min(recipe.needles * needles, needles - (recipe.needles < 1))

    return tuple(
        Problem(
            ProblemKind.LOST_NEEDLES,
            length,
            f"at {length} tokens the patched model keeps {patched} of the {dense} needles that dense finds, "
            f"{recipe.needles:.0%} are asked for",
        )
        for length, proof in proofs.items()
        if proof.needles is not None
        for patched, dense in (proof.needles,)
        if patched < least(dense)
    )


def kl_over_budget(proofs: Mapping[int, LengthProof], recipe: Recipe) -> tuple[Problem, ...]:
    """The calibrated lengths whose KL is over a budget in KL."""
    if not recipe.budget.is_kl:
        return ()
    return tuple(
        Problem(
            ProblemKind.OVER_KL,
            length,
            f"at {length} tokens the KL is {proof.kl:.2e} nats per token, {recipe.budget.value:.2e} are allowed",
        )
        for length, proof in proofs.items()
        if length in recipe.lengths and not proof.kl <= recipe.budget.value  # also where it is no number
    )


def kl_shown_over_budget(length: int, kls: Sequence[float], recipe: Recipe) -> Problem | None:
    """A calibrated length whose certify prompts show that the mean KL is over the budget; None otherwise.

    They show it if even a lower bound for the mean over prompts like these is over it.

    Args:
        length: In tokens.
        kls: Of each certify prompt, in nats per token.
        recipe: Says the budget, and which lengths it is for.
    """
    if not recipe.budget.is_kl or length not in recipe.lengths:
        return None
    low = mean_lower_bound(kls, CONFIDENCE)
    if low <= recipe.budget.value:
        return None
    return Problem(
        ProblemKind.OVER_KL,
        length,
        f"at {length} tokens the mean KL of prompts like these is at least {low:.2e} nats per token with "
        f"{CONFIDENCE:.0%} confidence, {recipe.budget.value:.2e} are allowed: adjust on more prompts (--num-held-out), "
        "or spend less of the budget (--margin)",
    )


def retrieval_lost(length: int, retrieval: CertifiedRetrieval | None, recipe: Recipe) -> Problem | None:
    """A length at which the certificate rules out that enough needles are kept; None otherwise."""
    if retrieval is None or not retrieval.found or retrieval.high is None or retrieval.high >= recipe.needles:
        return None
    return Problem(
        ProblemKind.LOST_NEEDLES,
        length,
        f"at {length} tokens the patched model keeps {retrieval.kept} of the {retrieval.found} needles that dense finds"
        f", so with {CONFIDENCE:.0%} confidence no more than {retrieval.high:.0%}; {recipe.needles:.0%} are asked for",
    )
