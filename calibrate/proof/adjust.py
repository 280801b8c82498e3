"""The proof as a loop: prove a candidate, judge it, change it, and prove again what changed.

A candidate is changed in two places, and both return a new candidate. While the adjust prompts move through the model,
each layer is moved along one scale, its share of the error that it spends (`Adjuster`), and is run again before the
next layer sees it. After all layers, a length that lost needles gets half its budget, and a length whose prefill was
slower than the dense one becomes dense (`tighten`).

The search spends what its curves predict on the calibration prompts. On other prompts a layer's error is often less or
more, and how much it varies between prompts differs from layer to layer. So a layer is given more, or less, until
one of two things holds: its mean error is the recipe's margin of its limit, or the bound that the certificate can be
expected to find for it is `TARGET_SHARE_OF_LIMIT`.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from calibrate.proof.bounds import CONFIDENCE, SPEND_FRACTIONS, compute_attempt_confidence, estimate_mean_bound
from calibrate.proof.state import Candidate, LengthAndLayer, Problem, ProblemKind, select_lengths
from calibrate.proof.verify import LayerProof, LengthProof, Prompts, Prover
from calibrate.recipe import Recipe
from calibrate.record import CertifiedLength, CertifiedRetrieval
from calibrate.search.choice import CalibrationDense, make_constraints
from calibrate.search.choose import SearchResult
from s2o_runtime.config import LayerConfig
from s2o_runtime.devices import DeviceIdentity

RETRIES = 2  # attempts after the first one, when every layer kept its limit but a whole length did not hold
TIGHTENINGS = 4  # of one layer at one length over its limit; the last one makes the layer dense
TARGET_SHARE_OF_LIMIT = 0.95  # where the bound of a layer's mean error is to come out
MIN_SHARE_OF_LIMIT = 0.01  # a layer counts with at least so much error, or a tiny one would be multiplied without end
NO_CHANGE_WITHIN = 1.05  # a spending that is off by no more than this factor stays as it is
MAX_ADJUSTMENTS = 3  # of one layer's spending at one length within its limit
MAX_STEP = 2.0  # times as much in one adjustment: curves bend
MIN_TEXTS_FOR_BOUND = 4  # texts to certify on; where the bounds of fewer come out is chance
TIMING_TOLERANCE = 1.02  # up to 2% slower than dense counts as equal

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class ProofResult:
    """A candidate after its last attempt at the proof.

    Attributes:
        candidate: the configurations that were proven.
        proofs: the measurements, by length in tokens.
        problems: why the proof failed; none if it holds.
        certificates: by length in tokens; empty without a certificate.
    """

    candidate: Candidate
    proofs: dict[int, LengthProof]
    problems: tuple[Problem, ...]
    certificates: Mapping[int, CertifiedLength] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """True if the proof holds."""
        return not self.problems

    @property
    def chosen(self) -> Mapping[int, SearchResult]:
        """The search's result at every calibrated length, as changed since."""
        return self.candidate.chosen

    @property
    def configs(self) -> dict[LengthAndLayer, LayerConfig]:
        """(length, layer) -> the configuration that was proven."""
        return self.candidate.configs

    @property
    def limits(self) -> dict[LengthAndLayer, float]:
        """(length, layer) -> the error the layer may have, in the budget's unit."""
        return self.candidate.limits

    @property
    def tightened(self) -> Counter[LengthAndLayer]:
        """(length, layer) -> how often the layer was tightened in the last attempt that proved this length."""
        return Counter(self.candidate.tightened)

    @property
    def first_errors(self) -> Mapping[LengthAndLayer, float]:
        """(length, layer) -> the error in the budget's unit before the layer was tightened; of those that were."""
        return self.candidate.first_errors

    @property
    def device(self) -> DeviceIdentity:
        """The device that the candidate was proven on."""
        return self.candidate.device


def prove_and_adjust(
    prover: Prover, prompts: Prompts, candidate: Candidate, texts: Mapping[int, int] | None = None
) -> ProofResult:
    """Prove what the search chose, changing it until the proof holds or the attempts are used up.

    Args:
        prover: measures it.
        prompts: the adjust prompts, by length in tokens.
        candidate: the search's choices.
        texts: how many groups of text will certify each length; by default as many as the recipe has prompts.

    Returns:
        The candidate as adjusted, its measurements, and its problems.

    Raises:
        ModelError: inf or NaN came up in the model.
        ResourceError: The GPU's memory ran out.
    """
    proofs: dict[int, LengthProof] = {}
    lengths, adjuster = frozenset(prompts), Adjuster(texts or {})
    for attempt in range(RETRIES + 1):
        with prover.show_progress("proving on held-out prompts", len(lengths)) as shown:
            attempted = {length: prompts[length] for length in prompts if length in lengths}
            candidate, measured = shown.prove(candidate, attempted, tighten_layer if attempt else adjuster.revise)
        proofs |= measured
        problems = judge(candidate, proofs)
        # single layers were tightened in the attempt itself
        repairable = [problem for problem in problems if problem.kind != ProblemKind.OVER_LIMIT]
        if not repairable or attempt == RETRIES:
            break
        candidate, lengths = tighten(candidate, repairable)
        log.info("%s: proving %s tokens again", "; ".join(map(str, repairable)), sorted(lengths))
    return ProofResult(candidate, proofs, problems)


def tighten_layer(candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
    """Give one layer at one length less if its error is over its limit; the last time it becomes dense.

    Args:
        candidate: the configurations that were measured.
        length: the prompts' length in tokens.
        layer: the layer's row in the profile.
        proof: the layer's measurements.

    Returns:
        The candidate to prove instead, or None if this one is accepted.
    """
    key, error = (length, layer), proof.limited_error(candidate.recipe)
    limit, times = candidate.limits[key], candidate.tightened.get(key, 0)
    if error <= limit or candidate.layer_config(layer, length).is_dense:
        return None
    log.info("%s: tightened", describe_over_limit(length, layer, error, limit))
    is_last = times == TIGHTENINGS - 1
    share = 0.0 if is_last or not math.isfinite(error) else candidate.recipe.margin * limit / error
    return replace(
        candidate.with_share(layer, length, share),
        tightened={**candidate.tightened, key: times + 1},
        first_errors={key: error, **candidate.first_errors},
    )


@dataclass
class Adjuster:
    """The rule by which the first proof moves each layer at each calibrated length to the error that it may have.

    Attributes:
        texts: as `prove_and_adjust` takes them.
        adjustments: how often the spending of a layer at a length was changed within its limit.
    """

    texts: Mapping[int, int] = field(default_factory=dict)
    adjustments: Counter[LengthAndLayer] = field(default_factory=Counter)

    def revise(self, candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
        """Return the candidate in which a layer spends as much as it may.

        Args:
            candidate, length, layer, proof: as `tighten_layer` takes them.

        Returns:
            The candidate to prove instead; None if the layer spends about as much as it may, or nothing is to be
            changed: it is dense, was over its limit before, or is at a length without curves.
        """
        if tightened := tighten_layer(candidate, length, layer, proof):
            return tightened
        key, config = (length, layer), candidate.layer_config(layer, length)
        if length not in candidate.chosen or config.is_dense or key in candidate.tightened:
            return None
        texts = self.texts.get(length, candidate.recipe.num_certify)
        times = compute_allowed_growth(proof, candidate.limits[key], candidate.recipe, candidate.geometry.layers, texts)
        if proof.worst > (candidate.recipe.worst_rows or math.inf):  # more was given to rows than they bear
            times = min(times, 1 / NO_CHANGE_WITHIN**2 if self.adjustments[key] else 1.0)
        if 1 / NO_CHANGE_WITHIN <= times <= NO_CHANGE_WITHIN or self.adjustments[key] == MAX_ADJUSTMENTS:
            return None
        self.adjustments[key] += 1
        moved = candidate.with_share(layer, length, min(times, MAX_STEP))
        return None if moved.layer_config(layer, length) == config else moved


def compute_allowed_growth(proof: LayerProof, limit: float, recipe: Recipe, layers: int, texts: int) -> float:
    """Compute the factor by which a layer's measured error may grow.

    Args:
        proof: the layer's measurements on the adjust prompts.
        limit: the error it may have, in the budget's unit.
        recipe: its margin.
        layers: of the model, all of which are to be within their limits together.
        texts: the number of texts to certify on, by which a bound is further from the mean or nearer to it.
    """
    errors = proof.errors(recipe.budget)
    largest = max(statistics.fmean(errors), proof.limited_error(recipe), MIN_SHARE_OF_LIMIT * limit)
    times = recipe.margin * limit / largest
    if texts >= MIN_TEXTS_FOR_BOUND:
        confidence = compute_attempt_confidence(SPEND_FRACTIONS[0], recipe, layers)
        bound = estimate_mean_bound(errors, proof.kinds, texts, confidence)
        times = min(times, TARGET_SHARE_OF_LIMIT * limit / max(bound, MIN_SHARE_OF_LIMIT * limit))
    return times


def tighten(candidate: Candidate, problems: Sequence[Problem]) -> tuple[Candidate, frozenset[int]]:
    """Change the lengths at which a proof failed as a whole.

    A length whose prefill was slower than the dense one becomes dense. Any other length that lost needles gets half
    its budget; if it is only checked, the buckets around it do. Layers of checked lengths beside them start again from
    what is interpolated.

    Args:
        candidate: the configurations that were proven.
        problems: what is wrong with them.

    Returns:
        The new candidate, and the lengths to prove again: those that changed, and those checked beside them.
    """
    chosen, buckets = dict(candidate.chosen), candidate.recipe.lengths
    slower = select_lengths(problems, ProblemKind.SLOWER)
    lost = select_lengths(problems, ProblemKind.LOST_NEEDLES) - slower
    halved = {
        bucket for length in lost for bucket in ([length] if length in chosen else find_neighbours(length, buckets))
    }
    for length in halved:
        chosen[length] = chosen[length].spending(0.5, make_constraints(candidate.recipe))
    for length in slower & set(chosen):
        choices = [choice.as_dense(CalibrationDense.SLOWER_PREFILL) for choice in chosen[length].choices]
        chosen[length] = replace(chosen[length], choices=choices)
    changed = halved | slower
    changed |= {
        length for length in candidate.recipe.checked_lengths if changed & set(find_neighbours(length, buckets))
    }
    changed_candidate = replace(
        candidate,
        chosen=chosen,
        overrides={key: config for key, config in candidate.overrides.items() if key[0] not in changed},
        dense_lengths=candidate.dense_lengths | (slower - set(chosen)),
        tightened={key: times for key, times in candidate.tightened.items() if key[0] not in changed},
        first_errors={key: error for key, error in candidate.first_errors.items() if key[0] not in changed},
    )
    return changed_candidate, frozenset(changed)


def find_neighbours(length: int, buckets: Sequence[int]) -> list[int]:
    """Return the buckets next to a length, below and above; one beyond the last bucket."""
    below = [bucket for bucket in buckets if bucket < length]
    above = [bucket for bucket in buckets if bucket > length]
    return below[-1:] + above[:1]


def judge(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> tuple[Problem, ...]:
    """Judge a candidate by its measurements.

    Args:
        candidate: the configurations that were proven.
        proofs: the measurements, by length in tokens.

    Returns:
        Why the proof failed: layers over their limit, then lengths that lost needles or are slower than dense, each in
        the order of `proofs`. A proof without problems holds.
    """
    return (
        *find_layers_over_limit(candidate, proofs),
        *find_lost_needles(proofs, candidate.recipe),
        *find_slower_lengths(candidate, proofs),
    )


def find_layers_over_limit(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> tuple[Problem, ...]:
    """Find the layers that are not dense and whose error is over their limit."""
    recipe = candidate.recipe
    return tuple(
        describe_over_limit(
            length,
            candidate.geometry.get_layer_number(layer),
            proof.limited_error(recipe),
            candidate.limits[length, layer],
        )
        for length, length_proof in proofs.items()
        for layer, proof in enumerate(length_proof.layers)
        if not proof.limited_error(recipe) <= candidate.limits[length, layer]  # also where it is no number
        and not candidate.layer_config(layer, length).is_dense
    )


def find_slower_lengths(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> tuple[Problem, ...]:
    """Find the lengths whose prefill takes longer than the dense one.

    A CPU has none, because times are not the objective there. A length whose layers are all dense is not one either:
    it runs the same as dense, whatever its times are.
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
        if proof.prefill_seconds > TIMING_TOLERANCE * proof.dense_prefill_seconds
        and not all(candidate.layer_config(layer, length).is_dense for layer in range(len(proof.layers)))
    )


def find_slower_layers(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> frozenset[LengthAndLayer]:
    """Find the layers whose attention was measured slower than dense attention at a length, if it was timed.

    A layer that was adjusted may have lost what made it fast.
    """
    return frozenset(
        (length, layer)
        for length, length_proof in proofs.items()
        for layer, proof in enumerate(length_proof.layers)
        if proof.seconds is not None
        and proof.dense_seconds is not None
        and proof.seconds > TIMING_TOLERANCE * proof.dense_seconds
        and not candidate.layer_config(layer, length).is_dense
    )


def describe_over_limit(length: int, layer: int, error: float, limit: float) -> Problem:
    """Return the problem of a layer whose error is over its limit, both in the budget's unit."""
    text = f"layer {layer} at {length} tokens has an error of {error:.2e}, {limit:.2e} is allowed"
    return Problem(ProblemKind.OVER_LIMIT, length, text)


def find_lost_needles(proofs: Mapping[int, LengthProof], recipe: Recipe) -> tuple[Problem, ...]:
    """Find the lengths at which the patched model keeps too few needles.

    One may be lost where not all are asked for: of few it is a large share, and tells little about many.
    """
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
        if patched < min(recipe.needles * dense, dense - (recipe.needles < 1))
    )


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
