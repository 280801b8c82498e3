"""The machine of a run: its device, the defaults that follow from it, and the files that may be written."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.journal import Journal, make_write_error
from calibrate.recipe import DEFAULT_LENGTHS, Budget, Recipe, list_report_paths, place_profile
from s2o_runtime.config import MAX_SEGMENT
from s2o_runtime.errors import ConfigError, ResourceError
from s2o_runtime.files import IN_MODEL, PROFILES, resolve_destination

if TYPE_CHECKING:
    from s2o_runtime.devices import DeviceIdentity

GPUS = {  # that a plan may be for where they are not: torch's name, compute capability, SMs and GiB of memory
    "NVIDIA A100-SXM4-80GB": ((8, 0), 108, 79), "NVIDIA L40S": ((8, 9), 142, 44),
    "NVIDIA GeForce RTX 4090": ((8, 9), 128, 24), "NVIDIA H100 80GB HBM3": ((9, 0), 132, 79),
    "NVIDIA H200": ((9, 0), 132, 140), "NVIDIA B200": ((10, 0), 148, 178),
}  # fmt: skip
MARK = "Written by S2O"  # near the beginning of every file that a command writes, but for profiles and journals
_BEGINNING = 4096  # bytes of a file that tell what it is
_PROFILE = b'{"__metadata__":{"s2o_profile":'  # after the header's size, at a profile's beginning
# a disk that does not take a file; any other OSError of a path is a wrong path, or a bug
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def resolve_recipe(
    options: Mapping[str, Any], gpu: DeviceIdentity | None = None, *, in_model: bool = False
) -> tuple[Recipe, DeviceIdentity]:
    """Return the recipe with the defaults that depend on the device, here or the `gpu` of a plan, and that device.

    options: those that were given, in the types of their fields. in_model: the profile goes into the model's folder.

    Raises what `check_files` and `resolve_device` do, and ConfigError for options that are missing or do not fit.
    """
    if "model" not in options:
        raise ConfigError("--model is missing: give an alias such as demo, a local folder, or a hub id")
    # A wrong option is refused before torch is imported, which takes seconds: until then placeholders stand for what
    # depends on the device. This length is too short for no segment, and leaves check lengths aside.
    unknown = {} if "lengths" in options else {"lengths": (MAX_SEGMENT,), "check_lengths": None}
    if in_model and "out" in options:
        raise ConfigError(f"--out {options['out']} and --out-in-model are both given: choose one")
    folder, root = (IN_MODEL, _find_own_folder(options["model"])) if in_model else (options["model"], PROFILES)
    out = place_profile(folder, "gpu", Budget.from_options(options), root)
    check_files(Recipe.from_options({"out": out} | dict(options) | unknown))

    import torch

    from s2o_runtime.devices import DeviceIdentity

    name = options.get("device") or ""
    if gpu is None and "scheduler" in options and name.startswith("cuda") and not torch.cuda.is_available():
        gpu = DeviceIdentity("cuda", options.get("target_gpu") or "gpu")  # the workers', whose host has none itself
    name, identity = ("cuda", gpu) if gpu else resolve_device(options.get("device"))
    out = place_profile(folder, identity.name, Budget.from_options(options), root)
    defaults = {"lengths": DEFAULT_LENGTHS[identity.kind], "out": out}
    return check_files(Recipe.from_options(defaults | dict(options) | {"device": name})), identity


def _find_own_folder(model: str) -> Path:
    """Return the folder of a model. Raises ConfigError if it has none, or only the Hub's, ResourceError as its disk."""
    folder = Path(model).expanduser()
    in_cache = any(parent.name.startswith("models--") for parent in folder.resolve().parents)
    if in_cache or not folder.is_dir():
        kind = "a folder of the Hub's cache" if in_cache else "no folder"
        raise ConfigError(
            f"--out-in-model writes into the folder of --model, but {model} is {kind}: hf download it with --local-dir "
            "FOLDER and give that, or give --out"
        )
    check_writable("--out-in-model", folder / IN_MODEL / "profile")
    return folder


def check_files(recipe: Recipe) -> Recipe:
    """Return the recipe, once its prompts are there and its profile, report and journal can be written.

    Raises what `check_output` does, and InputError if the journal's file is none.
    """
    for path in recipe.prompts or ():
        if not path.exists():
            raise ConfigError(f"prompt file {path} does not exist: check the path")
    check_output("--out", recipe.out, recipe.prompts or (), is_profile=True)
    for path in list_report_paths(recipe.out):
        check_output("beside --out,", path, recipe.prompts or ())
    check_writable("--journal", recipe.journal_path)
    if recipe.journal_path.exists() and recipe.journal_path.stat().st_size:  # an empty file becomes a journal
        Journal.read(recipe.journal_path).close()
    return recipe


def find_gpu(word: str) -> DeviceIdentity:
    """Return the first of `GPUS` whose name has this word, or raise ConfigError."""
    from s2o_runtime.devices import DeviceIdentity

    for name, (capability, sm_count, memory) in GPUS.items():
        if word.lower() in name.lower():
            return DeviceIdentity("cuda", name, capability, sm_count, memory << 30)
    raise ConfigError(f"a plan for target_gpu {word!r} is not known: name one of {', '.join(GPUS)}")


def resolve_device(name: str | None) -> tuple[str, DeviceIdentity]:
    """Return a device's name, by default a GPU's if there is one, and its identity.

    Raises ConfigError if it is not known or not supported, and ResourceError if it is not here.
    """
    from s2o_runtime import devices

    device = devices.get_device(name)
    if (identity := devices.identify(device)).kind not in DEFAULT_LENGTHS:
        raise ConfigError(f"device {name!r} is a {identity.kind} device, which has no kernels yet: use --device cpu")
    return name or device.type, identity


def check_writable(flag: str, path: Path) -> None:
    """Raise ConfigError for a path that cannot be a file's, or ResourceError if the disk does not take the file."""
    try:
        folder = next(parent for parent in resolve_destination(path).absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from None
    except OSError as error:
        error_type = ResourceError if error.errno in CANNOT_WRITE else ConfigError
        raise error_type(f"{flag} {path} cannot be written ({error.strerror}): choose another folder") from None


def check_output(option: str, path: Path, inputs: Iterable[Path] = (), *, is_profile: bool = False) -> None:
    """Raise, before the work and not after it, if an output cannot be written or would replace what must stay.

    An output never replaces an input, a profile by something else, or a file that this program did not write. An empty
    file may be replaced.

    Args:
        option: the flag that names the output, for messages.
        inputs: the files that the command reads.
        is_profile: whether the output is a profile, which replaces profiles only.

    Raises what `check_writable` does.
    """
    check_writable(option, path)
    if is_profile and (path.parent / "config.json").exists():
        raise ConfigError(f"{option} {path} is beside weights, as which loaders read it: use {path.parent / IN_MODEL}/")
    if not path.exists():
        return
    if any(source.exists() and path.samefile(source) for source in inputs):
        raise ConfigError(f"{option} {path} is an input, so it is not replaced: give another file name")
    profile, report = "is an S2O profile", "is a report or a picture of S2O"
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    content = profile if _PROFILE in beginning else report if MARK.encode() in beginning else "was not written by S2O"
    if beginning and content != (profile if is_profile else report):
        raise ConfigError(
            f"{option} {path} exists and {content}, so it is not replaced: give another file name, or move it away"
        )


def format_json_file(document: Mapping[str, Any]) -> bytes:
    """Return the content of a file of JSON, with its origin."""
    return (json.dumps({"origin": MARK, **document}, indent=1) + "\n").encode()


@contextmanager
def wrap_write_errors(out: Path) -> Iterator[None]:
    """Raise ResourceError, one sentence, for a disk that does not take `out`, which is written inside the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        raise make_write_error(error.filename or out, error) from error
