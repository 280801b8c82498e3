"""The record of a proof, for its profile."""

from __future__ import annotations

from dataclasses import replace

from calibrate.profiles.record import budget_of, predicted_layer
from calibrate.prompts.prompts import PromptSet
from calibrate.proof.tighten import Proven
from calibrate.recipe import Recipe
from calibrate.versions import versions
from s2o_runtime.profile.record import PredictedLength, ProvenLayer, ProvenLength, Record


def record_of(recipe: Recipe, prompts: PromptSet, proven: Proven) -> Record:
    """How the profile was made and what was shown.

    Times are recorded only where they were the objective, on a GPU: without them the same inputs give the same bytes.
    """
    return Record(
        budget=budget_of(recipe),
        objective="latency" if proven.device.kind == "cuda" else "predicted latency",
        recipe=recipe.record(),
        data=prompts.record(),
        versions=versions(),
        proof="held out" if proven.met else "failed",
        problems=tuple(proven.problems),
        predicted=tuple(
            PredictedLength(length=length, layers=tuple(predicted_layer(choice) for choice in chosen.choices))
            for length, chosen in proven.chosen.items()
        ),
        held_out=tuple(_proven_length(proven, length) for length in proven.proofs),
    )


def _proven_length(proven: Proven, length: int) -> ProvenLength:
    proof = proven.proofs[length]
    layers = tuple(
        ProvenLayer(
            mse=layer.mse,
            rel_mse=layer.rel_mse,
            density=layer.density,
            worst=layer.worst,
            limit=proven.limits[length, index],
            tightened=proven.tightened[length, index],
        )
        for index, layer in enumerate(proof.layers)
    )
    recorded = ProvenLength(
        length=length,
        calibrated=length in proven.chosen,
        kl=proof.kl,
        top1=proof.top1,
        needles=proof.needles,
        layers=layers,
    )
    if proven.device.kind != "cuda":
        return recorded
    return replace(recorded, prefill_seconds=proof.prefill_seconds, dense_prefill_seconds=proof.dense_prefill_seconds)
