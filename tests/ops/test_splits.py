"""Dense heads split over keys: when and how finely, and what is compiled before; test_kernels.py has the op."""

import itertools

import pytest
import torch

from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.replay import forget_plans
from s2o_runtime.attention.warmup import SPLIT_CALL, split_calls, warmup
from s2o_runtime.call import Call
from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.devices import Resources, get_resources
from s2o_runtime.kernels import launch as launch_module
from s2o_runtime.kernels.splits import DENSITY, FEWEST_KEYS, LAST, SPLIT_BYTES, SPLITS, count_key_splits
from s2o_runtime.reference.dense import exact_attention
from support.kernels import HOPPER, ON_GPU, PLAIN, inputs, mixed_config, relative_error
from support.layouts import as_transformers

GPU = Resources(132, 50 << 20)


def splits_of(q_len, kv_len, dense=2, heads=8, batch=1, gpu=GPU):
    """In a layer with so many dense heads, all others alike, and programs of 128 rows."""
    others = HeadConfig(1.0, HOPPER.rows)
    config = LayerConfig((HeadConfig(mode="dense"),) * dense + (others,) * (heads - dense), HOPPER)
    sizes = (heads, q_len), (heads // 4, kv_len), (heads // 4, kv_len)
    tensors = (torch.empty(1).expand(batch, *size, 128) for size in sizes)
    return count_key_splits(Call.from_tensors(*tensors, config), -(-q_len // HOPPER.rows), gpu)


def test_few_queries_behind_many_keys_are_split():
    assert [splits_of(2048, 1 << power) for power in range(11, 18)] == [1, 1, 4, 8, 16, 16, 16]
    assert splits_of(4096, 131072) == 8
    assert splits_of(8192, 131072) == 1  # a dense program takes 0.6 times the mean work of an SM
    assert splits_of(2048, 131072, dense=0) == 1
    assert splits_of(2048, 131072, dense=8, heads=32) == 1
    assert splits_of(2048, 131072, dense=4, heads=32) == 8
    assert splits_of(2048, 131072, batch=4) == 1  # whose programs are enough
    assert splits_of(2048, 131072, gpu=Resources(1, 0)) == 1


@pytest.mark.parametrize(("dense", "heads"), [(1, 4), (2, 8), (1, 32), (4, 32), (16, 32)])
@pytest.mark.parametrize("batch", [1, 3])
def test_splits_are_few_enough_and_short_enough(dense, heads, batch):
    fewest, most = SPLITS
    for q_len, kv_len in itertools.product((1, 100, 500, 1000, 2048, 5000), (3000, 9000, 33000, 131072, 1 << 20)):
        splits = splits_of(q_len, kv_len, dense, heads, batch) if q_len <= kv_len else 1
        if splits == 1:
            continue
        assert splits in (4, 8, 16)
        assert fewest <= splits <= most
        assert kv_len >= 2 * q_len
        assert kv_len / splits >= FEWEST_KEYS
        programs = batch * -(-q_len // HOPPER.rows)
        split_bytes = 4 * 128 * dense * programs * HOPPER.rows
        assert splits * split_bytes <= SPLIT_BYTES
        of_sm = programs * (dense + DENSITY * (heads - dense)) / GPU.sm_count
        bounded = splits == most or kv_len / (2 * splits) < FEWEST_KEYS or 2 * splits * split_bytes > SPLIT_BYTES
        assert bounded or 1 / splits <= LAST * of_sm


def test_warming_up_compiles_what_splits():
    for heads, dense in ((4, 1), (8, 2), (64, 32), (128, 64)):
        assert splits_of(*SPLIT_CALL, dense, heads) > 1
    assert split_calls(mixed_config(4, 1.0)) == [SPLIT_CALL]
    assert split_calls(LayerConfig.uniform(4)) == split_calls(mixed_config(4, 1.0).as_dense()) == []


@pytest.mark.skipif(not ON_GPU, reason="needs compiled kernels")
@pytest.mark.parametrize("tile", [PLAIN, HOPPER])
def test_nothing_compiles_after_warmup_and_a_replay_is_the_call(tile):
    gpu = get_resources(torch.device("cuda"))
    assert splits_of(128 * max(1, gpu.sm_count // 8), 131072, gpu=gpu) >= 4  # programs of an eighth of this GPU's SMs
    config, dense = mixed_config(4, 1.0, tile=tile), [2]
    warmup(config, kv_heads=2, head_dim=128)
    known = len(launch_module._compiled)
    forget_plans()
    q, k, v = as_transformers(*inputs(1, 4, 2, 700, 60000, 128))
    for _ in range(3):
        s2o_attention(q, k, v, config, backend="triton")
    assert len(launch_module._compiled) == known
    (other,) = as_transformers(q.flip(2))
    replayed = s2o_attention(other, k, v, config, backend="triton")
    forget_plans()
    assert torch.equal(replayed, s2o_attention(other, k, v, config, backend="triton"))
    assert relative_error(replayed[:, dense], exact_attention(other, k, v)[:, dense]) <= 6e-3
