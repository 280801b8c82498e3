"""Tests of when timing stops, with made-up clocks, and of the kernels that are compiled beforehand."""

import itertools
import math
import os
import statistics
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calibrate import timing
from calibrate.compiling import THREADS, compile_ahead, get_kernel_form, start_compiling, with_tiles, without_stride
from calibrate.timing import CERTAIN, LONG_CALL_S, ROUNDS, interval, measure_medians, sample_times, time_against_dense
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.kernels import prefill, splits
from s2o_runtime.kernels.rank import means, order, scores, tail
from s2o_runtime.tiles import list_candidate_tiles
from support.kernels import inputs

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
    """A call that takes 1000 s, `warm_up` times, and then these, forever the last; and the seconds of its calls."""
    calls = []
    left = itertools.chain([1000.0] * warm_up, seconds, itertools.repeat(seconds[-1]))

    def call():
        calls.append(next(left))
        return calls[-1]

    return call, calls


def half_width(seconds):
    """As it stands in statistics books: the standard error of a normal median."""
    return 1.96 * math.sqrt(math.pi / 2) * statistics.stdev(seconds) / math.sqrt(len(seconds))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0, 5.0]), known=st.sampled_from([None, 2.0]))
def test_timing_goes_on_until_the_median_is_certain(device, noise, known):
    """Dense attention whose time is known is not timed again, and warming up is not counted."""
    seconds = [1.0 + noise * (value - 1.0) for value in (1.0, 1.06, 0.97, 1.02, 1.01, 0.99, 1.0)]
    certain = (n for n in range(3, 8) if half_width(seconds[:n]) < CERTAIN * statistics.median(seconds[:n]))
    rounds = next(certain, ROUNDS)
    (call, calls), (dense, dense_calls) = counted(seconds, 2), counted([3.0, 5.0, 4.0], 1)
    result = time_against_dense(call, dense, device, known)
    assert result.seconds == statistics.median(seconds[:rounds])
    assert result.dense_seconds == (
        statistics.median([3.0, 5.0, 4.0, 4.0, 4.0, 4.0, 4.0][:rounds]) if known is None else known
    )
    assert (len(calls), len(dense_calls)) == (rounds + 2, 0 if known else rounds + 1)


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

    sampled = sample_times({name: (lambda name=name: call(name)) for name in times}, device, 3)
    assert sampled == {"a": [1.0, 9.0, 2.0], "b": [5.0, 4.0, 3.0]}
    assert order == ["a", "b", "b", "a"] * 2


class PretendedGPU:
    """The parts of torch that `_time_on_gpu` uses, on a clock in milliseconds: a flush takes one, a launch `launch`."""

    uint8 = None

    def __init__(self, launch, work):
        self.launch, self.work = launch, work
        self.host = self.busy_until = 0.0
        self.calls = []  # the work that lay ahead of each
        self.recorded = []  # streams of events, and calls
        self.cuda = self
        self.Event = lambda enable_timing: self.event()

    def get_device_properties(self, device):
        return SimpleNamespace(L2_cache_size=1)

    def current_stream(self, device=None):
        return device

    def empty(self, *args, **options):
        return SimpleNamespace(zero_=lambda: self.run(1.0))

    def run(self, milliseconds):
        self.busy_until = max(self.busy_until, self.host) + milliseconds

    def call(self):
        self.recorded.append("call")
        self.calls.append(self.busy_until - self.host)
        self.host += self.launch[min(len(self.calls), len(self.launch)) - 1]
        self.run(self.work)

    def event(self):
        def record(stream):
            self.recorded.append(stream)
            event.at = max(self.busy_until, self.host)

        event = SimpleNamespace(record=record)
        event.query = lambda: event.at <= self.host
        event.synchronize = lambda: setattr(self, "host", max(self.host, self.busy_until))
        event.elapsed_time = lambda other: other.at - event.at
        return event


@pytest.mark.parametrize(
    ("launch", "work", "ahead", "seconds"),
    [
        ([3.0], 2.0, [8.0], 2e-3),
        ([20.0, 3.0], 2.0, [8.0, 32.0], 2e-3),
        ([20.0, 20.0], 2.0, [8.0, 32.0], 2e-3),
        ([9.0], 1000 * LONG_CALL_S, [8.0], LONG_CALL_S + 1e-3),  # launched a millisecond too late, which does not count
    ],
    ids=["in time", "late once", "late", "long"],
)
def test_a_call_that_is_launched_too_late_is_timed_again_behind_more_work(launch, work, ahead, seconds, monkeypatch):
    gpu = PretendedGPU(launch, work)
    monkeypatch.setattr(timing, "torch", gpu)
    assert timing._time_on_gpu(GPU)(gpu.call) == pytest.approx(seconds)
    assert gpu.calls == ahead


def test_a_call_is_timed_on_its_own_gpu(monkeypatch):
    """Events of the current GPU's stream would not see what another one does: layers of a model may be on several."""
    second, gpu = torch.device("cuda", 1), PretendedGPU([1.0], 3.0)
    monkeypatch.setattr(timing, "torch", gpu)
    assert measure_medians({"a": gpu.call}, second, 1) == {"a": pytest.approx(3e-3)}
    assert gpu.recorded == [second, "call", second] * 2


def test_calls_are_made_beside_one_another(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    together = threading.Barrier(4)
    compile_ahead([lambda: together.wait(20)] * 4)  # each waits for the others
    assert not together.broken
    assert THREADS >= 4


def test_only_a_call_that_the_gpu_cannot_run_stops_no_other():
    def fails():
        raise RuntimeError("out of shared memory")

    made = []
    compile_ahead([fails, lambda: made.append(1), fails, lambda: made.append(2)])
    assert sorted(made) == [1, 2]
    with pytest.raises(KeyError):
        compile_ahead([{}.popitem])


def test_a_block_goes_on_while_calls_are_made_and_leaves_out_what_did_not_begin(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    begun, inside, made = threading.Event(), threading.Event(), []

    def waits():
        begun.set()
        made.append(inside.wait(20))

    with start_compiling([waits]) as finish:
        inside.set()
        finish()
        assert made == [True]
    inside.clear()
    begun.clear()
    with start_compiling([waits, lambda: made.append("left out")]):
        begun.wait(20)
    inside.set()  # nobody has waited for what was begun
    assert "left out" not in made


def test_tiles_that_differ_in_their_stride_alone_have_one_kernel():
    tiles = list_candidate_tiles(128, (9, 0))
    layers = with_tiles(LayerConfig.uniform(2, segment=1024, tile=tiles[0]), tiles)
    assert [without_stride(layer.tile) for layer in layers] == list(dict.fromkeys(map(without_stride, tiles)))
    assert len(layers) < len(tiles)
    assert {layer.tile for layer in layers} <= set(tiles)


LAYER = LayerConfig.uniform(2, tau=1.0, segment=64, tile=TileConfig(64, 64, 2, 4, 2))
TAIL = LAYER.uniform(2, tau=1.0, segment=64, tail="mean", tile=LAYER.tile)
LAYERS = [
    LAYER,
    LAYER.uniform(2, tau=9.0, segment=64, tile=LAYER.tile),
    LAYER.uniform(2, tau=1.0, segment=128, tile=LAYER.tile),
    LAYER.uniform(2, tau=1.0, segment=64, representatives=16, tile=LAYER.tile),
    TAIL,
    replace(LAYER, heads=(LAYER.heads[0], TAIL.heads[0])),
    replace(LAYER, heads=(LAYER.heads[0], HeadConfig(mode="dense", segment=64))),
]


def test_layers_of_one_form_need_the_same_kernel(monkeypatch):
    """The constants of the launch of attention are those of the form, and those of different forms differ."""
    constants = []

    def recorded(kernel, grid, arguments, of_kernel, **options):
        constants.append(tuple(of_kernel.items()))  # and no launch: what would be computed is tested elsewhere

    for module in (prefill, splits, means, order, scores, tail):
        monkeypatch.setattr(module, "launch", recorded if module is prefill else lambda *_, **__: None)
    q, k, v = inputs(1, 2, 1, 66, 130, 64)
    of_form = {}
    for config in LAYERS:
        constants.clear()
        s2o_attention(q, k, v, config, backend="triton")
        of_form.setdefault(get_kernel_form(config), set()).add(constants[-1])
    assert all(len(each) == 1 for each in of_form.values())
    assert len({next(iter(each)) for each in of_form.values()}) == len(of_form) == 3
