"""What a profile's record says, measured again on this machine: its proof, or its certificate on other text.

The proof is of the prompts that layers were adjusted on. On another GPU than the profile's, what is proven is what
would run there: its thresholds with tiles of this GPU. Where a certificate is checked, nothing is chosen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from calibrate.model.models import LoadedModel, load, load_config
from calibrate.model.preflight import Preflight, preflight
from calibrate.profiles.stored import check_sizes, recipe_of
from calibrate.progress import progress_bar
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.prompts import load_prompts
from calibrate.proof.adjust import lost_needles, over_limit
from calibrate.proof.bounds import CONFIDENCE, excess_probability, mean_lower_bound
from calibrate.proof.certify import FEWEST, Groups, Scale, retrieval_of
from calibrate.proof.layers import Configured
from calibrate.proof.verify import LayerProof, LengthProof, Progress, prove
from calibrate.recipe import OPTIONS, Recipe
from calibrate.record import CertifiedLength, CertifiedRetrieval, read_record
from s2o_runtime.errors import InputError
from s2o_runtime.fields import counted
from s2o_runtime.identity import fingerprint_mismatch, geometry
from s2o_runtime.profile import Profile, load_profile
from s2o_runtime.profile.profile import fitted
from s2o_runtime.profile.record import get_list, read_limits


@dataclass(frozen=True)
class Opened:
    """A profile that can be measured here, the recipe that made it, and its model.

    prompts: files and folders to draw prompts from instead of the recipe's text; None is what the recipe says.
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
    before_loading: Callable[[Recipe, Preflight], object] = lambda recipe, preflight: None,
) -> Opened:
    """Open a profile and the model it is of.

    Args:
        model: alias, local folder or hub id.
        path: the profile's file.
        device: Torch's name of the device to measure on.
        prompts: files and folders to draw prompts from instead of the recipe's text; None is what the recipe says.
        chunk: tokens that layers are fed at once instead of the recipe's; None is what the recipe says.
        needs_certificate: whether a profile without one is refused, before anything is loaded.
        trust_remote_code: whether code that comes with the model may run; what the recipe says does not count, because
            a profile may be another's.
        tokenizer: the folder or hub id of a tokenizer in place of the model's; the recipe's does not count.
        before_loading: called with what is known of the model once its sizes fit, before its weights are loaded.

    Raises:
        ModelError: The model cannot be loaded.
        ProfileError: The profile cannot be read.
        InputError: Its record does not say how it was made, it is of another model, this device cannot run it, or it
            has no certificate.
    """
    profile = load_profile(path)
    if needs_certificate and not certified_lengths(profile):
        raise InputError(f"{path} is not certified, so there is nothing to compare with: leave --seed out")
    recipe = replace(recipe_of(profile, path), model=model, device=device)
    recipe = replace(recipe, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    recipe = recipe if chunk is None else replace(recipe, chunk=chunk)
    if needs_certificate:
        recipe = replace(recipe, num_certify=recipe.num_certify or OPTIONS["num_certify"].default)
    if recipe.scope == "model" and not get_list(profile.record, "held_out", dict):
        raise InputError(f"{path} does not say what each layer may have of the model's budget: calibrate with it")
    profile, rejected = fitted(profile, torch.device(device))
    if rejected is not None:
        raise InputError(f"{path} cannot be proven here: {rejected}")
    config = load_config(model, random_weights=True, trust_remote_code=trust_remote_code)  # an alias's sizes ship
    check_sizes(profile, path, model, geometry(config))
    random = recipe.random_weights
    before_loading(recipe, preflight(model, config, device=device, lengths=recipe.lengths, random_weights=random))
    loaded = load(model, device, seed=recipe.seed, **recipe.loading)
    if mismatch := fingerprint_mismatch(loaded.fingerprint, profile.fingerprint):
        raise InputError(f"{path} is not of {model}: {mismatch} of the profile: calibrate this model")
    return Opened(profile, recipe, loaded, prompts)


def certified_lengths(profile: Profile) -> dict[int, CertifiedLength]:
    """What a profile's record certifies, by length in tokens; nothing without a certificate."""
    return {one.length: one for one in read_record(profile).certified_lengths if one.length is not None}


@dataclass(frozen=True)
class Verified:
    """A proof that was made again.

    lengths: for each length what the prompts say of the model and, under "layers", of each layer: its error and its
    limit in the budget's unit, its rel_mse, which limit binds (`Recipe.binds`), its density, and whether it is dense.
    problems: one sentence each, none if the proof holds. same_prompts: whether the prompts are those in the profile's
    record.
    """

    lengths: list[dict[str, Any]]
    problems: list[str]
    same_prompts: bool


def verified(opened: Opened, *, progress: bool = False) -> Verified:
    """Make the proof of a profile again, on the prompts that its recipe adjusted layers on, or on other text."""
    profile, recipe = opened.profile, on_other_text(opened.recipe, opened.prompts)
    data = load_prompts(recipe, opened.loaded.tokenizer)
    with _bar("proving", opened, len(data.held_out), progress) as step:
        _, proofs = prove(
            opened.loaded, data.held_out, profile, progress=Progress(step), timed=False, chunk=recipe.chunk
        )
    lengths = [_compared(profile, recipe, length, proof) for length, proof in sorted(proofs.items())]
    problems = [
        over_limit(row["length"], layer["layer"], layer["error"], layer["limit"])
        for row in lengths
        for layer in row["layers"]
        if not (layer["error"] <= layer["limit"] or layer["dense"])  # also where it is no number
    ]
    problems += lost_needles(proofs, recipe)
    recorded = read_record(profile).data
    same_prompts = recorded is not None and data.record().held_out == recorded.held_out
    return Verified(lengths, list(map(str, problems)), same_prompts)


def _bar(title: str, opened: Opened, lengths: int, shown: bool) -> AbstractContextManager[Callable[..., None]]:
    """A progress bar of every layer at so many lengths."""
    return progress_bar(title, opened.loaded.geometry.layers * lengths, "layer", shown=shown)


def on_other_text(recipe: Recipe, prompts: tuple[Path, ...] | None) -> Recipe:
    """The recipe with other files and folders as its prompts; None leaves it as it is."""
    return recipe if prompts is None else replace(recipe, prompts=prompts, domains=None)


def _compared(profile: Profile, recipe: Recipe, length: int, proof: LengthProof) -> dict[str, Any]:
    """One length's new proof beside the limits in the record.

    A layer without one there has what the budget allows it for a limit.
    """

    def limit(index: int, layer: LayerProof) -> float:
        return read_limits(profile.record, index).get(length, recipe.budget.limit(layer.dense_power))

    return {
        "length": length,
        "kl": proof.kl,
        "top1": proof.top1,
        "needles": proof.needles,
        "layers": [
            {
                "layer": profile.geometry.layer_number(index),
                "error": layer.held(recipe),
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
class LengthRecertified:
    """What fresh prompts of one length say of what is certified.

    means: the largest mean error of a layer over its limit. broken: how many layers' means are over it by more than
    chance explains. groups: of text, which are what is counted. above: how many groups have a prompt outside the joint
    limit. chance: how likely so many or more are if the certificate is right. retrieval: None if the prompts ask for no
    needles. problems: one sentence each.
    """

    length: int
    prompts: int
    groups: int
    means: float
    broken: int
    above: int
    chance: float
    mean_kl: float
    retrieval: CertifiedRetrieval | None
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Recertified:
    """A certificate that was checked on fresh prompts. problems: one sentence each; none if it holds."""

    lengths: tuple[LengthRecertified, ...]
    problems: tuple[str, ...]


def recertified(opened: Opened, seed: int, *, progress: bool = False) -> Recertified:
    """Check each claim of a profile's certificate on prompts drawn with another seed, or from other files.

    A claim is broken if fresh prompts contradict it beyond chance, at 5%: for the layers' means that is at all of them
    together.

    Args:
        opened: a profile with a certificate.
        seed: what draws the prompts.
        progress: whether to show a progress bar.

    Raises:
        InputError: There are too few fresh prompts.
    """
    profile, recipe = opened.profile, opened.recipe
    certified = certified_lengths(profile)
    fresh = fresh_prompts(opened, replace(recipe, seed=seed))
    for length in certified:
        if len(groups := Groups.of(fresh.get(length, ()))) < FEWEST:
            raise InputError(
                f"there are fresh prompts of {counted(len(groups), 'group')} of text of {length} tokens, expected at "
                f"least {FEWEST}: give another --seed, or --prompts with more text"
            )
    seen = {}
    with _bar("certifying", opened, len(certified), progress) as step:
        for length in certified:
            prompts, each = {length: fresh[length]}, Progress(step, "certifying")
            _, proofs = prove(opened.loaded, prompts, profile, progress=each, timed=False, chunk=recipe.chunk)
            seen[length] = proofs[length]
    return compared(profile, recipe, certified, seen)


def compared(
    profile: Configured, recipe: Recipe, certified: Mapping[int, CertifiedLength], seen: Mapping[int, LengthProof]
) -> Recertified:
    """A certificate beside what fresh prompts showed.

    Args:
        profile: whose layers are not compared where they are dense.
        recipe: has the unit of errors.
        certified, seen: what is certified and what was measured, by length in tokens.
    """
    layers = sum(len(proof.layers) for proof in seen.values())
    lengths = tuple(
        _compared_length(profile, recipe, certified[length], seen[length], (1 - CONFIDENCE) / max(1, layers))
        for length in certified
    )
    return Recertified(lengths, tuple(problem for length in lengths for problem in length.problems))


def _compared_length(
    profile: Configured, recipe: Recipe, stated: CertifiedLength, seen: LengthProof, risk: float
) -> LengthRecertified:
    """One length; risk: that one layer's mean is taken for too large by chance (Bonferroni)."""
    length, groups = stated.length or 0, Groups.of(seen.prompts)
    limits = tuple(
        None if profile.layer_config(layer, length).is_dense else entry.limit
        for layer, entry in enumerate(stated.layers or ())
    )
    scale = Scale(recipe, limits, stated.kl / (stated.error_over_limit or 1.0) if stated.kl else math.inf)
    problems, broken = [], 0
    for layer, (proof, limit) in enumerate(zip(seen.layers, limits, strict=True)):
        errors = groups.means(proof.errors(recipe.budget))
        if limit and mean_lower_bound(errors, groups.kinds, 1 - risk) > limit:
            broken += 1
            mean = statistics.fmean(errors)
            problems.append(f"layer {layer} at {length} tokens: its mean error is {mean:.2e}, its limit {limit:.2e}")
    above, chance = 0, 1.0
    if stated.share is not None and stated.error_over_limit is not None:
        above = scale.above(seen, stated.error_over_limit)
        chance = excess_probability(above, len(groups), stated.share)
    if chance < 1 - CONFIDENCE:
        problems.append(
            f"at {length} tokens {above} of {len(groups)} groups of text have a prompt with an error over "
            f"{stated.error_over_limit:.2f} times its limit or a KL over {stated.kl or 0:.1e}, which chance gives in "
            f"{chance:.1%} of cases"
        )
    before, now = stated.retrieval, retrieval_of(seen)
    if before and before.low is not None and now and now.found and now.high is not None and now.high < before.low:
        problems.append(
            f"at {length} tokens {now.kept} of {now.found} needles are kept, at least {before.low:.0%} is certified"
        )
    means = max(scale.means(seen), default=0.0)
    return LengthRecertified(
        length, len(seen.prompts), len(groups), means, broken, above, chance, seen.kl, now, tuple(problems)
    )


def fresh_prompts(opened: Opened, recipe: Recipe) -> dict[int, list[Prompt]]:
    """The certify prompts of a recipe, by length in tokens, without those that took part in the profile.

    Args:
        opened: the profile, whose record names what took part, its model, and where prompts are drawn from.
        recipe: what to draw: the lengths, how many prompts and the seed, and the kinds of text.
    """
    drawn = on_other_text(recipe, opened.prompts)
    if opened.prompts is not None:  # of the user's text as much as possible is for the certificate
        drawn = replace(drawn, num_prompts=1, held_out=1)
    recorded = read_record(opened.profile).data
    parts = (recorded.calibration, recorded.held_out, recorded.certify) if recorded else ()
    seen = {prompt.sha256 for part in parts for prompt in part or ()}
    return {
        length: [prompt for prompt in length_prompts if prompt.sha256 not in seen]
        for length, length_prompts in load_prompts(drawn, opened.loaded.tokenizer).certify.items()
    }
