"""Whether a candidate's held-out proof holds: one verdict on plain results."""

from __future__ import annotations

from collections.abc import Mapping

from calibrate.proof.candidate import Candidate, LengthAndLayer
from calibrate.proof.problems import Problem, ProblemKind, kl_over_budget, lost_needles, over_limit
from calibrate.proof.verify import LengthProof

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
