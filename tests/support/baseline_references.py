"""The selections of the baselines with explicit loops, each from its own paper, sharing no code with the package.

A selection is a dictionary: (batch, head, row block) to (sorted key blocks, key order). Query i stands at position
kv_len - q_len + i. Blocks that touch the diagonal are always computed, which the papers leave open.
"""

import itertools
import math

import torch


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


def every_block(q, k, block_m, block_n, unit=None):
    """(batch, head, row block, KV head, key blocks seen whole by all rows, key blocks seen in part by some)"""
    (batch, heads, q_len, _), kv_len = q.shape, k.shape[2]
    for b, h, i in itertools.product(range(batch), range(heads), range(math.ceil(q_len / block_m))):
        first = kv_len - q_len + i * block_m
        last = min(first + block_m, kv_len) - 1
        yield b, h, i, h // (heads // k.shape[1]), *key_blocks(k, block_n, first, last, unit)


def softmax(scores):
    top = max(scores.values(), default=0.0)
    weights = {key: math.exp(score - top) for key, score in scores.items()}
    total = sum(weights.values())
    return {key: weight / total for key, weight in weights.items()}


def softmax_of_means(rows, keys, blocks, block_n, scale):
    """The softmax of scores of mean rows and mean keys over some blocks of keys."""
    return softmax({j: scale * float(rows.mean(0) @ keys.split(block_n)[j].mean(0)) for j in blocks})


def last_weights(sample, keys, scale):
    """The attention of the last queries [n, D] to the keys [L, D]: [n, L]."""
    weights = (sample @ keys.T * scale).exp().tril(len(keys) - len(sample))
    return weights / weights.sum(1, keepdim=True)


def heaviest(weights, keep):
    """The fewest entries, heaviest first, until their sum reaches `keep` of the whole."""
    if keep == 1.0:
        return set(weights)
    chosen, reached = set(), 0.0
    total = sum(weights.values())
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
        chosen |= set(touched + full[: s.first]) | {j for j in seen if j > seen[-1] - s.window}
        if i >= row_blocks - s.last:
            chosen |= set(seen)
        selected[b, h, i] = sorted(chosen), None
    return selected


def flex_prefill_lines(sample, keys, s, scale):
    """Return whether a head is query-aware, its blocks of columns, and of diagonals by the key the last query sees.

    sample: the last queries [n, D]; keys [L, D].
    """
    n = len(sample)
    weights = last_weights(sample, keys, scale) / n
    columns = weights.sum(0)
    diagonals = torch.stack([weights.diagonal(key - n + 1).sum() for key in range(len(keys))])
    means = torch.stack([block.mean(0) for block in keys.split(s.block)])
    estimated = (means @ sample.mean(0) * scale).softmax(0)
    sums = [torch.bincount(torch.arange(len(keys)) // s.block, line) for line in (columns, diagonals)]
    middle = (estimated + sums[0]) / 2
    divergence = sum(p @ (p / middle).log() / 2 for p in (estimated, sums[0]))
    query_aware = divergence.sqrt() < s.tau
    sums[0][: s.first] = sums[1][-1] = math.inf
    least = max(math.ceil(s.least_keys / s.block), s.first)
    chosen = []
    for line, weight in zip((columns, diagonals), sums, strict=True):
        count = len(heaviest(dict(enumerate(line.tolist())), s.keep)) // s.block + 1
        order = weight.argsort(descending=True).tolist()
        chosen.append(order[: least if query_aware else max(count, least)])
    return query_aware, *chosen


def flex_prefill(q, k, s, scale):
    selected = {}
    maps = {}
    for b, h, i, u, full, touched in every_block(q, k, s.block, s.block):
        weights = softmax_of_means(q[b, h].split(s.block)[i], k[b, u], full + touched, s.block, scale)
        maps.setdefault((b, h), {}).update({(i, j): weight for j, weight in weights.items()})
    for b, h, i, u, full, touched in every_block(q, k, s.block, s.block):
        query_aware, columns, diagonals = flex_prefill_lines(q[b, h, -s.block :], k[b, u], s, scale)
        by_means = heaviest(maps[b, h], s.keep) if query_aware else ()
        behind = (k.shape[2] - 1) // s.block - touched[-1]
        chosen = {j for j in full if j in columns or j + behind in diagonals or (i, j) in by_means}
        selected[b, h, i] = sorted(chosen) + touched, None
    return selected


def pbs(q, k, s, scale):
    kv_len = k.shape[2]
    group = q.shape[1] // k.shape[1]
    orders, moved_keys = {}, k.clone()
    for b, u in itertools.product(range(k.shape[0]), range(k.shape[1])):
        samples = q[b, u * group : (u + 1) * group, -s.block :]
        importance = sum(last_weights(sample, k[b, u], scale).sum(0) for sample in samples)
        order = list(range(kv_len))
        for begin in range(0, kv_len - s.segment + 1, s.segment):
            segment = slice(begin, begin + s.segment)
            order[segment] = sorted(order[segment], key=lambda t: -float(importance[t]))
        orders[b, u], moved_keys[b, u] = order, k[b, u, order]
    selected = {}
    for b, h, i, u, full, touched in every_block(q, k, s.block, s.block, s.segment):
        weights = softmax_of_means(q[b, h].split(s.block)[i], moved_keys[b, u], full, s.block, scale)
        chosen = heaviest(weights, s.keep) | set(touched + full[: s.first])
        selected[b, h, i] = sorted(chosen), orders[b, u]
    return selected


def self_similarity(rows):
    """The mean cosine of all pairs, each row with itself included."""
    lengths = rows.norm(dim=1)
    return float((rows @ rows.T / lengths[:, None] / lengths).mean())


def sparge(q, k, s, scale):
    selected = {}
    for b, h, i, u, full, touched in every_block(q, k, s.block, s.block_k):
        rows = q[b, h].split(s.block)[i]
        keys = {j: k[b, u].split(s.block_k)[j] for j in full + touched}
        different = {j for j in keys if self_similarity(keys[j]) < s.similarity}
        weights = softmax_of_means(rows, k[b, u], set(keys) - different, s.block_k, scale)
        chosen = heaviest(weights, s.keep) | different | set(touched + full[: s.first])
        if self_similarity(rows) < s.similarity:
            chosen |= set(keys)
        selected[b, h, i] = sorted(chosen), None
    return selected


def xattention(q, k, s, scale):
    q_len, kv_len = q.shape[2], k.shape[2]
    offset, stride = kv_len - q_len, s.stride
    selected = {}
    for b, h, i, u, full, touched in every_block(q, k, s.block, s.block):
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
        chosen = heaviest(mass, s.keep) | set(touched + full[: s.first])
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
    out = torch.zeros_like(q)
    pairs = [0] * q.shape[1]
    q_len, kv_len = q.shape[2], k.shape[2]
    for (b, h, i), (blocks, order) in selected.items():
        u = h // (q.shape[1] // k.shape[1])
        places = [t for j in blocks for t in range(j * block_n, min((j + 1) * block_n, kv_len))]
        keys = [order[t] for t in places] if order else places
        members = torch.arange(q_len)[i * block_m : (i + 1) * block_m]
        scores = q[b, h, members] @ k[b, u, keys].T * scale
        scores[torch.tensor(keys) > kv_len - q_len + members[:, None]] = -math.inf
        pairs[h] += int((scores > -math.inf).sum())
        out[b, h, members] = scores.softmax(1) @ v[b, u, keys]
    return out, pairs
