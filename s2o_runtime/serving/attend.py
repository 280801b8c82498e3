"""One call of one layer by a server, whichever it is: S2O computes the sparse slices, the stock backend all else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from s2o_runtime.attention.paged import gather_keys, s2o_attention_paged
from s2o_runtime.call import Scoring
from s2o_runtime.monitor.counters import Counters
from s2o_runtime.sequences import PagedKeys
from s2o_runtime.serving.batch import Batch, BatchSlice
from s2o_runtime.serving.fit import ServedLayer
from s2o_runtime.serving.self_test import UNTESTED, find_test_rows, run_self_test


class LayerCall(NamedTuple):
    """A server's call of one layer.

    Attributes:
        number: of the decoder layer, by which rows are counted.
        layer, batch: of the profile, and of the server; or the reason why S2O has no part in the call.
        query: [T, Hq, D], the rows of the batch.
        scale: of the scores.
        read_pages: returns the layer's keys and values, [pages, page size, Hkv, D] each.
        run_stock: lets the stock backend compute all rows, and returns the server's answer.
        run_stock_slice: lets it compute a slice into an output, [T, Hq, D].
        make_output: returns an empty answer, and a view of it, [T, Hq, D].
    """

    number: int
    layer: ServedLayer | str
    batch: Batch | str
    query: Tensor
    scale: float
    read_pages: Callable[[], tuple[Tensor, Tensor]]
    run_stock: Callable[[], Any]
    run_stock_slice: Callable[[BatchSlice, Tensor], object]
    make_output: Callable[[], tuple[Any, Tensor]]


def attend(call: LayerCall, rows: int, counters: Counters) -> Any:
    """Compute a call, and count its rows; return the server's answer.

    The stock backend computes a layer until the first prompt that is long enough has tested it.

    Args:
        call: of the layer.
        rows: of the batch, without those that fill it up.
        counters: of this rank.
    """
    layer, batch, device = call.layer, call.batch, call.query.device
    if isinstance(layer, str) or isinstance(batch, str):
        counters.count_stock_batch((call.number,), layer if isinstance(layer, str) else str(batch), rows)
        return call.run_stock()
    plan = batch.plan(layer)
    dense_rows: Mapping[str, int] = plan.dense_rows
    slices = plan.slices
    test_rows = None
    if not layer.tested:
        test_rows = find_test_rows(batch)
        if slices:
            dense_rows, slices = {UNTESTED: rows}, ()
    for reason, count in dense_rows.items():
        counters.add(call.number, "dense", reason, count)
    counters.log_summary()
    if not slices:
        answer = counters.call_stock(call.number, device, call.run_stock)
        if test_rows is not None:
            output = answer.view(len(call.query), *call.query.shape[1:])
            run_self_test(layer, batch, test_rows, call.query, call.read_pages(), call.scale, output)
        return answer
    pages = call.read_pages()
    answer, out = call.make_output()
    for span in slices:
        if span.is_sparse:
            _compute(call, batch, layer, span, pages, out, counters)
        elif span.begin < span.end:
            counters.call_stock(call.number, device, call.run_stock_slice, span, out[span.rows])
    return answer


def _compute(
    call: LayerCall, batch: Batch, layer: ServedLayer, span: BatchSlice, pages: tuple[Tensor, Tensor], out: Tensor,
    counters: Counters,
) -> None:  # fmt: skip
    """Compute one slice with S2O, and count it; keep a sampled call's density, and check its error."""
    # a view takes microseconds of the host: none where the slice is the batch
    is_all = span.end - span.begin == len(call.query)
    query, out = (call.query, out) if is_all else (call.query[span.rows], out[span.rows])
    arguments = batch.get_call(span, pages[0].shape[1])
    sample = counters.begin(layer.layer, "s2o", query.device)
    stats = s2o_attention_paged(
        query, *pages, layer.config(span.max_k), **arguments, scale=call.scale, out=out, return_stats=True
    ).stats
    assert stats is not None
    path = "dense" if stats.backend == "dense" else "s2o"
    counters.end(layer.layer, path, sample, query.device)
    counters.add(layer.layer, path, stats.reason, span.end - span.begin)
    if stats.backend != "dense" and counters.is_sampled(layer.layer, 2 * span.max_q >= span.max_k):
        counters.store_sample(layer.layer, stats)
        if layer.drift is not None and span.last == span.first + 1:  # the check takes one prompt, unpacked
            cache = PagedKeys(
                *pages, arguments["block_table"], arguments["cu_k"], max_k=span.max_k, total_k=span.total_k
            )
            packed = (query, *gather_keys(cache, query.dtype), out)
            q, keys, values, output = (tensor.transpose(0, 1)[None] for tensor in packed)
            layer.drift.see(q, keys, values, output, Scoring(call.scale), None)
