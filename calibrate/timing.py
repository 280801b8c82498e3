"""Times as a server would see them: the L2 cache is cold before every call, and the GPU busy while it is launched."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

ROUNDS = 7
FLUSHES = 8  # some 0.3 ms of work ahead of a call, so that its launch costs nothing unless it takes longer


def medians(calls: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int = ROUNDS) -> dict[str, float]:
    """The median time of each call in seconds, as `samples` takes them."""
    return {name: statistics.median(seconds) for name, seconds in samples(calls, device, rounds).items()}


def samples(calls: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """The seconds each call took in each round; the calls take turns, so that drift hits all alike.

    The first turn compiles and warms up, and is not counted. On a CPU by the clock, with warm caches.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    timed = _on_gpu(device) if device.type == "cuda" else _by_clock
    for turn in range(rounds + 1):
        for name, call in calls.items():
            seconds = timed(call)
            if turn:
                times[name].append(seconds)
    return times


def _on_gpu(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    size = int(torch.cuda.get_device_properties(device).L2_cache_size)
    flush = torch.empty(2 * size, dtype=torch.uint8, device=device)

    def timed(call: Callable[[], Any]) -> float:
        for _ in range(FLUSHES):
            flush.zero_()
        begin, end = _event(), _event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return timed


def _by_clock(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
