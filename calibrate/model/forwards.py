"""Modules whose forward pass is another function for the length of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside the block each of these modules runs its function, instead of its own forward pass, with hooks as before.

    A forward pass that somebody else had replaced, as accelerate does to spread a model over GPUs, comes back after it.
    """
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, function in forwards.items():
        module.__dict__["forward"] = function
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward
