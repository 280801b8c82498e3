"""Candidates for a proof, made without a model."""

from collections import Counter
from pathlib import Path

import torch

from calibrate.curves.curves import TAUS, Curve, Ranking
from calibrate.proof.candidate import Candidate
from calibrate.proof.verify import LayerProof, LengthProof
from calibrate.recipe import Budget, Recipe
from calibrate.search.allocate import allocate
from calibrate.search.choose import Chosen
from calibrate.search.study import Choice
from s2o_runtime.config import TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.identity import Geometry

LENGTHS, CHECKS = (512, 1024, 2048), (768, 1536)
RECIPE = Recipe("m", Budget("mse", 1e-4), LENGTHS, Path("p"), segments=(256,), check_lengths=CHECKS).validate()
LIMITS = {length: [1e-4 * (index + 1), 2e-4 * (index + 1)] for index, length in enumerate(LENGTHS)}


def choice(budget):
    """A layer of two heads whose error grows with tau, and whose density falls."""
    mse = torch.tensor([[1e-7 * tau, 3e-7 * tau] for tau in TAUS], dtype=torch.float64).T
    density = torch.linspace(0.9, 0.2, len(TAUS), dtype=torch.float64).expand(2, -1)
    curves = {Ranking(256): Curve(mse, 2 * mse, torch.zeros_like(mse), torch.zeros_like(mse), density, 1.0)}
    return Choice(256, 1, TileConfig(), curves, budget, allocate(curves, budget))


def candidate(kind="cpu"):
    chosen = {
        length: Chosen([choice(0.8 * limit) for limit in limits], limits, [[0, 1]], Counter(), (1,))
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


def proof_of(error):
    return LayerProof(error, 1.0, 0.5, 0.0)


def proofs_of(begun, needles=None, seconds=0.1):
    """Every layer within its limit."""
    return {
        length: LengthProof(
            tuple(proof_of(begun.limits[length, layer]) for layer in range(2)), 0.0, 1.0, needles, seconds, 0.1
        )
        for length in begun.lengths
    }
