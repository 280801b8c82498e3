"""Time calls as a server would see them: with a cold L2 cache, and launched while the GPU is still busy."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

try:
    from triton.errors import TritonError
except ImportError:  # where there is no Triton there is no kernel that could fail to compile
    TritonError = RuntimeError

ROUNDS = 7
FEWEST_ROUNDS = 3
FLUSHES = 8  # about 0.3 ms of work ahead of a call, so that its launch is not counted unless it takes longer
MORE = 4  # times as much work ahead of a call that was launched too late, because the host was busy
LONG_CALL_S = 0.02  # seconds: a late launch of a call as long as that does not count
CERTAIN = 0.02  # half the confidence interval over the median: a time as certain as this is not taken again
FAILURES = (RuntimeError, TritonError)  # of a call that this GPU cannot run; out of memory is one of them


@dataclass(frozen=True)
class Timing:
    """The median seconds of a call and of dense attention."""

    seconds: float
    dense_seconds: float


def time_against_dense(
    call: Callable[[], Any], dense: Callable[[], Any], device: torch.device, dense_seconds: float | None = None
) -> Timing:
    """Time a call, in turns with dense attention, until its median is certain.

    Args:
        call, dense: both are run before, so that compiling is not counted.
        device: runs them.
        dense_seconds: earlier result of dense attention on these inputs, which is then not timed again.

    Raises one of `FAILURES` if a call failed.
    """
    measure = _time_on_gpu(device) if device.type == "cuda" else _time_by_clock
    measure(call)  # compiles
    measure(call)
    seconds: list[float] = []
    dense_times = [] if dense_seconds is None else [dense_seconds]
    if dense_seconds is None:
        measure(dense)
    while len(seconds) < ROUNDS:
        seconds.append(measure(call))
        if dense_seconds is None:
            dense_times.append(measure(dense))
        low, high = interval(seconds)
        if len(seconds) >= FEWEST_ROUNDS and high - low < CERTAIN * (high + low):
            break
    return Timing(statistics.median(seconds), statistics.median(dense_times))


def interval(seconds: list[float]) -> tuple[float, float]:
    """Return the interval that holds the median with a confidence of 95%, for times whose scatter is roughly normal."""
    median = statistics.median(seconds)
    if len(seconds) < 2:
        return median, median
    # the standard error of a normal median is sqrt(pi / 2) = 1.2533 times that of a mean
    half = 1.96 * 1.2533 * statistics.stdev(seconds) / math.sqrt(len(seconds))
    return median - half, median + half


def measure_medians(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int = ROUNDS, flushes: int = FLUSHES
) -> dict[str, float]:
    """Return the median time of each call in seconds, as `sample_times` takes them."""
    return {name: statistics.median(seconds) for name, seconds in sample_times(calls, device, rounds, flushes).items()}


def sample_times(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int, flushes: int = FLUSHES
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round.

    Args:
        calls: by name; each is run once more before, to compile and warm up.
        device: on a GPU caches are flushed before each call; on a CPU they are warm.
        rounds: number of times of each call.
        flushes: work ahead of each call; the more, the longer its launch may take without being counted.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    measure = _time_on_gpu(device, flushes) if device.type == "cuda" else _time_by_clock
    names = list(calls)
    for turn in range(rounds + 1):  # the calls take turns, so that drift hits all alike
        for name in names[::-1] if turn % 2 else names:  # and so does what a call leaves behind for the next one
            times[name].append(measure(calls[name]))
    return {name: seconds[1:] for name, seconds in times.items()}


def _time_on_gpu(device: torch.device, flushes: int = FLUSHES) -> Callable[[Callable[[], Any]], float]:
    """Return a function that times a call in seconds, by events of the device's current stream."""
    size = int(torch.cuda.get_device_properties(device).L2_cache_size)
    flush = torch.empty(2 * size, dtype=torch.uint8, device=device)

    def time_once(call: Callable[[], Any], flushes: int) -> tuple[float, bool]:
        """Return the seconds of a call, and True if the GPU came to it before all of it was launched."""
        for _ in range(flushes):
            flush.zero_()
        event: Any = torch.cuda.Event  # whose methods have no types
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record(torch.cuda.current_stream(device))  # which is not the current device's where a model is on several
        call()
        too_late = bool(begin.query())
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3, too_late

    def measure(call: Callable[[], Any]) -> float:
        seconds, too_late = time_once(call, flushes)
        return time_once(call, MORE * flushes)[0] if too_late and seconds < LONG_CALL_S else seconds

    return measure


def _time_by_clock(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
