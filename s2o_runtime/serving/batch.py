"""One batch of a server: what becomes of its requests in a layer, and what S2O's calls and the stock backend's need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from s2o_runtime.monitor.counters import Counters
from s2o_runtime.serving.calls import SparseCall
from s2o_runtime.serving.fit import LayerFit
from s2o_runtime.serving.plan import Plan, Run, plan


class Batch:
    """A batch, some of whose requests S2O may compute.

    What depends on a layer only through the requests that it computes itself is made once and kept: the plan, the
    tensors of sparse runs, and what the stock backend made of the runs between them.

    Args:
        starts: N + 1 positions in the rows of the batch, where each request's queries begin, and their end.
        lengths: N numbers of keys, those of the queries included.
        max_keys: of one sparse run.
        build_part: makes what the stock backend needs of a run.
    """

    def __init__(
        self, starts: Sequence[int], lengths: Sequence[int], max_keys: int, build_part: Callable[[Run], Any]
    ) -> None:
        self._starts, self._lengths, self._max_keys, self._build_part = starts, lengths, max_keys, build_part
        self._plans: dict[object, Plan] = {}
        self._calls: dict[Run, SparseCall] = {}
        self._parts: dict[Run, Any] = {}

    @property
    def rows(self) -> int:
        """Query rows of all requests."""
        return self._starts[-1]

    def plan(self, layer: LayerFit) -> Plan:
        """What becomes of the batch's requests in a layer."""
        if layer.kind not in self._plans:
            self._plans[layer.kind] = plan(self._starts, self._lengths, layer.why_dense, self._max_keys)
        return self._plans[layer.kind]

    def sparse_call(self, run: Run, page_size: int = 1) -> SparseCall:
        """The arguments of a sparse run, whose cache has pages of so many tokens."""
        if run not in self._calls:
            self._calls[run] = SparseCall.of(run, *self.tensors_of(run), page_size)
        return self._calls[run]

    def tensors_of(self, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """What `SparseCall.of` takes of a run: where queries begin, how many keys there are, and their pages."""
        raise NotImplementedError

    def part(self, run: Run) -> Any:
        """What the stock backend needs of a run."""
        if run not in self._parts:
            self._parts[run] = self._build_part(run)
        return self._parts[run]


def planned(
    batch: Batch | str, layer: LayerFit | str, number: int, rows: int, counters: Counters
) -> tuple[LayerFit, Batch, tuple[Run, ...]] | None:
    """The layer, the batch and its runs that have rows; None if the stock backend computes all of it. Rows are counted.

    Args:
        batch: the batch, or why S2O has no part in it.
        layer: the layer of the profile, or why there is none.
        number: of the decoder layer, by which rows are counted.
        rows: of the batch.
        counters: of this rank; rows that S2O computes are counted when they are.
    """
    if isinstance(layer, str) or isinstance(batch, str):
        dense_rows = {layer if isinstance(layer, str) else str(batch): rows}
        taken = None
    else:
        plan = batch.plan(layer)
        dense_rows = dict(plan.dense_rows)
        taken = None if plan.is_dense else (layer, batch, tuple(run for run in plan.runs if run.begin < run.end))
    for reason, count in dense_rows.items():
        counters.add(number, "dense", reason, count)
    counters.say()
    return taken
