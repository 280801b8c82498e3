"""NaN and inf in bf16: a row that is NaN in dense attention because of its query or a key is NaN in S2O."""

import math

import pytest
import torch

from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.kernels import prefill as prefill_module
from support.gpu import inputs
from support.marks import pairwise

PLAIN, SPECIALIZED = TileConfig(64, 64, 2, 4, 2), TileConfig(64, 128, 1, 4, 2, True)
LENGTH, SEGMENT, PADDING = 2000, 256, 300
HEADS = (
    HeadConfig(1e6, SEGMENT, representatives=16),
    HeadConfig(1e6, SEGMENT, tail="mean"),
    HeadConfig(mode="dense"),
)


@pytest.mark.parametrize(
    ("path", "bad", "position", "where", "tile"),
    pairwise(
        ["kernels", "splits", "int8"], [math.nan, math.inf, -math.inf], [100, 900, 1999], ["q", "k"],
        [PLAIN, SPECIALIZED],
    ),
)  # fmt: skip
def test_where_dense_attention_is_nan_s2o_is(tile, path, where, bad, position, monkeypatch):
    """Every head here stops at its first chunk; rows beside one that is NaN may be NaN too, but not in padding."""
    heads = HEADS[:3] if path == "int8" else HEADS
    q, k, v = inputs(2, len(heads), 1, LENGTH, LENGTH, 128, torch.bfloat16)
    start = torch.tensor([0, PADDING], device="cuda")
    {"q": q, "k": k}[where][0, 0, position, 3] = bad
    config = LayerConfig(heads, tile, scores="int8" if path == "int8" else "input")
    if path == "splits":
        monkeypatch.setattr(prefill_module, "count_key_splits", lambda *_: 3)
    out, lse, _ = s2o_attention(q, k, v, config, kv_start=start, backend="triton", return_lse=True)
    scores = q.double() @ k.double().mT
    causal = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    expected = ((scores.isnan() | (scores == math.inf)) & causal).any(-1)
    assert bool(expected.any())
    assert bool(out[expected].isnan().any(-1).all())
    assert not bool(lse[expected].isfinite().any())
    assert bool(out[1].isfinite().all())
    assert bool((out[1, :, :PADDING] == 0).all())
