"""The self-test of a served model: with a threshold of 0, S2O must give in each layer what the stock backend gives.

Each layer is tested on the first prompt that is long enough, in the server's own cache, and is dense until then. Each
head is compared by itself, so that heads in another order show, as do pages that are read where they are not written,
another scale of the scores, and masks or biases that only the stock backend applies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from s2o_runtime.attention.backend import Backend
from s2o_runtime.attention.paged import s2o_attention_paged
from s2o_runtime.config import LayerConfig
from s2o_runtime.errors import S2OError
from s2o_runtime.lengths import get_length_step
from s2o_runtime.sequences import FP8_TYPES
from s2o_runtime.serving.batch import Batch, BatchSlice, make_call
from s2o_runtime.serving.fit import TEST_KEYS, ServedLayer

UNTESTED = "the layer has not passed its self-test yet"
ROWS, FEWEST_ROWS = 128, 32  # of a prompt that layers are tested on, at most and at least
# the largest difference of a head, squared, over the mean square of its output; another mask gives 0.1 and more
ALLOWED = {torch.float32: 1e-6, torch.float64: 1e-6}
ALLOWED_ROUNDED = 1e-3  # where weights of the softmax are rounded to 16 bits
ALLOWED_FP8 = 2e-2  # where the stock backend rounds them to 8 bits


def find_test_rows(batch: Batch) -> BatchSlice | None:
    """Return the last rows of the first request of a batch that layers can be tested on; None if there is none."""
    split = batch.split
    for index, (queries, keys, *_) in enumerate(split.requests):
        rows, end = min(queries, keys // 2, ROWS), split.starts[index + 1]
        if keys >= TEST_KEYS and rows >= FEWEST_ROWS:
            return BatchSlice(index, index + 1, end - rows, end, get_length_step(keys), rows, keys, keys)
    return None


def exact_config(layer: ServedLayer, lengths: tuple[int, ...]) -> LayerConfig | None:
    """Return settings of the layer's kernels with which it is dense attention; None if the layer is always dense.

    Args:
        layer: the layer.
        lengths: calibrated, the first of which where the layer is sparse gives the kernels.
    """
    configs = map(layer.config, lengths)
    return next((config.as_exact() for config in configs if not config.is_dense), None)


def run_self_test(
    layer: ServedLayer, batch: Batch, span: BatchSlice, query: Tensor, pages: tuple[Tensor, Tensor], scale: float,
    output: Tensor,
) -> None:  # fmt: skip
    """Compare S2O with the stock backend on some rows; a layer that differs stays dense, with a log line.

    It waits for the device once.

    Args:
        layer: that is tested.
        batch, span: the batch, and the rows of one request.
        query, output: [T, Hq, D], all rows of the batch.
        pages: keys and values, [pages, page size, Hkv, D] each, the layer's cache.
        scale: of the scores.
    """
    layer.tested = True
    config = exact_config(layer, batch.fit.profile.lengths)
    if config is None:
        return
    edges, seq_lens, table = batch.get_tensors(span)
    # the rows begin behind those that the request has in the batch
    call = make_call(span, edges.clamp_min(span.begin), seq_lens, table, pages[0].shape[1])
    backend: Backend = "triton" if query.is_cuda else "reference"
    try:
        ours = s2o_attention_paged(query[span.rows], *pages, config, **call, scale=scale, backend=backend)
    except S2OError as error:
        layer.refuse(f"its self-test cannot run ({error})")
        return
    truth = output[span.rows].double()
    errors = (ours.double() - truth).square().mean((0, 2)) / truth.square().mean((0, 2)).clamp_min(1e-30)
    allowed = ALLOWED_FP8 if pages[0].dtype in FP8_TYPES else ALLOWED.get(query.dtype, ALLOWED_ROUNDED)
    # not <= rather than >: a NaN is wrong too
    wrong = [f"{head} ({error:.1e})" for head, error in enumerate(errors.tolist()) if not error <= allowed]
    if wrong:
        layer.refuse(
            "its self-test failed: without a threshold S2O differs from the stock backend in heads "
            f"{', '.join(wrong)}, expected at most {allowed:g} of a head's mean square"
        )
