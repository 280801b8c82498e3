"""S2O runtime: load a profile, patch a model, run sparse attention for long prompts.

Names are loaded on first use, so that importing a part (the errors, the configuration) does not import torch,
and only `patch`, `patched`, `unpatch` and `register` import transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from s2o_runtime.attention import AttentionStats, s2o_attention, s2o_attention_varlen
    from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
    from s2o_runtime.drift import DriftCheck
    from s2o_runtime.errors import ConfigError, InputError, ModelError, ProfileError, S2OError
    from s2o_runtime.explanation import Explanation, explain
    from s2o_runtime.hf import patch, patched, register, unpatch
    from s2o_runtime.prepare import warmup
    from s2o_runtime.profile import Profile, load_profile, save_profile

__version__ = "0.1.0"
__all__ = [
    "AttentionStats",
    "ConfigError",
    "DriftCheck",
    "Explanation",
    "HeadConfig",
    "InputError",
    "LayerConfig",
    "ModelError",
    "Profile",
    "ProfileError",
    "S2OError",
    "TileConfig",
    "explain",
    "load_profile",
    "patch",
    "patched",
    "register",
    "s2o_attention",
    "s2o_attention_varlen",
    "save_profile",
    "unpatch",
    "warmup",
]

_HOMES = {
    "attention": ("AttentionStats", "s2o_attention", "s2o_attention_varlen"),
    "config": ("HeadConfig", "LayerConfig", "TileConfig"),
    "errors": ("ConfigError", "InputError", "ModelError", "ProfileError", "S2OError"),
    "drift": ("DriftCheck",),
    "explanation": ("Explanation", "explain"),
    "hf": ("patch", "patched", "register", "unpatch"),
    "prepare": ("warmup",),
    "profile": ("Profile", "load_profile", "save_profile"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"s2o_runtime.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
