"""A budget in KL: allocate from the curves, prove, compare with the budget, and allocate again at another scale.

First the layers are weighed by what they cost by themselves (`kl_alone`). A pass is the adjust stage's measurement,
with its tightening of layers and without times. What is aimed at is the budget less its margin, which is left for
prompts that were not seen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from calibrate.journal import Journal
from calibrate.progress import progress_bar
from calibrate.prompts.prompt import Prompt
from calibrate.proof.candidate import Candidate
from calibrate.proof.kl_alone import corrected, kl_alone
from calibrate.proof.kl_pass import KlPass, best_scale, next_scale, settled
from calibrate.proof.tighten import tighten_layer
from calibrate.proof.verify import prove
from calibrate.search.choose import Chosen
from calibrate.work.executor import Executor

WEIGHINGS = 2
NEAR = 1.3  # times what was predicted: layers by themselves that cost no more than this were weighed near the budget
PASSES = 3

log = logging.getLogger("calibrate")


def within_kl(
    executor: Executor,
    held_out: Mapping[int, Sequence[Prompt]],
    candidate: Candidate,
    journal: Journal | None = None,
    *,
    progress: bool,
) -> tuple[Candidate, dict[int, tuple[KlPass, ...]]]:
    """Find the allocation whose KL on the adjust prompts is the budget less its margin.

    Args:
        executor: Who runs it.
        held_out: The prompts that layers are adjusted on, by length in tokens.
        candidate: What the search chose, for a budget in KL.
        journal: Where measurements are kept; None if nowhere.
        progress: Whether to show a progress bar for each pass.

    Returns:
        The candidate to prove, whose calibrated lengths spend what the passes found, and the passes of each length.

    Raises:
        ModelError: inf or NaN came up in the model.
        ResourceError: The GPU's memory ran out.
    """
    recipe = candidate.recipe
    begun = _weighed(executor, held_out, candidate, journal, progress=progress)
    most, aim = recipe.budget.value, recipe.budget.value * recipe.margin
    passes: dict[int, list[KlPass]] = {length: [] for length in recipe.lengths}
    ended: set[int] = set()
    for number in range(1, PASSES + 1):
        scales = {length: next_scale(passes[length], aim) for length in recipe.lengths if length not in ended}
        tried = {length: begun[length].sharing(recipe, scale) for length, scale in scales.items()}
        if number > 1:  # a scale at which no head changes would measure the same
            ended |= {length for length, chosen in tried.items() if _same(chosen, candidate.chosen[length])}
            tried = {length: chosen for length, chosen in tried.items() if length not in ended}
        if not tried:
            break
        candidate = replace(candidate, chosen={**candidate.chosen, **tried})
        prompts = {length: held_out[length] for length in tried}
        steps = executor.geometry.layers * len(prompts)
        with progress_bar(f"searching for the KL, pass {number}", steps, "layer", shown=progress) as step:
            _, proofs = prove(
                executor,
                prompts,
                candidate,
                tighten_layer,
                step,
                timed=False,
                chunk=candidate.recipe.chunk,
                journal=journal,
            )
        for length, chosen in tried.items():
            passes[length].append(KlPass(scales[length], chosen.predicted_kl, proofs[length].kl))
            log.info("%d tokens: %s, aimed at %.2e", length, passes[length][-1], aim)
        ended |= {length for length in tried if settled(passes[length], aim, most)}
    final = {
        length: begun[length].sharing(recipe, best_scale(of_length, aim, most)) for length, of_length in passes.items()
    }
    return replace(candidate, chosen=final), {length: tuple(of_length) for length, of_length in passes.items()}


def _weighed(
    executor: Executor,
    held_out: Mapping[int, Sequence[Prompt]],
    candidate: Candidate,
    journal: Journal | None,
    *,
    progress: bool,
) -> dict[int, Chosen]:
    """What was chosen at each calibrated length, with layers weighed by what they cost by themselves."""
    weighed = dict(candidate.chosen)
    for length in candidate.recipe.lengths:
        for _ in range(WEIGHINGS):  # the first one may be at errors far from those that the budget allows
            configs = [choice.config for choice in weighed[length].choices]
            with progress_bar(f"weighing layers at {length} tokens", 1, "pass", shown=progress) as step:
                alone = kl_alone(executor, held_out[length], configs, journal)
                step()
            log.info("%d tokens: groups of layers by themselves have a KL of %s, rounding %.1e", length, *alone)
            ratio = sum(alone[0]) / max(weighed[length].predicted_kl, 1e-30)
            weighed[length] = corrected(weighed[length], alone).sharing(candidate.recipe, 1.0)
            if 1 / NEAR <= ratio <= NEAR:
                break
    return weighed


def _same(chosen: Chosen, other: Chosen) -> bool:
    """Whether every layer is the same in both."""
    return [choice.config for choice in chosen.choices] == [choice.config for choice in other.choices]
