"""What a user says to S2O inside a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from s2o_runtime.errors import ConfigError
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
        strict: refuse a profile of other weights of the same sizes; else they are reported, and nothing is proven.
        metrics_port: where the first process serves its counters to Prometheus, the others at the ports after it; None
            for nowhere.
        metrics_host: the address of the machine at which those ports answer; "0.0.0.0" is all of them.
        log_every: seconds between two lines of the log that say what ran; 0 for none.
    """

    profile: Path | None = None
    beyond: Beyond = "dense"
    drift: DriftChoice = "auto"
    strict: bool = True
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    log_every: float = 300.0

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
        known = {field.name for field in fields(cls)}
        for setting in section:
            if setting not in known:
                raise ConfigError(f'"{setting}" is not a setting of {name}: use {", ".join(sorted(known))}')
        profile = section.get("profile") or os.environ.get(PROFILE_VARIABLE) or None
        if not isinstance(profile, (str, os.PathLike, NoneType)):
            raise ConfigError(f"profile is {profile!r}: use the path of a file")
        settings = cls(**{**section, "profile": None if profile is None else Path(profile)})
        if settings.beyond not in get_args(Beyond):
            raise ConfigError(f"beyond {settings.beyond!r} is not known: use one of {get_args(Beyond)}")
        if settings.drift not in get_args(DriftChoice):
            raise ConfigError(f"drift {settings.drift!r} is not known: use one of {get_args(DriftChoice)}")
        if not isinstance(settings.strict, bool):
            raise ConfigError(f"strict is {settings.strict!r}: use true or false")
        port = settings.metrics_port
        if port is not None and (type(port) is not int or not 0 < port < 1 << 16):
            raise ConfigError(f"metrics_port {port!r} is out of range: use 1 to 65535")
        if not isinstance(settings.metrics_host, str) or not settings.metrics_host:
            raise ConfigError(
                f"metrics_host {settings.metrics_host!r} is no address: use 127.0.0.1 for this machine alone, or "
                "0.0.0.0 for all who reach it"
            )
        if type(settings.log_every) not in (int, float) or settings.log_every < 0:
            raise ConfigError(f"log_every {settings.log_every!r} is out of range: use seconds, or 0")
        return settings
