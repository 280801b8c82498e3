"""What a user says to S2O inside vLLM: `--additional-config '{"s2o": {...}}'`, or the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from s2o_runtime.serving.settings import Origin, Settings

SECTION = "s2o"  # of --additional-config
ORIGIN = Origin(
    name=f'"{SECTION}"',
    whole=f'"{SECTION}" in --additional-config',
    ask='add --additional-config \'{"s2o": {"profile": FILE}}\', or serve with another --attention-backend',
)


def settings_of(additional_config: Any) -> Settings:
    """The settings in vLLM's `additional_config`; without a profile there, the environment's S2O_PROFILE.

    Raises:
        InputError: no profile is given.
        ConfigError: a setting is unknown or illegal.
    """
    return Settings.of(additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}, ORIGIN)
