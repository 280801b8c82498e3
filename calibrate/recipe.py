"""What to calibrate, as one validated dataclass."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from s2o_runtime.config import GRAINS, REPRESENTATIVES
from s2o_runtime.errors import ConfigError

SEGMENTS = (256, 512, 1024, 2048)


@dataclass(frozen=True)
class Budget:
    """How much error a layer's attention may have.

    kind: "mse" is the mean squared difference from dense attention over the operator's whole output;
    "rel_mse" the same divided by the dense output's mean square, which carries over between models.
    """

    kind: str
    value: float

    def validate(self) -> Budget:
        if self.kind not in ("mse", "rel_mse"):
            raise ConfigError(f"budget kind {self.kind!r} is not known: use mse or rel_mse")
        if not math.isfinite(self.value) or self.value <= 0:
            raise ConfigError(f"budget {self.value} is not a positive number: try 1e-4")
        return self

    def error(self, mse: float, dense_power: float) -> float:
        """An error in the budget's unit, from a mean squared error and the dense output's mean square."""
        return mse if self.kind == "mse" else mse / max(dense_power, 1e-30)

    def __str__(self) -> str:
        return f"{self.kind.replace('_', '-')}-{self.value:g}"


@dataclass(frozen=True)
class Recipe:
    """One calibration run.

    model: alias, local folder or hub id; lengths: prompt lengths in tokens; num_prompts, held_out: prompts of
    each length to calibrate on and to prove on; margin: the share of the budget that calibration may spend,
    the rest is left for prompts it has not seen; trials: Optuna trials for each layer and length;
    representatives, grains: what a head's representatives and a layer's grain are chosen from.
    """

    model: str
    budget: Budget
    lengths: tuple[int, ...]
    out: Path
    prompts: Path | None = None
    num_prompts: int = 4
    held_out: int = 2
    seed: int = 0
    trials: int = 16
    margin: float = 0.8
    device: str = "cpu"
    representatives: tuple[int, ...] = (1, 32)
    grains: tuple[int, ...] = (4,)

    def validate(self) -> Recipe:
        self.budget.validate()
        if not self.lengths or len(set(self.lengths)) != len(self.lengths):
            raise ConfigError(f"lengths {self.lengths} are empty or repeated: give each length once")
        for length in self.lengths:
            if length < SEGMENTS[0]:
                raise ConfigError(f"length {length} is shorter than one segment of {SEGMENTS[0]}: use a longer one")
        if tuple(sorted(self.lengths)) != self.lengths:
            raise ConfigError(f"lengths {self.lengths} are not ascending: sort them")
        for name, least in (("num_prompts", 1), ("held_out", 1), ("trials", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}: use at least {least}")
        for name, allowed in (("representatives", REPRESENTATIVES), ("grains", GRAINS)):
            values = getattr(self, name)
            if not values or tuple(sorted(set(values))) != values:
                raise ConfigError(f"{name} {values} are empty, repeated or not ascending: give each once, sorted")
            for value in values:
                if value not in allowed:
                    raise ConfigError(f"{name} {value} is not supported: use some of {allowed}")
        if not 0 < self.margin <= 1:
            raise ConfigError(f"margin is {self.margin}: use a share above 0 and at most 1")
        return self

    def check_limit(self, limit: int) -> None:
        """Raises ConfigError if a length is beyond what the model can read."""
        if self.lengths[-1] > limit:
            raise ConfigError(f"length {self.lengths[-1]} is beyond the model's limit of {limit}: use a shorter one")

    def segments(self, length: int) -> tuple[int, ...]:
        """Segment lengths worth trying: at least half of a prompt must lie in some prefix."""
        return tuple(segment for segment in SEGMENTS if segment <= max(SEGMENTS[0], length // 2))

    def record(self) -> dict[str, Any]:
        """The settings that decide the result, for the profile; where it is written does not."""
        settings = asdict(self)
        del settings["out"]
        settings["prompts"] = self.prompts.name if self.prompts else None
        for name in ("lengths", "representatives", "grains"):
            settings[name] = list(settings[name])
        return settings


def default_out(model: str, device_name: str, budget: Budget, root: Path = Path("profiles")) -> Path:
    """profiles/<model>/<gpu>/<budget>.safetensors"""
    return root / slug(model) / slug(device_name) / f"{budget}.safetensors"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "model"
