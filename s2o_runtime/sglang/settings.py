"""What a user says to S2O inside SGLang, which passes nothing on to a backend: by the environment."""

from __future__ import annotations

import json
import os

from s2o_runtime.errors import ConfigError
from s2o_runtime.serving.settings import Settings

VARIABLE = "S2O_SETTINGS"  # a JSON object


def settings_of_environment() -> Settings:
    """The settings in the environment's S2O_SETTINGS; without a profile there, its S2O_PROFILE.

    Raises:
        ConfigError: a setting is unknown or illegal.
    """
    text = os.environ.get(VARIABLE) or "{}"
    try:
        section = json.loads(text)
    except ValueError as error:
        raise ConfigError(f'{VARIABLE} is no JSON ({error}): use an object, {{"profile": FILE}}') from error
    return Settings.of(section, VARIABLE)
