"""What to calibrate, as one validated dataclass; its options under the names of the flags, as YAML in and out."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from s2o_runtime.config import GRAINS, MAX_SEGMENT, MIN_SEGMENT, REPRESENTATIVES, SEGMENT_STEP
from s2o_runtime.errors import ConfigError
from s2o_runtime.lengths import far_apart

SEGMENTS = (256, 512, 1024, 2048)
CHECK_STEP = 256  # tokens; a default check length is a multiple of it
KINDS = ("mse", "rel_mse")
METHODS = ("s2o", "pbs", "sparge", "auto")
SCOPES = ("layer", "model")
MAX_YAML_BYTES = 1 << 16
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}

T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2


@dataclass(frozen=True)
class Budget:
    """How much error a layer's attention may have.

    kind: "mse" is the mean squared difference from dense attention over the operator's whole output;
    "rel_mse" the same divided by the dense output's mean square, which carries over between models.
    """

    kind: str
    value: float

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Budget:
        """From the options budget_mse or budget_rel_mse; without either the default. Raises ConfigError for both."""
        kinds = [kind for kind in KINDS if f"budget_{kind}" in options]
        if not kinds:
            return DEFAULT_BUDGET
        if len(kinds) > 1:
            raise ConfigError("budget_mse and budget_rel_mse are both given: choose one")
        return cls(kinds[0], options[f"budget_{kinds[0]}"]).validate()

    def validate(self) -> Budget:
        if self.kind not in KINDS:
            raise ConfigError(f"budget kind {self.kind!r} is not known: use {' or '.join(KINDS)}")
        if not math.isfinite(self.value) or self.value <= 0:
            raise ConfigError(f"budget {self.value} is not a positive number: try 1e-4")
        return self

    def error(self, mse: float, dense_power: float) -> float:
        """An error in the budget's unit, from a mean squared error and the dense output's mean square."""
        return mse if self.kind == "mse" else mse / max(dense_power, 1e-30)

    def __str__(self) -> str:
        return f"{self.kind.replace('_', '-')}-{self.value:g}"


DEFAULT_BUDGET = Budget("rel_mse", 1e-3)


@dataclass(frozen=True)
class Recipe:
    """One calibration run.

    model: alias, local folder or hub id.
    lengths: prompt lengths in tokens, ascending.
    num_prompts, held_out: prompts of each length to calibrate on and to prove on.
    trials: Optuna trials for each layer and length.
    margin: the share of the budget that calibration may spend; the rest is left for prompts it has not seen.
    representatives, grains, segments, tails: what a head's representatives, a layer's grain, its segment and a
        head's tail are chosen from.
    scope: the budget holds for every "layer", or for the "model" as the mean over its layers.
    check_lengths: lengths that are not calibrated but proven on held-out prompts too; None is the rule of
        `checked_lengths`, () none.
    time_limit: seconds for the whole search; None has no limit.
    worst_rows: the largest allowed error of a row relative to its norm, at the 0.99 quantile over row tiles; 0 and
        None do not look at rows.
    random_weights: take the model's architecture with random weights.
    needles: the share of the codes found by the dense model that the patched one must find too.
    allow_regression: write a profile even if its proof fails; the profile says so.
    journal: the file that keeps the measurements; None is the rule of `journal_path`.
    method: what computes the heads that are not dense: "s2o", "pbs", "sparge", or for each what is cheapest ("auto").
    """

    model: str
    budget: Budget
    lengths: tuple[int, ...]
    out: Path
    prompts: Path | None = None
    num_prompts: int = 4
    held_out: int = 2
    seed: int = 0
    trials: int = 16
    margin: float = 0.8
    device: str = "cpu"
    representatives: tuple[int, ...] = (1, 32)
    grains: tuple[int, ...] = (4,)
    segments: tuple[int, ...] = SEGMENTS
    tails: tuple[bool, ...] = (False, True)
    scope: str = "layer"
    check_lengths: tuple[int, ...] | None = None
    time_limit: float | None = None
    worst_rows: float | None = 0.5
    needles: float = 0.95
    random_weights: bool = False
    allow_regression: bool = False
    journal: Path | None = None
    method: str = "s2o"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Recipe:
        """The validated recipe of these `OPTIONS`; model, lengths and out must be among them."""
        fields = {name: value for name, value in options.items() if not name.startswith("budget_")}
        return cls(budget=Budget.of(options), scope=options.get("budget_scope", cls.scope), **fields).validate()

    @classmethod
    def from_record(cls, settings: Mapping[str, Any], out: Path) -> Recipe:
        """The recipe that made this `record`. Raises what reading a foreign one does: KeyError, TypeError, ..."""
        settings = dict(settings)
        budget, scope = settings.pop("budget"), settings.pop("scope")
        settings |= {f"budget_{budget['kind']}": budget["value"], "budget_scope": scope}
        options = {
            name: None if value is None and name in NULLABLE else OPTIONS[name][1](value)
            for name, value in settings.items()
        }
        return cls.of(options | {"out": out})

    @property
    def checked_lengths(self) -> tuple[int, ...]:
        """The lengths that are proven without being calibrated.

        By default one between any two neighbours, their geometric mean in whole steps of 256.
        """
        if self.check_lengths is not None:
            return self.check_lengths
        between = ((a, round(math.sqrt(a * b) / CHECK_STEP) * CHECK_STEP, b) for a, b in pairwise(self.lengths))
        return tuple(
            check for shorter, check, longer in between if far_apart(shorter, check) and far_apart(check, longer)
        )

    @property
    def allows_s2o(self) -> bool:
        """Whether heads may run S2O, or other methods only."""
        return self.method in ("s2o", "auto")

    @property
    def prompt_source(self) -> str:
        """Where the prompts come from, in words."""
        return str(self.prompts) if self.prompts else "the Python standard library's sources, with needles"

    @property
    def journal_path(self) -> Path:
        """The journal's file: beside the profile and named by the model alone, so that other budgets find it."""
        return self.journal or self.out.parent / f"{slug(self.model)}.journal.jsonl"

    def validate(self) -> Recipe:
        self.budget.validate()
        if self.scope not in SCOPES:
            raise ConfigError(f"budget_scope {self.scope!r} is not known: use {' or '.join(SCOPES)}")
        if self.method not in METHODS:
            raise ConfigError(f"method {self.method!r} is not known: use one of {', '.join(METHODS)}")
        for name in ("lengths", "segments", "representatives", "grains", "tails"):
            _check_ascending(name, getattr(self, name))
        for segment in self.segments:
            if segment % SEGMENT_STEP or not MIN_SEGMENT <= segment <= MAX_SEGMENT:
                raise ConfigError(
                    f"segments {segment} is not supported: use multiples of {SEGMENT_STEP} "
                    f"from {MIN_SEGMENT} to {MAX_SEGMENT}"
                )
        if self.lengths[0] < self.segments[0]:
            raise ConfigError(
                f"length {self.lengths[0]} is shorter than one segment of {self.segments[0]}: use a longer one"
            )
        if self.check_lengths:
            _check_ascending("check_lengths", self.check_lengths)
            for length in self.check_lengths:
                if length in self.lengths:
                    raise ConfigError(f"check length {length} is calibrated: use one that is not among the lengths")
                if length < self.lengths[0]:
                    raise ConfigError(
                        f"check length {length} is below {self.lengths[0]}, the shortest that is calibrated, where "
                        "prompts stay dense: use a longer one"
                    )
        for shorter, longer in pairwise(sorted(self.lengths + self.checked_lengths)):
            if not far_apart(shorter, longer):
                raise ConfigError(
                    f"lengths {shorter} and {longer} are less than an eighth of an octave apart, which a profile does "
                    "not tell apart: leave one out"
                )
        for name, allowed in (("representatives", REPRESENTATIVES), ("grains", GRAINS)):
            for value in getattr(self, name):
                if value not in allowed:
                    raise ConfigError(f"{name} {value} is not supported: use some of {allowed}")
        for name, least in (("num_prompts", 1), ("held_out", 1), ("trials", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}: use at least {least}")
        if not 0 < self.margin <= 1:
            raise ConfigError(f"margin is {self.margin}: use a share above 0 and at most 1")
        if self.time_limit is not None and not 0 < self.time_limit < math.inf:
            raise ConfigError(f"time_limit is {self.time_limit}: use a number of seconds above 0")
        if not 0 <= self.needles <= 1:
            raise ConfigError(f"needles is {self.needles}: use a share from 0 to 1")
        if self.worst_rows is not None and not 0 <= self.worst_rows < math.inf:
            raise ConfigError(f"worst_rows is {self.worst_rows}: use a number above 0, or 0 for off")
        if self.journal_path == self.out:
            raise ConfigError(f"{self.out} cannot be both the journal and the profile: give another --journal or --out")
        return self

    def check_limit(self, limit: int) -> None:
        """Raises ConfigError if a length is beyond what the model can read."""
        longest = max(self.lengths + self.checked_lengths)
        if longest > limit:
            raise ConfigError(f"length {longest} is beyond the model's limit of {limit}: use a shorter one")

    def segments_for(self, length: int) -> tuple[int, ...]:
        """Segments worth trying at a length: at least half of a prompt must lie in some prefix; one without S2O."""
        fitting = tuple(segment for segment in self.segments if segment <= max(self.segments[0], length // 2))
        return fitting if self.allows_s2o else fitting[:1]

    def record(self) -> dict[str, Any]:
        """The settings that decide the result, for the profile; where files are written does not."""
        settings = asdict(self)
        del settings["out"], settings["journal"]
        settings["prompts"] = self.prompts.name if self.prompts else None
        settings["check_lengths"] = self.checked_lengths
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}

    def to_yaml(self) -> str:
        """Every option, as `load_yaml` reads it."""
        import yaml

        settings = asdict(self)
        budget, scope = settings.pop("budget"), settings.pop("scope")
        options = {"model": settings.pop("model"), f"budget_{budget['kind']}": budget["value"], "budget_scope": scope}
        plain = {name: _plain(value) for name, value in (options | settings).items()}
        return str(yaml.safe_dump(plain, sort_keys=False, default_flow_style=None))


def default_out(model: str, device_name: str, budget: Budget, root: Path = Path("profiles")) -> Path:
    """profiles/<model>/<gpu>/<budget>.safetensors"""
    return root / slug(model) / slug(device_name) / f"{budget}.safetensors"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "model"


def load_yaml(path: Path) -> dict[str, Any]:
    """The options in a recipe file, checked and in the types of `Recipe`; file names are relative to where it runs.

    Raises ConfigError naming the file, the option, what was found and what was expected.
    """
    import yaml

    try:
        with path.open("rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read ({error.strerror}): check the path") from error
    if len(data) > MAX_YAML_BYTES:
        raise ConfigError(f"recipe {path} is larger than {MAX_YAML_BYTES} bytes: it is not a recipe")
    try:
        document = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"recipe {path} is not YAML ({reason}): correct it") from error
    if not isinstance(document, dict):
        raise ConfigError(f"recipe {path} holds a {type(document).__name__}: expected lines such as trials: 16")
    return {name: _read(path, name, value) for name, value in document.items()}


def merged(file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a recipe file, overridden by flags; a budget among the flags replaces one of either kind."""
    budgets = {f"budget_{kind}" for kind in KINDS}
    kept = {name: value for name, value in file.items() if not (name in budgets and budgets & set(flags))}
    return kept | dict(flags)


def seconds(text: str) -> float:
    """A duration such as 90, 90s, 5m or 1.5h, in seconds. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a duration")
    return float(found[1]) * SECONDS[found[2]]


def _check_ascending(name: str, values: tuple[int, ...]) -> None:
    if not values or tuple(sorted(set(values))) != values:
        raise ConfigError(f"{name} {values} are empty, repeated or not ascending: give each once, sorted")


def _plain(value: Any) -> Any:
    """A field's value in YAML's own types."""
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def _read(path: Path, name: Any, value: Any) -> Any:
    """One option of a recipe file in its field's type."""
    if name not in OPTIONS:
        near = difflib.get_close_matches(str(name), OPTIONS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"recipe {path} has {_SHORT.repr(name)}, which is no option: did you mean {near}?")
    expected, read = OPTIONS[name]
    if value is None and name in NULLABLE:
        return None
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"recipe {path}: {name} is {_SHORT.repr(value)}: expected {expected}") from None


def _exactly(kind: type[T]) -> Callable[[Any], T]:
    def read(value: Any) -> T:
        if type(value) is not kind:
            raise TypeError
        return value

    return read


def _list_of(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Sorted, each value once, as the flags' lists are."""
    return lambda values: tuple(sorted({read(value) for value in _exactly(list)(values)}))


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)  # YAML takes 1e-4, without a point, for a text


def _duration(value: Any) -> float:
    return seconds(value) if isinstance(value, str) else _number(value)


def _path(value: Any) -> Path:
    return Path(_exactly(str)(value))


_integer, _switch, _name = _exactly(int), _exactly(bool), _exactly(str)
_integers, _switches = _list_of(_integer), _list_of(_switch)

# the options of a recipe file and of the command line: what a file's value must be, and how it is read
OPTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "model": ("a name", _name),
    "budget_mse": ("a number", _number),
    "budget_rel_mse": ("a number", _number),
    "budget_scope": ("layer or model", _name),
    "lengths": ("a list of integers", _integers),
    "check_lengths": ("a list of integers", _integers),
    "prompts": ("a file name", _path),
    "num_prompts": ("an integer", _integer),
    "held_out": ("an integer", _integer),
    "trials": ("an integer", _integer),
    "time_limit": ("seconds, or a duration such as 5m", _duration),
    "margin": ("a number", _number),
    "worst_rows": ("a number", _number),
    "needles": ("a number", _number),
    "representatives": ("a list of integers", _integers),
    "grains": ("a list of integers", _integers),
    "segments": ("a list of integers", _integers),
    "tails": ("a list of true and false", _switches),
    "seed": ("an integer", _integer),
    "device": ("a name", _name),
    "random_weights": ("true or false", _switch),
    "allow_regression": ("true or false", _switch),
    "journal": ("a file name", _path),
    "method": ("a name", _name),
    "out": ("a file name", _path),
}
NULLABLE = ("prompts", "check_lengths", "time_limit", "worst_rows", "journal")
