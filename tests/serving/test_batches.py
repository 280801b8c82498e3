"""Batches of servers: every row has one place, whatever the batch, and is what its request gives alone."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.lengths import find_nearest, round_up_length
from s2o_runtime.serving import attend
from s2o_runtime.serving.batch import ZEROS, Batch, SplitRequests, plan_batch, round_bounds
from s2o_runtime.serving.fit import Rank
from support.engines import ENGINES
from support.fake_server import FakeServer
from support.server_batches import FEWEST, all_dense, alone, check_close, dense, two_layers, with_last_rows

MAX_KEYS, LENGTHS = 5000, (512, 1024, 4096)
LAST, ADAPTER = "the last rows of a prompt", "the request has a LoRA adapter"


def few_reason(request):
    """A rule for plans; adapters and last rows are dense, as `RankProfile.dense_reason` has it."""
    if request.queries < 100:
        return "few queries"
    if request.keys < 500:
        return "few keys"
    if request.is_unread:
        return DenseReason.UNREAD
    return request.own_reason or ("last" if request.is_last_rows else None)


@st.composite
def sizes(draw):
    """The queries, keys, own reasons, last rows and tokens left; a request without queries is of a CUDA graph."""
    queries = draw(st.lists(st.sampled_from([0, 1, 2, 99, 100, 257, 1000]) | st.integers(0, 2000), max_size=12))
    cached = [draw(st.sampled_from([0, 1, 480, 4000]) | st.integers(0, 9000)) for _ in queries]
    keys = [count + before if count else 0 for count, before in zip(queries, cached, strict=True)]
    reasons = [draw(st.sampled_from([None, DenseReason.ADAPTER])) for _ in queries] if draw(st.booleans()) else []
    last = draw(st.sampled_from([0, 1, 150]) | st.integers(0, 2000))
    return queries, keys, reasons, last, draw(st.sampled_from([None, 0, 3000]))


@given(sizes())
def test_every_row_is_planned_once_and_for_whom_it_should(batch):
    queries, keys, reasons, last, left = batch
    lefts, last = [left if count else None for count in queries], 0 if left is None else last
    split = SplitRequests.from_batch(
        [0, *accumulate(queries)], keys, reasons, lefts, lambda count, keys, left: min(count, last)
    )
    by_request = [[] for _ in queries]
    for index, request, (begin, end), earlier, later in zip(
        split.indices, split.requests, pairwise(split.starts), split.earlier, split.later, strict=True
    ):
        assert (request.queries, earlier + request.queries + later) == (end - begin, queries[index])
        assert (request.keys + later, request.own_reason) == (keys[index], reasons[index] if reasons else None)
        # behind its rows are others of its prompt, as far as that is known
        goes_on = (lefts[index] or 0) + later > 0
        assert request.is_unread == (goes_on and not request.is_last_rows)
        assert request.length == keys[index] + (lefts[index] or 0)
        by_request[index].append((request.queries, request.is_last_rows))
    for count, rows in zip(queries, by_request, strict=True):
        tail = min(count, last)
        assert rows == ([(count - tail, False)] if count > tail or not tail else []) + ([(tail, True)] if tail else [])
    assert split.are_whole == all(len(rows) == 1 for rows in by_request)

    plan = plan_batch(split, few_reason, LENGTHS, MAX_KEYS)
    counted = Counter()
    for request in split.requests:
        if request.queries and (reason := few_reason(request)):
            counted[reason] += request.queries
    assert plan.dense_rows == counted
    assert bool(plan.slices) == (counted.total() - counted[DenseReason.UNREAD] < sum(queries))
    assert [part.first for part in plan.slices] == [0, *(part.last for part in plan.slices)][: len(plan.slices)]
    assert not plan.slices or plan.slices[-1].last == len(split.requests)
    for part in plan.slices:
        requests = split.requests[part.requests]
        assert (part.begin, part.end) == (split.starts[part.first], split.starts[part.last])
        assert (part.max_q, part.max_k) == (max(r.queries for r in requests), max(r.keys for r in requests))
        assert part.total_k == sum(request.keys for request in requests)
        for request in requests:
            reason = few_reason(request) if request.queries else ""
            buckets = {None: find_nearest(LENGTHS, request.length), DenseReason.UNREAD: ZEROS}
            assert part.bucket == buckets.get(reason)
            assert (part.is_sparse, part.is_zero) == (reason is None, reason is DenseReason.UNREAD)
        assert not part.is_sparse or part.total_k <= MAX_KEYS or len(requests) == 1
    for part, after in pairwise(plan.slices):  # neighbours are joined where they may be
        assert part.bucket != after.bucket or part.total_k + split.requests[after.first].keys > MAX_KEYS


def test_slices_that_are_planned_have_as_many_keys_as_they_may():
    split = SplitRequests.from_batch([0, 500, 1000, 1500], [MAX_KEYS // 2] * 3)
    slices = plan_batch(split, few_reason, LENGTHS, MAX_KEYS).slices
    assert [part.total_k for part in slices] == [MAX_KEYS, MAX_KEYS // 2]


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20), st.integers(0, 5000))
def test_bounds_are_bounds_and_say_whether_there_is_a_prefix(queries, cached, room):
    keys = queries + cached
    max_q, max_k = round_bounds(queries, keys, keys + room)
    assert queries <= max_q <= max(queries + 63, queries * 17 / 16)
    assert keys <= max_k <= keys + room
    assert max_k <= max(keys + 63, keys * 17 / 16, max_q + 1)
    assert (max_q < max_k) == (queries < keys)


def test_few_bounds_stand_for_all_lengths():
    assert round_up_length(8192) == 8192
    assert round_up_length(8193) == round_up_length(8704) == 8704
    assert len({round_up_length(length) for length in range(8193, 131073)}) == 4 * 16


def dense_reason(queries, keys, length):
    """The rules of `two_layers` for some rows of a request, up to the first comma of their sentence."""
    if queries == 1:
        return "decode"
    if length < 128:
        return "shorter than the shortest calibrated length"
    if queries == keys <= 64:
        return str(DenseReason.ONE_SEGMENT)
    return f"fewer than {FEWEST} queries behind a prefix" if queries < min(keys, FEWEST) else None


def expect(engine, parts, last_rows):
    """The rows of a batch that was fed, each from its request alone, and how many of them there are by reason."""
    rows, outputs = Counter(), []
    by_sizes = engine.adapters_by_sizes  # vLLM's backends know requests by their sizes alone
    adapted = {(count, request.done) for request, count in parts if request.adapter}
    left_by_sizes = {}  # of requests alike, the one that is nearest to its end counts for both
    for request, count in parts:
        sizes, left = (count, request.done), len(request) - request.done
        left_by_sizes[sizes] = min(left, left_by_sizes.get(sizes, left))
    for request, count in parts:
        done = request.done
        left = left_by_sizes[count, done] if by_sizes else len(request) - done
        last = max(0, min(count, last_rows - left)) if done + left >= 128 and count > 1 else 0
        has_adapter = (count, done) in adapted if by_sizes else bool(request.adapter)
        for queries, keys, is_last in ((count - last, done - last, False), (last, done, True)):
            if queries:
                reason = dense_reason(queries, keys, done + left) or (
                    ADAPTER if has_adapter else LAST if is_last else None
                )
                rows["s2o" if reason is None else reason] += queries
                request.done = keys
                config = engine.server.fit.layers[0].config(done + left)
                outputs.append(dense(request, queries) if reason else alone(request, queries, config).out)
        request.done = done
    return torch.cat(outputs), rows


PROMPTS = st.tuples(st.sampled_from([64, 100, 128, 200, 300, 305]) | st.integers(1, 320), st.booleans())


@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", ENGINES)
@given(
    st.lists(PROMPTS, min_size=1, max_size=4),
    st.data(),
    st.sampled_from([0, 0, 30, 128]),
    st.sampled_from([400, 2048]),
    st.integers(0, 1),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([{}, {"softcap": 2.0}, {"sinks": torch.tensor([1.0, 4.0])}]),
)
def test_a_batch_is_each_request_on_its_own(name, prompts, data, last_rows, max_keys, rank, padding, older, scoring):
    """Of prompts that are read in two batches, with decodes, tails, chunks, ends and adapters as they come."""
    server = FakeServer(with_last_rows(last_rows), Rank(rank, 2), "cpu", max_keys)
    layout = {"layout": "pages of two"} if older and name == "vllm" else {}
    engine = ENGINES[name](server, ends=True, scoring=scoring, **layout)
    requests = [engine.add(length) for length, _ in prompts]
    for request, (_, has_adapter) in zip(requests, prompts, strict=True):
        request.adapter = "law" if has_adapter else None
    counted = Counter()
    for step in range(2):
        parts = []
        for request in requests:
            left = len(request) - request.done
            count = left if step else data.draw(st.sampled_from([0, left, left - 1, left // 2]) | st.integers(0, left))
            parts += [(request, count)] if count else []
        if not parts:
            continue
        before, total = engine.stock_rows, sum(count for _, count in parts)
        out = engine.outputs(parts, padding=padding if name == "vllm" else 0)
        expected, rows = expect(engine, parts, last_rows)
        check_close(out, expected)
        if max(count for _, count in parts) < engine.uncounted_below:  # vLLM's decoding: S2O does nothing
            rows = Counter()
        counted += rows
        sparse = rows["s2o"]
        whole = total + (padding if name == "vllm" else 0)
        assert engine.stock_rows - before == (total - sparse if sparse else whole)
        slices = engine.slices() if sparse else ()
        assert sum(part.end - part.begin for part in slices if part.is_sparse) == sparse
        assert all(part.total_k <= max_keys or part.last == part.first + 1 for part in slices if part.is_sparse)
    sparse = counted.pop("s2o", 0)
    expected_rows = {("dense", reason): count for reason, count in counted.items()}
    assert engine.counted() == expected_rows | ({("s2o", "reference backend"): sparse} if sparse else {})


def test_a_prompt_in_chunks_has_the_density_and_the_error_of_the_whole(make_engine, monkeypatch):
    """With unlike buckets: of its keys so far, chunks would run the shorter one's."""
    profile, computed, attention = two_layers(0.1, (512, 1024)), [], attend.s2o_attention_paged
    profile = replace(profile, layers=(two_layers(30.0).layers[0], profile.layers[1]))

    def see(*call, **named):
        result, (queries, keys) = attention(*call, **named), (named["cu_q"][-1], named["seq_lens"][-1])
        computed.append(float(result.stats.density.mean() * queries * (keys - queries / 2)))
        return result

    monkeypatch.setattr(attend, "s2o_attention_paged", see)
    engine, results = make_engine(profile, ends=True), {}
    whole = engine.add(1024)
    for chunk in (1024, 256, 480):
        request = engine.add_prompt(whole.queries, whole.keys, whole.values)
        outs = [engine.outputs([(request, min(chunk, 1024 - begin))]) for begin in range(0, 1024, chunk)]
        error = (torch.cat(outs) - dense(request, 1024)).square().mean()
        results[chunk] = float(error), sum(computed)
        computed.clear()
    assert results[256] == pytest.approx(results[1024], rel=1e-3)
    assert results[480] == pytest.approx(results[1024], rel=0.2)  # random text, whose chunks cut segments in two


@pytest.fixture
def answers():
    """A budget of answers; the last layer is not dense, and has 128 last rows."""
    profile = with_last_rows(128)
    layers = tuple((first, first) for first, _ in profile.layers)
    return replace(profile, layers=layers, record={"budget": {"kind": "kl", "value": 1e-3}})


def test_the_last_layer_computes_what_is_read_and_zeros_the_rest(make_engine, answers, monkeypatch):
    """Of a chunk whose prompt goes on no row is read, and of one that ends only the last; keys are written of all."""
    engine, calls = make_engine(answers, ends=True), []
    assert engine.server.fit.skip_unread_rows()
    attention = attend.s2o_attention_paged
    monkeypatch.setattr(attend, "s2o_attention_paged", lambda *a, **n: calls.append(a) or attention(*a, **n))
    going_on, ending, asking = engine.add(500), engine.add(450), engine.add(460)
    asking.logprobs = True
    out = engine.outputs([(going_on, 200), (ending, 150), (asking, 160)], layer=1)
    assert (calls, engine.stock_rows) == ([], 160)
    assert not out[:350].any()
    check_close(out[350:], dense(asking, 160))
    out = engine.outputs([(ending, 300), (asking, 300)], layer=1)
    assert (calls, engine.stock_rows) == ([], 160 + 128 + 300)
    assert not out[:172].any()
    check_close(out[172:], torch.cat([dense(ending, 128), dense(asking, 300)]))
    assert engine.counted() == {
        ("s2o", "rows of the model's last layer that nothing reads: they are zeros"): 350 + 172,
        ("dense", "the prompt's log-probabilities are read"): 160 + 300,
        ("dense", LAST): 128,
    }
    out = engine.outputs([(going_on, 300)], layer=0)  # no other layer does so
    assert len(calls) == 1
    assert out.any(2).any(1).all()


def test_the_last_layer_computes_all_rows_where_it_is_not_known_which_are_read(make_engine, answers):
    layer_of_another_kind_last = replace(two_layers(layer_numbers=(0, 2)), record=answers.record)
    for profile in (two_layers(), layer_of_another_kind_last):
        assert not make_engine(profile).server.fit.skip_unread_rows()
    engine = make_engine(answers, ends=True)
    check_close(engine.outputs([(request := engine.add(300), 300)], layer=1)[172:], dense(request, 128))
    assert engine.counted() == {("s2o", "reference backend"): 172, ("dense", LAST): 128}


def test_nothing_is_made_of_a_batch_with_little_work(make_engine, monkeypatch):
    """Unless one request has more work, or a layer waits for its self-test."""
    engine = make_engine()
    fit, counters = engine.server.fit, engine.server.counters
    fit.host_flops = 4 * 4 * 64 * 250**2 / 2  # of 250 tokens
    fit.layers[0].tested = False
    little, most = engine.add(300), engine.add(300)
    host = "so little work that the host would decide, not the GPU"
    fit.host_flops *= 4
    check_close(engine.outputs([(most, 300)]), dense(most, 300))
    assert fit.layers[0].tested
    fit.host_flops /= 4
    with monkeypatch.context() as patched:
        patched.setattr(Batch, "__init__", None)
        check_close(engine.outputs([(little, 150)]), dense(little, 150))
    assert counters.rows == {(0, "dense", host): 450}
    assert counters.timed == {(0, "dense"): 2}
    engine.outputs([(engine.add(200), 200), (engine.add(300), 300)])
    assert engine.counted()["s2o", "reference backend"] > 0


@pytest.mark.parametrize(
    ("profile", "options", "layer", "reason"),
    [
        (two_layers, {}, 1, "every head of the layer is dense"),
        (all_dense, {}, 0, "every layer of the profile is dense"),
        (two_layers, {}, 7, "the layer is none of the profile's"),
        (two_layers, {"kv_cache_dtype": "fp8_e5m2"}, 0, "the KV cache is fp8_e5m2"),
    ],
    ids=["dense layer", "dense profile", "not in the profile", "fp8_e5m2"],
)
def test_a_layer_that_is_the_stock_backends_is_one_call_counted_and_logged(
    profile, options, layer, reason, make_engine, info_log
):
    engine = make_engine(profile(), **options)
    engine.server.counters.log_every = 1e-9
    requests = [engine.add(300), engine.add(200)]
    out = engine.outputs([(request, len(request)) for request in requests], layer)
    check_close(out, torch.cat([dense(request, len(request)) for request in requests]))
    assert engine.server.counters.rows == {(layer, "dense", reason): 500}
    assert engine.server.counters.timed == {(layer, "dense"): 1}
    assert info_log.messages[-1] == f"S2O: 100.0% dense ({reason})"
