"""A small call of every kernel, for compute-sanitizer, which has no time for large ones.

compute-sanitizer --tool memcheck python tests/gpu/sanitize.py [KERNEL ...]
compute-sanitizer --tool racecheck --kernel-name kernel_substring=_prefill python tests/gpu/sanitize.py plain

racecheck takes minutes over torch's own products, so name the kernel that it is for: of "specialised" _prefill_hopper,
of "plain" _prefill and those of ranking (_means, _scores, _order, _tail), where it is split _combine, of the others
_trace and _gather_pages, of every baseline _block_sparse, of "flash-prefill" _mean_key_mass and _choose, of "sparge"
_pool, of "xattention" _antidiagonal and _mass. It should be of compute-sanitizer 2026.1 or later
(`pip install nvidia-cuda-sanitizer-api`, 13.5, brings 2026.4): older ones report barriers of a part of a block wrongly.
What both found: docs/results/sanitizer-h200.txt. What plain torch computes too is compared with it: what runs under the
tool is what the tests run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.attention.replay import forget_plans
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.kernels.pages import gather_pages
from s2o_runtime.kernels.trace import trace as run_trace
from s2o_runtime.reference.dense import exact_attention
from s2o_runtime.sequences import PagedKeys
from scripts.bench.baselines.run import attend, select
from scripts.bench.baselines.settings import parse
from support.kernels import DEVICE, DTYPE, PLAIN, call_of, relative_error
from support.paging import LAYOUTS, PagedBatch

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 1100, 4, 2, 128
LENGTHS = [300, 0, LENGTH - 300]
KINDS = (
    HeadConfig(5.0, 256, tail="mean", representatives=16),
    HeadConfig(0.5, 128),
    HeadConfig(50.0, 256, tail="mean"),
    HeadConfig(mode="dense"),
)
DENSE = 3  # which of them
SPECIALIZED = TileConfig(64, 128, 1, 4, 2, True)
BASELINES = (
    "flash-prefill:block=64", "flash-prefill-v2:block=64", "pbs:keep=0.5", "sparge:keep=0.5,similarity=0.1",
    "xattention:keep=0.5",
)  # fmt: skip


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Keys of very different lengths, so that a ranking has something to find: q, k, v."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, LENGTH, HEAD_DIM, generator=rng) for heads in (HEADS, KV_HEADS, KV_HEADS))
    k = 2 * k * torch.rand(1, 1, LENGTH, 1, generator=rng).square()
    q, k, v = (x.to(DEVICE, DTYPE) for x in (q, k, v))
    return q, k, v


def prefill(config: LayerConfig) -> float:
    """With and without left padding."""
    q, k, v = inputs()
    worst = 0.0
    for start in (None, torch.tensor([70], device=DEVICE)):
        out, _, stats = s2o_attention(q, k, v, config, kv_start=start, backend="triton", return_stats=True)
        assert 0.1 < float(stats.density[:DENSE].mean()) < 0.9
        wanted = exact_attention(q, k, v, kv_start=start)
        worst = max(worst, off_dense(out[0], wanted[0]))
    return worst


def packed(config: LayerConfig) -> float:
    """Three sequences, one of them empty."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs())
    begins = torch.tensor([0, 300, 300, LENGTH], dtype=torch.int32, device=DEVICE)
    outputs = [
        s2o_attention_varlen(q, k, v, begins, begins, LENGTH, LENGTH, config, backend=backend).transpose(0, 1)
        for backend in ("triton", "reference")
    ]
    return off_dense(*outputs)


def in_place(config: LayerConfig) -> float:
    """Three sequences, one of them empty, in the pages of a cache, against the same one behind another."""
    batch = PagedBatch(LENGTHS, LENGTHS, 16, LAYOUTS[0], head_dim=HEAD_DIM, dtype=DTYPE, device=DEVICE)
    ours = batch.paged(config, total_k=LENGTH, backend="triton")
    assert bool(ours.isfinite().all())
    return relative_error(ours, batch.packed(config, backend="triton").float())


def split(config: LayerConfig) -> float:
    """All of these with the keys of the dense head split, without plans of unsplit calls."""
    forget_plans()
    with mock.patch.object(prefill_module, "count_key_splits", return_value=4):
        worst = max(run(config) for run in (prefill, packed, in_place))
    forget_plans()
    return worst


def paged_cache() -> float:
    """Keys out of pages, of the queries' type and of 8 bits, by the kernel and by plain torch."""
    worst = 0.0
    for layout, cache in ((LAYOUTS[0], None), (LAYOUTS[2], torch.float8_e4m3fn)):
        batch = PagedBatch(LENGTHS, LENGTHS, 16, layout, head_dim=HEAD_DIM, dtype=DTYPE, device=DEVICE, cache=cache)
        pages = PagedKeys(*batch.caches, batch.table, batch.cu_k, max_k=LENGTH, total_k=LENGTH)
        pairs = zip(gather_pages(pages, DTYPE), pages.gathered(DTYPE), strict=True)
        worst = max(worst, *(relative_error(ours, wanted.float()) for ours, wanted in pairs))
    return worst


def off_dense(out: Tensor, wanted: Tensor) -> float:
    """Return how far the dense head is off; the others rank more coarsely than the reference, and must be numbers."""
    assert bool(out.isfinite().all())
    return relative_error(out[DENSE], wanted[DENSE].float())


def trace() -> float:
    """Return how many numbers of a trace are NaN, and how often a higher threshold visits more than a lower one."""
    q, k, v = inputs()
    config = LayerConfig.uniform(HEADS, segment=256, tail="mean", representatives=16, tile=PLAIN)
    truth = exact_attention(q, k, v).to(q.dtype)
    taus = torch.tensor([1e-2, 0.1, 1.0, 10.0], device=DEVICE)
    (traced,) = run_trace(call_of(q, k, v, config), truth, torch.ones(HEADS, device=DEVICE), taus)
    grown = (traced.visited[..., : len(taus)].diff(dim=-1) > 0).sum()
    return float(grown + sum(one[..., : len(taus)].isnan().sum() for one in traced if isinstance(one, Tensor)))


def baseline(text: str) -> float:
    """The blocks that a baseline chooses; attention over them by the kernel and by plain torch."""
    q, k, v = inputs()
    chosen = select(q, k, parse(text))
    ours, wanted = (attend(q, k, v, chosen, backend=backend) for backend in ("triton", "reference"))
    return relative_error(ours, wanted.float())


def main(names: list[str]) -> int:
    kernels: dict[str, Callable[[], float]] = {}
    for name, tile in (("specialised", SPECIALIZED), ("plain", PLAIN)):
        config = LayerConfig(KINDS, tile, last_rows=128)
        kernels |= {name: partial(prefill, config), f"{name}, packed": partial(packed, config)}
        kernels |= {f"{name}, in pages": partial(in_place, config), f"{name}, split": partial(split, config)}
    kernels |= {"pages": paged_cache, "trace": trace}
    kernels |= {text.partition(":")[0]: partial(baseline, text) for text in BASELINES}
    wrong = 0
    for name in names or kernels:
        difference = kernels[name]()
        print(f"{name}: differs by {difference:.1e}", flush=True)
        wrong += not difference < 1e-2
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
