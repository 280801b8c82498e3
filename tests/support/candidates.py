"""Candidates for a proof, made without a model."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
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
PROMPTS = dict.fromkeys(sorted((*LENGTHS, *CHECKS)), ())


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
    return Candidate(RECIPE, "m", geometry, "0" * 64, DeviceIdentity(kind, "pretended"), chosen)


def proof_of(error, factors=(0.95, 1.0, 1.05, 1.0), worst=0.0, last=1.0, kinds=None):
    """A layer's on prompts whose errors are these times the mean; over the rows that answer `last` times those."""
    of_prompts = tuple(PromptErrors((error * factor, 1.0), (last * error * factor, 1.0)) for factor in factors)
    return LayerProof(error, 1.0, 0.5, worst, of_prompts=of_prompts, kinds=kinds or ("text",) * len(factors))


def with_proofs(begun, changes=None, seconds=(None, None), slower=()):
    """Every layer within its limit.

    changes: of the proofs, by length. seconds: of every layer and dense; slower: those of some, by length and layer.
    """
    proofs = {}
    for length in begun.lengths:
        layers = [
            replace(
                proof_of(begun.limits[length, layer]),
                seconds=dict(slower).get((length, layer), seconds[0]),
                dense_seconds=seconds[1],
            )
            for layer in range(2)
        ]
        proofs[length] = replace(
            LengthProof(tuple(layers), 0.0, 1.0, None, 0.1, 0.1), **dict(changes or {}).get(length, {})
        )
    return replace(begun, proofs=proofs)


def error_of(config):
    """The mean squared error that the curves of `choice` predict of a layer."""
    slopes = zip((1e-7, 3e-7), config.heads, strict=True)
    return sum(slope * head.tau * (2 if head.tail == "mean" else 1) for slope, head in slopes if head.mode == "s2o") / 2


class PretendedProver:
    """Proves as `verify.Prover` does, without a model: layers have the errors that curves predict, or other ones.

    error: of a layer, from (candidate, length, layer). needles: kept and found, from (candidate, length). seconds: of
    the prefill and of layer 1's attention, from (candidate, length); the dense ones take 0.1.
    attempts: (lengths, candidate) that each proof began with.
    """

    executor = journal = None

    def __init__(self, error=None, needles=lambda *_: None, seconds=lambda *_: (0.1, None)):
        self._error = error or (lambda candidate, length, layer: error_of(candidate.layer_config(layer, length)))
        self._needles, self._seconds, self.attempts = needles, seconds, []

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
                    candidate, proof = revised, proof_of(self._error(revised, length, layer), (0.95, 1.05))
                    revised = revise and revise(candidate, length, layer, proof)
                attention = self._seconds(candidate, length)[1] if layer else None
                proofs.append(replace(proof, seconds=attention, dense_seconds=attention and 0.1))
        return candidate, {
            length: LengthProof(
                tuple(proofs), 0.0, 1.0, self._needles(candidate, length), self._seconds(candidate, length)[0], 0.1
            )
            for length, proofs in layers.items()
        }
