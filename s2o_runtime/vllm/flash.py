"""S2O on top of vLLM's FlashAttention backend. Imported by vLLM, in a process that serves on a GPU."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from s2o_runtime.vllm.backend import mix_in
from s2o_runtime.vllm.host import host
from s2o_runtime.vllm.plugin import NAME

_registered = NAME if NAME in AttentionBackendEnum.__members__ else "CUSTOM"
S2OBackend, S2OMetadataBuilder, S2OImpl = mix_in(FlashAttentionBackend, _registered, host())
