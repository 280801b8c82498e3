"""Count the rows and calls of every layer, time a sample of them, and warn of a model that is dense nearly always."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from s2o_runtime.attention.compute import AttentionStats
from s2o_runtime.config import LayerConfig
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.monitor.drift import DriftMonitor
from s2o_runtime.sequences import CallShape, pairs

CALLS = 1000  # of every layer, after which it is judged
MOST = 0.9  # of the calls: if more than this share is dense, it is said

REMEDIES: dict[DenseReason | None, str] = {  # what to do about a dense call
    DenseReason.TOO_LONG: 'calibrate with longer --lengths, or patch with beyond="warn"',
    DenseReason.MASK: "send prompts that are padded at one end only, and not packed",
    DenseReason.GRADIENTS: "call the model under torch.no_grad() or torch.inference_mode()",
    DenseReason.TRAINING: "call model.eval() unless it is trained",
    DenseReason.NO_S2O_HEAD: "calibrate with a larger budget or longer --lengths",
}
OTHERWISE = "s2o_runtime.explain(model) lists the calls of every layer"

log = logging.getLogger("s2o_runtime")


class DenseWatch:
    """Counts the calls of one model's layers that have more than one query, which leaves out decode.

    A call is long if it has at least as many keys as the shortest calibrated length. Said once is that a long call is
    dense because of the model's mode or of autograd's if the two do not agree; that a long call does not
    reach S2O because the model has another attention implementation; and the first of these that is true: after `CALLS`
    calls of every layer, nearly all of them were too short; after `CALLS` long calls of every layer, nearly all of
    these were dense. Calls of training are not counted.

    Args:
        layers: of the model.
        min_length: the shortest calibrated length, in tokens.
    """

    def __init__(self, layers: int, min_length: int) -> None:
        self.calls = CALLS * layers
        self.min_length = min_length
        self.short = 0
        self.long = 0
        self.dense: Counter[str] = Counter()  # of the long calls, by reason
        self.done = self.said_bypassed = False
        self.modes: set[DenseReason] = set()  # that were warned about

    def see(self, path: str, reason: str, keys: int) -> None:
        """One call of one layer; only counts, until there are enough of them."""
        if self.done or reason is DenseReason.TRAINING:
            return
        if keys < self.min_length:
            self.short += 1
        else:
            self.long += 1
            if path == "dense":
                self.dense[reason] += 1
        if self.short + self.long == self.calls and self.short > MOST * self.calls:
            self._say_short()
        elif self.long == self.calls:
            self._judge_long()

    def see_mode(self, mode: DenseReason, keys: int) -> None:
        """A long call that is dense for the model's or autograd's mode. Training with gradients needs no warning."""
        if mode in self.modes or (mode is DenseReason.TRAINING and torch.is_grad_enabled()):
            return
        self.modes.add(mode)
        log.warning("S2O does not run: %s for a prompt of %d keys: %s", mode, keys, REMEDIES[mode])

    def see_forward(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A forward pre-hook of one attention layer, which sees calls that other attention functions compute.

        Args:
            module: transformers' attention module.
            arguments, named: of its `forward`; the hidden states are [B, L, E].
        """
        if self.said_bypassed or torch.compiler.is_compiling():
            return
        from transformers import AttentionInterface

        name: str = module.config._attn_implementation  # type: ignore[assignment, union-attr]
        if getattr(AttentionInterface().get(name), "__module__", "").startswith("s2o_runtime."):
            return
        hidden = arguments[0] if arguments else named["hidden_states"]
        longest = named.get("max_length_k", named.get("max_seqlen_k"))  # of a batch of continuous batching, by type
        keys = max(longest.values()) if isinstance(longest, dict) else longest or hidden.shape[1]
        if keys >= self.min_length:
            self.said_bypassed = True
            log.warning(
                "S2O does not run: the patched model has the attention implementation %r for a prompt of %d keys: call "
                'model.set_attn_implementation("s2o"), or for continuous batching do what docs/deploy.md says of your '
                "transformers",
                name,
                keys,
            )

    def _say_short(self) -> None:
        self.done = True
        log.warning(
            "S2O hardly runs: %d of the first %d calls of attention layers with more than one query had fewer than %d "
            "keys, the shortest calibrated length: calibrate with shorter --lengths, or do without S2O here",
            self.short,
            self.calls,
            self.min_length,
        )

    def _judge_long(self) -> None:
        self.done = True
        dense = self.dense.total()
        if dense <= MOST * self.long:
            return
        reason, count = self.dense.most_common(1)[0]
        log.warning(
            "S2O hardly runs: %d of the first %d calls of attention layers with %d keys or more were dense, "
            "most often (%d) for this reason: %s; %s",
            dense,
            self.long,
            self.min_length,
            count,
            reason,
            REMEDIES.get(DenseReason.of(reason), OTHERWISE),
        )


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


SAMPLED_EVERY = 256  # sparse calls of a layer: the density of one of them is kept
EARLY = 15  # and of each of the first prompts, so that a layer with the settings of another shows soon


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
