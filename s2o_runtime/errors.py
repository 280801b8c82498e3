"""The package's errors: one small tree under `S2OError`."""

from __future__ import annotations


class S2OError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(S2OError, ValueError):
    """A parameter is outside its range, or two parameters do not fit each other."""


class InputError(S2OError, ValueError):
    """The tensors or arguments of a call do not fit each other or are not supported."""


class ProfileError(S2OError, ValueError):
    """A profile cannot be read, is damaged, or belongs to another model."""


class ModelError(S2OError, ValueError):
    """A model cannot be found, loaded, measured or patched."""
