"""Who computes which rows of a server's batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.lengths import length_step


@dataclass(frozen=True)
class Pieces:
    """What a batch is planned by: requests, or two pieces of one, its last rows (`LayerConfig.last_rows`) behind.

    A piece is a request that ends where its last query is.

    Attributes:
        requests: of each piece, the index of its request in the server's batch.
        starts: one more than there are pieces: where the rows of each begin, and where they end.
        lengths: keys, those of the queries included.
        earlier, later: rows of the same request before, and behind, the piece.
        ends: whether a piece is of last rows.
    """

    requests: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]
    earlier: Sequence[int]
    later: Sequence[int]
    ends: Sequence[bool]

    @classmethod
    def of(
        cls, starts: Sequence[int], lengths: Sequence[int], last_rows: Callable[[int, int], int] = lambda *_: 0
    ) -> Pieces:
        """Take the last rows of requests apart.

        Args:
            starts: N + 1 positions in the rows of the batch, where each request's queries begin, and their end.
            lengths: N numbers of keys, those of the queries included.
            last_rows: how many of a request's queries are last rows, by its queries and keys.
        """
        pieces: list[tuple[int, int, int, int, bool]] = []
        for request, (keys, (begin, end)) in enumerate(zip(lengths, pairwise(starts), strict=False)):
            last = last_rows(end - begin, keys) if end > begin else 0
            first = end - begin - last
            if first or not last:
                pieces.append((request, keys - last, 0, last, False))
            if last:
                pieces.append((request, keys, first, 0, True))
        requests, piece_lengths, earlier, later, ends = zip(*pieces, strict=True) if pieces else ((),) * 5
        edges = [starts[request] + before for request, before in zip(requests, earlier, strict=True)]
        return cls(requests, [*edges, starts[-1]], piece_lengths, earlier, later, ends)

    @property
    def are_requests(self) -> bool:
        """Whether no request has two pieces."""
        return not any(self.earlier)

    @property
    def queries(self) -> list[int]:
        """Of each piece."""
        return [end - begin for begin, end in pairwise(self.starts)]


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
