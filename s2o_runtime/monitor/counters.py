"""What the layers of one rank did: query rows by layer, path and reason, and density and time of sampled calls."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from s2o_runtime.attention.result import AttentionStats
from s2o_runtime.monitor.drift import DriftMonitor
from s2o_runtime.monitor.meter import Meter, Sample

SAMPLED_EVERY = 256  # sparse calls of a layer: the density of one of them is kept
EARLY = 15  # and of each of the first prompts, so that a layer with the settings of another shows soon

log = logging.getLogger("s2o_runtime")

T = TypeVar("T")


@dataclass
class Counters:
    """Rows that went through attention, and where they went.

    Attributes:
        log_every: seconds between two lines of the log; 0 for none.
        calls, prompts: sparse calls of each layer, and how many of them were prompts.
        sampled: what the last sampled call of each layer did.
        drift: the checks of the layers' errors, of those that have one.
        meters: what a few of the calls of each layer took, of batches in which S2O may have had a part.
        said: when the last line was logged, as `time.monotonic` has it.
    """

    log_every: float = 0.0
    calls: Counter[int] = field(default_factory=Counter)
    prompts: Counter[int] = field(default_factory=Counter)
    sampled: dict[int, AttentionStats] = field(default_factory=dict)
    drift: dict[int, DriftMonitor] = field(default_factory=dict)
    meters: defaultdict[int, Meter] = field(default_factory=lambda: defaultdict(Meter))
    said: float = field(default_factory=time.monotonic)
    _rows: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    _timed: Counter[tuple[int, str]] = field(default_factory=Counter)
    _left: dict[tuple[tuple[int, ...], str], list[int]] = field(default_factory=dict)  # batches, and rows of a layer

    @property
    def rows(self) -> Counter[tuple[int, str, str]]:
        """Query rows by (layer, "s2o" or "dense", reason)."""
        rows = self._rows.copy()
        for (layers, reason), (_, count) in list(self._left.items()):
            for layer in layers:  # among them several -1, of parts that are no decoders
                rows[layer, "dense", reason] += count
        return rows

    @property
    def timed(self) -> Counter[tuple[int, str]]:
        """Calls of each (layer, "s2o" or "dense"); a batch may make several of a layer."""
        timed = self._timed.copy()
        for (layers, _), (batches, _) in list(self._left.items()):
            for layer in layers:
                timed[layer, "dense"] += batches
        return timed

    def leave(self, layers: tuple[int, ...], reason: str, rows: int) -> None:
        """Count a batch of so many rows in which S2O has no part in these layers: the stock backend is called once."""
        left = self._left.get((layers, reason))
        if left is None:
            left = self._left[layers, reason] = [0, 0]
        left[0] += 1
        left[1] += rows
        self.say()

    def add(self, layer: int, path: str, reason: str, rows: int) -> None:
        """Count query rows of a layer."""
        self._rows[layer, path, reason] += rows

    def is_sampled(self, layer: int, is_prompt: bool = False) -> bool:
        """Whether the density of this sparse call of a layer is to be kept, and its error checked.

        Args:
            layer: the number of the decoder layer.
            is_prompt: whether the call brings at least half of its keys; few new rows may err by more.
        """
        self.calls[layer] += 1
        self.prompts[layer] += is_prompt
        return (is_prompt and self.prompts[layer] <= EARLY) or self.calls[layer] % SAMPLED_EVERY == 1

    def keep(self, layer: int, stats: AttentionStats) -> None:
        """Keep what a sampled call did; nothing is read from the device before somebody asks."""
        self.sampled[layer] = stats

    def begin(self, layer: int, path: str, device: torch.device) -> Sample | None:
        """To be called before a call of a layer that is likely to take a path, for `end`."""
        return self.meters[layer].begin(path, device)

    def end(self, layer: int, path: str, sample: Sample | None, device: torch.device) -> None:
        """To be called after it, with the path that it took."""
        self._timed[layer, path] += 1
        if sample is not None:
            self.meters[layer].end(sample, (path, ""), None, device)

    def stock(self, layer: int, device: torch.device, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call the stock backend for a layer."""
        sample = self.begin(layer, "dense", device)
        answer = call(*arguments, **named)
        self.end(layer, "dense", sample, device)
        return answer

    def seconds(self) -> dict[tuple[int, str], float]:
        """The mean time of a call by layer and path, over those that were sampled; waits for the device."""
        return {
            (layer, path): measured.seconds
            for layer, meter in sorted(self.meters.items(), key=lambda item: item[0])
            for (path, _), measured in meter.read().items()
        }

    def densities(self) -> dict[int, float]:
        """The mean density of each layer's last sampled call; waits for the device."""
        return {layer: float(stats.density.mean()) for layer, stats in sorted(self.sampled.items())}

    def errors(self) -> dict[int, float]:
        """The running error of each checked layer over what the profile allows it; waits for the device."""
        errors = ((layer, monitor.error()) for layer, monitor in sorted(self.drift.items()))
        return {layer: error for layer, error in errors if error is not None}

    def shares(self) -> dict[tuple[str, str], float]:
        """The share of all rows that took each path for each reason."""
        of_layers, shares = self.rows, Counter[tuple[str, str]]()
        total = of_layers.total()
        for (_, path, reason), rows in of_layers.items():
            shares[path, reason] += rows
        return {key: rows / total for key, rows in shares.most_common()}

    def summary(self) -> str:
        """One line for the log: where rows went, and the mean density."""
        parts = [f"{share:.1%} {path} ({reason})" for (path, reason), share in self.shares().items()]
        densities = self.densities().values()
        if densities:
            parts.append(f"mean density {sum(densities) / len(densities):.3f} of {len(densities)} layers")
        if errors := self.errors().values():
            parts.append(f"sampled errors up to {max(errors):.2f} of what is allowed")
        return "; ".join(parts) or "no rows yet"

    def say(self) -> None:
        """Log the summary, if it is time."""
        if self.log_every and time.monotonic() - self.said >= self.log_every:
            self.said = time.monotonic()
            log.info("S2O: %s", self.summary())


class PrometheusCollector:
    """The counters as prometheus_client collects them.

    Args:
        counters: of this rank.
        labels: of every sample, such as the rank.
    """

    def __init__(self, counters: Counters, labels: dict[str, str]) -> None:
        self._counters, self._labels = counters, labels

    def collect(self) -> Iterator[Any]:
        """The metrics, read when they are asked for."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counters, layer, call = self._counters, ("layer",), ("layer", "path")
        metrics = (
            (CounterMetricFamily, "s2o_rows", "Query rows by layer, path and reason", (*call, "reason"), counters.rows),
            (GaugeMetricFamily, "s2o_density", "Pairs computed over causal pairs", layer, counters.densities()),
            (GaugeMetricFamily, "s2o_error", "Sampled error over what is allowed", layer, counters.errors()),
            (CounterMetricFamily, "s2o_calls", "Calls of attention", call, counters.timed),
            (GaugeMetricFamily, "s2o_call_seconds", "Mean time of a sampled call", call, counters.seconds()),
        )
        for family, name, meaning, labels, numbers in metrics:
            metric = family(name, meaning, labels=[*self._labels, *labels])
            for key, number in list(numbers.items()):
                parts = key if isinstance(key, tuple) else (key,)
                metric.add_metric([*self._labels.values(), *map(str, parts)], number)
            yield metric


def serve_metrics(counters: Counters, host: str, port: int, labels: dict[str, str]) -> None:
    """Answer Prometheus at a port, from a thread of its own.

    Args:
        counters: what is answered.
        host: an address of this machine; requests to its other addresses get no answer.
        port: of that address.
        labels: of every sample, such as the rank.

    Raises:
        OSError: the port is taken, or the address is none of this machine's.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(PrometheusCollector(counters, labels))
    start_http_server(port, addr=host, registry=registry)
