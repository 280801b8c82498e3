"""The certificate: what is stated of a finished choice, measured on prompts that had no part in choosing it.

Every layer's error is bounded from above with a stated confidence. A layer whose bound is over its limit is tried again
on the same inputs with less of its budget, down the fixed rungs of a ladder, past those that its first bound makes
hopeless, and becomes dense below the last one. That chooses by the certify prompts after all, so the looks at a layer
share the error probability: half of it belongs to the first look, the rest to the rungs in equal parts. All bounds that
can be looked at then hold together with the stated confidence (Bonferroni), whichever is taken, and the ladder can
begin at the top, where most layers stop.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from calibrate.journal import Journal
from calibrate.progress import progress_bar
from calibrate.prompts.prompt import Prompt
from calibrate.proof.candidate import Candidate, LengthAndLayer, Tightening
from calibrate.proof.certificate import FEWEST, RUNGS, Look, certificate_of, look_bound
from calibrate.proof.judge import layers_over_limit, slower_layers, slower_than_dense
from calibrate.proof.problems import (
    Problem,
    kl_over_budget,
    kl_shown_over_budget,
    lengths_of,
    lost_needles,
    retrieval_lost,
)
from calibrate.proof.sample import LayerSample, sample
from calibrate.proof.tighten import Proven, scaled
from calibrate.proof.verify import prove
from calibrate.search.choice import DenseReason
from calibrate.work.executor import Executor
from s2o_runtime.profile.record import CertifiedLength

HOPELESS = 1.5  # times the limit: a rung is passed over if the first bound says that its own would be above that

log = logging.getLogger("calibrate")


@dataclass
class Ladder:
    """Decides for each layer at each length what it is left with. It is what `sample` revises by.

    looks: What was seen of each layer at each length, first look first.
    """

    looks: dict[LengthAndLayer, list[Look]] = field(default_factory=dict)
    _begun: dict[LengthAndLayer, Candidate] = field(default_factory=dict)  # at each first look

    def revise(self, candidate: Candidate, length: int, layer: int, seen: LayerSample) -> Candidate | None:
        """What to measure instead of this candidate on the same inputs; None to accept it."""
        looks = self.looks.setdefault((length, layer), [])
        begun = self._begun.setdefault((length, layer), candidate)
        config, limit = candidate.layer_config(layer, length), candidate.limits[length, layer]
        share = (1.0, *RUNGS, 0.0)[len(looks)]
        bound = look_bound(seen.errors(candidate.recipe.budget), share, limit, config)
        looks.append(Look(0.0 if looks and config.is_dense else share, bound))
        if bound <= limit or config.is_dense:
            return None
        log.info("layer %d at %d tokens: the bound of its error is %.2e, limit %.2e", layer, length, bound, limit)
        for rung in RUNGS[len(looks) - 1 :]:
            lower = with_share(begun, candidate, length, layer, rung)
            hopeless = rung * looks[0].bound > HOPELESS * limit and rung != RUNGS[-1]
            if lower.layer_config(layer, length) != config and not hopeless:
                return lower
            looks.append(Look(rung, bound))  # not taken: so little less changes no head, or would not do
        return with_share(begun, candidate, length, layer, 0.0)


def with_share(begun: Candidate, candidate: Candidate, length: int, layer: int, share: float) -> Candidate:
    """The candidate in which a layer spends a share of what it spent in `begun`; with none it is dense."""
    key = length, layer
    before = begun.tightened.get(key)
    times, first_error = (0, None) if before is None else (before.times, before.first_error)
    tightening = Tightening(times, *scaled(begun, length, layer, share, DenseReason.OVER_BOUND), first_error)
    return replace(candidate, tightened={**candidate.tightened, key: tightening})


def certify(
    executor: Executor,
    prompts: Mapping[int, Sequence[Prompt]],
    proven: Proven,
    journal: Journal | None = None,
    *,
    progress: bool,
) -> Proven:
    """Certify what was proven, and make layers more careful whose bound is over their limit.

    Args:
        executor: Who runs it.
        prompts: The certify prompts by length; lengths with fewer than `FEWEST` are not certified.
        proven: A proof that holds.
        journal: Where measurements are kept; None if nowhere.
        progress: Whether to show a progress bar.

    Returns:
        What is left of the candidate, with the certificate, and with a problem for each length where retrieval does
        not hold, or where a budget in KL is shown to be broken.

    Raises:
        ModelError: inf or NaN came up in the model.
        ResourceError: The GPU's memory ran out.
    """
    candidate, certificates, ladder = proven.candidate, dict[int, CertifiedLength](), Ladder()
    lengths = [length for length in candidate.lengths if len(prompts.get(length, ())) >= FEWEST]
    problems: list[Problem | None] = []
    with progress_bar("certifying", executor.geometry.layers * len(lengths), "layer", shown=progress) as step:
        for length in lengths:  # one after another: the hidden states of all prompts are in memory
            candidate, seen = sample(
                executor, length, prompts[length], candidate, ladder.revise, step, candidate.recipe.chunk, journal
            )
            layers = range(executor.geometry.layers)
            certificates[length] = certificate_of(
                length,
                seen,
                recipe=candidate.recipe,
                limits=[candidate.limits[length, layer] for layer in layers],
                configs=[candidate.layer_config(layer, length) for layer in layers],
                looks=[ladder.looks[length, layer] for layer in layers],
            )
            kls = [max(0.0, agreement.kl) for agreement in seen.agreements]
            problems += [
                retrieval_lost(length, certificates[length].retrieval, candidate.recipe),
                kl_shown_over_budget(length, kls, candidate.recipe),
            ]
    return replace(
        proven,
        candidate=candidate,
        certificates=dict(sorted(certificates.items())),
        problems=(*proven.problems, *(problem for problem in problems if problem)),
    )


def proven_again(
    executor: Executor,
    held_out: Mapping[int, Sequence[Prompt]],
    proven: Proven,
    certified: Proven,
    journal: Journal | None = None,
    *,
    progress: bool,
) -> Proven:
    """Measure the lengths again that changed since the proof; layers, and then lengths, that became slower than dense
    become dense.

    The prompts are those that layers were adjusted on, and no layer is tightened: densities, times and predictions in
    the record are to be of what is written. What is certified of a layer holds all the more if it becomes dense.
    Needles that are lost now, or a KL over its budget, although layers became more careful, are problems:
    `s2o-profile verify` would find them.

    Args:
        executor: Who runs it.
        held_out: The prompts that layers were adjusted on.
        proven, certified: As the proof left it, and as it is after the certificate and `without_slower_layers`.
        journal: Where measurements are kept; None if nowhere.
        progress: Whether to show a progress bar.
    """
    lengths = frozenset(
        length for (length, layer), config in certified.configs.items() if config != proven.configs[length, layer]
    )
    candidate, proofs = certified.candidate, dict(certified.proofs)
    looked = False
    while lengths:
        steps = executor.geometry.layers * len(lengths)
        again = {length: prompts for length, prompts in held_out.items() if length in lengths}
        with progress_bar("measuring what changed since", steps, "layer", shown=progress) as step:
            _, measured = prove(executor, again, candidate, on_step=step, chunk=candidate.recipe.chunk, journal=journal)
        proofs |= measured
        layers = frozenset() if looked else slower_layers(candidate, measured)  # once: times that tie vary
        looked = True
        candidate, lengths = _without_slower(candidate, layers, lengths_of(slower_than_dense(candidate, measured)))
    recipe = candidate.recipe
    problems = (*lost_needles(proofs, recipe), *kl_over_budget(proofs, recipe))
    return replace(certified, candidate=candidate, proofs=proofs, problems=(*certified.problems, *problems))


def without_slower_lengths(
    executor: Executor,
    held_out: Mapping[int, Sequence[Prompt]],
    proven: Proven,
    journal: Journal | None = None,
    *,
    progress: bool,
) -> Proven:
    """Time is no reason to fail: what the last attempt at the proof left slower than dense becomes dense.

    Of a length whose prefill is slower those layers become dense whose attention is; all, if no layer alone is slower.

    Args:
        executor: Who runs it.
        held_out: The prompts that layers were adjusted on.
        proven: As the proof left it.
        journal: Where measurements are kept; None if nowhere.
        progress: Whether to show a progress bar.
    """
    slower = lengths_of(slower_than_dense(proven.candidate, proven.proofs))
    if not slower:
        return proven
    candidate, _ = _without_slower(proven.candidate, slower_layers(proven.candidate, proven.proofs), slower)
    left = replace(proven, candidate=candidate, problems=layers_over_limit(proven.candidate, proven.proofs))
    return proven_again(executor, held_out, proven, left, journal, progress=progress)


def without_slower_layers(proven: Proven) -> Proven:
    """With dense layers where attention was measured slower than dense; what was measured stays that of before."""
    candidate, _ = _without_slower(proven.candidate, slower_layers(proven.candidate, proven.proofs), frozenset())
    return replace(proven, candidate=candidate)


def _without_slower(
    candidate: Candidate, layers: Collection[LengthAndLayer], lengths: frozenset[int]
) -> tuple[Candidate, frozenset[int]]:
    """The candidate with these slower layers dense, and of these slower lengths all layers where none of those is; and
    the lengths at which it changed."""
    for length, layer in sorted(layers):
        log.info("layer %d at %d tokens is slower than dense: it becomes dense", layer, length)
    of_layers = frozenset(length for length, _ in layers)
    return with_dense(
        with_dense_layers(candidate, layers, DenseReason.SLOWER_ATTENTION), lengths - of_layers
    ), of_layers | lengths


def with_dense(candidate: Candidate, lengths: frozenset[int]) -> Candidate:
    """The candidate with dense layers at these lengths; at all others every layer keeps what it was certified with."""
    return with_dense_layers(
        candidate, {key for key in candidate.configs if key[0] in lengths}, DenseReason.SLOWER_PREFILL
    )


def with_dense_layers(candidate: Candidate, places: Collection[LengthAndLayer], why_dense: DenseReason) -> Candidate:
    """The candidate with these layers dense at these lengths; at all others every layer keeps what it has."""
    if not places:
        return candidate
    pinned = dict(candidate.tightened)
    for (length, layer), config in candidate.configs.items():
        if length not in candidate.chosen:  # or it would be interpolated from other buckets now
            pinned.setdefault((length, layer), Tightening(0, config, None))
        if (length, layer) in places:
            before = pinned.get((length, layer), Tightening(0, config, None))
            settings = scaled(candidate, length, layer, 0.0, why_dense)
            pinned[length, layer] = Tightening(before.times, *settings, before.first_error)
    return replace(candidate, tightened=pinned)
