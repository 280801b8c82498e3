"""Count the rows and calls of every layer, time a sample of them, and warn of a model that is dense nearly always."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..attention.compute import AttentionStats
from ..dense_reason import DenseReason, FormattedReason
from ..errors import get_first_line
from ..fields import group_by_key
from .drift import DriftMonitor

CALLS = 1000  # of every layer, after which it is judged
MOST = 0.9  # of the calls: if more than this share is dense, a warning says so

_READ = 'call generate or pass logits_to_keep=1; or patch with reads="answers" if only last rows are read all the same'
REMEDIES: dict[DenseReason | None, str] = {  # what to do about a dense call
    DenseReason.TOO_LONG: 'calibrate with longer --lengths, or patch with beyond="warn"',
    DenseReason.MASK: "send prompts that are padded at one end only, and not packed",
    DenseReason.GRADIENTS: "call the model under torch.no_grad() or torch.inference_mode()",
    DenseReason.TRAINING: "call model.eval() unless it is trained",
    DenseReason.NO_S2O_HEAD: "calibrate with a larger budget or longer --lengths",
    DenseReason.ALL_LOGITS: _READ,
    DenseReason.LOSS: _READ,
    DenseReason.HIDDEN_STATES: _READ,
}
PACKAGE = __name__.partition(".")[0] + "."  # which has another name as a kernel of the Hub
OTHERWISE = "s2o_runtime.explain(model) lists the calls of every layer"

log = logging.getLogger("s2o_runtime")


class DenseWatch:
    """Counts of one model's calls with more than one query, so that a model that hardly runs S2O is warned about.

    A call is long if it has at least `min_length` keys, the shortest calibrated length. Warned about, once each: a long
    call that is dense for the model's mode or autograd's, where the two do not agree, or for what is read of it; a long
    call that another attention implementation computes; and the first of these that is true: after `CALLS` calls of
    every layer, nearly all were too short; after `CALLS` long calls of every layer, nearly all were dense. Calls of
    training do not count.
    """

    def __init__(self, layers: int, min_length: int) -> None:
        self.calls, self.min_length = CALLS * layers, min_length
        self.short = self.long = 0
        self.dense: Counter[str] = Counter()  # of the long calls, by reason
        self.done = False
        self.warned: set[str] = set()  # of modes, and of another implementation

    def count(self, path: str, reason: str, keys: int) -> None:
        """Count one call of one layer, and judge the model once there are enough of them."""
        if self.done or reason is DenseReason.TRAINING:
            return
        if keys < self.min_length:
            self.short += 1
        else:
            self.long += 1
            if path == "dense":
                self.dense[reason] += 1
        if self.short + self.long == self.calls and self.short > MOST * self.calls:
            self.done = True
            log.warning(
                "S2O hardly runs: %d of the first %d calls of attention layers with more than one query had fewer than "
                "%d keys, the shortest calibrated length: calibrate with shorter --lengths, or do without S2O here",
                self.short, self.calls, self.min_length,
            )  # fmt: skip
        elif self.long == self.calls:
            self.done = True
            if self.dense.total() > MOST * self.long:
                most_frequent, count = self.dense.most_common(1)[0]
                log.warning(
                    "S2O hardly runs: %d of the first %d calls of attention layers with %d keys or more were dense, "
                    "most often (%d) for this reason: %s; %s",
                    self.dense.total(), self.long, self.min_length, count, most_frequent,
                    REMEDIES.get(DenseReason.from_sentence(most_frequent), OTHERWISE),
                )  # fmt: skip

    def warn_of_mode(self, mode: DenseReason, keys: int) -> None:
        """Warn once of a long call that is dense for its mode or reader; training with gradients needs no warning."""
        if mode in self.warned or (mode is DenseReason.TRAINING and torch.is_grad_enabled()):
            return
        self.warned.add(mode)
        log.warning("S2O does not run: %s for a prompt of %d keys: %s", mode, keys, REMEDIES[mode])

    def check_forward(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Warn once of a long call that another attention function computes; a forward pre-hook of one layer."""
        if "implementation" in self.warned or torch.compiler.is_compiling():
            return
        from transformers import AttentionInterface

        name: str = module.config._attn_implementation  # type: ignore[assignment, union-attr]
        if getattr(AttentionInterface().get(name), "__module__", "").startswith(PACKAGE):
            return
        hidden = arguments[0] if arguments else named["hidden_states"]  # [B, L, E]
        longest = named.get("max_length_k", named.get("max_seqlen_k"))  # of a batch of continuous batching, by type
        keys = max(longest.values()) if isinstance(longest, dict) else longest or hidden.shape[1]
        if keys >= self.min_length:
            self.warned.add("implementation")
            log.warning(
                "S2O does not run: the patched model has the attention implementation %r for a prompt of %d keys: call "
                'model.set_attn_implementation("s2o"), or for continuous batching do what docs/deploy.md says of your '
                "transformers",
                name, keys,
            )  # fmt: skip


SAMPLES = 16
WARM = 4  # calls of a kind that compile, record and fill caches: their times count only where there are no others

Key = tuple[str, str]  # path and reason
Moment = float | torch.cuda.Event  # on the host's clock, or on a stream


class SampledMeans(NamedTuple):
    """Means over the sampled calls. density: of all heads, dense is 1.0; seconds: of the attention function."""

    density: float
    seconds: float


@dataclass
class Sample:
    """One call that is measured, the number-th of its kind, which keeps it in a slot.

    key: its path and reason; density: of each head, float64 [Hq] on the call's device, None for a dense call.
    """

    kind: str | None
    number: int
    slot: int
    begin: Moment
    end: Moment = 0.0
    key: Key = ("", "")
    density: Tensor | None = None

    @property
    def seconds(self) -> float:
        """The time between begin and end; waits for the device."""
        begin, end = self.begin, self.end
        if isinstance(begin, float) or isinstance(end, float):
            return float(end) - float(begin)  # type: ignore[arg-type]
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Meter:
    """Sampled calls of one layer: `SAMPLES` of each kind, by reservoir sampling. Copies start empty."""

    def __init__(self) -> None:
        self._calls: Counter[str | None] = Counter()  # by kind
        self._kept: defaultdict[str | None, dict[int, Sample]] = defaultdict(dict)  # by kind and slot
        self._random = random.Random(0)

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        return Meter, ()

    def begin(self, kind: str | None, device: torch.device) -> Sample | None:
        """Begin a call of this kind; None if it is not sampled, as in a CUDA graph or while tracing."""
        if torch.compiler.is_compiling():
            return None
        self._calls[kind] += 1
        number = self._calls[kind]
        slot = number - 1 if number <= SAMPLES else int(self._random.random() * number)
        if slot >= SAMPLES or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        return Sample(kind, number, slot, _read_clock(device))

    def end(self, sample: Sample, key: Key, stats: AttentionStats | None, device: torch.device) -> None:
        """End a sampled call. stats: of the op, None if it did not run."""
        sample.end, sample.key = _read_clock(device), key
        if stats is not None and stats.visited is not None:
            sample.density = stats.density  # computed on the device: the visited keys would take much memory
        self._kept[sample.kind][sample.slot] = sample

    def read(self) -> dict[Key, SampledMeans]:
        """Return the means so far; waits for the device."""
        # copies: a server's metrics are read by a thread of their own
        kept = [sample for slots in list(self._kept.values()) for sample in list(slots.values())]
        means = {}
        for key, samples in group_by_key((sample.key, sample) for sample in kept).items():
            warm = [sample for sample in samples if sample.number > WARM] or samples
            density = fmean(1.0 if sample.density is None else float(sample.density.mean()) for sample in samples)
            means[key] = SampledMeans(density, fmean(sample.seconds for sample in warm))
        return means


def _read_clock(device: torch.device) -> Moment:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


SAMPLED_EVERY = 256  # sparse calls of a layer: the density of one of them is kept
EARLY = 15  # and of each of the first prompts, so that a layer with the settings of another shows soon
REMEMBERED = 1024  # requests that were counted last: more than a server reads at a time

T = TypeVar("T")


@dataclass
class Counters:
    """Rows of a server that went through attention, by layer, path and reason."""

    log_every: float = 0.0  # seconds between two lines of the log; 0 for none
    shadow_every: int = 0  # of a layer's calls one in so many runs S2O beside the stock backend, which answers; 0: off
    build: tuple[str, str, str] = ("", "", "")  # the version, a digest of the profile's file, and the mode
    is_enabled: Callable[[], bool] = lambda: True  # whether any prompt may run S2O
    calls: Counter[int] = field(default_factory=Counter)  # sparse ones of each layer
    prompts: Counter[int] = field(default_factory=Counter)  # those of them that were prompts
    sampled: dict[int, AttentionStats] = field(default_factory=dict)  # of each layer's last sampled call
    drift: dict[int, DriftMonitor] = field(default_factory=dict)  # of the layers that have one
    faults: Counter[tuple[int, str]] = field(default_factory=Counter)  # by layer, -1 for a batch, and type of error
    requests: int = 0  # that S2O computed rows of
    shadowed: Counter[int] = field(default_factory=Counter)  # calls of each layer that S2O might have computed
    shadow_errors: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # of each layer
    meters: defaultdict[int, Meter] = field(default_factory=lambda: defaultdict(Meter))  # where S2O may have a part
    last_logged: float = field(default_factory=time.monotonic)
    _requests: deque[str | None] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _rows: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    _timed: Counter[tuple[int, str]] = field(default_factory=Counter)
    # Batches that the stock backend computed, and their rows, by layers and reason: one entry a batch, because such
    # batches are decoding's, where every microsecond of the host counts.
    _left: dict[tuple[tuple[int, ...], str], list[int]] = field(default_factory=dict)

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

    def count_stock_batch(self, layers: tuple[int, ...], reason: str, rows: int) -> None:
        """Count a batch of so many rows that the stock backend computes in these layers, in one call each."""
        batches = self._left.setdefault((layers, reason), [0, 0])
        batches[0] += 1
        batches[1] += rows
        self.log_summary()

    def add(self, layer: int, path: str, reason: str, rows: int) -> None:
        """Count query rows of a layer."""
        self._rows[layer, path, reason] += rows

    def count_fault(self, layer: int, error: Exception) -> FormattedReason:
        """Count and log an exception of S2O's; return it as the reason why the stock backend answers."""
        log.error("S2O failed in layer %d, the stock backend answers", layer, exc_info=error)
        self.faults[layer, type(error).__name__] += 1
        return DenseReason.FAULT.fill_in(f"{type(error).__name__}: {get_first_line(error)}")

    def count_requests(self, names: Iterable[str | None]) -> None:
        """Count the requests of a batch that S2O has a part in, each in its first one; None is of unknown ones."""
        for name in names:
            if name not in self._requests:
                self._requests.append(name)
                self.requests += 1

    def compare(self, layer: int, ours: Tensor, truth: Tensor) -> None:
        """Keep the error of what S2O computed beside the stock backend; without a copy, which overwrites `ours`."""
        norms = [torch.linalg.vector_norm(rows, dtype=torch.float32) for rows in (ours.sub_(truth), truth)]
        self.shadow_errors[layer] = [*self.shadow_errors[layer][1 - SAMPLES :], (norms[0] / norms[1]).square()]

    def is_sampled(self, layer: int, is_prompt: bool = False) -> bool:
        """Count a sparse call, and decide whether its density is kept and its error checked.

        is_prompt: whether the call brings at least half of its keys; few new rows may err by more.
        """
        self.calls[layer] += 1
        self.prompts[layer] += is_prompt
        return (is_prompt and self.prompts[layer] <= EARLY) or self.calls[layer] % SAMPLED_EVERY == 1

    def begin(self, layer: int, path: str, device: torch.device) -> Sample | None:
        """Begin a call of a layer that is likely to take a path; the sample is for `end`."""
        return self.meters[layer].begin(path, device)

    def end(self, layer: int, path: str, sample: Sample | None, device: torch.device) -> None:
        """End a call, with the path that it took."""
        self._timed[layer, path] += 1
        if sample is not None:
            self.meters[layer].end(sample, (path, ""), None, device)

    def call_stock(self, layer: int, device: torch.device, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call the stock backend for a layer."""
        sample = self.begin(layer, "dense", device)
        answer = call(*arguments, **named)
        self.end(layer, "dense", sample, device)
        return answer

    def seconds(self) -> dict[tuple[int, str], float]:
        """Return the mean time of a call by layer and path, over those that were sampled; waits for the device."""
        meters = sorted(self.meters.items(), key=lambda item: item[0])
        return {(layer, path): mean.seconds for layer, meter in meters for (path, _), mean in meter.read().items()}

    def densities(self) -> dict[int, float]:
        """Return the mean density of each layer's last sampled call; waits for the device."""
        return {layer: float(stats.density.mean()) for layer, stats in sorted(self.sampled.items())}

    def errors(self) -> dict[int, float]:
        """Return each checked layer's running error over what the profile allows it; waits for the device."""
        numbers = {layer: monitor.numbers() for layer, monitor in sorted(self.drift.items())}
        return {layer: found.mean for layer, found in numbers.items() if found is not None}

    def shares(self) -> dict[tuple[str, str], float]:
        """Return the share of all rows that took each path for each reason."""
        shares = Counter[tuple[str, str]]()
        for (_, path, reason), rows in self.rows.items():
            shares[path, reason] += rows
        total = shares.total()
        return {key: rows / total for key, rows in shares.most_common()}

    def summary(self) -> str:
        """Return one line for the log: where rows went, and the mean density."""
        parts = [f"{share:.1%} {path} ({reason})" for (path, reason), share in self.shares().items()]
        if densities := self.densities().values():
            parts.append(f"mean density {sum(densities) / len(densities):.3f} of {len(densities)} layers")
        if errors := self.errors().values():
            parts.append(f"sampled errors up to {max(errors):.2f} of what is allowed")
        return "; ".join(parts) or "no rows yet"

    def log_summary(self) -> None:
        """Log the summary, if it is time."""
        if self.log_every and time.monotonic() - self.last_logged >= self.log_every:
            self.last_logged = time.monotonic()
            log.info("S2O: %s", self.summary())


class PrometheusCollector:
    """Counters as prometheus_client collects them; `labels` are of every sample, such as the rank."""

    def __init__(self, counters: Counters, labels: dict[str, str]) -> None:
        self._counters, self._labels = counters, labels

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, read when they are asked for."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counters, layer, call = self._counters, ("layer",), ("layer", "path")
        # a reason's sentence may change with a version or a profile; its code stays
        others, rows = {"s2o": "computed", "dense": "unsupported"}, dict[tuple[object, ...], int]()
        for (index, path, sentence), count in counters.rows.items():
            reason = DenseReason.from_sentence(sentence)
            rows[index, path, sentence, reason.name.lower() if reason else others[path]] = count
        verdicts = {layer: monitor.verdict is not None for layer, monitor in counters.drift.items()}
        errors = {layer: float(torch.stack(kept).mean()) for layer, kept in list(counters.shadow_errors.items())}
        build, enabled = ("version", "profile", "mode"), {counters.build: counters.is_enabled()}
        metrics = (
            (GaugeMetricFamily, "s2o_enabled", "1 if any prompt may run S2O", build, enabled),
            (CounterMetricFamily, "s2o_requests", "Requests with rows of S2O's", (), {(): counters.requests}),
            (CounterMetricFamily, "s2o_faults", "Exceptions of S2O's", ("layer", "error"), counters.faults),
            (GaugeMetricFamily, "s2o_drift_verdict", "1 if the drift check found too much", layer, verdicts),
            (GaugeMetricFamily, "s2o_shadow_error", "Relative squared error in shadow mode", layer, errors),
            (CounterMetricFamily, "s2o_rows", "Query rows", (*call, "reason", "code"), rows),
            (GaugeMetricFamily, "s2o_density", "Pairs computed over causal pairs", layer, counters.densities()),
            (GaugeMetricFamily, "s2o_error", "Sampled error over what is allowed", layer, counters.errors()),
            (CounterMetricFamily, "s2o_calls", "Calls of attention", call, counters.timed),
            (GaugeMetricFamily, "s2o_call_seconds", "Mean time of a sampled call", call, counters.seconds()),
        )
        for family, name, meaning, labels, numbers in metrics:
            metric = family(name, meaning, labels=[*self._labels, *labels])
            for key, number in list(numbers.items()):
                values = key if isinstance(key, tuple) else (key,)
                metric.add_metric([*self._labels.values(), *map(str, values)], number)
            yield metric


def serve_metrics(counters: Counters, host: str, port: int, labels: dict[str, str]) -> None:
    """Answer Prometheus at a port of one of this machine's addresses, from a thread of its own.

    Raises:
        OSError: the port is taken, or the address is none of this machine's.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(PrometheusCollector(counters, labels))
    start_http_server(port, addr=host, registry=registry)
