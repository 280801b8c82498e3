"""The record of a proof, for its profile."""

from __future__ import annotations

from calibrate.prompts.prompt import PromptSet
from calibrate.proof.adjust import ProofResult
from calibrate.proof.bounds import CONFIDENCE
from calibrate.recipe import Recipe
from calibrate.record import Certificate, PredictedLength, ProvenLayer, ProvenLength, Record
from calibrate.versions import collect_versions

METHOD = (
    "means: Student's bounds over groups of text, kinds in equal parts, all within their limits at once; prompts: "
    "groups of text within one joint limit; looks share the risk; retrieval: Clopper-Pearson"
)


def make_record(recipe: Recipe, prompts: PromptSet, proven: ProofResult) -> Record:
    """Return how the profile was made and what was shown.

    Times are recorded only where they were the objective, on a GPU: without them the same inputs give the same bytes.
    """
    certificate = Certificate(confidence=CONFIDENCE, method=METHOD, lengths=tuple(proven.certificates.values()))
    return Record(
        budget=recipe.recorded_budget,
        objective="latency" if proven.device.kind == "cuda" else "predicted latency",
        recipe=recipe.record(),
        data=prompts.record(),
        versions=collect_versions(),
        proof="held out" if proven.met else "failed",
        problems=tuple(map(str, proven.problems)),
        predicted=tuple(
            PredictedLength(length=length, layers=tuple(choice.predicted() for choice in chosen.choices))
            for length, chosen in proven.chosen.items()
        ),
        held_out=tuple(_record_length(proven, length) for length in proven.proofs),
        certificate=certificate if proven.certificates else None,
        not_proven=_list_not_proven(recipe, proven),
    )


def _list_not_proven(recipe: Recipe, proven: ProofResult) -> tuple[str, ...]:
    """List what a reader might take for shown although it is not; what failed is in the problems."""
    if not proven.certificates:
        return ("that the next prompt keeps its limits: there is no certificate",)
    missing = [length for length in proven.proofs if length not in proven.certificates]
    sentences = [f"anything about the next prompt at {length} tokens" for length in missing]
    for length, certificate in proven.certificates.items():
        if certificate.retrieval is None:
            sentences.append(f"retrieval at {length} tokens: the prompts ask for no needles")
        elif not certificate.retrieval.found:
            sentences.append(f"retrieval at {length} tokens: the dense model itself finds none of the needles")
        sentences += [
            f"{domain.domain} at {length} tokens beyond one group of text: all prompts are of it"
            for domain in certificate.domains or ()
            if domain.groups == 1 and (domain.prompts or 0) > 1
        ]
    between = "lengths between these" if len(proven.certificates) > 1 else "other lengths"
    return (*sentences, f"text unlike these prompts, {between}, and calls that continue a prompt")


def _record_length(proven: ProofResult, length: int) -> ProvenLength:
    proof = proven.proofs[length]
    on_gpu = proven.device.kind == "cuda"
    return ProvenLength(
        length=length,
        calibrated=length in proven.chosen,
        kl=proof.kl,
        top1=proof.top1,
        needles=proof.needles,
        prefill_seconds=proof.prefill_seconds if on_gpu else None,
        dense_prefill_seconds=proof.dense_prefill_seconds if on_gpu else None,
        layers=tuple(
            ProvenLayer(
                mse=layer.mse,
                rel_mse=layer.rel_mse,
                density=layer.density,
                worst=layer.worst,
                limit=proven.limits[length, index],
                binds=proven.candidate.recipe.binds(proven.limits[length, index]),
                tightened=proven.tightened[length, index],
                first_error=proven.first_errors.get((length, index)),
            )
            for index, layer in enumerate(proof.layers)
        ),
    )
