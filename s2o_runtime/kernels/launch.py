"""Launching a compiled kernel without asking Triton again which one it is.

Triton's own launch binds and specialises every argument, 50 to 100 microseconds for a kernel with forty of them.
What can change the compiled kernel is little: the types, whether pointers and strides are multiples of 16, and the
constants. So the kernel compiled for aligned pointers is kept under the rest of that, and its launcher called
directly; calls with other pointers, which are rare, go through Triton.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor


class Compiled(NamedTuple):
    """A compiled kernel: its launcher, and what the launcher wants beside the arguments."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]  # in the kernel's order


Listener = Callable[[Compiled | None, tuple[int, int, int], Sequence[Tensor], tuple[Any, ...]], None]


class _Heard(threading.local):
    """Who hears of this thread's launches: the kernel, None if it went through Triton; grid; pointers; the rest."""

    by: Listener | None = None


heard = _Heard()
_dtype = attrgetter("dtype")
_compiled: dict[tuple[Any, ...], Compiled] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    pointers: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    strides: tuple[int, ...],
    constants: dict[str, Any],
    trailing: tuple[int, ...] = (),
    **options: int,
) -> None:
    """Run `kernel` on the current stream, with pointers, numbers, strides, trailing and constants in this order.

    numbers, trailing: what the kernel does not specialise on; constants: its constexprs by name; options: Triton's.
    """
    address = tuple(map(Tensor.data_ptr, pointers))
    device = pointers[0].device.index
    key = (
        id(kernel),
        device,
        tuple(map(_dtype, pointers)),
        _stride_classes(strides),
        tuple(constants.values()),
        tuple(options.values()),
    )
    found = _compiled.get(key)
    aligned = not reduce(or_, address) & 15
    if found is None or not aligned or hooked():
        compiled = kernel[grid](*pointers, *numbers, *strides, *trailing, **constants, **options)
        if aligned and hasattr(compiled, "packed_metadata"):  # not in the interpreter
            ordered = tuple(constants[name] for name in kernel.arg_names if name in constants)
            _compiled[key] = Compiled(compiled.run, compiled.function, compiled.packed_metadata, ordered)
        if heard.by is not None:
            heard.by(None, grid, pointers, ())
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    rest = (*numbers, *strides, *trailing, *found.constants)
    found.run(*grid, stream, found.function, found.metadata, None, None, None, *address, *rest)
    if heard.by is not None:
        heard.by(found, grid, pointers, rest)


@lru_cache(maxsize=4096)
def _stride_classes(strides: tuple[int, ...]) -> tuple[int, ...]:
    """What Triton specialises on: the divisor 16, the value 1, and whether 32 bits hold the stride."""
    return tuple((stride & 15) | (stride == 1) << 4 | (stride >= 1 << 31) << 5 for stride in strides)


def hooked() -> bool:
    """Whether a profiler wants to hear of launches from Triton itself."""
    hook = triton.knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))
