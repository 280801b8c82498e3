"""Attention in plain torch: dense, ranked, and S2O itself, the oracle of the kernels."""

import torch

# If threads share a function's first call in a process, one of them may compute 12 bits (MKL, pytorch issue 188792).
CALLED_ALONE_FIRST = ("exp", "log", "sqrt", "tanh", "cos", "sin")  # the last two in models' RoPE
for name in CALLED_ALONE_FIRST:
    for dtype in (torch.float32, torch.float64):
        getattr(torch, name)(torch.ones(1, dtype=dtype, device="cpu"))
