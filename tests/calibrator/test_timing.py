"""When timing stops, with clocks that are made up: every call says itself how long it took."""

import itertools
import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from calibrate import timing
from calibrate.timing import CERTAIN, FEWEST_ROUNDS, HOPELESS, LONG, ROUNDS, against_dense, interval, medians, samples

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[CPU, GPU], ids=str)
def device(request, monkeypatch):
    def by_clock(call):
        return call()

    def on_gpu(device, flushes=timing.FLUSHES):
        assert (device, flushes) == (GPU, timing.FLUSHES)
        return by_clock

    monkeypatch.setattr(timing, "_time_by_clock", by_clock if request.param == CPU else None)
    monkeypatch.setattr(timing, "_time_on_gpu", on_gpu if request.param == GPU else None)
    return request.param


def counted(seconds, warm_up):
    """A call that takes 1000 s, `warm_up` times, and then these, forever the last; and how often it was made."""
    calls = []
    left = itertools.chain([1000.0] * warm_up, seconds, itertools.repeat(seconds[-1]))

    def call():
        calls.append(next(left))
        return calls[-1]

    return call, calls


def test_equal_times_are_certain_at_once(device):
    call, calls = counted([2.0], 2)
    dense, dense_calls = counted([3.0, 5.0, 4.0], 1)
    timing = against_dense(call, dense, device)
    assert (timing.seconds, timing.low, timing.high, timing.dense_seconds) == (2.0, 2.0, 2.0, 4.0)
    assert (timing.rounds, timing.rejected) == (FEWEST_ROUNDS, False)
    assert len(calls) == FEWEST_ROUNDS + 2
    assert len(dense_calls) == FEWEST_ROUNDS + 1


@pytest.mark.parametrize(("known", "again"), [(LONG, False), (LONG / 2, True), (None, True)])
def test_long_dense_attention_is_not_timed_again(known, again, device):
    dense, dense_calls = counted([3.0], 1)
    timing = against_dense(counted([2.0], 2)[0], dense, device, dense_seconds=known)
    assert (len(dense_calls) > 0) is again
    assert timing.dense_seconds == (3.0 if again else known)
    assert timing.rounds == FEWEST_ROUNDS


@pytest.mark.parametrize(("first", "rejected"), [(1.31, True), (1.29, False)])
def test_what_is_hopeless_is_timed_once(first, rejected, device):
    assert HOPELESS == 1.3
    call, calls = counted([first, 0.1], 2)
    dense, dense_calls = counted([9.0], 1)
    timing = against_dense(call, dense, device, best=1.0)
    assert timing.rejected is rejected
    if rejected:
        assert (timing.seconds, timing.dense_seconds, timing.rounds) == (first, 9.0, 1)
        assert (len(calls), len(dense_calls)) == (3, 2)
    else:
        assert timing.rounds > 1
        assert timing.seconds == 0.1


NOISY = [1.0, 1.06, 0.97, 1.02, 1.01, 0.99, 1.0]


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.5, 1.0, 5.0])
def test_timing_goes_on_until_the_median_is_certain(noise, device):
    """The round it stops in, from the formula as it stands in statistics books: the normal median's standard error."""
    seconds = [1.0 + noise * (each - 1.0) for each in NOISY]

    def half(n):
        return 1.96 * math.sqrt(math.pi / 2) * statistics.stdev(seconds[:n]) / math.sqrt(n)

    certain = (n for n in range(3, 8) if half(n) < CERTAIN * statistics.median(seconds[:n]))
    expected = next(certain, ROUNDS)
    timing = against_dense(counted(seconds, 2)[0], counted([2.0], 1)[0], device)
    assert timing.rounds == expected
    assert timing.seconds == statistics.median(seconds[:expected])
    assert timing.high - timing.seconds == pytest.approx(half(expected), rel=1e-3)
    assert timing.seconds - timing.low == pytest.approx(half(expected), rel=1e-3)


def test_the_interval_holds_the_median_as_often_as_it_says():
    """Times whose median is 1, fifty of them: few enough take so many, but then the normal approximation holds."""
    drawn = torch.randn(2000, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1 + 1.0
    inside = [low <= 1.0 <= high for low, high in map(interval, drawn.tolist())]
    assert statistics.fmean(inside) == pytest.approx(0.95, abs=0.02)
    assert interval([0.7]) == (0.7, 0.7)


def test_calls_take_turns_and_the_first_turn_is_not_counted(device):
    order = []
    times = {"a": iter([100.0, 1.0, 9.0, 2.0]), "b": iter([200.0, 5.0, 4.0, 3.0])}

    def call(name):
        order.append(name)
        return next(times[name])

    sampled = samples({name: (lambda name=name: call(name)) for name in times}, device, 3)
    assert sampled == {"a": [1.0, 9.0, 2.0], "b": [5.0, 4.0, 3.0]}
    assert order == ["a", "b", "b", "a"] * 2


def test_a_call_is_timed_on_its_own_gpu(monkeypatch):
    """Events of the current GPU's stream would not see what another one does: layers of a model may be on several."""
    second, recorded = torch.device("cuda", 1), []

    class Event:
        def record(self, stream):
            recorded.append(stream)

        def query(self):
            return False

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 3.0

    monkeypatch.setattr(timing, "_create_event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=8))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: torch.zeros(size, dtype=dtype))
    assert medians({"a": lambda: recorded.append("call")}, second, 1) == {"a": 3e-3}
    assert recorded == [second, "call", second] * 2


class PretendedGPU:
    """What `_time_on_gpu` uses of torch, on a clock in milliseconds: each flush takes the GPU one, each launch `launch`."""

    uint8 = None

    def __init__(self, launch, work):
        self.launch, self.work = launch, work
        self.host = self.busy_until = 0.0
        self.calls = []  # the work that lay ahead of each
        self.cuda = self

    def get_device_properties(self, device):
        return SimpleNamespace(L2_cache_size=1)

    def current_stream(self, device):
        return None

    def empty(self, *args, **options):
        return SimpleNamespace(zero_=lambda: self.run(1.0))

    def run(self, milliseconds):
        self.busy_until = max(self.busy_until, self.host) + milliseconds

    def call(self):
        self.calls.append(self.busy_until - self.host)
        self.host += self.launch[min(len(self.calls), len(self.launch)) - 1]
        self.run(self.work)

    def event(self):
        event = SimpleNamespace()
        event.record = lambda stream: setattr(event, "at", max(self.busy_until, self.host))
        event.query = lambda: event.at <= self.host
        event.synchronize = lambda: setattr(self, "host", max(self.host, self.busy_until))
        event.elapsed_time = lambda other: other.at - event.at
        return event


@pytest.mark.parametrize(
    ("launch", "ahead"),
    [([3.0], [8.0]), ([20.0, 3.0], [8.0, 32.0]), ([20.0, 20.0], [8.0, 32.0])],  # milliseconds of both
    ids=["in time", "late once", "late"],
)
def test_a_call_that_is_launched_too_late_is_timed_again_behind_more_work(launch, ahead, monkeypatch):
    gpu = PretendedGPU(launch, work=2.0)
    monkeypatch.setattr(timing, "torch", gpu)
    monkeypatch.setattr(timing, "_create_event", gpu.event)
    assert timing._time_on_gpu(GPU)(gpu.call) == pytest.approx(2e-3)
    assert gpu.calls == ahead


def test_a_long_call_is_not_timed_again(monkeypatch):
    gpu = PretendedGPU([9.0], work=1000 * timing.LONG)
    monkeypatch.setattr(timing, "torch", gpu)
    monkeypatch.setattr(timing, "_create_event", gpu.event)
    assert timing._time_on_gpu(GPU)(gpu.call) == pytest.approx(timing.LONG + 1e-3)  # launched a millisecond too late
    assert len(gpu.calls) == 1
