"""What a baseline decided: for every block of query rows the key blocks, and single keys, that it computes.

Key blocks come in two kinds. Those whose keys all rows of a row block see are the method's to choose. Those behind
them, which touch the diagonal, are always computed, with a mask. So a row never sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 24  # scores of so many pairs of blocks are held at a time
SKIP_ROWS = 64  # rows and keys that the skip of the product with v decides about together, on every GPU
SKIP_KEYS = 64


@dataclass(frozen=True)
class Grid:
    """Where the blocks of a call lie: query i stands at position kv_len - q_len + i.

    row_unit, key_unit: rows may trade places inside so many, and keys; a block where nothing is permuted.
    """

    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    row_unit: int
    key_unit: int

    @classmethod
    def plain(cls, q: Tensor, k: Tensor, block_m: int, block_n: int) -> Grid:
        return cls(q.shape[2], k.shape[2], block_m, block_n, block_m, block_n)

    @property
    def offset(self) -> int:
        return self.kv_len - self.q_len

    @property
    def rows(self) -> int:
        """Row blocks."""
        return -(-self.q_len // self.block_m)

    @property
    def columns(self) -> int:
        """Key blocks."""
        return -(-self.kv_len // self.block_n)

    def first_position(self, device: torch.device) -> Tensor:
        """The smallest position a row of each row block can have, int64 [rows]."""
        row = torch.arange(0, self.rows * self.block_m, self.block_m, device=device)
        return row // self.row_unit * self.row_unit + self.offset

    def last_position(self, device: torch.device) -> Tensor:
        """The largest one."""
        return (self.first_position(device) + self.row_unit).clamp_max(self.kv_len) - 1

    def full(self, device: torch.device) -> Tensor:
        """How many key blocks, from the first on, every row of a row block sees whole: int64 [rows]."""
        return (self.first_position(device) + 1) // self.key_unit * (self.key_unit // self.block_n)

    def visible(self, device: torch.device) -> Tensor:
        """How many key blocks, from the first on, any row of a row block sees a part of: int64 [rows]."""
        units = self.last_position(device) // self.key_unit + 1
        return (units * (self.key_unit // self.block_n)).clamp_max(self.columns)

    def rows_of(self, device: torch.device) -> Tensor:
        """The rows of each row block, int64 [rows]."""
        row = torch.arange(0, self.rows * self.block_m, self.block_m, device=device)
        return (self.q_len - row).clamp_max(self.block_m)


class Tally(NamedTuple):
    """How many key blocks, and single keys besides, each row block computes: int32 [B, n, row blocks] each."""

    grid: Grid
    counts: Tensor
    column_counts: Tensor | None

    @property
    def computed(self) -> Tensor:
        """Query-key pairs computed, float64 [n]; the diagonal counts its causal pairs only."""
        grid, device = self.grid, self.counts.device
        full = grid.full(device)
        chosen = (self.counts - (grid.visible(device) - full)) * grid.block_n
        if self.column_counts is not None:
            chosen = chosen + self.column_counts
        left_out = full * grid.block_n - chosen  # of the keys that all rows of a block see
        return self.causal - (left_out * grid.rows_of(device)).double().sum((0, 2))

    @property
    def causal(self) -> float:
        """All causal pairs of one head."""
        last, first = self.grid.kv_len, self.grid.offset
        return len(self.counts) * (last * (last + 1) - first * (first + 1)) / 2


@dataclass(frozen=True)
class Selection:
    """The key blocks that each row block of some query heads computes.

    heads: the query heads, in the order of all tensors' second dimension; kv_heads: those they read, ascending;
    slots: which of these each head reads.
    blocks: int32 [B, n, row blocks, capacity], ascending; counts: int32 [B, n, row blocks], how many of them count.
    columns, column_counts: int32 [B, n, row blocks, .], single keys besides, ascending.
    key_order: int32 [B, kv_heads, Lk], which key stands at each place; keys: k in that order.
    row_order: int32 [B, n, Lq], which query stands in each row.
    skip: leave out the product with v where all scores are below their row's maximum by this (negative).
    """

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    slots: tuple[int, ...]
    grid: Grid
    blocks: Tensor
    counts: Tensor
    columns: Tensor | None = None
    column_counts: Tensor | None = None
    key_order: Tensor | None = None
    keys: Tensor | None = None
    row_order: Tensor | None = None
    skip: float | None = None

    @property
    def block_m(self) -> int:
        return self.grid.block_m

    @property
    def block_n(self) -> int:
        return self.grid.block_n

    @property
    def tally(self) -> Tally:
        """What its density follows from, without the lists."""
        return Tally(self.grid, self.counts, self.column_counts)

    @property
    def density(self) -> Tensor:
        """Query-key pairs computed over causal pairs, float64 [n]; 1.0 is dense."""
        return self.tally.computed / self.tally.causal


def select_blocks(
    q: Tensor, k: Tensor, grid: Grid, heads: Sequence[int], wanted: Callable[[range], Tensor]
) -> Selection:
    """Lists from masks: `wanted` gives bool [B, len(part), row blocks, key blocks] for a part of `heads`.

    What the diagonal touches is added, what nobody sees is taken away.
    """
    batch, device = q.shape[0], q.device
    column = torch.arange(grid.columns, device=device)
    boundary = column >= grid.full(device)[:, None]
    visible = column < grid.visible(device)[:, None]
    blocks, counts = _empty_lists(batch, len(heads), grid.rows, grid.columns, device)
    for part in parts(len(heads), batch * grid.rows * grid.columns):
        mask = wanted(part).logical_or_(boundary).logical_and_(visible)
        _write_list(mask, column.int(), blocks[:, as_slice(part)], counts[:, as_slice(part)])
    kv_heads, slots = read_heads(heads, q.shape[1] // k.shape[1])
    return Selection(tuple(heads), kv_heads, slots, grid, blocks[..., :-1], counts)


def with_columns(chosen: Selection, columns: Tensor) -> Selection:
    """Add single keys, int64 [B, n, V] ascending, for the rows that see them all and do not compute their block."""
    grid, device = chosen.grid, columns.device
    batch, n, width = columns.shape
    keys, counts = _empty_lists(batch, n, grid.rows, width, device)
    edge = (grid.full(device) * grid.block_n)[:, None]
    place = torch.arange(grid.columns, device=device)
    for part in parts(n, batch * grid.rows * max(width, grid.columns)):
        at = as_slice(part)
        listed = chosen.blocks[:, at].long().masked_fill(place >= chosen.counts[:, at, :, None], grid.columns)
        computed = torch.zeros(*listed.shape[:3], grid.columns + 1, dtype=torch.bool, device=device)
        computed.scatter_(-1, listed, True)
        column = columns[:, at, None].expand(-1, -1, grid.rows, -1)
        mask = ~computed.gather(-1, column // grid.block_n) & (column < edge)
        _write_list(mask, column.int(), keys[:, at], counts[:, at])
    return replace(chosen, columns=keys[..., :-1], column_counts=counts)


def top_share(weights: Tensor, keep: float, candidates: Tensor) -> Tensor:
    """The fewest, heaviest entries of each row that together hold `keep` of its sum: bool like `weights`.

    weights: at least 0, and 0 where `candidates`, bool that broadcasts, is False. The entry that reaches the share
    belongs to it; entries of equal weight come in any order.
    """
    if keep >= 1.0:
        return candidates.expand_as(weights).clone()
    falling, index = weights.sort(-1, descending=True)
    reached = falling.cumsum(-1)
    kept = reached - falling < keep * reached[..., -1:]
    return torch.zeros_like(kept).scatter_(-1, index, kept)


def all_heads(q: Tensor, heads: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(range(q.shape[1])) if heads is None else tuple(heads)


def read_heads(heads: Sequence[int], group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The KV heads that query heads read, ascending, and which of these each reads."""
    kv_heads = tuple(sorted({head // group for head in heads}))
    return kv_heads, tuple(kv_heads.index(head // group) for head in heads)


def take(x: Tensor, heads: Sequence[int], dim: int = 1) -> Tensor:
    """Some heads of x; a view where they lie together."""
    first = heads[0]
    if list(heads) == list(range(first, first + len(heads))):
        return x.narrow(dim, first, len(heads))
    return x.index_select(dim, index_table(tuple(heads), x.device))


@lru_cache(maxsize=4096)
def index_table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 numbers on the device, copied there once."""
    return torch.tensor(numbers, dtype=torch.int32).to(device)


def parts(n: int, elements: int) -> Iterator[range]:
    """Cut n heads so that `elements` of each stay below `CHUNK`, or one by one."""
    step = max(1, CHUNK // max(1, elements))
    for begin in range(0, n, step):
        yield range(begin, min(begin + step, n))


def as_slice(part: range) -> slice:
    return slice(part.start, part.stop)


def split(x: Tensor, dim: int, size: int) -> Tensor:
    """A view of x with dimension `dim`, a multiple of `size`, as two: how many, and `size`."""
    return x.view(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that scores are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _empty_lists(batch: int, n: int, rows: int, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # one entry more than needed, where everything lands that is not on the list
    lists = torch.zeros(batch, n, rows, capacity + 1, dtype=torch.int32, device=device)
    return lists, torch.zeros(batch, n, rows, dtype=torch.int32, device=device)


def _write_list(mask: Tensor, values: Tensor, lists: Tensor, counts: Tensor) -> None:
    """The values [.., C] under the mask [.., C], in order, into lists [.., C + 1]; their number into counts [..]."""
    if mask.shape[-1] == 0:
        return
    place = mask.cumsum(-1, dtype=torch.int32)
    counts.copy_(place[..., -1])
    target = torch.where(mask, place - 1, mask.shape[-1]).long()
    lists.scatter_(-1, target, values.expand(mask.shape))
