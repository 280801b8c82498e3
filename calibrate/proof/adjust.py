"""The proof as a loop: prove a candidate, judge it, change it, and prove again what changed.

A candidate is changed in two places, and both return a new candidate. While the adjust prompts move through the model,
each layer is moved along one scale, what it spends of its budget (`Adjusting`), and is run again before the next layer
sees it. After all layers, a length that lost needles gets half its budget, and a length whose
prefill was slower than the dense one becomes dense (`tighten`).

The search spends what its curves predict on the calibration prompts. On other prompts a layer's error is often less or
more, and how much it varies between prompts differs from layer to layer. So a layer is given more, or less, until
one of two things holds: its mean error is the recipe's margin of its limit, or the bound that the certificate can be
expected to find for it is `AIM` of the limit.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from calibrate.proof.bounds import CONFIDENCE, STEPS, expected_mean_bound, step_confidence
from calibrate.proof.state import Candidate, LengthAndLayer, Problem, ProblemKind, lengths_of
from calibrate.proof.verify import LayerProof, LengthProof, Prover
from calibrate.recipe import Recipe
from calibrate.record import CertifiedLength, CertifiedRetrieval
from calibrate.search.choice import Choice, ChosenDense, search_constraints
from calibrate.search.choose import Chosen
from s2o_runtime.config import LayerConfig
from s2o_runtime.devices import DeviceIdentity

RETRIES = 2  # attempts after the first one, when every layer kept its limit but a whole length did not hold
TIGHTENINGS = 4  # of one layer at one length over its limit; the last one makes the layer dense
TAU_FOR_ERROR = 0.7  # at a length without curves: an error grows roughly with this power of tau
AIM = 0.95  # of its limit: where the bound of a layer's mean error is to come out
LEAST = 0.01  # of its limit: a layer counts with at least so much error
CLOSE = 1.05  # a spending that is off by no more than this stays as it is
TRIES = 3  # changes of one layer's spending at one length within its limit
MOST = 2.0  # times as much in one change: curves bend
ENOUGH = 4  # texts to certify on; where the bounds of fewer come out is chance
TIE = 1.02  # a prefill, or a layer, that takes this many times as long as dense counts as equally fast

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class Proven:
    """A candidate after its last attempt at the proof.

    candidate: what was proven. proofs: what was measured, by length in tokens. problems: why the proof failed;
    none if it holds. certificates: what is certified, by length in tokens; empty without a certificate.
    """

    candidate: Candidate
    proofs: dict[int, LengthProof]
    problems: tuple[Problem, ...]
    certificates: Mapping[int, CertifiedLength] = field(default_factory=dict)

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
        changes = self.candidate.changes
        return Counter({key: change.tightened for key, change in changes.items() if change.tightened})

    @property
    def first_errors(self) -> dict[LengthAndLayer, float]:
        """(length, layer) -> the error in the budget's unit before the layer was tightened; of those that were."""
        changes = self.candidate.changes
        return {key: one.first_error for key, one in changes.items() if one.first_error is not None}

    @property
    def device(self) -> DeviceIdentity:
        """What the candidate was proven on."""
        return self.candidate.device


def prove_and_tighten(prover: Prover, candidate: Candidate, texts: Mapping[int, int] | None = None) -> Proven:
    """Prove what the search chose, changing it until the proof holds or the attempts are used up.

    Args:
        prover: what measures it.
        candidate: what the search chose.
        texts: how many groups of text will certify each length; by default as many as the recipe has prompts.

    Returns:
        The candidate as adjusted, what was measured of it, and what is still wrong.

    Raises:
        ModelError: inf or NaN came up in the model.
        ResourceError: The GPU's memory ran out.
    """
    proofs: dict[int, LengthProof] = {}
    lengths, adjusting = frozenset(prover.held_out), Adjusting(texts or {})
    for attempt in range(RETRIES + 1):
        title = "proving on held-out prompts"
        candidate, measured = prover.prove(title, lengths, candidate, tighten_layer if attempt else adjusting.revise)
        proofs |= measured
        problems = judge(candidate, proofs)
        # single layers were tightened in the attempt itself
        repairable = [problem for problem in problems if problem.kind != ProblemKind.OVER_LIMIT]
        if not repairable or attempt == RETRIES:
            break
        candidate, lengths = tighten(candidate, repairable)
        log.info("%s: proving %s tokens again", "; ".join(map(str, repairable)), sorted(lengths))
    return Proven(candidate, proofs, problems)


def tighten_layer(candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
    """Give one layer at one length less if what is held to its limit is over it; the last time it becomes dense.

    Args:
        candidate: what was proven.
        length: the prompts' length in tokens.
        layer: the layer's index.
        proof: what was measured of the layer.

    Returns:
        The candidate to prove instead, or None if this one is accepted.
    """
    error, limit = proof.held(candidate.recipe), candidate.limits[length, layer]
    if error <= limit or candidate.layer_config(layer, length).is_dense:
        return None
    log.info("%s: tightened", over_limit(length, layer, error, limit))
    last = (length, layer) in candidate.changes and candidate.changes[length, layer].tightened == TIGHTENINGS - 1
    share = 0.0 if last or not math.isfinite(error) else candidate.recipe.margin * limit / error
    return candidate.with_layer(
        layer, length, *scaled(candidate, length, layer, share, ChosenDense.OVER_LIMIT), error=error
    )


@dataclass
class Adjusting:
    """Moves each layer at each calibrated length to what it may spend; it is what the first proof revises by.

    texts: as `prove_and_tighten` takes them. tries: how often the spending of a layer at a length was changed within
    its limit.
    """

    texts: Mapping[int, int] = field(default_factory=dict)
    tries: Counter[LengthAndLayer] = field(default_factory=Counter)

    def revise(self, candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
        """The candidate in which a layer spends as much as it may.

        Args:
            candidate, length, layer, proof: as `tighten_layer` takes them.

        Returns:
            What to prove instead; None if the layer spends about as much as it may, or nothing is to be changed: it is
            dense, was over its limit before, or is at a length without curves.
        """
        if tightened := tighten_layer(candidate, length, layer, proof):
            return tightened
        key, choice = (length, layer), candidate.choice(layer, length)
        before = candidate.changes.get(key)
        if choice is None or choice.config.is_dense or (before and before.tightened):
            return None
        texts = self.texts.get(length, candidate.recipe.num_certify)
        times = allowed_growth(proof, candidate.limits[key], candidate.recipe, candidate.geometry.layers, texts)
        if proof.worst > (candidate.recipe.worst_rows or math.inf):  # more was given to rows than they bear
            times = min(times, 1 / CLOSE**2 if self.tries[key] else 1.0)
        if 1 / CLOSE <= times <= CLOSE or self.tries[key] == TRIES:
            return None
        self.tries[key] += 1
        moved = candidate.with_layer(layer, length, *scaled(candidate, length, layer, min(times, MOST)))
        return None if moved.layer_config(layer, length) == choice.config else moved


def allowed_growth(proof: LayerProof, limit: float, recipe: Recipe, layers: int, texts: int) -> float:
    """How many times the error that was measured a layer may have.

    Args:
        proof: what was measured of the layer on the adjust prompts.
        limit: the error it may have, in the budget's unit.
        recipe: its margin.
        layers: of the model, all of which are to be within their limits together.
        texts: to certify on, which says how far a bound is from the mean.
    """
    errors = proof.errors(recipe.budget)
    largest = max(statistics.fmean(errors), proof.held(recipe), LEAST * limit)
    times = recipe.margin * limit / largest
    if texts >= ENOUGH:
        confidence = step_confidence(STEPS[0], recipe, layers)
        bound = expected_mean_bound(errors, proof.kinds, texts, confidence)
        times = min(times, AIM * limit / max(bound, LEAST * limit))
    return times


def scaled(
    candidate: Candidate, length: int, layer: int, share: float, why_dense: ChosenDense = ChosenDense.OVER_LIMIT
) -> tuple[LayerConfig, Choice | None]:
    """A layer with a share of the error that it spends in a candidate.

    A calibrated length spends less of its budget. A checked length has no curves: there the thresholds are lowered.

    Args:
        candidate: what the layer runs so far.
        length: the prompts' length in tokens.
        layer: the layer's index.
        share: of the error that is predicted of it; 0 makes the layer dense.
        why_dense: the reason for that.

    Returns:
        What the layer runs, and the choice behind it; None at a checked length.
    """
    config, choice = candidate.layer_config(layer, length), candidate.choice(layer, length)
    if not share:
        return config.as_dense(), choice and choice.as_dense(why_dense)
    if choice is not None:
        choice = choice.spending(choice.spent * share, search_constraints(candidate.recipe))
        return choice.config, choice
    factor = share ** (1 / TAU_FOR_ERROR)
    heads = tuple(replace(head, tau=head.tau * factor) for head in config.heads)
    return replace(config, heads=heads), None


def tighten(candidate: Candidate, problems: Sequence[Problem]) -> tuple[Candidate, frozenset[int]]:
    """Change the lengths at which a proof failed as a whole.

    A length whose prefill was slower than the dense one becomes dense. Any other length that lost needles gets half
    its budget; if it is only checked, the buckets around it do. Layers of checked lengths beside them start again from
    what is interpolated.

    Args:
        candidate: what was proven.
        problems: what is wrong with it.

    Returns:
        The new candidate, and the lengths to prove again: those that changed, and those checked beside them.
    """
    chosen, buckets = dict(candidate.choices), candidate.recipe.lengths
    slower = lengths_of(problems, ProblemKind.SLOWER)
    lost = lengths_of(problems, ProblemKind.LOST_NEEDLES) - slower
    halved = {bucket for length in lost for bucket in ([length] if length in chosen else neighbours(length, buckets))}
    shares = dict.fromkeys(halved, 0.5)
    for length, share in shares.items():
        chosen[length] = chosen[length].spending(share, search_constraints(candidate.recipe))
    for length in slower & set(chosen):
        choices = [choice.as_dense(ChosenDense.SLOWER_PREFILL) for choice in chosen[length].choices]
        chosen[length] = replace(chosen[length], choices=choices)
    changed = shares.keys() | slower
    changed |= {length for length in candidate.recipe.checked_lengths if changed & set(neighbours(length, buckets))}
    changed_candidate = replace(
        candidate,
        chosen={length: chosen[length] if length in changed else kept for length, kept in candidate.chosen.items()},
        changes={key: kept for key, kept in candidate.changes.items() if key[0] not in changed},
        dense_lengths=candidate.dense_lengths | (slower - set(chosen)),
    )
    return changed_candidate, frozenset(changed)


def neighbours(length: int, buckets: Sequence[int]) -> list[int]:
    """The buckets next to a length, below and above; one beyond the last bucket."""
    below = [bucket for bucket in buckets if bucket < length]
    above = [bucket for bucket in buckets if bucket > length]
    return below[-1:] + above[:1]


def judge(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> tuple[Problem, ...]:
    """Judge a candidate by what was measured of it.

    Args:
        candidate: what was proven.
        proofs: what was measured, by length in tokens.

    Returns:
        Why the proof failed: layers over their limit, then lengths that lost needles or are slower than dense, each in
        the order of `proofs`. A proof without problems holds.
    """
    return (
        *layers_over_limit(candidate, proofs),
        *lost_needles(proofs, candidate.recipe),
        *slower_than_dense(candidate, proofs),
    )


def layers_over_limit(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> tuple[Problem, ...]:
    """Each layer that is not dense and whose error is over its limit."""
    recipe = candidate.recipe
    return tuple(
        over_limit(length, candidate.geometry.layer_number(layer), proof.held(recipe), candidate.limits[length, layer])
        for length, length_proof in proofs.items()
        for layer, proof in enumerate(length_proof.layers)
        if not proof.held(recipe) <= candidate.limits[length, layer]  # also where it is no number
        and not candidate.layer_config(layer, length).is_dense
    )


def slower_than_dense(candidate: Candidate, proofs: Mapping[int, LengthProof]) -> tuple[Problem, ...]:
    """The lengths whose prefill takes longer than the dense one.

    A CPU has none, because times are not the objective there. A length whose layers are all dense is not one either:
    it runs what dense runs, whatever its times say.
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
        for length, length_proof in proofs.items()
        for layer, proof in enumerate(length_proof.layers)
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
