"""How long a layer's calls take and how much they compute, from a few calls of each kind.

Of the n calls of a kind so far `SAMPLES` are kept, each with the same chance, so that sampling grows rarer. A call
that is not kept costs a random number on the host; one that is kept two CUDA events and one sum on the device.
Nothing waits for the device before somebody reads.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from s2o_runtime.attention.result import AttentionStats
from s2o_runtime.config import LayerConfig
from s2o_runtime.shapes import CallShape, pairs

SAMPLES = 16
WARM = 4  # calls of a kind that compile, record and fill caches: their times count only where there are no others

Key = tuple[str, str]  # path and reason
Moment = float | torch.cuda.Event  # on the host's clock, or on a stream


class Measured(NamedTuple):
    """Means over the sampled calls. density: of all heads, dense is 1.0; seconds: of the attention function."""

    density: float
    seconds: float


@dataclass
class Sample:
    """One call that is measured.

    kind, number: it is the number-th of its kind; slot: where its kind keeps it; key: what it turned out to be.
    computed: int64 [B, row tiles], the prefix keys that all heads together computed, None when the call was dense;
    stats: the op's, without the visited keys of every head.
    """

    kind: str | None
    number: int
    slot: int
    begin: Moment
    end: Moment = 0.0
    key: Key = ("", "")
    computed: Tensor | None = None
    stats: AttentionStats | None = None


@dataclass
class _Kind:
    calls: int = 0
    kept: dict[int, Sample] = field(default_factory=dict)


class Meter:
    """What is measured of one layer. A copy, or one that is unpickled, starts anew."""

    def __init__(self) -> None:
        self._kinds: defaultdict[str | None, _Kind] = defaultdict(_Kind)
        self._random = random.Random(0)

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        return Meter, ()

    def begin(self, kind: str | None, device: torch.device) -> Sample | None:
        """To be called before a call of this kind; None if it is not sampled, as in a CUDA graph or while tracing."""
        if torch.compiler.is_compiling():
            return None
        calls_of_kind = self._kinds[kind]
        calls_of_kind.calls += 1
        number = calls_of_kind.calls
        slot = number - 1 if number <= SAMPLES else int(self._random.random() * number)
        if slot >= SAMPLES or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        return Sample(kind, number, slot, _now(device))

    def end(self, sample: Sample, key: Key, stats: AttentionStats | None, device: torch.device) -> None:
        """To be called after that call. stats: of the op, None if it did not run."""
        sample.end, sample.key = _now(device), key
        if stats is not None and stats.visited is not None:
            sample.computed = stats.visited.sum(1)
            sample.stats = replace(stats, visited=None)
        self._kinds[sample.kind].kept[sample.slot] = sample

    def read(self) -> dict[Key, Measured]:
        """The means so far; waits for the device."""
        by_key: defaultdict[Key, list[Sample]] = defaultdict(list)
        for calls_of_kind in list(self._kinds.values()):  # a server's metrics are read by a thread of their own
            for sample in list(calls_of_kind.kept.values()):
                by_key[sample.key].append(sample)
        measured = {}
        for key, samples in by_key.items():
            warm = [sample for sample in samples if sample.number > WARM]
            seconds = fmean(_seconds(sample) for sample in warm or samples)
            measured[key] = Measured(fmean(_density(sample) for sample in samples), seconds)
        return measured


def _now(device: torch.device) -> Moment:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(sample: Sample) -> float:
    begin, end = sample.begin, sample.end
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _density(sample: Sample) -> float:
    """Pairs that all heads together computed over causal pairs, as `AttentionStats.density` has them for each head."""
    if sample.computed is None or sample.stats is None:
        return 1.0
    config, shape = sample.stats.config, sample.stats.shape
    computed = sample.computed.cpu()
    if sample.stats.kv_start is None:
        windows, causal = _unpadded_windows(config, shape)
        start = torch.zeros(shape.batch, dtype=torch.int64)
    else:
        start = sample.stats.kv_start.cpu()
        windows, causal = _windows(config, shape, start)
    one = replace(config, heads=config.heads[:1])
    with_window, _ = pairs(computed[:, None], one, shape.q_len, shape.offset, start)
    window, _ = pairs(torch.zeros_like(computed)[:, None], one, shape.q_len, shape.offset, start)
    return (windows + float(with_window - window)) / max(1.0, causal * config.num_heads)


@lru_cache(maxsize=256)
def _unpadded_windows(config: LayerConfig, shape: CallShape) -> tuple[float, float]:
    return _windows(config, shape, torch.zeros(shape.batch, dtype=torch.int64))


def _windows(config: LayerConfig, shape: CallShape, start: Tensor) -> tuple[float, float]:
    """Pairs in the windows of all heads, and causal pairs of one head; heads alike are counted once."""
    alike = {(head.segment, head.mode): head for head in config.heads}
    count = {key: sum((head.segment, head.mode) == key for head in config.heads) for key in alike}
    few = replace(config, heads=tuple(alike.values()))
    none = torch.zeros(shape.batch, len(alike), shape.row_tiles(config.tile.block_m), dtype=torch.int64)
    window, causal = pairs(none, few, shape.q_len, shape.offset, start)
    return sum(count[key] * float(each) for key, each in zip(alike, window, strict=True)), float(causal)
