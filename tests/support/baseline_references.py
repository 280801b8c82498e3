"""The selections of the baselines with explicit loops, each from its own paper, sharing no code with the package.

A selection is a dictionary: (batch, head, row block) to (sorted key blocks, key order). Query i stands at position
kv_len - q_len + i. Blocks that touch the diagonal are always computed, which the papers leave open.
"""

import itertools
import math

import torch


def positions(q, k, block_m, i):
    """(first, last) position of row block i."""
    q_len, kv_len = q.shape[2], k.shape[2]
    return kv_len - q_len + i * block_m, kv_len - q_len + min((i + 1) * block_m, q_len) - 1


def key_blocks(k, block_n, first, last, unit=None):
    """(seen whole by all rows, seen in part by some) of a row block."""
    unit = unit or block_n
    full, touched = [], []
    for j in range(math.ceil(k.shape[2] / block_n)):
        begin = j * block_n // unit * unit  # keys of this block may stand anywhere in their unit
        if begin + unit - 1 <= first:
            full.append(j)
        elif begin <= last:
            touched.append(j)
    return full, touched


def every_block(q, k, block_m):
    """(batch, head, row block, KV head)"""
    batch, heads, q_len, _ = q.shape
    for b, h, i in itertools.product(range(batch), range(heads), range(math.ceil(q_len / block_m))):
        yield b, h, i, h // (heads // k.shape[1])


def softmax(scores):
    top = max(scores.values(), default=0.0)
    weights = {key: math.exp(score - top) for key, score in scores.items()}
    total = sum(weights.values())
    return {key: weight / total for key, weight in weights.items()}


def heaviest(weights, keep):
    """The fewest entries, heaviest first, until their sum reaches `keep` of the whole."""
    if keep == 1.0:
        return set(weights)
    chosen, reached, total = set(), 0.0, sum(weights.values())
    for key in sorted(weights, key=lambda key: -weights[key]):
        if reached >= keep * total:
            break
        chosen.add(key)
        reached += weights[key]
    return chosen


def packed_rows(q, block_m, h, i, packed):
    """The (query head, query) of each row of row block i, where `packed` query heads share row blocks."""
    rows = range(i * block_m, min((i + 1) * block_m, q.shape[2] * packed))
    return [(h * packed + row % packed, row // packed) for row in rows]


def flash_prefill(q, k, s, scale):
    """Both versions; of the second, h counts KV heads."""
    selected = {}
    packed = q.shape[1] // k.shape[1] if s.packed else 1
    offset, row_blocks = k.shape[2] - q.shape[2], math.ceil(q.shape[2] * packed / s.block)
    for b, h, i in itertools.product(range(q.shape[0]), range(q.shape[1] // packed), range(row_blocks)):
        u = h * packed // (q.shape[1] // k.shape[1])
        rows = packed_rows(q, s.block, h, i, packed)
        full, touched = key_blocks(k, s.block, offset + rows[0][1], offset + rows[-1][1])
        seen, weights = full + touched, {}
        for j in seen:
            mean = k[b, u, j * s.block : (j + 1) * s.block].mean(0)
            for head, row in rows:
                if (j + 1) * s.block - 1 <= offset + row:
                    weights[j] = weights.get(j, 0.0) + math.exp(scale * float(q[b, head, row] @ mean))
        chosen = {j for j in weights if weights[j] >= s.alpha * max(weights.values())}
        chosen |= set(touched) | set(full[: s.first]) | {j for j in seen if j > seen[-1] - s.window}
        if i >= row_blocks - s.last:
            chosen |= set(seen)
        selected[b, h, i] = sorted(chosen), None
    return selected


def pbs(q, k, s, scale):
    q_len, kv_len = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    orders, moved_keys = {}, k.clone()
    for b, u in itertools.product(range(k.shape[0]), range(k.shape[1])):
        importance = torch.zeros(kv_len, dtype=k.dtype)
        for h, row in itertools.product(range(u * group, (u + 1) * group), range(max(0, q_len - s.block), q_len)):
            seen = kv_len - q_len + row + 1
            importance[:seen] += (scale * k[b, u, :seen] @ q[b, h, row]).softmax(0)
        order = list(range(kv_len))
        for begin in range(0, kv_len - s.segment + 1, s.segment):
            segment = slice(begin, begin + s.segment)
            order[segment] = sorted(order[segment], key=lambda t: -float(importance[t]))
        orders[b, u], moved_keys[b, u] = order, k[b, u, order]
    selected = {}
    for b, h, i, u in every_block(q, k, s.block):
        full, touched = key_blocks(k, s.block, *positions(q, k, s.block, i), s.segment)
        mean_q = q[b, h, i * s.block : (i + 1) * s.block].mean(0)
        means = {j: moved_keys[b, u, j * s.block : (j + 1) * s.block].mean(0) for j in full}
        scores = {j: scale * float(mean_q @ mean) for j, mean in means.items()}
        chosen = heaviest(softmax(scores), s.keep) | set(full[: s.first]) | set(touched)
        selected[b, h, i] = sorted(chosen), orders[b, u]
    return selected


def self_similarity(rows):
    """The mean cosine of all pairs, each row with itself included."""
    lengths = rows.norm(dim=1)
    return float((rows @ rows.T / lengths[:, None] / lengths).mean())


def sparge(q, k, s, scale):
    selected = {}
    for b, h, i, u in every_block(q, k, s.block):
        full, touched = key_blocks(k, s.block_k, *positions(q, k, s.block, i))
        rows = q[b, h, i * s.block : (i + 1) * s.block]
        keys = {j: k[b, u, j * s.block_k : (j + 1) * s.block_k] for j in full + touched}
        different = {j for j in keys if self_similarity(keys[j]) < s.similarity}
        scores = {j: scale * float(rows.mean(0) @ keys[j].mean(0)) for j in keys if j not in different}
        chosen = heaviest(softmax(scores), s.keep) | different | set(touched)
        chosen |= set(range(s.first)) & set(keys)
        if self_similarity(rows) < s.similarity:
            chosen |= set(keys)
        selected[b, h, i] = sorted(chosen), None
    return selected


def xattention(q, k, s, scale):
    q_len, kv_len = q.shape[2], k.shape[2]
    offset, stride = kv_len - q_len, s.stride
    selected = {}
    for b, h, i, u in every_block(q, k, s.block):
        first, last = positions(q, k, s.block, i)
        full, touched = key_blocks(k, s.block, first, last)
        mass = dict.fromkeys(full + touched, 0.0)
        for begin in range(i * s.block, min((i + 1) * s.block, q_len), stride):
            scores = {}
            for key in range(0, kv_len, stride):
                if key > offset + begin + stride - 1:
                    break
                pairs = [(begin + stride - 1 - t, key + t) for t in range(stride)]
                total = sum(float(q[b, h, x] @ k[b, u, y]) for x, y in pairs if x < q_len and y < kv_len)
                scores[key] = scale * total / stride
            for key, weight in softmax(scores).items():
                if key // s.block in mass:
                    mass[key // s.block] += weight
        chosen = heaviest(mass, s.keep) | set(touched) | set(range(s.first)) & set(mass)
        selected[b, h, i] = sorted(chosen), None
    return selected


def flash_prefill_v2_attention(q, k, v, selected, s, scale):
    """(output, pairs of each head, the mean of those that share a KV head) over a selection, one row at a time."""
    out, pairs = torch.zeros_like(q), torch.zeros(k.shape[1])
    packed, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    for (b, u, i), (blocks, _) in selected.items():
        rows = packed_rows(q, s.block, u, i, packed)
        whole, _ = key_blocks(k, s.block, offset + rows[0][1], offset + rows[-1][1])
        for head, row in rows:
            keys = [t for j in blocks for t in range(j * s.block, (j + 1) * s.block) if t <= offset + row]
            weights = (k[b, u, keys] @ q[b, head, row] * scale).exp()
            total, numerator = weights.sum(), weights @ v[b, u, keys]
            for j in set(whole) - set(blocks) if s.correct else ():
                block = slice(j * s.block, (j + 1) * s.block)
                weight = s.block * math.exp(scale * float(k[b, u, block].mean(0) @ q[b, head, row]))
                total, numerator = total + weight, numerator + weight * v[b, u, block].mean(0)
            out[b, head, row] = numerator / total
            pairs[u] += len(keys) / packed
    return out, pairs.repeat_interleave(packed).tolist()


def attention(q, k, v, selected, block_m, block_n, scale):
    """(output, pairs of each head) over a selection, float64, one row block at a time."""
    out, pairs = torch.zeros_like(q), [0] * q.shape[1]
    q_len, kv_len = q.shape[2], k.shape[2]
    for (b, h, i), (blocks, order) in selected.items():
        u = h // (q.shape[1] // k.shape[1])
        places = [t for j in blocks for t in range(j * block_n, min((j + 1) * block_n, kv_len))]
        keys = [order[t] for t in places] if order else places
        members = list(range(i * block_m, min((i + 1) * block_m, q_len)))
        scores = (q[b, h, members] @ k[b, u, keys].T) * scale
        scores[torch.tensor(keys)[None, :] > kv_len - q_len + torch.tensor(members)[:, None]] = -math.inf
        pairs[h] += int((scores > -math.inf).sum())
        out[b, h, members] = scores.softmax(1) @ v[b, u, keys]
    return out, pairs
