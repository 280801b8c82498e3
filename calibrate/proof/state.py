"""The candidate under proof, the problems that a proof reports, and the record of it in the profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from calibrate.prompts.prompt import PromptSet
from calibrate.proof.bounds import CONFIDENCE
from calibrate.proof.verify import LengthProof
from calibrate.recipe import Recipe
from calibrate.record import Certificate, CertifiedLength, PredictedLength, ProvenLayer, ProvenLength, Record
from calibrate.search.choice import CalibrationDense
from calibrate.search.choose import SearchResult
from calibrate.versions import collect_versions
from s2o_runtime.config import KvCacheDtype, LayerConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.identity import Geometry
from s2o_runtime.lengths import find_nearest
from s2o_runtime.profile import Profile

LengthAndLayer = tuple[int, int]

TAU_FOR_ERROR = 0.7  # at a length without curves: an error grows roughly with this power of tau
ANSWER_METHOD = (
    "means: Student's bounds over groups of text, kinds in equal parts, lengths share the risk; prompts above ten "
    "times the budget, and retrieval: Clopper-Pearson"
)
METHOD = (
    "means: Student's bounds over groups of text, kinds in equal parts, all within their limits at once; looks share "
    "the risk; retrieval: Clopper-Pearson"
)


class ProblemKind(Enum):
    """Kinds of problems, each with the advice that names the command's flags."""

    OVER_LIMIT = "allow more error or calibrate on more prompts (--num-prompts)"
    LOST_NEEDLES = "allow less error, a smaller --worst-rows, or ask for fewer needles (--keep-needles)"
    TOO_FEW = "certify on more text (--num-certify, --prompts), or not at all (--num-certify 0)"
    NOT_SHOWN = "allow more error, or certify on more prompts (--num-certify)"


@dataclass(frozen=True)
class Problem:
    """One failure of a proof at a length in tokens; its text is one sentence."""

    kind: ProblemKind
    length: int
    text: str

    def __str__(self) -> str:
        return self.text


def select_lengths(problems: Iterable[Problem], kind: ProblemKind) -> frozenset[int]:
    """Return the lengths of the problems of one kind."""
    return frozenset(problem.length for problem in problems if problem.kind == kind)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A profile in the making, with what was measured of it. It never changes: methods return new ones.

    Attributes:
        recipe: the lengths, the budget and the settings that heads may have.
        model_name, geometry, fingerprint, device: those of the profile.
        chosen: the search's result at each calibrated length (bucket), its layers' choices as changed since.
        overrides: configurations of layers that were made dense, or that were changed at a length without curves.
        adjusted: how often the spending of a layer was changed within its limit.
        tightened: how often a layer was given less because its error was over its limit.
        first_errors: the error of such a layer before the first time, in the budget's unit.
        proofs: the last measurements, by length in tokens.
        problems: why the proof failed; none if it holds.
        certificates: by length in tokens; empty without a certificate.
    """

    recipe: Recipe
    model_name: str
    geometry: Geometry
    fingerprint: str
    device: DeviceIdentity
    chosen: Mapping[int, SearchResult]
    overrides: Mapping[LengthAndLayer, LayerConfig] = field(default_factory=dict)
    adjusted: Counter[LengthAndLayer] = field(default_factory=Counter)
    tightened: Counter[LengthAndLayer] = field(default_factory=Counter)
    first_errors: Mapping[LengthAndLayer, float] = field(default_factory=dict)
    proofs: Mapping[int, LengthProof] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    certificates: Mapping[int, CertifiedLength] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """True if the proof holds."""
        return not self.problems

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every length that is proven: the calibrated ones, then those that are only checked."""
        return self.recipe.all_lengths

    @property
    def kv_cache_dtype(self) -> KvCacheDtype:
        """The type of the server's cache that the profile is for."""
        return self.recipe.kv_cache_dtype

    @cached_property
    def configs(self) -> dict[LengthAndLayer, LayerConfig]:
        """Every layer's configuration at every length that is proven."""
        layers = range(self.geometry.layers)
        return {(length, layer): self.layer_config(layer, length) for length in self.lengths for layer in layers}

    @cached_property
    def limits(self) -> dict[LengthAndLayer, float]:
        """The error that every layer may have at every length, in the budget's unit.

        At a checked length it is that of the longest bucket.
        """
        longest = self.chosen[self.recipe.lengths[-1]]
        return {
            (length, layer): self.chosen.get(length, longest).limits[layer]
            for length in self.lengths
            for layer in range(self.geometry.layers)
        }

    def find_bucket(self, length: int) -> int:
        """Return the calibrated length that a length follows: itself, or the one nearest to it."""
        return self.recipe.lengths[find_nearest(self.recipe.lengths, length)]

    def layer_config(self, layer: int, length: int) -> LayerConfig:
        """Return a layer's configuration at a length.

        A length that is not calibrated follows the bucket nearest to it, unless the layer was changed at this very
        length.
        """
        if (length, layer) in self.overrides:
            return self.overrides[length, layer]
        if length in self.chosen:
            return self.chosen[length].choices[layer].config
        return self.layer_config(layer, self.find_bucket(length))

    def with_share(
        self, layer: int, length: int, share: float, why_dense: CalibrationDense = CalibrationDense.OVER_LIMIT
    ) -> Candidate:
        """Return the candidate in which a layer at one length may have a share of the error that is predicted of it.

        A calibrated length spends so much less of its budget, or more. A checked length has no curves: there the
        thresholds are scaled.

        Args:
            layer: the layer's row in the profile.
            length: the prompts' length in tokens.
            share: of the error; 0 makes the layer dense, which is final.
            why_dense: the reason for that.
        """
        config, overrides, chosen = self.layer_config(layer, length), dict(self.overrides), dict(self.chosen)
        if share and config.is_dense:
            return self
        if not share:
            overrides[length, layer] = config.as_dense()  # keeps the thresholds, which the profile's file shows
        elif length not in chosen:
            factor = share ** (1 / TAU_FOR_ERROR)
            heads = tuple(replace(head, tau=head.tau * factor) for head in config.heads)
            overrides[length, layer] = replace(config, heads=heads)
        if length in chosen:
            choices = list(chosen[length].choices)
            choices[layer] = (
                choices[layer].spending(choices[layer].spent * share) if share else choices[layer].as_dense(why_dense)
            )
            chosen[length] = replace(chosen[length], choices=choices)
        return replace(self, chosen=chosen, overrides=overrides)

    def with_lookback(self, layer: int, length: int, lookback: int) -> Candidate:
        """Return the candidate in which a layer at one length always visits so many keys before a segment."""
        if length not in self.chosen:
            config = replace(self.layer_config(layer, length), lookback=lookback)
            return replace(self, overrides={**self.overrides, (length, layer): config})
        choices = list(self.chosen[length].choices)
        point = choices[layer].point._replace(lookback=lookback)
        choices[layer] = replace(choices[layer], point=point, timing=None)
        return replace(self, chosen={**self.chosen, length: replace(self.chosen[length], choices=choices)})

    def build_profile(self) -> Profile:
        """Return the profile of this candidate, without a record.

        It has the calibrated lengths. If a layer was changed at a checked length, it has every length, each as it was
        proven: one new bucket may be nearer to another checked length.
        """
        follow = all(length in self.chosen for length, _ in self.overrides)
        lengths = self.recipe.lengths if follow else tuple(sorted(self.lengths))
        layers = range(self.geometry.layers)
        configs = tuple(tuple(self.layer_config(layer, length) for layer in layers) for length in lengths)
        return Profile(
            self.model_name, self.geometry, self.fingerprint, self.device, lengths=lengths, layers=configs
        ).validate()


def make_record(prompts: PromptSet, proven: Candidate) -> Record:
    """Return how the profile was made and what was shown.

    Times are recorded only where they were the objective, on a GPU: without them the same inputs give the same bytes.
    """
    recipe, on_gpu = proven.recipe, proven.device.kind == "cuda"
    certificate = Certificate(
        confidence=CONFIDENCE,
        method=ANSWER_METHOD if recipe.budget.kind == "kl" else METHOD,
        lengths=tuple(proven.certificates.values()),
    )
    held_out = tuple(
        ProvenLength(
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
                    binds=recipe.binds(proven.limits[length, index]),
                    tightened=proven.tightened[length, index],
                    first_error=proven.first_errors.get((length, index)),
                    **layer.compare_parts(recipe.budget, proven.limits[length, index]),
                )
                for index, layer in enumerate(proof.layers)
            ),
        )
        for length, proof in proven.proofs.items()
    )
    return Record(
        budget=recipe.recorded_budget,
        objective="latency" if on_gpu else "predicted latency",
        recipe=recipe.record(),
        data=prompts.record(),
        versions=collect_versions(),
        proof="held out" if proven.met else "failed",
        problems=tuple(map(str, proven.problems)),
        predicted=tuple(
            PredictedLength(length=length, layers=tuple(choice.predicted() for choice in chosen.choices))
            for length, chosen in proven.chosen.items()
        ),
        held_out=held_out,
        certificate=certificate if proven.certificates else None,
        not_proven=_list_not_proven(proven),
    )


def _list_not_proven(proven: Candidate) -> tuple[str, ...]:
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
