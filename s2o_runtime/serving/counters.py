"""What the layers of one rank did: query rows by layer, path and reason, and the density of sampled calls."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from s2o_runtime.attention.result import AttentionStats
from s2o_runtime.huggingface.drift import DriftMonitor

SAMPLED_EVERY = 256  # sparse calls of a layer: the density of one of them is kept

log = logging.getLogger("s2o_runtime")


@dataclass
class Counters:
    """Rows that went through attention, and where they went.

    Attributes:
        rows: query rows by (layer, "s2o" or "dense", reason).
        log_every: seconds between two lines of the log; 0 for none.
        calls: sparse calls of each layer.
        sampled: what the last sampled call of each layer did.
        drift: the checks of the layers' errors, of those that have one.
        said: when the last line was logged, as `time.monotonic` has it.
    """

    log_every: float = 0.0
    rows: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    calls: Counter[int] = field(default_factory=Counter)
    sampled: dict[int, AttentionStats] = field(default_factory=dict)
    drift: dict[int, DriftMonitor] = field(default_factory=dict)
    said: float = field(default_factory=time.monotonic)

    def add(self, layer: int, path: str, reason: str, rows: int) -> None:
        """Count query rows of a layer."""
        self.rows[layer, path, reason] += rows

    def is_sampled(self, layer: int) -> bool:
        """Whether the density of this sparse call of a layer is to be kept, and its error checked."""
        self.calls[layer] += 1
        return self.calls[layer] % SAMPLED_EVERY == 1

    def keep(self, layer: int, stats: AttentionStats) -> None:
        """Keep what a sampled call did; nothing is read from the device before somebody asks."""
        self.sampled[layer] = stats

    def densities(self) -> dict[int, float]:
        """The mean density of each layer's last sampled call; waits for the device."""
        return {layer: float(stats.density.mean()) for layer, stats in sorted(self.sampled.items())}

    def errors(self) -> dict[int, float]:
        """The running error of each checked layer over what the profile allows it; waits for the device."""
        errors = ((layer, monitor.error()) for layer, monitor in sorted(self.drift.items()))
        return {layer: error for layer, error in errors if error is not None}

    def shares(self) -> dict[tuple[str, str], float]:
        """The share of all rows that took each path for each reason."""
        total = self.rows.total()
        shares: Counter[tuple[str, str]] = Counter()
        for (_, path, reason), rows in self.rows.items():
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
        now = time.monotonic()
        if self.log_every and now - self.said >= self.log_every:
            self.said = now
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

        names, values = [*self._labels], [*self._labels.values()]
        rows = CounterMetricFamily("s2o_rows", "Query rows by layer, path and reason", labels=[*names, *PER_ROW])
        for (layer, path, reason), count in list(self._counters.rows.items()):
            rows.add_metric([*values, str(layer), path, reason], count)
        density = GaugeMetricFamily("s2o_density", "Pairs computed over causal pairs", labels=[*names, "layer"])
        for layer, mean in self._counters.densities().items():
            density.add_metric([*values, str(layer)], mean)
        error = GaugeMetricFamily("s2o_error", "Sampled error over what is allowed", labels=[*names, "layer"])
        for layer, share in self._counters.errors().items():
            error.add_metric([*values, str(layer)], share)
        yield from (rows, density, error)


PER_ROW = ("layer", "path", "reason")


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
