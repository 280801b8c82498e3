"""S2O one row at a time, written from the paper's pseudocode and DESIGN section 4, sharing no code with the package."""

import math

import torch


def naive_attention(q, k, v, *, kv_start=None, scale=None):
    """Dense causal attention in float64 with an explicit mask; rows that see nothing are zero."""
    batch, heads, q_len, head_dim = q.shape
    kv_len = k.shape[2]
    group = heads // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (head_dim**-0.5 if scale is None else scale)
    position = torch.arange(kv_len - q_len, kv_len)[:, None]
    visible = (torch.arange(kv_len) <= position).expand(batch, 1, q_len, kv_len).clone()
    for b in range(batch):
        visible[b, :, :, : 0 if kv_start is None else int(kv_start[b])] = False
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)
    return weights @ v


def naive_s2o(q, k, v, heads, tile, row_reduce="mean", kv_start=None, paper_literal=False):
    """(output, visited pairs per head, causal pairs) in float64, with explicit loops over rows and keys."""
    batch, num_heads, q_len, head_dim = q.shape
    kv_len = k.shape[2]
    group = num_heads // k.shape[1]
    offset = kv_len - q_len
    q, k, v = (t.double() for t in (q, k, v))
    out = torch.zeros_like(q)
    pairs = [0] * num_heads
    causal = 0
    for b in range(batch):
        start = 0 if kv_start is None else int(kv_start[b])
        causal += sum(max(0, offset + i - start + 1) for i in range(q_len))
        for h, head in enumerate(heads):
            keys, values = k[b, h // group], v[b, h // group]
            rows_q = q[b, h] * head_dim**-0.5
            for begin in range(0, q_len, head.segment):
                rows = [i for i in range(begin, min(begin + head.segment, q_len)) if offset + i >= start]
                if not rows:
                    continue
                window = max(offset + begin, start)
                window -= (window - start) % tile.block_n
                mean = rows_q[rows].mean(0)
                scores = [float(mean @ keys[t]) for t in range(start, window)]
                order = [start + t for t in sorted(range(len(scores)), key=lambda t: -scores[t])]
                first_rows = list(range(begin, min(begin + head.segment, q_len)))
                if paper_literal:
                    guide = keys[start : start + head.segment].mean(0)
                    first_rows.sort(key=lambda i: -float(rows_q[i] @ guide))
                for tile_begin in range(0, len(first_rows), tile.block_m):
                    members = [i for i in first_rows[tile_begin : tile_begin + tile.block_m] if i in set(rows)]
                    if members:
                        seen = _one_tile(
                            members, window, order, rows_q, keys, offset, head, tile, row_reduce, paper_literal
                        )
                        for i in members:
                            chosen = list(range(window, offset + i + 1)) + order[: seen["kept"]]
                            weights = (keys[chosen] @ rows_q[i]).softmax(0)
                            out[b, h, i] = weights @ values[chosen]
                            pairs[h] += offset + i + 1 - window + seen["visited"]
    return out, pairs, causal


def _one_tile(members, window, order, rows_q, keys, offset, head, tile, row_reduce, paper_literal):
    """How many keys of the order a tile of rows visits, and how many of these it keeps."""
    sums = {i: float((keys[window : offset + i + 1] @ rows_q[i]).exp().sum()) for i in members}
    chunk = tile.block_n if paper_literal else tile.block_n * tile.chunk
    done = 0
    while done < len(order):
        new = order[done : done + chunk]
        gains = []
        for i in members:
            added = float((keys[new] @ rows_q[i]).exp().sum())
            gains.append(added / sums[i])
            sums[i] += added
        gain = max(gains) if row_reduce == "max" else sum(gains) / len(gains)
        gain /= len(new) / tile.block_n
        done += len(new)
        unit = tile.block_n / len(order) if head.threshold == "share" else 1.0
        if gain < head.tau * unit:
            return {"visited": done, "kept": done - len(new) if paper_literal else done}
    return {"visited": done, "kept": done}
