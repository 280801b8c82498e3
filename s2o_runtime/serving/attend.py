"""One call of one layer by a server, whichever it is: the sparse runs by S2O, all else by the stock backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from s2o_runtime.monitor.counters import Counters
from s2o_runtime.serving.calls import Batch, compute
from s2o_runtime.serving.fit import LayerFit
from s2o_runtime.serving.plan import Run
from s2o_runtime.serving.self_test import UNTESTED, self_test, short_prompt


class LayerCall(NamedTuple):
    """A server's call of one layer.

    Attributes:
        number: of the decoder layer, by which rows are counted.
        layer: of the profile, or why there is none.
        batch: the batch, or why S2O has no part in it.
        query: [T, Hq, D], the rows of the batch.
        scale: of the scores.
        pages: gives the layer's keys and values, [pages, page size, Hkv, D] each; those of the batch are among them.
        whole: lets the stock backend compute all rows, and returns what the server gets.
        part: lets it compute a run, given where its output goes, [T, Hq, D].
        output: gives what the server gets where S2O computes some of the rows, and a view of it, [T, Hq, D].
    """

    number: int
    layer: LayerFit | str
    batch: Batch | str
    query: Tensor
    scale: float
    pages: Callable[[], tuple[Tensor, Tensor]]
    whole: Callable[[], Any]
    part: Callable[[Run, Tensor], object]
    output: Callable[[], tuple[Any, Tensor]]


def attend(call: LayerCall, rows: int, counters: Counters) -> Any:
    """Compute a call, and count its rows; returns what the server gets.

    Until a layer has passed its self-test the stock backend computes it, and the first prompt that is long enough to
    test it with does.

    Args:
        call: of the layer.
        rows: of the batch, without those that fill it up.
        counters: of this rank.
    """
    layer, batch, device = call.layer, call.batch, call.query.device
    if isinstance(layer, str) or isinstance(batch, str):
        counters.count_stock_batch((call.number,), layer if isinstance(layer, str) else str(batch), rows)
        return call.whole()
    plan = batch.plan(layer)
    dense_rows: Mapping[str, int] = plan.dense_rows
    runs: tuple[Run, ...] = () if plan.is_dense else plan.runs
    prompt = None
    if not layer.tested:
        prompt = short_prompt(batch)
        if runs:
            dense_rows, runs = {UNTESTED: rows}, ()
    for reason, count in dense_rows.items():
        counters.add(call.number, "dense", reason, count)
    counters.log_summary()
    if not runs:
        answer = counters.call_stock(call.number, device, call.whole)
        if prompt is not None:
            k, v = call.pages()
            output = answer.view(len(call.query), *call.query.shape[1:])
            self_test(layer, batch, prompt, query=call.query, k_pages=k, v_pages=v, scale=call.scale, output=output)
        return answer
    k, v = call.pages()
    answer, out = call.output()
    for run in runs:
        if run.is_sparse:
            compute(
                run, batch.sparse_call(run, k.shape[1]), layer, counters, query=_rows(call.query, run),
                pages=(k, v), scale=call.scale, out=_rows(out, run),
            )  # fmt: skip
        elif run.begin < run.end:
            counters.call_stock(call.number, device, call.part, run, out[run.rows])
    return answer


def _rows(rows: Tensor, run: Run) -> Tensor:
    """The rows of a run, a view; the tensor itself where the run has all of them, because a view takes microseconds."""
    return rows if run.end - run.begin == rows.shape[0] else rows[run.rows]
