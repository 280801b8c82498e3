"""Running out of GPU memory, said in one sentence with a length that would fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from s2o_runtime.errors import InputError

STEP = 1024  # tokens; suggested lengths are multiples of it
SAFE = 0.9  # of the length that memory in use would allow by its own
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@contextmanager
def within_memory(device: torch.device, length: int, resident: int, what: str) -> Iterator[None]:
    """Raise InputError instead of torch's error if the GPU's memory runs out inside the block.

    resident: bytes in use whatever the length, such as the weights.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        total = int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0
        fits = longest_that_fits(length, torch.cuda.max_memory_allocated(device) + wanted(str(error)), resident, total)
        raise InputError(
            f"{total / (1 << 30):.1f} GiB of GPU memory ran out while {what} at {length} tokens, one layer and one "
            f"prompt at a time: about {fits} tokens fit, use shorter --lengths or fewer --num-prompts; "
            "what was measured is kept"
        ) from error


def longest_that_fits(length: int, needed: int, resident: int, total: int) -> int:
    """Tokens for which memory would do, if what is not resident grows with the length."""
    share = max(0, total - resident) / max(1, needed - resident)
    return max(STEP, int(SAFE * min(1.0, share) * length) // STEP * STEP)


def wanted(message: str) -> int:
    """The bytes that torch says it could not allocate, 0 if it does not say."""
    found = re.search(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB)", message)
    return int(float(found[1]) * UNITS[found[2]]) if found else 0
