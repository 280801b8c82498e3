"""The batch of a server: which of its rows S2O computes, and the arguments of the calls that do so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from ..dense_reason import DenseReason
from ..lengths import find_nearest, round_up_length
from ..sequences import make_packed_starts
from .fit import RankProfile, Request, ServedLayer


@dataclass(frozen=True)
class SplitRequests:
    """The requests of a batch, those with last rows (`LayerConfig.last_rows`) as two: the other rows, and the last."""

    indices: Sequence[int]  # of each, its request in the server's batch
    starts: Sequence[int]  # the first row of each, and behind the last one the end
    requests: Sequence[Request]  # each ends where its last query is
    earlier: Sequence[int]  # rows of the same server's request before each
    later: Sequence[int]  # and behind it

    @classmethod
    def from_batch(
        cls,
        starts: Sequence[int],
        lengths: Sequence[int],
        own_reasons: Sequence[DenseReason | None] = (),
        tokens_left: Sequence[int | None] = (),
        count_last_rows: Callable[[int, int, int | None], int] = lambda queries, keys, left: 0,
    ) -> SplitRequests:
        """Take the last rows of N server's requests apart.

        starts: N + 1 positions, the first row of each request, and the end; lengths: N numbers of keys, those of the
        queries included; own_reasons: `Request.own_reason` of each, empty if none has one; tokens_left: of its prompt
        behind its queries, None where unknown, empty if all are; count_last_rows: as `RankProfile` has it.
        """
        split: list[tuple[int, int, Request, int, int]] = []
        for index, (keys, (begin, end)) in enumerate(zip(lengths, pairwise(starts), strict=False)):
            reason = own_reasons[index] if own_reasons else None
            left = tokens_left[index] if tokens_left and end > begin else None
            last = count_last_rows(end - begin, keys, left) if end > begin else 0
            first, behind = end - begin - last, left or 0
            if first or not last:
                split.append((index, begin, Request(first, keys - last, reason, False, behind + last), 0, last))
            if last:
                split.append((index, begin + first, Request(last, keys, reason, True, behind), first, 0))
        indices, first_rows, requests, earlier, later = zip(*split, strict=True) if split else ((),) * 5
        return cls(indices, [*first_rows, starts[-1]], requests, earlier, later)

    @property
    def are_whole(self) -> bool:
        """True if no request of the server was split."""
        return not any(self.earlier)

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """The new tokens of each, and the keys of each."""
        return [request.queries for request in self.requests], [request.keys for request in self.requests]


ZEROS = -1  # in place of a slice's bucket


class BatchSlice(NamedTuple):
    """Neighbouring requests that are computed by one call."""

    first: int  # the requests `first .. last - 1` of the batch
    last: int
    begin: int  # their query rows `begin .. end - 1`
    end: int
    bucket: int | None  # the index of the profile's that all share; None for the stock backend's, or ZEROS
    max_q: int  # queries and keys of the longest
    max_k: int
    total_k: int  # keys of all

    @property
    def is_sparse(self) -> bool:
        """True if S2O computes the slice."""
        return self.bucket is not None and not self.is_zero

    @property
    def is_zero(self) -> bool:
        """True if nothing reads the slice, and zeros are its output."""
        return self.bucket == ZEROS

    @property
    def rows(self) -> slice:
        """The query rows."""
        return slice(self.begin, self.end)

    @property
    def requests(self) -> slice:
        """The requests."""
        return slice(self.first, self.last)


class BatchPlan(NamedTuple):
    """The slices of one batch in one layer."""

    slices: tuple[BatchSlice, ...]  # in order, together all of its requests; none where the stock backend has all rows
    dense_rows: Mapping[str, int]  # query rows that S2O does not compute, by reason


def plan_batch(
    split: SplitRequests, dense_reason: Callable[[Request], str | None], lengths: Sequence[int], max_keys: int
) -> BatchPlan:
    """Share the requests of a batch between S2O and the stock backend.

    Neighbours join one slice if both go to the stock backend, or if both are sparse, of the same one of the profile's
    buckets `lengths`, and have at most `max_keys` keys together; a single request may have more.
    """
    slices: list[BatchSlice] = []
    dense_rows: defaultdict[str, int] = defaultdict(int)
    first = max_q = max_k = total_k = 0  # of the slice that is being joined
    bucket: int | None = None
    starts = split.starts
    for index, request in enumerate(split.requests):
        reason = dense_reason(request) if request.queries > 0 else ""  # without queries: of a CUDA graph's padding
        if reason:
            dense_rows[reason] += request.queries
        own_bucket = ZEROS if reason is DenseReason.UNREAD else None
        if reason is None:
            own_bucket = find_nearest(lengths, request.length)
        if index > first and (own_bucket != bucket or (bucket is not None and total_k + request.keys > max_keys)):
            slices.append(BatchSlice(first, index, starts[first], starts[index], bucket, max_q, max_k, total_k))
            first, max_q, max_k, total_k = index, 0, 0, 0
        bucket = own_bucket
        max_q, max_k, total_k = max(max_q, request.queries), max(max_k, request.keys), total_k + request.keys
    if split.requests:
        slices.append(BatchSlice(first, len(split.requests), starts[first], starts[-1], bucket, max_q, max_k, total_k))
    return BatchPlan(tuple(slices) if any(span.bucket is not None for span in slices) else (), dense_rows)


def make_call(span: BatchSlice, edges: Tensor, seq_lens: Tensor, block_table: Tensor, page_size: int) -> dict[str, Any]:
    """Return the arguments of `s2o_attention_paged` for a slice: the same for all layers of a cache group.

    Its three numbers are bounds that slices of other lengths share (`round_bounds`), and with them their plans.

    Args:
        span: with requests that S2O computes.
        edges: int32 [n + 1], where the queries of its requests begin in the batch; copied.
        seq_lens: int32 [n], the keys of its requests.
        block_table: int32 [n, M], their pages.
        page_size: tokens of a page.
    """
    cu_q = edges - span.begin  # a copy: the server writes its next batch there
    max_q, max_k = round_bounds(span.max_q, span.max_k, block_table.shape[1] * page_size)
    return {
        "cu_q": cu_q,
        "cu_k": cu_q if span.total_k == span.end - span.begin else make_packed_starts(seq_lens),
        "seq_lens": seq_lens,
        "block_table": block_table.clone() if block_table.data_ptr() & 15 else block_table,  # plans want aligned
        "max_q": max_q,
        "max_k": max_k,
        "total_k": max_k if span.last == span.first + 1 else max(max_k, round_up_length(span.total_k)),
    }


def round_bounds(max_q: int, max_k: int, room: int) -> tuple[int, int]:
    """Round bounds of queries and keys up to ones that other slices share, at most `room`; equal only if they were."""
    behind = int(max_k > max_q)
    q_bound = min(round_up_length(max_q), room - behind)
    return q_bound, min(max(round_up_length(max_k), q_bound + behind), room)


class Batch:
    """A batch, some of whose requests S2O may compute; a sparse slice of it has at most `max_keys`.

    The parts of it that depend on a layer only through the requests that S2O computes are made once and kept: the plan,
    the tensors of sparse slices, and what `build_part` makes for the stock backend of the slices between them. `names`
    are the server's for its requests, as far as they are known.
    """

    names: Sequence[str | None] = ()

    def __init__(
        self, split: SplitRequests, fit: RankProfile, max_keys: int, build_part: Callable[[BatchSlice], Any]
    ) -> None:
        self.split, self.fit, self._max_keys, self._build_part = split, fit, max_keys, build_part
        self._plans: dict[object, BatchPlan] = {}
        self._calls: dict[BatchSlice, dict[str, Any]] = {}
        self._parts: dict[BatchSlice, Any] = {}

    @property
    def rows(self) -> int:
        """Query rows of all requests."""
        return self.split.starts[-1]

    def plan(self, layer: ServedLayer) -> BatchPlan:
        """Return the plan of a layer."""
        if (key := layer.plan_key) not in self._plans:
            dense_reason = partial(self.fit.dense_reason, layer=layer)
            self._plans[key] = plan_batch(self.split, dense_reason, self.fit.profile.lengths, self._max_keys)
        return self._plans[key]

    def get_call(self, span: BatchSlice, page_size: int) -> dict[str, Any]:
        """Return the arguments of a sparse slice, whose cache has pages of so many tokens."""
        if span not in self._calls:
            self._calls[span] = make_call(span, *self.get_tensors(span), page_size)
        return self._calls[span]

    def get_tensors(self, span: BatchSlice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the `edges`, `seq_lens` and `block_table` of `make_call`."""
        raise NotImplementedError

    def get_part(self, span: BatchSlice) -> Any:
        """Return the stock backend's data of a slice."""
        if span not in self._parts:
            self._parts[span] = self._build_part(span)
        return self._parts[span]
