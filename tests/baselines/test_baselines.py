"""What every baseline selects, against explicit loops of its paper; and the interface around them, without a kernel."""

import math
import subprocess
import sys

import pytest
import torch

from s2o_runtime.baselines import (
    BASELINES,
    PBS,
    Antidiagonal,
    AShape,
    FlashPrefill,
    Prism,
    SkipSoftmax,
    Sparge,
    VerticalSlash,
    attend,
    baseline_attention,
    parse,
    prism,
    select,
)
from s2o_runtime.baselines import selection as selection_module
from s2o_runtime.baselines.pooling import pool_plain
from s2o_runtime.baselines.selection import top_share
from s2o_runtime.errors import ConfigError, InputError
from support import baseline_references as references
from support.marks import all_but_first
from support.naive import naive_attention

SLOW = pytest.mark.slow(reason="more shapes against explicit loops over blocks, or processes of their own")


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim=16, dtype=torch.float64):
    """Clustered keys and drifting queries, so that blocks differ in weight and in likeness."""
    topics = torch.randn(8, head_dim)
    spread = torch.rand(kv_len, 1) * 1.5
    k = torch.randn(batch, kv_heads, kv_len, head_dim) * spread + topics[torch.arange(kv_len) // 48 % 8]
    near = topics[torch.arange(q_len) // 80 % 8] * (torch.arange(q_len) // 64 % 2 * 2 + 0.3)[:, None]
    q = torch.randn(batch, heads, q_len, head_dim) + near
    v = torch.randn(batch, kv_heads, kv_len, head_dim)
    return q.to(dtype), k.to(dtype), v.to(dtype)


SHAPES = [
    pytest.param(1, 2, 1, 130, 200, id="q130-kv200"),
    pytest.param(1, 4, 2, 450, 450, id="H4-KV2-L450"),
    pytest.param(1, 2, 1, 190, 471, id="q190-kv471"),
    pytest.param(2, 2, 2, 256, 256, id="B2-L256"),
    pytest.param(1, 1, 1, 7, 7, id="L7"),
    pytest.param(1, 2, 2, 1, 300, id="one-query"),
]
SETTINGS = [
    FlashPrefill(0.5, 64, first=1, window=2, last=1),
    FlashPrefill(0.1, 64, first=0, window=0, last=0),
    Prism(0.7, block=64),
    Prism(0.9, 0.25, 0.5, 64, first=0),
    PBS(0.7, 64, 64, permute=False),
    PBS(0.9, 64, 64, permute=False, first=0),
    PBS(0.7, 128, 64),
    PBS(0.7, 64, 64, first=0),
    PBS(0.7, 128, 64, permute_queries=True),
    PBS(0.7, 128, 64, permute=False, permute_queries=True),
    PBS(0.7, 128, 64, permute=False),
    Sparge(0.5, 0.38, block=64),
    Sparge(0.4, 0.3),
    Sparge(0.5, -1.0, block=64),
    Sparge(0.9, -1.0, -2.0),
    Sparge(0.3, -1.0, block=64, first=1),
    AShape(70, 100, 64),
    AShape(0, 1, 64),
    VerticalSlash(40, 6, 32, 64),
    VerticalSlash(0, 3, 64, 64),
    VerticalSlash(500, 0, 64, 64),
    Antidiagonal(0.6, 16, 64),
    Antidiagonal(0.8, 8, 64),
    Antidiagonal(0.2, 16, 64, first=2),
    SkipSoftmax(10.0),
    SkipSoftmax(50.0, 64),
    SkipSoftmax(1e6, 64),
]
LOOPS = {
    "flash-prefill": references.flash_prefill,
    "prism": references.prism,
    "pbs": references.pbs,
    "sparge": references.sparge,
    "a-shape": references.a_shape,
    "vertical-slash": references.vertical_slash,
    "xattention": references.xattention,
    "skip-softmax": references.skip_softmax,
}


def by_loops(q, k, settings, scale):
    """(selection, order of queries) as the paper has it."""
    permutes = not isinstance(settings, PBS) or settings.permute or settings.permute_queries
    loops = LOOPS[settings.name] if permutes else references.mean_pooling
    found = loops(q, k, settings, scale)
    return found if isinstance(found, tuple) else (found, None)


def listed(selection):
    """A selection as the loops write it."""
    found = {}
    batch, n, rows = selection.counts.shape
    for b in range(batch):
        for i in range(n):
            for block in range(rows):
                blocks = selection.blocks[b, i, block, : selection.counts[b, i, block]].tolist()
                single, order = [], None
                if selection.columns is not None:
                    single = selection.columns[b, i, block, : selection.column_counts[b, i, block]].tolist()
                if selection.key_order is not None:
                    order = selection.key_order[b, selection.slots[i]].tolist()
                found[b, selection.heads[i], block] = blocks, single, order
    return found


def _costly(settings):
    """SpargeAttn's loops take ten times as long as the others': one of its settings is fast enough for `make check`."""
    fast = not isinstance(settings, Sparge) or settings == Sparge(0.5, 0.38, block=64)
    return settings if fast else pytest.param(settings, marks=SLOW)


@pytest.mark.parametrize("settings", [_costly(settings) for settings in SETTINGS], ids=str)
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "q_len", "kv_len"), all_but_first(SHAPES, SLOW))
def test_selection_and_attention_are_the_papers(batch, heads, kv_heads, q_len, kv_len, settings):
    q, k, v = inputs(batch, heads, kv_heads, q_len, kv_len)
    chosen = select(q, k, settings, scale=0.3)
    expected, rows = by_loops(q, k, settings, 0.3)
    assert listed(chosen) == expected
    if rows:
        assert {(b, h): chosen.row_order[b, h].tolist() for b, h in rows} == rows
    out, stats = baseline_attention(q, k, v, settings, scale=0.3)
    truth, pairs = references.attention(q, k, v, expected, chosen.block_m, chosen.block_n, 0.3, rows, chosen.skip)
    torch.testing.assert_close(out, truth, rtol=1e-9, atol=1e-9)
    assert stats.computed.tolist() == pairs
    causal = batch * sum(kv_len - q_len + i + 1 for i in range(q_len))
    assert stats.density.tolist() == pytest.approx([count / causal for count in pairs])


@pytest.mark.parametrize(
    "settings",
    [
        FlashPrefill(0.0, 64, first=0, window=0, last=0),
        Prism(1.0),
        PBS(1.0, 64, 64, permute=False),
        PBS(1.0, 128, 64),
        PBS(1.0, 128, 64, permute_queries=True),
        PBS(1.0, 256, 128, permute=False, permute_queries=True),
        Sparge(1.0),
        AShape(1000, 1),
        VerticalSlash(0, 500),
        VerticalSlash(500, 0),
        Antidiagonal(1.0),
        SkipSoftmax(0.0),
    ],
    ids=str,
)
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "q_len", "kv_len"), SHAPES)
def test_everything_kept_is_dense(batch, heads, kv_heads, q_len, kv_len, settings):
    q, k, v = inputs(batch, heads, kv_heads, q_len, kv_len)
    out, stats = baseline_attention(q, k, v, settings)
    torch.testing.assert_close(out, naive_attention(q, k, v), rtol=1e-9, atol=1e-9)
    assert stats.density.tolist() == [1.0] * heads
    assert stats.backend == "reference"


@SLOW
@pytest.mark.parametrize("skip", all_but_first([-2.0, -0.5, -8.0], SLOW))
def test_the_skip_leaves_out_what_the_paper_leaves_out(skip):
    q, k, v = inputs(1, 2, 1, 300, 420)
    settings = Sparge(0.7, 0.38, skip)
    chosen = select(q, k, settings, scale=1.0)
    expected, _ = by_loops(q, k, settings, 1.0)
    ours = attend(q, k, v, chosen, scale=1.0)
    truth, _ = references.attention(q, k, v, expected, 128, 64, 1.0, skip=(skip, 64, 64, False))
    torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9)
    everything, _ = references.attention(q, k, v, expected, 128, 64, 1.0)
    assert not torch.equal(truth, everything)


def test_skip_softmax_follows_the_length_of_the_context():
    q, k, _ = inputs(1, 1, 1, 300, 400)
    settings = SkipSoftmax(40.0)
    assert select(q, k, settings).skip.limit == pytest.approx(math.log(40.0 / 400))
    assert select(q[:, :, 100:], k[:, :, 200:], settings).skip.limit == pytest.approx(math.log(40.0 / 200))
    # at 1 a tile still joins if it has the largest score of a row; beyond, nothing would
    assert select(q, k, SkipSoftmax(1e9)).skip.limit == 0.0
    assert select(q, k, SkipSoftmax(0.0)).skip.limit == -math.inf


def test_a_dropped_tile_is_no_part_of_the_sum():
    """One tile of large scores and then one of small ones, which skip-softmax drops whole: weights sum to 1 without it.

    SpargeAttn's skip keeps the small ones in the denominator.
    """
    q = torch.ones(1, 1, 1, 4, dtype=torch.float64)
    k, v = torch.zeros(1, 1, 192, 4, dtype=torch.float64), torch.ones(1, 1, 192, 4, dtype=torch.float64)
    k[:, :, :64] = 1.0  # scores of 4, then of 0
    chosen = select(q, k, SkipSoftmax(0.1 * 192, 64), scale=1.0)
    left_out = torch.zeros(1, dtype=torch.float64)
    out = attend(q, k, v, chosen, scale=1.0, left_out=left_out)
    torch.testing.assert_close(out, torch.ones_like(out))
    assert left_out.tolist() == [128.0]
    kept_sum = attend(q, k, v, select(q, k, Sparge(1.0, -1.0, math.log(0.1)), scale=1.0), scale=1.0)
    share = 64 * math.exp(4) / (64 * math.exp(4) + 128)
    torch.testing.assert_close(kept_sum, torch.full_like(out, share))


def test_bands_of_prism_are_those_of_rope():
    """Dimensions i and D / 2 + i turn together, and the first ones fastest."""
    mean = torch.arange(16.0).expand(1, 1, 3, 16)
    assert prism.band(mean, 0, 2)[0, 0, 0].tolist() == [0.0, 1.0, 8.0, 9.0]
    assert prism.band(mean, 5, 8)[0, 0, 0].tolist() == [5.0, 6.0, 7.0, 13.0, 14.0, 15.0]
    both = [prism.energy_share(prism.band(mean, *ends), mean) for ends in ((0, 2), (2, 8))]
    assert float(sum(share.square() for share in both)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "settings",
    [PBS(0.7, 128, 64), FlashPrefill(0.5, 64), Prism(0.6, block=64), Sparge(0.6, 0.38), VerticalSlash(40, 6),
     Antidiagonal(0.6), SkipSoftmax()],
)  # fmt: skip
def test_small_chunks_change_nothing(settings, monkeypatch):
    q, k, _ = inputs(2, 4, 2, 300, 300)
    whole = listed(select(q, k, settings))
    monkeypatch.setattr(selection_module, "CHUNK", 1)
    monkeypatch.setattr("s2o_runtime.baselines.xattention.CHUNK", 1)
    monkeypatch.setattr("s2o_runtime.baselines.flash_prefill.CHUNK", 1)
    assert listed(select(q, k, settings)) == whole


def test_heads_may_differ_and_be_left_to_others():
    q, k, v = inputs(1, 6, 2, 300, 300)
    each = (PBS(0.6, 128, 64), AShape(64, 64), PBS(0.6, 128, 64), Sparge(0.6))
    heads = (5, 0, 3, 2)
    out = torch.full_like(q, math.nan)
    returned, stats = baseline_attention(q, k, v, each, heads=heads, out=out)
    assert returned is out
    assert stats.heads == heads
    assert stats.settings == each
    assert out[:, [1, 4]].isnan().all()
    for place, (head, settings) in enumerate(zip(heads, each, strict=True)):
        # query heads 3 and 5 read one KV head and share the order of its keys
        members = [5, 3] if isinstance(settings, PBS) else [head]
        alone, own = baseline_attention(q, k, v, settings, heads=members)
        torch.testing.assert_close(out[:, head], alone[:, head])
        assert stats.density[place] == own.density[members.index(head)]
        assert not alone[:, [h for h in range(6) if h not in members]].any()


@pytest.mark.parametrize(
    "settings", [FlashPrefill(0.5, 64), PBS(0.6, 128, 64), SkipSoftmax(20.0), VerticalSlash(30, 5)], ids=str
)
def test_a_left_padded_sequence_is_a_shorter_one(settings):
    q, k, v = inputs(3, 2, 1, 200, 290)
    starts = torch.tensor([0, 130, 290])
    out, stats = baseline_attention(q, k, v, settings, kv_start=starts, out=torch.full_like(q, math.nan))
    whole, whole_stats = baseline_attention(q[:1], k[:1], v[:1], settings)
    short, short_stats = baseline_attention(q[1:2, :, 40:], k[1:2, :, 130:], v[1:2, :, 130:], settings)
    torch.testing.assert_close(out[:1], whole)
    torch.testing.assert_close(out[1:2, :, 40:], short)
    assert not out[1, :, :40].any()
    assert not out[2].any()
    assert torch.equal(stats.computed, whole_stats.computed + short_stats.computed)
    assert stats.causal == whole_stats.causal + short_stats.causal


def test_the_log_sum_exp_is_that_of_the_computed_scores():
    q, k, v = inputs(1, 2, 1, 200, 200)
    lse = torch.full((1, 2, 200), math.nan, dtype=torch.float64)
    attend(q, k, v, select(q, k, Prism(1.0, block=64), scale=0.5), scale=0.5, lse=lse)
    scores = (q @ k.transpose(2, 3) * 0.5).masked_fill(torch.ones(200, 200).triu(1).bool(), -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_the_share_counts_the_entry_that_reaches_it():
    weights = torch.tensor([[0.5, 0.1, 0.25, 0.15], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    every = torch.tensor([True])
    kept = [[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert top_share(weights, 0.75, every).int().tolist() == kept
    assert top_share(weights, 0.51, every).int().tolist() == kept
    assert top_share(weights, 0.5, every).int().tolist()[0] == [1, 0, 0, 0]
    assert top_share(weights, 1.0, every).all()


def test_similarity_is_the_mean_cosine_of_pairs():
    x = torch.randn(1, 2, 70, 8, dtype=torch.float64) + 0.5
    pooled = pool_plain(x, 32)
    for h in range(2):
        for i in range(3):
            rows = x[0, h, i * 32 : (i + 1) * 32]
            assert float(pooled.similarity[0, h, i]) == pytest.approx(references.self_similarity(rows))
            torch.testing.assert_close(pooled.mean[0, h, i], rows.mean(0))


@pytest.mark.parametrize("settings", [*SETTINGS, *(kind() for kind in BASELINES.values()), Sparge(skip=-5)], ids=str)
def test_text_says_everything(settings):
    assert parse(str(settings)) == settings
    assert BASELINES[settings.name] is type(settings)


def test_text_may_name_only_what_differs():
    assert parse("pbs") == PBS()
    assert parse("pbs:keep=1,permute_queries=true") == PBS(keep=1.0, permute_queries=True)
    assert str(parse("sparge:skip=none,keep=0.5")).startswith("sparge:keep=0.5,similarity=0.6,skip=none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("best", "baseline 'best' is not known: use one of flash-prefill"),
        ("pbs:keep", "option 'keep' of pbs has no value"),
        ("pbs:tau=1", "pbs has no option 'tau': use keep, segment"),
        ("pbs:keep=0.5,keep=0.6", "option keep of pbs is given twice"),
        ("pbs:keep=much", "keep of pbs is 'much': expected a number from 1e-06 to 1"),
        ("pbs:keep=nan", "keep of pbs is nan"),
        ("pbs:keep=0", "keep of pbs is 0.0"),
        ("pbs:permute=1", "permute of pbs is '1': expected true or false"),
        ("pbs:segment=192", "segment 192 of pbs is not a multiple of its block 128"),
        ("pbs:block=100", "block of pbs is 100: expected one of"),
        ("sparge:skip=0", "skip of sparge is 0.0: expected a number from -10000 to -1e-06 or none"),
        ("a-shape:local=0", "local of a-shape is 0: expected a whole number"),
        ("xattention:stride=12", "stride of xattention is 12"),
        ("mean-pooling", "baseline 'mean-pooling' is not known"),
        ("flash-prefill:alpha=2", "alpha of flash-prefill is 2.0: expected a number from 0 to 1"),
        ("flash-prefill:block=256", "block of flash-prefill is 256: expected one of"),
        ("prism:high=0", "high of prism is 0.0"),
        ("skip-softmax:factor=-1", "factor of skip-softmax is -1.0"),
    ],
)
def test_wrong_text_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (PBS(keep=None), "keep of pbs is None"),
        (PBS(keep=True), "keep of pbs is True"),
        (PBS(keep="0.9"), "keep of pbs is '0.9'"),
        (PBS(segment=256.0), "segment of pbs is 256.0"),
        (PBS(segment=1 << 40), "segment of pbs is 1099511627776"),
        (PBS(permute=1), "permute of pbs is 1"),
        (PBS(block=True), "block of pbs is True"),
    ],
    ids=str,
)
def test_options_of_other_types_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        settings.validate()


def test_wrong_calls_are_refused():
    q, k, v = inputs(1, 2, 1, 70, 70)
    with pytest.raises(InputError, match="1 settings for 2 heads"):
        baseline_attention(q, k, v, [PBS()])
    with pytest.raises(InputError, match=r"heads are \(2,\)"):
        baseline_attention(q, k, v, PBS(), heads=[2])
    with pytest.raises(InputError, match="it must be like q"):
        baseline_attention(q, k, v, PBS(), out=q.float())
    with pytest.raises(InputError, match="scale is -1"):
        select(q, k, PBS(), scale=-1)
    with pytest.raises(InputError, match="backend 'cuda' is not known"):
        baseline_attention(q, k, v, PBS(), backend="cuda")
    with pytest.raises(InputError, match="select again"):
        attend(q[:, :, 1:], k, v, select(q, k, PBS()))
    with pytest.raises(ConfigError, match="keep of pbs is 2"):
        select(q, k, PBS(keep=2))


@SLOW
def test_what_is_imported_when():
    program = """
import sys
import s2o_runtime, s2o_runtime.attention.api
assert not any("baselines" in name for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    program = """
import sys
from s2o_runtime.baselines import PBS, parse
assert "torch" not in sys.modules
from s2o_runtime.baselines import baseline_attention
import torch
q = torch.randn(1, 2, 130, 64)
baseline_attention(q, q, q, PBS())
assert "s2o_runtime.baselines.kernels.block_sparse" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
