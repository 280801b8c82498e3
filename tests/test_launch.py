"""The launch cache, with a kernel that only remembers how it was called."""

import types

import pytest
import torch

from s2o_runtime.kernels import launch as launch_module
from s2o_runtime.kernels.launch import launch


class Kernel:
    """Triton's side: `kernel[grid](...)` compiles and runs, the compiled kernel's `run` only runs."""

    arg_names = ("X", "n", "stride", "count", "A", "B")

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
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    return Kernel()


def call(kernel, x, stride=16, n=5, b=2):
    launch(kernel, (3, 2, 1), (x,), (n,), (stride,), {"B": b, "A": 1}, (7,), num_warps=4)


def test_the_second_call_goes_straight_to_the_compiled_kernel(kernel):
    x = torch.zeros(64)
    call(kernel, x)
    assert kernel.through_triton == [((3, 2, 1), x, 5, 16, 7, {"B": 2, "A": 1, "num_warps": 4})]
    call(kernel, x, n=6, stride=32)  # other numbers and another multiple of 16: the same compiled kernel
    # constants in the order of the kernel's arguments, whatever order they were given in
    assert kernel.direct == [
        (3, 2, 1, "stream", "function", "metadata", None, None, None, x.data_ptr(), 6, 32, 7, 1, 2)
    ]


@pytest.mark.parametrize("change", [{"stride": 8}, {"stride": 1}, {"stride": 1 << 31}, {"b": 3}])
def test_what_changes_the_compiled_kernel_goes_through_triton(kernel, change):
    x = torch.zeros(64)
    call(kernel, x)
    call(kernel, x, **change)
    call(kernel, x.double())
    assert len(kernel.through_triton) == 3
    assert not kernel.direct


def test_pointers_that_are_not_aligned_neither_use_nor_replace_what_is_kept(kernel):
    x = torch.zeros(64)
    call(kernel, x[1:])
    call(kernel, x)
    call(kernel, x[1:])
    assert len(kernel.through_triton) == 3
    call(kernel, x)
    assert len(kernel.direct) == 1
