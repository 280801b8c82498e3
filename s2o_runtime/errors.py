"""The package's errors: one small tree under `S2OError`."""

from __future__ import annotations


class S2OError(Exception):
    """Base of every error this package raises on purpose. Its text is one sentence: found, expected, what to do.

    >>> from s2o_runtime import load_profile
    >>> try:
    ...     load_profile("README.md")
    ... except S2OError as error:
    ...     print(type(error).__name__)
    ProfileError
    """


class ConfigError(S2OError, ValueError):
    """A parameter is outside its range, or two parameters do not fit each other.

    >>> from s2o_runtime import HeadConfig
    >>> HeadConfig(segment=100).validate()
    Traceback (most recent call last):
    s2o_runtime.errors.ConfigError: segment 100 is not a multiple of 64: round it
    """


class InputError(S2OError, ValueError):
    """The tensors, arguments or files of a call do not fit each other or are not supported."""


class ProfileError(S2OError, ValueError):
    """A profile cannot be read, is damaged, or belongs to another model."""


class ModelError(S2OError, ValueError):
    """A model cannot be found, loaded, measured or patched."""


class ResourceError(S2OError):
    """The input is right, but the machine cannot serve it now.

    GPU memory ran out, a disk is full or cannot be written, another run holds a lock, or the Hub cannot be reached. The
    commands end with an exit code of its own, because the same command may succeed later or elsewhere. It is no
    RuntimeError, so that a trial which a GPU cannot run is not taken for it, nor the other way round.
    """


def get_first_line(error: BaseException) -> str:
    """Return an error's first line without a stop, as a part of one sentence, or its type's name if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
