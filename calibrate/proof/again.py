"""What a profile's record says, measured again on this machine: its proof, or its certificate on other text.

The proof is of the prompts that layers were adjusted on. On another GPU than the profile's, what is proven is what
would run there: its thresholds with tiles of this GPU. Where a certificate is checked, nothing is chosen, and there is
no ladder.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from calibrate.model.models import LoadedModel, load
from calibrate.profiles.stored import recipe_of
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.prompts import load_prompts
from calibrate.proof.bounds import CONFIDENCE, exceedance_probability, mean_lower_bound
from calibrate.proof.certify import FEWEST, retrieval_of
from calibrate.proof.judge import kl_over_budget, lost_needles, over_limit
from calibrate.proof.layers import Configured
from calibrate.proof.sample import LayerSample, LengthSample, sample
from calibrate.proof.verify import LayerProof, LengthProof, prove
from calibrate.recipe import OPTIONS, Budget, Recipe
from s2o_runtime.errors import InputError
from s2o_runtime.identity import fingerprint_mismatch
from s2o_runtime.profile import Profile, load_profile
from s2o_runtime.profile.device_fit import fitted
from s2o_runtime.profile.record import CertifiedLayer, CertifiedLength, CertifiedRetrieval


@dataclass(frozen=True)
class Opened:
    """A profile that can be measured here, the recipe that made it, and its model.

    prompts: Files and folders to draw prompts from instead of the recipe's text; None is what the recipe says.
    """

    profile: Profile
    recipe: Recipe
    loaded: LoadedModel
    prompts: tuple[Path, ...] | None


def opened(
    model: str,
    path: Path,
    device: str,
    prompts: tuple[Path, ...] | None = None,
    chunk: int | None = None,
    *,
    needs_certificate: bool = False,
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
) -> Opened:
    """Open a profile and the model it is of.

    Args:
        model: Alias, local folder or hub id.
        path: The profile's file.
        device: Torch's name of the device to measure on.
        prompts: Files and folders to draw prompts from instead of the recipe's text; None is what the recipe says.
        chunk: Tokens that layers are fed at once instead of the recipe's; None is what the recipe says.
        needs_certificate: Whether a profile without one is refused, before anything is loaded.
        trust_remote_code: Whether code that comes with the model may run; what the recipe says does not count, because
            a profile may be another's.
        tokenizer: The folder or hub id of a tokenizer in place of the model's; the recipe's does not count.

    Raises:
        ModelError: The model cannot be loaded.
        ProfileError: The profile cannot be read.
        InputError: Its record does not say how it was made, it is of another model, this device cannot run it, or it
            has no certificate.
    """
    profile = load_profile(path)
    if needs_certificate and not certified_lengths(profile):
        raise InputError(f"{path} is not certified, so there is nothing to compare with: leave --seed out")
    recipe = replace(recipe_of(profile, path), model=model, device=device, tokenizer=tokenizer)
    recipe = recipe if chunk is None else replace(recipe, chunk=chunk)
    if recipe.scope == "model" and not profile.record.held_out:
        raise InputError(f"{path} does not say what each layer may have of the model's budget: calibrate with it")
    profile, rejected = fitted(profile, torch.device(device))
    if rejected is not None:
        raise InputError(f"{path} cannot be proven here: {rejected}")
    loaded = load(
        model,
        device,
        random_weights=recipe.random_weights,
        seed=recipe.seed,
        trust_remote_code=trust_remote_code,
        tokenizer=tokenizer,
    )
    if difference := loaded.geometry.difference(profile.geometry):
        raise InputError(f"{path} is not of {model}, which has {difference}: calibrate this model")
    if mismatch := fingerprint_mismatch(loaded.fingerprint, profile.fingerprint):
        raise InputError(f"{path} is not of {model}: {mismatch} that were calibrated: calibrate this model")
    return Opened(profile, recipe, loaded, prompts)


def certified_lengths(profile: Profile) -> dict[int, CertifiedLength]:
    """What a profile's record certifies, by length in tokens; nothing without a certificate."""
    return {one.length: one for one in profile.record.certified_lengths if one.length is not None}


@dataclass(frozen=True)
class Verified:
    """A proof that was made again.

    lengths: For each length what the prompts say of the model and, under "layers", of each layer: its error and its
    limit in the budget's unit, its rel_mse, which limit binds (`Recipe.binds`), its density, and whether it is dense.
    problems: One sentence each, none if the proof holds. same_prompts: Whether the prompts are those in the profile's
    record.
    """

    lengths: list[dict[str, Any]]
    problems: list[str]
    same_prompts: bool


def verified(opened: Opened) -> Verified:
    """Make the proof of a profile again, on the prompts that its recipe adjusted layers on, or on other text."""
    profile, recipe = opened.profile, on_other_text(opened.recipe, opened.prompts)
    data = load_prompts(recipe, opened.loaded.tokenizer)
    _, proofs = prove(opened.loaded, data.held_out, profile, chunk=recipe.chunk)
    lengths = [_compared(profile, recipe, length, proof) for length, proof in sorted(proofs.items())]
    problems = [
        over_limit(row["length"], layer["layer"], layer["error"], layer["limit"])
        for row in lengths
        for layer in row["layers"]
        if layer["error"] > layer["limit"] and not layer["dense"]
    ]
    problems += (*lost_needles(proofs, recipe), *kl_over_budget(proofs, recipe))
    recorded = profile.record.data
    same_prompts = recorded is not None and data.record().held_out == recorded.held_out
    return Verified(lengths, list(map(str, problems)), same_prompts)


def on_other_text(recipe: Recipe, prompts: tuple[Path, ...] | None) -> Recipe:
    """The recipe with other files and folders as its prompts; None leaves it as it is."""
    return recipe if prompts is None else replace(recipe, prompts=prompts, domains=None)


def _compared(profile: Profile, recipe: Recipe, length: int, proof: LengthProof) -> dict[str, Any]:
    """One length's new proof beside the limits in the record.

    A layer without one there has what the budget allows it for a limit; with a budget in KL it has none.
    """

    def limit(index: int, layer: LayerProof) -> float:
        default = math.inf if recipe.budget.is_kl else recipe.budget.limit(layer.dense_power)
        return profile.record.limits(index).get(length, default)

    return {
        "length": length,
        "kl": proof.kl,
        "top1": proof.top1,
        "needles": proof.needles,
        "layers": [
            {
                "layer": profile.geometry.layer_number(index),
                "error": layer.error(recipe.budget),
                "limit": limit(index, layer),
                "rel_mse": layer.rel_mse,
                "binds": recipe.binds(limit(index, layer)),
                "density": layer.density,
                "dense": profile.layer_config(index, length).is_dense,
            }
            for index, layer in enumerate(proof.layers)
        ],
    }


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


def recertified(opened: Opened, seed: int) -> Recertified:
    """Check a profile's certificate on prompts drawn with another seed, or from other files.

    A bound is broken if a lower bound for the mean over the fresh prompts is above it: a mean that is above it by
    chance alone is none. What is certified of single prompts is broken if more of them exceed it than chance explains.

    Args:
        opened: A profile with a certificate.
        seed: What draws the prompts.

    Raises:
        InputError: There are too few fresh prompts.
    """
    profile, recipe = opened.profile, opened.recipe
    lengths = certified_lengths(profile)
    count = recipe.num_certify or OPTIONS["num_certify"].default
    fresh = fresh_prompts(opened, replace(recipe, seed=seed, num_certify=count))
    for length in lengths:
        if len(fresh.get(length, ())) < FEWEST:
            raise InputError(
                f"there are {len(fresh.get(length, ()))} fresh prompts of {length} tokens, expected at least {FEWEST}: "
                "give another --seed, or --prompts with more text"
            )
    samples = {
        length: sample(opened.loaded, length, fresh[length], profile, chunk=recipe.chunk)[1] for length in lengths
    }
    return compared(profile, recipe.budget, lengths, samples)


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
                Compared(
                    layer,
                    what,
                    bound,
                    statistics.fmean(errors),
                    mean_lower_bound(errors, samples[length].kinds, confidence),
                )
                for layer, what, bound, errors in of_length
            ),
        )
        for length, of_length in bounds.items()
    )
    return Recertified(lengths, tuple(problem for length in lengths for problem in _problems(length, certified)))


def fresh_prompts(opened: Opened, recipe: Recipe) -> dict[int, list[Prompt]]:
    """The certify prompts of a recipe, by length in tokens, without those that took part in the profile.

    Args:
        opened: The profile, whose record names what took part, its model, and where prompts are drawn from.
        recipe: What to draw: the lengths, how many prompts and the seed, and the kinds of text.
    """
    drawn = on_other_text(recipe, opened.prompts)
    if opened.prompts is not None:  # of the user's text as much as possible is for the certificate
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
