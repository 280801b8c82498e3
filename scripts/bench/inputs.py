"""Queries, keys and values to bench on, and exact attention in some of their rows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch import Tensor

from s2o_runtime.errors import ConfigError
from s2o_runtime.layer_kinds import get_max_positions

SEED = 0  # of random queries, keys and values
ERROR_ROWS = 256  # query rows of a call, at random over it, whose errors are measured
SCORES = 2**27  # that are computed together, half a gigabyte in float32
DIRECTIONS = 4  # that the random queries and keys of a KV head share
SHARPNESS = (6.0, 10.0)  # how strongly the first and the last query head look along them
WANDER = 2048  # queries after which a head looks along another direction

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Inputs:
    """One call: q [B, Hq, Lq, D], k and v [B, Hkv, Lk, D]; rows: sampled query rows [R]; exact: attention there.

    length: of the whole prompt, which the queries of a chunk do not end.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor
    exact: Tensor
    length: int
    layer: int = 0

    @classmethod
    def of(cls, qkv: QKV, seed: int, layer: int = 0) -> Inputs:
        rows = sample_rows(qkv[0].shape[2], ERROR_ROWS, seed).to(qkv[0].device)
        return cls(*qkv, rows, exact_rows(*qkv, rows), qkv[1].shape[2], layer)

    def chunks(self, size: int) -> list[Inputs]:
        """The calls of a server that takes `size` queries at a time, each behind all keys so far; rows stay whole."""
        before, q = self.length - self.q.shape[2], self.q
        ends = ((begin, min(begin + size, q.shape[2])) for begin in range(0, q.shape[2], size))
        return [
            replace(self, q=q[:, :, begin:end], k=self.k[:, :, : before + end], v=self.v[:, :, : before + end])
            for begin, end in ends
        ]


def sample_rows(length: int, count: int, seed: int) -> Tensor:
    """Draw indices [R] of rows, one at random in each of `count` equal parts."""
    rng = random.Random(seed)
    edges = sorted({length * part // count for part in range(count + 1)})
    return torch.tensor([rng.randrange(begin, end) for begin, end in pairwise(edges)])


def exact_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Compute dense attention of some rows in float32, [B, Hq, R, D], for the cost of these rows.

    q: [B, Hq, Lq, D], any floating type, query i at position Lk - Lq + i. k, v: [B, Hkv, Lk, D]. rows: int64 [R],
    ascending, which of the queries.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group = heads // kv_heads
    exact = torch.empty(batch, kv_heads, group, len(rows), head_dim, device=q.device)
    together = max(1, SCORES // (group * kv_len))
    for b, head in product(range(batch), range(kv_heads)):  # one at a time: keys in float32 are large
        keys, values = k[b, head].float(), v[b, head].float()
        for begin in range(0, len(rows), together):
            part = rows[begin : begin + together].to(q.device)
            last = int(part[-1]) + kv_len - q_len + 1
            queries = q[b, head * group : (head + 1) * group, part].float() * head_dim**-0.5  # [G, R', D]
            hidden = torch.arange(last, device=q.device) > (part + kv_len - q_len)[:, None]  # [R', Lk']
            weights = (queries @ keys[:last].T).masked_fill_(hidden, -torch.inf).softmax(-1)
            exact[b, head, :, begin : begin + together] = weights @ values[:last]
    return exact.flatten(1, 2)


def rel_mse(o: Tensor, exact: Tensor) -> float:
    """mean((o - exact)^2) / mean(exact^2)"""
    return float((o.float() - exact).square().mean() / exact.square().mean())


def random_qkv(length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device) -> QKV:
    """Random q, k, v of a prompt: noise, and a few directions that a KV head's keys share and its queries wander among.

    A segment's queries thus agree on which keys matter, weights fall off smoothly, and density is smooth in tau.
    heads: of queries, and of keys and values.
    """
    (query_heads, kv_heads), rng = heads, torch.Generator(device).manual_seed(SEED)
    normal = partial(torch.randn, generator=rng, device=device)
    q, k, v = (torch.empty(1, count, length, head_dim, dtype=dtype, device=device) for count in (*heads, kv_heads))
    for h, sharpness in enumerate(torch.linspace(*SHARPNESS, query_heads).tolist()):
        kv, member = divmod(h, query_heads // kv_heads)
        if member == 0:
            shared = torch.linalg.qr(normal(head_dim, DIRECTIONS))[0].T
            along = head_dim**0.25 * normal(length, DIRECTIONS)
            k[0, kv], v[0, kv] = normal(length, head_dim) + along @ shared, normal(length, head_dim)
        turns = normal(1, DIRECTIONS, length // WANDER + 2)
        mix = F.normalize(F.interpolate(turns, length, mode="linear", align_corners=True)[0].T, dim=1)
        q[0, h] = normal(length, head_dim) + sharpness * mix @ shared
    return q, k, v


def model_qkv(model: str, length: int, batch: int, seed: int, device: torch.device) -> Iterator[QKV]:
    """q, k, v of every layer of a model that reads prompts calibration has not seen.

    Queries of a model with another scale than head_dim ** -0.5 are multiplied, so that this scale is theirs.
    Raises ConfigError if the model takes no prompt of this length, or not every method can do its layers.
    """
    from calibrate.model.layers import capture_layers
    from calibrate.model.models import load, load_config
    from calibrate.prompts.documents import make_held_out_prompts

    limit = get_max_positions(load_config(model))
    if length > limit:
        raise ConfigError(f"length {length} is beyond the model's limit of {limit}: use a shorter one")
    loaded = load(model, str(device))
    ids = [prompt.ids for prompt in make_held_out_prompts(loaded.tokenizer, length, batch, seed)]
    for captured in capture_layers(loaded, ids):
        prompts = list(captured)
        if beyond := prompts[0].scoring.beyond_sdpa:
            raise ConfigError(f"model {model!r} has {beyond}, which not every method can do: bench another model")
        q, k, v = (torch.cat([getattr(prompt, name) for prompt in prompts]) for name in "qkv")
        factor = prompts[0].scale * q.shape[3] ** 0.5
        yield q if math.isclose(factor, 1.0) else q * factor, k, v
