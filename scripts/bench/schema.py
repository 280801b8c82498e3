"""The result files: what the benches write, and what tables and pictures are made from.

Each file is one JSON object, stated by a dataclass. `write` stores it and `read` returns it. A field that older files
lack has a default, and keys that no field names are ignored.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from s2o_runtime.errors import InputError
from s2o_runtime.files import write_atomically

DENSE = "dense (cuDNN)"
# of what `list_dense_kernels` gives, in its order
DENSE_NAMES = DENSE, "dense (FlashAttention-2)", "dense (FlashAttention-3)"
ONE_SETTING = "S2O, one setting"  # for all heads of all layers
CALIBRATED = "S2O, calibrated"  # a profile
PROVEN = ", proven"  # ends the settings of profiles that were proven on held-out prompts
EVERYTHING = 0.9999  # a method of this density computes everything, as dense attention does

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """The quartiles of a time in seconds."""

    p25: float
    median: float
    p75: float


@dataclass(frozen=True, kw_only=True)
class ResultFile:
    """The fields that all files state: when, where and with which versions they were measured.

    program: the command, without its options, that measures such a file. settings: its options. device: a
    `DeviceIdentity`, or only the device's name.
    """

    program: ClassVar[str]

    settings: dict[str, Any]
    device: dict[str, Any] | str
    versions: dict[str, str]
    date: str = "not recorded"
    python: str | None = None
    cuda: str | None = None
    cudnn: int | None = None


@dataclass(frozen=True)
class AttentionRow:
    """One density, with a tau for each head.

    target: the wanted density, "never stop" (tau = 0), "lowest" where window and first chunk are more than wanted.
    seconds, prefill_seconds: the whole call, and the call without its ranking (None without the kernels).
    rel_mse: against float32 dense attention, on query rows of all heads, one at random in each equal part.
    rate, prefill_rate: density x dense time / time; 1 means that a computed pair costs what it costs cuDNN.
    """

    target: float | str
    density: float
    seconds: Spread
    prefill_seconds: Spread | None
    rate: float
    prefill_rate: float | None
    rel_mse: float
    density_of_heads: list[float]
    tau_of_heads: list[float]


@dataclass(frozen=True)
class DenseTime:
    """Dense attention on the same tensors: the SDPA backend that ran, its time, its error."""

    backend: str
    seconds: Spread
    rel_mse: float


@dataclass(frozen=True)
class RankTime:
    """The ranking alone."""

    seconds: Spread
    share_of_dense: float


@dataclass(frozen=True)
class AttentionEntry:
    """One length and tile of the attention bench; tile: the fields of a `TileConfig`."""

    length: int
    tile: dict[str, Any]
    tile_name: str
    dense: DenseTime
    rank: RankTime | None
    rows: list[AttentionRow]


@dataclass(frozen=True, kw_only=True)
class AttentionFile(ResultFile):
    """The attention bench."""

    program: ClassVar[str] = "python -m scripts.bench.attention"

    format: str = "s2o-bench-attention/1"
    results: list[AttentionEntry]


@dataclass(frozen=True)
class LayerRow:
    """One setting of one method on one layer.

    mse, rel_mse: means over the sampled rows, against float32 dense attention. worst: `row_errors.worst_of`
    of the rows' relative errors. selecting_seconds: ranking or choosing blocks.
    """

    layer: int
    density: float
    mse: float
    rel_mse: float
    worst: float
    seconds: float
    selecting_seconds: float


@dataclass(frozen=True)
class MethodRow:
    """One setting of one method on all layers: times are sums, errors and densities means, `worst` is the largest.

    profile: of a calibrated setting the digest of its file, by which s2o-eval names it too; older files lack it.
    chunk: queries of a call, each behind all keys before them; None where all come in one call. turn: the last so many
    queries alone, behind all keys before them; None where all queries are. speedup: over the fastest dense kernel for
    the same calls (in older files of chunks over FlashAttention-2, which they call cuDNN). command: measures the row
    again; older files lack it.
    """

    method: str
    setting: str
    seconds: float
    selecting_seconds: float
    speedup: float | None
    density: float
    mse: float
    rel_mse: float
    worst: float
    layers: list[LayerRow]
    profile: str | None = None
    chunk: int | None = None
    turn: int | None = None
    command: str = ""


@dataclass(frozen=True)
class MethodsEntry:
    """One length of the methods' bench; chunked: some settings in chunks of the queries, and in turns."""

    length: int
    rows: list[MethodRow]
    chunked: list[MethodRow] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class MethodsFile(ResultFile):
    """The methods' bench."""

    program: ClassVar[str] = "python -m scripts.bench.methods"

    format: str = "s2o-bench-methods/1"
    results: list[MethodsEntry]


@dataclass(frozen=True)
class PrefillRow:
    """A whole prefill. attention_seconds, share: what the layers' attention takes of it."""

    name: str
    density: float
    seconds: Spread
    attention_seconds: float
    share: float


@dataclass(frozen=True)
class PrefillEntry:
    """One model at one length; peak_bytes: the most GPU memory in use, None on a CPU."""

    model: str
    length: int
    rows: list[PrefillRow]
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class PrefillFile(ResultFile):
    """The prefill bench."""

    program: ClassVar[str] = "python -m scripts.bench.prefill"

    format: str = "s2o-bench-prefill/1"
    results: list[PrefillEntry]


def write(path: Path, file: ResultFile) -> None:
    """Store a file as JSON."""
    write_atomically(path, (json.dumps(asdict(file), indent=1) + "\n").encode())


def read(cls: type[T], value: Any) -> T:
    """The dataclass that a JSON object states. Raises InputError naming the first field that it lacks."""
    return _read(cls, value, "")


def _read(cls: type[T], value: Any, path: str) -> T:
    hints = get_type_hints(cls)
    arguments = {}
    for entry in fields(cls):  # type: ignore[arg-type]
        name = f"{path}.{entry.name}" if path else entry.name
        if isinstance(value, Mapping) and entry.name in value:
            arguments[entry.name] = _converted(hints[entry.name], value[entry.name], name)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise InputError(f"lacks {name}")
    return cls(**arguments)


def _converted(hint: Any, value: Any, path: str) -> Any:
    """A field's JSON value as its type: dataclasses, lists of them, or None; everything else as it is."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next((option for option in get_args(hint) if is_dataclass(option)), None)
    if get_origin(hint) is list and is_dataclass(get_args(hint)[0]):
        if not isinstance(value, list):
            raise InputError(f"lacks a list {path}")
        return [_read(get_args(hint)[0], item, path) for item in value]
    return _read(hint, value, path) if isinstance(hint, type) and is_dataclass(hint) else value
