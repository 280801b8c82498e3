"""Whether a candidate's held-out proof holds: one verdict on plain results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from calibrate.proof.candidate import Candidate, LengthAndLayer
from calibrate.proof.problems import kl_over_budget, lost_needles, over_limit
from calibrate.proof.verify import LengthProof

TIE = 1.02  # a prefill, or a layer, that takes this many times as long as dense counts as equally fast


@dataclass(frozen=True)
class Verdict:
    """Why a proof failed, one sentence for each problem; a proof without problems holds.

    over_limit: Layers whose error is over their limit. lost_needles: Lengths at which too many needles are lost.
    slower: Lengths whose prefill is slower than the dense one. over_kl: Lengths whose KL is over a budget in KL.
    """

    over_limit: tuple[str, ...]
    lost_needles: Mapping[int, str]
    slower: Mapping[int, str]
    over_kl: Mapping[int, str]

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.over_limit, *self.repairable)

    @property
    def repairable(self) -> tuple[str, ...]:
        """The problems that `tighten` can do something about: it changes lengths as a whole, not single layers."""
        return (*self.lost_needles.values(), *self.slower.values(), *self.over_kl.values())


def judge(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> Verdict:
    """Judge a candidate by what was measured of it.

    Args:
        candidate: What was proven.
        proofs: What was measured, by length in tokens.

    Returns:
        The verdict, whose problems are in the order of `proofs`.
    """
    return Verdict(
        layers_over_limit(candidate, proofs),
        lost_needles(proofs, candidate.recipe),
        slower_than_dense(candidate, proofs),
        kl_over_budget(proofs, candidate.recipe),
    )


def layers_over_limit(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> tuple[str, ...]:
    """A sentence for each layer that is not dense and whose error is over its limit."""
    budget = candidate.recipe.budget
    return tuple(
        over_limit(length, candidate.geometry.layer_number(layer), proof.error(budget), candidate.limits[length, layer])
        for length, of_length in proofs.items()
        for layer, proof in enumerate(of_length.layers)
        if not proof.error(budget) <= candidate.limits[length, layer]  # also where it is no number
        and not candidate.layer_config(layer, length).is_dense
    )


def slower_than_dense(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> dict[int, str]:
    """The lengths whose prefill takes longer than the dense one, with a sentence each.

    There are none on a CPU, where times are not the objective. A length that is all dense is none of them either: it
    runs what dense runs, whatever its times say.
    """
    if candidate.device.kind != "cuda":
        return {}
    return {
        length: f"the prefill of {length} tokens takes {proof.prefill_seconds * 1e3:.1f} ms, dense "
        f"{proof.dense_prefill_seconds * 1e3:.1f} ms"
        for length, proof in proofs.items()
        if proof.prefill_seconds > TIE * proof.dense_prefill_seconds
        and not all(candidate.layer_config(layer, length).is_dense for layer in range(len(proof.layers)))
    }


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
