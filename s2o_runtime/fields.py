"""What the value of an option may be: one `Rule` per dataclass field, from which it is read, checked and described.

The settings of the baselines, the calibrator's recipe, the evaluation's plan and its settings for all heads state
their fields with it, so that text, JSON, YAML and Python calls are read and refused alike.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from s2o_runtime.errors import ConfigError

SWITCHES = {"true": True, "on": True, "false": False, "off": False}
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
NONE = "none"
DURATION, SHARE, TOKENS = "seconds", "share", "tokens"  # units with a reading or a name of their own
_PARTS = re.compile(r"[A-Za-z0-9.]+")  # of a name, between dashes
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "a name", Path: "a file name"}


@dataclass(frozen=True)
class Rule:
    """What a value may be.

    Args:
        type: bool, int, float, str or Path; of every value if there are several.
        low, high: the smallest and the largest number; `above` excludes `low` itself.
        multiple: whole numbers must be multiples of it.
        allowed: the only values, where these are few.
        unit: of a number; "seconds" may be written as 5m, "tokens" as 8k for 8192, "share" is called by that name.
        optional: None is a value too, in text "none".
        many: a tuple of such values; numbers and switches in it are different and ascend, and are sorted when read.
        empty: the tuple may be empty, in text "none".
    """

    type: type
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    multiple: int = 1
    allowed: tuple[int | str, ...] = ()
    unit: str = ""
    optional: bool = False
    many: bool = False
    empty: bool = False

    @property
    def single(self) -> Rule:
        """The rule of one of several values."""
        return replace(self, many=False, empty=False, optional=False)

    def read(self, value: object) -> Any:
        """The value that a text, a value of JSON or YAML, or a Python value stands for; its range is not checked.

        Raises:
            ValueError: it stands for none of this type.
        """
        if value is None and self.optional:
            return None
        if not self.many:
            numeric = self.type not in (str, Path)  # whose texts are taken as they are
            return None if self.optional and numeric and value == NONE else self._read_single(value)
        if isinstance(value, Path):
            value = [value]
        if isinstance(value, str):
            value = [] if self.empty and value == NONE else [part.strip() for part in value.split(",")]
            value = [part for part in value if part] if self.type in (str, Path) else value
        if not isinstance(value, list | tuple):
            raise ValueError(f"{type(value).__name__} is not a list")
        values = [self._read_single(part) for part in value]
        return tuple(sorted(set(values)) if self._ascends else values)

    def admits(self, value: object) -> bool:
        """Whether a value has the type and is in the range."""
        if value is None:
            return self.optional
        if not self.many:
            return self._admits_single(value)
        if not isinstance(value, tuple) or not (value or self.empty):
            return False
        ascending = not self._ascends or all(first < second for first, second in pairwise(value))
        return all(self._admits_single(part) for part in value) and ascending

    def checked(self, value: object, name: str, example: str = "") -> Any:
        """The value that `value` stands for, in the range.

        Args:
            value: as `read` takes it.
            name: what the value is of, for the error.
            example: a value that is right, for the error.

        Raises:
            ConfigError: one sentence that names the value, the rule and the example.
        """
        try:
            read = self.read(value)
        except ValueError:
            raise ConfigError(self.complaint(value, name, example)) from None
        if not self.admits(read):
            raise ConfigError(self.complaint(read, name, example))
        return read

    def complaint(self, value: object, name: str, example: str = "") -> str:
        """The sentence for a value that is not admitted."""
        right = self.many and isinstance(value, tuple) and value and all(map(self._admits_single, value))
        disorder = ", not ascending" if right else ""
        return f"{name} is {'empty' if value == () else shown(value)}{disorder}: expected {self}" + (
            f", such as {example}" if example else ""
        )

    def __str__(self) -> str:
        if self.many:
            return f"a list, each {self.single}" + (f", or {NONE}" if self.empty else "")
        return self._described() + (f" or {NONE}" if self.optional else "")

    @property
    def _ascends(self) -> bool:
        return self.type not in (str, Path)

    def _described(self) -> str:
        if self.allowed:
            return f"one of {', '.join(map(str, self.allowed))}"
        noun = _NOUNS[self.type]
        if self.unit:
            noun = "a share" if self.unit == SHARE else f"{noun} of {self.unit}"
        if self.multiple > 1:
            noun = f"a multiple of {self.multiple}"
        low, high = f"{self.low:.9g}", f"{self.high:.9g}"
        if self.low == -math.inf and self.high == math.inf:
            return noun
        if self.high == math.inf:
            return f"{noun} {'above' if self.above else 'of at least'} {low}"
        return f"{noun} above {low} and at most {high}" if self.above else f"{noun} from {low} to {high}"

    def _read_single(self, value: object) -> Any:
        if isinstance(value, str) and not value:
            raise ValueError("the text is empty")
        if self.type is bool and isinstance(value, str):
            value = SWITCHES.get(value.strip().lower())
        elif self.type is Path and isinstance(value, str):
            return Path(value).expanduser()
        elif self.unit == TOKENS and isinstance(value, str) and value.strip()[-1:].lower() == "k":
            value = 1024 * int(value.strip()[:-1])
        elif self.type in (int, float) and isinstance(value, str):  # YAML takes 1e-4, without a point, for a text
            value = duration(value) if self.unit == DURATION else self.type(value)
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                raise ValueError("the number is too large") from None
        if not isinstance(value, self.type) or (isinstance(value, bool) and self.type is not bool):
            raise ValueError(f"expected {self}")
        return value

    def _admits_single(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float) if self.type is float else self.type):
            return isinstance(value, bool) and self.type is bool
        if self.allowed:
            return value in self.allowed
        if not isinstance(value, int | float):
            return True
        if isinstance(value, float) and not math.isfinite(value):
            return False
        beyond = value <= self.low if self.above else value < self.low
        return not beyond and value <= self.high and (self.multiple == 1 or value % self.multiple == 0)


def ruled(default: Any, rule: Rule) -> Any:
    """A field of a dataclass: its default, and the rule of its values."""
    return field(default=default, metadata={"rule": rule})


def rules_of(options: Any) -> dict[str, Rule]:
    """The rules of a dataclass whose fields are `ruled`, by their names."""
    return {one.name: one.metadata["rule"] for one in fields(options)}


def check_fields(options: Any, owner: str) -> None:
    """Raise ConfigError, which names the owner, for a field of such a dataclass whose value its rule does not admit."""
    for name, rule in rules_of(options).items():
        if not rule.admits(value := getattr(options, name)):
            raise ConfigError(rule.complaint(value, f"{name} of {owner}"))


def duration(text: str) -> float:
    """A duration such as 90, 90s, 5m or 1.5h, in seconds. Raises ValueError for anything else."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not parts:
        raise ValueError(f"{text!r} is not a duration")
    return float(parts[1]) * SECONDS[parts[2]]


def did_you_mean(word: str, names: Iterable[str], otherwise: str) -> str:
    """Ask for the shortest names that have all parts of a word, else for the one spelt most like it, if one is."""
    names = sorted({*names}, key=lambda name: (len(name), name))
    parts = {*_PARTS.findall(word)}
    near = [name for name in names if parts and parts <= {*_PARTS.findall(name)}][:2]
    near = near or difflib.get_close_matches(word, names, n=1, cutoff=0.75)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def counted(count: int, noun: str) -> str:
    """A number and its noun: "1 layer", "2 layers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shown(value: object) -> str:
    """A value for a message, short however long or deeply nested it is."""
    return _SHORT.repr(value)
