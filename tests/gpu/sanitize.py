"""A small call of every kernel, for compute-sanitizer, which has no time for large ones.

compute-sanitizer --tool memcheck python tests/gpu/sanitize.py [KERNEL ...]
compute-sanitizer --tool racecheck --kernel-name kernel_substring=_prefill python tests/gpu/sanitize.py plain

racecheck takes minutes over torch's own products, so name the kernel that it is for: of "specialised" _prefill_hopper,
of "plain" _prefill and those of ranking and tail (_representatives, _log_sums, _scores, _order, _pool, _tail), with
int8 scores _channel_ranges and _quantise_keys too, where it is split _combine, of the others _trace, _gather_pages,
_block_sparse, _pool, _mean_key_mass, _antidiagonal and _mass. It should be of compute-sanitizer 2026.1 or later (`pip
install nvidia-cuda-sanitizer-api`, 13.5, brings 2026.4): older ones report barriers of a part of a block wrongly. What
both found:
docs/results/sanitizer-h200.txt. What plain torch computes too is compared with it: what runs under the tool is what the
tests run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.attention.paged import s2o_attention_paged
from s2o_runtime.attention.replay import forget_plans
from s2o_runtime.call import Call
from s2o_runtime.config import HeadConfig, LayerConfig, Scores, TileConfig
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.kernels.pages import gather_pages
from s2o_runtime.reference.dense import exact_attention
from s2o_runtime.sequences import PagedKeys
from scripts.bench.baselines.flash_prefill import head_mass, log_mass
from scripts.bench.baselines.pooling import block_means, pool, pool_plain
from scripts.bench.baselines.run import attend, select
from scripts.bench.baselines.selection import Grid
from scripts.bench.baselines.settings import parse
from scripts.bench.baselines.xattention import block_weights, head_weights
from support.paging import LAYOUTS, paged

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 1100, 4, 2, 128
KINDS = (
    HeadConfig(5.0, 256, tail="mean", representatives=16),
    HeadConfig(0.5, 128),
    HeadConfig(50.0, 256, tail="mean"),
    HeadConfig(mode="dense"),
)
DENSE = 3  # which of them
LAST_ROWS = 128  # run dense in every head
PLAIN, SPECIALIZED = TileConfig(64, 64, 2, 4, 2), TileConfig(64, 128, 1, 4, 2, True)
BLOCK_SPARSE = (
    "pbs:keep=0.5,permute_queries=true",
    "sparge:keep=0.5,similarity=0.1,skip=-6",
    "skip-softmax:factor=500",
    "skip-softmax:factor=500,block=64",
)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Keys of very different lengths, so that a ranking has something to find: q, k, v in bf16."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, LENGTH, HEAD_DIM, generator=rng) for heads in (HEADS, KV_HEADS, KV_HEADS))
    k = 2 * k * torch.rand(1, 1, LENGTH, 1, generator=rng).square()
    q, k, v = (x.to("cuda", torch.bfloat16) for x in (q, k, v))
    return q, k, v


def prefill(tile: TileConfig, scores: Scores = "input") -> float:
    """With and without left padding. Int8 scores are compared with the reference of the same rounding."""
    q, k, v = inputs()
    config = LayerConfig(KINDS, tile, scores=scores, last_rows=LAST_ROWS)
    worst = 0.0
    for start in (None, torch.tensor([70], device="cuda")):
        out, _, did = s2o_attention(q, k, v, config, kv_start=start, backend="triton", return_stats=True)
        assert 0.1 < float(did.density[:DENSE].mean()) < 0.9
        if scores == "input":
            wanted = exact_attention(q, k, v, kv_start=start)
        else:
            wanted = s2o_attention(q, k, v, config, kv_start=start, backend="reference")
        worst = max(worst, off_dense(out[0], wanted[0]))
    return worst


def packed(tile: TileConfig, scores: Scores = "input") -> float:
    """Three sequences, one of them empty."""
    return off_dense(*packed_outputs(inputs(), LayerConfig(KINDS, tile, scores=scores, last_rows=LAST_ROWS)))


def packed_outputs(qkv: tuple[Tensor, ...], config: LayerConfig) -> tuple[Tensor, Tensor]:
    """What kernels and reference make of three sequences, one of them empty: [Hq, L, D] each."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv)
    begins = torch.tensor([0, 300, 300, LENGTH], dtype=torch.int32, device="cuda")
    ours, theirs = (
        s2o_attention_varlen(q, k, v, begins, begins, LENGTH, LENGTH, config, backend=each)
        for each in ("triton", "reference")
    )
    return ours.transpose(0, 1), theirs.transpose(0, 1)


def in_place(tile: TileConfig) -> float:
    """Three sequences, one of them empty, in the pages of a cache, against the same one behind another."""
    lengths = [300, 0, LENGTH - 300]
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs())
    begins = torch.tensor([0, 300, 300, LENGTH], dtype=torch.int32, device="cuda")
    config = LayerConfig(KINDS, tile, last_rows=LAST_ROWS)
    k_cache, v_cache, table, _ = paged(k, v, lengths, 16, LAYOUTS[0])
    longest = max(lengths)
    ours = s2o_attention_paged(
        q, k_cache, v_cache, config,
        cu_q=begins, seq_lens=begins.diff(), block_table=table, max_q=longest, max_k=longest, total_k=LENGTH,
        backend="triton",
    )  # fmt: skip
    theirs = s2o_attention_varlen(q, k, v, begins, begins, longest, longest, config, backend="triton")
    assert bool(ours.isfinite().all())
    return off(ours, theirs)


def split(tile: TileConfig) -> float:
    """All of these with the keys of the dense head split, without plans of unsplit calls."""
    forget_plans()
    with mock.patch.object(prefill_module, "count_key_splits", return_value=4):
        worst = max(prefill(tile), packed(tile), in_place(tile))
    forget_plans()
    return worst


def paged_cache() -> float:
    """Keys out of pages, of the queries' type and of 8 bits, by the kernel and by plain torch."""
    _, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs())
    worst = 0.0
    for layout, dtype in ((LAYOUTS[0], k.dtype), (LAYOUTS[2], torch.float8_e4m3fn)):
        k_cache, v_cache, table, cu_k = paged(k, v, [300, LENGTH - 300], 16, layout, dtype)
        pages = PagedKeys(k_cache, v_cache, table, cu_k, max_k=LENGTH, total_k=LENGTH)
        pairs = zip(gather_pages(pages, k.dtype), pages.gathered(k.dtype), strict=True)
        worst = max(worst, *(off(*pair) for pair in pairs))
    return worst


def off_dense(out: Tensor, wanted: Tensor) -> float:
    """How far the dense head is off; the others rank more coarsely than the reference, and must be numbers."""
    assert bool(out.isfinite().all())
    return off(out[DENSE], wanted[DENSE])


def trace() -> float:
    """How many numbers of a trace are NaN, and how often a higher threshold visits more than a lower one."""
    from s2o_runtime.kernels.trace import trace as traced

    q, k, v = inputs()
    config = LayerConfig.uniform(HEADS, segment=256, tail="mean", representatives=16, tile=PLAIN)
    truth = exact_attention(q, k, v).to(q.dtype)
    taus = torch.tensor([1e-2, 0.1, 1.0, 10.0], device="cuda")
    (found,) = traced(Call.from_tensors(q, k, v, config), truth, torch.ones(HEADS, device="cuda"), taus)
    grown = (found.visited[..., : len(taus)].diff(dim=-1) > 0).sum()
    return float(grown + sum(one[..., : len(taus)].isnan().sum() for one in found if isinstance(one, Tensor)))


def block_sparse() -> float:
    """Attention over the same blocks by the kernel and by plain torch."""
    q, k, v = inputs()
    worst = 0.0
    for text in BLOCK_SPARSE:
        chosen = select(q, k, parse(text))
        worst = max(worst, off(*(attend(q, k, v, chosen, backend=each) for each in ("triton", "reference"))))
    return worst


def pooling() -> float:
    q, _, _ = inputs()
    return max(off(*pair) for pair in zip(pool(q, 128), pool_plain(q, 128), strict=True))


def mean_keys() -> float:
    """How far the logarithms of FlashPrefill's block weights are off; infinite ones must be the same."""
    q, k, _ = inputs()
    worst, scale = 0.0, HEAD_DIM**-0.5
    for block in (64, 128):
        grid, k_mean = Grid.plain(q, k, block, block), block_means(k, block).to(k.dtype)
        pairs = ((q[:, h].double(), k_mean[:, h * KV_HEADS // HEADS].double()) for h in range(HEADS))
        plain = torch.stack([head_mass(*pair, grid, scale) for pair in pairs], 1)
        ours = log_mass(q, k_mean, slice(0, HEADS), grid, scale)
        assert torch.equal(ours.isinf(), plain.isinf())
        worst = max(worst, float((ours - plain)[~ours.isinf()].abs().max()))
    return worst


def antidiagonal() -> float:
    q, k, _ = inputs()
    worst, scale = 0.0, HEAD_DIM**-0.5
    for stride, block in ((16, 128), (4, 64)):
        grid = Grid.plain(q, k, block, block)
        pairs = ((q[:, h].double(), k[:, h * KV_HEADS // HEADS].double()) for h in range(HEADS))
        plain = [block_weights(*pair, grid, stride, scale) for pair in pairs]
        worst = max(worst, off(head_weights(q, k, slice(0, HEADS), grid, stride, scale), torch.stack(plain, 1)))
    return worst


def off(out: Tensor, wanted: Tensor) -> float:
    """The distance over the length of what is wanted."""
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


def main(names: list[str]) -> int:
    kernels: dict[str, Callable[[], float]] = {}
    for tiles, tile in (("specialised", SPECIALIZED), ("plain", PLAIN)):
        kernels |= {
            tiles: partial(prefill, tile),
            f"{tiles}, packed": partial(packed, tile),
            f"{tiles}, int8": partial(prefill, tile, "int8"),
            f"{tiles}, int8, packed": partial(packed, tile, "int8"),
            f"{tiles}, in pages": partial(in_place, tile),
            f"{tiles}, split": partial(split, tile),
        }
    kernels |= {"pages": paged_cache, "trace": trace, "block-sparse": block_sparse, "pooling": pooling}
    kernels |= {"mean keys": mean_keys, "antidiagonal": antidiagonal}
    wrong = 0
    for name in names or kernels:
        difference = kernels[name]()
        torch.cuda.synchronize()
        print(f"{name}: differs by {difference:.1e}", flush=True)
        wrong += not difference < 1e-2
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
