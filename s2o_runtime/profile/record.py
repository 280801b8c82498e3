"""The record of a profile: how it was made, what was predicted of it and what was proven.

The calibrator writes it. The runtime reads the budget and the limits of the held-out proof, for the drift check;
`s2o-doctor` reads `proof`, `certificate` and `problems` too, to print them. `s2o-profile` reads the rest.

Each part of the record is a frozen dataclass below `Part`, which has the one reader and the one writer. The reader
follows three rules, because a record may come from an older version, from a newer one, or from somebody else:

- Every field is optional. A field that the file does not have is None.
- A value that does not have its field's type counts as missing. A list has its type only if all its entries do.
- A field that this version does not know, and a value that counts as missing, is kept in `extra` and written back as
  it was. So reading and writing a record changes nothing in it.

The metadata of the fields (`unit`, `meaning`) is what FORMAT.md beside this file is generated from.
"""

# ruff: noqa: RUF009 -- what `_recorded` returns is a field of dataclasses
from __future__ import annotations

import types
from collections.abc import Mapping
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

ErrorUnit = Literal["mse", "rel_mse"]  # of a layer's error
BudgetKind = ErrorUnit
BudgetScope = Literal["layer", "model"]
BUDGET_KINDS: tuple[BudgetKind, ...] = get_args(BudgetKind)
BUDGET_SCOPES: tuple[BudgetScope, ...] = get_args(BudgetScope)

AnyPart = TypeVar("AnyPart", bound="Part")


class FieldFormat(NamedTuple):
    """How one field of a part stands in the file.

    key: its name in the JSON object; name: its name in Python; type: what the reader accepts, without `None`.
    unit, meaning: for the documentation.
    """

    key: str
    name: str
    type: Any
    unit: str
    meaning: str


def _recorded(meaning: str, unit: str = "", key: str = "") -> Any:
    """An optional field of a part. `key` is its name in the file where that is no Python name."""
    return field(default=None, metadata={"meaning": meaning, "unit": unit, "key": key})


@dataclass(frozen=True, kw_only=True)
class Part:
    """A JSON object of the record.

    extra: what the file has in this object and the reader does not understand, by key.
    """

    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def formats(cls) -> tuple[FieldFormat, ...]:
        """The fields of this part as they stand in the file, without `extra`."""
        if cls not in _FORMATS:
            types_of = get_type_hints(cls)
            _FORMATS[cls] = tuple(
                FieldFormat(
                    one.metadata["key"] or one.name,
                    one.name,
                    get_args(types_of[one.name])[0],  # of X | None
                    one.metadata["unit"],
                    one.metadata["meaning"],
                )
                for one in fields(cls)
                if one.metadata
            )
        return _FORMATS[cls]

    @classmethod
    def from_json(cls: type[AnyPart], document: Mapping[str, Any]) -> AnyPart:
        """Read a part.

        Args:
            document: a JSON object; it is not changed. What is missing, unknown or of another type is no error: see
                the rules at the top of this file.
        """
        extra, values = dict(document), dict[str, Any]()
        for recorded in cls.formats():
            if recorded.key in extra:
                try:
                    values[recorded.name] = _read(recorded.type, extra[recorded.key])
                except TypeError:
                    continue
                del extra[recorded.key]
        return cls(**values, extra=extra)

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads as an equal part. Fields that are None are left out."""
        values = ((recorded.key, getattr(self, recorded.name)) for recorded in self.formats())
        return {**self.extra, **{key: _written(value) for key, value in values if value is not None}}


_FORMATS: dict[type[Part], tuple[FieldFormat, ...]] = {}  # resolving the types takes long beside reading a part


def _read(expected: Any, value: Any) -> Any:
    """A JSON value as the type of its field. Raises TypeError if it has another one."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(arguments[0], value)
    if origin is tuple and isinstance(value, (list, tuple)):
        entries = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(entries) == len(value):
            return tuple(_read(entry, item) for entry, item in zip(entries, value, strict=True))
    elif origin is AbstractMapping and isinstance(value, Mapping):
        return {key: _read(arguments[1], item) for key, item in value.items()}
    elif expected is Any or (origin is Literal and value in arguments):
        return value
    elif isinstance(expected, type) and issubclass(expected, Part) and isinstance(value, Mapping):
        return expected.from_json(value)
    elif type(value) is expected or (expected is float and type(value) is int):
        return value
    raise TypeError(f"{type(value).__name__} instead of {expected}")


def _written(value: Any) -> Any:
    if isinstance(value, Part):
        return value.to_json()
    if isinstance(value, tuple):
        return [_written(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


@dataclass(frozen=True, kw_only=True)
class RecordedBudget(Part):
    """The error that the calibration was allowed."""

    kind: BudgetKind | None = _recorded("`mse` or `rel_mse`: the unit of `value` and of every `limit`")
    value: float | None = _recorded("the error allowed", "its kind")
    ceiling_rel_mse: float | None = _recorded(
        "beside an `mse` the largest `rel_mse`: a layer's `limit` is the smaller of `value` and this times the mean "
        "square of its dense output; absent without a ceiling"
    )
    scope: BudgetScope | None = _recorded("`layer`: of every layer; `model`: of the mean over layers")

    @property
    def unit(self) -> ErrorUnit | None:
        """The unit of a layer's errors and limits; None if no budget is recorded."""
        return self.kind


@dataclass(frozen=True, kw_only=True)
class PromptHash(Part):
    """One prompt that took part."""

    length: int | None = _recorded("of the prompt", "tokens")
    sha256: str | None = _recorded("over its token ids as int64, little-endian")


@dataclass(frozen=True, kw_only=True)
class PromptHashes(Part):
    """The prompts that took part (`calibrate.prompts.prompts.PromptSet`)."""

    calibration: tuple[PromptHash, ...] | None = _recorded("the prompts that were calibrated on")
    held_out: tuple[PromptHash, ...] | None = _recorded("the prompts that layers were adjusted on")
    certify: tuple[PromptHash, ...] | None = _recorded(
        "the prompts of the certificate, none of which was calibrated or adjusted on"
    )


@dataclass(frozen=True, kw_only=True)
class PredictedLayer(Part):
    """What the curves say of one layer as it was chosen."""

    mse: float | None = _recorded("mean over heads, of the mean over prompts plus one deviation", "output squared")
    density: float | None = _recorded("mean over heads", "share")
    cost: float | None = _recorded("density and ranking", "dense attention's time")
    seconds: float | None = _recorded(
        "attention as timed by the search; on a GPU only, and only where it was not tightened afterwards", "seconds"
    )
    dense_seconds: float | None = _recorded("dense attention, timed in turns with it", "seconds")


@dataclass(frozen=True, kw_only=True)
class PredictedLength(Part):
    """What the curves say of one calibrated length."""

    length: int | None = _recorded("of the prompts", "tokens")
    layers: tuple[PredictedLayer, ...] | None = _recorded("one entry for each layer, in their order")


@dataclass(frozen=True, kw_only=True)
class ProvenLayer(Part):
    """What the prompts that layers were adjusted on say of one layer."""

    mse: float | None = _recorded("mean over the held-out prompts", "output squared")
    rel_mse: float | None = _recorded("the same over the dense output's mean square")
    density: float | None = _recorded("mean over heads and held-out prompts", "share")
    worst: float | None = _recorded("the 0.99 quantile over row tiles of the largest error of a row over its norm")
    limit: float | None = _recorded("the error the layer may have", "the budget's kind")
    binds: ErrorUnit | None = _recorded(
        "which of its two limits `limit` is; of a budget in `mse` with a ceiling for every layer only"
    )
    tightened: int | None = _recorded("how often the layer was tightened at this length because it was over its limit")
    first_error: float | None = _recorded("the error before the layer was tightened", "the budget's kind")

    def error(self, unit: ErrorUnit) -> float | None:
        """The error in a budget's unit."""
        return self.rel_mse if unit == "rel_mse" else self.mse


@dataclass(frozen=True, kw_only=True)
class ProvenLength(Part):
    """What the prompts that layers were adjusted on say of one length."""

    length: int | None = _recorded("of the prompts", "tokens")
    calibrated: bool | None = _recorded("false for a length that was only checked")
    kl: float | None = _recorded("mean over positions of KL(dense, patched) of the next token", "nats")
    top1: float | None = _recorded("of positions where both find the same token most likely", "share")
    needles: tuple[int, int] | None = _recorded(
        "needles the patched model keeps of those the dense one finds, and how many that are; absent if the prompts "
        "ask for none"
    )
    prefill_seconds: float | None = _recorded("all decoder layers on the first prompt; on a GPU only", "seconds")
    dense_prefill_seconds: float | None = _recorded("the dense model's", "seconds")
    layers: tuple[ProvenLayer, ...] | None = _recorded("one entry for each layer, in their order")


@dataclass(frozen=True, kw_only=True)
class CertifiedLayer(Part):
    """What is certified of one layer; a layer that is dense has no error."""

    mean: float | None = _recorded("error, mean over the certify prompts", "the budget's kind")
    bound: float | None = _recorded(
        "upper bound for the mean over prompts of the error over all rows; at most the limit", "the budget's kind"
    )
    spent: float | None = _recorded(
        "of what it was adjusted to spend, what the certificate left it; 0: dense; absent if its first bound held",
        "share",
    )
    density: float | None = _recorded("mean over heads and certify prompts", "share")
    limit: float | None = _recorded("the error the layer may have", "the budget's kind")
    rel_mse: float | None = _recorded(
        "the mean error over the mean square of the dense output on the certify prompts; of a budget in `mse` only"
    )
    binds: ErrorUnit | None = _recorded(
        "which of its two limits `limit` is; of a budget in `mse` with a ceiling for every layer only"
    )

    @property
    def rel_bound(self) -> float | None:
        """The bound as a `rel_mse`; None where that of the mean is not recorded."""
        if self.bound is None or not self.mean or self.rel_mse is None:
            return None
        return self.bound * self.rel_mse / self.mean


@dataclass(frozen=True, kw_only=True)
class CertifiedRetrieval(Part):
    """The needles of the certify prompts."""

    found: int | None = _recorded("needles that the dense model finds; 0: retrieval is not proven")
    kept: int | None = _recorded(
        "of these, needles that the patched model finds too or whose log-probability fell by less than 1 nat"
    )
    low: float | None = _recorded("lower end of the Clopper-Pearson interval for the share kept", "share")
    high: float | None = _recorded("its upper end", "share")


@dataclass(frozen=True, kw_only=True)
class CertifiedDomain(Part):
    """One kind of text among the certify prompts."""

    domain: str | None = _recorded("its name")
    prompts: int | None = _recorded("how many of the prompts are of it")
    groups: int | None = _recorded("groups of text, such as novels, that these are from")
    kl: float | None = _recorded("mean over them", "nats")
    error_over_limit: float | None = _recorded("the largest mean error of a layer over its limit", "share")
    answer_over_limit: float | None = _recorded("the same over the rows that answer", "share")


@dataclass(frozen=True, kw_only=True)
class CertifiedLength(Part):
    """What is certified of one length: every layer's mean error is within its limit, and, with the certificate's
    confidence, at least `share` of prompts like these keep the errors of all layers within `error_over_limit` times
    their limits, over all rows and over those that answer, and their KL within `kl`, together."""

    length: int | None = _recorded("of the prompts", "tokens")
    prompts: int | None = _recorded("how many prompts")
    groups: int | None = _recorded("groups of text that these are from, which are what is counted")
    tokens: int | None = _recorded("of them all", "tokens")
    share: float | None = _recorded("of prompts that keep both of the next; absent if all is dense", "share")
    error_over_limit: float | None = _recorded("the largest error of a layer on a prompt over its limit")
    kl: float | None = _recorded(
        "KL(dense, patched) of the next token, mean over a prompt's positions; absent where it is 0", "nats"
    )
    mean_kl: float | None = _recorded("the same, mean over the prompts", "nats")
    noise_floor: float | None = _recorded(
        "mean KL between two dense implementations on the first two prompts; absent where rounding is negligible",
        "nats",
    )
    top1: float | None = _recorded("the least share of a prompt's positions with the same most likely token", "share")
    retrieval: CertifiedRetrieval | None = _recorded("absent if the prompts ask for no needles")
    domains: tuple[CertifiedDomain, ...] | None = _recorded("the same by kind of text")
    layers: tuple[CertifiedLayer, ...] | None = _recorded("one entry for each layer, in their order")


@dataclass(frozen=True, kw_only=True)
class Certificate(Part):
    """What was shown on prompts that had no part in choosing the settings."""

    confidence: float | None = _recorded(
        "that all means of all lengths are within their limits; of each length's claim about prompts; of each interval",
        "share",
    )
    method: str | None = _recorded("how bounds were made, in words")
    lengths: tuple[CertifiedLength, ...] | None = _recorded("calibrated and checked lengths")


@dataclass(frozen=True, kw_only=True)
class RetiledLayers(Part):
    """Layers alike in shape and density, which were timed as one."""

    timed_at: int | None = _recorded("the length at which they were timed", "tokens")
    layers: tuple[tuple[int, int], ...] | None = _recorded("pairs of length and layer")
    density: float | None = _recorded("of the synthetic inputs", "share")
    tile: str | None = _recorded("the fastest tile; absent if none fits")
    seconds: float | None = _recorded("attention with that tile; absent if none fits", "seconds")
    dense_seconds: float | None = _recorded("dense attention; absent if none fits", "seconds")


@dataclass(frozen=True, kw_only=True)
class Retiling(Part):
    """How the profile got the tiles of another GPU than it was made on."""

    made_on: str | None = _recorded(
        "the device the profile was made on; errors, densities and times elsewhere in the record are of it", key="from"
    )
    tuned_for: str | None = _recorded("the device its tiles are for", key="to")
    versions: Mapping[str, str] | None = _recorded("as `record.versions`, of the tuning")
    dense_layers: int | None = _recorded(
        "layers of all lengths that became dense, because no tile beats dense attention there"
    )
    note: str | None = _recorded("this, as a sentence")
    timed: tuple[RetiledLayers, ...] | None = _recorded(
        "one entry for all layers alike in shape and density", key="kinds"
    )


@dataclass(frozen=True, kw_only=True)
class Record(Part):
    """How a profile was made and what was shown of it.

    `recipe` is the calibrator's settings, by the names of its options: `calibrate.recipe.Recipe` writes and reads it.
    """

    budget: RecordedBudget | None = _recorded("the error that the calibration was allowed")
    objective: str | None = _recorded("`latency` (measured on a GPU) or `predicted latency`")
    proof: str | None = _recorded(
        "`held out`: within the budget on the held-out prompts, which layers were adjusted on. `failed`: not, written "
        "all the same (`--allow-regression`). `none`: predicted for another budget. `held out on <device>`: proven "
        "there, then given the tiles of another GPU"
    )
    problems: tuple[str, ...] | None = _recorded("one sentence for each thing that was not proven")
    versions: Mapping[str, str] | None = _recorded("the versions of the software that took part, by name")
    data: PromptHashes | None = _recorded("the prompts that took part")
    recipe: Mapping[str, Any] | None = _recorded("the settings that decided, below")
    predicted: tuple[PredictedLength, ...] | None = _recorded("what the curves say, at each calibrated length")
    held_out: tuple[ProvenLength, ...] | None = _recorded(
        "the proof on the prompts that layers were adjusted on, at each calibrated and checked length; empty for a "
        "profile that is only predicted"
    )
    certificate: Certificate | None = _recorded("what is certified; absent if nothing is")
    not_proven: tuple[str, ...] | None = _recorded("one sentence for each thing that a reader might take for shown")
    retiled: Retiling | None = _recorded("only in a profile that was given the tiles of another GPU")

    @property
    def certified_lengths(self) -> tuple[CertifiedLength, ...]:
        """What is certified of each length; empty if nothing is."""
        return (self.certificate and self.certificate.lengths) or ()

    def predicted_at(self, length: int) -> PredictedLength | None:
        """What the curves say of a calibrated length; None if nothing is recorded."""
        return next((entry for entry in self.predicted or () if entry.length == length), None)

    def proven_at(self, length: int) -> ProvenLength | None:
        """What was proven of a length; None if nothing is recorded."""
        return next((entry for entry in self.held_out or () if entry.length == length), None)

    def limits(self, layer: int) -> dict[int, float]:
        """The error a layer may have, in the budget's unit, by each length in tokens at which the proof gives one."""
        limits: dict[int, float] = {}
        for proven in self.held_out or ():
            for proof in (proven.layers or ())[layer : layer + 1]:
                if proven.length is not None and proof.limit is not None:
                    limits[proven.length] = proof.limit
        return limits

    def densities(self, length: int, layers: int) -> tuple[str | None, list[float]]:
        """Each layer's density at a length, and where it is from.

        Args:
            length: in tokens.
            layers: how many the model has.

        Returns:
            "held out" or "predicted", and the density (a share) of every layer; None and an empty list where the
            record does not give all of them.
        """
        sources = (("held out", self.proven_at(length)), ("predicted", self.predicted_at(length)))
        for source, entry in sources:
            if entry is not None:
                densities = [layer.density for layer in entry.layers or () if layer.density is not None]
                if len(densities) == layers:
                    return source, densities
        return None, []
