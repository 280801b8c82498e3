"""The file of a profile: one safetensors file, read with care and written atomically.

Tensors hold what the runtime needs: one entry for each length bucket, layer and head. Everything else is one JSON
document under one metadata key: with two keys safetensors files are not byte-reproducible. FORMAT.md specifies both.
A file may come from anywhere: its sizes are bounded before it is read, and its values are checked before they are used.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..config import (
    KEY_BLOCK,
    LAST_ROWS,
    LOOKBACKS,
    REPRESENTATIVES,
    HeadConfig,
    LayerConfig,
    Mode,
    StopRule,
    Tail,
    TileConfig,
)
from ..devices import DeviceIdentity
from ..errors import InputError, ProfileError
from ..fields import read_json, short_repr
from ..files import write_atomically
from ..identity import Geometry, dump_json, join_fingerprint, read_tensor_bytes, split_fingerprint
from ..lengths import MAX_LENGTH
from ..version import __version__
from .profile import Profile

SCHEMA = 8
JSON_TYPES = {
    int: "an integer", float: "a number", str: "a string", bool: "a boolean", list: "a list", dict: "an object",
    type(None): "null",
}  # fmt: skip
METADATA_KEY = "s2o_profile"
MAX_BYTES = 32 << 20
MAX_DOCUMENT = 4 << 20  # characters
MAX_HEADER = 2 * MAX_DOCUMENT + (1 << 16)  # bytes: the document with its quotes escaped, and where the tensors lie
MAX_DEPTH = 16  # of objects and lists inside one another
MAX_BUCKETS = 256
MAX_HEADS = 1 << 20  # of all buckets and layers together
MAX_NAME = 60  # characters of a field's name in a message
COUNTS = range(1, (1 << 14) + 1)  # of layers, of heads, of a head's dimensions
TILE_FIELDS = (
    "block_m", "block_n", "chunk", "num_warps", "num_stages", "specialized", "dense_below", "min_queries", "tail_keys",
)  # fmt: skip
HEAD_TENSORS = {
    "tau": torch.float32,
    "segment": torch.int32,
    "mode": torch.uint8,
    "stop_rule": torch.uint8,
    "representatives": torch.uint8,
    "tail": torch.uint8,
}
TENSORS = HEAD_TENSORS | {  # and those of layers
    "tile": torch.int32, "row_reduce": torch.uint8, "grain": torch.uint8, "scores": torch.uint8,
}  # fmt: skip
# versions that knew the maximum of the rows' gains too, not their mean alone, wrote 1 for it
_CONSTANT = {"row_reduce": 0, "grain": KEY_BLOCK, "scores": 0}
# of layers; `last_rows` is absent where all of it is 0, and files of versions that knew no `lookback` have none: their
# layers run with the default, which visits all keys that they were measured with, and more
OPTIONAL_TENSORS = {"lookback": torch.int32, "last_rows": torch.int32}
SIZES = ("layers", "query_heads", "kv_heads", "head_dim")  # of the model, as numbers
# what the numbers in a tensor stand for
_DECODED: dict[str, dict[int, Any]] = {
    "mode": dict(enumerate(get_args(Mode))),
    "tail": dict(enumerate(get_args(Tail))),
    "stop_rule": {int(rule): rule for rule in StopRule},
}
_ENCODED = {name: {value: number for number, value in values.items()} for name, values in _DECODED.items()}
_ALLOWED = {name: tuple(values) for name, values in _DECODED.items()}
_ALLOWED |= {"row_reduce": (0,), "lookback": LOOKBACKS, "last_rows": LAST_ROWS}
# earlier versions wrote more of these: heads that have one run dense (`_without_unsupported_heads`)
_ALLOWED |= {"tail": (0, 1, 2), "representatives": (1, 2, 4, 8, 16, 32, 64), "grain": (1, 2, 4, 8), "scores": (0, 1)}
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair, which JSON can hold and Unicode cannot


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile; a reader, or a crash, sees the old file or the new one. The same profile gives the same bytes.

    Raises:
        ProfileError: `load_profile` would refuse the file, and why. Nothing is written.
        InputError: the arguments are of another type, or there is no folder for the file.
        OSError: the file cannot be written.

    >>> import tempfile
    >>> path = Path("profiles/demo/cpu/mse-0.0001.safetensors")  # in a clone of the repository
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_profile(load_profile(path), f"{folder}/p.safetensors")
    ...     load_profile(f"{folder}/p.safetensors") == load_profile(path)
    True
    """
    if not isinstance(profile, Profile) or not isinstance(path, str | os.PathLike):
        names = f"a {type(profile).__name__} and a {type(path).__name__}"
        raise InputError(f"save_profile has {names}: expected a Profile and the path of its file, in this order")
    if not Path(path).parent.is_dir():
        raise InputError(f"{path} cannot be written, {Path(path).parent} is no folder: make it first")
    write_atomically(Path(path), serialize(profile))


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read and check a profile. Nothing in the file is executed.

    Raises:
        ProfileError: naming the file and what is wrong with it.
        InputError: the path is none.

    >>> load_profile("profiles/demo/cpu/mse-0.0001.safetensors").lengths  # in a clone of the repository
    (1024, 2048)
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"load_profile has a {type(path).__name__}: expected the path of a profile's file")
    data = _read_file(Path(path))
    try:
        return deserialize(data)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def serialize(profile: Profile) -> bytes:
    """Return the bytes of a profile's file.

    Raises:
        ProfileError: naming a field that `load_profile` would refuse.
    """
    tensors, document = _make_tensors(profile.validate()), make_document(profile)
    _check_values(document)  # the record's are anyone's; JSON would turn some into others without a word
    text = dump_json(document | {"digest": _compute_digest(document, tensors)})
    data: bytes = save(tensors, metadata={METADATA_KEY: text})
    deserialize(data)  # the one statement of what may be in a file: what it refuses is not written
    return data


def deserialize(data: bytes) -> Profile:
    """Return the profile in the bytes of a file, each value of which is checked.

    Raises:
        ProfileError: naming the field or the tensor that is wrong.
    """
    try:
        document = _read_document(data)
        return _parse(document, load(data)).validate()
    except ProfileError:
        raise
    except (SafetensorError, ValueError, KeyError, RecursionError, OverflowError) as error:
        raise ProfileError(f"its contents cannot be read ({error}): it is damaged or foreign") from error


def make_document(profile: Profile) -> dict[str, Any]:
    """Return the JSON document of a profile's file without the digest: all of the profile but its layers."""
    return {
        "schema": SCHEMA,
        "baselines": [],  # versions that gave heads to other methods need this list of them
        "model": {"name": profile.model_name, **split_fingerprint(profile.fingerprint), **profile.geometry.as_json()},
        "device": asdict(profile.device),
        "lengths": list(profile.lengths),
        "record": profile.record,
    }


def _make_tensors(profile: Profile) -> dict[str, Tensor]:
    def encode(name: str, config: Any) -> Any:
        if name == "tile":
            return [int(getattr(config.tile, field)) for field in TILE_FIELDS]
        if name in HEAD_TENSORS and isinstance(config, LayerConfig):
            return [encode(name, head) for head in config.heads]
        value = _CONSTANT[name] if name in _CONSTANT else getattr(config, name)
        return _ENCODED[name][value] if name in _ENCODED else value

    return {
        name: torch.tensor([[encode(name, layer) for layer in bucket] for bucket in profile.layers], dtype=dtype)
        for name, dtype in (TENSORS | OPTIONAL_TENSORS).items()
        if name != "last_rows" or any(layer.last_rows for bucket in profile.layers for layer in bucket)
    }


def _compute_digest(document: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Return a hash over the document (without its digest) and every tensor, so that a damaged file is noticed."""
    digest = hashlib.sha256(dump_json({name: document[name] for name in document if name != "digest"}).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(read_tensor_bytes(tensor))
    return digest.hexdigest()


def _read_file(path: Path) -> bytes:
    """Return the bytes of a file, read once, because another program may change it between two reads."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ProfileError(f"{path} is not a file: check the path")
        with path.open("rb") as file:
            data = b"" if status.st_size > MAX_BYTES else file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"{path} cannot be read ({error.strerror}): check the path") from error
    if max(status.st_size, len(data)) > MAX_BYTES:  # it may have grown since its status was read
        raise ProfileError(f"{path} is larger than {MAX_BYTES} bytes: it is not a profile")
    return data


def _read_document(data: bytes) -> dict[str, Any]:
    """Return the document of a file that has its schema and tensors of its names. Raises ValueError for no header."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError("its header is cut off")
    if size > MAX_HEADER:
        raise ValueError(f"its header has {size} bytes, a profile's at most {MAX_HEADER}")
    header = read_json(data[8 : 8 + size].decode())
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata = header.pop("__metadata__", None)
    text = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise ProfileError(f"it is not an S2O profile: expected a safetensors file with {METADATA_KEY!r}")
    if len(text) > MAX_DOCUMENT:
        raise ProfileError(f"its document has {len(text)} characters: a profile's has at most {MAX_DOCUMENT}")
    document = read_json(text)
    if not isinstance(document, dict):
        raise ProfileError(f"its document is {JSON_TYPES[type(document)]}: expected an object")
    _check_values(document)
    schema = _get(document, "schema", int)
    if schema != SCHEMA:  # before the tensors are read, which newer schemas may have of other types
        age, advice = ("an older", "calibrate again") if schema < SCHEMA else ("a newer", "install that")
        raise ProfileError(
            f"schema {schema} is of {age} version of S2O than {__version__}, which reads {SCHEMA}: {advice}"
        )
    for name in sorted((header.keys() - OPTIONAL_TENSORS.keys()) ^ TENSORS.keys()):
        wrong = "is not part of a profile" if name in header else "is missing"
        raise ProfileError(f"tensor {short_repr(name)} {wrong}: expected {sorted(TENSORS)}")
    return document


def _check_values(value: Any, *path: str | int) -> None:
    """Raise ProfileError naming the first field, at a path or below it, that no JSON reader would take."""
    expected, fault = "", ""
    if len(path) > MAX_DEPTH:
        fault, expected = "is too deep", f"at most {MAX_DEPTH} levels"
    elif isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str) or _SURROGATE.search(name):
                raise ProfileError(
                    f"field {_format_path((*path, short_repr(name)))} has a name that is no text: expected text"
                )
            _check_values(item, *path, name)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_values(item, *path, index)
    elif isinstance(value, str):
        fault, expected = f"is {short_repr(value)}" if _SURROGATE.search(value) else "", "valid Unicode"
    elif isinstance(value, int):
        bits = value.bit_length()
        fault, expected = f"has {bits} bits" if bits > 63 else "", "an integer of at most 63"
    elif isinstance(value, float):
        fault, expected = "" if math.isfinite(value) else f"is {value}", "a finite number"
    elif value is not None:
        fault, expected = f"is a {type(value).__name__}", "a JSON value"
    if fault:
        raise ProfileError(f"field {_format_path(path)} {fault}: expected {expected}")


def _format_path(path: Sequence[str | int]) -> str:
    """Return a field's path for a message: "record.layers[0]" for ("record", "layers", 0)."""
    names = (f"[{name}]" if isinstance(name, int) else f".{name[:MAX_NAME]}" for name in path)
    return "".join(names).removeprefix(".").encode(errors="backslashreplace").decode()


def _get(document: dict[str, Any], path: str, expected: type, allowed: range | None = None) -> Any:
    """Return a field of a document. Raises ProfileError where it is missing, of another type or out of its range."""
    parent, _, name = path.rpartition(".")
    holder = _get(document, parent, dict) if parent else document
    value = holder.get(name)
    if type(value) is not expected:  # True is no integer here
        wrong = f"is {JSON_TYPES[type(value)]}" if name in holder else "is missing"
        raise ProfileError(f"field {path} {wrong}: expected {JSON_TYPES[expected]}")
    if allowed is not None and value not in allowed:
        raise ProfileError(f"field {path} is {value}: expected {allowed[0]} to {allowed[-1]}")
    return value


def _are_integers(values: Iterable[Any], allowed: range) -> bool:
    return all(type(value) is int and value in allowed for value in values)


def _parse(document: dict[str, Any], tensors: dict[str, Tensor]) -> Profile:
    """Return the profile in a document of this schema and in tensors of these names."""
    geometry = _parse_geometry(document)
    lengths = _get(document, "lengths", list)
    if not 1 <= len(lengths) <= MAX_BUCKETS or not _are_integers(lengths, range(1, MAX_LENGTH + 1)):
        raise ProfileError(
            f"field lengths is {short_repr(lengths)}, {len(lengths)} entries: expected 1 to {MAX_BUCKETS} numbers of "
            "tokens"
        )
    shape = (len(lengths), geometry.layers, geometry.query_heads)
    if math.prod(shape) > MAX_HEADS:
        raise ProfileError(
            f"lengths, model.layers and model.query_heads make {math.prod(shape)} heads: at most {MAX_HEADS}"
        )
    _check_tensors(tensors, shape)
    capability = _get(document, "device.capability", list)
    if len(capability) != 2 or not _are_integers(capability, range(1000)):
        raise ProfileError(f"field device.capability is {short_repr(capability)}: expected two integers, 0 to 999")
    device = DeviceIdentity(
        _get(document, "device.kind", str),
        _get(document, "device.name", str),
        (capability[0], capability[1]),
        _get(document, "device.sm_count", int, range((1 << 16) + 1)),
        _get(document, "device.memory_bytes", int, range((1 << 48) + 1)),
    )
    base, config = (
        _get(document, f"model.{name}", kind) if name in document["model"] else None
        for name, kind in (("base_fingerprint", str), ("config", dict))
    )
    fingerprint = join_fingerprint(_get(document, "model.fingerprint", str), base, config)
    record = _get(document, "record", dict)
    if _get(document, "digest", str) != _compute_digest(document, tensors):
        raise ProfileError("the digest does not match the contents: the file was changed or damaged, make it again")
    tensors, unsupported = _without_unsupported_heads(tensors)
    layers = tuple(
        tuple(_parse_layer(tensors, bucket, layer) for layer in range(shape[1])) for bucket in range(shape[0])
    )
    name = _get(document, "model.name", str)
    return Profile(name, geometry, fingerprint, device, tuple(lengths), layers, record, unsupported)


def _parse_geometry(document: dict[str, Any]) -> Geometry:
    """Return the geometry; files of models without layers of other kinds say nothing of them."""
    sizes = [_get(document, f"model.{name}", int, COUNTS) for name in SIZES]
    geometry = Geometry(_get(document, "model.architecture", str), *sizes)
    layers, query_heads, kv_heads, _ = sizes
    if query_heads % kv_heads:
        raise ProfileError(f"field model.kv_heads is {kv_heads}: expected a divisor of {query_heads} query heads")
    if "layer_numbers" not in document["model"]:
        return geometry
    numbers, others = _get(document, "model.layer_numbers", list), _get(document, "model.other_layers", dict)
    if not others or not _are_integers(others.values(), COUNTS):
        raise ProfileError(
            f"field model.other_layers is {short_repr(others)}: expected numbers of layers by their kinds"
        )
    total = layers + sum(others.values())
    if len(numbers) != layers or not _are_integers(numbers, range(total)) or numbers != sorted(set(numbers)):
        raise ProfileError(
            f"field model.layer_numbers is {short_repr(numbers)}: expected {layers} ascending numbers below {total}"
        )
    return replace(geometry, layer_numbers=tuple(numbers), others=tuple(sorted(others.items())))


def _check_tensors(tensors: dict[str, Tensor], shape: tuple[int, int, int]) -> None:
    """Raise ProfileError for a type, a shape or a value that no profile has. shape: buckets, layers, heads."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(TENSORS | OPTIONAL_TENSORS, shape[:2])
    shapes |= dict.fromkeys(HEAD_TENSORS, shape) | {"tile": (*shape[:2], len(TILE_FIELDS))}
    for name, tensor in tensors.items():
        dtype = (TENSORS | OPTIONAL_TENSORS)[name]
        if tensor.dtype != dtype or tensor.shape != shapes[name]:
            raise ProfileError(
                f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}: expected {dtype} {shapes[name]}"
            )
    specialized = {"tile[specialized]": tensors["tile"][..., TILE_FIELDS.index("specialized")]}
    for name, tensor in (tensors | specialized).items():
        allowed = _ALLOWED.get(name, (0, 1) if name in specialized else None)
        if allowed and (unknown := sorted(set(tensor.flatten().tolist()) - set(allowed))):
            raise ProfileError(f"tensor {name} holds {unknown[0]}: expected one of {allowed}, calibrate again")


def _without_unsupported_heads(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return the tensors with heads dense that this version cannot run sparse, and how many became dense.

    A dense head has no error, so whatever was proven of the profile still holds.
    """
    mode, tail, representatives = (tensors[name] for name in ("mode", "tail", "representatives"))
    unsupported = (tail >= len(get_args(Tail))) | (tensors["grain"] != KEY_BLOCK)[..., None]
    known = representatives.new_tensor(REPRESENTATIVES)  # not on torch's default device, which vLLM sets to the GPU
    unsupported |= ~torch.isin(representatives, known) | (tensors["scores"] != 0)[..., None]
    values = {"mode": _ENCODED["mode"]["dense"], "tail": 0, "representatives": 1}
    supported = {name: tensors[name].masked_fill(unsupported, value) for name, value in values.items()}
    return tensors | supported, int((supported["mode"] != mode).sum())


def _parse_layer(tensors: dict[str, Tensor], bucket: int, layer: int) -> LayerConfig:
    def decode(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: _DECODED[name][value] if name in _DECODED else value for name, value in fields.items()}

    values = {name: tensor[bucket, layer].tolist() for name, tensor in tensors.items() if name not in _CONSTANT}
    columns = zip(*(values.pop(name) for name in HEAD_TENSORS), strict=True)
    heads = tuple(HeadConfig(**decode(dict(zip(HEAD_TENSORS, column, strict=True)))) for column in columns)
    fields = dict(zip(TILE_FIELDS, values.pop("tile"), strict=True))
    tile = TileConfig(**fields | {"specialized": bool(fields["specialized"])})
    return LayerConfig(heads, tile, **decode(values))
