"""transformers' continuous batching: the requests of a server batch, each given to an attention function by itself.

Continuous batching packs the new tokens of all requests into one row and keeps keys and values in pages. Its cache
writes the new ones, and reads those of every request out of their pages, before attention is computed: from
transformers 5.24 on the layer asks it to, before that the attention function (`_update_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .layers import TransformersCall

RequestAttention = Callable[[TransformersCall, int | None], Tensor]  # a call, the layer's window -> [1, Lq, Hq, D]

EDGES = "s2o_edges"  # attribute of a batch's `cu_seq_lens_q`, which is another tensor in every batch
OF_BATCH = (
    "cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q", "max_seqlen_k", "max_length_q", "max_length_k", "read_index",
    "write_index", "block_table", "logits_indices", "logits_processor_args", "is_causal", "cache",
)  # fmt: skip


def split_requests(attention: RequestAttention) -> Callable[..., tuple[Tensor, None]]:
    """Make an attention function for continuous batching that computes each request of a batch by itself.

    It takes the packed queries, keys and values of the new tokens, [1, H, T, D], and returns [1, T, Hq, D]; rows that
    fill up a batch are zero.
    """

    def attend_batch(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        _check(query, kwargs)
        window: int | None = getattr(module, "sliding_window", None) or None
        q_edges, k_edges = _read_edges("full_attention" if window is None else "sliding_attention", kwargs)
        options = {name: given for name, given in kwargs.items() if name not in OF_BATCH}
        k, v = _update_cache(module, key, value, kwargs)
        out = query.new_zeros(1, query.shape[2], query.shape[1], v.shape[3])
        for (begin, end), (first, last) in zip(pairwise(q_edges), pairwise(k_edges), strict=True):
            if begin < end:
                tensors = query[:, :, begin:end], k[:, :, first:last], v[:, :, first:last]
                out[:, begin:end] = attention(TransformersCall(module, *tensors, None, options), window)
        return out, None

    return attend_batch


def is_batch(kwargs: Mapping[str, Any]) -> bool:
    """Recognise a call for a batch of continuous batching, by what an attention function was given by name."""
    return "read_index" in kwargs


def _update_cache(module: nn.Module, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Write the new keys and values into their pages, and read those of all requests: twice [1, Hkv, Tk, D]."""
    if (cache := kwargs.get("cache")) is None:
        return key, value
    new = {"key_states": key, "value_states": value, "layer_idx": module.layer_idx}
    if "kwargs" in signature(cache.update).parameters:  # transformers from 5.19 on
        keys, values = cache.update(**new, kwargs={name: given for name, given in kwargs.items() if name != "cache"})
        return keys, values
    packed = cache.update(**new, read_index=kwargs["read_index"], write_index=kwargs["write_index"])
    return tuple(tensor.transpose(0, 1)[None] for tensor in packed)


def _check(query: Tensor, kwargs: dict[str, Any]) -> None:
    """Raise ModelError for what is no batch of continuous batching, or one that S2O cannot be part of."""
    if not is_batch(kwargs):
        raise ModelError(
            'the attention implementation "paged|s2o" was called without a paged cache: it is for generate_batch; '
            'call model.set_attn_implementation("s2o") for all else'
        )
    if kwargs.get("block_table") is not None:
        raise ModelError(
            "continuous batching asked for FlashAttention's decoding: pass max_blocks_per_request=0 in its config"
        )
    if torch.compiler.is_compiling() or (query.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise ModelError(
            "S2O decides for each batch on the host, which CUDA graphs and torch.compile leave out: pass "
            "use_cuda_graph=False and no compile config in continuous batching's config"
        )


def _read_edges(layer_type: str, kwargs: dict[str, Any]) -> list[list[int]]:
    """Read where the queries and the keys of requests begin and end from the device, once for all layers of a type."""
    queries, keys = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    edges: dict[str, list[list[int]]] = queries.__dict__.setdefault(EDGES, {})
    if layer_type not in edges:
        keys = keys[layer_type] if isinstance(keys, dict) else keys
        edges[layer_type] = torch.stack((queries, keys)).tolist()
    return edges[layer_type]
