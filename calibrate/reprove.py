"""The held-out proof of a profile, made again on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from calibrate.models import load, load_tokenizer
from calibrate.pipeline import lost_needles, over_limit
from calibrate.prompts import load_prompts
from calibrate.rebudget import recipe_of
from calibrate.summary import at, column, entry
from calibrate.verify import prove
from s2o_runtime.errors import InputError
from s2o_runtime.gpu import Rejected, fit, identify
from s2o_runtime.profile import load_profile


@dataclass(frozen=True)
class Verified:
    """A proof made again. layers: length, layer, error, limit; problems: one sentence each, none if it holds;
    same_prompts: whether the prompts are those in the profile's record."""

    lengths: list[dict[str, Any]]
    problems: list[str]
    same_prompts: bool


def verified(model: str, path: Path, device: str, prompts: Path | None = None) -> Verified:
    """The held-out proof of a profile, as its recipe has it, of `model` on `device`.

    Raises InputError if its record does not say how it was made, if it is of another model or its tiles of another GPU.
    """
    profile = load_profile(path)
    recipe = replace(recipe_of(profile, path), model=model, device=device)
    recipe = replace(recipe, prompts=prompts or recipe.prompts)
    if recipe.scope == "model" and not at(profile.record, "held_out"):
        raise InputError(f"{path} does not say what each layer may have of the model's budget: calibrate with it")
    verdict = fit(profile.device, identify(torch.device(device)))
    if isinstance(verdict, Rejected) or verdict.tiles != "profile":
        raise InputError(f"{path} cannot be proven here: {verdict.reason}")
    data = load_prompts(recipe, load_tokenizer(model, random_weights=recipe.random_weights))
    loaded = load(model, device, random_weights=recipe.random_weights, seed=recipe.seed)
    difference = loaded.geometry.difference(profile.geometry)
    if difference or loaded.fingerprint != profile.fingerprint:
        raise InputError(f"{path} is not of {model}, which has {difference or 'other weights'}: calibrate this model")
    proofs = prove(
        loaded, data.held_out, lambda length, layer: profile.layer_config(layer, length), lambda *_: None, lambda: None
    )
    lengths: list[dict[str, Any]] = []
    for length, proof in sorted(proofs.items()):
        recorded = column(entry(profile, "held_out", length), "limit")
        limits = recorded if len(recorded) == len(proof.layers) else [None] * len(proof.layers)
        layers = [
            {
                "layer": index,
                "error": layer.error(recipe.budget),
                "limit": recipe.budget.value if limit is None else limit,
                "density": layer.density,
                "dense": profile.layer_config(index, length).is_dense,
            }
            for index, (layer, limit) in enumerate(zip(proof.layers, limits, strict=True))
        ]
        lengths.append(
            {"length": length, "kl": proof.kl, "top1": proof.top1, "needles": proof.needles, "layers": layers}
        )
    problems = [
        over_limit(length["length"], layer["layer"], layer["error"], layer["limit"])
        for length in lengths
        for layer in length["layers"]
        if layer["error"] > layer["limit"] and not layer["dense"]
    ]
    problems += lost_needles(proofs, recipe).values()
    same = data.record()["held_out"] == at(profile.record, "data", "held_out")
    return Verified(lengths, problems, same)
