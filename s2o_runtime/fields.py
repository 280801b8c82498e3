"""Rules of option values: each is stated once, with the dataclass field that it is about.

The calibrator's recipe, the evaluation's plan and its settings for all heads, and the servers' settings state their
fields with a `Rule`, so that text, JSON, YAML and Python values are read and refused alike.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError

SWITCHES = {"true": True, "on": True, "false": False, "off": False}
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
NONE = "none"
MAX_DIGITS = 640  # of a whole number in JSON: Python can be told to refuse longer ones
DURATION, SHARE, TOKENS = "seconds", "share", "tokens"  # units with a reading or a name of their own
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_PARTS = re.compile(r"[A-Za-z0-9.]+")  # of a name, between dashes
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2  # a billion laughs in YAML would be printed in full otherwise
_NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "a name", Path: "a file name"}


@dataclass(frozen=True)
class Rule:
    """The type and the range of a value."""

    type: type  # bool, int, float, str or Path; of every value if there are several
    low: float = -math.inf  # the smallest number, and the largest
    high: float = math.inf
    above: bool = False  # excludes `low` itself
    multiple: int = 1  # that whole numbers must be multiples of
    allowed: tuple[int | str, ...] = ()  # the only values, where these are few
    unit: str = ""  # of a number; "seconds" may be written as 5m, "tokens" as 8k, "share" is called by that name
    optional: bool = False  # None is a value too, in text "none"
    many: bool = False  # a tuple of such values; numbers and switches in it are different, and are sorted when read
    empty: bool = False  # the tuple may be empty, in text "none"

    @property
    def single(self) -> Rule:
        """The rule of one of several values."""
        return replace(self, many=False, empty=False, optional=False)

    def read(self, value: object) -> Any:
        """Convert a text, a value of JSON or YAML, or a Python value to the rule's type, without checking its range.

        Raises ValueError if it stands for no value of this type.
        """
        if value is None and self.optional:
            return None
        if not self.many:
            return None if self.optional and self._is_ordered and value == NONE else self._read_single(value)
        if isinstance(value, Path):
            value = [value]
        if isinstance(value, str):
            value = [] if self.empty and value == NONE else [item.strip() for item in value.split(",")]
            # a number that is missing between two commas is a slip; a name that is missing is none
            value = value if self._is_ordered else [item for item in value if item]
        if not isinstance(value, list | tuple):
            raise ValueError(f"{type(value).__name__} is not a list")
        values = [self._read_single(item) for item in value]
        return tuple(sorted(set(values)) if self._is_ordered else values)

    def accepts(self, value: object) -> bool:
        """Return whether a value has the type and is in the range."""
        if value is None or not self.many:
            return self.optional if value is None else self._accepts_single(value)
        if not isinstance(value, tuple) or not (value or self.empty):
            return False
        is_sorted = not self._is_ordered or all(first < second for first, second in pairwise(value))
        return all(map(self._accepts_single, value)) and is_sorted

    def checked(self, value: object, name: str, example: str = "") -> Any:
        """Read a value and check its range. Raises ConfigError, which names the value, the rule and the example."""
        try:
            value = self.read(value)
            if self.accepts(value):
                return value
        except ValueError:
            pass
        raise ConfigError(self.error_message(value, name, example))

    def error_message(self, value: object, name: str, example: str = "") -> str:
        """Return the sentence about a value that is not accepted."""
        unsorted = self.many and isinstance(value, tuple) and value and all(map(self._accepts_single, value))
        problem = "empty" if value == () else short_repr(value) + (", not ascending" if unsorted else "")
        return f"{name} is {problem}: expected {self}" + (f", such as {example}" if example else "")

    def __str__(self) -> str:
        if self.many:
            return f"a list, each {self.single}" + (f", or {NONE}" if self.empty else "")
        noun = f"{_NOUNS[self.type]} of {self.unit}" if self.unit else _NOUNS[self.type]
        noun = "a share" if self.unit == SHARE else f"a multiple of {self.multiple}" if self.multiple > 1 else noun
        low, high = f"{self.low:.9g}", f"{self.high:.9g}"
        if self.allowed:
            noun = f"one of {', '.join(map(str, self.allowed))}"
        elif self.high < math.inf:
            noun += f" above {low} and at most {high}" if self.above else f" from {low} to {high}"
        elif self.low > -math.inf:
            noun += f" {'above' if self.above else 'of at least'} {low}"
        return noun + (f" or {NONE}" if self.optional else "")

    @property
    def _is_ordered(self) -> bool:
        """True for numbers and switches; the texts of other types are taken as they are."""
        return self.type not in (str, Path)

    def _has_type(self, value: object) -> bool:
        types = (int, float) if self.type is float else self.type
        return isinstance(value, types) and isinstance(value, bool) == (self.type is bool)  # a bool is an int to Python

    def _read_single(self, value: object) -> Any:
        if isinstance(value, str):  # of a number too: YAML takes 1e-4, without a point, for a text
            value = (_UNIT_PARSERS.get(self.unit) or _PARSERS[self.type])(value) if value else None
        if not self._has_type(value):
            raise ValueError(f"expected {self}")
        try:
            return float(value) if self.type is float else value  # type: ignore[arg-type]
        except OverflowError:
            raise ValueError("the number is too large") from None

    def _accepts_single(self, value: Any) -> bool:
        if not self._has_type(value):
            return False
        if self.allowed or not isinstance(value, int | float):
            return not self.allowed or value in self.allowed
        beyond = value <= self.low if self.above else value < self.low
        is_finite = isinstance(value, int) or math.isfinite(value)  # an int may be beyond all floats
        return is_finite and not beyond and value <= self.high and (self.multiple == 1 or value % self.multiple == 0)


def validated_field(default: Any, rule: Rule) -> Any:
    """Return a dataclass field with a default and the rule of its values."""
    return field(default=default, metadata={"rule": rule})


def get_rules(options: Any) -> dict[str, Rule]:
    """Return the rules of a dataclass whose fields are `ruled`, by their names."""
    return {ruled_field.name: ruled_field.metadata["rule"] for ruled_field in fields(options)}


def check_fields(options: Any, owner: str) -> None:
    """Raise ConfigError, which names the owner, for a field of such a dataclass that its rule does not accept."""
    for name, rule in get_rules(options).items():
        if not rule.accepts(value := getattr(options, name)):
            raise ConfigError(rule.error_message(value, f"{name} of {owner}"))


def parse_duration(text: str) -> float:
    """Convert a duration such as 90, 90s, 5m or 1.5h to seconds. Raises ValueError for anything else."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not parts:
        raise ValueError(f"{text!r} is not a duration")
    return float(parts[1]) * SECONDS[parts[2]]


def _parse_tokens(text: str) -> int:
    digits = text.strip().lower()
    return 1024 * int(digits[:-1]) if digits.endswith("k") else int(digits)


_PARSERS: dict[type, Callable[[str], Any]] = {
    bool: lambda text: SWITCHES.get(text.strip().lower()), Path: lambda text: Path(text).expanduser(),
    int: int, float: float, str: str,
}  # fmt: skip
_UNIT_PARSERS: dict[str, Callable[[str], Any]] = {DURATION: parse_duration, TOKENS: _parse_tokens}


def did_you_mean(word: str, names: Iterable[str], otherwise: str) -> str:
    """Ask for the shortest names that have all parts of a word, else for the one spelt most like it, if one is."""
    names = sorted({*names}, key=lambda name: (len(name), name))
    parts = {*_PARTS.findall(word)}
    near = [name for name in names if parts and parts <= {*_PARTS.findall(name)}][:2]
    near = near or difflib.get_close_matches(word, names, n=1, cutoff=0.75)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def group_by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key; keys and values stay in their order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def pluralize(count: int, noun: str) -> str:
    """Return a number and its noun: "1 layer", "2 layers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_ranges(numbers: Iterable[int]) -> str:
    """Format ascending whole numbers: [0, 1, 2, 5] -> "0-2, 5"."""
    by_run = groupby(enumerate(numbers), lambda entry: entry[1] - entry[0])  # the same for all of a run
    runs = [[number for _, number in entries] for _, entries in by_run]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def read_json(text: str) -> Any:
    """Return what JSON holds; whole numbers of more digits than `MAX_DIGITS` are infinite.

    Raises ValueError if it is not JSON, or an object has a name twice.
    """
    return json.loads(
        text,
        object_pairs_hook=_require_unique_names,
        parse_int=lambda digits: int(digits) if len(digits) <= MAX_DIGITS else math.inf,
    )


def _require_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    times = Counter(name for name, _ in pairs)
    if twice := next((name for name in times if times[name] > 1), None):
        raise ValueError(f"an object has {short_repr(twice)} twice, and only the last would be read: name each once")
    return dict(pairs)


def short_repr(value: object) -> str:
    """Return a value's repr for a message, short however long or deeply nested the value is."""
    return _SHORT.repr(value)
