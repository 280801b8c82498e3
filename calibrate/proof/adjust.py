"""The proof as a loop: prove a candidate, judge it, change it, and prove again what changed.

A candidate is changed in two places, and both return a new candidate. While the adjust prompts move through the model,
each layer is moved along one scale, its share of the error that it spends (`adjust_layer`), or looks further back where
the first rows of its segments err much more than the others (`widen_layer`), and is run again before the next layer
sees it. After all layers, a length that lost needles gets half its budget (`tighten`). A layer that is then
slower than dense attention becomes dense (`make_slower_dense`), so no length is slower than the dense model.

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
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import starmap
from types import MappingProxyType

from calibrate.proof.bounds import SPEND_FRACTIONS, compute_attempt_confidence, estimate_mean_bound
from calibrate.proof.state import Candidate, Problem, ProblemKind, select_lengths
from calibrate.proof.verify import EIGHTH_OVER_LIMIT, LayerProof, LengthProof, Prompts, Prover
from calibrate.recipe import Recipe
from calibrate.search.choice import CalibrationDense
from s2o_runtime.config import LOOKBACKS

RETRIES = 2  # attempts after the first one, when every layer kept its limit but a whole length did not hold
FIRST_ROWS = 3.0  # times its mean error that the first row of each of a layer's segments may have
TIGHTENINGS = 4  # of one layer at one length over its limit; the last one makes the layer dense
TARGET_SHARE_OF_LIMIT = 0.95  # where the bound of a layer's mean error is to come out
MIN_SHARE_OF_LIMIT = 0.01  # a layer counts with at least so much error, or a tiny one would be multiplied without end
NO_CHANGE_WITHIN = 1.05  # a spending that is off by no more than this factor stays as it is
MAX_ADJUSTMENTS = 3  # of one layer's spending at one length within its limit
MAX_STEP = 2.0  # times as much in one adjustment: curves bend
MIN_TEXTS_FOR_BOUND = 4  # texts to certify on; where the bounds of fewer come out is chance
TIMING_TOLERANCE = 1.02  # up to 2% slower than dense counts as equal

log = logging.getLogger("calibrate")


def prove_and_adjust(
    prover: Prover, prompts: Prompts, candidate: Candidate, texts: Mapping[int, int] | None = None
) -> Candidate:
    """Prove what the search chose, changing it until the proof holds or the attempts are used up.

    Args:
        prover, prompts: measures the adjust prompts, by length in tokens.
        candidate: the search's choices.
        texts: how many groups of text will certify each length; by default as many as the recipe has prompts.

    Returns:
        The candidate as adjusted, with its measurements and its problems.

    Raises:
        ModelError: inf or NaN came up in the model.
        ResourceError: The GPU's memory ran out.
    """
    lengths, adjust = frozenset(prompts), partial(adjust_layer, texts=texts or {})
    for attempt in range(RETRIES + 1):
        with prover.show_progress("proving on held-out prompts", len(lengths)) as shown:
            attempted = {length: prompts[length] for length in prompts if length in lengths}
            candidate, measured = shown.prove(candidate, attempted, repair_layer if attempt else adjust)
        candidate = replace(candidate, proofs={**candidate.proofs, **measured})
        candidate = replace(candidate, problems=judge(candidate))
        # single layers were tightened in the attempt itself
        repairable = [problem for problem in candidate.problems if problem.kind != ProblemKind.OVER_LIMIT]
        if not repairable or attempt == RETRIES:
            break
        candidate, lengths = tighten(candidate)
        log.info("%s: proving %s tokens again", "; ".join(map(str, repairable)), sorted(lengths))
    return candidate


def repair_layer(candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
    """Tighten a layer that is over its limit, or widen one whose first rows err too much, as these two functions do."""
    return tighten_layer(candidate, length, layer, proof) or widen_layer(candidate, length, layer, proof)


def tighten_layer(candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
    """Give one layer at one length less if its error is over its limit; the last time it becomes dense.

    layer: its row in the profile. proof: its measurements.

    Returns:
        The candidate to prove instead, or None if this one is accepted.
    """
    key, error = (length, layer), proof.limited_error(candidate.recipe)
    limit, times = candidate.limits[key], candidate.tightened[key]
    if error <= limit or candidate.layer_config(layer, length).is_dense:
        return None
    log.info("%s: tightened", describe_over_limit(length, layer, proof, limit, candidate.recipe))
    is_last = times == TIGHTENINGS - 1
    share = 0.0 if is_last or not math.isfinite(error) else candidate.recipe.margin * limit / error
    return replace(
        candidate.with_share(layer, length, share),
        tightened=candidate.tightened + Counter([key]),
        first_errors={key: error, **candidate.first_errors},
    )


def widen_layer(candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
    """Let a layer at one length always visit more keys before a segment if the first rows of segments err too much.

    Their neighbours stand in no window. layer: its row in the profile. proof: its measurements.

    Returns:
        The candidate to prove instead, or None if this one is accepted.
    """
    config, budget = candidate.layer_config(layer, length), candidate.recipe.budget
    further = next((keys for keys in LOOKBACKS if keys > config.lookback), None)
    first = next(starmap(budget.error, proof.places), 0.0)
    if config.is_dense or further is None or not first > FIRST_ROWS * proof.error(budget):
        return None
    return candidate.with_lookback(layer, length, further)


def adjust_layer(
    candidate: Candidate, length: int, layer: int, proof: LayerProof, texts: Mapping[int, int] = MappingProxyType({})
) -> Candidate | None:
    """Move a layer at a calibrated length to the error that it may have, or tighten it if it is over its limit.

    texts: as `prove_and_adjust` takes them.

    Returns:
        The candidate to prove instead; None if the layer spends about as much as it may, or nothing is to be
        changed: it is dense, was over its limit before, or is at a length without curves.
    """
    if changed := repair_layer(candidate, length, layer, proof):
        return changed
    key, recipe, config = (length, layer), candidate.recipe, candidate.layer_config(layer, length)
    if length not in candidate.chosen or config.is_dense or key in candidate.tightened:
        return None
    if recipe.budget.kind == "kl":  # layers spend what was measured on answers, all together
        return None
    groups = texts.get(length, recipe.num_certify)
    times = compute_allowed_growth(proof, candidate.limits[key], recipe, candidate.geometry.layers, groups)
    if proof.worst > (recipe.worst_rows or math.inf):  # more was given to rows than they bear
        times = min(times, 1 / NO_CHANGE_WITHIN**2 if candidate.adjusted[key] else 1.0)
    if 1 / NO_CHANGE_WITHIN <= times <= NO_CHANGE_WITHIN or candidate.adjusted[key] == MAX_ADJUSTMENTS:
        return None
    moved = candidate.with_share(layer, length, min(times, MAX_STEP))
    if moved.layer_config(layer, length) == config:
        return None
    return replace(moved, adjusted=candidate.adjusted + Counter([key]))


def compute_allowed_growth(proof: LayerProof, limit: float, recipe: Recipe, layers: int, texts: int) -> float:
    """Compute the factor by which a layer's measured error may grow.

    Args:
        proof, limit: measurements on the adjust prompts, and the error that the layer may have, in the budget's unit.
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


def tighten(candidate: Candidate) -> tuple[Candidate, frozenset[int]]:
    """Give half its budget to each length that lost needles; to the bucket that it follows if it is only checked.

    Layers of checked lengths that follow one of these start again from it.

    Returns:
        The new candidate, and the lengths to prove again: those that changed, and those that follow them.
    """
    chosen = dict(candidate.chosen)
    lost = select_lengths(candidate.problems, ProblemKind.LOST_NEEDLES)
    changed = {candidate.find_bucket(length) for length in lost}
    for length in changed:
        choices = [
            choice if choice.why_dense else choice.spending(0.5 * choice.budget.mse)
            for choice in chosen[length].choices
        ]
        chosen[length] = replace(chosen[length], choices=choices)
    changed |= {length for length in candidate.recipe.checked_lengths if candidate.find_bucket(length) in changed}
    changed_candidate = replace(
        candidate,
        chosen=chosen,
        overrides={key: config for key, config in candidate.overrides.items() if key[0] not in changed},
        tightened=Counter({key: times for key, times in candidate.tightened.items() if key[0] not in changed}),
        first_errors={key: error for key, error in candidate.first_errors.items() if key[0] not in changed},
    )
    return changed_candidate, frozenset(changed)


def judge(candidate: Candidate) -> tuple[Problem, ...]:
    """Return why a candidate's proof failed: layers over their limit, then lengths that lost needles."""
    recipe = candidate.recipe
    over_limit = (
        describe_over_limit(length, candidate.geometry.get_layer_number(layer), proof, limit, recipe)
        for length, length_proof in candidate.proofs.items()
        for layer, proof in enumerate(length_proof.layers)
        for limit in (candidate.limits[length, layer],)
        # also where it is no number
        if not proof.limited_error(recipe) <= limit and not candidate.layer_config(layer, length).is_dense
    )
    return (*over_limit, *find_lost_needles(candidate.proofs, recipe))


def make_slower_dense(candidate: Candidate) -> Candidate:
    """Make dense what was measured slower than dense attention; the candidate itself if there is nothing.

    A layer that was adjusted may have lost what made it fast. Every other layer keeps its configuration. The
    measurements stay those of before.
    """
    slower_layers = sorted(
        (length, layer)
        for length, length_proof in candidate.proofs.items()
        for layer, proof in enumerate(length_proof.layers)
        if proof.seconds is not None
        and proof.dense_seconds is not None
        and proof.seconds > TIMING_TOLERANCE * proof.dense_seconds
        and not candidate.layer_config(layer, length).is_dense
    )
    if slower_layers:
        # Checked lengths are fixed first, or they would follow the buckets that become dense.
        fixed = {key: config for key, config in candidate.configs.items() if key[0] not in candidate.chosen}
        candidate = replace(candidate, overrides={**candidate.overrides, **fixed})
    for length, layer in slower_layers:
        log.info("layer %d at %d tokens is slower than dense: it becomes dense", layer, length)
        candidate = candidate.with_share(layer, length, 0.0, CalibrationDense.SLOWER_ATTENTION)
    return candidate


def remeasure(prover: Prover, prompts: Prompts, proven: Candidate, changed: Candidate) -> Candidate:
    """Measure the lengths again that changed since the proof; layers that are slower then become dense.

    No layer is tightened: densities, times and predictions in the record are to be of what is written. The certificate
    of a layer holds all the more if it becomes dense. Needles that are lost now, although layers became more careful,
    are problems: `s2o-profile verify` would find them.

    prompts: the adjust prompts, by length in tokens. proven, changed: as the proof left it, and as it is since.
    """
    is_first, candidate = True, changed
    while lengths := {
        length for (length, layer), config in candidate.configs.items() if config != proven.configs[length, layer]
    }:
        with prover.show_progress("measuring what changed since", len(lengths)) as shown:
            again = {length: prompts[length] for length in prompts if length in lengths}
            _, measured = shown.prove(candidate, again)
        proven = replace(candidate, proofs={**candidate.proofs, **measured})
        candidate = make_slower_dense(proven) if is_first else proven  # once: times that tie vary
        is_first = False
    problems = find_lost_needles(candidate.proofs, candidate.recipe)
    return replace(candidate, problems=(*candidate.problems, *problems))


def describe_over_limit(length: int, layer: int, proof: LayerProof, limit: float, recipe: Recipe) -> Problem:
    """Return the problem of a layer whose error is over its limit, both in the budget's unit."""
    error, eighth = proof.error(recipe.budget), proof.find_largest_eighth(recipe.budget)
    text = f"{error:.2e}, {limit:.2e} is allowed"
    if eighth > EIGHTH_OVER_LIMIT * error:
        text = f"{eighth:.2e} in an eighth of the prompts, {EIGHTH_OVER_LIMIT * limit:.2e} is allowed there"
    return Problem(ProblemKind.OVER_LIMIT, length, f"layer {layer} at {length} tokens has an error of {text}")


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
