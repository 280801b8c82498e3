"""Keys and values that lie in the pages of a cache, as servers keep them: what describes them, and which are legal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from s2o_runtime.errors import InputError

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)  # of caches that are narrower than the queries
MAX_PAGE = 1024  # tokens


def page_obstacle(page_size: int) -> str | None:
    """Why pages of so many tokens are not supported; None if they are."""
    return f"pages have {page_size} tokens, more than {MAX_PAGE}" if page_size > MAX_PAGE else None


class PageTable(NamedTuple):
    """Where the keys of N sequences are among the rows of a cache, `PagedKeys.rows`: what kernels need of that.

    Key t of sequence n is row `table[n, t >> shift] * rows + t % 2^shift`.

    Attributes:
        table: int32 [N, M], the pages of each sequence in their order.
        shift: log2 of the tokens of a page.
        rows: from one page to the next.
    """

    table: Tensor
    shift: int
    rows: int


@dataclass(frozen=True)
class PagedKeys:
    """The keys and values of N sequences, in pages of one cache.

    Token t of sequence n is token `t % page size` of page `block_table[n, t // page size]`.

    Attributes:
        k, v: [pages, page size, Hkv, D], any strides with the last dimension contiguous; the type of the queries, or
            one of `FP8_TYPES`.
        block_table: int32 [N, M], the pages of each sequence in their order; entries behind its last page are ignored.
        cu_k: int32 [N + 1], where the keys of each sequence begin once they are packed, from 0.
        max_k: keys, at least as many as the longest sequence has.
        total_k: keys, at least as many as all sequences have together.
        k_scale, v_scale: float32 [1] or [Hkv], what keys and values of an fp8 cache are multiplied by; None for 1.
    """

    k: Tensor
    v: Tensor
    block_table: Tensor
    cu_k: Tensor
    max_k: int
    total_k: int
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self.k.shape[2]

    @property
    def is_fp8(self) -> bool:
        """Whether the cache is narrower than any query."""
        return self.k.dtype in FP8_TYPES

    @property
    def table(self) -> PageTable:
        """Where the keys are among `rows`, where pages allow that."""
        return PageTable(self.block_table, self.page_size.bit_length() - 1, self.k.stride(0) // self.k.stride(1))

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The whole cache as rows, [rows, Hkv, D], views of `k` and `v`; rows between pages are none of theirs."""
        pages, size, heads, head_dim = self.k.shape
        count = (pages - 1) * self.table.rows + size
        k, v = (cache.as_strided((count, heads, head_dim), cache.stride()[1:]) for cache in (self.k, self.v))
        return k, v

    def gathered(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A copy of keys and values, packed one sequence behind another, in plain torch: [total_k, Hkv, D] each.

        It is what the kernel in kernels/pages.py is compared with. Rows behind the last key repeat it.

        Args:
            dtype: of the result; an fp8 cache is scaled in float32 and rounded to it.
        """
        edges = self.cu_k
        token = torch.arange(self.total_k, device=self.k.device, dtype=torch.int32)
        sequence = torch.searchsorted(edges[1:].contiguous(), token, right=True).clamp_max(len(edges) - 2)
        position = torch.minimum(token - edges[sequence], edges[sequence + 1] - edges[sequence] - 1).clamp_min(0)
        page = self.block_table[sequence, position // self.page_size].long()
        slot = (position % self.page_size).long()
        k, v = (_rows(cache, page, slot) for cache in (self.k, self.v))
        return _scaled(k, self.k_scale, dtype), _scaled(v, self.v_scale, dtype)

    def rows_obstacle(self, dtype: torch.dtype) -> str | None:
        """Why the cache cannot be read as rows, the same for keys and values; None if it can.

        Args:
            dtype: of the queries.
        """
        if self.k.dtype != dtype:
            return f"the cache is {self.k.dtype}"
        if self.page_size & (self.page_size - 1):
            return f"pages have {self.page_size} tokens, not a power of two"
        apart = [divmod(cache.stride(0), cache.stride(1) or 1) for cache in (self.k, self.v)]
        if apart[0] != apart[1] or apart[0][1] or apart[0][0] < self.page_size:
            return (
                f"the pages of keys and of values, strides {self.k.stride()} and {self.v.stride()}, are not alike rows"
            )
        return None

    def validate(self, dtype: torch.dtype) -> PagedKeys:
        """Return the pages themselves. What `block_table` and `cu_k` hold is not read: that would wait for the device.

        Args:
            dtype: of the queries.

        Raises:
            InputError: a tensor or a number does not fit the others; the sentence names it.
        """
        for name, cache in (("k_cache", self.k), ("v_cache", self.v)):
            if cache.ndim != 4 or cache.stride(3) != 1 or 0 in cache.shape:
                raise InputError(
                    f"{name} has shape {tuple(cache.shape)} and strides {cache.stride()}: expected [pages, page size, "
                    "KV heads, head_dim] with the last dimension contiguous"
                )
            if cache.dtype not in (dtype, *FP8_TYPES):
                names = ", ".join(str(accepted) for accepted in (dtype, *FP8_TYPES))
                raise InputError(f"{name} is {cache.dtype}: expected {names}, the queries' type or one of 8 bits")
            if cache.device != self.block_table.device:
                raise InputError(f"{name} is on {cache.device} but block_table on {self.block_table.device}: move it")
        if self.k.shape != self.v.shape or self.k.dtype != self.v.dtype:
            raise InputError(
                f"v_cache is {self.v.dtype} {tuple(self.v.shape)} but k_cache {self.k.dtype} {tuple(self.k.shape)}: "
                "they must be equal"
            )
        if obstacle := page_obstacle(self.page_size):
            raise InputError(f"{obstacle}: use smaller ones")
        table, sequences = self.block_table, len(self.cu_k) - 1
        if table.ndim != 2 or len(table) != sequences or table.dtype != torch.int32 or table.stride(1) != 1:
            raise InputError(
                f"block_table is {table.dtype} {tuple(table.shape)}: expected int32 [{sequences}, pages] with "
                "contiguous rows"
            )
        if self.max_k > table.shape[1] * self.page_size:
            raise InputError(
                f"max_k is {self.max_k} but a row of block_table has {table.shape[1]} pages of {self.page_size}: give "
                "every sequence's pages"
            )
        if not self.max_k <= self.total_k:
            raise InputError(f"total_k is {self.total_k} but max_k {self.max_k}: expected all keys together")
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale is None:
                continue
            if not self.is_fp8:
                raise InputError(f"{name} is given but the cache is {self.k.dtype}: only 8-bit caches are scaled")
            if scale.dtype != torch.float32 or scale.ndim != 1 or len(scale) not in (1, self.kv_heads):
                raise InputError(
                    f"{name} is {scale.dtype} {tuple(scale.shape)}: expected float32 [1] or [{self.kv_heads}]"
                )
        return self


def _rows(cache: Tensor, page: Tensor, slot: Tensor) -> Tensor:
    """[total_k, Hkv, D] of a cache; indexing knows no fp8, so such rows are moved as bytes."""
    if cache.dtype.itemsize > 1:
        return cache[page, slot]
    return cache.view(torch.uint8)[page, slot].view(cache.dtype)


def _scaled(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if rows.dtype == dtype:
        return rows
    return (rows.float() if scale is None else rows.float() * scale[:, None]).to(dtype)


def packed_starts(lengths: Tensor) -> Tensor:
    """Where sequences of these lengths begin, packed one behind another: int32 [N + 1] from int32 [N]."""
    starts = lengths.new_zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    return starts
