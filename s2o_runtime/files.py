"""Write files atomically, and name their contents."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from .errors import ConfigError

DIGEST = 16  # hexadecimal digits of a SHA-256 that name a content
PROFILES = Path("profiles")  # where s2o-calibrate writes by default, in the folder that it runs in
IN_MODEL = "s2o"  # where a model's folder has its profiles: loaders read every .safetensors beside the weights


def hash_file(path: Path) -> str:
    """Return the digest of a file's bytes, by which metrics and results name a profile."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST]


def resolve_destination(path: Path) -> Path:
    """Return the file that a write to a path makes or replaces: a symbolic link's target, else the path itself.

    Raises ConfigError for what is not a regular file, such as a folder, and OSError if the path cannot be followed.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{path} is a folder: give a file name")
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is a pipe, a socket or a device, and no regular file: give another file name")
    return path.resolve() if path.is_symlink() else path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, sees the old content or the new, never a part.

    path: the file, or a symbolic link to it, which stays one; its folder must exist. Raises ConfigError for what is not
    a regular file, and OSError, which names the folder if that takes no files; the old content is then still there.
    """
    path = resolve_destination(path)
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path.parent)) from error
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
