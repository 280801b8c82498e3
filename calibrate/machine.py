"""What depends on the machine: its devices, the defaults that follow from them, and which files may be written."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.recipe import DEFAULT_LENGTHS, Budget, Recipe, default_out, report_paths
from s2o_runtime.config import MAX_SEGMENT
from s2o_runtime.errors import ConfigError, ResourceError
from s2o_runtime.files import destination

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


def draft(options: Mapping[str, Any]) -> Recipe:
    """The recipe as far as it is known without torch.

    Args:
        options: those that were given, in the types of their fields.

    Returns:
        A recipe that is validated and whose files are checked; its device, and lengths and output that were not given,
        are placeholders for what `on_this_machine` takes.

    Raises:
        ConfigError: an option is missing, out of range, or names a file that is not there or cannot be written.
        ResourceError: the disk does not take the output.
    """
    if "model" not in options:
        raise ConfigError("--model is missing: give an alias such as demo, a local folder, or a hub id")
    out = default_out(options["model"], "gpu", Budget.of(options))
    unknown = {} if "lengths" in options else {"lengths": (MAX_SEGMENT,), "check_lengths": None}
    recipe = Recipe.of({"out": out} | dict(options) | unknown)
    for path in recipe.prompts or ():
        if not path.exists():
            raise ConfigError(f"prompt file {path} does not exist: check the path")
    check_writable("--out", recipe.out)
    check_writable("--journal", recipe.journal_path)
    return recipe


def on_this_machine(options: Mapping[str, Any], gpu: DeviceIdentity | None = None) -> tuple[Recipe, DeviceIdentity]:
    """Return the recipe with the defaults that depend on the device, here or the `gpu` of a plan, and that device.

    Raises what `check_files` and `named_device` do.
    """
    name, identity = ("cuda", gpu) if gpu else _elsewhere(options) or named_device(options.get("device"))
    defaults = {
        "lengths": DEFAULT_LENGTHS[identity.kind],
        "out": default_out(options["model"], identity.name, Budget.of(options)),
    }
    return check_files(Recipe.of(defaults | dict(options) | {"device": name})), identity


def check_files(recipe: Recipe) -> Recipe:
    """Return the recipe, once its profile, report and journal can be written (`check_output`).

    Raises InputError too, if the journal's file is none.
    """
    from calibrate.journal import Journal

    check_output("--out", recipe.out, recipe.prompts or (), is_profile=True)
    for path in report_paths(recipe.out):
        check_output("beside --out,", path, recipe.prompts or ())
    check_writable("--journal", recipe.journal_path)
    if recipe.journal_path.exists() and recipe.journal_path.stat().st_size:  # an empty file becomes a journal
        Journal.read(recipe.journal_path).close()
    return recipe


def gpu_named(part: str) -> DeviceIdentity:
    """The first of `GPUS` whose name has this part. Raises ConfigError if none has."""
    from s2o_runtime.devices import DeviceIdentity

    name = next((name for name in GPUS if part.lower() in name.lower()), None)
    if name is None:
        raise ConfigError(f"a plan for target_gpu {part!r} is not known: name one of {', '.join(GPUS)}")
    capability, sm_count, memory = GPUS[name]
    return DeviceIdentity("cuda", name, capability, sm_count, memory << 30)


def _elsewhere(options: Mapping[str, Any]) -> tuple[str, DeviceIdentity] | None:
    """The GPU of a scheduler's workers, where a host without GPUs coordinates them; None if it has some itself."""
    import torch

    from s2o_runtime.devices import DeviceIdentity

    if "scheduler" not in options or torch.cuda.is_available() or not options.get("device", "").startswith("cuda"):
        return None
    return "cuda", DeviceIdentity("cuda", options.get("target_gpu") or "gpu")


def named_device(name: str | None) -> tuple[str, DeviceIdentity]:
    """A device's name, by default a GPU's if there is one, and which it is.

    Raises:
        ConfigError: it is not known or not supported.
        ResourceError: it is not here.
    """
    from s2o_runtime import devices

    device = devices.named_device(name)
    if (identity := devices.identify(device)).kind not in DEFAULT_LENGTHS:
        raise ConfigError(f"device {name!r} is a {identity.kind} device, which has no kernels yet: use --device cpu")
    return name or device.type, identity


def check_writable(flag: str, path: Path) -> None:
    """Fail before the work, not after it, if a file cannot be written at a path.

    Raises:
        ConfigError: the path cannot be a file's (`files.destination`).
        ResourceError: the disk does not take it.
    """
    try:
        folder = next(parent for parent in destination(path).absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from None
    except OSError as error:
        kind = ResourceError if error.errno in CANNOT_WRITE else ConfigError
        raise kind(f"{flag} {path} cannot be written ({error.strerror}): choose another folder") from None


def check_output(option: str, path: Path, inputs: Iterable[Path] = (), *, is_profile: bool = False) -> None:
    """Fail before the work, not after it, if an output cannot be written or would replace what must stay.

    An output never replaces an input, a profile by something else, or a file that this program did not write. An empty
    file may be replaced.

    Args:
        option: what names the output, for messages.
        inputs: the files that the command reads.
        is_profile: whether the output is a profile, which replaces profiles only.

    Raises ConfigError, or ResourceError as `check_writable` does.
    """
    check_writable(option, path)
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


def json_file(document: Mapping[str, Any]) -> bytes:
    """Return the content of a file of JSON, with who wrote it."""
    return (json.dumps({"origin": MARK, **document}, indent=1) + "\n").encode()


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Where `out` is written: raises ResourceError, one sentence, for a disk that does not take it."""
    try:
        yield
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        from calibrate.journal import write_failure

        raise write_failure(error.filename or out, error) from error
