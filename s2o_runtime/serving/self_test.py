"""The self-test of a served model: with a threshold of 0, S2O must give in each layer what the stock backend gives.

Each layer is tested on the first prompt that is long enough, in the server's own cache, and is dense until then. What
is compared is each head by itself, so that heads in another order show, as do pages that are read where they are not
written, another scale of the scores, and masks or biases that only the stock backend applies.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from s2o_runtime.attention.paged import s2o_attention_paged
from s2o_runtime.config import LayerConfig
from s2o_runtime.errors import S2OError
from s2o_runtime.lengths import length_step
from s2o_runtime.sequences import FP8_TYPES
from s2o_runtime.serving.calls import Batch, SparseCall
from s2o_runtime.serving.fit import TEST_KEYS, LayerFit
from s2o_runtime.serving.plan import Run

UNTESTED = "the layer has not passed its self-test yet"
ROWS, FEWEST_ROWS = 128, 32  # of a prompt that layers are tested on, at most and at least
# the largest difference of a head, squared, over the mean square of its output; another mask gives 0.1 and more
ALLOWED = {torch.float32: 1e-6, torch.float64: 1e-6}
ALLOWED_ROUNDED = 1e-3  # where weights of the softmax are rounded to 16 bits
ALLOWED_FP8 = 2e-2  # where the stock backend rounds them to 8 bits

log = logging.getLogger("s2o_runtime")


def short_prompt(batch: Batch) -> Run | None:
    """The last rows of the first request of a batch that layers can be tested on; None if there is none."""
    starts = batch.pieces.starts
    for request, keys in enumerate(batch.pieces.lengths):
        begin, end = starts[request], starts[request + 1]
        rows = min(end - begin, keys // 2, ROWS)
        if keys >= TEST_KEYS and rows >= FEWEST_ROWS:
            return Run(request, request + 1, end - rows, end, length_step(keys), rows, keys, keys)
    return None


def exact_config(layer: LayerFit) -> LayerConfig | None:
    """A configuration of the layer's kernels with which it is dense attention; None if the layer is always dense."""
    configs = map(layer.config, layer.lengths)
    return next((config.as_exact() for config in configs if not config.is_dense), None)


def self_test(
    layer: LayerFit,
    batch: Batch,
    run: Run,
    *,
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: float,
    output: Tensor,
) -> None:
    """Compare S2O with what the stock backend gave for some rows; a layer that differs stays dense, with a log line.

    It waits for the device once.

    Args:
        layer: that is tested.
        batch, run: the batch, and the rows of one request.
        query, output: [T, Hq, D], all rows of the batch.
        k_pages, v_pages: [pages, page size, Hkv, D], the layer's cache.
        scale: of the scores.
    """
    layer.tested = True
    config = exact_config(layer)
    if config is None:
        return
    edges, seq_lens, table = batch.tensors_of(run)
    call = SparseCall.of(run, edges.clamp_min(run.begin), seq_lens, table, k_pages.shape[1])
    try:
        ours = s2o_attention_paged(
            query[run.rows], k_pages, v_pages, config, cu_q=call.cu_q, seq_lens=call.seq_lens,
            block_table=call.block_table, max_q=call.max_q, max_k=call.max_k, total_k=call.total_k, cu_k=call.cu_k,
            scale=scale, backend="triton" if query.is_cuda else "reference",
        )  # fmt: skip
    except S2OError as error:
        layer.refuse(f"its self-test cannot run ({error})")
        return
    truth = output[run.rows].double()
    errors = (ours.double() - truth).square().mean((0, 2)) / truth.square().mean((0, 2)).clamp_min(1e-30)
    allowed = ALLOWED.get(query.dtype, ALLOWED_ROUNDED)
    if k_pages.dtype in FP8_TYPES:
        allowed = ALLOWED_FP8
    wrong = [f"{head} ({error:.1e})" for head, error in enumerate(errors.tolist()) if not error <= allowed]
    if wrong:
        layer.refuse(
            "its self-test failed: without a threshold S2O differs from the stock backend in heads "
            f"{', '.join(wrong)}, expected at most {allowed:g} of a head's mean square"
        )
