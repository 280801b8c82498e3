"""One call of one layer by a server, whichever it is: S2O computes the sparse slices, the stock backend all else.

Before that, a self-test: with a threshold of 0, S2O must give in each layer what the stock backend gives. Each layer is
tested on the first prompt that is long enough, in the server's own cache, and is dense until then. Each head is
compared by itself, so that heads in another order show, as do pages that are read where they are not written, another
scale of the scores, and masks or biases that only the stock backend applies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.backend import Backend
from ..attention.paged import gather_keys, s2o_attention_paged
from ..call import Scoring
from ..config import LayerConfig
from ..dense_reason import DenseReason
from ..errors import S2OError
from ..lengths import find_nearest
from ..monitor.counters import Counters
from ..sequences import FP8_TYPES, PagedKeys
from .batch import Batch, BatchSlice, make_call
from .fit import TEST_KEYS, ServedLayer

UNTESTED = "the layer has not passed its self-test yet"
ROWS, FEWEST_ROWS = 128, 32  # of a prompt that layers are tested on, at most and at least
# the largest difference of a head, squared, over the mean square of its output; another mask gives 0.1 and more
ALLOWED = {torch.float32: 1e-6, torch.float64: 1e-6}
ALLOWED_ROUNDED = 1e-3  # where weights of the softmax are rounded to 16 bits
ALLOWED_FP8 = 2e-2  # where the stock backend rounds them to 8 bits


class LayerCall(NamedTuple):
    """A server's call of one layer."""

    number: int  # of the decoder layer, by which rows are counted
    layer: ServedLayer | str  # of the profile, or the reason why S2O has no part in the call
    batch: Batch | str  # of the server, or that reason
    query: Tensor  # [T, Hq, D], the rows of the batch
    scoring: Scoring  # of the layer
    read_pages: Callable[[], tuple[Tensor, Tensor]]  # the layer's keys and values, [pages, page size, Hkv, D] each
    run_stock: Callable[[], Any]  # lets the stock backend compute all rows, and returns the server's answer
    run_stock_slice: Callable[[BatchSlice, Tensor], object]  # lets it compute a slice into an output, [T, Hq, D]
    make_output: Callable[[], tuple[Any, Tensor]]  # an empty answer, and a view of it, [T, Hq, D]


def attend(call: LayerCall, rows: int, counters: Counters) -> Any:
    """Compute a call, and count the rows of its batch, without those that fill it up; return the server's answer.

    The stock backend computes a layer until the first prompt that is long enough has tested it.
    """
    layer, batch, device = call.layer, call.batch, call.query.device
    if isinstance(layer, str) or isinstance(batch, str):
        counters.count_stock_batch((call.number,), layer if isinstance(layer, str) else str(batch), rows)
        return call.run_stock()
    slices, dense_rows = batch.plan(layer)
    test_rows = None if layer.tested else find_test_rows(batch)
    if slices and not layer.tested:
        slices, dense_rows = (), {UNTESTED: rows}
    for reason, count in dense_rows.items():
        counters.add(call.number, "s2o" if reason is DenseReason.UNREAD else "dense", reason, count)
    counters.log_summary()
    if not slices:
        answer = counters.call_stock(call.number, device, call.run_stock)
        if test_rows is not None:
            run_self_test(call, layer, batch, test_rows, answer.view(call.query.shape))
        return answer
    pages = call.read_pages()
    answer, out = call.make_output()
    for span in slices:
        if span.is_zero:
            out[span.rows].zero_()
        elif span.is_sparse:
            _compute(call, batch, layer, span, pages, out, counters)
        elif span.begin < span.end:
            counters.call_stock(call.number, device, call.run_stock_slice, span, out[span.rows])
    return answer


def _compute(
    call: LayerCall,
    batch: Batch,
    layer: ServedLayer,
    span: BatchSlice,
    pages: tuple[Tensor, Tensor],
    out: Tensor,
    counters: Counters,
) -> None:
    """Compute one slice with S2O, and count it; keep a sampled call's density, and check its error."""
    # a view takes microseconds of the host: none where the slice is the batch
    is_all = span.end - span.begin == len(call.query)
    query, out = (call.query, out) if is_all else (call.query[span.rows], out[span.rows])
    arguments = batch.get_call(span, pages[0].shape[1]) | call.scoring.arguments()
    sample = counters.begin(layer.layer, "s2o", query.device)
    assert span.bucket is not None
    length = batch.fit.profile.lengths[span.bucket]
    stats = s2o_attention_paged(query, *pages, layer.config(length), **arguments, out=out, return_stats=True).stats
    assert stats is not None
    path = "dense" if stats.backend == "dense" else "s2o"
    counters.end(layer.layer, path, sample, query.device)
    counters.add(layer.layer, path, stats.reason, span.end - span.begin)
    if stats.backend != "dense" and counters.is_sampled(layer.layer, 2 * span.max_q >= span.max_k):
        counters.sampled[layer.layer] = stats  # read from the device when somebody asks
        if layer.drift is not None and span.last == span.first + 1:  # the check takes one prompt, unpacked
            cache = PagedKeys(*pages, arguments["block_table"], arguments["cu_k"], span.max_k, span.total_k)
            packed = (query, *gather_keys(cache, query.dtype), out)
            q, keys, values, output = (tensor.transpose(0, 1)[None] for tensor in packed)
            layer.drift.see(q, keys, values, output, call.scoring, None, length)


def find_test_rows(batch: Batch) -> BatchSlice | None:
    """Return the last rows of the first request of a batch that layers can be tested on; None if there is none."""
    split = batch.split
    for index, (queries, keys, *_) in enumerate(split.requests):
        rows, end = min(queries, keys // 2, ROWS), split.starts[index + 1]
        if keys >= TEST_KEYS and rows >= FEWEST_ROWS:
            bucket = find_nearest(batch.fit.profile.lengths, keys)
            return BatchSlice(index, index + 1, end - rows, end, bucket, rows, keys, keys)
    return None


def exact_config(layer: ServedLayer, lengths: tuple[int, ...]) -> LayerConfig | None:
    """Return settings of the layer's kernels with which it is dense attention; None if it is at all these lengths."""
    configs = map(layer.config, lengths)
    return next((config.as_exact() for config in configs if not config.is_dense), None)


def run_self_test(call: LayerCall, layer: ServedLayer, batch: Batch, span: BatchSlice, output: Tensor) -> None:
    """Compare S2O with the stock backend's `output`, [T, Hq, D], on some rows of one request; waits for the device.

    A layer that differs stays dense, with a log line.
    """
    layer.tested = True
    config = exact_config(layer, batch.fit.profile.lengths)
    if config is None:
        return
    query, pages = call.query[span.rows], call.read_pages()
    edges, seq_lens, table = batch.get_tensors(span)
    # the rows begin behind those that the request has in the batch
    arguments = make_call(span, edges.clamp_min(span.begin), seq_lens, table, pages[0].shape[1])
    arguments |= call.scoring.arguments()
    backend: Backend = "triton" if query.is_cuda else "reference"
    try:
        ours = s2o_attention_paged(query, *pages, config, **arguments, backend=backend)
    except S2OError as error:
        layer.refuse(f"its self-test cannot run ({error})")
        return
    errors = measure_difference(ours, output[span.rows], (0, 2))
    allowed = ALLOWED_FP8 if pages[0].dtype in FP8_TYPES else ALLOWED.get(query.dtype, ALLOWED_ROUNDED)
    # not <= rather than >: a NaN is wrong too
    wrong = [f"{head} ({error:.1e})" for head, error in enumerate(errors.tolist()) if not error <= allowed]
    if wrong:
        layer.refuse(
            "its self-test failed: without a threshold S2O differs from the stock backend in heads "
            f"{', '.join(wrong)}, expected at most {allowed:g} of a head's mean square"
        )


def measure_difference(ours: Tensor, truth: Tensor, dims: tuple[int, ...] = ()) -> Tensor:
    """Return the mean squared difference over the mean square of `truth`, taken over some dims or all; float64."""
    truth = truth.double()
    return (ours.double() - truth).square().mean(dims) / truth.square().mean(dims).clamp_min(1e-30)
