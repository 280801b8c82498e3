"""S2O on top of the plain backend, in the place of the CPU engine's own: for tests of the whole engine.

With S2O_FAULTS in the environment, a rank's number, S2O fails there: in each layer in one of four ways, in turns.
"""

from __future__ import annotations

import os
from itertools import cycle
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MultipleOf

from s2o_runtime.errors import InputError
from s2o_runtime.serving import attend
from s2o_runtime.vllm.backend import mix_in
from s2o_runtime.vllm.engine import make_api
from support.vllm_plain import PlainBuilder, PlainImpl


class _Builder(PlainBuilder, AttentionMetadataBuilder):  # type: ignore[misc]
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)


class _Impl(PlainImpl, AttentionImpl):  # type: ignore[misc]
    pass


class _Plain(AttentionBackend):  # type: ignore[misc]
    forward_includes_kv_cache_update = False
    supported_dtypes = (torch.float16, torch.bfloat16, torch.float32)

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type:
        return _Impl

    @staticmethod
    def get_builder_cls() -> type:
        return _Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]


def _fail(*arguments: Any, **named: Any) -> Any:
    """Fail where S2O computes on the rank that the environment names, and compute elsewhere."""
    if get_tensor_model_parallel_rank() == int(os.environ["S2O_FAULTS"]) and "return_stats" in named:
        raise next(FAULTS)
    return COMPUTE(*arguments, **named)


FAULTS = cycle((RuntimeError("launch"), SyntaxError("no kernel"), torch.OutOfMemoryError(), InputError("tensors")))
COMPUTE = attend.s2o_attention_paged
if "S2O_FAULTS" in os.environ:
    attend.s2o_attention_paged = _fail

S2OBackend = mix_in(_Plain, "CPU_ATTN", make_api())
