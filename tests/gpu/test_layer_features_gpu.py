"""Sinks, soft caps, other scales and head dims in the compiled kernels: bf16, odd shapes, outputs filled with NaN."""

from dataclasses import replace

import pytest
import torch
import triton

from calibrate.timing import measure_medians
from s2o_runtime import LayerConfig, TileConfig, s2o_attention, s2o_attention_varlen
from s2o_runtime.attention.dense import fastest_dense_attention
from s2o_runtime.attention.replay import forget_plans
from s2o_runtime.call import Scoring
from s2o_runtime.config import HeadConfig, StopRule
from s2o_runtime.kernels import launch as launch_module
from s2o_runtime.reference.dense import dense_attention, exact_attention, log_sum_exp
from s2o_runtime.tiles import list_candidate_tiles
from support.gpu import drawn, inputs, relative_error
from support.layouts import pack, unpacked
from support.marks import pairwise

PLAIN = TileConfig(64, 64, 4, 4, 2)
HOPPER = TileConfig(64, 128, 4, 4, 2, specialized=True)
CAP = 8.0  # the inputs' scores reach about 15


def here():
    return torch.cuda.get_device_capability()


def sinks_of(heads):
    return torch.linspace(-2.0, 12.0, heads, device="cuda", dtype=torch.bfloat16)


def features_of(name, heads):
    return {
        "sinks": {"sinks": sinks_of(heads)},
        "cap": {"softcap": CAP},
        "all": {"sinks": sinks_of(heads), "softcap": CAP, "scale": 0.11},
    }[name]


SHAPES = [
    pytest.param((1, 4, 2, 1001, 1001, 128, None), id="L1001-D128"),
    pytest.param((1, 8, 1, 777, 2049, 64, None), id="q777-kv2049-D64"),
    pytest.param((3, 4, 2, 900, 900, 64, [0, 333, 899]), id="left-padded"),
    pytest.param((1, 2, 2, 7, 7, 128, None), id="L7"),
]


@pytest.mark.parametrize(
    ("shape", "name", "tile"),
    pairwise(SHAPES, ["sinks", "cap", "all"], [PLAIN, HOPPER]),
)
def test_tau_zero_is_exact(shape, name, tile, nan_filled):
    q, k, v, kv_start = drawn(shape)
    options = features_of(name, shape[1]) | {"kv_start": kv_start}
    kinds = (HeadConfig(0.0, 128), HeadConfig(0.0, 256, tail="mean"), HeadConfig(0.0, 128, "dense"))
    config = LayerConfig(tuple(kinds[h % 3] for h in range(shape[1])), tile)
    out, lse, _ = s2o_attention(q, k, v, config, backend="triton", return_lse=True, **options)
    truth = exact_attention(q, k, v, **options)
    assert relative_error(out, truth) < 6e-3  # one rounding of weights and one of the output, 2^-9 each
    torch.testing.assert_close(lse, log_sum_exp(q, k, **options), rtol=0, atol=4e-3)


@pytest.mark.parametrize(
    ("name", "tile", "starts"),
    pairwise(["sinks", "cap", "all"], [PLAIN, TileConfig(128, 64, 2, 8, 3), HOPPER], [None, [300, 1700]]),
)
def test_heads_that_stop_are_as_near_to_dense_as_the_reference(tile, name, starts, nan_filled):
    q, k, v, kv_start = drawn((2, 4, 2, 1100, 2500, 128, starts))
    options = features_of(name, 4) | {"kv_start": kv_start}
    heads = (
        HeadConfig(0.5, 512, representatives=16, tail="mean"),
        HeadConfig(0.3, 256, representatives=16),
        HeadConfig(0.05, 256, stop_rule=StopRule.PAPER),
        HeadConfig(1.0, 256, tail="mean"),
    )
    config = LayerConfig(heads, tile)
    out, _, stats = s2o_attention(q, k, v, config, backend="triton", return_stats=True, **options)
    theirs, _, expected = s2o_attention(q, k, v, config, backend="reference", return_stats=True, **options)
    truth = exact_attention(q, k, v, **options)
    torch.testing.assert_close(stats.density, expected.density, rtol=0.05, atol=0.01)
    for h in range(4):
        ours, reference = (relative_error(o[:, h], truth[:, h]) for o in (out, theirs))
        assert ours <= 2.0 * reference + 6e-3  # coarse order, sampled denominators, 16 edges, bf16


@pytest.mark.skipif(torch.cuda.is_available() and here() != (9, 0), reason="needs an sm_90 GPU")
@pytest.mark.parametrize("name", ["sinks", "cap", "all"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_specialised_kernel_visits_what_the_plain_one_visits(head_dim, name, nan_filled):
    q, k, v = inputs(1, 4, 2, 1500, 1500, head_dim, torch.bfloat16)
    config = LayerConfig.uniform(4, tau=0.5, segment=256, representatives=16, tail="mean", tile=HOPPER)
    options = {"backend": "triton", "return_stats": True, "return_lse": True} | features_of(name, 4)
    ours, our_lse, our_stats = s2o_attention(q, k, v, config, **options)
    config = config.with_tile(TileConfig(64, 128, 4, 8, 2))
    plain, plain_lse, plain_stats = s2o_attention(q, k, v, config, **options)
    same = our_stats.visited == plain_stats.visited
    assert same.float().mean() > 0.98  # a gain next to the threshold may round to either side of it
    rows = same.repeat_interleave(64, 2)[:, :, :1500]
    assert relative_error(ours[rows], plain[rows].float()) < 8e-3
    torch.testing.assert_close(our_lse[rows], plain_lse[rows], rtol=0, atol=4e-3)


def test_packed_sequences_have_sinks_too(nan_filled):
    parts, packed = pack([700, 1301], [700, 1301], 4, 2, 64, inputs)
    config = LayerConfig.uniform(4, tau=0.5, segment=128, representatives=16, tail="mean", tile=PLAIN)
    options = features_of("all", 4) | {"backend": "triton"}
    out = s2o_attention_varlen(*packed, 1301, 1301, config, **options)
    for part, of_part in zip(parts, unpacked(parts, out), strict=True):
        assert torch.equal(of_part, s2o_attention(*part, config, **options)[0])


@pytest.mark.parametrize(("head_dim", "value_dim"), [(80, 80), (96, 96), (192, 192), (256, 256), (192, 128), (64, 128)])
def test_every_head_dim_runs_or_is_dense_with_a_reason(head_dim, value_dim, nan_filled):
    q, k, _ = inputs(1, 4, 2, 701, 1203, head_dim, torch.bfloat16)
    v = inputs(1, 4, 2, 701, 1203, value_dim, torch.bfloat16)[2]
    tiles = list_candidate_tiles(max(head_dim, value_dim), here())
    tile = replace(next((tile for tile in tiles if not tile.specialized), PLAIN), min_queries=2)
    config = LayerConfig.uniform(4, tau=0.0, segment=128, tile=tile)
    out, _, stats = s2o_attention(q, k, v, config, return_stats=True)
    assert (stats.backend, "has no tile" in stats.reason) == (("triton", False) if tiles else ("dense", True))
    assert out.shape == (1, 4, 701, value_dim)
    assert relative_error(out, exact_attention(q, k, v)) < 6e-3


@pytest.mark.parametrize("head_dim", [64, 128])
def test_dense_attention_with_sinks_takes_a_fast_backend(head_dim):
    """Sinks cost dense attention a few more dimensions and one more key, not a matrix of scores."""
    q, k, v = inputs(1, 8, 2, 8192, 8192, head_dim, torch.bfloat16)
    sinks = sinks_of(8)
    assert relative_error(dense_attention(q, k, v, sinks=sinks), exact_attention(q, k, v, sinks=sinks)) < 6e-3
    calls = {"plain": lambda: dense_attention(q, k, v), "sinks": lambda: dense_attention(q, k, v, sinks=sinks)}
    seconds = measure_medians(calls, torch.device("cuda"), 5)
    print(f"dense attention of 8192 tokens with sinks: {seconds['sinks'] / seconds['plain']:.2f} times one without")
    assert seconds["sinks"] < 8 * seconds["plain"]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dense_attention_with_a_cap_runs_in_the_kernel(head_dim, nan_filled):
    """What runs where no profile chose anything; plain torch in float32 would take many times as long."""
    q, k, v = inputs(1, 8, 2, 4097, 4097, head_dim, torch.bfloat16)
    options = {"softcap": CAP, "sinks": sinks_of(8)}
    truth = exact_attention(q, k, v, **options)
    assert relative_error(fastest_dense_attention(q, k, v, Scoring(**options)), truth) < 6e-3
    seconds = measure_medians(
        {
            "kernel": lambda: fastest_dense_attention(q, k, v, Scoring(**options)),
            "torch": lambda: dense_attention(q, k, v, **options),
        },
        torch.device("cuda"),
        5,
    )
    print(f"4097 tokens with a cap, D {head_dim}: {1e3 * seconds['kernel']:.2f} ms, {1e3 * seconds['torch']:.2f} ms")
    if list_candidate_tiles(head_dim, here()):
        assert seconds["kernel"] < seconds["torch"] / 2


@pytest.mark.skipif(not launch_module._is_tested(triton.__version__), reason="no call becomes a plan with this Triton")
def test_calls_with_sinks_become_plans(replays, nan_filled):
    """The sinks of a later call are its own: a pointer of the plan's inputs, not a constant of it."""
    q, k, v = inputs(1, 4, 2, 1500, 1500, 128, torch.bfloat16)
    config = LayerConfig.uniform(4, tau=0.5, segment=256, tile=PLAIN)
    sinks = [torch.nn.Parameter(sinks_of(4)), torch.nn.Parameter(sinks_of(4).flip(0).contiguous())]

    @torch.no_grad()
    def call(index):
        return s2o_attention(q, k, v, config, sinks=sinks[index], backend="triton")

    expected = []
    for index in (0, 1):
        forget_plans()
        expected.append(call(index))
    forget_plans()
    assert all(torch.equal(call(index), expected[index]) for index in (0, 0, 0, 1, 0))
    assert replays == [True] * 3  # after the first call and the recorded one
    assert not torch.equal(*expected)


def test_a_compiled_call_takes_sinks_and_a_cap():
    q, k, v = inputs(1, 4, 2, 1500, 1500, 128, torch.bfloat16)
    config = LayerConfig.uniform(4, tau=0.5, segment=256, tile=PLAIN)

    def call(q, k, v, sinks):
        return s2o_attention(q, k, v, config, sinks=sinks, softcap=CAP) * 2

    assert torch.equal(torch.compile(call, fullgraph=True)(q, k, v, sinks_of(4)), call(q, k, v, sinks_of(4)))
