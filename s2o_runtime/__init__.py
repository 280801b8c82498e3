"""S2O runtime: load a profile, patch a model, run sparse attention for long prompts.

Names are loaded on first use, so that importing a part (the errors, the configuration) does not import torch,
and only `patch`, `patched`, `unpatch` and `register` import transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from s2o_runtime.lazy import load_lazily
from s2o_runtime.version import __version__ as __version__

if TYPE_CHECKING:
    from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
    from s2o_runtime.attention.compute import Attention, AttentionStats
    from s2o_runtime.attention.paged import s2o_attention_paged
    from s2o_runtime.attention.warmup import warmup
    from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
    from s2o_runtime.errors import ConfigError, InputError, ModelError, ProfileError, ResourceError, S2OError
    from s2o_runtime.huggingface.explanation import Explanation, explain
    from s2o_runtime.huggingface.hf import patch, patched, register, unpatch
    from s2o_runtime.monitor.drift import DriftCheck
    from s2o_runtime.profile import Profile, load_profile, save_profile

__all__ = [
    "Attention",
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
    "ResourceError",
    "S2OError",
    "TileConfig",
    "explain",
    "load_profile",
    "patch",
    "patched",
    "register",
    "s2o_attention",
    "s2o_attention_paged",
    "s2o_attention_varlen",
    "save_profile",
    "unpatch",
    "warmup",
]

_HOMES = {
    "attention.api": ("s2o_attention", "s2o_attention_varlen"),
    "attention.paged": ("s2o_attention_paged",),
    "attention.compute": ("Attention", "AttentionStats"),
    "config": ("HeadConfig", "LayerConfig", "TileConfig"),
    "errors": ("ConfigError", "InputError", "ModelError", "ProfileError", "ResourceError", "S2OError"),
    "huggingface.explanation": ("Explanation", "explain"),
    "huggingface.hf": ("patch", "patched", "register", "unpatch"),
    "attention.warmup": ("warmup",),
    "monitor.drift": ("DriftCheck",),
    "profile": ("Profile", "load_profile", "save_profile"),
}

__getattr__ = load_lazily(__name__, _HOMES)
