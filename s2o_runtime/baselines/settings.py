"""The options of every baseline, their ranges, and how they are written as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

from s2o_runtime.errors import ConfigError

BLOCKS = (64, 128, 256)
MAX_COUNT = 1 << 24
METHOD = "method"  # the key of a record that names the class


class Rule(NamedTuple):
    """What a field may be: numbers from `low` to `high`, one of `allowed`, a switch, and perhaps None."""

    low: float = 0.0
    high: float = 0.0
    allowed: tuple[int, ...] = ()
    whole: bool = False
    switch: bool = False
    optional: bool = False

    def __str__(self) -> str:
        if self.switch:
            return "True or False"
        if self.allowed:
            return f"one of {self.allowed}"
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {self.low:.9g} to {self.high:.9g}" + (" or None" if self.optional else "")

    def admits(self, value: object) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, bool) or self.switch:
            return self.switch and isinstance(value, bool)
        if not isinstance(value, int if self.whole or self.allowed else (int, float)):
            return False
        return value in self.allowed if self.allowed else math.isfinite(value) and self.low <= value <= self.high

    def read(self, text: str) -> object:
        """The value that `text` stands for; the text itself if it stands for none."""
        if self.switch or (self.optional and text == "none"):
            return {"true": True, "false": False, "none": None}.get(text, text)
        try:
            return int(text) if self.whole or self.allowed else float(text)
        except ValueError:
            return text


def _share(default: float) -> Any:
    return field(default=default, metadata={"rule": Rule(1e-6, 1.0)})


def _number(default: float | None, low: float, high: float) -> Any:
    return field(default=default, metadata={"rule": Rule(low, high, optional=default is None)})


def _count(default: int, low: int = 0, high: int = MAX_COUNT) -> Any:
    return field(default=default, metadata={"rule": Rule(low, high, whole=True)})


def _one_of(default: int, allowed: tuple[int, ...]) -> Any:
    return field(default=default, metadata={"rule": Rule(allowed=allowed)})


def _switch(default: bool) -> Any:
    return field(default=default, metadata={"rule": Rule(switch=True)})


Self = TypeVar("Self", bound="_Settings")


@dataclass(frozen=True)
class _Settings:
    name: ClassVar[str]

    def validate(self: Self) -> Self:
        """Raises ConfigError naming the field that is out of its range."""
        for each in fields(self):
            _admit(type(self), each, getattr(self, each.name))
        self._check()
        return self

    def _check(self) -> None:
        """What depends on several fields."""

    def record(self) -> dict[str, object]:
        """For JSON: the method's name and every field."""
        return {METHOD: self.name, **asdict(self)}

    def __str__(self) -> str:
        options = (f"{name}={_text(value)}" for name, value in asdict(self).items())
        return f"{self.name}:{','.join(options)}"


@dataclass(frozen=True)
class MeanPooling(_Settings):
    """Blocks by the softmax of pooled queries and keys (PBS-Attn, Algorithm 2).

    keep: the share of a row's mass that the chosen blocks hold; block: queries and keys of a block;
    first: so many blocks at the beginning are always computed.
    """

    name: ClassVar[str] = "mean-pooling"
    keep: float = _share(0.9)
    block: int = _one_of(128, BLOCKS)
    first: int = _count(1)


@dataclass(frozen=True)
class PBS(_Settings):
    """PBS-Attn: keys sorted inside each segment by what the last block of queries gives them, then MeanPooling.

    permute: sort keys; permute_queries: cluster queries by the key block they are most similar to; with neither it
    is MeanPooling. The segment that holds a row block's own positions is always computed.
    """

    name: ClassVar[str] = "pbs"
    keep: float = _share(0.9)
    segment: int = _count(256, 64, 1 << 16)
    block: int = _one_of(128, BLOCKS)
    permute: bool = _switch(True)
    permute_queries: bool = _switch(False)
    first: int = _count(1)

    def _check(self) -> None:
        if self.segment % self.block:
            raise ConfigError(f"segment {self.segment} of pbs is not a multiple of its block {self.block}: round it")


@dataclass(frozen=True)
class Sparge(_Settings):
    """SpargeAttn without quantisation.

    keep: tau of TopCdf; similarity: theta, blocks less alike inside are always computed; skip: lambda, the product
    with v is left out where every score is that far below its row's maximum, None never; block, block_k: queries and
    keys of a block.
    """

    name: ClassVar[str] = "sparge"
    keep: float = _share(0.9)
    similarity: float = _number(0.6, -1.0, 1.0)
    skip: float | None = _number(None, -1e4, -1e-6)
    block: int = _one_of(128, BLOCKS)
    block_k: int = _one_of(64, BLOCKS)


@dataclass(frozen=True)
class AShape(_Settings):
    """MInference's A-shape: the first `sink` keys and the `local` last ones, rounded up to blocks."""

    name: ClassVar[str] = "a-shape"
    sink: int = _count(1024)
    local: int = _count(4096, 1)
    block: int = _one_of(128, BLOCKS)


@dataclass(frozen=True)
class VerticalSlash(_Settings):
    """MInference's vertical-slash: `vertical` columns and `slash` diagonals, by what the last `queries` rows see."""

    name: ClassVar[str] = "vertical-slash"
    vertical: int = _count(1000)
    slash: int = _count(6096)
    queries: int = _count(64, 1, 1024)
    block: int = _one_of(64, BLOCKS)


@dataclass(frozen=True)
class Antidiagonal(_Settings):
    """XAttention: blocks by the softmax of sums along every `stride`th antidiagonal."""

    name: ClassVar[str] = "xattention"
    keep: float = _share(0.9)
    stride: int = _one_of(16, (4, 8, 16, 32, 64))
    block: int = _one_of(128, BLOCKS)


Baseline = MeanPooling | PBS | Sparge | AShape | VerticalSlash | Antidiagonal
BASELINES: dict[str, type[Baseline]] = {
    each.name: each for each in (MeanPooling, PBS, Sparge, AShape, VerticalSlash, Antidiagonal)
}


def parse(text: str) -> Baseline:
    """Settings from text: a method, then options that differ from the defaults.

    Raises ConfigError. `str(settings)` is the inverse.

    >>> parse("pbs:keep=0.8,segment=512").segment
    512
    """
    name, _, rest = text.partition(":")
    kind = _kind(name)
    rules = {each.name: _rule(each) for each in fields(kind)}
    values: dict[str, object] = {}
    for option in filter(None, rest.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"option {option!r} of {name} has no value: write {name}:name=value")
        if key not in rules:
            raise ConfigError(f"{name} has no option {key!r}: use {', '.join(rules)}")
        if key in values:
            raise ConfigError(f"option {key} of {name} is given twice: give it once")
        values[key] = rules[key].read(value)
    return _made(kind, values)


def from_record(record: object) -> Baseline:
    """The inverse of `record()`, with every field present and no other. Raises ConfigError naming the field."""
    if not isinstance(record, Mapping):
        raise ConfigError(f"a baseline's record is {record!r:.60}: expected an object")
    name = record.get(METHOD)
    if not isinstance(name, str):
        raise ConfigError(f"{METHOD} of a baseline's record is {name!r:.60}: expected one of {', '.join(BASELINES)}")
    kind = _kind(name)
    known = [each.name for each in fields(kind)]
    for key in record:
        if key not in (METHOD, *known):
            raise ConfigError(f"{name} has no field {key!r:.60}: expected {', '.join(known)}")
    for key in known:
        if key not in record:
            raise ConfigError(f"field {key} of {name} is missing: expected {', '.join(known)}")
    return _made(kind, {key: record[key] for key in known})


def _kind(name: str) -> type[Baseline]:
    if name not in BASELINES:
        raise ConfigError(f"method {name!r:.60} is not known: use one of {', '.join(BASELINES)}")
    return BASELINES[name]


def _made(kind: type[Baseline], values: dict[str, object]) -> Baseline:
    for each in fields(kind):
        if each.name in values:
            _admit(kind, each, values[each.name])
    given: dict[str, Any] = {
        # 1 and 1.0 are one setting, written one way
        each.name: float(value) if _is_float(each) and isinstance(value, int) else value
        for each in fields(kind)
        if (value := values.get(each.name, each.default)) is not None or each.name in values
    }
    return kind(**given).validate()


def _rule(each: Field[Any]) -> Rule:
    rule: Rule = each.metadata["rule"]
    return rule


def _is_float(each: Field[Any]) -> bool:
    rule = _rule(each)
    return not (rule.whole or rule.allowed or rule.switch)


def _admit(kind: type[_Settings], each: Field[Any], value: object) -> None:
    rule = _rule(each)
    if not rule.admits(value):
        raise ConfigError(f"{each.name} of {kind.name} is {value!r:.60}: expected {rule}")


def _text(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)
