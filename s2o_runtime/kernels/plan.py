"""Plans: repeating a call's launches without the Python code that led to them.

Checking the arguments, choosing a backend, binding launches and allocating tensors one by one takes longer on the
host than a few thousand tokens take on the GPU. All of it follows from shapes, strides, types and the config, so
for a call that comes again it can be kept as a plan: the launches, with every pointer as an offset from an input,
an output or a workspace, or as an address that stays. A replay fills in the addresses of its own tensors.

A plan keeps alive only those tensors of the recorded call that existed before it, such as the tables of a config.
A call is recorded only if it does nothing but launch kernels: see `Recorder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import Compiled, Picker, is_hooked, make_picker, observed

# Calls that need more workspace are bound by the GPU, and slices of their rows take turns in one piece of memory.
LARGEST_WORKSPACE = 512 << 20
PART_ALIGNMENT = 256

_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


# One launch: its launcher, grid, function and metadata, a picker from a replay's addresses and groups, and what follows
# the pointers. A flat tuple: a replay unpacks one for each launch, of which a call has six to nine.
Step = tuple[Any, tuple[int, int, int], Any, Any, Picker, tuple[Any, ...]]
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and type of an output


@dataclass(frozen=True)
class LaunchPlan:
    """The launches of calls that are alike, on one device.

    The addresses of a replay are those of the inputs that are there, of the outputs, and of the workspace if it
    has one; then `derived` (index of one of these, offset in bytes); then those of the constants, which the plan keeps
    alive. Behind them are tuples of addresses, which `groups` pick, for the parameters that take several.
    """

    device: torch.device
    outputs: tuple[Layout | None, ...]
    workspace: int
    derived: tuple[tuple[int, int], ...]
    constants: dict[int, Tensor]  # by address
    groups: tuple[Picker, ...]
    steps: tuple[Step, ...]

    def replay(self, inputs: Sequence[Tensor | None]) -> tuple[Any, ...] | None:
        """Return the outputs for these inputs; None on another device, with unaligned tensors, or under a profiler.

        inputs: of the same layouts as the recorder's.
        """
        device = self.device
        address = [tensor.data_ptr() for tensor in inputs if tensor is not None]
        if reduce(or_, address) & 15 or device.index != torch.cuda.current_device() or is_hooked():
            return None
        outputs: list[Tensor | None] = []
        for layout in self.outputs:
            if layout is None:
                outputs.append(None)
                continue
            size, stride, dtype = layout
            output = torch.empty_strided(size, stride, dtype=dtype, device=device)
            outputs.append(output)
            address.append(output.data_ptr())
        if self.workspace:
            workspace = torch.empty(self.workspace, dtype=torch.uint8, device=device)
            address.append(workspace.data_ptr())
        address += [address[base] + offset for base, offset in self.derived]
        address += self.constants
        arguments = [*address, *[group(address) for group in self.groups]]
        stream = torch._C._cuda_getCurrentRawStream(device.index)  # as in `launch`
        for run, (x, y, z), function, metadata, pick, rest in self.steps:
            run(x, y, z, stream, function, metadata, None, None, None, *pick(arguments), *rest)
        return tuple(outputs)


class _Source(NamedTuple):
    """The origin of an address of a recorded call: an offset from the start of an input or an allocation."""

    origin: str  # "input", "allocation" or "constant", which are numbered each on their own
    number: int
    offset: int = 0


class Recorder:
    """A context that records this thread's launches; `plan` then turns the record into a plan.

    A replay repeats launches, nothing else. So torch may do nothing in the call but allocate uninitialised tensors
    and take views: a copy, a fill or a value read back makes the plan None, as do a launch that went through
    Triton and a pointer that may belong to more than one input. A tensor of a launch that is neither an input
    nor was allocated in the call existed before it, and its address counts as constant.

    It follows torch's operations through the stack of dispatch modes, which is no public interface. The public
    `TorchDispatchMode` does not serve here: its first operation imports torch._dynamo, which takes a second, and the
    modes of all threads share flags that `torch.compile` reads.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self.beside = 0  # bytes that do not count as workspace, because every call of this kind needs them at once
        self._inputs = [tensor for tensor in inputs if tensor is not None]
        self._sizes: list[int] = []  # bytes of each allocation
        self._newest: dict[int, int] = {}  # address: the last allocation there; the ones before it were freed
        self._constants: list[Tensor] = []
        self._launches: list[tuple[Compiled, tuple[int, int, int], list[_Source], tuple[Any, ...]]] = []
        self._addresses = [tensor.data_ptr() for tensor in self._inputs]
        self._storages = [tensor.untyped_storage().data_ptr() for tensor in self._inputs]
        self._repeatable = len(set(self._addresses)) == len(self._addresses)

    def __enter__(self) -> Recorder:
        torch._C._push_on_torch_dispatch_stack(self)  # type: ignore[arg-type]
        observed.listener = self._record_launch
        return self

    def __exit__(self, *raised: object) -> None:
        observed.listener = None
        torch._C._pop_torch_dispatch_stack(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS and result.device == self._inputs[0].device:
            storage = result.untyped_storage()
            self._newest[storage.data_ptr()] = len(self._sizes)
            self._sizes.append(storage.nbytes())
        elif not func.is_view or func is torch.ops.aten.lift_fresh.default:  # how torch.tensor shows
            self._repeatable = False
        return result

    def _record_launch(
        self, compiled: Compiled | None, grid: tuple[int, int, int], pointers: Sequence[Tensor], rest: tuple[Any, ...]
    ) -> None:
        sources = [self._find_source(pointer) for pointer in pointers]
        if compiled is None or None in sources:
            self._repeatable = False
        else:
            self._launches.append((compiled, grid, [source for source in sources if source], rest))

    def _find_source(self, pointer: Tensor) -> _Source | None:
        """Return the origin of a pointer; None if it is not certain."""
        address, start = pointer.data_ptr(), pointer.untyped_storage().data_ptr()
        if start in self._newest:
            return _Source("allocation", self._newest[start], address - start)
        if address in self._addresses:
            return _Source("input", self._addresses.index(address))
        if start in self._storages:
            offset = address - self._addresses[self._storages.index(start)]
            certain = self._storages.count(start) == 1 and not offset & 15
            return _Source("input", self._storages.index(start), offset) if certain else None
        self._constants.append(pointer)
        return _Source("constant", len(self._constants) - 1)

    def has_input(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of the inputs, such as an output that the caller gave."""
        return any(tensor is given for given in self._inputs)

    def plan(self, outputs: Sequence[Tensor | None]) -> LaunchPlan | None:
        """Return the plan of the recorded call that returned `outputs`; None if it cannot be repeated."""
        if not self._repeatable or not self._launches:
            return None
        layouts: list[Layout | None] = []
        count = len(self._inputs)
        # where inputs and allocations lie: (address, offset)
        bases: dict[tuple[str, int], tuple[int, int]] = {("input", index): (index, 0) for index in range(count)}
        for output in outputs:
            layouts.append(None if output is None else (tuple(output.shape), output.stride(), output.dtype))
            if output is not None:
                allocation = self._newest.get(output.untyped_storage().data_ptr())
                if allocation is None or ("allocation", allocation) in bases or not _is_whole(output):
                    return None
                bases["allocation", allocation] = (count, 0)
                count += 1

        sources = [source for _, _, used, _ in self._launches for source in used]
        workspace = 0
        for source in sources:
            if source.origin == "allocation" and (source.origin, source.number) not in bases:
                bases[source.origin, source.number] = (count, workspace)
                workspace += -(-self._sizes[source.number] // PART_ALIGNMENT) * PART_ALIGNMENT
        if workspace > LARGEST_WORKSPACE + self.beside:
            return None
        count += workspace > 0

        # the addresses of a replay: inputs, outputs and the workspace, then what is derived from them, then constants
        index_of: dict[_Source, int] = {}
        derived: list[tuple[int, int]] = []
        for source in sources:
            if source.origin != "constant" and source not in index_of:
                base, offset = bases[source.origin, source.number]
                index_of[source] = base if offset + source.offset == 0 else count + len(derived)
                if offset + source.offset:
                    derived.append((base, offset + source.offset))
        constants = {constant.data_ptr(): constant for constant in self._constants}
        constant_index = {address: count + len(derived) + i for i, address in enumerate(constants)}
        for i, constant in enumerate(self._constants):
            index_of[_Source("constant", i)] = constant_index[constant.data_ptr()]
        group_index: dict[tuple[int, ...], int] = {}  # by the group's indices
        addresses = count + len(derived) + len(constants)
        steps: list[Step] = []
        for compiled, grid, used, rest in self._launches:
            indices = [index_of[source] for source in used]
            for group in compiled.groups:
                of_group = tuple(indices[member] for member in group)
                indices.append(group_index.setdefault(of_group, addresses + len(group_index)))
            pick = make_picker(compiled.order(indices))
            steps.append((compiled.run, grid, compiled.function, compiled.metadata, pick, rest))
        groups = tuple(make_picker(of_group) for of_group in group_index)
        device = self._inputs[0].device
        return LaunchPlan(device, tuple(layouts), workspace, tuple(derived), constants, groups, tuple(steps))


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor fills its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset() == 0 and (last + 1) * tensor.element_size() == tensor.untyped_storage().nbytes()
