"""Any call of the op that fits loops over its rows and keys, as one Hypothesis strategy."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig


@dataclass(frozen=True)
class AttentionCase:
    """A call of the op.

    Attributes:
        sizes: batch, KV heads, query heads of each, queries, keys before them, head dim, that of values.
        starts: the first key of each sequence that counts, or None.
        config: of the layer.
        options: scale, softcap, and whether there are sinks.
    """

    sizes: tuple[int, int, int, int, int, int, int]
    starts: tuple[int, ...] | None
    config: LayerConfig
    options: tuple[float | None, float | None, bool]

    def tensors(self, dtype=torch.float64):
        """Random q, k and v [B, H, L, D]; queries are longer than keys, so that the scores differ."""
        batch, kv_heads, group, queries, past, head_dim, value_dim = self.sizes
        rng = torch.Generator().manual_seed(sum(self.sizes))
        q = 2 * torch.randn(batch, kv_heads * group, queries, head_dim, generator=rng, dtype=torch.float64)
        keys = batch, kv_heads, past + queries
        k, v = (torch.randn(*keys, dim, generator=rng, dtype=torch.float64) for dim in (head_dim, value_dim))
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def arguments(self, dtype=torch.float64):
        """`kv_start`, `scale`, `softcap` and `sinks`."""
        scale, softcap, has_sinks = self.options
        sinks = torch.linspace(-1.0, 4.0, self.config.num_heads, dtype=dtype) if has_sinks else None
        starts = None if self.starts is None else torch.tensor(self.starts)
        return {"kv_start": starts, "scale": scale, "softcap": softcap, "sinks": sinks}


@st.composite
def attention_cases(draw, most_queries=200, most_past=120):
    """Batches with and without padding, of heads of all kinds, with whatever else a layer may ask for."""
    batch, kv_heads, group = draw(st.sampled_from([(1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (2, 1, 2)]))
    queries = draw(st.integers(1, most_queries))
    past = draw(st.sampled_from([0, 0, draw(st.integers(1, most_past))]))
    starts = None
    if draw(st.booleans()):
        starts = tuple(draw(st.integers(0, queries + past)) for _ in range(batch))
    tile = TileConfig(*draw(st.sampled_from([(64, 32, 1), (64, 32, 2), (128, 32, 1), (64, 64, 2)])))
    heads = st.builds(
        HeadConfig,
        tau=st.sampled_from([0.0, 0.4, 1.0, 1e6]),
        segment=st.sampled_from([tile.rows, 2 * tile.rows]),
        mode=st.sampled_from(["s2o", "s2o", "s2o", "dense"]),
        stop_rule=st.sampled_from(StopRule),
        representatives=st.sampled_from([1, 16]),
        tail=st.sampled_from(["none", "mean"]),
    )
    layer = tuple(draw(heads) for _ in range(kv_heads * group))
    config = LayerConfig(layer, tile, last_rows=draw(st.sampled_from([0, 0, 128])))
    options = draw(st.sampled_from([None, 0.4])), draw(st.sampled_from([None, None, 2.0])), draw(st.booleans())
    dims = draw(st.sampled_from([(16, 16), (16, 24), (8, 4)]))
    return AttentionCase((batch, kv_heads, group, queries, past, *dims), starts, config, options)
