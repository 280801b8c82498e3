"""A profile's certificate, checked on text that took no part in it: nothing is chosen, and there is no ladder."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calibrate.prompts.prompt import Prompt
from calibrate.prompts.prompts import load_prompts
from calibrate.proof.certificate import CONFIDENCE, FEWEST, retrieval_of
from calibrate.proof.reprove import ToProve, on_other_text, to_prove
from calibrate.proof.sample import LayerSample, LengthSample, sample
from calibrate.proof.statistics import exceedance_probability, mean_lower_bound
from calibrate.proof.verify import Configured
from calibrate.recipe import OPTIONS, Budget, Recipe
from s2o_runtime.errors import InputError
from s2o_runtime.profile import load_profile
from s2o_runtime.profile.record import CertifiedLayer, CertifiedLength, CertifiedRetrieval


@dataclass(frozen=True)
class Compared:
    """One certified bound for a mean and the mean of fresh prompts, in the budget's unit.

    what: Of which rows, in words. low: A lower bound for the mean; a bound below it is broken. Of all comparisons of a
    profile together, a wrong one is made with a probability of at most 5%.
    """

    layer: int
    what: str
    bound: float
    mean: float
    low: float

    @property
    def broken(self) -> bool:
        return self.low > self.bound


@dataclass(frozen=True)
class LengthRecertified:
    """One length on fresh prompts.

    bounds: Every bound of layers that are not dense. kl_bound: What is certified of the next prompt's KL. kl_above: How
    many of the fresh prompts are above it. kl_chance: How likely so many or more are if the certificate is right.
    retrieval: None if the prompts ask for no needles.
    """

    length: int
    prompts: int
    bounds: tuple[Compared, ...]
    mean_kl: float
    kl_bound: float | None
    kl_above: int
    kl_chance: float
    retrieval: CertifiedRetrieval | None


@dataclass(frozen=True)
class Recertified:
    """A certificate that was checked on fresh prompts. problems: One sentence each; none if it holds."""

    lengths: tuple[LengthRecertified, ...]
    problems: tuple[str, ...]


def recertified(
    model: str,
    path: Path,
    device: str,
    seed: int,
    prompts: tuple[Path, ...] | None = None,
    chunk: int | None = None,
    *,
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
) -> Recertified:
    """Check a profile's certificate on prompts drawn with another seed, or from other files.

    A bound is broken if a lower bound for the mean over the fresh prompts is above it: a mean that is above it by
    chance alone is none. What is certified of single prompts is broken if more of them exceed it than chance explains.

    Args:
        model: Alias, local folder or hub id.
        path: The profile's file.
        device: Torch's name of the device to measure on.
        seed: What draws the prompts.
        prompts: Files and folders to draw from instead of the recipe's text; None is what the recipe says.
        chunk: Tokens that layers are fed at once instead of the recipe's; None is what the recipe says.
        trust_remote_code: Whether code that comes with the model may run, whatever the recipe says.
        tokenizer: The folder or hub id of a tokenizer in place of the model's, whatever the recipe says.

    Raises:
        ModelError: The model cannot be loaded.
        ProfileError: The profile cannot be read.
        InputError: It has no certificate, it cannot be proven here, or there are too few fresh prompts.
    """
    certified = load_profile(path).record.certificate
    lengths = {entry.length: entry for entry in (certified and certified.lengths) or () if entry.length is not None}
    if not lengths:
        raise InputError(f"{path} is not certified, so there is nothing to compare with: leave --seed out")
    opened = to_prove(model, path, device, trust_remote_code=trust_remote_code, tokenizer=tokenizer)
    count = opened.recipe.num_certify or OPTIONS["num_certify"].default
    fresh = fresh_prompts(opened, replace(opened.recipe, seed=seed, num_certify=count), prompts)
    for length in lengths:
        if len(fresh.get(length, ())) < FEWEST:
            raise InputError(
                f"there are {len(fresh.get(length, ()))} fresh prompts of {length} tokens, expected at least {FEWEST}: "
                "give another --seed, or --prompts with more text"
            )
    chunk = opened.recipe.chunk if chunk is None else chunk
    samples = {
        length: sample(opened.loaded, length, fresh[length], opened.profile, chunk=chunk)[1] for length in lengths
    }
    return compared(opened.profile, opened.recipe.budget, lengths, samples)


def compared(
    profile: Configured, budget: Budget, certified: Mapping[int, CertifiedLength], samples: Mapping[int, LengthSample]
) -> Recertified:
    """A certificate beside what fresh prompts showed.

    Args:
        profile: Whose layers are not compared where they are dense.
        budget: The unit of errors.
        certified, samples: What is certified and what was measured, by length in tokens.
    """
    bounds = {
        length: [
            (layer, *bound)
            for layer, (entry, seen) in enumerate(zip(certified[length].layers or (), of_length.layers, strict=False))
            if not profile.layer_config(layer, length).is_dense
            for bound in bounds_and_errors(entry, seen, budget)
        ]
        for length, of_length in samples.items()
    }
    confidence = 1 - (1 - CONFIDENCE) / max(1, sum(map(len, bounds.values())))  # Bonferroni
    lengths = tuple(
        _length(
            length,
            certified[length],
            samples[length],
            tuple(
                Compared(layer, what, bound, statistics.fmean(errors), mean_lower_bound(errors, confidence))
                for layer, what, bound, errors in of_length
            ),
        )
        for length, of_length in bounds.items()
    )
    return Recertified(lengths, tuple(problem for length in lengths for problem in _problems(length, certified)))


def fresh_prompts(opened: ToProve, recipe: Recipe, prompts: tuple[Path, ...] | None) -> dict[int, list[Prompt]]:
    """The certify prompts of a recipe, by length in tokens, without those that took part in the profile.

    Args:
        opened: The profile, whose record names what took part, and its model.
        recipe: What to draw: the lengths, how many prompts and the seed, and the kinds of text.
        prompts: Files and folders to draw from instead; None is what the recipe says.
    """
    drawn = on_other_text(recipe, prompts)
    if prompts is not None:  # of the user's text as much as possible is for the certificate
        drawn = replace(drawn, num_prompts=1, held_out=1)
    recorded = opened.profile.record.data
    parts = (recorded.calibration, recorded.held_out, recorded.certify) if recorded else ()
    seen = {prompt.sha256 for part in parts for prompt in part or ()}
    return {
        length: [prompt for prompt in of_length if prompt.sha256 not in seen]
        for length, of_length in load_prompts(drawn, opened.loaded.tokenizer).certify.items()
    }


def bounds_and_errors(
    certified: CertifiedLayer, seen: LayerSample, budget: Budget
) -> Iterator[tuple[str, float, Sequence[float]]]:
    """What is certified of a layer: of which rows, the bound, and the errors of the fresh prompts."""
    continued = {one.new_tokens: one.bound for one in certified.continued or ()}
    pairs = [("all rows", certified.bound, seen.errors(budget))]
    pairs += [("the last eighth", certified.bound_last, seen.last_errors(budget))]
    pairs += [
        (f"{new_tokens} new tokens", continued.get(new_tokens), errors)
        for new_tokens, errors in seen.continued_errors(budget).items()
    ]
    for what, bound, errors in pairs:
        if bound is not None:
            yield what, bound, errors


def _length(
    length: int, certified: CertifiedLength, seen: LengthSample, bounds: tuple[Compared, ...]
) -> LengthRecertified:
    kls = [max(0.0, agreement.kl) for agreement in seen.agreements]
    bound, probability = (certified.kl.value, certified.kl.probability) if certified.kl else (None, None)
    count = certified.prompts or 0
    if bound is None or probability is None or not count:
        above, chance = 0, 1.0
    else:
        above = sum(kl > bound for kl in kls)
        chance = exceedance_probability(above, len(kls), max(1, round((1 - probability) * (count + 1))), count)
    return LengthRecertified(
        length=length,
        prompts=len(kls),
        bounds=bounds,
        mean_kl=statistics.fmean(kls),
        kl_bound=bound,
        kl_above=above,
        kl_chance=chance,
        retrieval=retrieval_of(seen),
    )


def _problems(fresh: LengthRecertified, certified: Mapping[int, CertifiedLength]) -> Iterator[str]:
    for one in fresh.bounds:
        if one.broken:
            yield (
                f"layer {one.layer} at {fresh.length} tokens, {one.what}: its mean error is {one.mean:.2e}, "
                f"{one.bound:.2e} is certified"
            )
    if fresh.kl_bound is not None and fresh.kl_chance < 1 - CONFIDENCE:
        yield (
            f"at {fresh.length} tokens the KL of {fresh.kl_above} of {fresh.prompts} prompts is above the certified "
            f"{fresh.kl_bound:.1e}, which chance gives in {fresh.kl_chance:.1%} of cases"
        )
    before, now = certified[fresh.length].retrieval, fresh.retrieval
    if before and before.low is not None and now and now.found and now.high is not None and now.high < before.low:
        yield (
            f"at {fresh.length} tokens {now.kept} of {now.found} needles are kept, at least {before.low:.0%} is "
            "certified"
        )
