"""The decision of a baseline: for every block of query rows the key blocks that it computes.

Key blocks come in two kinds. Among those whose keys all rows of a row block see, the baseline chooses. Those behind
them, which touch the diagonal, are always computed, with a mask. So every row sees at least one key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 24  # pairs of blocks whose scores are held at a time


@dataclass(frozen=True)
class Grid:
    """The places of a call's blocks; query i stands at position kv_len - q_len + i.

    Attributes:
        q_len, kv_len: queries and keys of a sequence.
        block_m, block_n: rows and keys of a block.
        key_unit: keys are permuted inside ranges of this size; a block where they are not.
        packed: query heads whose rows share a row block: row r is query r // packed of head r % packed among them. A
            selection then has as many heads as there are such groups.
    """

    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    key_unit: int
    packed: int = 1

    @classmethod
    def plain(cls, q: Tensor, k: Tensor, block_m: int, block_n: int, packed: bool = False) -> Grid:
        """The grid of q [B, Hq, Lq, D] and k [B, Hkv, Lk, D] where nothing is permuted.

        With `packed` the query heads of a KV head share row blocks.
        """
        group = q.shape[1] // k.shape[1] if packed else 1
        return cls(q.shape[2], k.shape[2], block_m, block_n, block_n, group)

    @property
    def offset(self) -> int:
        """The position of query 0."""
        return self.kv_len - self.q_len

    @property
    def rows(self) -> int:
        """Row blocks."""
        return -(-self.q_len * self.packed // self.block_m)

    @property
    def columns(self) -> int:
        """Key blocks."""
        return -(-self.kv_len // self.block_n)

    def first_row(self, device: torch.device) -> Tensor:
        """The first row of each row block, int64 [rows]."""
        return torch.arange(0, self.rows * self.block_m, self.block_m, device=device)

    def full(self, device: torch.device) -> Tensor:
        """Return how many key blocks, from the first on, every row of a row block sees whole: int64 [rows]."""
        first_position = self.first_row(device) // self.packed + self.offset
        return (first_position + 1) // self.key_unit * (self.key_unit // self.block_n)

    def visible(self, device: torch.device) -> Tensor:
        """Return how many key blocks, from the first on, any row of a row block sees a part of: int64 [rows]."""
        last_row = self.first_row(device) + self.block_m - 1
        last_position = (last_row // self.packed + self.offset).clamp_max(self.kv_len - 1)
        units = last_position // self.key_unit + 1
        return (units * (self.key_unit // self.block_n)).clamp_max(self.columns)

    def rows_of(self, device: torch.device) -> Tensor:
        """Return how many rows each row block has, int64 [rows]."""
        return (self.q_len * self.packed - self.first_row(device)).clamp_max(self.block_m)


@dataclass(frozen=True)
class Selection:
    """The key blocks that each row block of a layer computes.

    Attributes:
        grid: where the blocks lie. H is Hq, or Hq / packed.
        blocks: int32 [B, H, row blocks, capacity], the key blocks of each row block, ascending.
        counts: int32 [B, H, row blocks], how many entries of `blocks` are valid.
        key_order: int32 [B, Hkv, Lk], the keys in permuted order; None where they are not permuted.
        keys: [B, Hkv, Lk, D], k in that order.
        pruned: bool [B, H, row blocks, key blocks], True for blocks that all rows see and that are not computed; the
            mean of such a block stands for each of its keys. None where nothing does.
        mean_keys: [B, Hkv, key blocks, D] in the type of k, for `pruned`.
    """

    grid: Grid
    blocks: Tensor
    counts: Tensor
    key_order: Tensor | None = None
    keys: Tensor | None = None
    pruned: Tensor | None = None
    mean_keys: Tensor | None = None


def select_blocks(
    q: Tensor, grid: Grid, wanted: Callable[[slice], Tensor], mean_keys: Tensor | None = None
) -> Selection:
    """The selection of the blocks that a baseline wants, and of those that touch the diagonal.

    Args:
        q: [B, Hq, Lq, D].
        wanted: called with a slice of n of the Hq / packed heads; returns bool [B, n, row blocks, key blocks]. What it
            says of blocks that touch the diagonal, or that no row sees, is ignored.
        mean_keys: of the selection, which then says what is pruned.
    """
    batch, heads, device = q.shape[0], q.shape[1] // grid.packed, q.device
    column = torch.arange(grid.columns, device=device)
    boundary = column >= grid.full(device)[:, None]
    visible = column < grid.visible(device)[:, None]
    # one entry more than there are blocks: what is not on a list is written there
    blocks = torch.zeros(batch, heads, grid.rows, grid.columns + 1, dtype=torch.int32, device=device)
    counts = torch.zeros(batch, heads, grid.rows, dtype=torch.int32, device=device)
    shape = batch, heads, grid.rows, grid.columns
    pruned = None if mean_keys is None else torch.empty(shape, dtype=torch.bool, device=device)
    for part in parts(heads, batch * grid.rows * grid.columns):
        mask = wanted(part).logical_or_(boundary).logical_and_(visible)
        if pruned is not None:
            pruned[:, part] = visible & ~mask
        rank = mask.cumsum(-1, dtype=torch.int32)
        counts[:, part] = rank[..., -1]
        entry = torch.where(mask, rank - 1, grid.columns).long()
        blocks[:, part].scatter_(-1, entry, column.int().expand(mask.shape))
    return Selection(grid, blocks[..., :-1], counts, pruned=pruned, mean_keys=mean_keys)


def top_share(weights: Tensor, keep: float, candidates: Tensor) -> Tensor:
    """The fewest entries of each row that together hold the share `keep` of its sum, heaviest first.

    The entry that reaches the share belongs to it; entries of equal weight come in any order.

    Args:
        weights: [..., C], at least 0, and 0 where `candidates` is False.
        keep: the share, from 0 to 1; 1 keeps all candidates.
        candidates: bool that broadcasts to `weights`.

    Returns:
        bool like `weights`.
    """
    if keep >= 1.0:
        return candidates.expand_as(weights).clone()
    falling, index = weights.sort(-1, descending=True)
    reached = falling.cumsum(-1)
    kept = reached - falling < keep * reached[..., -1:]
    return torch.zeros_like(kept).scatter_(-1, index, kept)


def parts(n: int, elements: int) -> Iterator[slice]:
    """Cut n heads into slices so that `elements` for each head stay below `CHUNK` in total, or into single heads."""
    step = max(1, CHUNK // max(1, elements))
    for begin in range(0, n, step):
        yield slice(begin, min(begin + step, n))


def of_query_heads(x: Tensor, group: int, part: slice) -> Tensor:
    """Return what query heads read of x [B, Hkv, ...], whose KV heads are each read by `group` of them: [B, n, ...]."""
    return x.repeat_interleave(group, 1)[:, part]


def split(x: Tensor, dim: int, size: int) -> Tensor:
    """A view of x with dimension `dim`, a multiple of `size`, as two: how many, and `size`."""
    return x.view(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])


def score_type(dtype: torch.dtype) -> torch.dtype:
    """The type that scores are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
