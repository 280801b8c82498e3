"""The options of every baseline, their ranges, and how they are written as text."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from s2o_runtime.errors import ConfigError
from s2o_runtime.fields import Rule, check_fields, get_rules, validated_field

SHARE = Rule(float, 1e-6, 1.0)
COUNT = Rule(int, 0, 1 << 24)
BLOCK = Rule(int, allowed=(64, 128, 256))
Self = TypeVar("Self", bound="_Settings")


@dataclass(frozen=True)
class _Settings:
    name: ClassVar[str]

    def validate(self: Self) -> Self:
        """Return the settings themselves. Raises ConfigError with the option that is out of its range."""
        check_fields(self, self.name)
        self._check()
        return self

    def _check(self) -> None:
        """Raise ConfigError for options that do not fit one another."""

    def runs_dense(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, stays dense when a model runs with these settings."""
        return False

    def __str__(self) -> str:
        options = ",".join(f"{option.name}={_text(getattr(self, option.name))}" for option in fields(self))
        return f"{self.name}:{options}"


@dataclass(frozen=True)
class FlashPrefill(_Settings):
    """FlashPrefill: blocks whose weight is at least a share of the largest, by queries and the means of keys.

    Attributes:
        alpha: the share of the largest weight of a block; 0 keeps all.
        block: queries and keys of a block.
        first: blocks at the beginning that are always computed.
        window: last blocks of each row block, the diagonal included, that are always computed.
        last: last row blocks of a call that compute everything.
    """

    name: ClassVar[str] = "flash-prefill"
    packed: ClassVar[bool] = False  # whether the query heads of a KV head share row blocks
    alpha: float = validated_field(0.12, Rule(float, 0.0, 1.0))
    block: int = validated_field(128, Rule(int, allowed=(64, 128)))
    first: int = validated_field(2, COUNT)
    window: int = validated_field(4, COUNT)
    last: int = validated_field(2, COUNT)

    @property
    def log_share(self) -> float:
        """The logarithm of alpha, with which logarithms of weights are compared: the sum of all weights cancels."""
        return math.log(self.alpha) if self.alpha else -math.inf


@dataclass(frozen=True)
class FlashPrefillV2(FlashPrefill):
    """FlashPrefill V2: row blocks of all query heads of a KV head, and means in place of the blocks that are left out.

    With g query heads to a KV head, `block` rows are `block / g` positions; `last` counts such row blocks.

    Attributes:
        correct: let the mean key and the mean value of a block that is left out stand for each of its keys.
        dense_layers: first layers of the model that are dense, as in the authors' example; a call knows no layer, so
            the model's caller asks `runs_dense`.
    """

    name: ClassVar[str] = "flash-prefill-v2"
    packed: ClassVar[bool] = True
    alpha: float = validated_field(0.1, Rule(float, 0.0, 1.0))
    last: int = validated_field(8, COUNT)
    correct: bool = validated_field(True, Rule(bool))
    dense_layers: int = validated_field(4, COUNT)

    def runs_dense(self, layer: int) -> bool:
        return layer < self.dense_layers


@dataclass(frozen=True)
class FlexPrefill(_Settings):
    """FlexPrefill: columns and diagonals that a sample of queries attends to, or blocks by means over all row blocks.

    Attributes:
        keep: gamma, the share of the weight that the columns, the diagonals, or the blocks by means hold.
        tau: a head goes by means where these estimate the sample's attention to blocks within this distance.
        least_keys: columns, and diagonals, that are at least computed, in whole blocks.
        block: queries and keys of a block, and queries of the sample.
        first: blocks at the beginning that are always computed; they count among the columns.
    """

    name: ClassVar[str] = "flex-prefill"
    keep: float = validated_field(0.9, SHARE)
    tau: float = validated_field(0.1, Rule(float, 0.0, 1.0))
    least_keys: int = validated_field(1024, COUNT)
    block: int = validated_field(128, BLOCK)
    first: int = validated_field(1, COUNT)


@dataclass(frozen=True)
class PBS(_Settings):
    """PBS-Attn: keys sorted inside each segment by the attention of the last block of queries, then blocks by means.

    Blocks are chosen by the softmax of pooled queries and keys. The segment that holds a row block's own positions is
    always computed.

    Attributes:
        keep: the share of a row's mass that the chosen blocks hold.
        segment: keys that are permuted among themselves; a multiple of `block`.
        block: queries and keys of a block.
        first: blocks at the beginning that are always computed.
    """

    name: ClassVar[str] = "pbs"
    keep: float = validated_field(0.9, SHARE)
    segment: int = validated_field(256, Rule(int, 64, 1 << 16))
    block: int = validated_field(128, BLOCK)
    first: int = validated_field(1, COUNT)

    def _check(self) -> None:
        if self.segment % self.block:
            raise ConfigError(f"segment {self.segment} of pbs is not a multiple of its block {self.block}: round it")


@dataclass(frozen=True)
class Sparge(_Settings):
    """SpargeAttn without quantisation and without its skip of products with v.

    Attributes:
        keep: tau of TopCdf, the share of a row's mass that the chosen blocks hold.
        similarity: theta; blocks with a smaller self-similarity are always computed.
        block, block_k: queries and keys of a block.
        first: blocks at the beginning that are always computed; the paper has none, the authors' code can keep one.
    """

    name: ClassVar[str] = "sparge"
    keep: float = validated_field(0.9, SHARE)
    similarity: float = validated_field(0.6, Rule(float, -1.0, 1.0))
    block: int = validated_field(128, BLOCK)
    block_k: int = validated_field(64, BLOCK)
    first: int = validated_field(0, COUNT)


@dataclass(frozen=True)
class Antidiagonal(_Settings):
    """XAttention: blocks by the softmax of sums along antidiagonals.

    Attributes:
        keep: the share of a row's mass that the chosen blocks hold.
        stride: the distance of the antidiagonals.
        block: queries and keys of a block.
        first: blocks at the beginning that are always computed; the paper has none, the authors' scripts keep one.
    """

    name: ClassVar[str] = "xattention"
    keep: float = validated_field(0.9, SHARE)
    stride: int = validated_field(16, Rule(int, allowed=(4, 8, 16, 32, 64)))
    block: int = validated_field(128, BLOCK)
    first: int = validated_field(0, COUNT)


Baseline = FlashPrefill | FlashPrefillV2 | FlexPrefill | PBS | Sparge | Antidiagonal
BASELINES: dict[str, type[Baseline]] = {
    settings.name: settings for settings in (FlashPrefill, FlashPrefillV2, FlexPrefill, PBS, Sparge, Antidiagonal)
}


def parse(text: str) -> Baseline:
    """Settings from text: the name of a baseline, then the options that differ from their defaults.

    `str(settings)` is the inverse.

    Raises:
        ConfigError: the text names no baseline or no option of it, or a value is out of its range.

    >>> parse("pbs:keep=0.8,segment=512").segment
    512
    """
    name, _, assignments = text.partition(":")
    if name not in BASELINES:
        raise ConfigError(f"baseline {name!r:.60} is not known: use one of {', '.join(BASELINES)}")
    rules = get_rules(BASELINES[name])
    values: dict[str, Any] = {}
    for assignment in filter(None, assignments.split(",")):
        key, equals, value_text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"option {assignment!r} of {name} has no value: write {name}:name=value")
        if key not in rules:
            raise ConfigError(f"{name} has no option {key!r}: use {', '.join(rules)}")
        if key in values:
            raise ConfigError(f"option {key} of {name} is given twice: give it once")
        values[key] = rules[key].checked(value_text, f"{key} of {name}")
    return BASELINES[name](**values).validate()


def _text(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)
