"""A profile's proof measured again on this machine, or its certificate on other text.

The proof is of the prompts that layers were adjusted on. On another GPU than the profile's, its thresholds are proven
with tiles of this GPU, as they would run there. Where a certificate is checked, nothing is chosen.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from calibrate.model.models import LoadedModel, load, load_config
from calibrate.model.preflight import Preflight, make_preflight
from calibrate.profiles.stored import check_sizes, read_recipe
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.prompts import load_prompts
from calibrate.proof.adjust import describe_over_limit, find_lost_needles
from calibrate.proof.answers import PromptAnswers, find_worst_eighth, measure_answers
from calibrate.proof.bounds import CONFIDENCE, bound_mean_below, compute_excess_probability, compute_mean_of_kinds
from calibrate.proof.certify import MIN_GROUPS, TextGroups, count_retrieval
from calibrate.proof.certify_answers import CAP, build_answer_certificate
from calibrate.proof.layers import ConfigSource, PromptAgreement
from calibrate.proof.verify import LengthProof, Prover
from calibrate.proof.weigh import measure_noise
from calibrate.recipe import Recipe
from calibrate.record import CertifiedLength, CertifiedRetrieval, read_record
from calibrate.work.executor import open_executor
from s2o_runtime.errors import InputError
from s2o_runtime.fields import pluralize
from s2o_runtime.identity import explain_mismatch, geometry
from s2o_runtime.profile import Profile, load_profile
from s2o_runtime.profile.profile import adapt_to_device
from s2o_runtime.profile.record import read_budget, read_limits

ANSWERED = 5  # prompts of each length that questions are asked about, of as many kinds of text

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class LoadedProfile:
    """A profile that can be measured here, the recipe that made it, and its model."""

    profile: Profile
    recipe: Recipe
    loaded: LoadedModel
    drawn: Recipe  # the same with the text, seed and number of the prompts to measure on
    num_certify: int | None  # fresh prompts that each length must have; None for the recipe's number, or what there is

    @contextmanager
    def start_prover(self, title: str, lengths: int, progress: bool) -> Iterator[Prover]:
        """Yield a prover of the model with the recipe's chunk, and a progress bar over so many lengths."""
        with (
            open_executor(self.loaded) as executor,
            Prover(executor, chunk=self.recipe.chunk, progress=progress).show_progress(title, lengths) as shown,
        ):
            yield shown


def open_profile(
    path: Path,
    options: Mapping[str, Any],
    before_loading: Callable[[Recipe, Preflight], object] = lambda recipe, preflight: None,
) -> LoadedProfile:
    """Load a profile and the model that it was calibrated for.

    Args:
        path: the profile's file.
        options: of the recipe, by name: model and device; if not the recipe's are to be used, prompts and chunk;
            tokenizer and trust_remote_code, where the recipe's word does not count, because a profile may be another's;
            seed to check its certificate on fresh prompts, and num_certify if there must be so many of each length.
        before_loading: called with the recipe of the prompts to measure on and the model's sizes once these fit, before
            its weights are loaded.

    Raises:
        ModelError: The model cannot be loaded.
        ProfileError: The profile cannot be read.
        ConfigError: An option is out of its range.
        InputError: Its record does not say how it was made, it is of another model, this device cannot run it, or there
            is a seed and it has no certificate, or was made with the same one.
    """
    profile, has_prompts = load_profile(path), "prompts" in options
    if "seed" in options and not select_certified_lengths(profile):
        raise InputError(f"{path} is not certified, so there is nothing to compare with: leave --seed out")
    fresh = {name: options[name] for name in ("prompts", "seed", "num_certify") if name in options}
    loading = {name: value for name, value in options.items() if name not in fresh}
    recipe = replace(read_recipe(profile, path), **{"tokenizer": None, "trust_remote_code": False} | loading)
    fresh |= {"domains": None} if has_prompts else {}
    if "seed" in options and has_prompts:  # of the user's text as much as possible is for the certificate
        fresh |= {"num_prompts": 1, "held_out": 1}
    drawn = replace(recipe, **fresh).validate()
    if options.get("seed") == recipe.seed and not has_prompts:  # another number would hide other needles in this text
        raise InputError(f"{path} was made with seed {recipe.seed}, expected fresh prompts: give another --seed")
    calibrated_on, drawn_from = ({file.name for file in source.prompts or ()} for source in (recipe, drawn))
    if "seed" in options and (shared := calibrated_on & drawn_from):
        log.warning(
            f"{path} was calibrated on {', '.join(sorted(shared))}: another seed divides this text anew, so "
            "prompts may hold some that it was chosen by: give --prompts with other text"
        )
    profile, rejected = adapt_to_device(profile, torch.device(recipe.device))
    if rejected is not None:
        raise InputError(f"{path} cannot be proven here: {rejected}")
    model, device, random = recipe.model, recipe.device, recipe.random_weights
    config = load_config(model, random_weights=True, trust_remote_code=recipe.trust_remote_code)  # an alias's ship
    check_sizes(profile, path, model, geometry(config))
    before_loading(drawn, make_preflight(model, config, device=device, lengths=recipe.lengths, random_weights=random))
    loaded = load(model, device, seed=recipe.seed, **recipe.loading)
    if mismatch := explain_mismatch(loaded.fingerprint, profile.fingerprint):
        raise InputError(f"{path} is not of {model}: {mismatch} of the profile: calibrate this model")
    return LoadedProfile(profile, recipe, loaded, drawn, options.get("num_certify"))


def select_certified_lengths(profile: Profile) -> dict[int, CertifiedLength]:
    """Return the certificates in a profile's record by length in tokens; nothing without a certificate."""
    return {entry.length: entry for entry in read_record(profile).certified_lengths if entry.length is not None}


@dataclass(frozen=True)
class ProofCheck:
    """A proof that was made again.

    lengths: for each length the model's `kl`, `top1` and `needles`, under "answers" the `kl` of answers behind the
    finished prefill, that of the `worst_eighth` of the prompts, of a `second_turn` and of `noise` (two dense kernels;
    None on a CPU) and whether they are `quoted` from the documents, because the model is read by layer, and under
    "layers" each layer's error and its limit in the budget's unit, its rel_mse, which limit binds (`Recipe.binds`), its
    density, whether it is dense, and the `problem` of one that is over its limit.
    """

    lengths: list[dict[str, Any]]
    problems: tuple[str, ...]  # one sentence each; none if the proof holds
    same_prompts: bool  # whether the prompts are those in the profile's record


def verify_proof(opened: LoadedProfile, *, progress: bool = False) -> ProofCheck:
    """Make the proof of a profile again, on the prompts that its recipe adjusted layers on, or on other text."""
    profile, recipe = opened.profile, opened.recipe
    data = load_prompts(opened.drawn, opened.loaded.tokenizer)
    with opened.start_prover("proving", len(data.held_out), progress) as prover:
        _, proofs = prover.prove(profile, data.held_out, timed=False)
        answers = {length: _measure_answers(prover, profile, prompts) for length, prompts in data.held_out.items()}
    lengths = [
        _compare_with_limits(profile, recipe, length, proof) | {"answers": answers[length]}
        for length, proof in sorted(proofs.items())
    ]
    problems = [layer["problem"] for row in lengths for layer in row["layers"] if layer["problem"]]
    problems += map(str, find_lost_needles(proofs, recipe))
    problems += [
        f"answers about {length} tokens have a KL of {measured['kl']:.1e}, {recipe.budget.value:g} is allowed"
        for length, measured in answers.items()
        if recipe.budget.kind == "kl" and not measured["kl"] <= recipe.budget.value
    ]
    recorded = read_record(profile).data
    same_prompts = recorded is not None and data.record().held_out == recorded.held_out
    return ProofCheck(lengths, tuple(problems), same_prompts)


def _measure_answers(prover: Prover, profile: Profile, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Measure the answers about the first prompts of a length."""
    (kls,) = measure_answers(prover, prompts[:ANSWERED], [profile])
    return {
        "kl": statistics.fmean(prompt.kl for prompt in kls),
        "worst_eighth": find_worst_eighth(kls),
        "second_turn": statistics.fmean(kl for prompt in kls for kl in prompt.second),
        "noise": measure_noise(prover, prompts),
        "quoted": not prover.executor.resident,
    }


def _compare_with_limits(profile: Profile, recipe: Recipe, length: int, proof: LengthProof) -> dict[str, Any]:
    """Return one length's new proof beside the record's limits; a layer without one has what the budget allows it."""
    limits = [
        read_limits(profile.record, index).get(length, recipe.budget.limit(layer.dense_power))
        for index, layer in enumerate(proof.layers)
    ]
    return {
        "length": length,
        "kl": proof.kl,
        "top1": proof.top1,
        "needles": proof.needles,
        "layers": [
            {
                "layer": number,
                "error": layer.error(recipe.budget),
                "limit": limit,
                "rel_mse": layer.rel_mse,
                "binds": recipe.binds(limit),
                "density": layer.density,
                "dense": is_dense,
                # also where the error is no number
                "problem": None
                if is_dense or layer.limited_error(recipe) <= limit
                else str(describe_over_limit(length, number, layer, limit, recipe)),
            }
            for index, (layer, limit) in enumerate(zip(proof.layers, limits, strict=True))
            for number in (profile.geometry.get_layer_number(index),)
            for is_dense in (profile.layer_config(index, length).is_dense,)
        ],
    }


@dataclass(frozen=True)
class FreshPrompt:
    """One fresh prompt, and what it shows of a certificate."""

    domain: str  # the kind of text, and the source of most of it, as in `Prompt`
    group: str
    kl: float  # nats per token: under a budget of answers of the answers about it, else of its compared rows
    error_over_limit: float | None  # the largest of any layer; None under a budget of answers
    measured: PromptAnswers | PromptAgreement


@dataclass(frozen=True)
class LengthCheck:
    """The certificate of one length beside the measurements of fresh prompts."""

    length: int
    prompts: int
    groups: int  # of text, which are the unit of counting
    means: float  # the largest mean error of a layer over its limit
    broken: int  # layers whose means are over it by more than chance explains; claims about answers that are refuted
    mean_kl: float
    retrieval: CertifiedRetrieval | None  # None if the prompts ask for no needles
    problems: tuple[str, ...]  # one sentence each
    # both of a budget of answers only
    above: int | None = None  # groups that have a prompt above `CAP` times the budget
    chance: float | None = None  # the probability of so many or more if the certificate is right
    of_prompts: tuple[FreshPrompt, ...] = ()

    @classmethod
    def from_prompts(
        cls,
        certified: CertifiedLength,
        prompts: Sequence[Prompt],
        measured: Sequence[PromptAnswers | PromptAgreement],
        errors: Sequence[float | None],
        broken: Sequence[str],
        **claims: Any,
    ) -> LengthCheck:
        """Compare the needles too, and keep what each prompt shows.

        errors: `FreshPrompt.error_over_limit` of each. broken: a sentence for each. claims: the fields about means.
        """
        length, before, now = certified.length or 0, certified.retrieval, count_retrieval(prompts, measured)
        lost = list[str]()
        if before and before.low is not None and now and now.found and now.high is not None and now.high < before.low:
            kept = f"{now.kept} of {now.found} needles are kept, at least {before.low:.0%} is certified"
            lost.append(f"at {length} tokens {kept}")
        of_prompts = tuple(
            FreshPrompt(prompt.domain, prompt.group, shown.kl, error, shown)
            for prompt, shown, error in zip(prompts, measured, errors, strict=True)
        )
        return cls(
            length=length, prompts=len(prompts), groups=len(TextGroups.from_prompts(prompts)), broken=len(broken),
            retrieval=now, problems=(*broken, *lost), of_prompts=of_prompts, **claims,
        )  # fmt: skip


@dataclass(frozen=True)
class CertificateCheck:
    """A certificate that was checked on fresh prompts."""

    lengths: tuple[LengthCheck, ...]
    problems: tuple[str, ...]  # one sentence each; none if it holds


def verify_certificate(opened: LoadedProfile, *, progress: bool = False) -> CertificateCheck:
    """Check each claim of the certificate of a profile that was opened with a seed, on this seed's prompts.

    A claim is broken if fresh prompts contradict it beyond chance, at 5%: for the layers' means that is at all of them
    together. Raises InputError if there are too few fresh prompts.
    """
    profile, recipe = opened.profile, opened.recipe
    certified, recorded = select_certified_lengths(profile), read_record(profile).data
    parts = (recorded.calibration, recorded.held_out, recorded.certify) if recorded else ()
    used = {prompt.sha256 for part in parts for prompt in part or ()}
    fresh = {
        length: [prompt for prompt in length_prompts if prompt.sha256 not in used]
        for length, length_prompts in load_prompts(opened.drawn, opened.loaded.tokenizer).certify.items()
    }
    fewest = max(MIN_GROUPS, opened.num_certify or 0)
    for length in certified:
        of_length = fresh.get(length, ())
        groups = len(TextGroups.from_prompts(of_length))
        if groups < MIN_GROUPS or len(of_length) < fewest:
            raise InputError(
                f"of {opened.drawn.prompt_source} there are {len(of_length)} fresh prompts of {length} tokens, of "
                f"{pluralize(groups, 'group')} of text, expected at least {fewest} of {MIN_GROUPS} groups: give "
                "another --num-certify or --seed, or --prompts with more text"
            )
    proofs: dict[int, LengthProof] = {}
    with opened.start_prover("certifying", len(certified), progress) as prover:
        if recipe.budget.kind == "kl":
            lengths = [_check_answers(prover, fresh[length], profile, entry) for length, entry in certified.items()]
        else:
            for length in certified:  # one after another: the hidden states of all prompts are in memory
                proofs |= prover.prove(profile, {length: fresh[length]}, timed=False, stage="certifying")[1]
            lengths = compare_certificate(profile, recipe, certified, proofs)
    return CertificateCheck(tuple(lengths), tuple(problem for length in lengths for problem in length.problems))


def _check_answers(
    prover: Prover, prompts: Sequence[Prompt], profile: Profile, certified: CertifiedLength
) -> LengthCheck:
    """Compare what is certified of the answers at one length with those about fresh prompts."""
    (answers,) = measure_answers(prover, prompts, [profile])
    groups, at = TextGroups.from_prompts(prompts), f"at {certified.length} tokens"
    budget = read_budget(profile.record).value or 0.0
    measured, broken = build_answer_certificate(prompts, answers, budget, CONFIDENCE), []
    mean, above = measured.mean or 0.0, measured.above or 0
    values = groups.mean_per_group([min(max(prompt.kl, 0.0), CAP * budget) for prompt in answers])
    if bound_mean_below(values, groups.kinds, CONFIDENCE) > budget:
        broken.append(f"{at} answers have a mean KL of {mean:.1e}, {budget:g} is certified")
    share = 1 - ((certified.answers and certified.answers.share_above) or 0.0)
    chance = compute_excess_probability(above, len(groups), share)
    if chance < 1 - CONFIDENCE:
        text = f"{at} {above} of {len(groups)} groups of text have a prompt above {CAP:g} times the budget"
        broken.append(f"{text}, which chance gives in {chance:.1%} of cases")
    return LengthCheck.from_prompts(
        certified, prompts, answers, [None] * len(prompts), broken,
        means=mean / budget, mean_kl=mean, above=above, chance=chance,
    )  # fmt: skip


def compare_certificate(
    profile: ConfigSource, recipe: Recipe, certified: Mapping[int, CertifiedLength], proofs: Mapping[int, LengthProof]
) -> list[LengthCheck]:
    """Compare a certificate, by length in tokens, with the measurements of fresh prompts; dense layers are left out."""
    # that one layer's mean is taken for too large by chance (Bonferroni)
    risk, checks = (1 - CONFIDENCE) / max(1, sum(len(proof.layers) for proof in proofs.values())), []
    for length, entry in certified.items():
        proof, groups = proofs[length], TextGroups.from_prompts(proofs[length].prompts)
        broken, means, shares = list[str](), 0.0, [[0.0] * len(proof.prompts)]
        for layer, (layer_proof, stated) in enumerate(zip(proof.layers, entry.layers or (), strict=True)):
            if profile.layer_config(layer, length).is_dense or not stated.limit:
                continue
            shares.append([error / stated.limit for error in layer_proof.errors(recipe.budget)])
            of_groups = groups.mean_per_group(shares[-1])
            means = max(means, compute_mean_of_kinds(of_groups, groups.kinds))
            if bound_mean_below(of_groups, groups.kinds, 1 - risk) > 1:
                mean = statistics.fmean(of_groups) * stated.limit
                text = f"layer {layer} at {length} tokens: its mean error is {mean:.2e}, its limit {stated.limit:.2e}"
                broken.append(text)
        largest = torch.tensor(shares, dtype=torch.float64).amax(0).tolist()  # a NaN stays
        claims = {"means": means, "mean_kl": proof.kl}
        checks.append(LengthCheck.from_prompts(entry, proof.prompts, proof.agreements, largest, broken, **claims))
    return checks
