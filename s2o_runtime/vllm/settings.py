"""What a user says to S2O inside vLLM: `--additional-config '{"s2o": {...}}'`, or the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from s2o_runtime.serving.settings import Settings

SECTION = "s2o"  # of --additional-config


def settings_of(additional_config: Any) -> Settings:
    """The settings in vLLM's `additional_config`; without a profile there, the environment's S2O_PROFILE.

    Raises:
        ConfigError: a setting is unknown or illegal.
    """
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
    return Settings.of(section, f'"{SECTION}" in --additional-config')
