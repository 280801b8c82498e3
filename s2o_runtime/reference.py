"""S2O attention in plain torch: Algorithms 2 and 3 of the paper, made definite; Algorithm 1 is in `ranking.py`.

This is the oracle that the kernels are tested against, and the CPU backend. It works in float64 for float64
inputs and in float32 otherwise, for any length, and never imports the kernels. The row tiles of a segment
share one order, so they are computed together: `T` is the number of row tiles still running.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.ranking import Ranking, part_means, rank
from s2o_runtime.shapes import CallShape, call_shape, check_heads, window_start

DENSE_ROWS = 512  # rows of a dense head computed together; bounds memory, changes nothing


RankingOf = Callable[[int, int, int], Ranking]


class Attended(NamedTuple):
    """What S2O attention gives."""

    out: Tensor  # [B, Hq, Lq, D] in q's dtype; rows before `kv_start` are zero
    visited: Tensor  # int32 [B, Hq, row tiles], the prefix keys each row tile computed
    lse: Tensor  # [B, Hq, Lq], log-sum-exp of a row's scores, as computed and estimated; -inf before `kv_start`


class State(NamedTuple):
    """Online softmax of some rows: running maximum m, sum l, and weighted values acc."""

    m: Tensor  # [T, BM]
    l: Tensor  # [T, BM]
    acc: Tensor  # [T, BM, D]

    def output(self) -> Tensor:
        """[T, BM, D]; rows that saw no key are zero."""
        return torch.where(self.l[..., None] > 0, self.acc / self.l[..., None], 0.0)

    def at(self, tiles: Tensor) -> State:
        return State(self.m[tiles], self.l[tiles], self.acc[tiles])


def s2o_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    *,
    scale: float | None = None,
    kv_start: Tensor | None = None,
    paper_literal: bool = False,
    ranking_of: RankingOf | None = None,
) -> Attended:
    """S2O attention by the book.

    q: [B, Hq, Lq, D]; k, v: [B, Hkv, Lk, D], any floating dtype; kv_start: [B], the first key that counts.
    paper_literal: what the paper's pseudocode does and the product does not: queries are permuted inside
        their segment by the mean key of segment 0, every tile is a stop check, and the tile that stops the
        traversal is thrown away.
    ranking_of: a ranking to follow instead of Algorithm 1's: called with the sequence, the query head and the segment.
    """
    shape = call_shape(q, k, v, kv_start)
    check_heads(config.validate(), shape)
    scale = shape.head_dim**-0.5 if scale is None else scale
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    starts = torch.zeros(shape.batch, dtype=torch.int64) if kv_start is None else kv_start.cpu()
    out = torch.zeros_like(q)
    visited = torch.zeros(
        shape.batch, shape.query_heads, shape.row_tiles(config.tile.block_m), dtype=torch.int32, device=q.device
    )
    lse = torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
    for b in range(shape.batch):
        for h, head in enumerate(config.heads):
            if head.mode == "blocks":
                continue
            keys, values = k[b, h // shape.group].to(dtype), v[b, h // shape.group].to(dtype)
            rows = q[b, h].to(dtype) * scale
            rankings = None if ranking_of is None else partial(ranking_of, b, h)
            out[b, h], visited[b, h], lse[b, h] = _one_head(
                rows, keys, values, head, config, shape, starts[b], paper_literal, rankings
            )
    return Attended(out, visited, lse)


def _one_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head: HeadConfig,
    config: LayerConfig,
    shape: CallShape,
    kv_start: Tensor,
    paper_literal: bool,
    ranking_of: Callable[[int], Ranking] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One query head of one sequence: q [Lq, D] already scaled, k, v [Lk, D]."""
    start = int(kv_start)
    tile = config.tile
    out = torch.zeros_like(q)
    visited = torch.zeros(shape.row_tiles(tile.block_m), dtype=torch.int32, device=q.device)
    lse = q.new_full((shape.q_len,), float("-inf"))
    segment = DENSE_ROWS if head.mode == "dense" else head.segment
    guide = k[start : start + segment].mean(0)
    for begin in range(0, shape.q_len, segment):
        end = min(begin + segment, shape.q_len)
        if shape.offset + end <= start:
            continue  # padding only
        first = int(window_start(torch.tensor(begin + shape.offset), kv_start, head, tile))
        rows = torch.arange(begin, end, device=q.device)
        if paper_literal:
            rows = rows[query_order(q[begin:end], guide)]
        tiles = _row_tiles(rows, tile.block_m)
        real = (tiles >= 0) & (tiles + shape.offset >= start)
        position = torch.where(real, tiles + shape.offset, -1)
        queries = q[tiles.clamp_min(0)]
        last = shape.offset + end
        state = dense_window(queries, k[first:last], v[first:last], position - first)
        if first > start:
            if ranking_of is None:
                parts = part_means(q[begin:end], segment // head.representatives, shape.offset + begin, start)
                ranking = rank(parts, k[start:first], v[start:first], config.grain, start)
            else:
                ranking = ranking_of(begin // segment)
            state, keys_visited = gathered_prefix(queries, k, v, state, ranking, head, config, real, paper_literal)
            visited[begin // tile.block_m : begin // tile.block_m + len(tiles)] = keys_visited.int()
        out[tiles[real]] = state.output()[real]
        lse[tiles[real]] = (state.m + state.l.log())[real]
    return out, visited, lse


def _row_tiles(rows: Tensor, block_m: int) -> Tensor:
    """Rows of a segment cut into tiles [T, BM], the last one filled with -1."""
    padding = -len(rows) % block_m
    return torch.nn.functional.pad(rows, (0, padding), value=-1).view(-1, block_m)


def query_order(q: Tensor, guide: Tensor) -> Tensor:
    """Algorithm 1, lines 12-13: a segment's queries [S, D] by their score with the guide key [D], best first."""
    return (q @ guide).argsort(descending=True, stable=True)


def dense_window(q: Tensor, k: Tensor, v: Tensor, last_key: Tensor) -> State:
    """Algorithm 2: causal attention inside a segment.

    q: [T, BM, D] scaled; k, v: [W, D] or [T, W, D]; last_key: [T, BM], the last key a row may see, negative for none.
    """
    scores = q @ k.mT
    hidden = torch.arange(k.shape[-2], device=k.device) > last_key[..., None]
    scores = scores.masked_fill(hidden, float("-inf"))
    m = scores.amax(-1)
    weights = torch.where(hidden, 0.0, (scores - m[..., None]).exp())
    return State(m, weights.sum(-1), weights @ v)


def absorb(state: State, q: Tensor, k: Tensor, v: Tensor) -> State:
    """Add keys [N, D] that every row may see to the online softmax (Algorithm 3, line 11)."""
    scores = q @ k.T
    m = torch.maximum(state.m, scores.amax(-1))
    weights = (scores - m[..., None]).exp()
    decay = (state.m - m).exp()
    return State(m, state.l * decay + weights.sum(-1), state.acc * decay[..., None] + weights @ v)


def gathered_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    ranking: Ranking,
    head: HeadConfig,
    config: LayerConfig,
    real: Tensor,
    paper_literal: bool = False,
) -> tuple[State, Tensor]:
    """Algorithm 3: visit the prefix in order and stop when a chunk's gain is small.

    q: [T, BM, D] scaled; k, v: [Lk, D]; real: [T, BM], rows that count.
    Returns the state, with the tail if the head has one, and the keys each row tile computed [T].
    """
    order = ranking.order
    running = real.any(-1).nonzero()[:, 0]
    visited = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    result = State(*(part.clone() for part in state))
    stride = config.tile.block_n if paper_literal else config.tile.stride
    for begin in range(0, len(order), stride):
        if not len(running):
            break
        end = min(begin + stride, len(order))
        before = result.at(running)
        keys = order[begin:end]
        after = absorb(before, q[running], k[keys], v[keys])
        gain = tile_gain(row_gain(before, after), real[running], config)
        stop = stops(gain, begin, end, len(order), head, config.tile)
        kept = ~stop if paper_literal else torch.ones_like(stop)
        if head.tail and not paper_literal:
            estimated = with_tail(before, after, ranking, begin, end)
            after = State(*(torch.where(_like(stop, new), new, old) for old, new in zip(after, estimated, strict=True)))
        for part, new in zip(result, after, strict=True):
            part[running[kept]] = new[kept]
        visited[running] += end - begin
        running = running[~stop]
    return result, visited


def with_tail(before: State, after: State, ranking: Ranking, begin: int, end: int) -> State:
    """The state `after` keys begin .. end of the order, plus an estimate of what comes behind them.

    The ranking says how much heavier the rest is than this chunk, and which values it has; the row itself says how
    much the chunk brought. The rest counts at most as if every key of it brought as much as the chunk's keys did.
    """
    mass, values = ranking.rest(end)
    chunk = ranking.rest(begin)[0] - mass
    most = (len(ranking.order) - end) / (end - begin)
    times = torch.where(chunk * most > mass, mass / chunk, most)
    brought = after.l - before.l * (before.m - after.m).exp()
    added = torch.where(mass > 0, times, 0.0) * brought
    mean = values / torch.where(mass > 0, mass, 1.0)
    return State(after.m, after.l + added, after.acc + added[..., None] * mean)


def _like(flags: Tensor, part: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (part.ndim - 1))


def row_gain(before: State, after: State) -> Tensor:
    """What the keys between two states added to l, relative to l (Algorithm 3, line 13)."""
    old = before.l * (before.m - after.m).exp()
    return (after.l - old) / old


def tile_gain(gain: Tensor, real: Tensor, config: LayerConfig) -> Tensor:
    """One number for each row tile [T] from its rows' gains [T, BM]."""
    if config.row_reduce == "max":
        return torch.where(real, gain, 0.0).amax(-1)
    return torch.where(real, gain, 0.0).sum(-1) / real.sum(-1)


def stops(gain: Tensor, begin: int, end: int, prefix: int, head: HeadConfig, tile: TileConfig) -> Tensor:
    """Whether row tiles [T], whose `gain` came from keys begin .. end of the order, stop there."""
    tiles = (end - begin) / tile.block_n
    if head.threshold == "rest":
        return gain * (prefix - end) < head.tau * (end - begin)
    return gain < tiles * (head.tau * tile.block_n / prefix if head.threshold == "share" else head.tau)
