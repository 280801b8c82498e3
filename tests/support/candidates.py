"""Candidates for a proof, made without a model."""

from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch

from calibrate.curves.curves import TAUS, Curve, RankingConfig
from calibrate.proof.state import Candidate
from calibrate.proof.verify import LayerProof, LengthProof, PromptErrors
from calibrate.recipe import Budget, Recipe
from calibrate.search.allocate import allocate
from calibrate.search.choice import LayerPlan, SearchPoint
from calibrate.search.choose import SearchResult
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
    curves = {RankingConfig(256): Curve(mse, 2 * mse, torch.zeros_like(mse), torch.zeros_like(mse), density, 1.0)}
    return LayerPlan(SearchPoint(256, TileConfig()), curves, budget, allocate(curves, budget))


def candidate(kind="cpu"):
    chosen = {
        length: SearchResult([choice(0.8 * limit) for limit in limits], limits, [[0, 1]], Counter(), (1,))
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


def proof_of(error, factors=(0.95, 1.0, 1.05, 1.0), worst=0.0, last=1.0, kinds=None):
    """A layer's on prompts whose errors are these times the mean; over the rows that answer `last` times those."""
    of_prompts = tuple(PromptErrors((error * factor, 1.0), (last * error * factor, 1.0)) for factor in factors)
    return LayerProof(error, 1.0, 0.5, worst, of_prompts=of_prompts, kinds=kinds or ("text",) * len(factors))


def proofs_of(begun, needles=None, seconds=0.1):
    """Every layer within its limit."""
    return {
        length: LengthProof(
            tuple(proof_of(begun.limits[length, layer]) for layer in range(2)), 0.0, 1.0, needles, seconds, 0.1
        )
        for length in begun.lengths
    }


def error_of(config):
    """The mean squared error that the curves of `choice` predict of a layer."""
    slopes = zip((1e-7, 3e-7), config.heads, strict=True)
    return sum(slope * head.tau * (2 if head.tail == "mean" else 1) for slope, head in slopes if head.mode == "s2o") / 2


class PretendedProver:
    """Proves as `verify.Prover` does, without a model: layers have the errors that curves predict, or other ones.

    Args:
        error: Of a layer, from (candidate, length, layer).
        needles: Kept and found, from (candidate, length); None where no prompt asks for one.
        seconds: Of the prefill, from (candidate, length); the dense one takes 0.1.

    Attributes:
        attempts: (lengths, candidate) that each proof began with.
    """

    def __init__(
        self,
        error=lambda candidate, length, layer: error_of(candidate.layer_config(layer, length)),
        needles=lambda candidate, length: None,
        seconds=lambda candidate, length: 0.1,
    ):
        self._error, self._needles, self._seconds = error, needles, seconds
        self.attempts = []

    @contextmanager
    def show_progress(self, title, lengths):
        yield self

    def prove(self, candidate, prompts, revise=None):
        self.attempts.append((sorted(prompts), candidate))
        layers = {length: [] for length in prompts}
        for layer in range(candidate.geometry.layers):
            for length, proofs in layers.items():
                revised = candidate
                while revised is not None:
                    candidate, proof = revised, self._layer(revised, length, layer)
                    revised = revise and revise(candidate, length, layer, proof)
                proofs.append(proof)
        return candidate, {
            length: LengthProof(
                tuple(proofs), 0.0, 1.0, self._needles(candidate, length), self._seconds(candidate, length), 0.1
            )
            for length, proofs in layers.items()
        }

    def _layer(self, candidate, length, layer):
        return proof_of(self._error(candidate, length, layer), (0.95, 1.05))
