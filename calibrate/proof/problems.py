"""The sentences that say why a proof failed."""

from __future__ import annotations

from collections.abc import Mapping

from calibrate.proof.certificate import CONFIDENCE, Retrieval
from calibrate.proof.verify import LengthProof
from calibrate.recipe import Recipe


def over_limit(length: int, layer: int, error: float, limit: float) -> str:
    """The sentence for a layer whose error is over its limit; both are in the budget's unit."""
    return f"layer {layer} at {length} tokens has an error of {error:.2e}, {limit:.2e} is allowed"


def lost_needles(proofs: Mapping[int, LengthProof], recipe: Recipe) -> dict[int, str]:
    """The lengths at which the patched model keeps too few needles, each with the sentence that says so."""
    return {
        length: f"at {length} tokens the patched model keeps {patched} of the {dense} needles that dense finds, "
        f"{recipe.needles:.0%} are asked for"
        for length, proof in proofs.items()
        if proof.needles is not None
        for patched, dense in (proof.needles,)
        if patched < recipe.needles * dense
    }


def retrieval_lost(length: int, retrieval: Retrieval | None, recipe: Recipe) -> str | None:
    """The sentence for a length at which the certificate rules out that enough needles are kept; None otherwise."""
    if retrieval is None or not retrieval.found or retrieval.high >= recipe.needles:
        return None
    return (
        f"at {length} tokens the patched model keeps {retrieval.kept} of the {retrieval.found} needles that dense finds"
        f", so with {CONFIDENCE:.0%} confidence no more than {retrieval.high:.0%}; {recipe.needles:.0%} are asked for"
    )
