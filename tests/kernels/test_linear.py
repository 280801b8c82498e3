"""Linear tails in the interpreter, against the reference: fp32 and fp16, because bf16 is wrong there."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.kernels import linear as linear_module
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.kernels.keys import keys_of
from s2o_runtime.kernels.linear import LARGEST_TILE, covariance_type, linear_bytes, share_keys
from s2o_runtime.kernels.prefill import Ranker, row_slices, s2o_prefill
from s2o_runtime.kernels.primitives import LOG2E
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.ranking import part_means
from s2o_runtime.serving.server import _compiled_kind
from support.kernels import TILE, agree, call_of, drawn, inputs, kernel_ranking, prefix_of, ranking_of, run_both
from support.layouts import as_transformers, pack, unpacked
from support.marks import INTERPRETED, all_but_first
from support.naive import naive_attention

SLOW = pytest.mark.slow(reason="more cases of a kernel in Triton's interpreter, seconds each")

pytestmark = INTERPRETED

LINEAR = HeadConfig(0.3, 64, far="linear")
MIXED = (
    LINEAR,
    HeadConfig(1.0, 64, representatives=4, far="mean"),
    HeadConfig(100.0, 128, far="linear"),
    HeadConfig(mode="dense"),
    HeadConfig(0.5, 128),
)


def mixed(heads, tile=TILE, grain=1):
    return LayerConfig(tuple(MIXED[h % 5] for h in range(heads)), tile, grain=grain)


CASES = [
    pytest.param((1, 5, 1, 200, 200, 64, None), TILE, 4, id="B1-H5-L200-D64-G4"),
    pytest.param((1, 4, 2, 257, 257, 128, None), TILE, 1, id="B1-H4-L257-D128-G1"),
    pytest.param((2, 2, 1, 100, 211, 64, None), TILE, 8, id="q100-kv211-G8"),
    pytest.param((3, 2, 1, 250, 250, 64, [0, 67, 249]), TILE, 1, id="left-padded-G1"),
    pytest.param((2, 3, 1, 100, 271, 64, [271, 33]), TILE, 8, id="padded-chunk-G8"),
    pytest.param((1, 1, 1, 5, 5, 64, None), TILE, 4, id="shorter-than-a-tile-G4"),
    pytest.param((1, 1, 1, 1, 200, 64, None), TILE, 4, id="one-query-G4"),
    pytest.param((1, 2, 1, 130, 300, 256, None), TILE, 4, id="D256-G4"),
    pytest.param((1, 1, 1, 200, 450, 64, None), TileConfig(64, 64, 1, 4, 1), 2, id="tile-64x64-G2"),
    pytest.param((1, 1, 1, 200, 450, 64, None), TileConfig(64, 128, 1, 4, 1), 4, id="tile-64x128-G4"),
]


@pytest.mark.parametrize(("shape", "tile", "grain"), all_but_first(CASES, SLOW))
def test_prefill_equals_the_reference(shape, tile, grain, nan_filled):
    q, k, v, kv_start = drawn(shape)
    agree(*run_both(q, k, v, mixed(shape[1], tile, grain), kv_start))


@pytest.mark.slow(reason="kernels in Triton's interpreter, seconds")
@pytest.mark.parametrize("starts", all_but_first([None, [40, 0]], SLOW), ids=str)
def test_sinks_and_no_log_sum_exp(starts, nan_filled):
    q, k, v, kv_start = drawn((len(starts or [0]), 2, 1, 140, 211, 64, starts))
    config = LayerConfig((LINEAR, MIXED[2]), TILE, grain=2)
    ours, expected = run_both(q, k, v, config, kv_start, sinks=torch.tensor([1.0, 9.0]), lse=False)
    assert ours[2] is None
    agree(ours, expected)


@SLOW
def test_float16(nan_filled):
    """Errors within what fp16 weights and outputs allow."""
    q, k, v = as_transformers(*inputs(1, 2, 1, 190, 190, 64, torch.float16))
    ours, expected = run_both(q, k, v, LayerConfig((LINEAR, MIXED[2]), TILE, grain=4))
    assert ours[0].dtype == torch.float16
    # the output is rounded before and behind the tail, weights of the exact part once, to 11 bits each, of |v| <= 4
    agree(ours, expected, rtol=2e-3, atol=6 * 2**-10)
    assert covariance_type(torch.float16) == torch.float32


def test_a_first_chunk_that_holds_the_prefix_is_dense_attention(nan_filled):
    q, k, v = inputs(1, 1, 1, 200, 330, 64)
    config = LayerConfig((LINEAR,), replace(TILE, chunk=16))
    out, visited, _ = s2o_prefill(call_of(q, k, v, config))
    torch.testing.assert_close(out.double(), naive_attention(q, k, v, scale=0.125), rtol=1e-4, atol=1e-5)
    assert visited.flatten().tolist() == [128, 192, 256, 320]


def test_the_estimate_is_that_of_the_kernels_own_representative(nan_filled):
    """The sums themselves, of a segment and of one whose keys the first chunk holds all."""
    q, k, v = inputs(1, 1, 1, 128, 180, 64)
    call = call_of(q, k, v, LayerConfig((LINEAR,), TILE))
    ranker = Ranker(call, keys_of(call))
    ranking, _ = ranker.rank(range(128))
    scores = ranking.score.clone()
    sums = ranker.linear(ranking, range(128))
    assert sums.log_mass[0, 0, 0] == float("-inf")  # 52 keys before it, of which 32 are whole tiles
    start, first = prefix_of(call, 0, 0, 1)
    left = torch.ones(first - start, dtype=torch.bool)
    left[ranking.order[0, 0, 1, : TILE.stride].long()] = False
    assert left.sum() == 32
    assert torch.equal(ranking.score[0, 0, 1, : first - start].isinf(), ~left)
    assert torch.equal(ranking.score[0, 0, 1, : first - start][left], scores[0, 0, 1, : first - start][left])
    keys, values = (tensor[0, 0, :first][left].double() for tensor in (k, v))
    center = part_means(q[0, 0, 64:].double() * 0.125, 64)[0]
    weights = (keys @ center).softmax(0)[:, None]
    key, value = (weights * keys).sum(0), (weights * values).sum(0)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, check_dtype=False)
    close(sums.log_mass[0, 0, 1], (keys @ center).logsumexp(0) * LOG2E)
    close(sums.key[0, 0, 1], key)
    close(sums.value[0, 0, 1], value)
    close(sums.covariance[0, 0, 1], (weights * (keys - key)).T @ (values - value))


def test_nothing_but_the_first_chunk_is_visited_whatever_it_gains(nan_filled):
    """The gain over a window whose weights all vanish beside the first chunk's is infinite."""
    q, k, v = inputs(1, 1, 1, 128, 400, 64)
    direction = torch.nn.functional.normalize(torch.randn(64), dim=0)
    q = direction * 30 + 0.1 * q
    k[:, :, :200] += direction * 60
    call = call_of(q, k, v, LayerConfig((LINEAR,), TILE))
    assert call.tables.tau.isnan().all()
    ours, expected = run_both(q, k, v, call.config)
    agree(ours, expected, rtol=1e-3, atol=1e-3)  # scores of hundreds have 16 binary digits behind the point
    assert ours[1].unique().tolist() == [TILE.stride]


@pytest.mark.parametrize(
    ("change", "tolerance"),
    [
        pytest.param(lambda q, k: (q, k + 50 * torch.randn(64)), 1e-3, id="keys-far-from-zero"),
        pytest.param(lambda q, k: (q * 12, k * 12), 1e-3, id="scores-far-apart", marks=SLOW),
        pytest.param(lambda q, k: (q * 0, k), 1e-5, id="equal-scores"),
        pytest.param(lambda q, k: (q, torch.zeros_like(k)), 1e-5, id="equal-keys", marks=SLOW),
    ],
)
def test_inputs_that_would_lose_digits_or_overflow(change, tolerance, nan_filled):
    q, k, v = inputs(1, 1, 1, 128, 300, 64)
    q, k = change(q * 0.2, k)
    # scores of hundreds have 16 binary digits behind the point
    agree(*run_both(q, k, v, LayerConfig((LINEAR,), TILE)), rtol=tolerance, atol=tolerance)


@SLOW
@pytest.mark.parametrize("head_dim", [80, 40])
def test_other_head_dims(head_dim, nan_filled):
    q, k, v = inputs(2, 2, 1, 100, 210, head_dim)
    config = mixed(2)
    out, lse, stats = s2o_attention(q, k, v, config, backend="triton", return_lse=True, return_stats=True)
    width = 128 if head_dim > 64 else 64
    whole = [torch.nn.functional.pad(tensor, (0, width - head_dim)) for tensor in (q, k, v)]
    call = call_of(*whole, config, scale=head_dim**-0.5)
    ranking = partial(ranking_of, call, *kernel_ranking(call))
    expected = s2o_attention_reference(*whole, config, scale=head_dim**-0.5, ranking_of=ranking)
    agree((out, stats.visited, lse), expected._replace(out=expected.out[..., :head_dim]))


SHARED = [
    pytest.param([0], 180, 64, 64, False, id="three-segments"),
    pytest.param([75, 0], 180, 64, 32, True, id="left-padded-slices-two-blocks-of-columns"),
    pytest.param([329, 3], 230, 64, 32, False, id="four-segments-left-padded"),
    pytest.param([0], 180, 256, 64, False, id="D256"),
]


@SLOW
@pytest.mark.parametrize(("starts", "q_len", "head_dim", "columns", "sliced"), SHARED)
def test_programs_share_the_keys_of_a_prefix(starts, q_len, head_dim, columns, sliced, monkeypatch, nan_filled):
    """Of the first two segments, whose products one program sums up, one has keys in two shares and one in three."""
    shares = use_shares_of_64_keys(monkeypatch)
    monkeypatch.setattr(linear_module, "product_columns", lambda head_dim, dtype: columns)
    q, k, v = inputs(len(starts), 2, 1, q_len, 100 + q_len, head_dim)
    kv_start = torch.tensor(starts) if any(starts) else None
    call = call_of(q, k, v, LayerConfig((LINEAR, MIXED[2]), TILE, grain=4), kv_start)
    prefixes = (prefix_of(call, len(starts) - 1, 0, n) for n in (0, 1))
    assert [first - start for start, first in prefixes] == [96, 160]
    if sliced:
        monkeypatch.setattr(prefill_module, "WORKSPACE_BYTES", 1)
        assert row_slices(call, 1) == [range(128), range(128, 180)]
    agree(*run_both(q, k, v, call.config, kv_start))
    assert min(shares) >= 3


@SLOW
def test_packed_sequences_share_the_keys_of_their_prefixes(monkeypatch, nan_filled):
    """Sequences of three, no, one and two segments are what they are on their own, where nothing is shared."""
    q_lens, k_lens = [180, 0, 50, 100], [280, 0, 240, 101]
    parts, (q, k, v, cu_q, cu_k) = pack(q_lens, k_lens, 2, 1, 64)
    config = LayerConfig((LINEAR, MIXED[2]), TILE, grain=4)
    alone = [s2o_attention(*part, config, backend="triton", return_lse=True) for part in parts]
    shares = use_shares_of_64_keys(monkeypatch)
    packed = s2o_attention_varlen(q, k, v, cu_q, cu_k, 180, 280, config, backend="triton", return_lse=True)
    assert min(shares) >= 4
    for attention, out, lse in zip(alone, unpacked(parts, packed.out), unpacked(parts, packed.lse), strict=True):
        torch.testing.assert_close(out, attention.out[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, attention.lse[0], rtol=1e-5, atol=1e-5)


def use_shares_of_64_keys(monkeypatch):
    """Let several programs share a short prefix.

    Returns:
        A list, which gets the number of shares of every launch to come.
    """
    shares, launch = [], linear_module.launch

    def recorded(kernel, grid, arguments, *rest, **options):
        if "PRODUCTS" in arguments:
            shares.append(arguments["shares"])
        launch(kernel, grid, arguments, *rest, **options)

    monkeypatch.setattr(linear_module, "launch", recorded)
    monkeypatch.setattr(linear_module, "PRODUCT_KEYS", (1, 64))
    monkeypatch.setattr(linear_module, "LARGEST_TILE", 64)
    return shares


def test_shares_of_a_prefix_are_whole_tiles_that_fit_their_workspace():
    fewest, most = linear_module.PRODUCT_KEYS
    assert not any(LARGEST_TILE % TileConfig(block_n=block_n).block_n for block_n in (32, 64, 128))
    for segments, heads, keys, head_dim in itertools.product(
        (1, 2, 3, 17, 64, 511, 4096), (1, 3, 8, 64), (16, 2047, 2048, 4112, 32784, 131072, 1 << 20), (64, 128, 256)
    ):
        share = share_keys(segments, heads, keys, head_dim)
        assert share > 0
        assert share % LARGEST_TILE == 0
        shares = -(-keys // share)
        further_share = segments * heads * 4 * head_dim**2  # bytes of its products
        assert (shares - 1) * further_share <= linear_module.PRODUCT_BYTES
        assert share >= fewest or shares == 1
        assert share <= most or shares * further_share > linear_module.PRODUCT_BYTES
        # no more programs than fill a GPU, but for shares that would be too long
        full = (shares - 1) * -(-segments // 2) * heads >= linear_module.PRODUCT_PROGRAMS
        assert not full or shares <= -(-keys // most)
    assert share_keys(16, 8, 16384, 128) == 2048  # of 8 shares, the shortest
    assert share_keys(4096, 8, 131072, 128) == 131072  # another share would need 2 GiB


def test_slices_leave_room_for_the_sums():
    qkv = inputs(1, 4, 1, 4096, 4096, 64)
    plain, linear = (
        call_of(*qkv, LayerConfig((HeadConfig(0.0, 64, far=far),) * 4, TILE)) for far in ("none", "linear")
    )
    for dtype in (torch.bfloat16, torch.float16):
        slices = row_slices(linear, 1 << 22, dtype)
        for rows in slices[:-1]:  # as many as fit
            segments, keys, key_bytes = len(rows) // 64, rows.stop, 6 + linear_module.WEIGHT_BYTES
            assert segments * 4 * (linear_bytes(64, dtype) + key_bytes * keys) <= 1 << 22
            assert (segments + 1) * 4 * (linear_bytes(64, dtype) + key_bytes * (keys + 64)) > 1 << 22
        assert len(slices) > len(row_slices(plain, 1 << 22, dtype))
    assert linear_bytes(128, torch.bfloat16) == (2 + 4) * 128 * 128 + 33 * 4 * (2 * 128 + 1)


def test_heads_without_a_linear_tail_launch_nothing_for_it(monkeypatch):
    dense_linear = HeadConfig(mode="dense", far="linear")  # which a dense head ignores
    call = call_of(*inputs(1, 2, 1, 130, 130, 64), LayerConfig((HeadConfig(0.5, 64), dense_linear), TILE))
    monkeypatch.setattr(linear_module, "launch", None)
    _, _, lse = s2o_prefill(call)
    assert lse is None
    assert len(call.tables.linear) == 0


def test_a_server_compiles_layers_with_and_without_linear_tails():
    kinds = {_compiled_kind(LayerConfig.uniform(2, tile=TILE, far=far)) for far in ("none", "linear")}
    assert len(kinds) == 2
