"""Arguments of kernels: the groups that travel together as one parameter, a tuple, and what is common to the others.

What follows has the same meaning in every kernel; the table of a kernel's docstring lists the rest. A tensor with the
name of a constant behind it is read or written only if that constant is true, and may be absent otherwise.

    T                       the type of the inputs: bfloat16 or float16
    Q                       T [B, Hq, Lq, D], strides q
    K, V                    T [B, Hkv, Lk, D], strides k and v; with PAGED rows of a cache, T [rows, D] of each KV head
    STARTS.kv_start         int64 or int32 [B]: the first key that counts (HAS_START); KV_START where it is alone
    STARTS.cu_q, .cu_k      int32 [B + 1]: where packed sequences begin (PACKED); CU_Q, CU_K where they are alone
    PAGES                   int32 [B, M], stride p: the pages of each sequence's keys (PAGED)
    SEGMENT                 int32 [Hq]: queries of a segment, 0 for a head without a prefix
    PART, REPRESENTATIVES   int32 [Hq]: queries of a part of a segment, and parts of a segment
    FLAGS, LAUNCH_ORDER     int32 [Hq]: as in `call.HeadTables`
    page_shift, page_rows   as for `primitives.load_cache_rows`
    qk_scale                the scores' scale times log2(e)
    N'                      counts the segments of the slice of rows that begins at row_begin

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
    """The order of each segment's prefix, and FIRST, MASS and SUMS of its tail, as `tail.Tail` has them."""

    order: Tensor
    first: Tensor | None
    mass: Tensor | None
    sums: Tensor | None


class Heads(NamedTuple):
    """The settings that the prefill reads of each query head: as in `call.HeadTables`, and its sink."""

    tau: Tensor
    segment: Tensor
    flags: Tensor
    launch_order: Tensor | None
    sinks: Tensor | None


class Levels(NamedTuple):
    """The worth of int8 keys: UNIT and MIDDLE of `keys.Keys`."""

    k_unit: Tensor | None
    k_middle: Tensor | None


class Splits(NamedTuple):
    """The outputs of the programs of dense heads that are split over keys; None where no head is split.

    An entry is one split of one head, all heads of one split together, in the order of `HeadTables.launch_order`.
    split_out: float32 [B, splits * dense heads, rows, D]; split_lse: float32 [B, splits * dense heads, rows], the
    log-sum-exp of a split's scores, -inf for no key. `rows` are those of whole row tiles.
    """

    split_out: Tensor | None
    split_lse: Tensor | None


class Sizes(NamedTuple):
    """The sizes that a prefill is compiled for.

    GROUP: query heads of a KV head; D: the head dim; BM, BN: query rows and keys of a tile; STAGES: of the pipeline or
    the ring; EDGES, BUCKETS: as in `tail` and `rank.order`.
    """

    GROUP: int
    D: int
    BM: int
    BN: int
    STAGES: int
    EDGES: int
    BUCKETS: int


class Mode(NamedTuple):
    """The features that a prefill is compiled with; `prefill._prefill` says what each changes.

    CAP: the soft cap of scores in base 2, 0 for none; WIDE: offsets into k and v need 64 bits.
    """

    HAS_TAIL: bool
    HAS_START: bool
    PACKED: bool
    HAS_LSE: bool
    HAS_SINKS: bool
    CAP: float
    INT8: bool
    HAS_LAUNCH_ORDER: bool
    HAS_SPLITS: bool
    PAGED: bool
    WIDE: bool


# The types of a kernel's constexpr parameters SIZES and MODE.
PREFILL_CONSTANTS: dict[str, Any] = {"SIZES": Sizes, "MODE": Mode}
