"""One batch of a server: what becomes of its requests in a layer, and what S2O's calls and the stock backend's need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from s2o_runtime.serving.calls import SparseCall
from s2o_runtime.serving.fit import LayerFit
from s2o_runtime.serving.pieces import Pieces
from s2o_runtime.serving.plan import BatchPlan, Run, plan


class Batch:
    """A batch, some of whose requests S2O may compute.

    What depends on a layer only through the requests that it computes itself is made once and kept: the plan, the
    tensors of sparse runs, and what the stock backend made of the runs between them.

    Args:
        pieces: its requests, or the pieces of them; wherever requests are spoken of here, they are meant.
        max_keys: of one sparse run.
        build_part: makes what the stock backend needs of a run.
        adapted: whether each request of the server's batch has a LoRA adapter, and is dense; empty if none has.
    """

    def __init__(
        self, pieces: Pieces, max_keys: int, build_part: Callable[[Run], Any], adapted: Sequence[bool] = ()
    ) -> None:
        self.pieces, self._max_keys, self._build_part = pieces, max_keys, build_part
        self._adapted = adapted
        self._plans: dict[object, BatchPlan] = {}
        self._calls: dict[Run, SparseCall] = {}
        self._parts: dict[Run, Any] = {}

    @property
    def rows(self) -> int:
        """Query rows of all requests."""
        return self.pieces.starts[-1]

    def plan(self, layer: LayerFit) -> BatchPlan:
        """What becomes of the batch's requests in a layer."""
        kind = layer.kind
        if kind not in self._plans:
            self._plans[kind] = plan(self.pieces, layer.why_dense, self._max_keys, self._adapted)
        return self._plans[kind]

    def sparse_call(self, run: Run, page_size: int = 1) -> SparseCall:
        """The arguments of a sparse run, whose cache has pages of so many tokens."""
        call = self._calls.get(run)
        if call is None:
            call = self._calls[run] = SparseCall.of(run, *self.tensors_of(run), page_size)
        return call

    def tensors_of(self, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """What `SparseCall.of` takes of a run: where queries begin, how many keys there are, and their pages."""
        raise NotImplementedError

    def part(self, run: Run) -> Any:
        """What the stock backend needs of a run."""
        if run not in self._parts:
            self._parts[run] = self._build_part(run)
        return self._parts[run]
