"""The compiled kernels on a GPU in bf16 and fp16, against float32 dense attention and the reference."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from s2o_runtime import LayerConfig, TileConfig, s2o_attention, s2o_attention_varlen, warmup
from s2o_runtime.call import Call
from s2o_runtime.config import KEY_BLOCK, HeadConfig, StopRule
from s2o_runtime.kernels import launch as launch_module
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.kernels.rank.order import order
from s2o_runtime.reference.dense import dense_attention, exact_attention, log_sum_exp
from s2o_runtime.sequences import call_shape, measure_density
from s2o_runtime.tiles import list_candidate_tiles
from support.gpu import SHAPES, SHAPES_256, drawn, inputs, relative_error
from support.kernels import kernel_ranking
from support.layouts import as_transformers, pack, unpacked
from support.marks import pairwise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tau_zero_is_dense(shape, dtype, nan_filled):
    q, k, v, kv_start = drawn(shape, dtype)
    kinds = (HeadConfig(0.0, 128), HeadConfig(0.0, 256), HeadConfig(0.0, 128, "dense"))
    config = LayerConfig(tuple(kinds[h % 3] for h in range(shape[1])), TileConfig(128, 32, 8, 8, 3))
    truth = exact_attention(q, k, v, kv_start=kv_start)
    out, _, stats = s2o_attention(q, k, v, config, kv_start=kv_start, backend="triton", return_stats=True)
    # one rounding of weights and one of the output: no worse than twice what SDPA makes of the same inputs
    dense = relative_error(dense_attention(q, k, v, kv_start=kv_start), truth)
    assert relative_error(out, truth) <= 2 * dense + 1e-3
    assert torch.equal(out.abs().sum(-1) == 0, truth.abs().sum(-1) == 0)  # padding rows, and no other, are zero
    torch.testing.assert_close(stats.density, torch.ones_like(stats.density), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("stop_rule", "tau"),
    [(StopRule.REST, 1.0), (StopRule.REST, 0.3), (StopRule.PAPER, 0.1), (StopRule.PAPER, 0.03)],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES)
def test_stopping_follows_the_reference(shape, stop_rule, tau, nan_filled):
    """Ranking in bf16 orders near-equal keys differently, so errors and densities agree closely, not exactly."""
    q, k, v, kv_start = drawn(shape)
    options = {"tau": tau, "segment": 256, "stop_rule": stop_rule, "tile": TileConfig(128, 32, 4, 8, 3)}
    config = LayerConfig.uniform(shape[1], **options)
    truth = exact_attention(q, k, v, kv_start=kv_start)
    ours, _, stats = s2o_attention(q, k, v, config, kv_start=kv_start, backend="triton", return_stats=True)
    theirs, _, expected = s2o_attention(q, k, v, config, kv_start=kv_start, backend="reference", return_stats=True)
    ours_error, theirs_error = relative_error(ours, truth), relative_error(theirs, truth)
    # The kernel leaves steps of one bucket of ranks as they lie, and the reference sorts them: with the paper's rule,
    # which looks at one chunk alone, this order decides where a tile stops. 5e-3 is the rounding to bf16, 2^-8.
    assert abs(ours_error - theirs_error) <= (1.5 if stop_rule is StopRule.PAPER else 0.1) * theirs_error + 5e-3
    one_check = config.tile.stride / (k.shape[2] / 2)  # of the keys that a row sees on average
    torch.testing.assert_close(stats.density, expected.density, rtol=0.03, atol=0.005 + one_check / 2)
    torch.testing.assert_close(
        stats.density, measure_density(stats.visited, config, call_shape(q, k, v, kv_start), kv_start)
    )


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_candidate_tile_of_this_gpu(head_dim, nan_filled):
    q, k, v = inputs(1, 4, 2, 1333, 1333, head_dim, torch.bfloat16)
    truth = exact_attention(q, k, v)
    for tile in {replace(tile, chunk=2) for tile in list_candidate_tiles(head_dim, torch.cuda.get_device_capability())}:
        config = LayerConfig.uniform(4, tau=0.0, segment=256, tile=tile)
        out = s2o_attention(q, k, v, config, backend="triton")
        assert relative_error(out, truth) <= 6e-3, tile  # bf16 weights and output, each within 2^-8


HOPPER = TileConfig(64, 128, 2, 4, 2, specialized=True)
HOPPER_256 = TileConfig(64, 64, 2, 4, 2, specialized=True)


@pytest.mark.parametrize("tile", [TileConfig(128, 32, 4, 8, 3), HOPPER], ids=["plain", "specialised"])
@pytest.mark.parametrize(("length", "last_rows"), [(1333, 0), (1333, 256), (9000, 256)])
def test_the_order_in_which_heads_start_changes_nothing(length, last_rows, tile, monkeypatch, nan_filled):
    q, k, v = inputs(1, 6, 2, length, length, 128, torch.bfloat16)
    kinds = (HeadConfig(0.0, 256), HeadConfig(0.3, 512, tail="mean"), HeadConfig(0.0, mode="dense"))
    config = LayerConfig(tuple(kinds[head % 3] for head in range(6)), tile, last_rows=last_rows)
    call = Call.from_tensors(q, k, v, config)
    expected = exact_attention(q, k, v)
    outputs = []
    for per_wave in (1, 2, 3, 6):
        monkeypatch.setattr(prefill_module, "count_heads_per_wave", lambda *_, heads=per_wave: heads)
        outputs.append(prefill_module.run_prefill(call))
    for out, visited, _ in outputs:
        assert relative_error(out[:, [0, 2, 3, 5]], expected[:, [0, 2, 3, 5]]) <= 6e-3
        assert relative_error(out, outputs[0][0]) <= 1e-4
        assert torch.equal(visited, outputs[0][1])


@pytest.mark.parametrize(
    ("shape", "tile", "tau"),
    pairwise(
        SHAPES, [HOPPER, replace(HOPPER, num_stages=3), replace(HOPPER, block_n=64, num_stages=4)], [0.0, 0.3, 1.0]
    )
    + pairwise(SHAPES_256, [HOPPER_256], [0.0, 0.3, 1.0]),
)
def test_the_hopper_kernel_is_the_plain_kernel(shape, tile, tau, nan_filled):
    q, k, v, kv_start = drawn(shape)
    kinds = (HeadConfig(tau, 128), HeadConfig(tau, 256), HeadConfig(tau, 128, "dense"))
    config = LayerConfig(tuple(kinds[h % 3] for h in range(shape[1])), tile)
    plain = config.with_tile(TileConfig(64, tile.block_n, 2, 8 if shape[5] > 128 else 4, 1))
    options = {"kv_start": kv_start, "backend": "triton", "return_stats": True, "return_lse": True}
    ours, lse, stats = s2o_attention(q, k, v, config, **options)
    theirs, expected_lse, expected = s2o_attention(q, k, v, plain, **options)
    # the same keys in the same order; weights are rounded to bf16 after a maximum that tiles reach in another order
    assert torch.equal(stats.visited, expected.visited)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-4)
    assert relative_error(ours, theirs.float()) <= 4e-3


@pytest.mark.parametrize(("tile", "head_dim"), [(TileConfig(64, 64, 2, 4, 2), 128), (HOPPER, 128), (HOPPER_256, 256)])
def test_packed_sequences_are_sequences_on_their_own(tile, head_dim, nan_filled):
    q_lens, k_lens = [700, 0, 129, 1500, 1], [700, 0, 640, 1500, 300]
    parts, packed = pack(q_lens, k_lens, 4, 2, head_dim, inputs)
    config = LayerConfig.uniform(4, tau=0.5, segment=128, representatives=16, tail="mean", tile=tile)
    options = {"backend": "triton", "return_stats": True, "return_lse": True}
    out, lse, stats = s2o_attention_varlen(*packed, 1500, 1500, config, **options)
    outputs = zip((0, 2, 3, 4), parts, unpacked(parts, out), unpacked(parts, lse), strict=True)
    for b, part, of_part, lse_of_part in outputs:
        expected, expected_lse, own = s2o_attention(*part, config, **options)
        assert torch.equal(of_part, expected[0])
        assert torch.equal(lse_of_part, expected_lse[0])
        assert torch.equal(stats.visited[b, :, : own.visited.shape[2]], own.visited[0])
    assert torch.isfinite(stats.density).all()


@pytest.mark.parametrize(("tile", "head_dim"), [(TileConfig(64, 64, 4, 4, 2), 128), (HOPPER, 128), (HOPPER_256, 256)])
def test_log_sum_exp_of_dense(tile, head_dim, nan_filled):
    q, k, v = inputs(2, 4, 2, 500, 900, head_dim, torch.bfloat16)
    config = LayerConfig.uniform(4, tau=0.0, segment=128, tile=tile)
    _, lse, _ = s2o_attention(q, k, v, config, backend="triton", return_lse=True)
    torch.testing.assert_close(lse, log_sum_exp(q, k), rtol=0, atol=2e-3)


def test_the_order_with_ballots_is_the_portable_one(nan_filled):
    """Inline PTX against plain Triton; lengths around a warp's stretch."""
    for length in (70, 1000, 2600, 5000):
        q, k, _ = inputs(2, 4, 2, min(length, 700), length, 64, torch.bfloat16)
        config = LayerConfig.uniform(4, segment=128, tail="mean", tile=TileConfig(64, 32, 4, 4, 1))
        call = Call.from_tensors(q, k, k, config)
        fast, _ = kernel_ranking(call)
        portable = order(fast.score, call, range(call.shape.q_len), portable=True)
        for n in range(fast.order.shape[2]):
            steps = (call.shape.offset + n * 128) // 32 * 32 // KEY_BLOCK
            assert torch.equal(fast.order[:, :, n, :steps], portable.order[:, :, n, :steps])
            if steps:
                assert torch.equal(fast.first[:, :, n], portable.first[:, :, n])
                assert torch.equal(fast.edge[:, :, n], portable.edge[:, :, n])


EXTENDED = (
    HeadConfig(0.5, 512, representatives=16, tail="mean"),
    HeadConfig(0.3, 256, representatives=16),
    HeadConfig(0.0, 256, "dense"),
    HeadConfig(1.0, 256, tail="mean"),
)


@pytest.mark.parametrize(
    ("tile", "head_dim", "starts"),
    pairwise(
        [(TileConfig(64, 64, 2, 4, 2), 128), (TileConfig(128, 64, 2, 8, 3), 128), (HOPPER, 128), (HOPPER_256, 256)],
        [None, [300, 1700]],
    ),
)
def test_extensions_are_as_near_to_dense_as_the_reference(tile, head_dim, starts, nan_filled):
    """Representatives and tails together: as many keys as the reference visits, with its error."""
    q, k, v, kv_start = drawn((2, 4, 2, 1100, 2500, head_dim, starts))
    config = LayerConfig(EXTENDED, tile)
    out, _, stats = s2o_attention(q, k, v, config, kv_start=kv_start, backend="triton", return_stats=True)
    theirs, _, expected = s2o_attention(q, k, v, config, kv_start=kv_start, backend="reference", return_stats=True)
    truth = exact_attention(q, k, v, kv_start=kv_start)
    torch.testing.assert_close(stats.density, expected.density, rtol=0.05, atol=0.01)
    for h in range(4):
        ours, reference = (relative_error(o[:, h], truth[:, h]) for o in (out, theirs))
        assert ours <= 2.0 * reference + 3e-3  # coarse order, sampled denominators, 16 edges, bf16
    without = LayerConfig(tuple(replace(head, tail="none") for head in EXTENDED), tile)
    plain = s2o_attention(q, k, v, without, kv_start=kv_start, backend="triton")
    # a tail may not harm; 5% are for a head that visits so much that its tail has nothing left to estimate
    assert relative_error(out[:, 3], truth[:, 3]) < 1.05 * relative_error(plain[:, 3], truth[:, 3])


def test_non_contiguous_inputs_as_transformers_hands_them_over(nan_filled):
    q, k, v = inputs(1, 8, 2, 800, 800, 128, torch.bfloat16)
    config = LayerConfig.uniform(8, tau=0.5, segment=128, tile=TileConfig(128, 32, 4, 8, 3))
    expected = s2o_attention(q, k, v, config, backend="triton")
    assert torch.equal(s2o_attention(*as_transformers(q, k, v), config, backend="triton"), expected)


SIX = (HeadConfig(0.5, 128),) * 6
MIXED = (HeadConfig(0.3, 256), *EXTENDED, HeadConfig(0.0, 128))


@pytest.mark.parametrize(
    ("heads", "tile", "featured"),
    [
        (SIX, TileConfig(64, 64, 2, 4, 2), False),
        (SIX, HOPPER, False),
        (SIX, TileConfig(64, 64, 4, 4, 2), True),
        (MIXED, TileConfig(64, 64, 2, 4, 2), False),
    ],
    ids=["plain", "specialised", "cap-sinks", "mixed"],
)
def test_after_warmup_nothing_compiles(heads, tile, featured):
    config = LayerConfig(heads, tile)
    launch_module._compiled.clear()
    warmup(
        config, kv_heads=3, head_dim=64, padded=True, **({"softcap": 8.0, "sinks": torch.bfloat16} if featured else {})
    )
    known = set(launch_module._compiled)
    options = {"backend": "triton"}
    if featured:
        options |= {"softcap": 8.0, "sinks": torch.linspace(-2.0, 12.0, 6, device="cuda", dtype=torch.bfloat16)}
    for length in (129, 1000, 2048, 3333, 9999):
        q, k, v = (torch.randn(1, length, heads, 64, device="cuda").bfloat16().transpose(1, 2) for heads in (6, 3, 3))
        s2o_attention(q, k, v, config, **options)
        s2o_attention(q, k, v, config, kv_start=torch.tensor([5], device="cuda"), **options)
    assert set(launch_module._compiled) == known


def test_dense_attention_leaves_the_default_backends_as_they_are():
    """In cold processes: the order of SDPA's backends after a plain call, with ours before it or not."""
    plain = (
        "x = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, device='cuda'); F.scaled_dot_product_attention(x, x, x)"
    )
    ours = plain.replace("F.scaled_dot_product_attention", "dense_attention") + "; " + plain.split("; ")[1]
    orders = []
    for calls in (plain, ours):
        imports = "import torch, torch.nn.functional as F; from s2o_runtime.reference.dense import dense_attention"
        program = f"{imports}; {calls}; print(torch._C._get_sdp_priority_order())"
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        orders.append(run.stdout)
    assert orders[0] == orders[1]
