"""Kernels that overlap on a GPU: the same bits as kernels that run one after the other, however calls follow.

The compiled kernels differ, by two instructions, with and without overlap. So every case has two references: calls
without overlap, and calls of the overlapping kernels with the GPU idle before each launch. If only the first differs,
the compiler rounds elsewhere; if the second does, a kernel touches memory before it waits.
"""

import itertools
from contextlib import contextmanager

import pytest
import torch
import triton

from s2o_runtime import LayerConfig, TileConfig, s2o_attention, s2o_attention_varlen
from s2o_runtime.attention.replay import RepeatedCall, forget_plans
from s2o_runtime.config import HeadConfig
from s2o_runtime.kernels import launch as launch_module
from s2o_runtime.kernels import prefill
from s2o_runtime.kernels.plan import Plan
from support.gpu import inputs

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < launch_module.OVERLAP_CAPABILITY,
        reason="no kernels overlap on this GPU",
    ),
]

SETS = 4  # of inputs, which calls take in turn
ROUNDS = 6  # of calls with each set, back to back
PLAIN = TileConfig(64, 64, 2, 4, 2)
HOPPER = TileConfig(64, 128, 2, 4, 2, specialized=True)
TILES = [pytest.param(PLAIN, id="plain"), pytest.param(HOPPER, id="hopper")]
# batch, query heads, KV heads, queries, keys, head dim, first keys: short ones, whose launches take longest beside them
SHAPES = [
    pytest.param(1, 8, 2, 8192, 8192, 128, None, id="L8192"),
    pytest.param(1, 8, 2, 8191, 8191, 128, None, id="L8191"),
    pytest.param(1, 4, 2, 1000, 1000, 64, None, id="L1000-D64"),
    pytest.param(1, 4, 4, 300, 2049, 128, None, id="q300-kv2049"),
    pytest.param(3, 4, 2, 1500, 1500, 128, [0, 333, 1499], id="left-padded"),
    pytest.param(1, 8, 2, 24577, 24577, 128, None, id="L24577"),
]


def layer(heads, tail, scores, tile, mixed=False):
    """Thresholds at which tiles stop at different places; with `mixed` every launch there is."""
    kinds = [HeadConfig(0.5, 256, tail=tail)]
    if mixed:
        kinds += [HeadConfig(0.1, 512, representatives=32, tail=tail), HeadConfig(0.0, 256, "dense")]
        kinds += [HeadConfig(2.0, 256, representatives=4)]
    chosen = tuple(kinds[h % len(kinds)] for h in range(heads))
    return LayerConfig(chosen, tile, scores=scores, grain=4 if mixed else 1)


def skip_unless_supported(tile):
    if tile.specialized and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")


@contextmanager
def kernels(monkeypatch, overlap, alone=False):
    """Calls inside launch overlapping kernels or others; with `alone` every launch finds the GPU idle."""
    with monkeypatch.context() as patch:
        patch.setattr(launch_module, "OVERLAP", overlap)
        if alone:  # a call that is recorded takes the listener, and a plan does without
            patch.setattr(RepeatedCall, "recorder", lambda repeated, tensors: None)
            patch.setattr(launch_module.observed, "listener", lambda *launched: torch.cuda.synchronize())
        forget_plans()
        torch.cuda.synchronize()
        yield
        torch.cuda.synchronize()
    forget_plans()


@pytest.fixture
def replays(monkeypatch):
    """For every call that had a plan, whether the plan was used."""
    used = []
    replay = Plan.replay

    def counted(plan, tensors):
        outputs = replay(plan, tensors)
        used.append(outputs is not None)
        return outputs

    monkeypatch.setattr(Plan, "replay", counted)
    return used


def differences(ours, theirs):
    """Which results of which calls differ."""
    return [
        (i, j, int((a != b).sum()))
        for i, (left, right) in enumerate(zip(ours, theirs, strict=True))
        for j, (a, b) in enumerate(zip(left, right, strict=True))
        if not torch.equal(a, b)
    ]


def drawn(seed, *shape):
    """Inputs of `support.gpu`, other ones for every seed."""
    tensors = inputs(*shape, torch.bfloat16)
    return tuple(torch.roll(tensor, seed, 2) + 0.25 * seed for tensor in tensors)


def references(call, sets, monkeypatch):
    """The results for each set of inputs without overlap, and of overlapping kernels that find the GPU idle."""
    with kernels(monkeypatch, overlap=False):
        apart = [call(*tensors) for tensors in sets]
    with kernels(monkeypatch, overlap=True, alone=True):
        alone = [call(*tensors) for tensors in sets]
    return apart, alone


def check_back_to_back(call, sets, monkeypatch, replays):
    """Calls that follow one another at once, and calls behind the copy of their inputs, are the references."""
    apart, alone = references(call, sets, monkeypatch)
    assert differences(apart[:1], apart[1:2])  # stale results would show
    with kernels(monkeypatch, overlap=True):
        before = len(replays)
        results = [call(*tensors) for _ in range(ROUNDS) for tensors in sets]
        # one place for the inputs: the next ones are copied there while kernels may still be on their way
        static = [tensor.clone() for tensor in sets[0]]
        copied = []
        for tensors in sets * 2:
            for to, tensor in zip(static, tensors, strict=True):
                to.copy_(tensor)
            copied.append(call(*static))
        torch.cuda.synchronize()
        replayed = replays[before:]
    assert not differences(results, alone * ROUNDS), "a race"
    assert not differences(copied, alone * 2), "a race with what produces the inputs"
    assert not differences(alone, apart), "no race: the compiled kernels round differently"
    if launch_module._direct(triton.__version__):
        assert replayed
        assert all(replayed)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("scores", ["input", "int8"])
@pytest.mark.parametrize("tail", [False, True], ids=["", "tail"])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "starts"), SHAPES)
def test_overlap_changes_no_bit(
    batch, heads, kv_heads, q_len, kv_len, head_dim, starts, tail, scores, tile, monkeypatch, replays
):  # fmt: skip
    skip_unless_supported(tile)
    if tile.specialized and head_dim == 64:
        tile = TileConfig(64, 128, 2, 4, 3, specialized=True)
    config = layer(heads, tail, scores, tile)
    kv_start = None if starts is None else torch.tensor(starts, device="cuda")

    def call(q, k, v):
        out, lse, stats = s2o_attention(
            q, k, v, config, kv_start=kv_start, backend="triton", return_lse=True, return_stats=True
        )
        return out, lse, stats.visited

    sets = [drawn(seed, batch, heads, kv_heads, q_len, kv_len, head_dim) for seed in range(SETS)]
    check_back_to_back(call, sets, monkeypatch, replays)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("workspace", [None, 1 << 20], ids=["one-slice", "slices"])
def test_every_launch_there_is(tile, workspace, monkeypatch, replays):
    """Heads of all kinds, so that kernels run for several numbers of representatives, also slice by slice: slices take
    turns in one piece of memory, so that a kernel writes where the one before its predecessor read."""
    skip_unless_supported(tile)
    if workspace is not None:
        monkeypatch.setattr(prefill, "WORKSPACE_BYTES", workspace)
    config = layer(8, True, "int8", tile, mixed=True)

    def call(q, k, v):
        return s2o_attention(q, k, v, config, backend="triton", return_lse=True)[:2]

    sets = [drawn(seed, 1, 8, 2, 6001, 6001, 128) for seed in range(SETS)]
    check_back_to_back(call, sets, monkeypatch, replays)


@pytest.mark.parametrize("tile", TILES)
def test_packed_sequences(tile, monkeypatch, replays):
    skip_unless_supported(tile)
    config = layer(8, True, "input", tile)
    edges = torch.tensor([0, *itertools.accumulate([2000, 77, 923])], dtype=torch.int32, device="cuda")

    def call(q, k, v):
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
        return s2o_attention_varlen(q, k, v, edges, edges, 2000, 2000, config, backend="triton", return_lse=True)[:2]

    sets = [drawn(seed, 1, 8, 2, 3000, 3000, 128) for seed in range(SETS)]
    check_back_to_back(call, sets, monkeypatch, replays)


@pytest.mark.parametrize("tile", TILES)
def test_a_call_reads_what_the_one_before_wrote(tile, monkeypatch):
    """Nothing runs between the two: the first kernel of a call follows the last one of another."""
    skip_unless_supported(tile)
    config = layer(8, True, "input", tile)
    q, k, v = drawn(1, 1, 8, 2, 2500, 2500, 128)

    def chain():
        outs = [q]
        for _ in range(12):
            outs.append(s2o_attention(outs[-1], k, v, config, backend="triton"))
        return outs

    with kernels(monkeypatch, overlap=True, alone=True):
        expected = chain()
    with kernels(monkeypatch, overlap=True):
        for _ in range(5):
            assert not differences([chain()], [expected])


@pytest.mark.parametrize("tile", TILES)
def test_two_streams(tile, monkeypatch):
    skip_unless_supported(tile)
    config = layer(8, True, "input", tile)
    sets = [drawn(seed, 1, 8, 2, 3001, 3001, 128) for seed in range(2)]

    def call(q, k, v):
        return (s2o_attention(q, k, v, config, backend="triton"),)

    _, alone = references(call, sets, monkeypatch)
    streams = [torch.cuda.Stream() for _ in sets]
    with kernels(monkeypatch, overlap=True):
        results = []
        for _ in range(10):
            for stream, tensors in zip(streams, sets, strict=True):
                with torch.cuda.stream(stream):
                    results.append(call(*tensors))
    assert not differences(results, alone * 10)


@pytest.mark.parametrize("tile", TILES)
def test_a_cuda_graph_keeps_the_overlap_and_the_bits(tile, monkeypatch):
    skip_unless_supported(tile)
    config = layer(8, True, "input", tile)
    sets = [drawn(seed, 1, 8, 2, 2500, 2500, 128) for seed in range(SETS)]

    def call(q, k, v):
        first = s2o_attention(q, k, v, config, backend="triton")
        return first, s2o_attention(first, k, v, config, backend="triton")

    _, alone = references(call, sets, monkeypatch)
    with kernels(monkeypatch, overlap=True):
        static = [tensor.clone() for tensor in sets[0]]
        for _ in range(5):
            call(*static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(*static)
        results = []
        for tensors in sets * 3:
            for to, tensor in zip(static, tensors, strict=True):
                to.copy_(tensor)
            graph.replay()
            results.append([tensor.clone() for tensor in out])
    assert not differences(results, alone * 3)
