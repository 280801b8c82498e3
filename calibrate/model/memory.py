"""How much of the GPU's memory is free, and what to do when it runs out: an error that names a length that fits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from s2o_runtime.errors import ResourceError

STEP = 1024  # tokens; suggested lengths are multiples of it
SAFE = 0.9  # of the length that memory in use would allow by its own
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@contextmanager
def within_memory(device: torch.device, length: int, resident: int, what: str) -> Iterator[None]:
    """Turn torch's error into one sentence if the GPU's memory runs out inside the block.

    Args:
        device: where the block runs.
        length: tokens of the prompt it works on.
        resident: bytes in use whatever the length, such as the weights.
        what: what the block does, in words.

    Raises:
        ResourceError: The memory ran out.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        total = int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0
        needed = torch.cuda.max_memory_allocated(device) + requested_bytes(str(error))
        fits = longest_that_fits(length, needed, resident, total)
        raise ResourceError(
            f"{total / (1 << 30):.1f} GiB of GPU memory ran out while {what} at {length} tokens, one layer and one "
            f"prompt at a time: about {fits} tokens fit, use shorter --lengths or fewer --num-prompts; "
            "what was measured is kept"
        ) from error


def free_memory(device: torch.device) -> int:
    """Bytes that tensors could still take on a GPU, those included that torch holds without using them; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def plenty_is_free(device: torch.device) -> bool:
    """Whether half of a GPU's memory is free, so that some may be taken for what is only quicker; False on a CPU."""
    if device.type != "cuda":
        return False
    return free_memory(device) >= torch.cuda.get_device_properties(device).total_memory / 2


def longest_that_fits(length: int, needed: int, resident: int, total: int) -> int:
    """A length in tokens that fits, if all memory but what is resident grows with the length.

    Args:
        length: the length at which memory ran out.
        needed: bytes that this length would have needed.
        resident: bytes in use whatever the length.
        total: bytes of the GPU's memory.
    """
    share = max(0, total - resident) / max(1, needed - resident)
    return max(STEP, int(SAFE * min(1.0, share) * length) // STEP * STEP)


def requested_bytes(message: str) -> int:
    """The bytes that torch's error message says it could not allocate; 0 if it does not say."""
    match = re.search(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB)", message)
    return int(float(match[1]) * UNITS[match[2]]) if match else 0
