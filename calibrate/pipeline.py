"""calibrate(): prompts -> curves -> choices -> proof -> profile. No stage reaches back.

Three passes over the model, each one layer at a time: curves of every layer, times of what the search tries, and the
held-out proof of the model as it will run.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from tqdm import tqdm

from calibrate.choose import Chosen, choose
from calibrate.crossover import with_crossover
from calibrate.curves import Shape
from calibrate.journal import Journal
from calibrate.measure import measure_model
from calibrate.models import LoadedModel, load, load_tokenizer
from calibrate.prompts import PromptSet, load_prompts
from calibrate.recipe import Recipe
from calibrate.search import Choice, allowed
from calibrate.tiles import tiles_for
from calibrate.verify import LayerProof, LengthProof, prove
from calibrate.versions import versions
from s2o_runtime.config import LayerConfig
from s2o_runtime.gpu import DeviceIdentity, identify
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, save_profile

TIGHTENINGS = 4  # of one layer at one length; the last one makes it dense
TIGHTEN_TO = 0.9  # aim this far under the limit after a layer was over it
TAU_FOR_ERROR = 0.7  # at a length without curves: an error grows roughly with this power of tau
RETRIES = 2  # with half the budget, when the layers kept theirs but needles were lost
NOT_FASTER = "the prefill was not faster than dense"
TIE = 1.02  # a prefill this much slower than dense is a tie

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class Result:
    """A finished calibration.

    chosen: at every calibrated length; proofs: at every proven one; configs: (length, layer) -> what was proven;
    limits: (length, layer) -> the error it may have, in the budget's unit; tightened: how often it was; problems:
    why the proof failed, none if it did not; written: whether the profile was.
    """

    profile: Profile
    chosen: dict[int, Chosen]
    proofs: dict[int, LengthProof]
    configs: dict[tuple[int, int], LayerConfig]
    limits: dict[tuple[int, int], float]
    tightened: Counter[tuple[int, int]]
    problems: tuple[str, ...]
    written: bool
    seconds: dict[str, float]
    journal_reused: int
    device: DeviceIdentity

    @property
    def met(self) -> bool:
        return not self.problems


def calibrate(recipe: Recipe, *, progress: bool = True) -> Result:
    """Run a recipe. Writes `recipe.out` only if the held-out proof succeeds, or a regression is allowed.

    The same recipe continues an interrupted run: what was measured is in the recipe's journal.
    """
    clock = _Clock()
    tokenizer = load_tokenizer(recipe.model, random_weights=recipe.random_weights)
    prompts = load_prompts(recipe, tokenizer)  # cheap to get wrong, so before the weights
    loaded = load(recipe.model, recipe.device, random_weights=recipe.random_weights, seed=recipe.seed)
    device = identify(torch.device(recipe.device))
    recipe.out.parent.mkdir(parents=True, exist_ok=True)
    recipe.journal_path.parent.mkdir(parents=True, exist_ok=True)
    with Journal.open(recipe.journal_path, _identity(loaded, device)) as journal:
        with clock.phase("measuring"):
            chosen = _searched(loaded, prompts, recipe, device, journal, progress, clock)
        with clock.phase("proving"):
            result = _proven(loaded, prompts, recipe, device, chosen, progress)
        reused = journal.reused
    result = replace(result, journal_reused=reused, seconds=clock.seconds)
    result = replace(result, profile=replace(result.profile, record=_record(recipe, prompts, result)))
    if result.met or recipe.allow_regression:
        save_profile(result.profile, recipe.out)
        result = replace(result, written=True)
    return result


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; of phases inside one another the outer one counts the rest."""
        began, inside = time.monotonic(), sum(self.seconds.values())
        yield
        took = time.monotonic() - began - (sum(self.seconds.values()) - inside)
        self.seconds[name] = self.seconds.get(name, 0.0) + took


def _searched(
    loaded: LoadedModel,
    prompts: PromptSet,
    recipe: Recipe,
    device: DeviceIdentity,
    journal: Journal,
    progress: bool,
    clock: _Clock,
) -> dict[int, Chosen]:
    """Curves of every layer at every length, and from them what each layer shall do."""
    where = torch.device(recipe.device)
    tiles = {
        length: tiles_for(loaded.geometry, device, where, length, recipe.segments_for(length), journal)
        for length in recipe.lengths
    }
    shapes = {
        length: tuple(sorted({Shape.of(tile) for tile in each.worthwhile}, key=lambda s: (s.block_m, s.stride)))
        for length, each in tiles.items()
    }
    layers = loaded.geometry.layers
    with _bar("measuring curves", layers * len(recipe.lengths), "layer", progress) as step:
        curves = measure_model(loaded, prompts.calibration, shapes, recipe, journal, step)
    if journal.reused:
        log.info("resumed: %d measurements reused", journal.reused)
    with clock.phase("searching"):
        worthwhile = {length: each.worthwhile for length, each in tiles.items()}
        with _bar("searching", None, "trial", progress) as step:
            chosen = choose(loaded, prompts, curves, worthwhile, recipe, device, journal, step)
        if device.kind == "cuda":
            chosen = {
                length: replace(each, choices=[_crossed(one, length, loaded.geometry, where) for one in each.choices])
                for length, each in chosen.items()
            }
    return chosen


def _crossed(choice: Choice, length: int, geometry: Geometry, where: torch.device) -> Choice:
    """The choice with its tile's crossover; one that was faster than dense at its length does not go dense there."""
    tile = with_crossover(choice.config, geometry, where)
    if not choice.config.is_dense:
        tile = replace(tile, dense_below=min(tile.dense_below, length))
    return replace(choice, tile=tile)


def _proven(
    loaded: LoadedModel,
    prompts: PromptSet,
    recipe: Recipe,
    device: DeviceIdentity,
    chosen: dict[int, Chosen],
    progress: bool,
) -> Result:
    """The held-out proof; where needles were lost once more with half the budget, twice at most, and where the prefill
    was slower than dense all dense."""
    proof = _Proof(loaded, recipe, device, chosen)
    proofs: dict[int, LengthProof] = {}
    again = set(prompts.held_out)
    for attempt in range(RETRIES + 1):
        some = {length: each for length, each in prompts.held_out.items() if length in again}
        with _bar("proving on held-out prompts", loaded.geometry.layers * len(some), "layer", progress) as step:
            proofs |= prove(loaded, some, proof.config_of, proof.adjust, step)
        lost, slow = lost_needles(proofs, recipe), _slower(proofs, proof.configs, device)
        if not (lost or slow) or attempt == RETRIES:
            break
        again = set()
        if set(lost) - set(slow):
            again |= proof.halve(set(lost) - set(slow))
        if slow:
            again |= proof.give_up(set(slow))
        log.info("%s: proving %s tokens again", "; ".join((*lost.values(), *slow.values())), sorted(again))
    problems = (*proof.over_limit(proofs), *lost.values(), *slow.values())
    return Result(
        profile=proof.profile(),
        chosen=proof.final(),
        proofs=proofs,
        configs=proof.configs,
        limits=proof.limits,
        tightened=proof.tightened,
        problems=problems,
        written=False,
        seconds={},
        journal_reused=0,
        device=device,
    )


class _Proof:
    """What is proven, layer by layer, and how it is tightened where the error is over its limit."""

    def __init__(self, loaded: LoadedModel, recipe: Recipe, device: DeviceIdentity, chosen: dict[int, Chosen]) -> None:
        self._loaded, self._recipe, self._device, self._chosen = loaded, recipe, device, dict(chosen)
        self.configs: dict[tuple[int, int], LayerConfig] = {}
        self.tightened: Counter[tuple[int, int]] = Counter()
        self.limits: dict[tuple[int, int], float] = {}
        self._choices: dict[tuple[int, int], Choice] = {}
        self._dense: set[int] = set()  # checked lengths that are dense because their prefill was slower
        self._begin(self._recipe.lengths)

    def _begin(self, lengths: Iterable[int]) -> None:
        """Take the choices of these buckets as they are."""
        for length in lengths:
            self._choices |= {(length, layer): each for layer, each in enumerate(self._chosen[length].choices)}

    def halve(self, lost: set[int]) -> set[int]:
        """Halve the budget at these lengths, or at the buckets around them. Returns which are to be proven again."""
        buckets = self._recipe.lengths
        halved: set[int] = set()
        for length in lost:
            halved |= {length} if length in buckets else set(_neighbours(length, buckets))
        for length in halved:
            self._chosen[length] = self._chosen[length].spending(0.5, allowed(self._recipe))
        self._begin(halved)
        return self._forget(halved)

    def give_up(self, slow: set[int]) -> set[int]:
        """Make every layer dense at these lengths. Returns which are to be proven again."""
        buckets = self._recipe.lengths
        for length in slow & set(buckets):
            each = self._chosen[length]
            self._chosen[length] = replace(each, choices=[choice.as_dense(NOT_FASTER) for choice in each.choices])
        self._begin(slow & set(buckets))
        self._dense |= slow - set(buckets)
        return self._forget(slow)

    def _forget(self, lengths: set[int]) -> set[int]:
        """Drop what was proven of these lengths and of those checked beside them. Returns all of them."""
        buckets, checked = self._recipe.lengths, self._recipe.checked_lengths
        lengths = lengths | {each for each in checked if lengths & set(_neighbours(each, buckets))}
        for place in [place for place in self.configs if place[0] in lengths]:
            del self.configs[place], self.tightened[place]
        return lengths

    def config_of(self, length: int, layer: int) -> LayerConfig:
        place = length, layer
        # a layer's own limit, and between calibrated lengths that of the longest
        bucket = length if length in self._chosen else self._recipe.lengths[-1]
        self.limits[place] = self._chosen[bucket].limits[layer]
        if place in self._choices:
            self.configs[place] = self._choices[place].config
        else:  # between buckets it follows those that were proven, which come first
            proven = {key: self.configs.get(key, choice.config) for key, choice in self._choices.items()}
            config = self._profile(proven, self._recipe.lengths).layer_config(layer, length)
            if length in self._dense:
                config = _all_dense(config)
            self.configs[place] = config
        return self.configs[place]

    def adjust(self, length: int, layer: int, proof: LayerProof, config: LayerConfig) -> LayerConfig | None:
        place = length, layer
        error, limit = proof.error(self._recipe.budget), self.limits[place]
        if error <= limit or config.is_dense:
            return None
        aim = TIGHTEN_TO * limit / error
        self.tightened[place] += 1
        choice = self._choices.get(place)
        if self.tightened[place] == TIGHTENINGS:
            new = _all_dense(config)
            if choice is not None:
                self._choices[place] = choice.as_dense("its held-out error stayed over the limit")
        elif choice is not None:
            self._choices[place] = choice.spending(choice.allocation.mse * aim, allowed(self._recipe))
            new = self._choices[place].config
        else:
            by = aim ** (1 / TAU_FOR_ERROR)
            new = replace(config, heads=tuple(replace(head, tau=head.tau * by) for head in config.heads))
        log.info("%s: tightened", over_limit(length, layer, error, limit))
        self.configs[place] = new
        return new

    def over_limit(self, proofs: dict[int, LengthProof]) -> list[str]:
        return [
            over_limit(length, index, layer.error(self._recipe.budget), self.limits[length, index])
            for length, proof in proofs.items()
            for index, layer in enumerate(proof.layers)
            if layer.error(self._recipe.budget) > self.limits[length, index]
            and not self.configs[length, index].is_dense
        ]

    def final(self) -> dict[int, Chosen]:
        """What was chosen, as tightened."""
        return {
            length: replace(each, choices=[self._choices[length, layer] for layer in range(len(each.choices))])
            for length, each in self._chosen.items()
        }

    def profile(self) -> Profile:
        """The buckets; if a layer had to be tightened or made dense at a checked length, those too, as each was proven:
        a new bucket changes what is interpolated at the others."""
        lengths = set(self._recipe.lengths)
        if self._dense or any(length not in lengths for length, _ in self.tightened):
            lengths = {length for length, _ in self.configs}
        return self._profile(self.configs, tuple(sorted(lengths)))

    def _profile(self, configs: dict[tuple[int, int], LayerConfig], lengths: tuple[int, ...]) -> Profile:
        geometry = self._loaded.geometry
        layers = tuple(tuple(configs[length, layer] for layer in range(geometry.layers)) for length in lengths)
        name, fingerprint = self._loaded.name, self._loaded.fingerprint
        return Profile(name, geometry, fingerprint, self._device, lengths, layers).validate()


def _all_dense(config: LayerConfig) -> LayerConfig:
    return replace(config, heads=tuple(replace(head, mode="dense", blocks=None) for head in config.heads))


def over_limit(length: int, layer: int, error: float, limit: float) -> str:
    """What is wrong with a layer, in words; errors in the budget's unit."""
    return f"layer {layer} at {length} tokens has an error of {error:.2e}, {limit:.2e} is allowed"


def _neighbours(length: int, buckets: Sequence[int]) -> list[int]:
    """The buckets next to a length, below and above; one beyond the last."""
    below = [bucket for bucket in buckets if bucket < length]
    above = [bucket for bucket in buckets if bucket > length]
    return below[-1:] + above[:1]


def lost_needles(proofs: dict[int, LengthProof], recipe: Recipe) -> dict[int, str]:
    """The lengths at which too many are lost, and the sentence that says so."""
    return {
        length: f"at {length} tokens the patched model finds {found} of the {of} needles that dense finds, "
        f"{recipe.needles:.0%} are asked for"
        for length, proof in proofs.items()
        if proof.needles is not None
        for found, of in (proof.needles,)
        if found < recipe.needles * of
    }


def _slower(
    proofs: dict[int, LengthProof], configs: Mapping[tuple[int, int], LayerConfig], device: DeviceIdentity
) -> dict[int, str]:
    """The lengths whose prefill takes longer than dense, and the sentence that says so.

    On a CPU times are not the objective; what is all dense runs the same as dense, whatever its times say.
    """
    if device.kind != "cuda":
        return {}
    return {
        length: f"the prefill of {length} tokens takes {proof.prefill_seconds * 1e3:.1f} ms, dense "
        f"{proof.dense_prefill_seconds * 1e3:.1f} ms"
        for length, proof in proofs.items()
        if proof.prefill_seconds > TIE * proof.dense_prefill_seconds
        and not all(configs[length, layer].is_dense for layer in range(len(proof.layers)))
    }


def _identity(loaded: LoadedModel, device: DeviceIdentity) -> dict[str, Any]:
    """What a journal's measurements hold for."""
    return {
        "model": {"name": loaded.name, "fingerprint": loaded.fingerprint, **asdict(loaded.geometry)},
        "device": {"kind": device.kind, "name": device.name, "sm_count": device.sm_count},
        "versions": {name: text for name, text in versions().items() if name in ("s2o", "torch", "triton")},
    }


def _record(recipe: Recipe, prompts: PromptSet, result: Result) -> dict[str, Any]:
    """How the profile was made and what was shown. Times appear only where they were the objective, on a GPU;
    without them the same inputs give the same bytes."""
    on_gpu = result.device.kind == "cuda"
    return {
        "budget": {"kind": recipe.budget.kind, "value": recipe.budget.value, "scope": recipe.scope},
        "objective": "latency" if on_gpu else "predicted latency",
        "recipe": recipe.record(),
        "data": prompts.record(),
        "versions": versions(),
        "proof": "held out" if result.met else "failed",
        "problems": list(result.problems),
        "predicted": [
            {
                "length": length,
                "layers": [
                    choice.allocation.record()
                    | (
                        {"seconds": choice.seconds, "dense_seconds": choice.timing.dense_seconds}
                        if choice.timing is not None
                        else {}
                    )
                    for choice in each.choices
                ],
            }
            for length, each in result.chosen.items()
        ],
        "held_out": [
            {
                "length": length,
                "calibrated": length in result.chosen,
                "kl": proof.kl,
                "top1": proof.top1,
                "needles": None if proof.needles is None else list(proof.needles),
                "layers": [
                    {
                        "mse": layer.mse,
                        "rel_mse": layer.rel_mse,
                        "density": layer.density,
                        "worst": layer.worst,
                        "limit": result.limits[length, index],
                    }
                    for index, layer in enumerate(proof.layers)
                ],
            }
            | (
                {"prefill_seconds": proof.prefill_seconds, "dense_prefill_seconds": proof.dense_prefill_seconds}
                if on_gpu
                else {}
            )
            for length, proof in result.proofs.items()
        ],
    }


@contextmanager
def _bar(description: str, total: int | None, unit: str, progress: bool) -> Iterator[Callable[..., None]]:
    """A progress bar, and what advances it: called with a text, it shows that too."""
    with tqdm(total=total, desc=description, unit=unit, disable=not progress) as bar:

        def step(text: str = "") -> None:
            if text:
                bar.set_postfix_str(text, refresh=False)
            bar.update()

        yield step
