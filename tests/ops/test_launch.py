"""Launching by name: real kernels, which launches may skip Triton's binder, and that these are Triton's on a GPU."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.warmup import warmup
from s2o_runtime.config import LayerConfig
from s2o_runtime.kernels import launch as launch_module
from s2o_runtime.kernels.groups import Strides
from s2o_runtime.kernels.launch import TESTED_TRITONS, group_strides, launch, list_strides
from support.fake_kernel import FakeKernel, launch_directly
from support.kernels import DEVICE, HOPPER, ON_GPU, PLAIN, inputs, mixed_config


class Pair(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


@triton.jit(do_not_specialize=["rows"])
def between(
    X, PAIR: Pair, BIAS, OUT, factor, rows, stride_x: Strides, stride_or, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """OUT[b, r] = X[b, 0, r] * factor + BIAS within bounds.

    X [B, 1, rows, COLUMNS]; BIAS and those of PAIR [COLUMNS]; OUT [B, rows, COLUMNS].
    """
    column = tl.arange(0, COLUMNS)
    x = tl.load(X + tl.program_id(1) * stride_x.batch + tl.program_id(0) * stride_x.row + column) * factor
    if HAS_BIAS:
        x += tl.load(BIAS + column)
    x = tl.minimum(tl.maximum(x, tl.load(PAIR.low + column)), tl.load(PAIR.high + column))
    tl.store(OUT + (tl.program_id(1) * rows + tl.program_id(0)) * stride_or + column, x)


CONSTANTS = {"HAS_BIAS": True, "COLUMNS": 16}


def arguments(x, out, bias=None):
    low = torch.linspace(-1, 0, 16, device=DEVICE)
    given = {"OUT": out, "factor": 2.0, "X": x, "PAIR": Pair(low, low + 1), "rows": x.shape[2], "BIAS": bias}
    return {**given, **group_strides(x=x), **list_strides("r", o=out[0])}


@pytest.mark.parametrize("has_bias", [True, False])
def test_arguments_are_bound_by_name_whatever_their_order(has_bias):
    """Absent arguments and a group of tensors are among them."""
    x, bias = torch.randn(3, 2, 5, 16, device=DEVICE)[:, :1], torch.randn(16, device=DEVICE) if has_bias else None
    out = torch.full((3, 5, 16), torch.nan, device=DEVICE)
    given = arguments(x, out, bias)
    launch(between, (5, 3, 1), given, CONSTANTS | {"HAS_BIAS": has_bias})
    torch.testing.assert_close(out, (x[:, 0] * 2 + (bias if has_bias else 0)).clamp(*given["PAIR"]))


@pytest.mark.parametrize("first", [True, False], ids=["first-launch", "later"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride_or": ...}, "between got no value for stride_or: give all"),
        ({"stride_or": ..., "stride_xx": 1}, "between got no value for stride_or: give all"),
        ({"stride_xx": 1}, "between has no parameter stride_xx: its"),
        ({"COLUMNS": 16}, "between got COLUMNS as an argument and as a constant"),
    ],
    ids=["missing", "misspelt", "unknown", "twice"],
)
def test_a_wrong_name_is_an_error_that_names_it(change, message, first, monkeypatch):
    monkeypatch.setattr(launch_module, "_bindings", {})
    given = arguments(torch.randn(1, 1, 2, 16, device=DEVICE), torch.empty(1, 2, 16, device=DEVICE))
    if not first:
        launch_module._Binding(between, given, CONSTANTS)
    given = {name: value for name, value in (given | change).items() if value is not ...}
    with pytest.raises(TypeError, match=message):
        launch(between, (2, 1, 1), given, CONSTANTS)


@pytest.fixture
def kernel(monkeypatch):
    """It takes a group of tensors ahead of a tensor, and one of numbers."""
    launch_directly(monkeypatch)
    return FakeKernel("X", "PAIR", "Y", "strides", "stride", "count", "A", "B", do_not_specialize=("count",))


X, LOW = torch.zeros(64), torch.zeros(64)
PAIR = Pair(LOW, None)


def call(kernel, x=X, pair=PAIR, strides=(16, 1, 32), stride=16, count=7, b=2):
    given = {"Y": X, "PAIR": pair, "X": x, "count": count, "strides": strides, "stride": stride}
    launch(kernel, (3, 2, 1), given, {"B": b, "A": 1}, num_warps=4)


def test_the_second_launch_goes_straight_to_the_compiled_kernel(kernel):
    """With constants in the order of the kernel's parameters, and the first tensor in place of what is absent."""
    call(kernel)
    [(grid, args, constants)] = kernel.through_triton
    assert (grid, constants) == ((3, 2, 1), {"B": 2, "A": 1, "num_warps": 4})
    assert isinstance(args[1], Pair)
    assert [args[0], *args[1], *args[2:]] == [X, LOW, X, X, (16, 1, 32), 16, 7]
    call(kernel, count=6, strides=(48, 1, 64), stride=32)  # other multiples of 16, any count: the same compiled kernel
    [launched] = kernel.direct
    addresses = X.data_ptr(), (LOW.data_ptr(), X.data_ptr()), X.data_ptr()
    assert (*launched[:3], launched[9:]) == (3, 2, 1, (*addresses, (48, 1, 64), 32, 6, 1, 2))


@pytest.mark.parametrize(
    "change",
    [
        *({"strides": strides} for strides in ((16, 2, 32), (16, 16, 32), (8, 1, 32), (16, 1, 1 << 33))),
        *({"stride": stride} for stride in (8, 1, 1 << 31, 16.0)),
        *({"count": 1 << 31}, {"b": 3}, {"x": X.double()}, {"pair": Pair(LOW.double(), None)}),
        *({"x": torch.zeros(65)[1:]}, {"pair": Pair(torch.zeros(65)[1:], None)}),  # not aligned
    ],
    ids=str,
)
def test_what_changes_the_compiled_kernel_goes_through_triton(kernel, change):
    call(kernel, **change)
    call(kernel)
    call(kernel, **change | {"count": 1 << 31})
    assert len(kernel.through_triton) == 3
    assert not kernel.direct
    call(kernel)
    assert len(kernel.direct) == 1


def test_threads_that_need_one_kernel_compile_it_one_after_the_other(kernel, monkeypatch):
    order, both, original = [], threading.Barrier(2), FakeKernel.__getitem__

    def compile_slowly(kernel, grid):
        order.append("begin")
        time.sleep(0.05)
        order.append("end")
        return original(kernel, grid)

    def start(number):
        both.wait()
        call(kernel)

    monkeypatch.setattr(FakeKernel, "__getitem__", compile_slowly)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(start, range(2)))
    assert order == ["begin", "end"] * 2


def test_an_untested_triton_launches_every_kernel_itself(kernel, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(triton, "__version__", "99.0.1+cu130")
    launch_module._is_tested.cache_clear()
    call(kernel)
    call(kernel)
    assert len(kernel.through_triton) == 2
    launch_module._is_tested.cache_clear()
    direct = [launch_module._is_tested.__wrapped__(f"{major}.{minor}.0") for major, minor in TESTED_TRITONS]
    assert direct == [True, True]


@pytest.mark.skipif(not ON_GPU, reason="needs compiled kernels")
@pytest.mark.parametrize("tile", [PLAIN, HOPPER])
def test_a_direct_launch_is_tritons(tile, monkeypatch, nan_filled):
    """Every kernel of a prefill, with tails and several representatives: the same bits both ways.

    It calls the launcher whatever version of Triton is here, so run it to have a version join TESTED_TRITONS.
    """
    config, launched = mixed_config(8, 1.0, tile=tile), []
    q, k, v = inputs(2, 8, 2, 1500, 1500, 128)
    starts = torch.tensor([0, 333], device="cuda")

    def prefill():
        return s2o_attention(q, k, v, config, kv_start=starts, backend="triton", return_lse=True)

    # no call may become a plan, which would not launch through `launch`, or be recorded, which takes the listener
    monkeypatch.setattr("s2o_runtime.attention.replay.RepeatedCall.make_recorder", lambda repeated, inputs: None)
    monkeypatch.setattr(launch_module, "_compiled", {})
    monkeypatch.setattr(launch_module, "_is_tested", lambda version: False)
    expected = prefill()
    assert not launch_module._compiled
    monkeypatch.setattr(launch_module, "_is_tested", lambda version: True)
    prefill()  # through Triton, and kept
    kept = len(launch_module._compiled)
    assert kept >= 5  # means, scores, order, tail sums, prefill
    monkeypatch.setattr(
        launch_module.observed, "listener", lambda compiled, *rest: launched.append(compiled is not None)
    )
    out = prefill()
    monkeypatch.setattr(launch_module.observed, "listener", None)
    torch.cuda.synchronize()
    assert launched
    assert all(launched), f"launches of Triton {triton.__version__} went through its binder"
    assert len(launch_module._compiled) == kept
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(out[:2], expected[:2], strict=True))
    monkeypatch.undo()
    if launch_module._is_tested(triton.__version__):  # kept kernels are what plans are made of
        before = len(launch_module._compiled)
        warmup(LayerConfig.uniform(4, tau=0.5, segment=3 * tile.rows, tile=tile), kv_heads=1, head_dim=64)
        assert len(launch_module._compiled) > before
