"""Which device is this, what tiles suit it, and does a profile made elsewhere fit it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch

from s2o_runtime.config import HEAD_DIMS, TileConfig
from s2o_runtime.errors import InputError

MIN_CAPABILITY = (8, 0)
MEMORY_SLACK = 0.1  # of a GPU's memory: drivers and error correction take different parts of it


@dataclass(frozen=True)
class DeviceIdentity:
    """A device as a profile remembers it; a CPU has no capability, SMs or memory (bytes)."""

    kind: str  # "cuda", "cpu", or what else torch calls a device; "rocm" for AMD's, which torch calls cuda too
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
    if torch.version.hip is not None:
        return DeviceIdentity("rocm", torch.cuda.get_device_properties(device).name)
    properties = torch.cuda.get_device_properties(device)
    return DeviceIdentity(
        "cuda",
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.total_memory,
    )


@lru_cache(maxsize=64)
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability, (0, 0) for what is not a GPU of NVIDIA's."""
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on this GPU inside the block. Does nothing where that is so anyway, which is quicker, and on a CPU."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter (TRITON_INTERPRET=1), for tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def fit(made_on: DeviceIdentity, here: DeviceIdentity) -> Fit:
    """Whether a profile made on one device can be used on another.

    Thresholds and segments depend on the model only; tiles depend on the GPU. So the same GPU takes
    everything, another one that the kernels are compiled for keeps the thresholds and takes tiles that are safe there.
    """
    if here.kind == "cpu":
        return Accepted("profile", "the reference backend runs any tile")
    if here.kind != "cuda":
        device = here.kind if here.name == here.kind else f"{here.kind} ({here.name})"
        return Rejected(f"there is no kernel for {device}: the model stays dense")
    if here.capability < MIN_CAPABILITY:
        return Rejected(f"{here} is older than sm_80, the oldest the kernels support: the model stays dense")
    if _family(here.capability) is None:
        return Rejected(f"{here} is none of {', '.join(_TILES)}, which the kernels are made for: the model stays dense")
    if _same_product(made_on, here):
        return Accepted("profile", "the profile was made on this GPU")
    return Accepted(
        "safe",
        f"the profile was made on {made_on}, this is {here}: thresholds kept, safe tiles used; "
        "tune them for this GPU with: s2o-calibrate --retile PROFILE",
    )


def _same_product(one: DeviceIdentity, other: DeviceIdentity) -> bool:
    """Whether two GPUs are alike: by name, compute capability and SMs exactly, and nearly by memory."""
    exact = ("kind", "name", "capability", "sm_count")
    apart = abs(one.memory_bytes - other.memory_bytes)
    alike = apart <= MEMORY_SLACK * max(one.memory_bytes, other.memory_bytes)
    return alike and all(getattr(one, field) == getattr(other, field) for field in exact)


@lru_cache(maxsize=64)
def candidate_tiles(head_dim: int, capability: tuple[int, int]) -> tuple[TileConfig, ...]:
    """The tiles worth timing on a GPU: those that compile for it without spills and fit its shared memory.

    Empty where the kernels have no tile for this head_dim.
    """
    return tuple(
        TileConfig(block_m, block_n, stride // block_n, warps, stages, specialized).validate()
        for block_m, block_n, warps, stages, specialized in _tile_shapes(head_dim, capability)
        for stride in ((512, 1024, 2048) if specialized else (256, 512, 1024))
    )


def default_tile(head_dim: int, capability: tuple[int, int]) -> TileConfig:
    """A tile that is safe on every GPU of this capability: the first candidate. Raises InputError if there is none."""
    tiles = candidate_tiles(head_dim, capability)
    if not tiles:
        raise InputError(f"head_dim {head_dim} has no tile on sm_{capability[0]}{capability[1]}: run it dense")
    return tiles[0]


def padded_head_dim(head_dim: int) -> int:
    """The head dim the kernels run this one as, filled with zeros. Raises InputError beyond the largest."""
    for size in HEAD_DIMS:
        if head_dim <= size:
            return size
    raise InputError(f"head_dim {head_dim} is larger than {HEAD_DIMS[-1]}, the largest the kernels support")


_TileShape = tuple[int, int, int, int, bool]  # block_m, block_n, warps, stages, specialized

# tests/aot.py compiles them all. Consumer GPUs of sm_86, 89 and 120 have 99 KiB of shared memory, others more;
# wgmma (sm_90) and tcgen05 (sm_100) read operands from shared memory, which leaves registers for larger tiles.
_TILES: dict[str, dict[int, list[_TileShape]]] = {
    "sm_80": {
        64: [(128, 64, 8, 3, False), (128, 64, 8, 2, False), (64, 64, 8, 2, False)],
        128: [(128, 32, 8, 3, False), (64, 64, 8, 3, False), (64, 32, 8, 3, False)],
    },
    "sm_89": {
        64: [(128, 64, 8, 3, False), (128, 64, 8, 2, False), (64, 64, 4, 2, False)],
        128: [(128, 32, 8, 3, False), (64, 64, 8, 2, False), (64, 32, 8, 3, False)],
    },
    "sm_90": {
        64: [(64, 128, 4, 3, True), (64, 128, 4, 4, True), (128, 64, 8, 3, False), (64, 64, 4, 2, False)],
        128: [(64, 128, 4, 2, True), (128, 64, 8, 3, False), (64, 64, 4, 2, False)],
        256: [(64, 32, 8, 2, False)],
    },
    "sm_100": {
        64: [(128, 32, 8, 3, False), (128, 128, 8, 2, False), (64, 64, 8, 3, False)],
        128: [(128, 64, 8, 3, False), (128, 32, 8, 3, False), (64, 32, 4, 3, False)],
        256: [(64, 64, 8, 2, False), (64, 32, 8, 2, False)],
    },
    "sm_120": {
        64: [(128, 64, 8, 3, False), (64, 64, 8, 2, False), (64, 64, 4, 2, False)],
        128: [(128, 32, 8, 3, False), (64, 64, 8, 2, False), (64, 32, 8, 3, False)],
    },
}


def _tile_shapes(head_dim: int, capability: tuple[int, int]) -> list[_TileShape]:
    family = _family(capability)
    return _TILES[family].get(padded_head_dim(head_dim), []) if family else []


def _family(capability: tuple[int, int]) -> str | None:
    """Which of `_TILES` suits a compute capability; None where nobody has compiled the kernels."""
    major, minor = capability
    if major == 8 and minor:
        return "sm_89"  # sm_86 and sm_87 too
    name = f"sm_{major}0"
    return name if name in _TILES and (major != 9 or not minor) else None
