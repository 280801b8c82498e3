"""Launching a kernel with arguments by name, and without Triton's binder.

`launch` puts arguments into the kernel's own order, so a caller cannot swap two strides. Triton's own launch then binds
and specialises every argument, 50 to 100 microseconds for a kernel with forty of them. What can change the compiled
kernel is little: the arguments' types, whether pointers and strides are multiples of 16, and the constants. So the
kernel that Triton compiled for aligned pointers is kept under the rest of that, and its launcher is called directly
where this was tested; every other call goes through Triton.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import accumulate, chain, pairwise
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .groups import Strides

# Versions of Triton whose compiled kernels' `run` was called directly on a GPU and compared with `kernel[grid]`
# (tests/ops/test_launch.py). Its parameters are no public interface: with other versions every launch goes through
# Triton, and no call becomes a plan. To add a version, run that test with it.
TESTED_TRITONS = ((3, 6), (3, 9))

Argument = Tensor | int | float | tuple[Tensor | int | None, ...] | None


class Compiled(NamedTuple):
    """A compiled kernel: its launcher, and what the launcher wants beside the arguments."""

    run: Any
    function: Any
    metadata: Any
    groups: tuple[tuple[int, ...], ...]  # the places of each group's members among the tensors of a launch
    order: Picker  # of the pointer parameters' arguments, from the tensors and the groups behind them


# gives the values of some keys or places, as a tuple
Picker = Callable[[Any], tuple[Any, ...]]

# called with the kernel, None if the launch went through Triton; its grid; its tensors; and its other arguments
Listener = Callable[[Compiled | None, tuple[int, int, int], Sequence[Tensor], tuple[Any, ...]], None]


class _Observed(threading.local):
    """The function that `launch` calls after each launch of this thread, if there is one."""

    listener: Listener | None = None


observed = _Observed()
_dtype = attrgetter("dtype")
_compiled: dict[tuple[Any, ...], Compiled] = {}
_compiling: dict[tuple[Any, ...], threading.Lock] = {}  # by the same keys


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Mapping[str, Argument],
    constants: Mapping[str, Any],
    **options: int,
) -> None:
    """Run a kernel on the current stream of its tensors' GPU.

    Args:
        kernel: a function that `triton.jit` or `gluon.jit` made. Its parameters are first the pointers, in capitals,
            then numbers, then constants.
        grid: programs in each of the three dimensions.
        arguments: for every pointer a tensor, or None for one that is absent, which the kernel must not read: it
            gets the address of its first tensor, which may be neither absent nor in a group. For every other parameter
            a number. For a parameter that takes a group, one of the types in `groups`: of at least two tensors, or of
            integers.
        constants: the kernel's constexprs.
        options: Triton's, such as num_warps.

    Raises:
        TypeError: a parameter of the kernel has no value, or a value belongs to no parameter; the message names it. Or
            a group has another length than in the first launch.
    """
    binding = _bindings.get(id(kernel))
    if binding is None:
        binding = _bindings[id(kernel)] = _Binding(kernel, arguments, constants)
    try:
        tensors = [*binding.pointers(arguments), *chain.from_iterable(binding.grouped(arguments))]
        numbers = binding.numbers(arguments)
        values = binding.constants(constants)
    except KeyError:
        raise _describe_wrong_names(kernel, arguments, constants) from None
    if len(arguments) + len(constants) != binding.parameters:
        raise _describe_wrong_names(kernel, arguments, constants)
    if len(tensors) != binding.tensors:
        raise TypeError(f"{_name(kernel)} got {len(tensors)} tensors: its first launch had {binding.tensors}")
    first = tensors[0]
    pointers = [first if tensor is None else tensor for tensor in tensors]
    address = list(map(Tensor.data_ptr, pointers))
    device = first.device.index
    types = tuple(map(type, numbers))
    key = (
        id(kernel),
        device,
        tuple(map(_dtype, pointers)),
        types,
        _get_specialisation(binding.specialised(arguments), types),
        values,
        tuple(options.items()),
    )
    compiled = _compiled.get(key)
    narrow = max(binding.unspecialised(arguments), default=0) < 1 << 31  # 64-bit numbers make it another kernel
    cacheable = narrow and not reduce(or_, address) & 15
    if compiled is None or not cacheable or is_hooked():
        with _compiling.setdefault(key, threading.Lock()):  # threads that need one kernel compile it once
            launched = kernel[grid](*binding.group_tensors(pointers), *numbers, **constants, **options)
        is_compiled = hasattr(launched, "packed_metadata")  # nothing is in the interpreter
        if cacheable and is_compiled and _is_tested(triton.__version__):
            metadata = launched.packed_metadata
            _compiled[key] = Compiled(launched.run, launched.function, metadata, binding.groups, binding.order)
        if observed.listener is not None:
            observed.listener(None, grid, pointers, ())
        return
    # as Triton's own driver finds the stream; the public `torch.cuda.current_stream` makes an object for it each time
    stream = torch._C._cuda_getCurrentRawStream(device)
    rest = (*numbers, *values)
    grouped = binding.group_addresses(address)
    compiled.run(*grid, stream, compiled.function, compiled.metadata, None, None, None, *grouped, *rest)
    if observed.listener is not None:
        observed.listener(compiled, grid, pointers, rest)


def list_strides(dimensions: str, **tensors: Tensor | None) -> dict[str, int]:
    """Return the stride arguments of tensors: `list_strides("bh", q=q)` gives stride_qb and stride_qh, 0 for None."""
    arguments: dict[str, int] = {}
    for letter, tensor in tensors.items():
        names = _get_stride_names(letter, dimensions)
        arguments.update(zip(names, (0,) * len(names) if tensor is None else tensor.stride(), strict=False))
    return arguments


def group_strides(**tensors: Tensor) -> dict[str, Strides]:
    """Return the stride arguments of tensors [B, H, rows, D] in groups: `group_strides(q=q)` gives stride_q."""
    return {f"stride_{letter}": _get_stride_group(tensor.stride()) for letter, tensor in tensors.items()}


def is_hooked() -> bool:
    """Return whether a profiler has asked Triton to tell it of launches, which a direct call of the launcher would not.

    Hooks on compilation, such as vLLM's monitor sets, are called either way.
    """
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(hook is not None and bool(getattr(hook, "calls", True)) for hook in hooks)


@lru_cache(maxsize=1)
def _is_tested(version: str) -> bool:
    """Return whether compiled kernels of this version of Triton may be called directly."""
    return tuple(int(part) for part in version.split(".")[:2]) in TESTED_TRITONS


class _Binding:
    """The permutation of a kernel's arguments, made at its first launch: pickers of values by name, in its order.

    A launch's tensors are those of `pointers`, then those of the groups `grouped`, one behind the other; `groups` and
    `order` are as in `Compiled`.
    """

    def __init__(self, kernel: Any, arguments: Mapping[str, Argument], constants: Mapping[str, Any]) -> None:
        names = list(kernel.arg_names)
        if set(names) != {*arguments, *constants} or len(names) != len(arguments) + len(constants):
            raise _describe_wrong_names(kernel, arguments, constants)
        pointers = [name for name in names if name in arguments and name.isupper()]
        numbers = [name for name in names if name in arguments and not name.isupper()]
        ordered = [*pointers, *numbers, *(name for name in names if name in constants)]
        if names != ordered or not pointers:
            raise TypeError(
                f"the parameters of {_name(kernel)} are {names}: expected pointers, numbers, then constants"
            )
        unspecialised = set(getattr(kernel, "do_not_specialize", ()))  # which the interpreter does not say
        plain = [name for name in pointers if not isinstance(arguments[name], tuple)]
        grouped = [name for name in pointers if isinstance(arguments[name], tuple)]
        if pointers[0] in grouped:
            raise TypeError(f"the first parameter of {_name(kernel)}, {pointers[0]}, got a group: expected a tensor")
        ends = list(accumulate((len(arguments[name]) for name in grouped), initial=len(plain)))  # type: ignore[arg-type]
        places = {name: place for place, name in enumerate([*plain, *[""] * (ends[-1] - len(plain)), *grouped])}
        self.kernel = kernel  # kept, so that its id stays its own
        self.parameters, self.tensors = len(names), ends[-1]  # how many
        self.groups = tuple(tuple(range(*edges)) for edges in pairwise(ends))
        self._group_types: list[Any] = [type(arguments[name]) for name in grouped]
        self._group_pickers = [make_picker(group) for group in self.groups]
        self.order = make_picker([places[name] for name in pointers])
        self.pointers, self.grouped, self.numbers = make_picker(plain), make_picker(grouped), make_picker(numbers)
        self.specialised = make_picker([name for name in numbers if name not in unspecialised])
        self.unspecialised = make_picker([name for name in numbers if name in unspecialised])
        self.constants = make_picker(ordered[len(arguments) :])

    def group_addresses(self, values: list[int]) -> Sequence[Any]:
        """Return the addresses of a launch's tensors as the kernel takes them: in its order, groups as tuples."""
        return self.order([*values, *[pick(values) for pick in self._group_pickers]]) if self.groups else values

    def group_tensors(self, tensors: list[Tensor]) -> Sequence[Any]:
        """Return the tensors for Triton's own launch, which knows the fields of a group by its type."""
        groups = zip(self._group_types, self._group_pickers, strict=True)
        return self.order([*tensors, *[group_type._make(pick(tensors)) for group_type, pick in groups]])


_bindings: dict[int, _Binding] = {}


def make_picker(names: Sequence[Any]) -> Picker:
    """Return a function that gives the values of these names as a tuple; `itemgetter` does so from two names on."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda values: tuple(values[name] for name in names)


def _describe_wrong_names(kernel: Any, arguments: Mapping[str, Argument], constants: Mapping[str, Any]) -> TypeError:
    """Return the error for names that are not those of the kernel's parameters."""
    names, given = list(kernel.arg_names), [*arguments, *constants]
    missing = [name for name in names if name not in given]
    unknown = [name for name in given if name not in names]
    if missing:
        return TypeError(f"{_name(kernel)} got no value for {', '.join(missing)}: give all of its parameters by name")
    if unknown:
        return TypeError(f"{_name(kernel)} has no parameter {', '.join(unknown)}: its parameters are {names}")
    twice = [name for name in arguments if name in constants]
    return TypeError(f"{_name(kernel)} got {', '.join(twice)} as an argument and as a constant: give each name once")


def _name(kernel: Any) -> str:
    return getattr(kernel, "__name__", type(kernel).__name__)


@lru_cache(maxsize=4096)
def _get_specialisation(numbers: tuple[Any, ...], types: tuple[type, ...]) -> tuple[Any, ...]:
    """Return all that Triton specialises on: if 16 divides an integer, if it is 1, and if 32 bits do not hold it.

    types: of all numbers of the launch, for the cache, to which 1 and 1.0 are the same key.
    """
    return tuple(
        _get_specialisation(number, types) if isinstance(number, tuple)
        else 0 if isinstance(number, float)
        else (not number & 15) | (number == 1) << 1 | (number >= 1 << 31) << 2
        for number in numbers
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _get_stride_group(stride: tuple[int, ...]) -> Strides:
    return Strides(*stride[:3])


@lru_cache(maxsize=256)
def _get_stride_names(letter: str, dimensions: str) -> tuple[str, ...]:
    return tuple(f"stride_{letter}{dimension}" for dimension in dimensions)
