"""Launching by name: real kernels, which launches may skip Triton's binder, and that these are Triton's on a GPU."""

import types
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
from support.kernels import DEVICE, HOPPER, ON_GPU, PLAIN, inputs, mixed_config


@triton.jit(do_not_specialize=["rows"])
def scaled_rows(
    X, BIAS, OUT, factor, rows, stride_xr, stride_xc, stride_or, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """OUT[r] = X[r] * factor + BIAS; X, OUT [rows, COLUMNS]; BIAS [COLUMNS]."""
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    x = tl.load(X + row * stride_xr + column * stride_xc) * factor
    if HAS_BIAS:
        x += tl.load(BIAS + column)
    tl.store(OUT + row * stride_or + column, x, mask=row < rows)


def arguments(x, out, bias=None, factor=2.0):
    return {
        "factor": factor, "rows": len(x), "OUT": out, "BIAS": bias, "X": x, **list_strides("rc", x=x),
        **list_strides("r", o=out),
    }  # fmt: skip


def run(x, out, bias=None):
    launch(scaled_rows, (len(x), 1, 1), arguments(x, out, bias), {"HAS_BIAS": bias is not None, "COLUMNS": 16})


def test_arguments_are_bound_by_name_whatever_their_order():
    x, out, bias = (
        torch.randn(16, 5, device=DEVICE).T,
        torch.full((5, 16), torch.nan, device=DEVICE),
        torch.randn(16, device=DEVICE),
    )
    run(x, out, bias)
    torch.testing.assert_close(out, x * 2 + bias)
    run(x, out)  # without a bias
    torch.testing.assert_close(out, x * 2)


@pytest.mark.parametrize("first", [True, False], ids=["first-launch", "later"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride_xc": ...}, "scaled_rows got no value for stride_xc: give all"),
        ({"stride_xc": ..., "stride_xx": 1}, "scaled_rows got no value for stride_xc: give all"),
        ({"stride_xx": 1}, "scaled_rows has no parameter stride_xx: its"),
        ({"COLUMNS": 16}, "scaled_rows got COLUMNS as an argument and as a constant"),
    ],
    ids=["missing", "misspelt", "unknown", "twice"],
)
def test_a_wrong_name_is_an_error_that_names_it(change, message, first, monkeypatch):
    monkeypatch.setattr(launch_module, "_bindings", {})
    x, out = torch.randn(2, 16), torch.empty(2, 16)
    constants = {"HAS_BIAS": False, "COLUMNS": 16}
    if not first:
        launch_module._Binding(scaled_rows, arguments(x, out), constants)
    given = {name: value for name, value in (arguments(x, out) | change).items() if value is not ...}
    with pytest.raises(TypeError, match=message):
        launch(scaled_rows, (2, 1, 1), given, constants)


def test_pointers_come_first(monkeypatch):
    kernel = types.SimpleNamespace(arg_names=["n", "X"], __name__="backwards")
    with pytest.raises(TypeError, match=r"the parameters of backwards are .*: expected pointers, numbers, then"):
        launch(kernel, (1, 1, 1), {"n": 1, "X": torch.zeros(1)}, {})


class Pair(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


@triton.jit(do_not_specialize=["rows"])
def between(X, PAIR: Pair, OUT, rows, stride_x: Strides, COLUMNS: tl.constexpr):
    """OUT[b, r] = X[b, 0, r] within bounds; X [B, 1, rows, COLUMNS]; of PAIR [COLUMNS]; OUT [B, rows, COLUMNS]."""
    column = tl.arange(0, COLUMNS)
    x = tl.load(X + tl.program_id(1) * stride_x.batch + tl.program_id(0) * stride_x.row + column)
    x = tl.minimum(tl.maximum(x, tl.load(PAIR.low + column)), tl.load(PAIR.high + column))
    tl.store(OUT + (tl.program_id(1) * rows + tl.program_id(0)) * COLUMNS + column, x)


def test_a_group_is_one_argument():
    x, low = torch.randn(3, 2, 5, 16, device=DEVICE)[:, :1], torch.linspace(-1, 0, 16, device=DEVICE)
    out = torch.full((3, 5, 16), torch.nan, device=DEVICE)
    given = {"OUT": out, "X": x, "PAIR": Pair(low, low + 1), "rows": 5, **group_strides(x=x)}
    launch(between, (5, 3, 1), given, {"COLUMNS": 16})
    torch.testing.assert_close(out, x[:, 0].clamp(low, low + 1))


def test_strides_by_name():
    q, k = torch.empty(2, 3, 4, 5).transpose(1, 2), torch.empty(1, 2, 3, 4)
    assert list_strides("bhl", q=q, k=k) == {
        "stride_qb": 60, "stride_qh": 5, "stride_ql": 20, "stride_kb": 24, "stride_kh": 12, "stride_kl": 4,
    }  # fmt: skip
    assert list_strides("bh", e=None) == {"stride_eb": 0, "stride_eh": 0}
    assert group_strides(q=q, k=k) == {"stride_q": (60, 5, 20), "stride_k": (24, 12, 4)}
    assert group_strides(q=q)["stride_q"].row == 20


class Kernel:
    """Stands for a compiled kernel: `kernel[grid](...)` is Triton's launch, `run` the launcher it found."""

    arg_names = ("X", "stride", "count", "A", "B")
    do_not_specialize = ("count",)

    def __init__(self):
        self.through_triton, self.direct = [], []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.through_triton.append((grid, *args, constants))
            return types.SimpleNamespace(
                run=lambda *args: self.direct.append(args), function="function", packed_metadata="metadata"
            )

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch_module, "_compiled", {})
    monkeypatch.setattr(launch_module, "_is_tested", lambda version: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    return Kernel()


def call(kernel, x, stride=16, count=7, b=2):
    launch(kernel, (3, 2, 1), {"count": count, "stride": stride, "X": x}, {"B": b, "A": 1}, num_warps=4)


def test_the_second_launch_goes_straight_to_the_compiled_kernel(kernel):
    x = torch.zeros(64)
    call(kernel, x)
    assert kernel.through_triton == [((3, 2, 1), x, 16, 7, {"B": 2, "A": 1, "num_warps": 4})]
    call(kernel, x, count=6, stride=32)  # another count and another multiple of 16: the same compiled kernel
    # constants in the order of the kernel's parameters, whatever order they were given in
    assert [(*launched[:3], launched[9:]) for launched in kernel.direct] == [(3, 2, 1, (x.data_ptr(), 32, 6, 1, 2))]


@pytest.mark.parametrize(
    "change", [{"stride": 8}, {"stride": 1}, {"stride": 1 << 31}, {"stride": 16.0}, {"count": 1 << 31}, {"b": 3}]
)
def test_what_changes_the_compiled_kernel_goes_through_triton(kernel, change):
    x = torch.zeros(64)
    call(kernel, x)
    call(kernel, x, **change)
    call(kernel, x.double())
    assert len(kernel.through_triton) == 3
    assert not kernel.direct
    call(kernel, x)
    assert len(kernel.direct) == 1


class Grouping(Kernel):
    """Takes a group of tensors ahead of a tensor, and one of numbers."""

    arg_names = ("X", "PAIR", "Y", "strides", "count", "A")


def grouped_call(kernel, x, pair, y, strides=(16, 1, 32), count=7):
    given = {"Y": y, "PAIR": pair, "X": x, "count": count, "strides": strides}
    launch(kernel, (3, 2, 1), given, {"A": 1}, num_warps=4)


@pytest.fixture
def grouping(kernel):
    return Grouping()


def test_a_direct_launch_gives_groups_as_triton_does(grouping):
    x, pair, y = torch.zeros(64), Pair(torch.zeros(64), None), torch.zeros(64)
    grouped_call(grouping, x, pair, y)
    [(_, *args, _)] = grouping.through_triton
    assert args[0] is x
    assert isinstance(args[1], Pair)
    assert args[1].low is pair.low
    assert args[1].high is x  # what is absent gets the first tensor
    assert args[2:] == [y, (16, 1, 32), 7]
    grouped_call(grouping, x, pair, y, strides=(48, 1, 64))
    addresses = (x.data_ptr(), (pair.low.data_ptr(), x.data_ptr()), y.data_ptr())
    assert [launched[9:] for launched in grouping.direct] == [(*addresses, (48, 1, 64), 7, 1)]


@pytest.mark.parametrize("strides", [(16, 2, 32), (16, 16, 32), (8, 1, 32), (16, 1, 1 << 33)])
def test_what_changes_the_compiled_kernel_does_so_in_a_group(grouping, strides):
    x, pair = torch.zeros(64), Pair(torch.zeros(64), torch.zeros(64))
    grouped_call(grouping, x, pair, x)
    grouped_call(grouping, x, pair, x, strides=strides)
    grouped_call(grouping, x, Pair(pair.low.double(), pair.high), x)
    grouped_call(grouping, x, Pair(pair.low[1:], pair.high), x)
    assert len(grouping.through_triton) == 4
    assert not grouping.direct


def test_wrong_groups_are_errors(grouping):
    x = torch.zeros(64)
    grouped_call(grouping, x, Pair(x, x), x)
    with pytest.raises(TypeError, match="Grouping got 5 tensors: its first launch had 4"):
        grouped_call(grouping, x, (x, x, x), x)
    with pytest.raises(TypeError, match="the first parameter of Grouping, X, got a group: expected a tensor"):
        grouped_call(Grouping(), Pair(x, x), Pair(x, x), x)


def test_pointers_that_are_not_aligned_neither_use_nor_replace_what_is_kept(kernel):
    x = torch.zeros(64)
    call(kernel, x[1:])
    call(kernel, x)
    call(kernel, x[1:])
    assert len(kernel.through_triton) == 3
    call(kernel, x)
    assert len(kernel.direct) == 1


def test_an_untested_triton_launches_every_kernel_itself(kernel, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(triton, "__version__", "99.0.1+cu130")
    launch_module._is_tested.cache_clear()
    x = torch.zeros(64)
    call(kernel, x)
    call(kernel, x)
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

    def call():
        return s2o_attention(q, k, v, config, kv_start=starts, backend="triton", return_lse=True)

    # no call may become a plan, which would not launch through `launch`, or be recorded, which takes the listener
    monkeypatch.setattr("s2o_runtime.attention.replay.RepeatedCall.make_recorder", lambda repeated, inputs: None)
    monkeypatch.setattr(launch_module, "_compiled", {})
    monkeypatch.setattr(launch_module, "_is_tested", lambda version: False)
    expected = call()
    assert not launch_module._compiled
    monkeypatch.setattr(launch_module, "_is_tested", lambda version: True)
    call()  # through Triton, and kept
    kept = len(launch_module._compiled)
    assert kept >= 6  # means, log-sums, scores, order, pooled values, tail sums, prefill
    monkeypatch.setattr(
        launch_module.observed, "listener", lambda compiled, *rest: launched.append(compiled is not None)
    )
    out = call()
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
