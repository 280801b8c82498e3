"""The certificate: what is stated of a finished choice, measured on prompts that had no part in choosing it.

Two claims are made (`bounds`): every layer's mean error is within its limit at every length, and at each length at
least a share of texts keep every layer within some times its limit and the KL below some value, together. For the
second, a prompt counts by one number (`Scale.numbers`), and a group of prompts, such as a novel, by its largest.

A layer whose bound is over its limit is tried with less of what it spends, on the same inputs, and becomes dense only
if the last step does not hold. Meanwhile the prompts go on with the layer as it was adjusted: what is claimed of
prompts is claimed of the layers as adjusted, which these prompts have not chosen, and what is left spends no more.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.nn.attention import SDPBackend

from calibrate.journal import Journal
from calibrate.model.layers import DecoderLayer, LayerwiseForward, Stream, begin
from calibrate.model.logits import logits_on_device
from calibrate.model.models import LoadedModel
from calibrate.prompts.prompt import Prompt
from calibrate.proof.adjust import (
    Proven,
    layers_over_limit,
    lost_needles,
    retrieval_lost,
    scaled,
    slower_layers,
    slower_than_dense,
)
from calibrate.proof.bounds import (
    CONFIDENCE,
    PATH,
    SHARE,
    STEPS,
    may_exceed,
    mean_bound,
    mean_of_kinds,
    share_interval,
    share_shown,
    step_confidence,
    texts_for,
)
from calibrate.proof.layers import ProofItem, compare
from calibrate.proof.state import Candidate, LengthAndLayer, Problem, ProblemKind, lengths_of
from calibrate.proof.verify import LayerProof, LengthProof, Progress, Prover, prove
from calibrate.recipe import Recipe
from calibrate.record import CertifiedDomain, CertifiedLayer, CertifiedLength, CertifiedRetrieval
from calibrate.search.choice import ChosenDense
from calibrate.work.executor import Executor, WorkerState, measured
from s2o_runtime.fields import counted
from s2o_runtime.reference.dense import sdpa_backend

FEWEST = 3  # groups of text below which no mean is bounded: Student's quantile for two is above 6
HOPELESS = 1.2  # times the limit: a step is passed over if the first bound says that its own would be above that
KL_ROOM = 2.0  # times the KL of adjust prompts at the limit: more differs between single prompts than among so few
NOISE_PROMPTS = 2  # prompts that the noise floor is measured on

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class Groups:
    """Prompts by what most of their text belongs to: prompts of one novel are no more independent than its chapters.

    members: of each group the numbers of its prompts. kinds: the kind of text of each group.
    """

    members: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> Groups:
        """The groups of prompts, in the order of their first ones; a prompt whose group is not known is one."""
        members: dict[Hashable, list[int]] = {}
        for number, prompt in enumerate(prompts):
            members.setdefault((prompt.domain, prompt.group or number), []).append(number)
        kinds = tuple(prompts[numbers[0]].domain for numbers in members.values())
        return cls(tuple(map(tuple, members.values())), kinds)

    def __len__(self) -> int:
        return len(self.members)

    def means(self, values: Sequence[float]) -> list[float]:
        """The mean of each group, from a value of each prompt."""
        return [statistics.fmean(values[number] for number in numbers) for numbers in self.members]

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each group, from a value of each prompt."""
        return [max(values[number] for number in numbers) for numbers in self.members]


@dataclass(frozen=True)
class Scale:
    """What makes one number of a prompt's errors and its KL.

    recipe: has the unit of errors, and says what is held to limits. limits: the error each layer may have; None of
    layers that are dense. kl: the KL in nats that counts as much as an error of its limit.
    """

    recipe: Recipe
    limits: tuple[float | None, ...]
    kl: float

    @classmethod
    def of(cls, candidate: Candidate, length: int, proof: LengthProof) -> Scale:
        """The scale of a length. Its KL is the largest KL over the largest error on the adjust prompts, so that neither
        of the two decides alone. With single prompts held to limits it has room (`KL_ROOM`).

        Args:
            candidate, length: what is certified.
            proof: what the adjust prompts showed.
        """
        layers = range(len(proof.layers))
        limits = tuple(
            None if candidate.layer_config(layer, length).is_dense else candidate.limits[length, layer]
            for layer in layers
        )
        unscaled = cls(candidate.recipe, limits, math.inf)
        largest = max(unscaled.numbers(proof), default=0.0) or 1.0
        kl = max(proof.kls, default=0.0) / largest * (KL_ROOM if candidate.recipe.per_prompt else 1.0)
        return replace(unscaled, kl=kl or math.inf)

    def errors(self, layers: Sequence[LayerProof]) -> list[float]:
        """Each prompt's largest error over its limit, over all layers, both of all rows and of those that answer."""
        budget = self.recipe.budget
        layer_shares = [
            [prompt.largest(budget) / limit if limit else 0.0 for prompt in layer.of_prompts]
            for layer, limit in zip(layers, self.limits, strict=True)
        ]
        return [max(prompt_shares, default=0.0) for prompt_shares in zip(*layer_shares, strict=True)]

    def numbers(self, seen: LengthProof) -> list[float]:
        """Each prompt's number: the larger of its largest error over the limit, and its KL over the scale's."""
        kls = [math.inf if math.isnan(kl) else kl / self.kl for kl in seen.kls]
        return [max(pair) for pair in zip(self.errors(seen.layers), kls, strict=True)]

    def means(self, seen: LengthProof) -> list[float]:
        """Each layer's mean error over its limit, kinds of text in equal parts; 0 of layers that are dense."""
        groups = Groups.of(seen.prompts)
        return [
            mean_of_kinds(groups.means(layer.errors(self.recipe.budget)), groups.kinds) / limit if limit else 0.0
            for layer, limit in zip(seen.layers, self.limits, strict=True)
        ]

    def above(self, seen: LengthProof, limit: float = 1.0) -> int:
        """How many groups of text have a prompt whose number is above a limit."""
        return sum(number > limit for number in Groups.of(seen.prompts).largest(self.numbers(seen)))


def certify(prover: Prover, prompts: Mapping[int, Sequence[Prompt]], proven: Proven) -> Proven:
    """Certify what was proven, with less of what layers spend where it does not hold as it is.

    Args:
        prover: what measures it.
        prompts: the certify prompts, by length in tokens.
        proven: a proof that holds.

    Returns:
        What is left of the candidate, with the certificate, and with a problem for each length where nothing can be
        stated, retrieval does not hold, or a budget is shown to be broken.

    Raises:
        ModelError: inf or NaN came up in the model.
        ResourceError: The GPU's memory ran out.
    """
    candidate, certificates = proven.candidate, dict[int, CertifiedLength]()
    recipe, problems = candidate.recipe, list[Problem | None]()
    with prover.bar("certifying", len(candidate.lengths)) as step:
        for length in candidate.lengths:  # one after another: the hidden states of all prompts are in memory
            groups = Groups.of(prompts.get(length, ()))
            if problem := too_few(length, prompts.get(length, ())):
                problems.append(problem)
                continue
            scale = Scale.of(candidate, length, proven.proofs[length])
            measure = partial(_measured, prover, length, prompts[length], step)
            means, seen = along_path(candidate, length, scale, measure) if recipe.per_prompt else measure(candidate)
            candidate = means.left()
            floor = _noise_floor(prover.executor, length, prompts[length][:NOISE_PROMPTS], prover.journal)
            certificates[length] = certificate_of(length, seen, means, scale, floor)
            problems += [
                _not_shown(length, scale.above(seen), groups) if recipe.per_prompt else None,
                retrieval_lost(length, certificates[length].retrieval, recipe),
            ]
    return replace(
        proven,
        candidate=candidate,
        certificates=dict(sorted(certificates.items())),
        problems=(*proven.problems, *(problem for problem in problems if problem)),
    )


def _measured(
    prover: Prover, length: int, prompts: Sequence[Prompt], on_step: Callable[[], object], candidate: Candidate
) -> tuple[Means, LengthProof]:
    """What each layer is left with, and what was seen of layers as they are in a candidate."""
    means, recipe = Means(candidate, length, Groups.of(prompts)), candidate.recipe
    progress = Progress(on_step, "certifying")
    run = partial(prove, prover.executor, {length: prompts}, candidate, means.revise, progress, timed=False)
    _, seen = run(chunk=recipe.chunk, journal=prover.journal)
    return means, seen[length]


def along_path(
    candidate: Candidate, length: int, scale: Scale, measure: Callable[[Candidate], tuple[Means, LengthProof]]
) -> tuple[Means, LengthProof]:
    """Spend more and more at a length, from the safest on, as long as enough groups of text are within all limits.

    Args:
        candidate: what was proven.
        length: in tokens.
        scale: of the length.
        measure: what the certify prompts show of a candidate.

    Returns:
        What was measured last before one failed, or of the safest if that one failed.
    """
    taken = None
    for share in PATH:
        at = candidate
        for layer in range(candidate.geometry.layers):
            if share < 1 and not candidate.layer_config(layer, length).is_dense:
                at = at.with_layer(layer, length, *scaled(candidate, length, layer, share))
        means, seen = measure(at)
        above, groups = scale.above(seen), len(Groups.of(seen.prompts))
        log.info("%d tokens at %.0f%% of what layers spend: %d of %d over", length, 100 * share, above, groups)
        if above > may_exceed(groups, 1 - CONFIDENCE):
            return taken or (means, seen)
        taken = means, seen
    assert taken is not None
    return taken


@dataclass(frozen=True)
class Left:
    """The share of its spending that a layer keeps, 0 if it becomes dense, and what was measured with that share.

    bound: for its mean error, in the budget's unit.
    """

    share: float
    candidate: Candidate
    bound: float = 0.0
    proof: LayerProof | None = None


class Means:
    """Finds for each layer at a length how much it may spend so that its mean error is shown to be within its limit.

    Args:
        candidate: as it was adjusted.
        length: in tokens.
        groups: of the certify prompts.
    """

    def __init__(self, candidate: Candidate, length: int, groups: Groups) -> None:
        self.candidate, self._length, self._groups = candidate, length, groups
        self.layers: dict[int, Left] = {}  # decided
        self._step, self._first = 0, 0.0  # of the layer that is looked at

    def revise(self, candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
        """What `prove` revises by: less where a bound is over its limit, and then the layer as it was again."""
        if layer in self.layers:
            return None
        recipe, limit = candidate.recipe, candidate.limits[length, layer]
        config, again = candidate.layer_config(layer, length), None if candidate is self.candidate else self.candidate
        confidence = step_confidence(STEPS[self._step], recipe, candidate.geometry.layers)
        bound = mean_bound(self._groups.means(proof.errors(recipe.budget)), self._groups.kinds, confidence)
        self._first = bound if again is None else self._first
        if bound <= limit or config.is_dense:
            return self._decide(layer, Left(STEPS[self._step], candidate, bound, proof), again)
        log.info("layer %d at %d tokens: the bound of its error is %.2e, limit %.2e", layer, length, bound, limit)
        for step in range(self._step + 1, len(STEPS)):
            lower = self._with(layer, STEPS[step])
            hopeless = STEPS[step] * self._first > HOPELESS * limit and step < len(STEPS) - 1
            if lower.layer_config(layer, length) != config and not hopeless:
                self._step = step
                return lower
        return self._decide(layer, Left(0.0, self._with(layer, 0.0)), again)

    def left(self) -> Candidate:
        """The candidate whose layers at this length spend what they are left with."""
        candidate = self.candidate
        for layer, left in self.layers.items():
            if left.share < 1:
                change = left.candidate.changes[self._length, layer]
                candidate = candidate.with_layer(layer, self._length, change.config, change.choice)
        return candidate

    def _with(self, layer: int, share: float) -> Candidate:
        changed = scaled(self.candidate, self._length, layer, share, ChosenDense.OVER_BOUND)
        return self.candidate.with_layer(layer, self._length, *changed)

    def _decide(self, layer: int, left: Left, again: Candidate | None) -> Candidate | None:
        self.layers[layer], self._step = left, 0
        return again


def too_few(length: int, prompts: Sequence[Prompt]) -> Problem | None:
    """That the certify prompts of a length are of too few groups of text to state anything; None if they are not."""
    if (groups := len(Groups.of(prompts))) >= FEWEST:
        return None
    text = (
        f"at {length} tokens not proven: {counted(groups, 'group')} of text to certify on allow no statement, {FEWEST} "
        f"are the fewest, and {texts_for(SHARE, 1 - CONFIDENCE)} show one about {SHARE:.0%} of prompts"
    )
    return Problem(ProblemKind.TOO_FEW, length, text)


def _not_shown(length: int, above: int, groups: Groups) -> Problem | None:
    if above <= may_exceed(len(groups), 1 - CONFIDENCE):
        return None
    text = (
        f"at {length} tokens {above} of {len(groups)} groups of text have a prompt that is over a layer's limit, also "
        f"with {PATH[0]:.0%} of what layers were adjusted to spend"
    )
    return Problem(ProblemKind.NOT_SHOWN, length, text)


def proven_again(prover: Prover, proven: Proven, certified: Proven) -> Proven:
    """Measure the lengths again that changed since the proof; layers, and then lengths, that became slower than dense
    become dense.

    The prompts are those that layers were adjusted on, and no layer is tightened: densities, times and predictions in
    the record are to be of what is written. What is certified of a layer holds all the more if it becomes dense.
    Needles that are lost now, or a KL over its budget, although layers became more careful, are problems:
    `s2o-profile verify` would find them.

    Args:
        prover: what measures them.
        proven, certified: as the proof left it, and as it is after the certificate and `without_slower_layers`.
    """
    lengths = frozenset(
        length for (length, layer), config in certified.configs.items() if config != proven.configs[length, layer]
    )
    candidate, proofs = certified.candidate, dict(certified.proofs)
    looked = False
    while lengths:
        _, measured = prover.prove("measuring what changed since", lengths, candidate)
        proofs |= measured
        layers = frozenset() if looked else slower_layers(candidate, measured)  # once: times that tie vary
        looked = True
        candidate, lengths = _without_slower(candidate, layers, lengths_of(slower_than_dense(candidate, measured)))
    recipe = candidate.recipe
    problems = lost_needles(proofs, recipe)
    return replace(certified, candidate=candidate, proofs=proofs, problems=(*certified.problems, *problems))


def without_slower_lengths(prover: Prover, proven: Proven) -> Proven:
    """Time is no reason to fail: what the last attempt at the proof left slower than dense becomes dense.

    Of a length whose prefill is slower those layers become dense whose attention is; all, if no layer alone is slower.
    """
    slower = lengths_of(slower_than_dense(proven.candidate, proven.proofs))
    if not slower:
        return proven
    candidate, _ = _without_slower(proven.candidate, slower_layers(proven.candidate, proven.proofs), slower)
    left = replace(proven, candidate=candidate, problems=layers_over_limit(proven.candidate, proven.proofs))
    return proven_again(prover, proven, left)


def without_slower_layers(proven: Proven) -> Proven:
    """With dense layers where attention was measured slower than dense; what was measured stays that of before."""
    candidate, _ = _without_slower(proven.candidate, slower_layers(proven.candidate, proven.proofs), frozenset())
    return replace(proven, candidate=candidate)


def _without_slower(
    candidate: Candidate, layers: Collection[LengthAndLayer], lengths: frozenset[int]
) -> tuple[Candidate, frozenset[int]]:
    """The candidate with these slower layers dense, and of these slower lengths all layers where none of those is; and
    the lengths at which it changed."""
    for length, layer in sorted(layers):
        log.info("layer %d at %d tokens is slower than dense: it becomes dense", layer, length)
    measured_lengths = frozenset(length for length, _ in layers)
    candidate = with_dense_layers(candidate, layers, ChosenDense.SLOWER_ATTENTION)
    whole = {(length, layer) for length, layer in candidate.configs if length in lengths - measured_lengths}
    return with_dense_layers(candidate, whole, ChosenDense.SLOWER_PREFILL), measured_lengths | lengths


def with_dense_layers(candidate: Candidate, places: Collection[LengthAndLayer], why_dense: ChosenDense) -> Candidate:
    """The candidate with these layers dense at these lengths; at all others every layer keeps what it has."""
    if not places:
        return candidate
    changed = candidate
    for (length, layer), config in candidate.configs.items():
        if (length, layer) in places:
            changed = changed.with_layer(layer, length, *scaled(candidate, length, layer, 0.0, why_dense))
        elif length not in candidate.chosen and (length, layer) not in candidate.changes:
            changed = changed.with_layer(layer, length, config, None)  # or other buckets would be interpolated now
    return changed


def certificate_of(
    length: int, seen: LengthProof, means: Means, scale: Scale, noise_floor: float | None
) -> CertifiedLength:
    """What a length's prompts certify.

    Args:
        length: in tokens.
        seen: what the certify prompts showed of layers as they were adjusted.
        means: what each layer is left with.
        scale: of the length.
        noise_floor: the mean KL between two dense implementations, in nats; None where there is one only.
    """
    recipe, groups = scale.recipe, Groups.of(seen.prompts)
    above = scale.above(seen) if recipe.per_prompt else may_exceed(len(groups), 1 - CONFIDENCE)
    times = 1.0 if recipe.per_prompt else sorted(groups.largest(scale.numbers(seen)), reverse=True)[above]
    sparse = any(limit is not None for limit in scale.limits)
    return CertifiedLength(
        length=length,
        prompts=len(seen.prompts),
        groups=len(groups),
        tokens=len(seen.prompts) * length,
        share=share_shown(len(groups), above, 1 - CONFIDENCE) if sparse else None,
        error_over_limit=_finite(times) if sparse else None,
        kl=_finite(times * scale.kl) if sparse else None,
        mean_kl=seen.kl,
        top1=min(agreement.top1 for agreement in seen.agreements),
        retrieval=retrieval_of(seen),
        noise_floor=noise_floor,
        domains=_domains(seen, means, scale),
        layers=tuple(
            _certified_layer(means.layers[layer], recipe, means.candidate.limits[length, layer])
            for layer in range(len(seen.layers))
        ),
    )


def _certified_layer(left: Left, recipe: Recipe, limit: float) -> CertifiedLayer:
    proof = left.proof
    return CertifiedLayer(
        mean=statistics.fmean(proof.errors(recipe.budget)) if proof else 0.0,
        bound=_finite(left.bound),
        spent=left.share if left.share < 1 else None,
        density=proof.density if proof else 1.0,
        limit=limit,
        rel_mse=proof.rel_mse if proof and recipe.budget.kind == "mse" else None,
        binds=recipe.binds(limit),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _domains(seen: LengthProof, means: Means, scale: Scale) -> tuple[CertifiedDomain, ...]:
    """Each kind of text by itself, in alphabetical order; errors are of what layers are left with."""
    by_domain: dict[str, list[int]] = {}
    for number, prompt in enumerate(seen.prompts):
        by_domain.setdefault(prompt.domain, []).append(number)
    proofs = {layer: left.proof for layer, left in means.layers.items() if left.proof and scale.limits[layer]}

    def largest(numbers: Sequence[int], rows: str) -> float:
        """The largest mean error of a layer over its limit."""
        return max(
            (
                statistics.fmean(scale.recipe.budget.error(*getattr(proof.of_prompts[n], rows)) for n in numbers)
                / (scale.limits[layer] or 1.0)
                for layer, proof in proofs.items()
            ),
            default=0.0,
        )

    return tuple(
        CertifiedDomain(
            domain=domain,
            prompts=len(numbers),
            groups=len(Groups.of([seen.prompts[number] for number in numbers])),
            kl=statistics.fmean(seen.kls[number] for number in numbers),
            error_over_limit=largest(numbers, "all_rows"),
            answer_over_limit=largest(numbers, "last_rows"),
        )
        for domain, numbers in sorted(by_domain.items())
    )


def retrieval_of(seen: LengthProof) -> CertifiedRetrieval | None:
    """What became of the needles of a length's prompts; None if no prompt asks for any."""
    if not any(prompt.answers for prompt in seen.prompts):
        return None
    found, kept = (sum(getattr(agreement, name) for agreement in seen.agreements) for name in ("found", "kept"))
    low, high = share_interval(kept, found, CONFIDENCE)
    return CertifiedRetrieval(found=found, kept=kept, low=low, high=high)


def _noise_floor(
    executor: Executor, length: int, prompts: Sequence[Prompt], journal: Journal | None
) -> float | None:  # fmt: skip
    """The mean KL between two dense implementations; None where rounding is too small to say anything."""
    items = [NoiseFloor(length, prompt.sha256) for prompt in prompts]
    kls = [result["kl"] for result in measured(items, executor, journal)]
    return None if None in kls else max(0.0, statistics.fmean(kls))


@dataclass(frozen=True)
class NoiseFloor(ProofItem):
    """The KL of one prompt between the dense model and the same with another implementation of dense attention.

    What two exact implementations differ by is what rounding does to a model's predictions: a KL of that size says
    nothing about sparse attention. Its result has it as `kl`: None in float32 and on a CPU, where rounding is too
    small to say anything.
    """

    prompt: str
    stage: str = field(default="noise", kw_only=True)

    @property
    def affinity(self) -> Hashable:
        return self.prompt

    @property
    def inputs(self) -> dict[str, str]:
        return {"prompt": self.prompt}

    def __str__(self) -> str:
        return f"noise of rounding at {self.length} tokens"

    def run(self, worker: WorkerState) -> dict[str, float | None]:
        loaded = worker.loaded
        if loaded.weights.device.type != "cuda" or loaded.model.dtype == torch.float32:
            return {"kl": None}
        self.patching(worker)
        with self.within_memory(worker, "measuring what rounding does"):
            return {"kl": noise(loaded, worker.prompts[self.prompt], SDPBackend.FLASH_ATTENTION)}


@torch.no_grad()
def noise(loaded: LoadedModel, prompt: Prompt, backend: SDPBackend) -> float:
    """The KL between the dense model and the same, whose full attention another backend computes."""

    def through_backend(layer: DecoderLayer, stream: Stream) -> Stream:
        with sdpa_backend(backend):
            return layer.dense(stream)

    forward = LayerwiseForward(loaded, begin(loaded, [prompt.ids]) * 2)
    for layer in forward.layers:  # those of other kinds are as they are in the dense model
        forward.move([None, None if layer.attention is None else through_backend])
    dense, other = forward.streams
    with logits_on_device(loaded) as logits:
        return compare(prompt, dense.hidden, other.hidden, logits).kl
