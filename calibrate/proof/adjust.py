"""The proof as a loop: prove a candidate, judge it, tighten it, and prove again what changed.

A candidate is changed in two places, and both return a new candidate. While the held-out prompts move through the
model, a layer is first given what it may spend (`Spending`, in the first attempt), then a layer whose error is over its
limit is tightened (`tighten_layer`), and it is run again before the next layer sees it. After all layers, a length that
lost needles gets half its budget, a length that is over a budget in KL gets less by as much, and a length whose prefill
was slower than the dense one becomes dense (`tighten`).

The search spends what its curves predict on the calibration prompts. On other prompts a layer's error is often less,
and how much it varies between prompts is another matter for every layer. So a layer is given more until one of two
things holds: its mean error is the recipe's margin of its limit, or the bound that the certificate can be expected to
find for it is `AIM` of the limit. What turns out to be too much is taken back, down to what the search chose: less than
that is for tightening, and for the certificate itself, whose prompts have no part in this.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from calibrate.proof.bounds import expected_mean_bound, look_confidence
from calibrate.proof.judge import judge, over_limit
from calibrate.proof.state import Candidate, KlPass, LengthAndLayer, Problem, ProblemKind, lengths_of
from calibrate.proof.verify import LayerProof, LengthProof, Prover
from calibrate.recipe import Recipe
from calibrate.search.choice import Choice, DenseReason, allowed
from calibrate.search.choose import Chosen
from s2o_runtime.config import LayerConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.profile.record import CertifiedLength

RETRIES = 2  # attempts after the first one, when every layer kept its limit but a whole length did not hold
TIGHTENINGS = 4  # of one layer at one length in one attempt; the last one makes the layer dense
TIGHTEN_TO = 0.9  # a layer that was over its limit is to come out this far under it
TAU_FOR_ERROR = 0.7  # at a length without curves: an error grows roughly with this power of tau
AIM = 0.95  # of its limit: where the bound of a layer's mean error is to come out
LEAST = 0.01  # of its limit: a layer counts with at least so much error
CLOSE = 1.05  # a spending that is off by no more than this stays as it is
TRIES = 3  # changes of one layer's spending at one length
MOST = 2.0  # times as much in one change: curves bend
ENOUGH = 4  # certify prompts; where the bounds of fewer come out is chance

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class Proven:
    """A candidate after its last attempt at the proof.

    candidate: What was proven. proofs: What was measured, by length in tokens. problems: Why the proof failed;
    none if it holds. certificates: What is certified, by length in tokens; empty without a certificate.
    kl_passes: How a budget in KL was searched for, by length in tokens; empty with others.
    """

    candidate: Candidate
    proofs: dict[int, LengthProof]
    problems: tuple[Problem, ...]
    certificates: Mapping[int, CertifiedLength] = field(default_factory=dict)
    kl_passes: Mapping[int, Sequence[KlPass]] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether the proof holds."""
        return not self.problems

    @property
    def chosen(self) -> dict[int, Chosen]:
        """What was chosen at every calibrated length, as tightened."""
        return self.candidate.choices

    @property
    def configs(self) -> dict[LengthAndLayer, LayerConfig]:
        """(length, layer) -> what was proven."""
        return self.candidate.configs

    @property
    def limits(self) -> dict[LengthAndLayer, float]:
        """(length, layer) -> the error the layer may have, in the budget's unit."""
        return self.candidate.limits

    @property
    def tightened(self) -> Counter[LengthAndLayer]:
        """(length, layer) -> how often the layer was tightened in the last attempt that proved this length."""
        changed = self.candidate.tightened
        return Counter({key: tightening.times for key, tightening in changed.items() if tightening.times})

    @property
    def first_errors(self) -> dict[LengthAndLayer, float]:
        """(length, layer) -> the error in the budget's unit before the layer was tightened; of those that were."""
        changed = self.candidate.tightened
        return {key: one.first_error for key, one in changed.items() if one.first_error is not None}

    @property
    def device(self) -> DeviceIdentity:
        """What the candidate was proven on."""
        return self.candidate.device


def prove_and_tighten(prover: Prover, candidate: Candidate) -> Proven:
    """Prove what the search chose, tightening it until the proof holds or the attempts are used up.

    Returns:
        The candidate as tightened, what was measured of it, and what is still wrong.

    Raises:
        ModelError: inf or NaN came up in the model.
        ResourceError: The GPU's memory ran out.
    """
    proofs: dict[int, LengthProof] = {}
    lengths, spending = frozenset(prover.held_out), Spending()

    def revise(candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
        return spending.revise(candidate, length, layer, proof) or tighten_layer(candidate, length, layer, proof)

    for attempt in range(RETRIES + 1):
        title = "proving on held-out prompts"
        candidate, measured = prover.prove(title, lengths, candidate, tighten_layer if attempt else revise)
        proofs |= measured
        problems = judge(candidate, proofs)
        # single layers were tightened in the attempt itself
        repairable = [problem for problem in problems if problem.kind != ProblemKind.OVER_LIMIT]
        if not repairable or attempt == RETRIES:
            break
        candidate, lengths = tighten(candidate, repairable, proofs)
        log.info("%s: proving %s tokens again", "; ".join(map(str, repairable)), sorted(lengths))
    return Proven(candidate, proofs, problems)


def tighten_layer(candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
    """Tighten one layer at one length if its error is over its limit.

    A calibrated length spends less of its budget, by as much as the error was too large. A checked length has no
    curves: there the thresholds are lowered instead. A layer that still is over its limit the last time becomes dense.

    Args:
        candidate: What was proven.
        length: The prompts' length in tokens.
        layer: The layer's index.
        proof: What was measured of the layer.

    Returns:
        The candidate to prove instead, or None if this one is accepted.
    """
    error, limit = proof.error(candidate.recipe.budget), candidate.limits[length, layer]
    if error <= limit:
        return None
    if candidate.layer_config(layer, length).is_dense:
        return None
    log.info("%s: tightened", over_limit(length, layer, error, limit))
    before = candidate.tightened.get((length, layer))
    times = 1 if before is None else before.times + 1
    share = 0.0 if times == TIGHTENINGS else TIGHTEN_TO * limit / error
    return candidate.with_layer(
        layer, length, *scaled(candidate, length, layer, share, DenseReason.OVER_LIMIT), error=error
    )


def scaled(
    candidate: Candidate, length: int, layer: int, share: float, why_dense: DenseReason
) -> tuple[LayerConfig, Choice | None]:
    """A layer with a share of the error that it spends in a candidate.

    A calibrated length spends less of its budget. A checked length has no curves: there the thresholds are lowered, and
    heads with a linear tail, which have none, become dense.

    Args:
        candidate: What the layer runs so far.
        length: The prompts' length in tokens.
        layer: The layer's index.
        share: Of the error that is predicted of it; 0 makes the layer dense.
        why_dense: The reason for that.

    Returns:
        What the layer runs, and the choice behind it; None at a checked length.
    """
    config, choice = candidate.layer_config(layer, length), candidate.choice(layer, length)
    if not share:
        return config.as_dense(), choice and choice.as_dense(why_dense)
    if choice is not None:
        choice = choice.spending(choice.spent * share, allowed(candidate.recipe))
        return choice.config, choice
    factor = share ** (1 / TAU_FOR_ERROR)
    heads = (
        replace(head, mode="dense") if head.mode == "s2o" and head.linear else replace(head, tau=head.tau * factor)
        for head in config.heads
    )
    return replace(config, heads=tuple(heads)), None


def tighten(
    candidate: Candidate, problems: Sequence[Problem], proofs: Mapping[int, LengthProof]
) -> tuple[Candidate, frozenset[int]]:
    """Change the lengths at which a proof failed as a whole.

    A length whose prefill was slower than the dense one becomes dense. Any other length that lost needles gets half
    its budget; if it is only checked, the buckets around it do. A length whose KL is over its budget gets less by as
    much. The layers of what changed start again from the search's choices.

    Args:
        candidate: What was proven.
        problems: What is wrong with it.
        proofs: What was measured of it, by length in tokens.

    Returns:
        The new candidate, and the lengths to prove again: those that changed, and those checked beside them.
    """
    chosen, buckets = dict(candidate.chosen), candidate.recipe.lengths
    slower = lengths_of(problems, ProblemKind.SLOWER)
    lost = lengths_of(problems, ProblemKind.LOST_NEEDLES) - slower
    halved = {bucket for length in lost for bucket in ([length] if length in chosen else neighbours(length, buckets))}
    shares = dict.fromkeys(halved, 0.5)
    for length in lengths_of(problems, ProblemKind.OVER_KL) - slower:
        share = TIGHTEN_TO * candidate.recipe.budget.value / proofs[length].kl
        shares[length] = min(share, shares.get(length, 1.0))
    for length, share in shares.items():
        chosen[length] = chosen[length].spending(share, allowed(candidate.recipe))
    for length in slower & set(chosen):
        choices = [choice.as_dense(DenseReason.SLOWER_PREFILL) for choice in chosen[length].choices]
        chosen[length] = replace(chosen[length], choices=choices)
    changed = shares.keys() | slower
    changed |= {length for length in candidate.recipe.checked_lengths if changed & set(neighbours(length, buckets))}
    changed_candidate = replace(
        candidate,
        chosen=chosen,
        tightened={key: kept for key, kept in candidate.tightened.items() if key[0] not in changed},
        dense_lengths=candidate.dense_lengths | (slower - set(chosen)),
    )
    return changed_candidate, frozenset(changed)


def neighbours(length: int, buckets: Sequence[int]) -> list[int]:
    """The buckets next to a length, below and above; one beyond the last bucket."""
    below = [bucket for bucket in buckets if bucket < length]
    above = [bucket for bucket in buckets if bucket > length]
    return below[-1:] + above[:1]


@dataclass
class Spending:
    """Gives each layer at each calibrated length what it may spend; it is what a proof revises by, before it tightens.

    tries: How often the spending of a layer at a length was changed.
    """

    tries: Counter[LengthAndLayer] = field(default_factory=Counter)
    _first: dict[LengthAndLayer, Choice] = field(default_factory=dict)  # what the search chose

    def revise(self, candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
        """The candidate in which a layer spends as much as it may.

        Args:
            candidate, length, layer, proof: As `tighten_layer` takes them.

        Returns:
            What to prove instead; None if the layer spends about as much as it may, or nothing can be changed: it is
            dense, or is at a length without curves. A layer whose first error is over its limit is for
            `tighten_layer`, and a budget in KL is spent by a search of its own.
        """
        key, choice = (length, layer), candidate.choice(layer, length)
        if choice is None or choice.config.is_dense or key in candidate.tightened or candidate.recipe.budget.is_kl:
            return None
        if not self.tries[key] and proof.error(candidate.recipe.budget) > candidate.limits[key]:
            return None
        times = growth(proof, candidate.limits[key], candidate.recipe)
        if proof.worst > (candidate.recipe.worst_rows or math.inf):  # more was given to rows than they bear
            times = min(times, 1 / CLOSE**2 if self.tries[key] else 1.0)
        if 1 / CLOSE <= times <= CLOSE or self.tries[key] == TRIES:
            return None
        self.tries[key] += 1
        first, spent = self._first.setdefault(key, choice), choice.spent * min(times, MOST)
        moved = first if spent <= first.spent else choice.spending(spent, allowed(candidate.recipe))
        if moved.config == choice.config:
            return None
        return candidate.with_choice(layer, length, moved)


def growth(proof: LayerProof, limit: float, recipe: Recipe) -> float:
    """How many times the error that was measured a layer may have.

    Args:
        proof: What was measured of the layer on the adjust prompts.
        limit: The error it may have, in the budget's unit.
        recipe: Its margin, and the number of certify prompts, which says how far a bound is from the mean.
    """
    errors = proof.errors(recipe.budget)
    mean = max(statistics.fmean(errors), proof.error(recipe.budget), LEAST * limit)
    times = recipe.margin * limit / mean
    if recipe.num_certify >= ENOUGH:
        bound = expected_mean_bound(errors, proof.kinds, recipe.num_certify, look_confidence(1.0))
        times = min(times, AIM * limit / max(bound, LEAST * limit))
    return times
