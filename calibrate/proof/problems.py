"""The sentences that say why a proof failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calibrate.proof.certificate import CONFIDENCE, Retrieval
from calibrate.proof.statistics import mean_lower_bound
from calibrate.proof.verify import LengthProof
from calibrate.recipe import Recipe


def over_limit(length: int, layer: int, error: float, limit: float) -> str:
    """The sentence for a layer whose error is over its limit; both are in the budget's unit."""
    return f"layer {layer} at {length} tokens has an error of {error:.2e}, {limit:.2e} is allowed"


def lost_needles(proofs: Mapping[int, LengthProof], recipe: Recipe) -> dict[int, str]:
    """The lengths at which the patched model keeps too few needles, each with the sentence that says so.

    One may be lost where not all are asked for: of few it is a large share, and says little of many.
    """

    def least(needles: int) -> float:
        return min(recipe.needles * needles, needles - (recipe.needles < 1))

    return {
        length: f"at {length} tokens the patched model keeps {patched} of the {dense} needles that dense finds, "
        f"{recipe.needles:.0%} are asked for"
        for length, proof in proofs.items()
        if proof.needles is not None
        for patched, dense in (proof.needles,)
        if patched < least(dense)
    }


def kl_over_budget(proofs: Mapping[int, LengthProof], recipe: Recipe) -> dict[int, str]:
    """The calibrated lengths whose KL is over a budget in KL, each with the sentence that says so."""
    if not recipe.budget.is_kl:
        return {}
    return {
        length: f"at {length} tokens the KL is {proof.kl:.2e} nats per token, {recipe.budget.value:.2e} are allowed"
        for length, proof in proofs.items()
        if length in recipe.lengths and not proof.kl <= recipe.budget.value  # also where it is no number
    }


def kl_shown_over_budget(length: int, kls: Sequence[float], recipe: Recipe) -> str | None:
    """The sentence for a calibrated length whose certify prompts show that the mean KL is over the budget.

    They show it if even a lower bound for the mean over prompts like these is over it; None otherwise.

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
    return (
        f"at {length} tokens the mean KL of prompts like these is at least {low:.2e} nats per token with "
        f"{CONFIDENCE:.0%} confidence, {recipe.budget.value:.2e} are allowed: adjust on more prompts (--num-held-out), "
        "or spend less of the budget (--margin)"
    )


def retrieval_lost(length: int, retrieval: Retrieval | None, recipe: Recipe) -> str | None:
    """The sentence for a length at which the certificate rules out that enough needles are kept; None otherwise."""
    if retrieval is None or not retrieval.found or retrieval.high >= recipe.needles:
        return None
    return (
        f"at {length} tokens the patched model keeps {retrieval.kept} of the {retrieval.found} needles that dense finds"
        f", so with {CONFIDENCE:.0%} confidence no more than {retrieval.high:.0%}; {recipe.needles:.0%} are asked for"
    )
