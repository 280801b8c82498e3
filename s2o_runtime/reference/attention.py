"""S2O attention in plain torch: Algorithms 2 and 3 of the paper, made definite; Algorithm 1 is in `ranking.py`.

This is the oracle that the kernels are tested against, and the backend on a CPU. It works in float64 for float64
inputs and in float32 otherwise, for any length, and never imports the kernels. The row tiles of a segment
share one order, so they are computed together: `T` is the number of row tiles of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import Scoring, ScoringOptions, cap_scores
from ..config import KEY_BLOCK, HeadConfig, LayerConfig, StopRule, TileConfig
from ..sequences import call_shape, check_heads, find_window_start
from .ranking import RankedPrefix, make_representatives, rank

if TYPE_CHECKING:
    from typing_extensions import Unpack

DENSE_ROWS = 512  # rows of a dense head computed together; bounds memory, changes nothing


class Attended(NamedTuple):
    """The result of a backend."""

    out: Tensor  # [B, Hq, Lq, Dv] in the type of q; rows before `kv_start` are zero. Of packed sequences [Tq, Hq, Dv]
    visited: Tensor | None  # int32 [B, Hq, row tiles], the prefix keys that each row tile computed; None if dense
    # [B, Hq, Lq], of packed sequences [Hq, Tq]: the log-sum-exp of the scores of a row, computed and estimated, its
    # sink among them; -inf before `kv_start`. float32, from the reference float64 for float64 inputs.
    lse: Tensor | None


class State(NamedTuple):
    """The online softmax of T row tiles."""

    m: Tensor  # [T, BM], the running maximum
    l: Tensor  # [T, BM], the sum of the weights
    acc: Tensor  # [T, BM, Dv], the sum of weights times values

    def output(self) -> Tensor:
        """Compute [T, BM, Dv]; rows that saw no key are zero, those whose weights are NaN are NaN."""
        return torch.where(self.l[..., None] == 0, 0.0, self.acc / self.l[..., None])

    def at(self, tiles: Tensor) -> State:
        """Return the state of some row tiles."""
        return State(self.m[tiles], self.l[tiles], self.acc[tiles])


class _Head(NamedTuple):
    """One query head of one sequence."""

    q: Tensor  # [Lq, D], scaled
    k: Tensor  # [Lk, D]
    v: Tensor  # [Lk, Dv]
    softcap: float | None
    sink: Tensor | None  # []
    head: HeadConfig
    config: LayerConfig
    start: int  # the first key that counts
    paper_literal: bool
    ranking_of: Callable[[int], RankedPrefix] | None
    splits: int


def s2o_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    *,
    kv_start: Tensor | None = None,
    paper_literal: bool = False,
    ranking_of: Callable[[int, int, int], RankedPrefix] | None = None,
    splits: int = 1,
    **scores: Unpack[ScoringOptions],
) -> Attended:
    """Compute S2O attention as the paper and docs/how-it-works.md define it, without any regard to speed.

    Args:
        q, k, v, config, kv_start: as for `s2o_attention`.
        scores: as in `call.Scoring`. A sink is part of the denominator from the start, so a gain is relative to it too.
        paper_literal: do what the paper's pseudocode does and the product does not: rank each key by itself, permute
            queries inside their segment by their score with the mean key of segment 0, check after every tile, and
            throw away the tile that stops the visit.
        ranking_of: rankings to follow instead of Algorithm 1's; called with sequence, query head and segment.
        splits: programs that share the prefix of a row tile, as `kernels.splits` describes: behind the first `block_n`
            keys of the order each visits every one of so many tiles of them, and stops on its own.

    Raises:
        InputError: the tensors do not fit one another or the config.
        ConfigError: the config is illegal.

    Source: Algorithms 1, 2 and 3.
    """
    shape = call_shape(q, k, v, kv_start)
    check_heads(config.validate(), shape)
    scoring = Scoring(**scores).checked(shape, q)
    softcap = scoring.softcap
    sinks = scoring.sinks
    assert scoring.scale is not None
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    starts = [0] * shape.batch if kv_start is None else kv_start.tolist()
    out = q.new_zeros(*q.shape[:3], shape.value_dim)
    row_tiles = shape.row_tiles(config.tile.block_m)
    visited = torch.zeros(shape.batch, shape.query_heads, row_tiles, dtype=torch.int32, device=q.device)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
    for b in range(shape.batch):
        for h, head in enumerate(config.heads):
            keys, values = k[b, h // shape.group].to(dtype), v[b, h // shape.group].to(dtype)
            rows = q[b, h].to(dtype) * scoring.scale
            sink = None if sinks is None else sinks[h].to(dtype)
            rankings = None if ranking_of is None else partial(ranking_of, b, h)
            inputs = _Head(
                q=rows,
                k=keys,
                v=values,
                softcap=softcap,
                sink=sink,
                head=head,
                config=config,
                start=starts[b],
                paper_literal=paper_literal,
                ranking_of=rankings,
                splits=splits,
            )
            out[b, h], visited[b, h], lse[b, h] = _attend_head(inputs)
            last = config.find_first_dense_row(shape.q_len)
            if head.mode == "s2o" and last < shape.q_len:
                dense = inputs._replace(q=rows[last:], head=replace(head, mode="dense"))
                out[b, h, last:], visited[b, h, last // config.tile.block_m :], lse[b, h, last:] = _attend_head(dense)
    return Attended(out, visited, lse)


def _attend_head(inputs: _Head) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output [Lq, Dv], the visited keys [row tiles] and the log-sum-exps [Lq] of one head."""
    q, k, v, softcap, sink, head, config, start, paper_literal, ranking_of, splits = inputs
    tile = config.tile
    offset = len(k) - len(q)
    out = v.new_zeros(len(q), v.shape[1])
    visited = torch.zeros(-(-len(q) // tile.block_m), dtype=torch.int32, device=q.device)
    lse = q.new_full((len(q),), float("-inf"))
    segment = DENSE_ROWS if head.mode == "dense" else head.segment
    guide = k[start : start + segment].mean(0)
    for begin in range(0, len(q), segment):
        end = min(begin + segment, len(q))
        if offset + end <= start:
            continue  # padding only
        first = int(find_window_start(torch.tensor(begin + offset), torch.tensor(start), head, config))
        rows = torch.arange(begin, end, device=q.device)
        if paper_literal:
            rows = rows[order_queries(q[begin:end], guide)]
        tiles = F.pad(rows, (0, -len(rows) % tile.block_m), value=-1).view(-1, tile.block_m)  # the last one filled
        real = (tiles >= 0) & (tiles + offset >= start)
        position = torch.where(real, tiles + offset, -1)
        queries = q[tiles.clamp_min(0)]
        last = offset + end
        state = attend_window(queries, k[first:last], v[first:last], position - first, softcap, sink)
        if first > start:
            if ranking_of is None:
                parts = make_representatives(q[begin:end], segment // head.representatives, offset + begin, start)
                ranking = rank(parts, k[start:first], v[start:first], 1 if paper_literal else KEY_BLOCK, start, softcap)
            else:
                ranking = ranking_of(begin // segment)
            shared = ranking.order[: tile.block_n if splits > 1 else 0]  # all splits visit these
            if splits > 1:
                state = update_softmax(state, queries, k[shared], v[shared], softcap)
                state = state._replace(m=state.m - math.log(splits))  # each counts its part
            visits = [_visit_prefix(inputs, queries, state, ranking, real, split) for split in range(splits)]
            states, key_counts = zip(*visits, strict=True)
            state, keys_visited = _join_states(states), len(shared) + torch.stack(key_counts).sum(0)
            visited[begin // tile.block_m : begin // tile.block_m + len(tiles)] = keys_visited.int()
        out[tiles[real]] = state.output()[real]
        lse[tiles[real]] = (state.m + state.l.log())[real]
    return out, visited, lse


def order_queries(q: Tensor, guide: Tensor) -> Tensor:
    """Order a segment's queries [S, D] by their score with the guide key [D], best first (Algorithm 1, lines 12-13)."""
    return (q @ guide).argsort(descending=True, stable=True)


def attend_window(
    q: Tensor, k: Tensor, v: Tensor, last_key: Tensor, softcap: float | None = None, sink: Tensor | None = None
) -> State:  # fmt: skip
    """Attend causally inside a window, and to the sink if there is one (Algorithm 2).

    Args:
        q: [T, BM, D], scaled.
        k, v: [W, D] and [W, Dv], or [T, W, D] and [T, W, Dv], the keys of the window.
        last_key: integers [T, BM], the last key of the window that a row may see; negative for none.
        sink: a score without a value that broadcasts with [T, BM].
    """
    scores = cap_scores(q @ k.mT, softcap)
    hidden = torch.arange(k.shape[-2], device=k.device) > last_key[..., None]
    scores = scores.masked_fill(hidden, float("-inf"))
    m = scores.amax(-1) if sink is None else torch.maximum(scores.amax(-1), sink)
    weights = torch.where(hidden, 0.0, (scores - m[..., None]).exp())
    l = weights.sum(-1) if sink is None else weights.sum(-1) + (sink - m).exp()
    return State(m, l, weights @ v)


def update_softmax(state: State, q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None) -> State:
    """Add keys [N, D] that every row may see to the online softmax (Algorithm 3, line 11)."""
    scores = cap_scores(q @ k.T, softcap)
    m = torch.maximum(state.m, scores.amax(-1))
    weights = (scores - m[..., None]).exp()
    decay = (state.m - m).exp()
    return State(m, state.l * decay + weights.sum(-1), state.acc * decay[..., None] + weights @ v)


def _join_states(parts: Sequence[State]) -> State:
    """Return the state that has visited the keys of all parts."""
    maxima, sums, accs = map(torch.stack, zip(*parts, strict=True))
    m = maxima.amax(0)
    weights = torch.where(maxima == m, 1.0, (maxima - m).exp())  # 1 for rows without keys, whose maximum is -inf
    return State(m, (weights * sums).sum(0), (weights[..., None] * accs).sum(0))


def _visit_prefix(
    inputs: _Head, queries: Tensor, state: State, ranking: RankedPrefix, real: Tensor, split: int
) -> tuple[State, Tensor]:
    """Visit a split of the prefix in order and stop when a chunk's gain is small (Algorithm 3).

    queries: [T, BM, D], scaled; state: after the window; real: bool [T, BM], rows that count. Returns the state, with
    the tail if the head has one, and the keys that each row tile visited, int64 [T].
    """
    _, k, v, softcap, _, head, config, _, paper_literal, _, splits = inputs
    shared = config.tile.block_n if splits > 1 else 0
    order = ranking.order[shared:].view(-1, config.tile.block_n)[split::splits].flatten()
    running = real.any(-1).nonzero()[:, 0]
    visited = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    result = State(*(part.clone() for part in state))
    stride = config.tile.block_n * (1 if paper_literal else config.tile.count_chunk(splits))
    for begin in range(0, len(order), stride):
        if not len(running):
            break
        end = min(begin + stride, len(order))
        before = result.at(running)
        keys = order[begin:end]
        after = update_softmax(before, queries[running], k[keys], v[keys], softcap)
        gain = measure_gain(before, after, real[running])
        # of all splits: those of the others are alike
        first, last, prefix = (shared + splits * index for index in (begin, end, len(order)))
        stop = decide_stops(gain, first, last, prefix, head, config.tile)
        kept = ~stop if paper_literal else torch.ones_like(stop)
        if head.tail == "mean" and not paper_literal:
            m, l, acc = with_tail(before, after, ranking, first, last, prefix)
            l = torch.where(stop[:, None], l, after.l)
            after = State(m, l, torch.where(stop[:, None, None], acc, after.acc))
        for part, new in zip(result, after, strict=True):
            part[running[kept]] = new[kept]
        visited[running] += end - begin
        running = running[~stop]
    return result, visited


def with_tail(before: State, after: State, ranking: RankedPrefix, begin: int, end: int, prefix: int) -> State:
    """Add an estimate of what the keys behind the visited ones would bring (docs/how-it-works.md).

    The ranking's weights give the ratio of the rest to the last chunk, and the mean value of the rest; the row itself
    gives what the chunk added to l. A key of the rest counts at most as much as a key of the chunk did on average.

    before, after: the states before and after the last chunk; begin, end: the chunk, as a range of the order of
    `prefix` keys.
    """
    if end == prefix:
        return after
    mass, values = ranking.rest(end)
    chunk = ranking.rest(begin)[0] - mass
    most = (prefix - end) / (end - begin)
    times = torch.where(chunk * most > mass, mass / chunk, most)
    brought = after.l - before.l * (before.m - after.m).exp()
    added = torch.where(mass == 0, 0.0, times) * brought
    mean = values / torch.where(mass == 0, 1.0, mass)
    return State(after.m, after.l + added, after.acc + added[..., None] * mean)


def measure_gain(before: State, after: State, real: Tensor) -> Tensor:
    """Average the gains, relative to l, of each row tile's real rows between two states: [T] (Algorithm 3, line 13)."""
    old = before.l * (before.m - after.m).exp()
    return torch.where(real, (after.l - old) / old, 0.0).sum(-1) / real.sum(-1)


def decide_stops(gain: Tensor, begin: int, end: int, prefix: int, head: HeadConfig, tile: TileConfig) -> Tensor:
    """Decide which row tiles stop after a chunk (Algorithm 3, line 14, with the head's stop rule): bool [T].

    gain: [T], what the chunk added to the softmax denominator of each row tile, relative to it; NaN stops none.
    begin, end: the chunk's keys, as indices into the order of `prefix` keys.
    """
    if head.stop_rule is StopRule.REST:
        return gain * (prefix - end) < head.tau * (end - begin)
    return gain < (end - begin) / tile.block_n * head.tau
