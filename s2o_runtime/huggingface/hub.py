"""S2O as a kernel of the Hub: what transformers calls for `attn_implementation="ORG/s2o"`.

`scripts/docs/hub_kernel.py` builds the repository, which holds this package under another name. transformers gives
such a kernel SDPA's masks, and no hook before its first call: so that call finds the model's profile and gives the
kernel's name S2O's masks. A first prompt with a mask of SDPA's, as it is padded or continues a cache, runs dense.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface

from . import run
from .hf import CALL, PrefillCall, prefill_mask, s2o_attention_forward, s2o_mask
from .layers import is_causal

run.read_available(search=True)  # a model's owner who asks for this kernel by name names no profile


def supports_flash_attn(*shape: Any) -> bool:
    """Return True for calls of any shape: what S2O cannot do runs dense."""
    return True


def flash_attn_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention as a patched model does: q [B, Hq, Lq, D], k, v [B, Hkv, Lk, D] -> [B, Lq, Hq, D].

    The model gets the profile that `patch` would find. One that was compiled before its first call has none, and is
    dense.
    """
    if not torch.compiler.is_compiling():
        # each time, because transformers registers SDPA's masks again with every model that it loads
        AttentionMaskInterface.register(module.config._attn_implementation, s2o_mask)  # type: ignore[union-attr]
        # SDPA's way to say that the cache was empty
        if attention_mask is None and is_causal(module, options) and query.shape[2] > 1:
            attention_mask = prefill_mask(query.shape[0], 0, query.device)
            setattr(attention_mask, CALL, PrefillCall(0, None, lambda: None))
    return s2o_attention_forward(module, query, key, value, attention_mask, **options)
