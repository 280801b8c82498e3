"""Linear tails in the interpreter, against the reference: fp32 and fp16, because bf16 is wrong there."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.attention.paged import in_place_obstacle
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import interpreted
from s2o_runtime.errors import InputError
from s2o_runtime.kernels import linear as linear_module
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.kernels.call import Call, head_tables
from s2o_runtime.kernels.keys import keys_of
from s2o_runtime.kernels.linear import covariance_type, linear_bytes
from s2o_runtime.kernels.prefill import Ranker, row_slices, s2o_prefill
from s2o_runtime.kernels.primitives import LOG2E
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.ranking import part_means
from s2o_runtime.serving.server import _compiled_kind
from s2o_runtime.shapes import call_shape
from support.kernels import TILE, call_of, inputs, prefix_of, ranking_of
from support.marks import all_but_first
from support.naive import naive_attention

SLOW = pytest.mark.slow(reason="more cases of a kernel in Triton's interpreter, seconds each")
EXHAUSTIVE = pytest.mark.exhaustive(reason="still more of them: `make test` runs some")

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="a GPU is here, so kernels are compiled: see tests/gpu"),
    pytest.mark.usefixtures("small_sample"),
]

LINEAR = HeadConfig(0.3, 64, linear=True)
MIXED = (
    LINEAR,
    HeadConfig(1.0, 64, representatives=4, tail=True),
    HeadConfig(100.0, 128, linear=True),
    HeadConfig(mode="dense"),
    HeadConfig(0.5, 128),
)


def mixed(heads, tile=TILE, grain=1):
    return LayerConfig(tuple(MIXED[h % 5] for h in range(heads)), tile, grain=grain)


def run_both(q, k, v, config, kv_start=None, sinks=None, lse=True):
    """The kernels, and the reference following the ranking that the kernels made."""
    shape = call_shape(q, k, v, kv_start)
    scale = 1.3 * shape.head_dim**-0.5
    call = Call(config, shape, scale, head_tables(config, q.device), kv_start, sinks=sinks)
    ranked = Ranker(q, keys_of(k, call), v, call).rank(range(shape.q_len))
    ranking = partial(ranking_of, call, *ranked)
    expected = s2o_attention_reference(
        q, k, v, config, kv_start=kv_start, scale=scale, sinks=sinks, ranking_of=ranking
    )
    return s2o_prefill(q, k, v, call, lse=lse), expected


def agree(ours, expected, rtol=1e-4, atol=1e-5):
    out, visited, lse = ours
    torch.testing.assert_close(out, expected.out, rtol=rtol, atol=atol)
    if lse is not None:
        torch.testing.assert_close(lse, expected.lse, rtol=rtol, atol=10 * atol)
    assert torch.equal(visited, expected.visited)


SHAPES = [
    pytest.param(1, 5, 1, 300, 300, 64, None, id="B1-H5-L300-D64"),
    pytest.param(1, 4, 2, 257, 257, 128, None, id="B1-H4-L257-D128"),
    pytest.param(2, 2, 1, 100, 211, 64, None, id="q100-kv211"),
    pytest.param(3, 2, 1, 250, 250, 64, [0, 67, 249], id="left-padded"),
    pytest.param(2, 3, 1, 100, 271, 64, [271, 33], id="padded-chunk"),
    pytest.param(1, 1, 1, 5, 5, 64, None, id="shorter-than-a-tile"),
    pytest.param(1, 1, 1, 1, 200, 64, None, id="one-query"),
    pytest.param(1, 2, 1, 130, 300, 256, None, id="D256"),
]


@pytest.mark.parametrize("grain", all_but_first([4, 1, 8], SLOW))
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "starts"), all_but_first(SHAPES, SLOW)
)
def test_prefill_equals_the_reference(
    batch, heads, kv_heads, q_len, kv_len, head_dim, starts, grain, nan_filled
):  # fmt: skip
    q, k, v = inputs(batch, heads, kv_heads, q_len, kv_len, head_dim)
    kv_start = None if starts is None else torch.tensor(starts)
    agree(*run_both(q, k, v, mixed(heads, grain=grain), kv_start))
