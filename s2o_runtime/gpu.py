"""Which device is this, what tiles suit it, and does a profile made elsewhere fit it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from s2o_runtime.config import TileConfig

MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class DeviceIdentity:
    """A device as a profile remembers it; a CPU has no capability, SMs or memory."""

    kind: str  # "cuda" or "cpu"
    name: str
    capability: tuple[int, int] = (0, 0)
    sm_count: int = 0
    memory_bytes: int = 0

    def __str__(self) -> str:
        if self.kind != "cuda":
            return self.name
        return f"{self.name} (sm_{self.capability[0]}{self.capability[1]}, {self.sm_count} SMs)"


@dataclass(frozen=True)
class Accepted:
    """The profile's tiles can be used as they are, or replaced by safe ones."""

    tiles: str  # "profile" or "safe"
    reason: str


@dataclass(frozen=True)
class Rejected:
    """Nothing of the profile can run here; the model stays dense."""

    reason: str


Fit = Accepted | Rejected


def identify(device: torch.device) -> DeviceIdentity:
    if device.type != "cuda":
        return DeviceIdentity(device.type, device.type)
    properties = torch.cuda.get_device_properties(device)
    return DeviceIdentity(
        "cuda",
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.total_memory,
    )


def fit(made_on: DeviceIdentity, here: DeviceIdentity) -> Fit:
    """Whether a profile made on one device can be used on another.

    Thresholds and segments depend on the model only; tiles depend on the GPU. So the same GPU takes
    everything, another supported device keeps the thresholds and takes tiles that are safe there.
    """
    if here.kind == "cpu":
        return Accepted("profile", "the reference backend runs any tile")
    if here.kind != "cuda":
        return Rejected(f"there is no kernel for {here.kind}: the model stays dense")
    if here.capability < MIN_CAPABILITY:
        return Rejected(f"{here} is older than sm_80, the oldest the kernels support: the model stays dense")
    same = ("name", "capability", "sm_count")
    if all(getattr(made_on, field) == getattr(here, field) for field in same):
        return Accepted("profile", "the profile was made on this GPU")
    return Accepted("safe", f"the profile was made on {made_on}, this is {here}: thresholds kept, safe tiles used")


def candidate_tiles(head_dim: int, capability: tuple[int, int]) -> tuple[TileConfig, ...]:
    """The tiles worth timing on a GPU: those that compile for it without spills and fit its shared memory."""
    return tuple(
        TileConfig(block_m, block_n, stride // block_n, 8 if block_m >= 128 else 4, stages).validate()
        for block_m, block_n, stages in _tile_shapes(head_dim, capability)
        for stride in (256, 512, 1024)
    )


def default_tile(head_dim: int, capability: tuple[int, int]) -> TileConfig:
    """A tile that is safe on every GPU of this capability: the first candidate."""
    return candidate_tiles(head_dim, capability)[0]


def _tile_shapes(head_dim: int, capability: tuple[int, int]) -> list[tuple[int, int, int]]:
    """(block_m, block_n, stages) per GPU generation; tests/aot.py compiles them all."""
    if capability[0] == 9:  # wgmma reads its operands from shared memory, which leaves registers
        return [(128, 64, 3), (128, 64, 2), (128, 128, 2), (128, 32, 3), (64, 64, 2), (64, 32, 3)]
    if capability[0] == 10:
        return [(128, 64, 3), (128, 32, 3), (64, 32, 3)]
    if head_dim <= 64:
        return [(128, 64, 3), (128, 64, 2), (64, 32, 3)]
    return [(128, 32, 3), (64, 32, 3)]
