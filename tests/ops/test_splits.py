"""Calls whose keys are split: when and how finely, where they stop, and what is compiled before."""

import pytest
import torch

from s2o_runtime.attention.warmup import SPLIT_CALL
from s2o_runtime.call import Call
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import Resources
from s2o_runtime.kernels.splits import FEWEST_KEYS, count_key_splits
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import exact_attention
from s2o_runtime.sequences import call_shape, measure_density
from support.kernels import HOPPER, relative_error

GPU = Resources(132, 50 << 20)


def splits_of(q_len, kv_len, dense=0, heads=12, batch=1, gpu=GPU, last_rows=0):
    """In a layer with so many dense heads, all others alike, and programs of 128 rows."""
    others = HeadConfig(1.0, HOPPER.rows)
    config = LayerConfig((HeadConfig(mode="dense"),) * dense + (others,) * (heads - dense), HOPPER, last_rows=last_rows)
    sizes = (heads, q_len), (heads // 4, kv_len), (heads // 4, kv_len)
    tensors = (torch.empty(1).expand(batch, *size, 128) for size in sizes)
    return count_key_splits(Call.from_tensors(*tensors, config), -(-q_len // HOPPER.rows), gpu)


def test_few_queries_behind_many_keys_are_split():
    assert [splits_of(1 << power, 98304) for power in range(7, 13)] == [8, 4, 2, 1, 1, 1]
    assert [splits_of(512, 1 << power) for power in range(10, 18)] == [1, 1, 1, 2, 2, 2, 2, 2]
    assert [splits_of(queries, 98304, heads=28) for queries in (128, 512, 2048)] == [4, 1, 1]
    assert [splits_of(2048, 131072, *heads) for heads in ((2, 8), (4, 32), (8, 32), (8, 8))] == [2, 1, 1, 1]
    assert splits_of(2048, 98304, last_rows=256) == 2  # whose programs take longest
    assert splits_of(512, 98304, batch=4) == 1
    assert splits_of(512, 98304, gpu=Resources(1, 0)) == 1


@pytest.mark.parametrize("stop_rule", StopRule)
@pytest.mark.parametrize("tail", ["none", "mean"])
def test_splits_stop_where_one_program_stops(stop_rule, tail):
    """They see the same gains, and a rest of the same mass. The most splits may visit a tile each beyond the stop."""
    tile, keys, splits = TileConfig(64, 64, 2, 4, 1), 4 * FEWEST_KEYS, 4
    noise = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, rows, 64, generator=noise) for heads, rows in ((2, 128), (1, keys), (1, keys)))
    q, v = 0.6 * q + 2 * torch.randn(1, 2, 1, 64, generator=noise), v + 0.3
    tau = 0.4 if stop_rule is StopRule.REST else 0.004
    config = LayerConfig.uniform(2, tau=tau, segment=128, tile=tile, tail=tail, stop_rule=stop_rule)
    truth, shape = exact_attention(q, k, v), call_shape(q, k, v)
    (error, density), (split_error, split_density) = (
        (relative_error(outcome.out, truth), measure_density(outcome.visited, config, shape).mean())
        for outcome in (s2o_attention_reference(q, k, v, config, splits=count) for count in (1, splits))
    )
    assert 0.2 < density < 0.6
    assert density - 0.01 <= split_density <= density + tile.block_n / FEWEST_KEYS
    assert split_error <= 1.1 * error


def test_warming_up_compiles_what_splits():
    for heads, dense in ((4, 1), (8, 2), (64, 32), (4, 0)):  # with more heads no call of this GPU is split
        assert splits_of(*SPLIT_CALL, dense, heads) > 1
