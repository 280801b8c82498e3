"""The profile: thresholds, rankings and tiles of one model, as one safetensors file.

Tensors hold what the runtime needs, one entry per length bucket, layer and head. Everything else is one JSON
document under one metadata key: with two keys safetensors files are not byte-reproducible. docs/profile-format.md
specifies both. A file may come from anywhere: its sizes are bounded before it is read, its values before they are used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from s2o_runtime.config import (
    GRAINS,
    REPRESENTATIVES,
    HeadConfig,
    LayerConfig,
    Mode,
    RowReduce,
    Threshold,
    TileConfig,
)
from s2o_runtime.errors import ConfigError, ProfileError
from s2o_runtime.gpu import DeviceIdentity
from s2o_runtime.identity import Geometry
from s2o_runtime.lengths import STEPS_PER_OCTAVE, far_apart, length_step

if TYPE_CHECKING:
    from s2o_runtime.baselines.settings import Baseline

SCHEMA = 2
SCHEMA_WITH_METHODS = 3  # of files with heads of other methods
METADATA_KEY = "s2o_profile"
MAX_BYTES = 32 << 20
MAX_DOCUMENT = 4 << 20  # characters
MAX_HEADER = 2 * MAX_DOCUMENT + (1 << 16)  # bytes: the document with its quotes escaped, and where the tensors lie
MAX_DEPTH = 16  # of objects and lists inside one another
MAX_LENGTH = 1 << 24
MAX_BUCKETS = length_step(MAX_LENGTH) + 1  # as many as differ by an eighth of an octave
MAX_HEADS = 1 << 20  # of all buckets and layers together
MAX_COUNT = 1 << 14  # of layers, of heads, of a head's dimensions
MAX_METHOD_TEXT = 500
SHOWN = 60  # characters of a foreign text in a message
TILE_FIELDS = ("block_m", "block_n", "chunk", "num_warps", "num_stages", "specialized", "dense_below")
HEAD_TENSORS = {
    "tau": torch.float32,
    "segment": torch.int32,
    "mode": torch.uint8,
    "threshold": torch.uint8,
    "representatives": torch.uint8,
    "tail": torch.uint8,
}
LAYER_TENSORS = {"tile": torch.int32, "row_reduce": torch.uint8, "grain": torch.uint8}
TENSORS = HEAD_TENSORS | LAYER_TENSORS
MODES: tuple[Mode, ...] = ("s2o", "dense")  # in the tensor `mode`; what is larger is a place in the field `methods`
MAX_METHODS = 256 - len(MODES)
THRESHOLDS, ROW_REDUCES = get_args(Threshold), get_args(RowReduce)
_INDEXED: dict[str, tuple[str, ...]] = {"threshold": THRESHOLDS, "row_reduce": ROW_REDUCES}
_ALLOWED: dict[str, tuple[int, ...]] = {name: tuple(range(len(names))) for name, names in _INDEXED.items()}
_ALLOWED |= {"tail": (0, 1), "representatives": REPRESENTATIVES, "grain": GRAINS}


@dataclass(frozen=True)
class Profile:
    """One model's calibration.

    lengths: the calibrated buckets, ascending; layers[bucket][layer] is that layer's configuration.
    record: how it was made and what was shown: budget, objective, data hashes, search settings, achieved
        and held-out errors and densities. The runtime does not need it.
    """

    model_name: str
    geometry: Geometry
    fingerprint: str
    device: DeviceIdentity
    lengths: tuple[int, ...]
    layers: tuple[tuple[LayerConfig, ...], ...]
    record: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def min_length(self) -> int:
        """The shortest prompt that was calibrated; shorter ones stay dense."""
        return self.lengths[0]

    def layer_config(self, layer: int, length: int) -> LayerConfig:
        """The configuration of a layer for a prompt of `length` keys.

        The bucket nearest in log length decides everything but tau, which is interpolated in log length between
        the two buckets around `length` for the heads they treat alike. Lengths are rounded to an eighth of an
        octave, so that a server sees few distinct configurations.
        """
        steps = [length_step(bucket) for bucket in self.lengths]
        if length_step(length) in steps:
            return self.layers[steps.index(length_step(length))][layer]
        position = length_step(length) / STEPS_PER_OCTAVE
        logs = [math.log2(bucket) for bucket in self.lengths]
        nearest = min(range(len(logs)), key=lambda bucket: abs(logs[bucket] - position))
        config = self.layers[nearest][layer]
        other = nearest + 1 if position > logs[nearest] else nearest - 1
        if not 0 <= other < len(logs):
            return config
        far_config = self.layers[other][layer]
        if far_config.grain != config.grain:
            return config
        weight = (position - logs[nearest]) / (logs[other] - logs[nearest])
        pairs = zip(config.heads, far_config.heads, strict=True)
        return replace(config, heads=tuple(_between(near, far, weight) for near, far in pairs))

    def with_tile(self, tile: TileConfig) -> Profile:
        """The same thresholds with one tile everywhere (for a GPU the tiles were not tuned on)."""
        return replace(self, layers=tuple(tuple(layer.with_tile(tile) for layer in bucket) for bucket in self.layers))

    def validate(self) -> Profile:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ProfileError(f"lengths {self.lengths} are not ascending: expected at least one bucket, each once")
        if not all(1 <= length <= MAX_LENGTH for length in self.lengths):
            raise ProfileError(f"lengths {self.lengths} are out of range: expected 1 to {MAX_LENGTH}")
        for shorter, longer in pairwise(self.lengths):
            if not far_apart(shorter, longer):
                raise ProfileError(
                    f"lengths {shorter} and {longer} are less than an eighth of an octave apart: keep one of them"
                )
        if len(self.layers) != len(self.lengths):
            raise ProfileError(f"{len(self.layers)} tables for {len(self.lengths)} lengths: expected one each")
        if len(_methods(self.layers)) > MAX_METHODS:
            raise ProfileError(f"{len(_methods(self.layers))} settings of other methods: at most {MAX_METHODS}")
        for length, bucket in zip(self.lengths, self.layers, strict=True):
            if len(bucket) != self.geometry.layers:
                raise ProfileError(f"{len(bucket)} layers in a table: expected {self.geometry.layers}")
            for index, layer in enumerate(bucket):
                if layer.num_heads != self.geometry.query_heads:
                    raise ProfileError(
                        f"layer {index} has {layer.num_heads} heads: expected {self.geometry.query_heads}"
                    )
                try:
                    layer.validate()
                except ConfigError as error:
                    raise ProfileError(f"layer {index} at length {length}: {error}") from error
        return self


def _between(near: HeadConfig, far: HeadConfig, weight: float) -> HeadConfig:
    alike = ("mode", "threshold", "representatives", "tail")  # else one tau does not mean the other's error
    if near.mode != "s2o" or any(getattr(near, name) != getattr(far, name) for name in alike):
        return near
    if near.tau == 0.0 or far.tau == 0.0:
        return replace(near, tau=0.0)
    return replace(near, tau=math.exp((1 - weight) * math.log(near.tau) + weight * math.log(far.tau)))


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile atomically; the same profile gives the same bytes. What could not be loaded is not written."""
    write_atomically(Path(path), serialize(profile.validate()))


def _methods(layers: Sequence[Sequence[LayerConfig]]) -> list[str]:
    """The settings of other methods that heads have, as text, each once."""
    found = {str(head.blocks) for bucket in layers for layer in bucket for head in layer.heads if head.blocks}
    return sorted(found)


def described(profile: Profile) -> dict[str, Any]:
    """All of a profile but its layers, as the file's document has it, without the digest."""
    methods = _methods(profile.layers)
    return {
        "schema": SCHEMA_WITH_METHODS if methods else SCHEMA,
        **({"methods": methods} if methods else {}),
        "model": {"name": profile.model_name, "fingerprint": profile.fingerprint, **asdict(profile.geometry)},
        "device": asdict(profile.device),
        "lengths": list(profile.lengths),
        "record": profile.record,
    }


def serialize(profile: Profile) -> bytes:
    """The file's bytes. Raises ProfileError naming a field that `load_profile` would refuse."""
    tensors = _tensors(profile)
    document = described(profile)
    _check_values(document)
    document["digest"] = _digest(document, tensors)
    text = _canonical(document)
    _check_document_size(text)
    _parse(json.loads(text), tensors)
    data: bytes = save(tensors, metadata={METADATA_KEY: text})
    return data


def _tensors(profile: Profile) -> dict[str, Tensor]:
    def table(dtype: torch.dtype, value: Any) -> Tensor:
        return torch.tensor([[value(layer) for layer in bucket] for bucket in profile.layers], dtype=dtype)

    modes = [*MODES, *_methods(profile.layers)]
    return {
        "tau": table(torch.float32, lambda layer: [head.tau for head in layer.heads]),
        "segment": table(torch.int32, lambda layer: [head.segment for head in layer.heads]),
        "mode": table(torch.uint8, lambda layer: [modes.index(str(head.blocks or head.mode)) for head in layer.heads]),
        "threshold": table(torch.uint8, lambda layer: [THRESHOLDS.index(head.threshold) for head in layer.heads]),
        "representatives": table(torch.uint8, lambda layer: [head.representatives for head in layer.heads]),
        "tail": table(torch.uint8, lambda layer: [head.tail for head in layer.heads]),
        "tile": table(torch.int32, lambda layer: [int(getattr(layer.tile, name)) for name in TILE_FIELDS]),
        "row_reduce": table(torch.uint8, lambda layer: ROW_REDUCES.index(layer.row_reduce)),
        "grain": table(torch.uint8, lambda layer: layer.grain),
    }


def _canonical(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(document: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """A hash over the document (without its digest) and every tensor, so that a damaged file is noticed."""
    digest = hashlib.sha256(_canonical({key: value for key, value in document.items() if key != "digest"}).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read and check a profile. Raises ProfileError naming what is wrong; nothing in the file is executed."""
    path = Path(path)
    document, tensors = _read(path)
    try:
        return _parse(document, tensors).validate()
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise ProfileError(f"{path}: its contents cannot be read ({error}): it is damaged") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The document and the tensors, their names checked. The file is read once: it may change meanwhile."""
    data = _bytes(path)
    try:
        header = _header(data)
    except (ValueError, RecursionError) as error:
        raise _foreign(path, error) from error
    metadata = header.pop("__metadata__", None)
    text = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise ProfileError(f"{path} is a safetensors file but not an S2O profile: expected {METADATA_KEY!r}")
    for name in sorted(set(header) ^ set(TENSORS)):
        wrong = "is not part of a profile" if name in header else "is missing"
        raise ProfileError(f"{path}: tensor {_shown(name)} {wrong}: expected {sorted(TENSORS)}")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise _foreign(path, error) from error
    try:
        _check_document_size(text)
        document = _strict_json(text)
        if not isinstance(document, dict):
            raise ProfileError(f"its document is a {type(document).__name__}: expected an object")
        _check_values(document)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: its document is not valid JSON ({error})") from error
    return document, tensors


def _foreign(path: Path, error: Exception) -> ProfileError:
    return ProfileError(f"{path} is not a readable safetensors file ({error}): it is damaged or foreign")


def _bytes(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ProfileError(f"{path} is not a file: check the path")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"{path} cannot be read ({error.strerror}): check the path") from error
    if len(data) > MAX_BYTES:
        raise ProfileError(f"{path} is larger than {MAX_BYTES} bytes: it is not a profile")
    return data


def _header(data: bytes) -> dict[str, Any]:
    """The JSON object that a safetensors file begins with, after its size. Raises ValueError if there is none."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError("its header is cut off")
    if size > MAX_HEADER:
        raise ValueError(f"its header has {size} bytes, a profile's at most {MAX_HEADER}")
    header = _strict_json(data[8 : 8 + size].decode())
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return header


def _strict_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object, parse_int=_integer)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; one that says something twice does not say anything."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ProfileError(f"field {_shown(twice)} is given twice: expected every field once")
    return made


def _integer(digits: str) -> float:
    """An integer, or infinity where reading it would take long: `_check_values` refuses both."""
    return int(digits) if len(digits) <= SHOWN else math.inf


def _check_document_size(text: str) -> None:
    if len(text) > MAX_DOCUMENT:
        raise ProfileError(f"its document has {len(text)} characters: a profile's has at most {MAX_DOCUMENT}")


def _check_values(value: Any, *path: str | int) -> None:
    """Raises ProfileError naming the first field, and all that is in it, that no JSON reader would take.

    path: the names and places that lead to the value.
    """
    if len(path) > MAX_DEPTH:
        raise ProfileError(f"field {_place(path)} is too deep: expected at most {MAX_DEPTH} levels")
    if isinstance(value, dict):
        for name, each in value.items():
            if not isinstance(name, str) or not _is_text(name):
                raise ProfileError(f"field {_place((*path, _shown(name)))} has a name that is no text")
            _check_values(each, *path, name)
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            _check_values(each, *path, index)
    elif isinstance(value, str):
        if not _is_text(value):
            raise ProfileError(f"field {_place(path)} is {_shown(value)}: expected valid Unicode")
    elif isinstance(value, int):
        if value.bit_length() > 63:
            raise ProfileError(f"field {_place(path)} has {value.bit_length()} bits: expected an integer of at most 63")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ProfileError(f"field {_place(path)} is {value}: expected a finite number")
    elif value is not None:
        raise ProfileError(f"field {_place(path)} is a {type(value).__name__}: expected a JSON value")


def _is_text(value: str) -> bool:
    """Whether it is valid Unicode: JSON can say half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _place(path: Sequence[str | int]) -> str:
    """("record", "layers", 0) -> "record.layers[0]" """
    names = (f"[{name}]" if isinstance(name, int) else f".{name[:SHOWN]}" for name in path)
    return "".join(names).removeprefix(".").encode(errors="backslashreplace").decode()


def _shown(value: Any) -> str:
    text = ascii(value[: SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."


def _parse(document: dict[str, Any], tensors: dict[str, Tensor]) -> Profile:
    schema = _field(document, "schema", int)
    if schema not in (SCHEMA, SCHEMA_WITH_METHODS):
        advice = "calibrate again" if schema < SCHEMA else "use a newer version of S2O"
        raise ProfileError(
            f"schema {schema} is not supported, this version reads {SCHEMA} and {SCHEMA_WITH_METHODS}: {advice}"
        )
    methods = _parsed_methods(_field(document, "methods", list)) if schema == SCHEMA_WITH_METHODS else []
    model = _field(document, "model", dict)
    geometry = Geometry(
        _field(model, "architecture", str, "model."),
        *(_number(model, name, "model.", 1, MAX_COUNT) for name in ("layers", "query_heads", "kv_heads", "head_dim")),
    )
    if geometry.query_heads % geometry.kv_heads:
        raise ProfileError(
            f"field model.kv_heads is {geometry.kv_heads}: expected a divisor of {geometry.query_heads} query heads"
        )
    lengths = _lengths(_field(document, "lengths", list))
    expected = (len(lengths), geometry.layers)
    heads = math.prod(expected) * geometry.query_heads
    if heads > MAX_HEADS:
        raise ProfileError(f"lengths, model.layers and model.query_heads make {heads} heads: at most {MAX_HEADS}")
    _check_tensors(tensors, expected, geometry.query_heads, len(methods))
    device = _device(_field(document, "device", dict))
    name, fingerprint = (_field(model, each, str, "model.") for each in ("name", "fingerprint"))
    record = _field(document, "record", dict)
    if _field(document, "digest", str) != _digest(document, tensors):
        raise ProfileError("the digest does not match the contents: the file was changed or damaged, make it again")
    layers = tuple(
        tuple(_layer(tensors, methods, bucket, index) for index in range(geometry.layers))
        for bucket in range(len(lengths))
    )
    return Profile(name, geometry, fingerprint, device, lengths, layers, record)


def _field(document: dict[str, Any], name: str, kind: type, where: str = "") -> Any:
    value = document.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        found = "is missing" if name not in document else f"is a {type(value).__name__}"
        raise ProfileError(f"field {where}{name} {found}: expected a {kind.__name__}")
    return value


def _number(document: dict[str, Any], name: str, where: str, least: int, most: int) -> int:
    value: int = _field(document, name, int, where)
    if not least <= value <= most:
        raise ProfileError(f"field {where}{name} is {value}: expected {least} to {most}")
    return value


def _parsed_methods(values: list[Any]) -> list[Baseline]:
    from s2o_runtime.baselines.settings import parse

    if not 1 <= len(values) <= MAX_METHODS:
        raise ProfileError(f"field methods has {len(values)} entries: expected 1 to {MAX_METHODS}")
    found = []
    for index, text in enumerate(values):
        if not isinstance(text, str) or len(text) > MAX_METHOD_TEXT:
            raise ProfileError(f"field methods[{index}] is {_shown(text)}: expected a method such as pbs:keep=0.9")
        try:
            found.append(parse(text))
        except ConfigError as error:
            raise ProfileError(f"field methods[{index}]: {error}") from error
    return found


def _lengths(values: list[Any]) -> tuple[int, ...]:
    if not values:
        raise ProfileError("lengths is empty: expected at least one bucket")
    if len(values) > MAX_BUCKETS:
        raise ProfileError(f"lengths has {len(values)} entries: expected at most {MAX_BUCKETS}")
    if not all(isinstance(length, int) and not isinstance(length, bool) for length in values):
        raise ProfileError(f"lengths {_shown(values)} are not integers")
    return tuple(values)


def _device(device: dict[str, Any]) -> DeviceIdentity:
    capability = _field(device, "capability", list, "device.")
    if len(capability) != 2 or not all(type(part) is int and 0 <= part < 1000 for part in capability):
        raise ProfileError(f"field device.capability is {_shown(capability)}: expected two integers, 0 to 999")
    return DeviceIdentity(
        _field(device, "kind", str, "device."),
        _field(device, "name", str, "device."),
        (capability[0], capability[1]),
        _number(device, "sm_count", "device.", 0, 1 << 16),
        _number(device, "memory_bytes", "device.", 0, 1 << 48),
    )


def _check_tensors(tensors: dict[str, Tensor], outer: tuple[int, int], heads: int, methods: int) -> None:
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(HEAD_TENSORS, (*outer, heads))
    shapes |= {"tile": (*outer, len(TILE_FIELDS)), "row_reduce": outer, "grain": outer}
    for name, dtype in TENSORS.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != shapes[name]:
            raise ProfileError(
                f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}: expected {dtype} {shapes[name]}"
            )
    specialized = tensors["tile"][..., TILE_FIELDS.index("specialized")]
    for name, tensor, allowed in (
        *((name, tensors[name], allowed) for name, allowed in _ALLOWED.items()),
        ("mode", tensors["mode"], tuple(range(len(MODES) + methods))),
        ("tile[specialized]", specialized, (0, 1)),
    ):
        found = sorted(set(tensor.flatten().tolist()) - set(allowed))
        if found:
            raise ProfileError(f"tensor {name} holds {found[0]}: expected one of {allowed}")


def _layer(tensors: dict[str, Tensor], methods: Sequence[Baseline], bucket: int, layer: int) -> LayerConfig:
    modes: list[Mode] = [*MODES]
    modes += ["blocks"] * len(methods)
    blocks = (*(None for _ in MODES), *methods)
    columns = (tensors[name][bucket, layer].tolist() for name in HEAD_TENSORS)
    heads = tuple(
        HeadConfig(tau, segment, modes[mode], THRESHOLDS[threshold], representatives, bool(tail), blocks[mode])
        for tau, segment, mode, threshold, representatives, tail in zip(*columns, strict=True)
    )
    block_m, block_n, chunk, warps, stages, specialized, below = tensors["tile"][bucket, layer].tolist()
    tile = TileConfig(block_m, block_n, chunk, warps, stages, bool(specialized), below)
    row_reduce = ROW_REDUCES[int(tensors["row_reduce"][bucket, layer])]
    return LayerConfig(heads, tile, row_reduce, int(tensors["grain"][bucket, layer]))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, sees the old content or the new, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
