"""Shapes of a call's sequences: batches, packed sequences, keys in pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import HeadConfig, LayerConfig, TileConfig
from .errors import InputError

KERNEL_TYPES = (torch.bfloat16, torch.float16)  # of q, k and v, in every kernel


@dataclass(frozen=True)
class CallShape:
    """Sizes of one call. For packed sequences `batch` is their number, `q_len` and `kv_len` are their maxima."""

    batch: int
    query_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int  # of q and k
    value_dim: int  # of v and the output, which differs from it where attention is latent (MLA)

    @property
    def widest(self) -> int:
        """The larger of the two head dims: what kernels must hold of both."""
        return max(self.head_dim, self.value_dim)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def offset(self) -> int:
        """The position of query 0."""
        return self.kv_len - self.q_len

    def is_little_for(self, tile: TileConfig) -> bool:
        """Return whether one sequence is less work than a whole prompt of the tile's `dense_below` keys.

        Never of a tail that is as much work as the least that was measured to win, `min_queries` behind `tail_keys`
        keys, and has as many keys as that tail or that prompt.
        """
        least = count_causal_pairs(tile.dense_below, tile.dense_below)
        # The fewer keys there are, the larger a share of them is computed: no work is enough for too few of them.
        if tile.tail_keys and self.offset >= self.q_len and self.kv_len >= min(tile.tail_keys, tile.dense_below):
            least = min(least, count_causal_pairs(tile.min_queries, tile.tail_keys))
        return self.causal_pairs < least

    @property
    def causal_pairs(self) -> int:
        """Query-key pairs of one head of one sequence that dense causal attention computes."""
        return count_causal_pairs(self.q_len, self.kv_len)

    def row_tiles(self, block_m: int) -> int:
        """Count the tiles of `block_m` rows that the queries of one head fill."""
        return -(-self.q_len // block_m)


def count_causal_pairs(queries: int, keys: int) -> int:
    """Count the query-key pairs of one head in which the last `queries` of a sequence of `keys` see their keys."""
    return queries * keys - queries * (queries - 1) // 2


def check_tensor(name: str, tensor: object) -> None:
    """Raise InputError, which names the argument, for what is no tensor or one without numbers."""
    if not isinstance(tensor, Tensor) or tensor.is_meta:
        what = "tensor on meta" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(f"{name} is a {what}: expected a torch tensor that holds numbers")


def _check_dimensions(q: Tensor, k: Tensor, v: Tensor, names: str) -> None:
    """Raise InputError unless q, k and v are tensors with dimensions of these names."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.ndim != names.count(",") + 1:
            raise InputError(f"{name} has {tensor.ndim} dimensions: expected [{names}]")


def call_shape(q: Tensor, k: Tensor, v: Tensor, kv_start: Tensor | None = None) -> CallShape:
    """Check the tensors of `s2o_attention` against each other and return their sizes.

    Raises InputError, which names the tensor that does not fit.
    """
    _check_dimensions(q, k, v, "batch, heads, length, head_dim")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise InputError(f"{name} is {tensor.dtype}: expected a floating point type of at least 16 bits")
        if tensor.dtype != q.dtype:
            raise InputError(f"{name} is {tensor.dtype} but q is {q.dtype}: convert them to one type")
        if tensor.device != q.device:
            raise InputError(f"{name} is on {tensor.device} but q on {q.device}: move them to one device")
        if 0 in tensor.shape:
            raise InputError(f"{name} is empty, shape {tuple(tensor.shape)}: every size must be at least 1")
    batch, query_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    if v.shape[:3] != k.shape[:3]:
        raise InputError(
            f"v has shape {tuple(v.shape)} but k has {tuple(k.shape)}: batch, heads and length must be equal"
        )
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise InputError(f"k has shape {tuple(k.shape)}: expected batch {batch} and head_dim {head_dim} as in q")
    if query_heads % kv_heads:
        raise InputError(f"{query_heads} query heads cannot share {kv_heads} KV heads: the first must be a multiple")
    if q_len > kv_len:
        raise InputError(f"q has {q_len} rows but there are {kv_len} keys: q_len may not exceed kv_len")
    if kv_start is not None:
        check_tensor("kv_start", kv_start)
        if kv_start.shape != (batch,) or kv_start.dtype not in (torch.int32, torch.int64):
            raise InputError(
                f"kv_start has shape {tuple(kv_start.shape)} and type {kv_start.dtype}: expected {batch} integers"
            )
        if kv_start.device != q.device:
            raise InputError(f"kv_start is on {kv_start.device} but q on {q.device}: move it")
        if q.device.type == "cpu" and (kv_start < 0).any():  # a GPU is not waited for
            raise InputError(f"kv_start is {kv_start.tolist()}: expected numbers of at least 0")
    return CallShape(batch, query_heads, kv_heads, q_len, kv_len, head_dim, v.shape[3])


class Starts(NamedTuple):
    """The begins of the sequences of a call: kernels take them together, and `list_sequences` makes their table."""

    kv_start: Tensor | None = None  # int32 or int64 [B], the first key of each sequence that counts; None for 0
    cu_q: Tensor | None = None  # int32 [N + 1], where the queries of packed sequences begin; None for a batch
    cu_k: Tensor | None = None  # int32 [N + 1], where their keys do


class Packed(NamedTuple):
    """The places of packed sequences, one behind another, among Tq queries and Tk keys."""

    cu_q: Tensor  # int32 [N + 1], where the queries of each sequence begin, from 0 to Tq
    cu_k: Tensor  # int32 [N + 1], where its keys do, from 0 to Tk
    max_q: int  # queries, at least as many as the longest sequence has
    max_k: int  # keys, likewise

    @property
    def starts(self) -> Starts:
        """The begins of the sequences."""
        return Starts(None, self.cu_q, self.cu_k)


def check_packed(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> CallShape:
    """Check the tensors of `s2o_attention_varlen` against each other and return their sizes.

    The contents of `cu_q` and `cu_k` are not read: that would wait for the device. Raises InputError, which names the
    tensor or the maximum that does not fit.
    """
    cu_q, cu_k, max_q, max_k = packed
    _check_dimensions(q, k, v, "total length, heads, head_dim")
    for name, edges in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        check_tensor(name, edges)
        if edges.ndim != 1 or len(edges) < 2 or edges.dtype != torch.int32 or edges.device != q.device:
            raise InputError(
                f"{name} is {edges.dtype} {tuple(edges.shape)} on {edges.device}: expected int32 [sequences + 1] on "
                f"{q.device}"
            )
    if len(cu_q) != len(cu_k):
        raise InputError(f"cu_seqlens_q has {len(cu_q)} entries, cu_seqlens_k {len(cu_k)}: they must be equal")
    if not 1 <= max_q <= max_k:
        raise InputError(
            f"max_seqlen_q is {max_q} and max_seqlen_k {max_k}: expected 1 <= max_seqlen_q <= max_seqlen_k"
        )
    queries, keys, values = (t[:1].transpose(0, 1)[None] for t in (q, k, v))
    shape_of_one = call_shape(queries, keys, values)
    if k.shape[0] != v.shape[0]:
        raise InputError(f"v has length {v.shape[0]} but k {k.shape[0]}: they must be equal")
    return replace(shape_of_one, batch=len(cu_q) - 1, q_len=max_q, kv_len=max_k)


def check_config(config: LayerConfig) -> LayerConfig:
    """Return the config itself. Raises InputError for what is none, and ConfigError for one that is illegal."""
    if not isinstance(config, LayerConfig):
        raise InputError(f"config is a {type(config).__name__}: expected a LayerConfig")
    return config.validate()


def check_heads(config: LayerConfig, shape: CallShape) -> None:
    """Raise InputError unless a layer's config has one entry for each query head of the call."""
    if config.num_heads != shape.query_heads:
        raise InputError(
            f"the config describes {config.num_heads} query heads but q has {shape.query_heads}: give one per head"
        )


def needs_gradients(*tensors: Tensor) -> bool:
    """Return whether torch would record an operation on these tensors for a backward pass."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def lay_out(tensor: Tensor, head_dim: int, packed: bool = False) -> Tensor:
    """Lay [B, H, L, D] out as kernels read it: the last dimension contiguous, filled with zeros to [B, H, L, head_dim].

    packed: the batch is one entry of packed sequences, expanded with stride 0; the result is expanded again.
    """
    if tensor.shape[3] == head_dim and tensor.stride(3) == 1:
        return tensor
    batch = tensor.shape[0]
    tensor = tensor[:1] if packed else tensor
    missing = head_dim - tensor.shape[3]
    return (F.pad(tensor, (0, missing)) if missing > 0 else tensor.contiguous()).expand(batch, -1, -1, -1)


class Sequence(NamedTuple):
    """A row of the table of sequences, the one form of batches, padded batches and packed sequences for host code."""

    number: int  # of the sequence, or of the first of several that are alike
    entries: slice  # of the batch, which these sequences lie in
    rows: range  # its queries that count, among the rows of q
    keys: range  # its keys that count, among the rows of k and v

    def take(self, tensor: Tensor, rows: range) -> Tensor:
        """Return a view of some rows of [B, H, L, D], or [B, H, L], in the entries of the sequence."""
        return tensor[self.entries, :, rows.start : rows.stop]


def list_sequences(starts: Starts, shape: CallShape) -> Iterator[Sequence]:
    """Yield the table of a call's sequences that have queries, one row for all of a batch without padding.

    For others this waits for the device.
    """
    kv_start, cu_q, cu_k = starts
    if cu_q is not None and cu_k is not None:
        for number, (rows, keys) in enumerate(zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)):
            if rows[0] < rows[1]:
                yield Sequence(number, slice(0, 1), range(*rows), range(*keys))
    elif kv_start is None:
        yield Sequence(0, slice(None), range(shape.q_len), range(shape.kv_len))
    else:
        for b, start in enumerate(kv_start.tolist()):  # a left-padded sequence is a shorter sequence
            row = max(0, start - shape.offset)
            if row < shape.q_len:
                yield Sequence(b, slice(b, b + 1), range(row, shape.q_len), range(start, shape.kv_len))


def find_window_start(first_position: Tensor, start: Tensor, head: HeadConfig, config: LayerConfig) -> Tensor:
    """Return the first key of the dense window of a segment: the layer's lookback before its first query, or earlier.

    The keys before the window, which are ranked, are a whole number of tiles. first_position: integers, of the
    segment's first query; start: integers that broadcast with them, the first key of the sequence that counts.
    """
    if head.mode == "dense":
        return start
    first = torch.maximum(first_position - config.lookback, start)
    return first - (first - start) % config.tile.block_n


def measure_density(
    visited: Tensor, config: LayerConfig, shape: CallShape, kv_start: Tensor | None = None,
    cu_q: Tensor | None = None, cu_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return query-key pairs computed over causal pairs, window included: float64 [Hq]; dense is 1.0.

    visited: integers [B, Hq, row tiles], the prefix keys that each tile of `block_m` rows computed; kv_start, cu_q,
    cu_k: as in `Starts`. For packed sequences this waits for the device.
    """
    zeros = torch.zeros(shape.batch, dtype=torch.int64, device=visited.device)  # no copy from the host
    start = zeros if kv_start is None else kv_start.to(visited.device)
    alike = [(visited, shape.q_len, shape.offset)]  # sequences of one length each
    if cu_q is not None and cu_k is not None:
        lengths = enumerate(zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True))
        alike = [(visited[b : b + 1], queries, keys - queries) for b, (queries, keys) in lengths]
    counts = [count_pairs(tiles, config, q_len, offset, start[: len(tiles)]) for tiles, q_len, offset in alike]
    computed, causal = (torch.stack(of_sequences).sum(0) for of_sequences in zip(*counts, strict=True))
    return computed / causal.clamp_min(1.0)


def count_pairs(visited: Tensor, config: LayerConfig, q_len: int, offset: int, start: Tensor) -> tuple[Tensor, Tensor]:
    """Count the pairs that each head computed [Hq], and the causal pairs of one head [], over sequences of one length.

    visited: as for `measure_density`; offset: the position of the first query; start: int64 [B]. Both are float64.
    """
    row = torch.arange(q_len, device=visited.device)
    position = row[None, :] + offset
    causal = (position - start[:, None] + 1).clamp_min(0)
    block = config.tile.block_m
    tiles = -(-q_len // block)
    rows = F.pad(causal > 0, (0, tiles * block - q_len)).view(len(causal), tiles, block).sum(2)  # of each tile
    prefix = (visited[:, :, :tiles] * rows[:, None]).sum((0, 2))
    dense = row >= config.find_first_dense_row(q_len)

    def window(head: HeadConfig) -> Tensor:
        first = find_window_start(row // head.segment * head.segment + offset, start[:, None], head, config)
        return (position - torch.where(dense, start[:, None], first) + 1).clamp_min(0).sum()

    unlike = {(head.mode, head.segment): head for head in config.heads}  # heads alike in both have the same window
    windows = {settings: window(head) for settings, head in unlike.items()}
    computed = prefix + torch.stack([windows[head.mode, head.segment] for head in config.heads])
    return computed.double(), causal.sum().double()


FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)  # of caches that are narrower than the queries
MAX_PAGE = 1024  # tokens


def find_page_obstacle(page_size: int) -> str | None:
    """Return the reason why pages of so many tokens are not supported; None if they are."""
    return f"pages have {page_size} tokens, more than {MAX_PAGE}" if page_size > MAX_PAGE else None


class PageTable(NamedTuple):
    """The places of the keys of N sequences among the rows of a cache, `PagedKeys.rows`, as kernels need them.

    Key t of sequence n is row `table[n, t >> shift] * rows + t % 2^shift`.
    """

    table: Tensor  # int32 [N, M], the pages of each sequence in their order
    shift: int  # log2 of the tokens of a page
    rows: int  # from one page to the next


@dataclass(frozen=True)
class PagedKeys:
    """The keys and values of N sequences, in pages of one cache.

    Token t of sequence n is token `t % page size` of page `block_table[n, t // page size]`.
    """

    k: Tensor  # [pages, page size, Hkv, D], the last dimension contiguous; the queries' type, or one of `FP8_TYPES`
    v: Tensor  # likewise
    block_table: Tensor  # int32 [N, M], the pages of each sequence in their order; those behind its last are ignored
    cu_k: Tensor  # int32 [N + 1], where the keys of each sequence begin once they are packed, from 0
    max_k: int  # keys, at least as many as the longest sequence has
    total_k: int  # keys, at least as many as all sequences have together
    k_scale: Tensor | None = None  # float32 [1] or [Hkv], what keys of an fp8 cache are multiplied by; None for 1
    v_scale: Tensor | None = None

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k.shape[1]

    @property
    def is_fp8(self) -> bool:
        """True if the cache is narrower than any query."""
        return self.k.dtype in FP8_TYPES

    @property
    def table(self) -> PageTable:
        """The places of the keys among `rows`, if pages allow that."""
        return PageTable(self.block_table, self.page_size.bit_length() - 1, self.k.stride(0) // self.k.stride(1))

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The whole cache as rows, [rows, Hkv, D], views of `k` and `v`; rows between pages are none of theirs."""
        pages, size, heads, head_dim = self.k.shape
        count = (pages - 1) * self.table.rows + size
        k, v = (cache.as_strided((count, heads, head_dim), cache.stride()[1:]) for cache in (self.k, self.v))
        return k, v

    def gathered(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Copy keys and values, packed one sequence behind another, in plain torch: [total_k, Hkv, D] in `dtype` each.

        kernels/pages.py is compared with it. Rows behind the last key repeat it; an fp8 cache is scaled in float32.
        """
        edges = self.cu_k
        token = torch.arange(self.total_k, device=self.k.device, dtype=torch.int32)
        sequence = torch.searchsorted(edges[1:].contiguous(), token, right=True).clamp_max(len(edges) - 2)
        position = torch.minimum(token - edges[sequence], edges[sequence + 1] - edges[sequence] - 1).clamp_min(0)
        page = self.block_table[sequence, position // self.page_size].long()
        slot = (position % self.page_size).long()

        def take(cache: Tensor, scale: Tensor | None) -> Tensor:
            if cache.dtype == dtype:
                return cache[page, slot]
            rows = cache.view(torch.uint8)[page, slot].view(cache.dtype).float()  # indexing knows no fp8
            return (rows if scale is None else rows * scale[:, None]).to(dtype)

        return take(self.k, self.k_scale), take(self.v, self.v_scale)

    def find_rows_obstacle(self, dtype: torch.dtype) -> str | None:
        """Return the reason why queries of this type cannot read the cache as rows, the same for k and v, or None."""
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

        dtype: of the queries. Raises InputError, which names the tensor or number that does not fit the others.
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
        if obstacle := find_page_obstacle(self.page_size):
            raise InputError(f"{obstacle}: use smaller ones")
        table, sequences, kv_heads = self.block_table, len(self.cu_k) - 1, self.k.shape[2]
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
            if scale is not None and not self.is_fp8:
                raise InputError(f"{name} is given but the cache is {self.k.dtype}: only 8-bit caches are scaled")
            sizes = ((1,), (kv_heads,))
            if scale is not None and (scale.dtype != torch.float32 or scale.shape not in sizes):
                raise InputError(f"{name} is {scale.dtype} {tuple(scale.shape)}: expected float32 [1] or [{kv_heads}]")
        return self


def make_packed_starts(lengths: Tensor) -> Tensor:
    """Return the begins of sequences of these lengths, packed one behind another: int32 [N + 1] from int32 [N]."""
    starts = lengths.new_zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    return starts
