"""What a user says to S2O inside a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from s2o_runtime.errors import ConfigError
from s2o_runtime.fields import DURATION, Rule, ruled, rules_of
from s2o_runtime.monitor.drift import DriftChoice

PROFILE_VARIABLE = "S2O_PROFILE"
Beyond = Literal["dense", "s2o"]


@dataclass(frozen=True)
class Settings:
    """The settings of a server.

    Attributes:
        profile: the profile's file; None for the one that `s2o_runtime.profile.find` finds for the served model.
        beyond: what prompts of more than 1.5 times the longest calibrated length run.
        drift: what happens where sampled errors are past the profile's limits: "warn", "dense" (the layer runs dense
            from then on), "off", or "auto", which warns where the profile says what it allows.
        strict: refuse a profile of another function of the same sizes, and weights or a config.json that cannot be
            compared; else that is reported, and nothing is proven.
        metrics_port: where the first process serves its counters to Prometheus, the others at the ports after it; None
            for nowhere.
        metrics_host: the address of the machine at which those ports answer; "0.0.0.0" is all of them.
        log_every: seconds between two lines of the log that say what ran; 0 for none.
    """

    profile: Path | None = ruled(None, Rule(Path, optional=True))
    beyond: Beyond = ruled("dense", Rule(str, allowed=get_args(Beyond)))
    drift: DriftChoice = ruled("auto", Rule(str, allowed=get_args(DriftChoice)))
    strict: bool = ruled(True, Rule(bool))
    metrics_port: int | None = ruled(None, Rule(int, low=1, high=65535, optional=True))
    metrics_host: str = ruled("127.0.0.1", Rule(str))
    log_every: float = ruled(300.0, Rule(float, low=0, unit=DURATION))

    @classmethod
    def of(cls, section: Any, name: str) -> Settings:
        """The settings that a user gave; without a profile among them, the environment's S2O_PROFILE.

        Args:
            section: a mapping of names to values, or what a user gave in its place.
            name: what it is called, and where it is from.

        Raises:
            ConfigError: a setting is unknown or illegal.
        """
        if not isinstance(section, Mapping):
            raise ConfigError(f'{name} is {section!r}: use an object, {{"profile": FILE}}')
        rules = rules_of(cls)
        for setting in section:
            if setting not in rules:
                raise ConfigError(f'"{setting}" is not a setting of {name}: use {", ".join(sorted(rules))}')
        given = dict(section) | {"profile": section.get("profile") or os.environ.get(PROFILE_VARIABLE) or None}
        settings = cls(**{setting: rules[setting].checked(value, setting) for setting, value in given.items()})
        if not settings.metrics_host:
            raise ConfigError(
                f"metrics_host {settings.metrics_host!r} is no address: use 127.0.0.1 for this machine alone, or "
                "0.0.0.0 for all who reach it"
            )
        return settings
