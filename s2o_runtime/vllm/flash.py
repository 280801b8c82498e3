"""S2O on top of vLLM's FlashAttention backend. Imported by vLLM, in a process that serves on a GPU."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from .backend import mix_in
from .engine import make_api
from .plugin import get_backend_name

S2OBackend = mix_in(FlashAttentionBackend, get_backend_name(), make_api())
