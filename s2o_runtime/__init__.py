"""S2O runtime: load a profile, patch a model, run sparse attention for long prompts.

Names are loaded on first use, so that importing a part (the errors, the configuration) does not import torch,
and only `patch`, `patched`, `unpatch` and `register` import transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import load_lazily
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .attention.api import s2o_attention, s2o_attention_varlen
    from .attention.compute import Attention, AttentionStats
    from .attention.paged import s2o_attention_paged
    from .attention.warmup import warmup
    from .config import HeadConfig, LayerConfig, TileConfig
    from .errors import ConfigError, InputError, ModelError, ProfileError, ResourceError, S2OError
    from .huggingface.explanation import Explanation, explain
    from .huggingface.hf import patch, patched, register, unpatch
    from .monitor.drift import DriftCheck
    from .profile import Profile, load_profile, save_profile

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
    # what transformers looks for in a kernel of the Hub
    "huggingface.hub": ("flash_attn_forward", "supports_flash_attn"),
    "monitor.drift": ("DriftCheck",),
    "profile": ("Profile", "load_profile", "save_profile"),
}

__getattr__ = load_lazily(__name__, _HOMES)
