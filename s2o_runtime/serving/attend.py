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
from ..lengths import find_nearest
from ..monitor.counters import Counters, Key
from ..sequences import FP8_TYPES, PagedKeys
from .batch import Batch, BatchSlice, make_call
from .fit import TEST_KEYS, ServedLayer

ROWS, FEWEST_ROWS = 128, 32  # of a prompt that layers are tested on, at most and at least
# the largest difference of a head, squared, over the mean square of its output; another mask gives 0.1 and more
ALLOWED = {torch.float32: 1e-6, torch.float64: 1e-6}
ALLOWED_ROUNDED = 1e-3  # where weights of the softmax are rounded to 16 bits
ALLOWED_FP8 = 2e-2  # where the stock backend rounds them to 8 bits


Pages = tuple[Tensor, Tensor]


class LayerCall(NamedTuple):
    """A server's call of one layer."""

    number: int  # of the decoder layer, by which rows are counted
    layer: ServedLayer | str  # of the profile, or the reason why S2O has no part in the call
    batch: Batch | str  # of the server, or that reason
    query: Tensor  # [T, Hq, D], the rows of the batch
    scoring: Scoring  # of the layer
    rows: int  # without those that fill the batch up
    counters: Counters
    read_pages: Callable[[], Pages]  # the layer's keys and values, [pages, page size, Hkv, D] each
    run_stock: Callable[[], Any]  # lets the stock backend compute all rows, and returns the server's answer
    run_stock_slice: Callable[[BatchSlice, Tensor], object]  # lets it compute a slice into an output, [T, Hq, D]
    make_output: Callable[[], tuple[Any, Tensor]]  # an empty answer, and a view of it, [T, Hq, D]


def attend(call: LayerCall) -> Any:
    """Compute a call, and count its rows; return the server's answer.

    The stock backend computes a layer until the first prompt that is long enough has tested it, and from the first
    exception on that S2O raises in it. A rank does so on its own: it computes its own heads, without a collective.
    """
    layer, batch, counters = call.layer, call.batch, call.counters
    if isinstance(layer, str) or isinstance(batch, str):
        reason = next(part for part in (layer, batch) if isinstance(part, str))  # whose type metrics read
        counters.count_stock_batch((call.number,), reason, call.rows)
        return call.run_stock()
    try:
        return _attend(call, layer, batch)
    except Exception as error:  # whatever it is: the stock backend can answer, and overwrites all rows
        layer.refuse(reason := counters.count_fault(call.number, error))
        counters.add(call.number, "dense", reason, call.rows)  # of this call some are counted twice
        return _run_stock(call)


def _run_stock(call: LayerCall) -> Any:
    """Let the stock backend compute all rows, and time it; return the server's answer."""
    return call.counters.call_stock(call.number, call.query.device, call.run_stock)


def _attend(call: LayerCall, layer: ServedLayer, batch: Batch) -> Any:
    """Compute a call that S2O may have a part in; return the server's answer."""
    counters = call.counters
    slices, dense_rows = batch.plan(layer)
    if slices and not layer.tested:
        slices, dense_rows = (), {DenseReason.UNTESTED: call.rows}
    for reason, count in dense_rows.items():
        counters.add(call.number, "s2o" if reason is DenseReason.UNREAD else "dense", reason, count)
    counters.log_summary()
    if not slices:
        test_rows = None if layer.tested else find_test_rows(batch)
        answer = _run_stock(call)
        if test_rows is not None:
            run_self_test(call, layer, batch, test_rows, answer.view(call.query.shape))
        return answer
    sparse = [span for span in slices if span.is_sparse]
    pages = call.read_pages()
    if counters.shadow_every:
        answer = _run_stock(call)
        counters.add(call.number, "dense", DenseReason.SHADOW, sum(span.end - span.begin for span in sparse))
        counters.shadowed[layer.layer] += 1
        if counters.shadowed[layer.layer] % counters.shadow_every == 0:
            for span in sparse:
                truth = answer.view(call.query.shape)[span.rows]
                _compute(call, layer, batch, span, pages, ours := torch.empty_like(truth))
                counters.compare(layer.layer, ours, truth)
        return answer
    answer, out = call.make_output()
    for span in slices:
        # a view takes microseconds of the host: none where the slice is the batch
        part = out if span.end - span.begin == len(call.query) else out[span.rows]
        if span.is_zero:
            part.zero_()
        elif span.is_sparse:
            counters.add(call.number, *_compute(call, layer, batch, span, pages, part), span.end - span.begin)
        elif span.begin < span.end:
            counters.call_stock(call.number, call.query.device, call.run_stock_slice, span, part)
    if batch.names:
        counters.count_requests({batch.names[index] for span in sparse for index in batch.split.indices[span.requests]})
        batch.names = ()  # they are counted in the first layer
    return answer


def _compute(call: LayerCall, layer: ServedLayer, batch: Batch, span: BatchSlice, pages: Pages, out: Tensor) -> Key:
    """Compute one slice with S2O; keep a sampled call's density, and check its error. Return its path and reason."""
    counters = call.counters
    query = call.query if len(out) == len(call.query) else call.query[span.rows]
    arguments = batch.get_call(span, pages[0].shape[1]) | call.scoring.arguments()
    sample = counters.begin(layer.layer, "s2o", query.device)
    assert span.bucket is not None
    length = batch.fit.profile.lengths[span.bucket]
    stats = s2o_attention_paged(query, *pages, layer.config(length), **arguments, out=out, return_stats=True).stats
    assert stats is not None
    path = "dense" if stats.backend == "dense" else "s2o"
    counters.end(layer.layer, path, sample, query.device)
    if stats.backend != "dense" and counters.is_sampled(layer.layer, 2 * span.max_q >= span.max_k):
        counters.sampled[layer.layer] = stats  # read from the device when somebody asks
        if layer.drift is not None and span.last == span.first + 1:  # the check takes one prompt, unpacked
            cache = PagedKeys(*pages, arguments["block_table"], arguments["cu_k"], span.max_k, span.total_k)
            packed = (query, *gather_keys(cache, query.dtype), out)
            q, keys, values, output = (tensor.transpose(0, 1)[None] for tensor in packed)
            layer.drift.see(q, keys, values, output, call.scoring, None, length)
    return path, stats.reason


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
    ours = s2o_attention_paged(query, *pages, config, **arguments, backend=backend)
    errors = measure_difference(ours, output[span.rows], (0, 2))
    allowed = ALLOWED_FP8 if pages[0].dtype in FP8_TYPES else ALLOWED.get(query.dtype, ALLOWED_ROUNDED)
    # not <= rather than >: a NaN is wrong too
    wrong = [f"{head} ({error:.1e})" for head, error in enumerate(errors.tolist()) if not error <= allowed]
    if wrong:
        sentence = f"{', '.join(wrong)}, expected at most {allowed:g} of a head's mean square"
        layer.refuse(DenseReason.SELF_TEST.fill_in(sentence))


def measure_difference(ours: Tensor, truth: Tensor, dims: tuple[int, ...] = ()) -> Tensor:
    """Return the mean squared difference over the mean square of `truth`, taken over some dims or all; float64."""
    truth = truth.double()
    return (ours.double() - truth).square().mean(dims) / truth.square().mean(dims).clamp_min(1e-30)
