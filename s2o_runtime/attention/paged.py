"""The op over keys and values in the pages of a cache, as servers keep them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..call import Call
from ..config import HEAD_DIMS, KEY_BLOCK, LayerConfig
from ..devices import get_capability, is_interpreted, launch_on
from ..errors import InputError
from ..sequences import KERNEL_TYPES, Packed, PagedKeys, make_packed_starts
from ..tiles import FP8_CAPABILITY, MIN_CAPABILITY
from .api import PackedOptions, read_lengths, read_options
from .backend import BackendChoice, choose_backend
from .compute import Attention, supports_output
from .replay import run_call

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack

    from ..kernels.plan import Recorder

IN_PLACE_ELEMENTS = 1 << 31  # of a layer's cache: of one with so many the specialised kernel reads a copy
ROW_BYTES = 16  # that the specialised kernel copies at once


class PagedOptions(PackedOptions, total=False):
    """The arguments by name of `s2o_attention_paged` that do not change the type of its result."""

    cu_q: Required[Tensor]
    seq_lens: Required[Tensor]
    block_table: Required[Tensor]
    max_q: Required[int]
    max_k: Required[int]
    total_k: int | None
    cu_k: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    out: Tensor | None


@overload
def s2o_attention_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, config: LayerConfig, **options: Unpack[PagedOptions]
) -> Tensor: ...
@overload
def s2o_attention_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, config: LayerConfig,
    *, return_stats: Literal[True], return_lse: bool = ..., **options: Unpack[PagedOptions],
) -> Attention: ...  # fmt: skip
@overload
def s2o_attention_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, config: LayerConfig,
    *, return_lse: Literal[True], **options: Unpack[PagedOptions],
) -> Attention: ...  # fmt: skip
def s2o_attention_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, config: LayerConfig,
    *, cu_q: Tensor, seq_lens: Tensor, block_table: Tensor, max_q: int, max_k: int, **options: Any,
) -> Tensor | Attention:  # fmt: skip
    """Compute `s2o_attention_varlen` for keys and values in the pages of a cache.

    A sequence has at most as many queries as keys, and its queries stand at its last positions: a prompt fed in chunks,
    or one whose prefix was cached. The kernels read keys and values where they lie (`find_in_place_obstacle` says when
    they cannot); everything else attends to a copy of them.

    Args:
        q: [Tq, Hq, D], any floating type of at least 16 bits, the sequences one behind another.
        k_cache, v_cache: [pages, page size, Hkv, D], any strides with the last dimension contiguous, such as views of
            vLLM's cache (`s2o_runtime.vllm.backend`). The type of q, or an fp8 type, which is multiplied by its scale.
        config: one `HeadConfig` for each query head.
        cu_q: int32 [N + 1] on the device of q, where the queries of each sequence begin, from 0 to Tq.
        seq_lens: int32 [N] on the device of q, the keys of each sequence.
        block_table: int32 [N, M] on the device of q, the pages of each sequence in their order.
        max_q, max_k: queries and keys, at least as many as the longest sequence has.
        total_k: keys, at least as many as all sequences have together; read from the device if not given, which waits
            for it.
        cu_k: int32 [N + 1], the sums of `seq_lens` from 0; computed if not given. A server does so once for all layers.
        k_scale, v_scale: float32 [1] or [Hkv], for an fp8 cache; 1 by default.
        scale, softcap, sinks, backend, return_stats, return_lse: as for `s2o_attention_varlen`.
        out: [Tq, Hq, D] in the type of q, written and returned as the output; a new tensor by default.

    Returns:
        As `s2o_attention_varlen`.

    Raises:
        InputError: the tensors do not fit one another or the config, or the backend asked for cannot do the call. What
            `cu_q`, `seq_lens` and `block_table` hold is not checked: that would wait for the device.
        ConfigError: the config is illegal.

    >>> q, cache = torch.randn(128, 4, 64), torch.randn(32, 16, 2, 64)  # 128 new tokens, 32 pages of 16 tokens
    >>> starts, keys = torch.tensor([0, 128], dtype=torch.int32), torch.tensor([384], dtype=torch.int32)
    >>> pages = torch.arange(24, dtype=torch.int32)[None]  # of the sequence: 384 keys, 256 of them cached before
    >>> config = LayerConfig.uniform(4, tau=0.5, segment=128)
    >>> s2o_attention_paged(
    ...     q, cache, cache, config, cu_q=starts, seq_lens=keys, block_table=pages, max_q=128, max_k=384
    ... ).shape
    torch.Size([128, 4, 64])
    """
    chosen = read_options("s2o_attention_paged", PagedOptions, options)
    out, cu_k, total_k = chosen.out, options.get("cu_k"), options.get("total_k")
    k_scale, v_scale = options.get("k_scale"), options.get("v_scale")
    sequences = cu_q.shape[0] - 1  # `len` of a tensor takes longer
    if seq_lens.dtype != torch.int32 or seq_lens.shape != (sequences,):  # not in a plan's key
        raise InputError(
            f"seq_lens is {seq_lens.dtype} {tuple(seq_lens.shape)}: expected int32 [{sequences}], as cu_q has edges"
        )
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.device != q.device):
        raise InputError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}: expected {q.dtype} {tuple(q.shape)} on {q.device}"
        )
    cu_k = make_packed_starts(seq_lens) if cu_k is None else cu_k
    lengths = read_lengths(max_q, max_k, int(seq_lens.sum()) if total_k is None else total_k)
    packed = Packed(cu_q, cu_k, max_q, max_k)
    written = None  # by the kernels
    if out is not None and not torch.compiler.is_compiling() and out.ndim == 3 and supports_output(out, q):
        written = out

    def prepare(recorder: Recorder | None) -> tuple[Call, BackendChoice]:
        pages = PagedKeys(k_cache, v_cache, block_table, cu_k, max_k, lengths[2], k_scale, v_scale).validate(q.dtype)

        def make_call(k: Tensor, v: Tensor) -> Call:
            return Call.from_tensors(q, k, v, config, packed, scoring=chosen.scoring, with_lse=chosen.return_lse)

        choice = None
        if find_in_place_obstacle(pages, config, q.dtype) is None:
            call = make_call(*pages.rows)
            choice = choose_backend(call, chosen.backend)
            if choice.backend == "triton":
                return replace(call, pages=pages.table), choice
        with nullcontext() if recorder is None else recorder:
            k, v = gather_keys(pages, q.dtype)
        if recorder is not None:
            recorder.beside = k.nbytes + v.nbytes
        call = make_call(k, v)
        return call, choice or choose_backend(call, chosen.backend)

    own_cu_k, sinks = None if cu_k is cu_q else cu_k, chosen.scoring.sinks
    inputs = (q, written, k_cache, v_cache, block_table, cu_q, own_cu_k, k_scale, v_scale, sinks)
    # plans for an output that is given fit any number of queries: launches depend on the longest sequence alone
    any_length = 2 if written is not None and not chosen.return_lse and q.shape[0] else 0
    return run_call(
        inputs, config, chosen, prepare, packed.starts,
        lengths=("paged", *lengths), any_length=any_length, written=written,
    )  # fmt: skip


def find_in_place_obstacle(pages: PagedKeys, config: LayerConfig, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernels want a copy of keys and values in pages; None if they can read them there."""
    if obstacle := pages.find_rows_obstacle(dtype):
        return obstacle
    if pages.page_size < KEY_BLOCK:
        return f"pages have {pages.page_size} tokens, fewer than the {KEY_BLOCK} of a step"
    if pages.k.shape[3] not in HEAD_DIMS:
        return f"head_dim {pages.k.shape[3]} is filled up with zeros"
    if config.tile.specialized:
        k, v = pages.rows
        if len(k) * max(k.stride(0), v.stride(0)) >= IN_PLACE_ELEMENTS:
            return "the cache has 2^31 elements or more: 64-bit offsets take longer than the copy"
        steps = (step * k.element_size() for cache in (k, v) for step in cache.stride()[:2])
        if any(step % ROW_BYTES for step in (*steps, k.data_ptr(), v.data_ptr())):
            return f"rows do not begin at multiples of {ROW_BYTES} bytes"
    return None


def gather_keys(pages: PagedKeys, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy keys and values out of their pages, [total_k, Hkv, D] in `dtype`: by the kernel or in torch."""
    device = pages.k.device
    if is_interpreted():
        compiled = dtype in (*KERNEL_TYPES, torch.float32)
    else:
        least = FP8_CAPABILITY if pages.is_fp8 else MIN_CAPABILITY
        compiled = get_capability(device) >= least and dtype in KERNEL_TYPES
    if not compiled:
        return pages.gathered(dtype)
    from ..kernels.pages import gather_pages  # imports triton

    with launch_on(device):
        return gather_pages(pages, dtype)
