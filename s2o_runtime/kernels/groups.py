"""Arguments of kernels: the groups that travel together as one parameter, a tuple, and what is common to the others.

What follows has the same meaning in every kernel; the table of a kernel's docstring lists the rest. A tensor with the
name of a constant behind it is read or written only if that constant is true, and may be absent otherwise.

    T                       the type of the inputs: bfloat16 or float16
    Q                       T [B, Hq, Lq, D], strides q
    K, V                    T [B, Hkv, Lk, D], strides k and v; with PAGED rows of a cache, T [rows, D] of each KV
                            head
    OUT                     T [B, Hq, Lq, D], strides o
    LSE                     float32 [B, Hq, Lq], strides e: log-sum-exp of each row's scores (HAS_LSE)
    STARTS.kv_start         int64 or int32 [B]: the first key that counts (HAS_START); KV_START where it is alone
    STARTS.cu_q, .cu_k      int32 [B + 1]: where packed sequences begin (PACKED); CU_Q, CU_K where they are alone
    PAGES                   int32 [B, M], stride p: the pages of each sequence's keys (PAGED)
    SEGMENT                 int32 [Hq]: queries of a segment, 0 for a head without a prefix
    REPRESENTATIVES         int32 [Hq]: parts of a segment
    FLAGS, LAUNCH_ORDER     int32 [Hq]: as in `call.HeadTables`
    REP                     T [B, Hq, parts, D], contiguous, strides r: the mean query of each part
    LOG_SUM                 float32 [B, Hq, parts]: the log-sum-exp in base 2 of the scores of each mean
    SCORE                   float16 [B, Hq, N', P / GRAIN], strides s: the log2 weight of each step for a segment
    VALUES                  T [B, Hkv, steps, D], strides v: the mean value of each step's keys, from the first that
                            counts on (HAS_TAIL)
    EDGE                    float32 [B, Hq, N', BUCKETS]: the highest score of each bucket of the order (HAS_TAIL)
    ARRIVED                 int32 [B, Hq, N']: 0 before the tails are summed, then a count of programs (HAS_TAIL)
    page_shift, page_rows   as for `primitives.load_cache_rows`
    lookback                as in `config.LayerConfig`
    row_begin, rows_end     the slice of rows that a launch is about
    qk_scale                the scores' scale times log2(e)
    CAP                     the soft cap of scores in base 2, 0 for none
    WIDE                    offsets into k and v need 64 bits
    N'                      counts the segments of the slice of rows

Triton specialises every number of a group, whatever `do_not_specialize` says, so numbers that differ from call to call
are not in groups. Compiled kernels do not know of groups: their parameters are the members, in this order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Strides(NamedTuple):
    """The strides of a tensor [B, H, rows, D], in elements; D is contiguous."""

    batch: Any  # integers on the host, Triton's scalars in a kernel
    head: Any
    row: Any


class Ranking(NamedTuple):
    """The order of each segment's prefix: ORDER, and for tails FIRST, MASS and SUMS where they are alone."""

    order: Tensor  # int32 [B, Hq, N', P / GRAIN], strides i: where the steps' keys begin, important first
    first: Tensor | None  # int32 [B, Hq, N', BUCKETS]: where in the order each bucket begins
    mass: Tensor | None  # float32 [B, Hq, N', EDGES]: the ranking's mass from each edge of the order on
    sums: Tensor | None  # float32 [B, Hq, N', EDGES, D]: that mass times values


class Heads(NamedTuple):
    """The settings that the prefill reads of each query head: as in `call.HeadTables`, and its sink."""

    tau: Tensor
    segment: Tensor
    flags: Tensor
    launch_order: Tensor
    sinks: Tensor | None  # any floating type [Hq]: scores without a value (HAS_SINKS)


class Splits(NamedTuple):
    """The outputs of the programs that share the keys of a row tile; None where keys are not split (HAS_SPLITS).

    `rows` are those of the slice's whole row tiles.
    """

    split_out: Tensor | None  # float32 [B, splits, Hq, rows, D]
    split_lse: Tensor | None  # float32 [B, splits, Hq, rows], log-sum-exp of a split's scores, -inf for no key
    split_visited: Tensor | None  # int32 [B, splits, Hq, row tiles], prefix keys that a split visited


class Sizes(NamedTuple):
    """The sizes that a prefill is compiled for."""

    GROUP: int  # query heads of a KV head
    D: int  # the head dim
    BM: int  # query rows of a tile
    BN: int  # keys of a tile
    STAGES: int  # of the pipeline or the ring
    EDGES: int  # as in `rank.tail`
    BUCKETS: int  # as in `rank.order`


class Mode(NamedTuple):
    """The features that a prefill is compiled with; `prefill._prefill` says what each changes."""

    HAS_TAIL: bool
    HAS_START: bool
    PACKED: bool
    HAS_LSE: bool
    HAS_SINKS: bool
    CAP: float
    HAS_LAUNCH_ORDER: bool
    HAS_SPLITS: bool
    PAGED: bool
    WIDE: bool


# The types of a kernel's constexpr parameters SIZES and MODE.
PREFILL_CONSTANTS: dict[str, Any] = {"SIZES": Sizes, "MODE": Mode}
