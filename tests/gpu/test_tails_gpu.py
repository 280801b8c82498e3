"""Few queries behind many keys: whatever the op chooses by itself is no slower than dense attention."""

import statistics
import time
from functools import partial

import pytest
import torch

from calibrate.search.tiles import Layer, with_crossover
from calibrate.timing import measure_medians
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import LayerConfig
from s2o_runtime.identity import Geometry
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.tiles import list_candidate_tiles
from scripts.bench.calls import bisect, device_tile
from scripts.bench.inputs import random_qkv

DENSITY = 0.25  # of a whole prompt
QUERIES = [1 << power for power in range(16)]
KEYS = [1 << power for power in range(11, 18)]
TIE = 0.98  # of dense attention's speed: less is slower than it
TURNS = 8  # even, so that each call comes as often before another as after it
TRIES = 3  # a median of few rounds may be off by more than a tie's 2%
ROUNDS = 300
HOST_MICROSECONDS = 3.0  # the op knows a call that comes again, and is a little faster than dense attention's checks


def longest_call(heads, keys):
    """q, k, v of a whole prompt of random tensors, and a layer that computes a quarter of the pairs of 32768 tokens."""
    device = torch.device("cuda")
    size = {"length": keys, "batch": 1, "heads": heads, "head_dim": 128}
    qkv = random_qkv(**size, dtype=torch.bfloat16, seed=0, device=device)
    whole = last(qkv, min(keys, 32768), min(keys, 32768))
    never_stop = LayerConfig.uniform(heads[0], segment=1024, tail="mean", tile=device_tile(128, device))
    config = bisect(never_stop, DENSITY, 10, lambda c: s2o_attention(*whole, c, return_stats=True).density.cpu())
    return qkv, config


def measured(config, heads):
    """The layer with what calibration measures of short calls: from how many queries on the kernels are worth it."""
    geometry = Geometry("bench", 1, *heads, 128)
    return config.with_tile(with_crossover(Layer(config, DENSITY), geometry, torch.device("cuda")))


def last(qkv, queries, keys):
    """The call of the last `queries` of the first `keys` positions."""
    q, k, v = qkv
    return q[:, :, keys - queries : keys], k[:, :, :keys], v[:, :, :keys]


def slower_every_time(qkv, config, keys, limit):
    """How fast dense attention is over the op, of the calls that are slower than `limit` in each of the tries."""
    calls = [(queries, count) for count in keys for queries in QUERIES if queries <= count]
    for _ in range(TRIES):
        ratios = {}
        for call in calls:
            jobs = {"dense": partial(dense_attention, *last(qkv, *call))}
            jobs["auto"] = partial(s2o_attention, *last(qkv, *call), config)
            seconds = measure_medians(jobs, qkv[0].device, TURNS)
            ratios[call] = seconds["dense"] / seconds["auto"]
        calls = [call for call, ratio in ratios.items() if not ratio > limit]
        if not calls:
            break
    return {call: ratios[call] for call in calls}


@torch.no_grad()
@pytest.mark.parametrize("heads", [(8, 2), (32, 8)], ids=["8/2", "32/8"])
def test_no_call_of_the_grid_is_slower_than_dense(heads):
    qkv, config = longest_call(heads, KEYS[-1])
    assert not slower_every_time(qkv, measured(config, heads), KEYS, TIE)


@torch.no_grad()
def test_the_gpus_default_is_on_the_safe_side():
    qkv, config = longest_call((32, 8), 131072)
    assert s2o_attention(*last(qkv, 1, 131072), config, return_stats=True).stats.backend == "dense"
    assert not slower_every_time(qkv, config, (32768, 131072), 0.9)


@torch.no_grad()
def test_a_prompt_in_chunks_takes_little_longer_than_at_once(alone):
    qkv, config = longest_call((32, 8), 131072)
    config = measured(config, (32, 8))

    def feed(chunk):
        for end in range(chunk, 131073, chunk):
            s2o_attention(*last(qkv, chunk, end), config)

    seconds = measure_medians({chunk: partial(feed, chunk) for chunk in (2048, 8192, 131072)}, qkv[0].device, TURNS)
    assert seconds[2048] < 1.5 * seconds[131072]  # 1.31 and 1.04 on an H200 (docs/results/bench-tails-h200.json)
    assert seconds[8192] < 1.1 * seconds[131072]


@pytest.mark.parametrize("queries", [1, 64])
def test_a_call_that_goes_dense_takes_the_host_no_longer_than_dense_attention(queries, alone):
    """The host is what a server without CUDA graphs waits for in a short call."""
    tile = list_candidate_tiles(128, torch.cuda.get_device_capability())[0]
    config = LayerConfig.uniform(8, tau=0.5, segment=256, tile=tile)
    q = torch.randn(1, 8, queries, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, 2, 4096, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    calls = {"dense": lambda: dense_attention(q, k, v), "auto": lambda: s2o_attention(q, k, v, config)}
    times = {name: [] for name in calls}
    with torch.no_grad():
        assert torch.equal(calls["dense"](), calls["auto"]())
        for _ in range(ROUNDS):
            for name, call in calls.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
    microseconds = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
    print(f"host microseconds of {queries} queries: {microseconds}")
    assert microseconds["auto"] < microseconds["dense"] + HOST_MICROSECONDS
