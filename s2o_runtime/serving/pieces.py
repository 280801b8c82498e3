"""The requests of a server's batch, with the last rows of prompts apart: they answer, the stock backend has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


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
