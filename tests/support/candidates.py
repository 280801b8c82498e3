"""Candidates for a proof, made without a model."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from calibrate.curves.curves import TAUS, Curve, RankingConfig
from calibrate.proof.state import Candidate
from calibrate.proof.verify import LayerProof, LengthProof
from calibrate.recipe import Budget, Recipe
from calibrate.search.allocate import Allocation, SearchConstraints
from calibrate.search.choice import LayerBudget, LayerPlan, SearchPoint
from calibrate.search.choose import SearchResult
from s2o_runtime.config import TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.identity import Geometry

LENGTHS, CHECKS = (512, 1024, 2048), (768, 1536)
RECIPE = Recipe("m", Budget("mse", 1e-4), LENGTHS, Path("p"), segments=(256,), check_lengths=CHECKS).validate()
LIMITS = {length: [1e-4 * (index + 1), 2e-4 * (index + 1)] for index, length in enumerate(LENGTHS)}
SLOPES = 1e-7, 3e-7  # of the error of each head, with tau
PROMPTS = dict.fromkeys(sorted((*LENGTHS, *CHECKS)), ())


def curve_of(slopes=SLOPES):
    """A layer's curve: of heads whose error grows with tau, and whose density falls."""
    mse = torch.tensor([[slope * tau for tau in TAUS] for slope in slopes], dtype=torch.float64)
    density = torch.linspace(0.9, 0.2, len(TAUS), dtype=torch.float64).expand(len(slopes), -1)
    return Curve(mse, 2 * mse, torch.zeros_like(mse), torch.zeros_like(mse), density, 1.0)


def choice(limit):
    """A layer of two such heads."""
    curves = {RankingConfig(256): curve_of()}
    budget = LayerBudget(limit, 0.8 * limit, SearchConstraints())
    return LayerPlan(SearchPoint(256, TileConfig()), curves, budget, Allocation(())).spending(budget.mse)


def candidate(kind="cpu"):
    chosen = {
        length: SearchResult([choice(limit) for limit in limits], limits, [[0, 1]], Counter(), tried=(1,))
        for length, limits in LIMITS.items()
    }
    geometry = Geometry("llama", layers=2, query_heads=2, kv_heads=1, head_dim=64)
    return Candidate(
        recipe=RECIPE,
        model_name="m",
        geometry=geometry,
        fingerprint="0" * 64,
        device=DeviceIdentity(kind, "pretended"),
        chosen=chosen,
    )


def proof_of(error, factors=(0.95, 1.0, 1.05, 1.0), worst=0.0, kinds=None):
    """A layer's on prompts whose errors are these times the mean."""
    of_prompts = tuple((error * factor, 1.0) for factor in factors)
    return LayerProof(error, 1.0, 0.5, worst, of_prompts=of_prompts, kinds=kinds or ("text",) * len(factors))


def with_proofs(begun, changes=None):
    """The candidate with every layer within its limit, and changes of the proofs by length."""
    proofs = {}
    for length in begun.lengths:
        layers = tuple(proof_of(begun.limits[length, layer]) for layer in range(2))
        proof = LengthProof(layers, 0.0, 1.0, None, 0.1, 0.1)
        proofs[length] = replace(proof, **changes[length]) if changes and length in changes else proof
    return replace(begun, proofs=proofs)


def error_of(config, slopes=SLOPES):
    """The mean squared error that `curve_of` predicts of a layer."""
    error = 0.0
    for slope, head in zip(slopes, config.heads, strict=True):
        if head.mode == "s2o":
            error += slope * head.tau * (2 if head.tail == "mean" else 1)
    return error / len(slopes)
