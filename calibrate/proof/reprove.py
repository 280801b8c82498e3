"""The proof of a profile on the prompts that its layers were adjusted on, made again on this machine.

On another GPU than the profile's, what is proven is what would run there: its thresholds with tiles of this GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from calibrate.model.models import LoadedModel, load
from calibrate.profiles.stored import recipe_of
from calibrate.prompts.prompts import load_prompts
from calibrate.proof.problems import kl_over_budget, lost_needles, over_limit
from calibrate.proof.verify import LayerProof, LengthProof, prove
from calibrate.recipe import Recipe
from s2o_runtime.errors import InputError
from s2o_runtime.identity import fingerprint_mismatch
from s2o_runtime.profile import Profile, load_profile
from s2o_runtime.profile.device_fit import fitted


@dataclass(frozen=True)
class Verified:
    """A proof that was made again.

    lengths: for each length what the prompts say of the model and, under "layers", of each layer: its error and its
        limit in the budget's unit, its rel_mse, which limit binds (`Recipe.binds`), its density, and whether it is
        dense.
    problems: one sentence each, none if the proof holds.
    same_prompts: whether the prompts are those in the profile's record.
    """

    lengths: list[dict[str, Any]]
    problems: list[str]
    same_prompts: bool


def verified(
    model: str,
    path: Path,
    device: str,
    prompts: tuple[Path, ...] | None = None,
    chunk: int | None = None,
    *,
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
) -> Verified:
    """Make the proof of a profile again, on the prompts that its recipe adjusted layers on.

    Args:
        model: alias, local folder or hub id.
        path: the profile's file.
        device: torch's name of the device to prove it on.
        prompts: files and folders to prove on instead of the recipe's text; None is what the recipe says.
        chunk: tokens that layers are fed at once instead of the recipe's; None is what the recipe says.
        trust_remote_code: whether code that comes with the model may run; what the recipe says does not count, because
            a profile may be another's.
        tokenizer: the folder or hub id of a tokenizer in place of the model's; the recipe's does not count.

    Raises:
        ModelError: the model cannot be loaded.
        ProfileError: the profile cannot be read.
        InputError: its record does not say how it was made, it is of another model, or this device cannot run it.
    """
    opened = to_prove(model, path, device, trust_remote_code=trust_remote_code, tokenizer=tokenizer)
    profile, recipe = opened.profile, on_other_text(opened.recipe, prompts)
    recipe = recipe if chunk is None else replace(recipe, chunk=chunk)
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


@dataclass(frozen=True)
class ToProve:
    """A profile that can be proven here, the recipe that made it, and its model."""

    profile: Profile
    recipe: Recipe
    loaded: LoadedModel


def to_prove(
    model: str, path: Path, device: str, *, trust_remote_code: bool = False, tokenizer: str | None = None
) -> ToProve:
    """Open a profile and the model it is of; raises what `verified` does."""
    profile = load_profile(path)
    recipe = replace(recipe_of(profile, path), model=model, device=device, tokenizer=tokenizer)
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
    return ToProve(profile, recipe, loaded)


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
