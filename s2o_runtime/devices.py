"""Devices: their identity, the fit of a profile made on one to another, and the contexts that kernels run in."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .errors import ConfigError, ResourceError
from .sequences import KERNEL_TYPES
from .tiles import MIN_CAPABILITY, Capability, format_capability, get_family, list_families

MEMORY_SLACK = 0.1  # of a GPU's memory: drivers and error correction take different parts of it


@dataclass(frozen=True)
class DeviceIdentity:
    """A device as a profile remembers it; a CPU has no capability, SMs or memory (bytes)."""

    kind: str  # "cuda", "cpu", or what else torch calls a device; "rocm" for AMD's, which torch calls cuda too
    name: str
    capability: Capability = (0, 0)
    sm_count: int = 0
    memory_bytes: int = 0

    def __str__(self) -> str:
        if self.kind != "cuda":
            return self.name
        return f"{self.name} ({format_capability(self.capability)}, {self.sm_count} SMs)"


class Fit(NamedTuple):
    """The tiles that a profile runs on a device, its own or safe ones, None where the model stays dense, and why."""

    tiles: Literal["profile", "safe"] | None
    reason: str


def get_device(name: str | None) -> torch.device:
    """Return the device of a name that a user gave, by default a GPU if there is one.

    Raises ConfigError if it is not known or not supported, and ResourceError if it is not here.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not known: use cuda, cuda:N or cpu") from None
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"device {name!r} is not supported: use cuda or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ResourceError(f"device {name!r} is not here ({torch.cuda.device_count()} GPUs found): use --device cpu")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def identify(device: torch.device) -> DeviceIdentity:
    """Return what a profile remembers of a device."""
    if device.type != "cuda":
        return DeviceIdentity(device.type, device.type)
    gpu = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return DeviceIdentity("rocm", gpu.name)
    return DeviceIdentity("cuda", gpu.name, (gpu.major, gpu.minor), gpu.multi_processor_count, gpu.total_memory)


@lru_cache(maxsize=64)
def get_capability(device: torch.device) -> Capability:
    """Return the compute capability, (0, 0) for what is not a GPU of NVIDIA's."""
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


class Resources(NamedTuple):
    """Numbers of a GPU that decide how its work is split: its SMs, and the bytes of its L2 cache."""

    sm_count: int
    cache_bytes: int


@lru_cache(maxsize=64)
def get_resources(device: torch.device) -> Resources:
    """Return the resources of a GPU; one SM and no cache for a CPU, where programs run one after another."""
    if device.type != "cuda":
        return Resources(1, 0)
    properties = torch.cuda.get_device_properties(device)
    return Resources(properties.multi_processor_count, properties.L2_cache_size)


def launch_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on this GPU; an empty one on a CPU or the current GPU."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


def find_tensor_obstacle(tensor: Tensor) -> str | None:
    """Return the reason that no compiled kernel reads a tensor, by its device and type; None if kernels do."""
    if tensor.device.type != "cuda":
        return f"the tensors are on {tensor.device.type}, the kernel needs a GPU"
    if tensor.dtype not in KERNEL_TYPES:
        return f"{tensor.dtype} is not supported by the kernel (bfloat16, float16)"
    return None


def is_interpreted() -> bool:
    """Return True if Triton kernels run in its interpreter (TRITON_INTERPRET=1), for tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def decide_fit(made_on: DeviceIdentity, here: DeviceIdentity) -> Fit:
    """Return the tiles with which a profile made on one device can be used on another.

    Thresholds and segments depend on the model only; tiles depend on the GPU. So the same GPU takes everything, another
    one that the kernels are compiled for keeps the thresholds and takes tiles that are safe there.
    """
    if here.kind == "cpu":
        return Fit("profile", "the reference backend runs any tile")
    if here.kind != "cuda":
        device = here.kind if here.name == here.kind else f"{here.kind} ({here.name})"
        return Fit(None, f"there is no kernel for {device}: the model stays dense")
    if here.capability < MIN_CAPABILITY:
        return Fit(None, f"{here} is older than sm_80, the oldest the kernels support: the model stays dense")
    if get_family(here.capability) is None:
        return Fit(None, f"{here} is none of {list_families()}, which the kernels are made for: the model stays dense")
    if is_same_product(made_on, here):
        return Fit("profile", "the profile was made on this GPU")
    return Fit(
        "safe",
        f"the profile was made on {made_on}, this is {here}: thresholds and where heads stop are kept, with tiles that "
        "are safe here; errors and times were not measured on this GPU: run s2o-profile retile PROFILE, then "
        "s2o-profile verify PROFILE --model MODEL",
    )


def is_same_product(first: DeviceIdentity, second: DeviceIdentity) -> bool:
    """Return True if two GPUs are alike: by name, compute capability and SMs exactly, and nearly by memory."""
    memories = first.memory_bytes, second.memory_bytes
    return replace(first, memory_bytes=0) == replace(second, memory_bytes=0) and (
        max(memories) - min(memories) <= MEMORY_SLACK * max(memories)
    )
