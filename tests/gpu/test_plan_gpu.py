"""Replayed calls on a GPU: the same bits as the calls they stand for, and little time on the host."""

import itertools
import time

import pytest
import torch
import triton

from s2o_runtime import HeadConfig, LayerConfig, TileConfig, s2o_attention, s2o_attention_paged, s2o_attention_varlen
from s2o_runtime.attention.replay import forget_plans
from s2o_runtime.devices import identify
from s2o_runtime.identity import Geometry
from s2o_runtime.kernels import launch as launch_module
from s2o_runtime.profile import Profile
from s2o_runtime.sequences import make_packed_starts
from s2o_runtime.serving.fit import Rank
from support.fake_server import FakeServer
from support.fake_vllm import FakeEngine
from support.gpu import laid_out

pytestmark = pytest.mark.skipif(
    not launch_module._is_tested(triton.__version__),
    reason=f"no call becomes a plan with Triton {triton.__version__}: see TESTED_TRITONS and test_launch_gpu.py",
)

HOST_MICROSECONDS = 100.0  # 43 to 47 on an idle host; tests may share theirs
SERVER_MICROSECONDS = 200.0  # of a layer's call between vLLM and the launches, output's allocation included
HOPPER = TileConfig(64, 128, 2, 4, 2, specialized=True)
TILES = [pytest.param(TileConfig(64, 64, 2, 4, 2), id="plain"), pytest.param(HOPPER, id="hopper")]


@pytest.fixture(autouse=True)
def _no_plans():
    forget_plans()


def without_plan(call):
    forget_plans()
    return call()


def same(ours, theirs):
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True))


def on_another_stream(call):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = call()
    torch.cuda.current_stream().wait_stream(stream)
    return result


PLAIN_HEADS = (HeadConfig(0.5, 256),) * 8
MIXED_HEADS = (HeadConfig(0.3, 256), HeadConfig(1.0, 256, representatives=16, tail="mean"))
MIXED_HEADS += (HeadConfig(mode="dense"), HeadConfig(0.5, 128))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("heads", "starts"),
    [(PLAIN_HEADS, None), (PLAIN_HEADS, [7, 900]), (2 * MIXED_HEADS, None)],
    ids=["", "left-padded", "mixed"],
)
def test_a_replay_is_the_call_bit_for_bit(tile, heads, starts, replays, nan_filled):
    config = LayerConfig(heads, tile)
    batch = 1 if starts is None else len(starts)

    def call(q, k, v):
        kv_start = None if starts is None else torch.tensor(starts, device="cuda")
        out, lse, stats = s2o_attention(
            q, k, v, config, kv_start=kv_start, backend="triton", return_lse=True, return_stats=True
        )
        return out, lse, stats.visited

    sets = [laid_out(1500, batch=batch, seed=seed) for seed in range(4)]
    expected = [without_plan(lambda tensors=tensors: call(*tensors)) for tensors in sets]
    forget_plans()
    for tensors, results in zip(sets, expected, strict=True):
        assert same(call(*tensors), results)
        for length in (1200, 1501):  # other kinds in between
            call(*laid_out(length, batch=batch))
    # the first two calls of each kind were no replays; every call after them was
    assert replays == [True] * (3 * 4 - 3 * 2)
    with torch.inference_mode():
        assert same(call(*sets[1]), expected[1])
    assert same(on_another_stream(lambda: call(*(tensor.clone() for tensor in sets[2]))), expected[2])
    assert replays[-2:] == [True, True]


@pytest.mark.parametrize("tile", TILES)
def test_packed_calls_are_replayed_for_other_edges(tile, replays, nan_filled):
    config = LayerConfig.uniform(8, tau=0.5, segment=256, tile=tile)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in laid_out(3000))

    def call(lengths):
        edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
        return s2o_attention_varlen(q, k, v, edges, edges, 2000, 2000, config, backend="triton", return_lse=True)[:2]

    kinds = ([2000, 1000], [1000, 2000], [1400, 1600], [2000, 1000])
    expected = [without_plan(lambda lengths=lengths: call(lengths)) for lengths in kinds]
    forget_plans()
    assert all(same(call(lengths), results) for lengths, results in zip(kinds, expected, strict=True))
    assert replays == [True, True]


PAGES, PAGE, MOST = 400, 16, 2048  # of a server's cache; queries and keys, a bound of all calls


def paged_call(cache, q, config, queries, lengths, plans=True):
    """vLLM's call of a layer: queries out of a fused projection, pages of one cache, an output that was NaN."""
    cu_q, seq_lens = (torch.tensor(counts, dtype=torch.int32, device="cuda") for counts in (queries, lengths))
    table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(sum(lengths)))[: 2 * (MOST // PAGE)]
    out = torch.full((len(q), 8, 128), float("nan"), dtype=q.dtype, device="cuda")
    if not plans:
        forget_plans()
    attention = s2o_attention_paged(
        q, *cache.unbind(1), config,
        cu_q=make_packed_starts(cu_q), seq_lens=seq_lens, block_table=table.view(2, -1).int().cuda(), max_q=MOST,
        max_k=MOST, total_k=2 * MOST, backend="triton", out=out, return_stats=True,
    )  # fmt: skip
    return attention.out, attention.stats.visited


@pytest.mark.parametrize("tile", TILES)
def test_paged_calls_are_replayed_for_other_lengths(tile, replays, nan_filled):
    """The copy out of pages is part of the plan, which writes the caller's output; bit for bit as without a plan."""
    config = LayerConfig.uniform(8, tau=0.5, segment=256, representatives=16, tail="mean", tile=tile)
    cache = torch.randn(PAGES, 2, PAGE, 2, 128, device="cuda").bfloat16()
    calls = []
    for queries, lengths in (
        ([2000, 1000], [2000, 1000]), ([1000, 2000], [1001, 2048]), ([1, 777], [2000, 777]), ([2048, 5], [2048, 2047])
    ):  # fmt: skip
        qkv = torch.randn(sum(queries), 12 * 128, device="cuda").bfloat16()
        calls.append((qkv[:, : 8 * 128].view(-1, 8, 128), queries, lengths))
    with torch.inference_mode():
        expected = [paged_call(cache, q, config, *counts, plans=False) for q, *counts in calls]
        assert not replays
        forget_plans()
        for (q, *counts), results in zip(calls, expected, strict=True):
            assert same(paged_call(cache, q, config, *counts), results)
    assert replays == [True, True]
    assert same(on_another_stream(lambda: paged_call(cache, calls[0][0], config, *calls[0][1:])), expected[0])
    assert replays[2:] == [True]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("calls_before", [1, 3], ids=["recorded", "replayed"])
def test_cuda_graphs_capture_a_replay(tile, calls_before, replays):
    config = LayerConfig.uniform(8, tau=0.5, segment=256, tile=tile)
    q, k, v = laid_out(1500)
    for _ in range(calls_before):
        s2o_attention(q, k, v, config, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = s2o_attention(q, k, v, config, backend="triton")
    for tensor, other in zip((q, k, v), laid_out(1500, seed=1), strict=True):
        tensor.copy_(other)
    s2o_attention(*laid_out(1500, seed=2), config, backend="triton")  # memory of its own
    graph.replay()
    assert replays
    assert torch.equal(out, without_plan(lambda: s2o_attention(q, k, v, config, backend="triton")))


def test_pointers_that_are_not_aligned_run_the_long_way(replays):
    config = LayerConfig.uniform(8, tau=0.5, segment=256, tile=TileConfig(64, 64, 2, 4, 2))
    q, k, v = laid_out(1500)
    for _ in range(3):
        expected = s2o_attention(q, k, v, config, backend="triton")
    memory = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:]
    shifted = memory.view(1, 1500, 8, 128).transpose(1, 2).copy_(q)
    out = s2o_attention(shifted, k, v, config, backend="triton")
    assert replays == [True, False]
    # another compiled kernel, which may add in another order
    assert float((out - expected).norm() / expected.norm()) <= 1e-2


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("return_stats", [False, True], ids=["", "stats"])
@pytest.mark.usefixtures("alone")
def test_a_replayed_call_takes_little_time_on_the_host(tile, return_stats, capsys):
    config = LayerConfig.uniform(32, tau=0.5, segment=256, tile=tile)
    q, k, v = laid_out(4096, heads=32, kv_heads=8)

    def call():
        s2o_attention(q, k, v, config, backend="triton", return_stats=return_stats)

    def per_call(warm):
        """Microseconds: the least of bursts short enough for the launch queue, so that no call waits for the GPU, and
        as other processes of the host only add."""
        times = []
        for _ in range(30):
            if not warm:
                forget_plans()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(20 if warm else 1):
                call()
            times.append((time.perf_counter() - begin) / (20 if warm else 1) * 1e6)
        return min(times)

    call()
    cold = per_call(warm=False)
    for _ in range(3):
        call()
    replayed = per_call(warm=True)
    with capsys.disabled():
        print(f"\nhost microseconds per call: {cold:.1f} the first time, {replayed:.1f} replayed")
    assert replayed < HOST_MICROSECONDS


@pytest.mark.parametrize("tile", TILES)
def test_a_layer_of_a_server_takes_little_time_on_the_host(tile, replays, capsys, alone):
    """One prompt in one chunk, a little longer each time: all of S2O's backend between vLLM and the launches."""
    geometry = Geometry("llama", 1, 8, 2, 128)
    config = LayerConfig.uniform(8, tau=0.5, segment=256, representatives=16, tail="mean", tile=tile)
    device = identify(torch.device("cuda"))
    profile = Profile("made", geometry, "", device, (1024, 8192), ((config,),) * 2).validate()
    engine = FakeEngine(FakeServer(profile, Rank(), "cuda", 16384), torch.bfloat16, "cuda", layout="pages of two")
    request, times = engine.add(4000), []
    with torch.inference_mode():
        for length in range(3900, 3950):  # of one bound
            request.done = 0
            batch = engine.prepare([(request, length)])
            batch.forward()  # what the layers of a batch share
            torch.cuda.synchronize()
            begin = time.perf_counter()
            batch.forward()
            times.append(time.perf_counter() - begin)
    assert replays == [True] * 98
    microseconds = min(times) * 1e6  # other processes of the host only add
    with capsys.disabled():
        print(f"\nhost microseconds of a layer in a server: {microseconds:.1f}")
    assert microseconds < SERVER_MICROSECONDS
