"""S2O one row at a time, written from the paper's pseudocode and DESIGN, sharing no code with the package."""

import math

import torch

from s2o_runtime.config import StopRule


def naive_attention(q, k, v, *, kv_start=None, scale=None, softcap=None, sinks=None, window=None):
    """Dense causal attention in float64 with an explicit mask; rows that see nothing are zero.

    window: keys that a query sees, itself included; None for all up to its own.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_len = k.shape[2]
    group = heads // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(kv_len - q_len, kv_len)[:, None]
    first = -1 if window is None else position - window
    visible = (torch.arange(kv_len) <= position) & (torch.arange(kv_len) > first)
    visible = visible.expand(batch, 1, q_len, kv_len).clone()
    for b in range(batch):
        visible[b, :, :, : 0 if kv_start is None else int(kv_start[b])] = False
    exponentials = torch.where(visible, scores, -math.inf).exp()
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return torch.where(visible.any(-1, keepdim=True), exponentials / total, 0.0) @ v


def naive_s2o(
    q, k, v, config, kv_start=None, paper_literal=False, scale=None, softcap=None, sinks=None
):  # fmt: skip
    """(output, log-sum-exps, computed pairs per head, causal pairs) in float64, with loops over rows and keys."""

    def score(keys, query):
        products = keys @ query * (head_dim**-0.5 if scale is None else scale)
        return products if softcap is None else softcap * torch.tanh(products / softcap)

    batch, num_heads, q_len, head_dim = q.shape
    heads, tile = config.heads, config.tile
    kv_len = k.shape[2]
    group = num_heads // k.shape[1]
    offset = kv_len - q_len
    grain = 1 if paper_literal else 4
    q, k, v = (t.double() for t in (q, k, v))
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    pairs = [0] * num_heads
    causal = 0
    for b in range(batch):
        start = 0 if kv_start is None else int(kv_start[b])
        causal += sum(max(0, offset + i - start + 1) for i in range(q_len))
        for h, head in enumerate(heads):
            keys, values = k[b, h // group], v[b, h // group]
            dense_from = 0 if head.mode == "dense" else q_len
            if head.mode == "s2o" and config.last_rows:  # whole programs, which begin at multiples of their rows
                dense_from = max(0, q_len - config.last_rows) // tile.block_m * tile.block_m
            rows_q = q[b, h]
            sink = 0.0 if sinks is None else math.exp(float(sinks[h]))
            for begin in range(0, q_len, head.segment):
                segment = range(begin, min(begin + head.segment, q_len))
                rows = [i for i in segment if offset + i >= start]
                if not rows:
                    continue
                window = max(offset + begin - config.lookback, start)
                window -= (window - start) % tile.block_n
                steps = _steps(score, rows_q, keys, segment, head, offset, start, window, grain)
                order = [key for _, first in steps for key in range(first, first + grain)]
                ordered_rows = list(segment)
                if paper_literal:
                    guide = keys[start : start + head.segment].mean(0)
                    ordered_rows.sort(key=lambda i: -float(rows_q[i] @ guide))
                for tile_begin in range(0, len(ordered_rows), tile.block_m):
                    members = [i for i in ordered_rows[tile_begin : tile_begin + tile.block_m] if i in set(rows)]
                    if members:
                        seen = _one_tile(
                            score, members, window, order, rows_q, keys, offset, head, tile, paper_literal, sink
                        )
                        tail = steps[seen["visited"] // grain :] if head.tail == "mean" and not paper_literal else []
                        for i in members:
                            chosen = list(range(window, offset + i + 1)) + order[: seen["kept"]]
                            if i >= dense_from:
                                chosen = list(range(start, offset + i + 1))
                            weights = score(keys[chosen], rows_q[i]).exp()
                            total, mass = weights @ values[chosen], weights.sum() + sink
                            if tail and i < dense_from:
                                added, mean = _tail(score, tail, steps, order, seen, rows_q[i], keys, values, grain)
                                total, mass = total + added * mean, mass + added
                            out[b, h, i], lse[b, h, i] = total / mass, mass.log()
                            pairs[h] += len(chosen) if i >= dense_from else offset + i + 1 - window + seen["visited"]
    return out, lse, pairs, causal


def _steps(score, rows_q, keys, segment, head, offset, start, window, grain):
    """(logarithm of the weight, first key) of every step of the prefix, heaviest first."""
    size = head.segment // head.representatives
    largest = {}
    for begin in range(segment[0], segment[-1] + 1, size):
        members = [i for i in range(begin, min(begin + size, segment[-1] + 1)) if offset + i >= start]
        if members and window > start:
            scores = score(keys[start:window], rows_q[members].mean(0))
            for t, log in enumerate((scores - scores.logsumexp(0)).tolist(), start):
                largest[t] = max(log, largest.get(t, -math.inf))
    weights = [
        (math.log(sum(math.exp(largest[t]) for t in range(first, first + grain))), first)
        for first in range(start, window, grain)
    ]
    return sorted(weights, key=lambda step: -step[0])


def _tail(score, tail, steps, order, seen, row_q, keys, values, grain):
    """(mass added to a row, mean value) for the steps it did not visit."""
    mass = sum(math.exp(log) for log, _ in tail)
    mean = sum(math.exp(log) * values[first : first + grain].mean(0) for log, first in tail) / mass
    chunk = range(seen["begun"], seen["visited"])
    chunk_mass = sum(math.exp(log) for log, _ in steps[chunk.start // grain : chunk.stop // grain])
    brought = float(score(keys[order[chunk.start : chunk.stop]], row_q).exp().sum())
    return min(mass / chunk_mass, (len(order) - chunk.stop) / len(chunk)) * brought, mean


def _one_tile(score, members, window, order, rows_q, keys, offset, head, tile, paper_literal, sink):
    """Return how many keys of the order a tile of rows visits, where its last chunk began, and how many it keeps."""
    sums = {i: float(score(keys[window : offset + i + 1], rows_q[i]).exp().sum()) + sink for i in members}
    chunk = tile.block_n if paper_literal else tile.block_n * tile.chunk
    done = begun = 0
    while done < len(order):
        new = order[done : done + chunk]
        gains = []
        for i in members:
            added = float(score(keys[new], rows_q[i]).exp().sum())
            gains.append(added / sums[i])
            sums[i] += added
        gain = sum(gains) / len(gains) / (len(new) / tile.block_n)
        begun, done = done, done + len(new)
        if head.stop_rule is StopRule.REST:
            gain *= (len(order) - done) / tile.block_n
        if gain < head.tau:
            return {"visited": done, "begun": begun, "kept": done - len(new) if paper_literal else done}
    return {"visited": done, "begun": begun, "kept": done}
