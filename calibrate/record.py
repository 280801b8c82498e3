"""The record of a profile: how it was made, what was predicted of it and what was proven.

In a `Profile` the record is a JSON object, which the runtime carries unread but for the budget and the limits
(`s2o_runtime.profile.record`). A record may come from an older version, from a newer one, or from somebody else, so
every field is optional: it is None where the file does not have it, or has a value of another type. A list has its type
only if all its entries do. FORMAT.md in s2o_runtime/profile is generated from the metadata of the fields.
"""

# ruff: noqa: RUF009 -- what `record_field` returns is a field of dataclasses
from __future__ import annotations

import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from s2o_runtime.profile.record import BudgetKind, ErrorUnit, get_error_unit

if TYPE_CHECKING:
    from s2o_runtime.profile import Profile  # which needs torch

AnyNode = TypeVar("AnyNode", bound="RecordNode")


class FieldSpec(NamedTuple):
    """One field of a node in the file."""

    key: str  # in the JSON object
    name: str  # in Python
    type: Any  # that the reader accepts, without `None`
    unit: str
    meaning: str


def record_field(meaning: str, unit: str = "", key: str = "") -> Any:
    """Return an optional field of a node. `key` is its name in the file where that is no Python name."""
    return field(default=None, metadata={"meaning": meaning, "unit": unit, "key": key})


@dataclass(frozen=True, kw_only=True)
class RecordNode:
    """A JSON object of the record."""

    @classmethod
    @cache  # resolving the types takes long beside reading a node
    def list_fields(cls) -> tuple[FieldSpec, ...]:
        """Return the fields as they stand in the file."""
        types_of = get_type_hints(cls)
        return tuple(
            FieldSpec(
                item.metadata["key"] or item.name,
                item.name,
                get_args(types_of[item.name])[0],  # of X | None
                item.metadata["unit"],
                item.metadata["meaning"],
            )
            for item in fields(cls)
        )

    @classmethod
    def from_json(cls: type[AnyNode], document: Mapping[str, Any]) -> AnyNode:
        """Return the node that a JSON object is read as. No value of it is an error: see the rules of this file."""
        values = {}
        for spec in cls.list_fields():
            with suppress(KeyError, TypeError):
                values[spec.name] = _read(spec.type, document[spec.key])
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `from_json` reads as an equal node. Fields that are None are left out."""
        values = ((spec.key, getattr(self, spec.name)) for spec in self.list_fields())
        return {key: _write(value) for key, value in values if value is not None}


def _read(expected: Any, value: Any) -> Any:
    """Return a JSON value as the type of its field. Raises TypeError if it has another one."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(arguments[0], value)
    if origin is tuple and isinstance(value, list | tuple):
        entries = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(entries) == len(value):
            return tuple(_read(entry, item) for entry, item in zip(entries, value, strict=True))
    elif origin is Mapping and isinstance(value, Mapping):
        return {key: _read(arguments[1], item) for key, item in value.items()}
    elif expected is Any or (origin is Literal and value in arguments):
        return value
    elif isinstance(expected, type) and issubclass(expected, RecordNode) and isinstance(value, Mapping):
        return expected.from_json(value)
    elif type(value) is expected or (expected is float and type(value) is int):
        return value
    raise TypeError(f"{type(value).__name__} instead of {expected}")


def _write(value: Any) -> Any:
    if isinstance(value, RecordNode):
        return value.to_json()
    if isinstance(value, tuple):
        return [_write(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def read_record(profile: Profile) -> Record:
    """Return what a profile's record says."""
    return Record.from_json(profile.record)


def update_record(profile: Profile, **changes: Any) -> dict[str, Any]:
    """Return a profile's record with other values of some fields of `Record`; one that is None is taken out.

    All else stays as it is in the file, also what this version does not understand.
    """
    kept = {name: value for name, value in profile.record.items() if name not in changes}
    return kept | Record(**changes).to_json()


@dataclass(frozen=True, kw_only=True)
class RecordedBudget(RecordNode):
    """The error that the calibration was allowed."""

    kind: BudgetKind | None = record_field(
        "the unit of `value`: `mse`, `rel_mse`, or `kl` (nats per token, at the rows that answer); every `limit` is an "
        "`mse` for the first, else a `rel_mse`"
    )
    value: float | None = record_field("the error allowed", "its kind")
    ceiling_rel_mse: float | None = record_field(
        "beside an `mse` the largest `rel_mse`: a layer's `limit` is the smaller of `value` and this times the mean "
        "square of its dense output; absent without a ceiling"
    )

    @property
    def unit(self) -> ErrorUnit | None:
        """The unit of a layer's errors and limits; None if no budget is recorded."""
        return None if self.kind is None else get_error_unit(self.kind)


@dataclass(frozen=True, kw_only=True)
class PromptHash(RecordNode):
    """One prompt that took part."""

    length: int | None = record_field("of the prompt", "tokens")
    sha256: str | None = record_field("over its token ids as int64, little-endian")


@dataclass(frozen=True, kw_only=True)
class PromptHashes(RecordNode):
    """The prompts that took part (`calibrate.prompts.prompts.PromptSet`)."""

    calibration: tuple[PromptHash, ...] | None = record_field("the prompts that were calibrated on")
    held_out: tuple[PromptHash, ...] | None = record_field("the prompts that layers were adjusted on")
    certify: tuple[PromptHash, ...] | None = record_field(
        "the prompts of the certificate, none of which was calibrated or adjusted on"
    )


@dataclass(frozen=True, kw_only=True)
class PredictedLayer(RecordNode):
    """One layer as it was chosen, by its curves."""

    mse: float | None = record_field("mean over heads, of the mean over prompts plus one deviation", "output squared")
    density: float | None = record_field("mean over heads", "share")
    cost: float | None = record_field("density and ranking", "dense attention's time")
    seconds: float | None = record_field(
        "attention as timed by the search; on a GPU only, and only where it was not tightened afterwards", "seconds"
    )
    dense_seconds: float | None = record_field(
        "dense attention at this length, timed in turns with the first trial", "seconds"
    )


@dataclass(frozen=True, kw_only=True)
class PredictedLength(RecordNode):
    """One calibrated length, by the curves."""

    length: int | None = record_field("of the prompts", "tokens")
    layers: tuple[PredictedLayer, ...] | None = record_field("one entry for each layer, in their order")


@dataclass(frozen=True, kw_only=True)
class ProvenLayer(RecordNode):
    """One layer on the prompts that layers were adjusted on."""

    mse: float | None = record_field("mean over the held-out prompts", "output squared")
    rel_mse: float | None = record_field("the same over the dense output's mean square")
    density: float | None = record_field("mean over heads and held-out prompts", "share")
    worst: float | None = record_field("the 0.99 quantile over row tiles of the largest error of a row over its norm")
    limit: float | None = record_field("the error the layer may have", "the budget's kind")
    binds: ErrorUnit | None = record_field(
        "which of its two limits `limit` is; of a budget in `mse` with a ceiling for every layer only"
    )
    tightened: int | None = record_field(
        "how often the layer was tightened at this length because it was over its limit"
    )
    first_error: float | None = record_field("the error before the layer was tightened", "the budget's kind")
    eighths: tuple[float, ...] | None = record_field(
        "the error over the rows of each eighth of the prompts, over `limit`; at most 1.5"
    )
    places: tuple[float, ...] | None = record_field(
        "the error over rows 0, 1 to 7, 8 to 31, 32 to 127 and the others of a segment, without last rows, over that "
        "of all rows; 0 without such rows, empty of a layer that is exact"
    )

    def error(self, unit: ErrorUnit) -> float | None:
        """The error in a budget's unit."""
        return self.rel_mse if unit == "rel_mse" else self.mse


@dataclass(frozen=True, kw_only=True)
class ProvenLength(RecordNode):
    """One length on the prompts that layers were adjusted on."""

    length: int | None = record_field("of the prompts", "tokens")
    calibrated: bool | None = record_field("false for a length that was only checked")
    kl: float | None = record_field("mean over positions of KL(dense, patched) of the next token", "nats")
    top1: float | None = record_field("of positions where both find the same token most likely", "share")
    needles: tuple[int, int] | None = record_field(
        "needles the patched model keeps of those the dense one finds, and how many that are; absent if the prompts "
        "ask for none"
    )
    prefill_seconds: float | None = record_field("decoder layers' sum, like parts timed once; on a GPU only", "seconds")
    dense_prefill_seconds: float | None = record_field("the dense model's", "seconds")
    layers: tuple[ProvenLayer, ...] | None = record_field("one entry for each layer, in their order")


@dataclass(frozen=True, kw_only=True)
class CertifiedLayer(RecordNode):
    """The certificate of one layer; a layer that is dense has no error."""

    mean: float | None = record_field("error, mean over the certify prompts", "the budget's kind")
    bound: float | None = record_field(
        "upper bound for the mean over prompts of the error over all rows; at most the limit", "the budget's kind"
    )
    spent: float | None = record_field(
        "of what it was adjusted to spend, what the certificate left it; 0: dense; absent if its first bound held",
        "share",
    )
    density: float | None = record_field("mean over heads and certify prompts", "share")
    limit: float | None = record_field("the error the layer may have", "the budget's kind")
    rel_mse: float | None = record_field(
        "the mean error over the mean square of the dense output on the certify prompts; of a budget in `mse` only"
    )
    binds: ErrorUnit | None = record_field(
        "which of its two limits `limit` is; of a budget in `mse` with a ceiling for every layer only"
    )

    @property
    def rel_bound(self) -> float | None:
        """The bound as a `rel_mse`; None where that of the mean is not recorded."""
        if self.bound is None or not self.mean or self.rel_mse is None:
            return None
        return self.bound * self.rel_mse / self.mean


@dataclass(frozen=True, kw_only=True)
class CertifiedRetrieval(RecordNode):
    """The needles of the certify prompts."""

    found: int | None = record_field("needles that the dense model finds; 0: retrieval is not proven")
    kept: int | None = record_field(
        "of these, needles that the patched model finds too or whose log-probability fell by less than 1 nat"
    )
    low: float | None = record_field("lower end of the Clopper-Pearson interval for the share kept", "share")
    high: float | None = record_field("its upper end", "share")


@dataclass(frozen=True, kw_only=True)
class CertifiedAnswers(RecordNode):
    """The KL(dense, patched) of the answers about the certify prompts, behind a finished prefill, a group of text as
    one value."""

    mean: float | None = record_field("over prompts, kinds of text in equal parts", "nats per token")
    bound: float | None = record_field(
        "upper bound for the mean over prompts like these of the smaller of the KL and ten times the budget; at most "
        "the budget",
        "nats per token",
    )
    worst_eighth: float | None = record_field(
        "mean over the questions about the eighth of the prompts with the largest one; at most twice the budget",
        "nats per token",
    )
    second_turn: float | None = record_field("mean of questions asked behind another question", "nats per token")
    above: int | None = record_field("groups of text above ten times the budget")
    share_above: float | None = record_field("upper bound for the share of such prompts (Clopper-Pearson)", "share")
    noise: float | None = record_field(
        "mean between two dense kernels, on the first prompts; absent on a CPU", "nats per token"
    )
    spent: float | None = record_field(
        "of what was adjusted to be spent, what the certificate left; absent if its first bound held", "share"
    )
    quoted: bool | None = record_field("true if answers are the documents' own: the model is not whole on the device")


@dataclass(frozen=True, kw_only=True)
class CertifiedDomain(RecordNode):
    """One kind of text among the certify prompts."""

    domain: str | None = record_field("its name")
    prompts: int | None = record_field("how many of the prompts are of it")
    groups: int | None = record_field("groups of text, such as novels, that these are from")
    kl: float | None = record_field("mean over them", "nats")
    error_over_limit: float | None = record_field("the largest mean error of a layer over its limit", "share")


@dataclass(frozen=True, kw_only=True)
class CertifiedLength(RecordNode):
    """The certificate of one length: every layer's mean error is within its limit, or answers keep to their budget."""

    length: int | None = record_field("of the prompts", "tokens")
    prompts: int | None = record_field("how many prompts")
    groups: int | None = record_field("groups of text that these are from, which are what is counted")
    tokens: int | None = record_field("of them all", "tokens")
    mean_kl: float | None = record_field(
        "KL(dense, patched) of the next token, mean over positions and prompts; not of a budget in `kl`", "nats"
    )
    answers: CertifiedAnswers | None = record_field("of a budget in `kl` only; then no layer has a claim of its own")
    retrieval: CertifiedRetrieval | None = record_field("absent if the prompts ask for no needles")
    domains: tuple[CertifiedDomain, ...] | None = record_field("the same by kind of text")
    layers: tuple[CertifiedLayer, ...] | None = record_field("one entry for each layer, in their order")


@dataclass(frozen=True, kw_only=True)
class Certificate(RecordNode):
    """The claims about prompts like those that had no part in choosing the settings."""

    confidence: float | None = record_field(
        "that all means of all lengths are within their limits; of each length's share of prompts; of each interval",
        "share",
    )
    method: str | None = record_field("how bounds were made, in words")
    lengths: tuple[CertifiedLength, ...] | None = record_field("calibrated and checked lengths")


@dataclass(frozen=True, kw_only=True)
class RetiledLayers(RecordNode):
    """Layers alike in shape and density, which were timed as one."""

    timed_at: int | None = record_field("the length at which they were timed", "tokens")
    layers: tuple[tuple[int, int], ...] | None = record_field("pairs of length and layer")
    density: float | None = record_field("of the synthetic inputs", "share")
    tile: str | None = record_field("the fastest tile; absent if none fits")
    seconds: float | None = record_field("attention with that tile; absent if none fits", "seconds")
    dense_seconds: float | None = record_field("dense attention; absent if none fits", "seconds")


@dataclass(frozen=True, kw_only=True)
class Retiling(RecordNode):
    """The change to the tiles of another GPU than the profile was made on."""

    made_on: str | None = record_field(
        "the device the profile was made on; errors, densities and times elsewhere in the record are of it", key="from"
    )
    tuned_for: str | None = record_field("the device its tiles are for", key="to")
    versions: Mapping[str, str] | None = record_field("as `record.versions`, of the tuning")
    dense_layers: int | None = record_field(
        "layers of all lengths that became dense, because no tile beats dense attention there"
    )
    note: str | None = record_field("this, as a sentence")
    timed: tuple[RetiledLayers, ...] | None = record_field(
        "one entry for all layers alike in shape and density", key="kinds"
    )


@dataclass(frozen=True, kw_only=True)
class Record(RecordNode):
    """The way a profile was made and what was shown of it.

    `recipe` is the calibrator's settings, by the names of its options: `calibrate.recipe.Recipe` writes and reads it.
    """

    budget: RecordedBudget | None = record_field("the error that the calibration was allowed")
    objective: str | None = record_field("`latency` (measured on a GPU) or `predicted latency`")
    proof: str | None = record_field(
        "`held out`: within the budget on the held-out prompts, which layers were adjusted on. `failed`: not, written "
        "all the same (`--allow-regression`). `none`: predicted for another budget. `held out on <device>`: proven "
        "there, then given the tiles of another GPU"
    )
    problems: tuple[str, ...] | None = record_field("one sentence for each thing that was not proven")
    versions: Mapping[str, str] | None = record_field("the versions of the software that took part, by name")
    data: PromptHashes | None = record_field("the prompts that took part")
    recipe: Mapping[str, Any] | None = record_field("the settings that decided, below")
    predicted: tuple[PredictedLength, ...] | None = record_field("what the curves say, at each calibrated length")
    held_out: tuple[ProvenLength, ...] | None = record_field(
        "the proof on the prompts that layers were adjusted on, at each calibrated and checked length; empty for a "
        "profile that is only predicted"
    )
    certificate: Certificate | None = record_field("what is certified; absent if nothing is")
    not_proven: tuple[str, ...] | None = record_field("one sentence for each thing that a reader might take for shown")
    retiled: Retiling | None = record_field("only in a profile that was given the tiles of another GPU")

    @property
    def certified_lengths(self) -> tuple[CertifiedLength, ...]:
        """The certificate of each length; empty without one."""
        return (self.certificate and self.certificate.lengths) or ()

    def find_proven(self, length: int) -> ProvenLength | None:
        """Return what was proven of a length; None if nothing is recorded."""
        return next((entry for entry in self.held_out or () if entry.length == length), None)

    def densities(self, length: int, layers: int) -> tuple[str | None, list[float]]:
        """Return the densities at a length in tokens of a model of so many layers, and where they are from.

        Returns:
            "held out" or "predicted", and the density (a share) of every layer; None and an empty list where the
            record does not give all of them.
        """
        predicted = next((entry for entry in self.predicted or () if entry.length == length), None)
        for source, entry in (("held out", self.find_proven(length)), ("predicted", predicted)):
            densities = [layer.density for layer in (entry and entry.layers) or () if layer.density is not None]
            if entry and len(densities) == layers:
                return source, densities
        return None, []
