"""A kernel whose launches are kept in place of being run."""

import types

import torch

from s2o_runtime.kernels import launch as launch_module


class FakeKernel:
    """Stands for a compiled kernel: `kernel[grid](...)` is Triton's launch, `run` the launcher it found."""

    def __init__(self, *arg_names, do_not_specialize=()):
        self.arg_names, self.do_not_specialize = arg_names, do_not_specialize
        self.forget_launches()

    def forget_launches(self):
        self.through_triton, self.direct = [], []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.through_triton.append((grid, args, constants))
            return types.SimpleNamespace(
                run=lambda *args: self.direct.append(args), function=None, packed_metadata=None
            )

        return run


def launch_directly(monkeypatch):
    """Have `launch` keep compiled kernels, none so far, whatever Triton and device there are."""
    monkeypatch.setattr(launch_module, "_compiled", {})
    monkeypatch.setattr(launch_module, "_is_tested", lambda version: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
