"""The profile: thresholds, rankings and tiles of one model, as one safetensors file.

Tensors hold what the runtime needs, one entry per length bucket, layer and head. Everything else is one JSON
document under one metadata key: with two keys safetensors files are not byte-reproducible.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
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

SCHEMA = 2
METADATA_KEY = "s2o_profile"
MAX_BYTES = 64 << 20
MAX_LENGTH = 1 << 24
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
MODES, THRESHOLDS, ROW_REDUCES = get_args(Mode), get_args(Threshold), get_args(RowReduce)
_INDEXED = {"mode": MODES, "threshold": THRESHOLDS, "row_reduce": ROW_REDUCES}


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
        for bucket in self.layers:
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
                    raise ProfileError(f"layer {index}: {error}") from error
        return self


def _between(near: HeadConfig, far: HeadConfig, weight: float) -> HeadConfig:
    alike = ("mode", "threshold", "representatives", "tail")  # else one tau does not mean the other's error
    if near.mode == "dense" or any(getattr(near, name) != getattr(far, name) for name in alike):
        return near
    if near.tau == 0.0 or far.tau == 0.0:
        return replace(near, tau=0.0)
    return replace(near, tau=math.exp((1 - weight) * math.log(near.tau) + weight * math.log(far.tau)))


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile atomically; the same profile gives the same bytes."""
    write_atomically(Path(path), serialize(profile.validate()))


def serialize(profile: Profile) -> bytes:
    """The file's bytes."""
    tensors = _tensors(profile)
    document = {
        "schema": SCHEMA,
        "model": {"name": profile.model_name, "fingerprint": profile.fingerprint, **asdict(profile.geometry)},
        "device": asdict(profile.device),
        "lengths": list(profile.lengths),
        "record": profile.record,
    }
    document["digest"] = _digest(document, tensors)
    data: bytes = save(tensors, metadata={METADATA_KEY: _canonical(document)})
    return data


def _tensors(profile: Profile) -> dict[str, Tensor]:
    def table(dtype: torch.dtype, value: Any) -> Tensor:
        return torch.tensor([[value(layer) for layer in bucket] for bucket in profile.layers], dtype=dtype)

    return {
        "tau": table(torch.float32, lambda layer: [head.tau for head in layer.heads]),
        "segment": table(torch.int32, lambda layer: [head.segment for head in layer.heads]),
        "mode": table(torch.uint8, lambda layer: [MODES.index(head.mode) for head in layer.heads]),
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
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ProfileError(f"{path} cannot be read ({error.strerror}): check the path") from error
    if size > MAX_BYTES:
        raise ProfileError(f"{path} has {size} bytes: a profile has at most {MAX_BYTES}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA_KEY)
            if text is None:
                raise ProfileError(f"{path} is a safetensors file but not an S2O profile: expected {METADATA_KEY!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ProfileError(f"{path} is not a readable safetensors file ({error}): it is damaged or foreign") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: its document is not valid JSON ({error})") from error
    if not isinstance(document, dict):
        raise ProfileError(f"{path}: its document is a {type(document).__name__}: expected an object")
    return document, tensors


def _parse(document: dict[str, Any], tensors: dict[str, Tensor]) -> Profile:
    schema = _field(document, "schema", int)
    if schema != SCHEMA:
        advice = "calibrate again" if schema < SCHEMA else "use a newer version of S2O"
        raise ProfileError(f"schema {schema} is not supported, this version reads schema {SCHEMA}: {advice}")
    model = _field(document, "model", dict)
    geometry = Geometry(
        _field(model, "architecture", str, "model."),
        *(_count(model, name) for name in ("layers", "query_heads", "kv_heads", "head_dim")),
    )
    lengths = _field(document, "lengths", list)
    if not all(isinstance(length, int) and not isinstance(length, bool) for length in lengths):
        raise ProfileError(f"lengths {lengths} are not integers")
    if not lengths:
        raise ProfileError("lengths is empty: expected at least one bucket")
    expected = (len(lengths), geometry.layers)
    _check_tensors(tensors, expected, geometry.query_heads)
    device = _device(_field(document, "device", dict))
    if _field(document, "digest", str) != _digest(document, tensors):
        raise ProfileError("the digest does not match the contents: the file was changed or damaged, make it again")
    layers = tuple(
        tuple(_layer(tensors, bucket, index) for index in range(geometry.layers)) for bucket in range(len(lengths))
    )
    return Profile(
        _field(model, "name", str, "model."),
        geometry,
        _field(model, "fingerprint", str, "model."),
        device,
        tuple(lengths),
        layers,
        _field(document, "record", dict),
    )


def _field(document: dict[str, Any], name: str, kind: type, where: str = "") -> Any:
    value = document.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        found = "is missing" if name not in document else f"is a {type(value).__name__}"
        raise ProfileError(f"field {where}{name} {found}: expected a {kind.__name__}")
    return value


def _count(model: dict[str, Any], name: str) -> int:
    value: int = _field(model, name, int, "model.")
    if not 1 <= value <= 1 << 14:
        raise ProfileError(f"field model.{name} is {value}: expected 1 to {1 << 14}")
    return value


def _device(device: dict[str, Any]) -> DeviceIdentity:
    capability = _field(device, "capability", list, "device.")
    if len(capability) != 2 or not all(isinstance(part, int) for part in capability):
        raise ProfileError(f"field device.capability is {capability}: expected two integers")
    return DeviceIdentity(
        _field(device, "kind", str, "device."),
        _field(device, "name", str, "device."),
        (capability[0], capability[1]),
        _field(device, "sm_count", int, "device."),
        _field(device, "memory_bytes", int, "device."),
    )


def _check_tensors(tensors: dict[str, Tensor], outer: tuple[int, int], heads: int) -> None:
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(HEAD_TENSORS, (*outer, heads))
    shapes |= {"tile": (*outer, len(TILE_FIELDS)), "row_reduce": outer, "grain": outer}
    if set(tensors) != set(shapes):
        raise ProfileError(f"it holds the tensors {sorted(tensors)}: expected {sorted(shapes)}")
    for name, dtype in {**HEAD_TENSORS, **LAYER_TENSORS}.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != shapes[name]:
            raise ProfileError(
                f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}: expected {dtype} {shapes[name]}"
            )
    specialized = int(tensors["tile"][..., TILE_FIELDS.index("specialized")].max())
    if specialized > 1:
        raise ProfileError(f"tensor tile says specialized {specialized}: expected 0 or 1")
    allowed = {name: tuple(range(len(names))) for name, names in _INDEXED.items()}
    allowed |= {"tail": (0, 1), "representatives": REPRESENTATIVES, "grain": GRAINS}
    for name, values in allowed.items():
        found = sorted(set(tensors[name].flatten().tolist()) - set(values))
        if found:
            raise ProfileError(f"tensor {name} holds {found[0]}: expected one of {values}")


def _layer(tensors: dict[str, Tensor], bucket: int, layer: int) -> LayerConfig:
    columns = (tensors[name][bucket, layer].tolist() for name in HEAD_TENSORS)
    heads = tuple(
        HeadConfig(tau, segment, MODES[mode], THRESHOLDS[threshold], representatives, bool(tail))
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
