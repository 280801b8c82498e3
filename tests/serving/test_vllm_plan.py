"""The batch planner: every row of a batch has one place, whatever the batch."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from s2o_runtime.lengths import length_step, shared_bound
from s2o_runtime.serving.calls import shared_bounds
from s2o_runtime.serving.plan import Pieces, plan

MAX_KEYS = 5000


def why_dense(queries, keys):
    if queries < 100:
        return "few queries"
    return "few keys" if keys < 500 else None


@st.composite
def batches(draw):
    """The queries and the keys of some requests; a request without queries fills up a CUDA graph's batch."""
    queries = draw(st.lists(st.sampled_from([0, 1, 2, 99, 100, 257, 1000]) | st.integers(0, 2000), max_size=12))
    cached = [draw(st.sampled_from([0, 1, 480, 4000]) | st.integers(0, 9000)) for _ in queries]
    keys = [count + before if count else 0 for count, before in zip(queries, cached, strict=True)]
    return queries, keys


@given(batches())
def test_every_row_is_computed_once_and_by_whom_it_should(batch):
    queries, keys = batch
    starts = [0, *accumulate(queries)]
    planned = plan(Pieces.of(starts, keys), why_dense, MAX_KEYS)
    assert [run.first for run in planned.runs] == [0, *(run.last for run in planned.runs)][: len(planned.runs)]
    assert (planned.runs[-1].last if planned.runs else 0) == len(queries)
    reasons = {}
    for run in planned.runs:
        own = range(run.first, run.last)
        assert (run.begin, run.end) == (starts[run.first], starts[run.last])
        assert (run.max_q, run.max_k) == (max(queries[r] for r in own), max(keys[r] for r in own))
        assert run.total_k == sum(keys[r] for r in own)
        for request in own:
            reason = why_dense(queries[request], keys[request])
            if queries[request] == 0:
                assert not run.is_sparse
            elif reason:
                assert not run.is_sparse
                reasons[reason] = reasons.get(reason, 0) + queries[request]
            else:
                assert run.length_step == length_step(keys[request])
        assert not run.is_sparse or run.total_k <= MAX_KEYS or len(own) == 1
    assert dict(planned.dense_rows) == reasons
    sparse_rows = sum(run.end - run.begin for run in planned.runs if run.is_sparse)
    assert sparse_rows + sum(reasons.values()) == sum(queries)
    assert planned.is_dense == (sparse_rows == 0)


@given(batches())
def test_neighbours_are_joined_where_they_may_be(batch):
    queries, keys = batch
    planned = plan(Pieces.of([0, *accumulate(queries)], keys), why_dense, MAX_KEYS)
    for run, after in pairwise(planned.runs):
        assert run.length_step != after.length_step or run.total_k + keys[after.first] > MAX_KEYS


def test_a_run_is_as_large_as_its_limit_and_no_larger():
    runs = plan(Pieces.of([0, 500, 1000, 1500], [MAX_KEYS // 2] * 3), why_dense, MAX_KEYS).runs
    assert [(run.first, run.last, run.total_k) for run in runs] == [(0, 2, MAX_KEYS), (2, 3, MAX_KEYS // 2)]
    (alone,) = plan(Pieces.of([0, 500], [MAX_KEYS + 1]), why_dense, MAX_KEYS).runs
    assert alone.total_k == MAX_KEYS + 1


def test_a_batch_of_decodes_and_one_long_prompt():
    planned = plan(Pieces.of([0, 1, 2, 3, 1003], [700, 9000, 12, 4000]), why_dense, MAX_KEYS)
    stock, sparse = planned.runs
    assert (stock.requests, stock.rows, stock.is_sparse) == (slice(0, 3), slice(0, 3), False)
    assert (sparse.requests, sparse.rows, sparse.max_q, sparse.max_k) == (slice(3, 4), slice(3, 1003), 1000, 4000)
    assert planned.dense_rows == {"few queries": 3}


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20), st.integers(0, 5000))
def test_bounds_are_bounds_and_say_whether_there_is_a_prefix(queries, cached, room):
    keys = queries + cached
    max_q, max_k = shared_bounds(queries, keys, keys + room)
    assert queries <= max_q <= max(queries + 63, queries * 17 / 16)
    assert keys <= max_k <= keys + room
    assert max_k <= max(keys + 63, keys * 17 / 16, max_q + 1)
    assert (max_q < max_k) == (queries < keys)


def test_few_bounds_stand_for_all_lengths():
    assert shared_bound(8192) == 8192
    assert shared_bound(8193) == shared_bound(8704) == 8704
    assert len({shared_bound(length) for length in range(8193, 131073)}) == 4 * 16
