"""What a proof runs, judges and tightens: one state of the whole choice. And what it can find wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from calibrate.recipe import Recipe
from calibrate.search.choice import Choice
from calibrate.search.choose import Chosen
from s2o_runtime.config import KvCacheDtype, LayerConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile

LengthAndLayer = tuple[int, int]


@dataclass(frozen=True)
class Change:
    """What replaces a layer's choice at one length.

    config: what it runs now. choice: the search's choice with another budget; None at a length that is not calibrated,
    where there is no choice. tightened: how often it was given less because its error was over its limit. first_error:
    The error before that, in the budget's unit; None if it was not.
    """

    config: LayerConfig
    choice: Choice | None
    tightened: int = 0
    first_error: float | None = None


@dataclass(frozen=True, eq=False)
class Candidate:
    """What every layer shall do at every length. It never changes: `adjust` and `certify` return new ones.

    recipe: the lengths, the budget and what heads may be given. model_name, geometry, fingerprint, device: what the
    profile will be of. chosen: what was chosen at each calibrated length (bucket); an attempt at the proof that failed
    gives a bucket half its budget, or makes it dense. changes: what a layer runs instead of its choice. dense_lengths:
    Checked lengths that are dense as a whole.
    """

    recipe: Recipe
    model_name: str
    geometry: Geometry
    fingerprint: str
    device: DeviceIdentity
    chosen: Mapping[int, Chosen]
    changes: Mapping[LengthAndLayer, Change] = field(default_factory=dict)
    dense_lengths: frozenset[int] = frozenset()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every length that is proven: the calibrated ones, then those that are only checked."""
        return self.recipe.all_lengths

    @property
    def min_length(self) -> int:
        """The shortest calibrated length; shorter prompts stay dense."""
        return min(self.recipe.lengths)

    @property
    def kv_cache_dtype(self) -> KvCacheDtype:
        """The type of the server's cache that the profile is for."""
        return self.recipe.kv_cache_dtype

    def layer_config(self, layer: int, length: int) -> LayerConfig:
        """What a layer runs at a length that is proven.

        A checked length follows the buckets around it as the runtime would interpolate them, unless the layer was
        changed at this very length or the length is dense as a whole.
        """
        if (length, layer) in self.changes:
            return self.changes[length, layer].config
        if length in self.chosen:
            return self.chosen[length].choices[layer].config
        config = self._buckets.layer_config(layer, length)
        return config.as_dense() if length in self.dense_lengths else config

    def choice(self, layer: int, length: int) -> Choice | None:
        """A layer's choice, as changed; None at a length that is not calibrated."""
        if (length, layer) in self.changes:
            return self.changes[length, layer].choice
        return self.chosen[length].choices[layer] if length in self.chosen else None

    def with_layer(
        self, layer: int, length: int, config: LayerConfig, choice: Choice | None, error: float | None = None
    ) -> Candidate:
        """The candidate in which a layer runs something else at one length.

        Args:
            layer, length: which layer, and at how many tokens.
            config, choice: what it runs instead, and the choice behind it.
            error: what it had been over its limit with, if that is why: it counts as one more tightening.
        """
        before = self.changes.get((length, layer), Change(config, choice))
        first_error = error if before.first_error is None else before.first_error
        change = Change(config, choice, before.tightened + (error is not None), first_error)
        return replace(self, changes={**self.changes, (length, layer): change})

    @cached_property
    def configs(self) -> dict[LengthAndLayer, LayerConfig]:
        """What every layer runs at every length that is proven."""
        return {(length, layer): self.layer_config(layer, length) for length, layer in self._lengths_and_layers}

    @cached_property
    def limits(self) -> dict[LengthAndLayer, float]:
        """The error that every layer may have at every length, in the budget's unit.

        At a checked length it is that of the longest bucket.
        """
        longest = self.chosen[self.recipe.lengths[-1]]
        return {
            (length, layer): self.chosen.get(length, longest).limits[layer]
            for length, layer in self._lengths_and_layers
        }

    @cached_property
    def choices(self) -> dict[int, Chosen]:
        """What was chosen at each bucket, with the choices of its layers as they were changed."""
        return {
            length: replace(
                chosen, choices=[self.choice(layer, length) or choice for layer, choice in enumerate(chosen.choices)]
            )
            for length, chosen in self.chosen.items()
        }

    def profile(self) -> Profile:
        """The profile of this candidate, without a record.

        It has the calibrated lengths. If a layer was changed at a checked length, or a checked length is dense, it
        has every length, each as it was proven: one new bucket changes what is interpolated at the other lengths.
        """
        interpolated = not self.dense_lengths and all(length in self.chosen for length, _ in self.changes)
        return self._profile(self.recipe.lengths if interpolated else sorted(self.lengths))

    @cached_property
    def _buckets(self) -> Profile:
        """The calibrated lengths alone, from which the runtime interpolates the others."""
        return self._profile(self.recipe.lengths)

    def _profile(self, lengths: Sequence[int]) -> Profile:
        layers = range(self.geometry.layers)
        configs = tuple(tuple(self.layer_config(layer, length) for layer in layers) for length in lengths)
        profile = Profile(
            self.model_name, self.geometry, self.fingerprint, self.device, lengths=tuple(lengths), layers=configs
        )
        return profile.validate()

    @property
    def _lengths_and_layers(self) -> list[LengthAndLayer]:
        return [(length, layer) for length in self.lengths for layer in range(self.geometry.layers)]


class ProblemKind(Enum):
    """What did not hold, each with what to change, by the command's flags."""

    OVER_LIMIT = "allow more error or calibrate on more prompts (--num-prompts)"
    LOST_NEEDLES = "allow less error, a smaller --worst-rows, or ask for fewer needles (--keep-needles)"
    SLOWER = "calibrate for longer prompts (--lengths), or leave these dense"
    TOO_FEW = "certify on more text (--num-certify, --prompts), or not at all (--num-certify 0)"
    NOT_SHOWN = "allow more error, or certify on more prompts (--num-certify)"


@dataclass(frozen=True)
class Problem:
    """One thing that a proof found wrong at a length in tokens; as text it is the sentence that says so."""

    kind: ProblemKind
    length: int
    text: str

    def __str__(self) -> str:
        return self.text


def lengths_of(problems: Iterable[Problem], kind: ProblemKind | None = None) -> frozenset[int]:
    """The lengths that problems are at, of one kind or of all."""
    return frozenset(problem.length for problem in problems if kind in (None, problem.kind))
