"""Which requests of one server batch S2O computes, and which the stock backend does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.lengths import length_step
from s2o_runtime.serving.pieces import Pieces

WhyDense = Callable[[int, int], str | None]  # for queries and keys of a request: a reason, or None for S2O


class Run(NamedTuple):
    """Neighbouring requests that are computed by one call.

    Attributes:
        first, last: the requests `first .. last - 1` of the batch.
        begin, end: their query rows `begin .. end - 1`.
        length_step: that (`lengths.length_step`) of the keys of all, which share one configuration; None for a run
            of the stock backend.
        max_q, max_k: queries and keys of the longest.
        total_k: keys of all.
    """

    first: int
    last: int
    begin: int
    end: int
    length_step: int | None
    max_q: int
    max_k: int
    total_k: int

    @property
    def is_sparse(self) -> bool:
        """Whether S2O computes the run."""
        return self.length_step is not None

    @property
    def rows(self) -> slice:
        """The query rows."""
        return slice(self.begin, self.end)

    @property
    def requests(self) -> slice:
        """The requests."""
        return slice(self.first, self.last)


@dataclass(frozen=True)
class BatchPlan:
    """What becomes of every row of one batch in one layer.

    Attributes:
        runs: in the order of the batch; together they are all of its requests.
        dense_rows: query rows that the stock backend computes, by reason.
    """

    runs: tuple[Run, ...]
    dense_rows: Mapping[str, int]

    @cached_property
    def is_dense(self) -> bool:
        """Whether the stock backend computes all of it."""
        return not any(run.is_sparse for run in self.runs)


def plan(pieces: Pieces, why_dense: WhyDense, max_keys: int, adapted: Sequence[bool] = ()) -> BatchPlan:
    """Share the requests of a batch, or the pieces of them, between S2O and the stock backend, which has last rows.

    Neighbours join one run if both go to the stock backend, or if both are sparse, of the same length step, and have at
    most `max_keys` keys together. Requests without queries, which fill up the batch of a CUDA graph, go to the stock
    backend.

    Args:
        pieces: of the batch; what is said of requests here is said of them.
        why_dense: asked for every request with queries.
        max_keys: of one sparse run, unless a single request has more.
        adapted: whether each request of the server's batch has an adapter; empty if none has.
    """
    runs: list[Run] = []
    dense_rows: defaultdict[str, int] = defaultdict(int)
    first = max_q = max_k = total_k = 0  # of the run that is being joined
    step: int | None = None
    starts, lengths = pieces.starts, pieces.lengths
    for request, (keys, ends) in enumerate(zip(lengths, pieces.ends, strict=True)):
        queries = starts[request + 1] - starts[request]
        others = DenseReason.ADAPTER if adapted and adapted[pieces.requests[request]] else None
        others = others or (DenseReason.LAST_ROWS if ends else None)
        reason = (why_dense(queries, keys) or others) if queries > 0 else ""
        if reason:
            dense_rows[reason] += queries
        own_step = length_step(keys) if reason is None else None
        if request > first and (own_step != step or (step is not None and total_k + keys > max_keys)):
            runs.append(Run(first, request, starts[first], starts[request], step, max_q, max_k, total_k))
            first, max_q, max_k, total_k = request, 0, 0, 0
        step = own_step
        max_q, max_k, total_k = max(max_q, queries), max(max_k, keys), total_k + keys
    if lengths:
        runs.append(Run(first, len(lengths), starts[first], starts[len(lengths)], step, max_q, max_k, total_k))
    return BatchPlan(tuple(runs), dense_rows)
