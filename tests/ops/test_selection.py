"""Tests of the baselines in plain torch, against explicit loops of their papers, and of their settings."""

from dataclasses import replace

import pytest
import torch

from s2o_runtime.errors import ConfigError, InputError
from scripts.bench.baselines.run import attend, baseline_attention, select
from scripts.bench.baselines.settings import BASELINES, PBS, Antidiagonal, FlashPrefill, FlashPrefillV2, Sparge, parse
from support import baseline_references as references
from support.naive import naive_attention

ALL, MANY, SUFFIX, BATCH, FEW, ONE, THREE = (  # batch, query heads, KV heads, queries, keys
    (1, 2, 1, 130, 130), (1, 4, 2, 450, 450), (1, 2, 1, 190, 471), (2, 2, 2, 256, 256), (1, 1, 1, 7, 7),
    (1, 2, 2, 1, 300), (1, 6, 2, 333, 470),
)  # fmt: skip
CASES = [  # every setting once, and every method with most shapes
    (FlashPrefill(0.5, 64, first=1, window=2, last=1), MANY),
    (FlashPrefill(0.1, 64, first=0, window=0, last=0), SUFFIX),
    (FlashPrefill(0.5), BATCH),
    (FlashPrefillV2(0.5, 64, first=1, window=2, last=1), MANY),
    (FlashPrefillV2(0.5, 64, first=0, window=0, last=0), SUFFIX),
    (FlashPrefillV2(0.3, 64, first=0, window=1, last=2), THREE),
    (FlashPrefillV2(0.5, 64, window=1, last=0, correct=False), BATCH),
    (parse("flex-prefill:keep=0.5,tau=0,least_keys=0,block=64"), MANY),  # no head is query-aware
    (parse("flex-prefill:keep=0.4,tau=1,least_keys=65,block=64,first=0"), BATCH),  # all are
    (parse("flex-prefill:keep=0.6,tau=0.21,least_keys=0,block=64"), THREE),
    (parse("flex-prefill:keep=0.4,tau=0.25,least_keys=0,block=64,first=2"), SUFFIX),
    (parse("flex-prefill:keep=0.6,tau=0.17,least_keys=0"), THREE),
    (PBS(0.7, 128, 64), MANY),
    (PBS(0.7, 64, 64, first=0), SUFFIX),
    (PBS(0.7, 128, 64), BATCH),
    (Sparge(0.5, 0.38, block=64), ALL),
    (Sparge(0.4, 0.3), SUFFIX),
    (Sparge(0.7, 0.38), SUFFIX),
    (Sparge(0.9, -1.0), BATCH),
    (Sparge(0.3, -1.0, block=64, first=1), MANY),
    (Antidiagonal(0.6, 16, 64), MANY),
    (Antidiagonal(0.8, 8, 64), SUFFIX),
    (Antidiagonal(0.2, 16, 64, first=2), BATCH),
]
LOOPS = {
    "flash-prefill": references.flash_prefill,
    "flash-prefill-v2": references.flash_prefill,
    "flex-prefill": references.flex_prefill,
    "pbs": references.pbs,
    "sparge": references.sparge,
    "xattention": references.xattention,
}


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim=16):
    """Clustered keys and drifting queries, so that blocks differ in weight and in likeness; float64."""
    topics = torch.randn(8, head_dim)
    spread = torch.rand(kv_len, 1) * 1.5
    k = torch.randn(batch, kv_heads, kv_len, head_dim) * spread + topics[torch.arange(kv_len) // 48 % 8]
    near = topics[torch.arange(q_len) // 80 % 8] * (torch.arange(q_len) // 64 % 2 * 2 + 0.3)[:, None]
    q = torch.randn(batch, heads, q_len, head_dim) + near
    return q.double(), k.double(), torch.randn(batch, kv_heads, kv_len, head_dim).double()


def listed(selection):
    """A selection as the loops write it."""
    batch, heads, rows = selection.counts.shape
    found = {}
    for b, h, i in torch.cartesian_prod(torch.arange(batch), torch.arange(heads), torch.arange(rows)).tolist():
        order = None
        if selection.key_order is not None:
            order = selection.key_order[b, h * selection.key_order.shape[1] // heads].tolist()
        found[b, h, i] = selection.blocks[b, h, i, : selection.counts[b, h, i]].tolist(), order
    return found


def name_of(value):
    return "B{}-H{}-KV{}-q{}-k{}".format(*value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("settings", "shape"), CASES, ids=name_of)
def test_selection_and_attention_are_the_papers(settings, shape):
    q, k, v = inputs(*shape)
    chosen = select(q, k, settings, scale=0.3)
    grid = chosen.grid
    expected = LOOPS[settings.name](q, k, settings, 0.3)
    assert listed(chosen) == expected
    out, stats = baseline_attention(q, k, v, settings, scale=0.3)
    if isinstance(settings, FlashPrefillV2):
        truth, pairs = references.flash_prefill_v2_attention(q, k, v, expected, settings, 0.3)
    else:
        truth, pairs = references.attention(q, k, v, expected, grid.block_m, grid.block_n, 0.3)
    torch.testing.assert_close(out, truth, rtol=1e-9, atol=1e-9)
    batch, _, _, q_len, kv_len = shape
    causal = batch * sum(kv_len - q_len + i + 1 for i in range(q_len))
    assert stats.density.tolist() == pytest.approx([count / causal for count in pairs])


@pytest.mark.parametrize(
    "settings",
    [
        FlashPrefill(0.0, 64, first=0, window=0, last=0),
        FlashPrefillV2(0.0, 64, first=0, window=0, last=0),
        parse("flex-prefill:keep=1,tau=0,least_keys=0,block=64"),
        parse("flex-prefill:keep=1,tau=1,least_keys=0,block=64"),
        PBS(1.0, 128, 64),
        Sparge(1.0),
        Antidiagonal(1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [SUFFIX, BATCH, FEW, ONE], ids=["suffix", "batch", "few", "one-query"])
def test_everything_kept_is_dense(shape, settings):
    q, k, v = inputs(*shape)
    out, stats = baseline_attention(q, k, v, settings)
    torch.testing.assert_close(out, naive_attention(q, k, v), rtol=1e-9, atol=1e-9)
    assert stats.density.tolist() == [1.0] * shape[1]


@pytest.mark.parametrize(
    "settings",
    [PBS(0.7, 128, 64), FlashPrefill(0.5, 64), FlashPrefillV2(0.5, 64, last=1), Sparge(0.6, 0.38), Antidiagonal(0.6)]
    + [parse("flex-prefill:keep=0.5,tau=0.2,least_keys=0,block=64")],
    ids=lambda settings: settings.name,
)
def test_small_chunks_change_nothing(settings, monkeypatch):
    q, k, _ = inputs(2, 4, 2, 300, 300)
    whole = select(q, k, settings)
    monkeypatch.setattr("scripts.bench.baselines.selection.CHUNK", 1)
    sliced = select(q, k, settings)
    assert listed(sliced) == listed(whole)
    assert whole.pruned is None or torch.equal(sliced.pruned, whole.pruned)


def test_the_mean_of_a_pruned_block_stands_for_its_keys():
    """Exactly where the keys of each block are equal, as values then count by their mean."""
    q, k, v = inputs(1, 4, 2, 400, 640)
    k = k.unflatten(2, (-1, 64))[:, :, :, :1].expand(-1, -1, -1, 64, -1).flatten(2, 3)
    settings = FlashPrefillV2(1.0, 64, first=0, window=0, last=0)
    out, stats = baseline_attention(q, k, v, settings)
    assert float(stats.density.max()) < 0.6
    torch.testing.assert_close(out, naive_attention(q, k, v), rtol=1e-9, atol=1e-9)
    dropped, same = baseline_attention(q, k, v, replace(settings, correct=False))
    assert torch.equal(same.counts, stats.counts)
    assert float((dropped - out).abs().max()) > 0.01


def test_heads_of_flex_prefill_take_the_form_that_fits_them():
    """Of the query heads of a KV head a uniform one goes by means, one that attends to one key by its stripe."""
    q, k = torch.zeros(1, 2, 640, 16).double(), torch.zeros(1, 1, 640, 16).double()
    q[0, 1, :, 0] = k[0, 0, 202, 0] = 10.0
    chosen = listed(select(q, k, parse("flex-prefill:keep=0.55,least_keys=64,block=64")))
    # the first rows of blocks have the heaviest pairs of a uniform map; later ones have the first block and their own
    assert [len(chosen[0, 0, i][0]) for i in (0, 1, 2, 3, 4, 6, 7, 8, 9)] == [1, 2, 3, 4, 5, 2, 2, 2, 2]
    chosen = listed(select(q, k, parse("flex-prefill:keep=0.55,least_keys=128,block=64")))
    # block 3 has the key, and the heaviest diagonals pass it from the last rows and so lie 6 blocks back
    assert [chosen[0, 1, i][0] for i in range(10)] == [sorted({0, 3, i, i - 6} & {*range(i + 1)}) for i in range(10)]


@pytest.mark.parametrize("settings", [*(kind() for kind in BASELINES.values()), PBS(0.7, 64, 64)])
def test_text_says_everything(settings):
    assert parse(str(settings)) == settings
    assert BASELINES[settings.name] is type(settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("best", "baseline 'best' is not known: use one of flash-prefill"),
        ("pbs:keep", "option 'keep' of pbs has no value"),
        ("pbs:tau=1", "pbs has no option 'tau': use keep, segment"),
        ("pbs:keep=0.5,keep=0.6", "option keep of pbs is given twice"),
        ("pbs:keep=much", "keep of pbs is 'much': expected a number from 1e-06 to 1"),
        ("pbs:segment=192", "segment 192 of pbs is not a multiple of its block 128"),
        ("flash-prefill:alpha=2", "alpha of flash-prefill is 2.0: expected a number from 0 to 1"),
    ],
)
def test_wrong_text_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_wrong_calls_are_refused():
    q, k, v = inputs(1, 2, 1, 100, 100)
    with pytest.raises(InputError, match="v has head_dim 8 but k 16: baselines need one for both"):
        baseline_attention(q, k, v[..., :8], PBS())
    with pytest.raises(InputError, match="scale is -1"):
        select(q, k, PBS(), scale=-1)
    with pytest.raises(InputError, match="select again"):
        attend(q[:, :, 1:], k, v, select(q, k, PBS()))
    with pytest.raises(ConfigError, match="keep of pbs is 2"):
        select(q, k, PBS(keep=2))
