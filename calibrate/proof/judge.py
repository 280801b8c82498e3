"""Whether a candidate's held-out proof holds, and if not, why: verdicts on plain results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calibrate.proof.bounds import CONFIDENCE, mean_lower_bound
from calibrate.proof.state import Candidate, LengthAndLayer, Problem, ProblemKind
from calibrate.proof.verify import LengthProof
from calibrate.recipe import Recipe
from s2o_runtime.profile.record import CertifiedRetrieval

TIE = 1.02  # a prefill, or a layer, that takes this many times as long as dense counts as equally fast


def judge(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> tuple[Problem, ...]:
    """Judge a candidate by what was measured of it.

    Args:
        candidate: What was proven.
        proofs: What was measured, by length in tokens.

    Returns:
        Why the proof failed: layers over their limit, then lengths that lost needles, are slower than dense or are over
        a budget in KL, each in the order of `proofs`. A proof without problems holds.
    """
    return (
        *layers_over_limit(candidate, proofs),
        *lost_needles(proofs, candidate.recipe),
        *slower_than_dense(candidate, proofs),
        *kl_over_budget(proofs, candidate.recipe),
    )


def layers_over_limit(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> tuple[Problem, ...]:
    """Each layer that is not dense and whose error is over its limit."""
    budget = candidate.recipe.budget
    return tuple(
        over_limit(length, candidate.geometry.layer_number(layer), proof.error(budget), candidate.limits[length, layer])
        for length, of_length in proofs.items()
        for layer, proof in enumerate(of_length.layers)
        if not proof.error(budget) <= candidate.limits[length, layer]  # also where it is no number
        and not candidate.layer_config(layer, length).is_dense
    )


def slower_than_dense(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> tuple[Problem, ...]:
    """The lengths whose prefill takes longer than the dense one.

    There are none on a CPU, where times are not the objective. A length that is all dense is none of them either: it
    runs what dense runs, whatever its times say.
    """
    if candidate.device.kind != "cuda":
        return ()
    return tuple(
        Problem(
            ProblemKind.SLOWER,
            length,
            f"the prefill of {length} tokens takes {proof.prefill_seconds * 1e3:.1f} ms, dense "
            f"{proof.dense_prefill_seconds * 1e3:.1f} ms",
        )
        for length, proof in proofs.items()
        if proof.prefill_seconds > TIE * proof.dense_prefill_seconds
        and not all(candidate.layer_config(layer, length).is_dense for layer in range(len(proof.layers)))
    )


def slower_layers(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> frozenset[LengthAndLayer]:
    """The layers whose attention was measured slower than dense attention at a length: a layer that was adjusted may
    have lost what made it fast. There are none where nothing was timed."""
    return frozenset(
        (length, layer)
        for length, of_length in proofs.items()
        for layer, proof in enumerate(of_length.layers)
        if proof.seconds is not None
        and proof.dense_seconds is not None
        and proof.seconds > TIE * proof.dense_seconds
        and not candidate.layer_config(layer, length).is_dense
    )


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


def kl_shown_over_budget(length: int, kls: Sequence[float], kinds: Sequence[str], recipe: Recipe) -> Problem | None:
    """A calibrated length whose certify prompts show that the mean KL is over the budget; None otherwise.

    They show it if even a lower bound for the mean over prompts like these is over it.

    Args:
        length: In tokens.
        kls, kinds: Of each certify prompt, in nats per token, and its kind of text.
        recipe: Says the budget, and which lengths it is for.
    """
    if not recipe.budget.is_kl or length not in recipe.lengths:
        return None
    low = mean_lower_bound(kls, kinds, CONFIDENCE)
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
