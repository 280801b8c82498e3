"""The name "sdpa" taken over: in a process that `s2o-run` starts, models that would run SDPA run S2O.

No method is replaced: transformers keeps its attention and mask functions under names, and these are registered
under that of its own. Models that do not have the geometry of the profile get transformers' own functions with what
they were called with, and so does every call that S2O is not for.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.huggingface import run
from s2o_runtime.huggingface.explanation import explained
from s2o_runtime.huggingface.hf import (
    CALL,
    PrefillCall,
    is_prefill_mask,
    register,
    s2o_attention_forward,
    s2o_mask,
    s2o_paged_forward,
)
from s2o_runtime.huggingface.layers import STATE, paths_taken
from s2o_runtime.huggingface.paged import is_batch

NAME = "sdpa"
PAGED = "paged|sdpa"  # in continuous batching, before transformers 5.19
EXPLAIN = "S2O_EXPLAIN"  # not empty: at the end of the process, print what every layer did


_replaced: dict[str, Callable[..., tuple[Tensor, None]]] = {}  # transformers' functions, by their names


def take_over() -> None:
    """Give the models of this process the profile that S2O_PROFILE names. Raises ProfileError if it cannot be read."""
    register()
    AttentionInterface.register(NAME, attention_or_s2o)
    AttentionMaskInterface.register(NAME, mask_or_s2o)
    if PAGED in AttentionInterface() and not _replaced:
        _replaced[PAGED] = AttentionInterface()[PAGED]
        AttentionInterface.register(PAGED, paged_or_s2o)
    atexit.register(_say_if_none)
    if os.environ.get(EXPLAIN):
        atexit.register(_explain)


def give_back() -> None:
    """Undo `take_over`."""
    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if _replaced:
        AttentionInterface.register(PAGED, _replaced.pop(PAGED))
    atexit.unregister(_explain)
    atexit.unregister(_say_if_none)


def mask_or_s2o(**call: Any) -> Tensor | None:
    """The mask function: S2O's for models that the profile fits, for all others SDPA's.

    A model that is compiled before any ran eagerly has no profile yet, and stays as it is.
    """
    tracing = torch.compiler.is_compiling()
    reason = run.obstacle(call.get("config"))
    if reason is None and (run.adopted or not tracing):
        return s2o_mask(**call)
    if reason is not None and not tracing and call.get("mask_function", causal_mask_function) is causal_mask_function:
        run.say_dense(reason)
    mask: Tensor | None = sdpa_mask(**call)
    return mask


def attention_or_s2o(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function, with shapes as transformers has them: S2O's for a layer with a profile.

    Calls that S2O's own function refuses, or that are not causal, get transformers' function and mask.
    """
    if is_batch(kwargs):  # from transformers 5.19 on
        return _paged(sdpa_attention_forward, module, query, key, value, attention_mask, dropout=dropout, **kwargs)
    state = module.__dict__.get(STATE)
    ours = is_prefill_mask(attention_mask)
    if state is None and ours and not torch.compiler.is_compiling():
        state = run.adopt(module, query.device)
    call: PrefillCall | None = getattr(attention_mask, CALL, None)
    plain = state is None or not _is_causal(module, kwargs)
    if plain and (call is not None or not ours):
        mask = attention_mask if call is None else call.sdpa_mask()
        if state is not None:
            state.count("dense", "the layer is not causal", query.shape[2], key.shape[2])
        out, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, **kwargs)
        return out, None
    return s2o_attention_forward(module, query, key, value, attention_mask, dropout=dropout, **kwargs)


def paged_or_s2o(module: nn.Module, *tensors: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    """The attention function of continuous batching: S2O's for a layer with a profile, else transformers'."""
    return _paged(_replaced[PAGED], module, *tensors, **kwargs)


def _paged(
    other: Callable[..., tuple[Tensor, None]], module: nn.Module, query: Tensor, *tensors: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    state = module.__dict__.get(STATE) or run.adopt(module, query.device)
    if state is None or state.rejected is not None or not is_batch(kwargs):
        return other(module, query, *tensors, **kwargs)
    return s2o_paged_forward(module, query, *tensors, **kwargs)


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """What transformers' SDPA function goes by."""
    causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


def _explain() -> None:
    print(explained(run.adopted), file=sys.stderr)


def _say_if_none() -> None:
    reason = why_none_ran()
    if reason is not None:
        print(f"s2o-run: no model of this program ran S2O in this process: {reason}", file=sys.stderr)


def why_none_ran() -> str | None:
    """Why no model of this process ran S2O; None if one did, or if it ran no model and `s2o-run` did not become it."""
    if "s2o" in paths_taken:
        return None
    prefills: Counter[str] = Counter()
    for state in run.adopted:
        prefills.update({reason: calls for (_, reason), calls in state.counts.items() if reason != DenseReason.DECODE})
    if run.refused:
        return next(iter(run.refused))
    if prefills:
        return prefills.most_common(1)[0][0]
    if os.environ.get(run.STARTED) != str(os.getpid()):
        return None
    return "no transformers model with SDPA attention had a plain causal prefill outside torch.compile"
