"""The file of a profile: one safetensors file, read with care and written atomically.

Tensors hold what the runtime needs: one entry for each length bucket, layer and head. Everything else is one JSON
document under one metadata key: with two keys safetensors files are not byte-reproducible. FORMAT.md beside this file
specifies both. A file may come from anywhere: its sizes are bounded before it is read, and its values are checked
before they are used. Only files of this `SCHEMA` are read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from s2o_runtime.config import (
    GRAIN,
    LAST_ROWS,
    REPRESENTATIVES,
    HeadConfig,
    LayerConfig,
    Mode,
    Scores,
    StopRule,
    Tail,
    TileConfig,
)
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import InputError, ProfileError
from s2o_runtime.files import write_atomically
from s2o_runtime.identity import Geometry, join_fingerprint, split_fingerprint, tensor_bytes
from s2o_runtime.lengths import MAX_LENGTH, length_step
from s2o_runtime.profile.profile import Profile
from s2o_runtime.version import __version__

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
MAX_BUCKETS = length_step(MAX_LENGTH) + 1  # as many as differ by an eighth of an octave
MAX_HEADS = 1 << 20  # of all buckets and layers together
MAX_COUNT = 1 << 14  # of layers, of heads, of a head's dimensions
SHOWN = 60  # characters of a foreign text in a message
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
# `row_reduce` is 0, the mean of the rows' gains; versions that knew their maximum too wrote 1 for it
LAYER_TENSORS = {"tile": torch.int32, "row_reduce": torch.uint8, "grain": torch.uint8, "scores": torch.uint8}
TENSORS = HEAD_TENSORS | LAYER_TENSORS
OPTIONAL_TENSORS = {"last_rows": torch.int32}  # of layers; absent where all of it is 0
SIZES = ("layers", "query_heads", "kv_heads", "head_dim")  # of the model, as numbers
MODES: tuple[Mode, ...] = ("s2o", "dense")  # numbers in the tensor `mode`
# tensors that hold the numbers of names
_INDEXED: dict[str, tuple[Any, ...]] = {"mode": MODES, "tail": get_args(Tail), "scores": get_args(Scores)}
_VALUES: dict[str, Any] = _INDEXED | {"stop_rule": {int(rule): rule for rule in StopRule}}
_ALLOWED: dict[str, tuple[int, ...]] = {name: tuple(range(len(names))) for name, names in _INDEXED.items()}
_ALLOWED |= {"stop_rule": tuple(_VALUES["stop_rule"]), "row_reduce": (0,), "last_rows": LAST_ROWS}
# earlier versions wrote more of these: heads that have one run dense (`_with_supported_heads`)
_ALLOWED |= {"tail": (0, 1, 2), "representatives": (1, 2, 4, 8, 16, 32, 64), "grain": (1, 2, 4, 8)}


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
    write_atomically(Path(path), serialize(profile.validate()))


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read and check a profile. Nothing in the file is executed.

    Raises:
        ProfileError: naming the file and what is wrong with it.
        InputError: the path is none.

    >>> load_profile("profiles/demo/cpu/mse-0.0001.safetensors").lengths  # in a clone of the repository
    (1024, 1536, 2048)
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"load_profile has a {type(path).__name__}: expected the path of a profile's file")
    path = Path(path)
    data = _bytes(path)
    try:
        header = _header(data)
    except (ValueError, RecursionError) as error:
        raise _foreign(path, error) from error
    metadata = header.pop("__metadata__", None)
    text = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise ProfileError(f"{path} is a safetensors file but not an S2O profile: expected {METADATA_KEY!r}")
    with _errors_of(path):
        document = _document(text)
        _check_schema(document)
        _check_tensor_names(set(header))
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise _foreign(path, error) from error
    with _errors_of(path):
        profile = _parse(document, tensors)
        profile.validate()
    return profile


def serialize(profile: Profile) -> bytes:
    """The bytes of a profile's file.

    Raises:
        ProfileError: naming a field that `load_profile` would refuse.
    """
    tensors = _tensors(profile)
    document = described(profile)
    _check_values(document)
    document["digest"] = _digest(document, tensors)
    text = _canonical(document)
    _check_document_size(text)
    _parse(json.loads(text), tensors)
    data: bytes = save(tensors, metadata={METADATA_KEY: text})
    return data


def described(profile: Profile) -> dict[str, Any]:
    """The JSON document of a profile's file without the digest: all of the profile but its layers."""
    return {
        "schema": SCHEMA,
        "baselines": [],  # versions that gave heads to other methods listed them here
        "model": {"name": profile.model_name, **split_fingerprint(profile.fingerprint), **profile.geometry.as_json()},
        "device": asdict(profile.device),
        "lengths": list(profile.lengths),
        "record": profile.record,
    }


def _tensors(profile: Profile) -> dict[str, Tensor]:
    def of_layer(name: str, layer: LayerConfig) -> Any:
        if name == "tile":
            return [int(getattr(layer.tile, field)) for field in TILE_FIELDS]
        if name in ("row_reduce", "grain"):
            return GRAIN if name == "grain" else 0
        return [_coded(name, head) for head in layer.heads] if name in HEAD_TENSORS else _coded(name, layer)

    dtypes = TENSORS
    if any(layer.last_rows for bucket in profile.layers for layer in bucket):
        dtypes = TENSORS | OPTIONAL_TENSORS
    return {
        name: torch.tensor([[of_layer(name, layer) for layer in bucket] for bucket in profile.layers], dtype=dtype)
        for name, dtype in dtypes.items()
    }


def _coded(name: str, config: HeadConfig | LayerConfig) -> Any:
    """A field as its tensor holds it."""
    value = getattr(config, name)
    return _INDEXED[name].index(value) if name in _INDEXED else value


def _decoded(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a head or of a layer, by what their tensors hold."""
    return {name: _VALUES[name][value] if name in _VALUES else value for name, value in fields.items()}


def _canonical(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(document: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """A hash over the document (without its digest) and every tensor, so that a damaged file is noticed."""
    digest = hashlib.sha256(_canonical({key: value for key, value in document.items() if key != "digest"}).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Whatever reading foreign contents raises, as a ProfileError that names the file."""
    try:
        yield
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise ProfileError(f"{path}: its contents cannot be read ({error}): it is damaged") from error


def _foreign(path: Path, error: Exception) -> ProfileError:
    return ProfileError(f"{path} is not a readable safetensors file ({error}): it is damaged or foreign")


def _bytes(path: Path) -> bytes:
    """The whole file, read once, because another program may change it between two reads."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ProfileError(f"{path} is not a file: check the path")
        with path.open("rb") as file:
            data = b"" if status.st_size > MAX_BYTES else file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"{path} cannot be read ({error.strerror}): check the path") from error
    if max(status.st_size, len(data)) > MAX_BYTES:
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


def _document(text: str) -> dict[str, Any]:
    """The JSON document in the file's metadata, its values checked."""
    _check_document_size(text)
    try:
        document = _strict_json(text)
    except ProfileError:
        raise
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"its document is not valid JSON ({error}): it is damaged or foreign") from error
    if not isinstance(document, dict):
        raise ProfileError(f"its document is {JSON_TYPES[type(document)]}: expected an object")
    _check_values(document)
    return document


def _strict_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object, parse_int=_integer)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ProfileError if a name occurs twice: readers would differ in which value they take."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ProfileError(f"field {_shown(twice)} is given twice: expected every field once")
    return values


def _integer(digits: str) -> float:
    """An integer, or infinity where reading it would take long: `_check_values` refuses both."""
    return int(digits) if len(digits) <= SHOWN else math.inf


def _check_document_size(text: str) -> None:
    if len(text) > MAX_DOCUMENT:
        raise ProfileError(f"its document has {len(text)} characters: a profile's has at most {MAX_DOCUMENT}")


def _check_values(value: Any, *path: str | int) -> None:
    """Raise ProfileError naming the first field, in `value` or below it, that no JSON reader would take.

    Args:
        value: of any type; the caller may have built it.
        path: the names and list positions that lead to the value.
    """
    if len(path) > MAX_DEPTH:
        raise ProfileError(f"field {_dotted(path)} is too deep: expected at most {MAX_DEPTH} levels")
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str) or not _is_text(name):
                raise ProfileError(f"field {_dotted((*path, _shown(name)))} has a name that is no text: expected text")
            _check_values(item, *path, name)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_values(item, *path, index)
    elif isinstance(value, str):
        if not _is_text(value):
            raise ProfileError(f"field {_dotted(path)} is {_shown(value)}: expected valid Unicode")
    elif isinstance(value, int):
        if value.bit_length() > 63:
            raise ProfileError(
                f"field {_dotted(path)} has {value.bit_length()} bits: expected an integer of at most 63"
            )
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ProfileError(f"field {_dotted(path)} is {value}: expected a finite number")
    elif value is not None:
        raise ProfileError(f"field {_dotted(path)} is a {type(value).__name__}: expected a JSON value")


def _is_text(value: str) -> bool:
    """Whether it is valid Unicode: JSON can hold one half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dotted(path: Sequence[str | int]) -> str:
    """("record", "layers", 0) -> "record.layers[0]" """
    names = (f"[{name}]" if isinstance(name, int) else f".{name[:SHOWN]}" for name in path)
    return "".join(names).removeprefix(".").encode(errors="backslashreplace").decode()


def _shown(value: Any) -> str:
    text = ascii(value[: SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."


def _check_schema(document: dict[str, Any]) -> None:
    schema: int = _field(document, "schema", int)
    if schema != SCHEMA:
        age, advice = ("an older", "calibrate again") if schema < SCHEMA else ("a newer", "install that")
        raise ProfileError(
            f"schema {schema} is of {age} version of S2O than {__version__}, which reads {SCHEMA}: {advice}"
        )


def _check_tensor_names(names: set[str]) -> None:
    for name in sorted((names - set(OPTIONAL_TENSORS)) ^ set(TENSORS)):
        wrong = "is not part of a profile" if name in names else "is missing"
        raise ProfileError(f"tensor {_shown(name)} {wrong}: expected {sorted(TENSORS)}")


def _parse(document: dict[str, Any], tensors: dict[str, Tensor]) -> Profile:
    """The profile in a document and its tensors."""
    _check_schema(document)
    if methods := _field(document, "baselines", list):
        raise ProfileError(
            f"field baselines is {_shown(methods)}: this version has no heads that other methods compute, calibrate "
            "again"
        )
    model = _field(document, "model", dict)
    rows, query_heads, kv_heads, head_dim = (_number(model, name, "model.", 1, MAX_COUNT) for name in SIZES)
    geometry = Geometry(_field(model, "architecture", str, "model."), rows, query_heads, kv_heads, head_dim)
    geometry = _with_other_layers(geometry, model)
    if geometry.query_heads % geometry.kv_heads:
        raise ProfileError(
            f"field model.kv_heads is {geometry.kv_heads}: expected a divisor of {geometry.query_heads} query heads"
        )
    lengths = _lengths(_field(document, "lengths", list))
    expected = (len(lengths), geometry.layers)
    heads = math.prod(expected) * geometry.query_heads
    if heads > MAX_HEADS:
        raise ProfileError(f"lengths, model.layers and model.query_heads make {heads} heads: at most {MAX_HEADS}")
    _check_tensors(tensors, expected, geometry.query_heads)
    device = _device(_field(document, "device", dict))
    model_name, hashes = (_field(model, name, str, "model.") for name in ("name", "fingerprint"))
    base, config = (
        _field(model, name, kind, "model.") if name in model else None
        for name, kind in (("base_fingerprint", str), ("config", dict))
    )
    record = _field(document, "record", dict)
    if _field(document, "digest", str) != _digest(document, tensors):
        raise ProfileError("the digest does not match the contents: the file was changed or damaged, make it again")
    tensors, unsupported = _with_supported_heads(tensors)
    layers = tuple(
        tuple(_layer(tensors, bucket, index) for index in range(geometry.layers)) for bucket in range(len(lengths))
    )
    fingerprint = join_fingerprint(hashes, base, config)
    return Profile(model_name, geometry, fingerprint, device, lengths, layers, record, unsupported)


def _with_other_layers(geometry: Geometry, model: dict[str, Any]) -> Geometry:
    """The geometry with what the document says of layers of other kinds; files of models without any say nothing."""
    if "layer_numbers" not in model:
        return geometry
    numbers, layers = _field(model, "layer_numbers", list, "model."), geometry.layers
    others = _field(model, "other_layers", dict, "model.")
    if not others or not all(type(count) is int and 1 <= count <= MAX_COUNT for count in others.values()):
        raise ProfileError(f"field model.other_layers is {_shown(others)}: expected numbers of layers by their kinds")
    total = layers + sum(others.values())
    if (
        len(numbers) != layers
        or not all(type(number) is int and 0 <= number < total for number in numbers)
        or numbers != sorted(set(numbers))
    ):
        raise ProfileError(
            f"field model.layer_numbers is {_shown(numbers)}: expected {layers} ascending numbers below {total}"
        )
    return replace(geometry, layer_numbers=tuple(numbers), others=tuple(sorted(others.items())))


def _field(document: dict[str, Any], name: str, expected: type, parent: str = "") -> Any:
    value = document.get(name)
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        wrong = "is missing" if name not in document else f"is {JSON_TYPES[type(value)]}"
        raise ProfileError(f"field {parent}{name} {wrong}: expected {JSON_TYPES[expected]}")
    return value


def _number(document: dict[str, Any], name: str, parent: str, least: int, most: int) -> int:
    value: int = _field(document, name, int, parent)
    if not least <= value <= most:
        raise ProfileError(f"field {parent}{name} is {value}: expected {least} to {most}")
    return value


def _lengths(values: list[Any]) -> tuple[int, ...]:
    if not values:
        raise ProfileError("lengths is empty: expected at least one bucket")
    if len(values) > MAX_BUCKETS:
        raise ProfileError(f"lengths has {len(values)} entries: expected at most {MAX_BUCKETS}")
    if not all(isinstance(length, int) and not isinstance(length, bool) for length in values):
        raise ProfileError(f"lengths {_shown(values)} are not integers: expected numbers of tokens")
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


def _check_tensors(tensors: dict[str, Tensor], outer: tuple[int, int], heads: int) -> None:
    """Raise ProfileError for a type, a shape or a value that no profile has. outer: buckets and layers."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(HEAD_TENSORS, (*outer, heads))
    shapes |= dict.fromkeys((*LAYER_TENSORS, *OPTIONAL_TENSORS), outer) | {"tile": (*outer, len(TILE_FIELDS))}
    for name, dtype in (TENSORS | OPTIONAL_TENSORS).items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != shapes[name]:
            raise ProfileError(
                f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}: expected {dtype} {shapes[name]}"
            )
    specialized = tensors["tile"][..., TILE_FIELDS.index("specialized")]
    for name, tensor, allowed in (
        *((name, tensors[name], allowed) for name, allowed in _ALLOWED.items() if name in tensors),
        ("tile[specialized]", specialized, (0, 1)),
    ):
        unknown = sorted(set(tensor.flatten().tolist()) - set(allowed))
        if unknown:
            raise ProfileError(f"tensor {name} holds {unknown[0]}: expected one of {allowed}, calibrate again")


def _with_supported_heads(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return the tensors with heads dense that this version cannot run sparse, and how many became dense.

    A dense head has no error, so whatever was proven of the profile still holds.
    """
    mode, tail, representatives = (tensors[name] for name in ("mode", "tail", "representatives"))
    unsupported = (tail >= len(get_args(Tail))) | (tensors["grain"] != GRAIN)[..., None]
    unsupported |= ~torch.isin(representatives, torch.tensor(REPRESENTATIVES))
    dense = mode.masked_fill(unsupported, MODES.index("dense"))
    supported = {
        "tail": tail.masked_fill(unsupported, 0),
        "representatives": representatives.masked_fill(unsupported, 1),
    }
    return tensors | supported | {"mode": dense}, int((dense != mode).sum())


def _layer(tensors: dict[str, Tensor], bucket: int, layer: int) -> LayerConfig:
    values = {name: tensor[bucket, layer].tolist() for name, tensor in tensors.items()}
    columns = zip(*(values.pop(name) for name in HEAD_TENSORS), strict=True)
    heads = tuple(HeadConfig(**_decoded(dict(zip(HEAD_TENSORS, column, strict=True)))) for column in columns)
    fields = dict(zip(TILE_FIELDS, values.pop("tile"), strict=True))
    tile = TileConfig(**fields | {"specialized": bool(fields["specialized"])})
    del values["row_reduce"], values["grain"]
    return LayerConfig(heads, tile, **_decoded(values))
