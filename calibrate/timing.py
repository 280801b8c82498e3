"""Times as a server would see them: the L2 cache is cold before every call."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

ROUNDS = 7


def medians(calls: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int = ROUNDS) -> dict[str, float]:
    """The median time of each call in seconds, on a GPU; the calls take turns, so that drift hits all alike.

    The first turn compiles and warms up, and is not counted.
    """
    flush = torch.empty(2 * _l2_bytes(device), dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            flush.zero_()
            begin, end = _event(), _event()
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _l2_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
