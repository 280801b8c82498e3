"""S2O under the name "sdpa": in a process that `s2o-run` starts, models that would run SDPA run S2O.

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

from ..dense_reason import DenseReason
from . import run
from .explanation import explain_layers
from .hf import CALL, PrefillCall, is_prefill_mask, register, s2o_attention_forward, s2o_mask, s2o_paged_forward
from .layers import STATE, is_causal, paths_taken
from .paged import is_batch

NAME = "sdpa"
PAGED = "paged|sdpa"  # in continuous batching, before transformers 5.19
EXPLAIN = "S2O_EXPLAIN"  # not empty: at the end of the process, print what every layer did


_replaced: dict[str, Callable[..., tuple[Tensor, None]]] = {}  # transformers' functions, by their names


def replace_sdpa() -> None:
    """Give the models of this process the profile that S2O_PROFILE names. Raises ProfileError if it cannot be read."""
    register()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    if PAGED in AttentionInterface() and not _replaced:
        _replaced[PAGED] = AttentionInterface()[PAGED]
        AttentionInterface.register(PAGED, attend_paged)
    atexit.register(_print_summary)


def make_mask(**call: Any) -> Tensor | None:
    """Make S2O's mask for models that the profile fits, for all others SDPA's.

    A model that is compiled before any ran eagerly has no profile yet, and stays as it is.
    """
    tracing = torch.compiler.is_compiling()
    reason = run.find_obstacle(call.get("config"))
    if reason is None and (run.attached or not tracing):
        return s2o_mask(**call)
    if reason is not None and not tracing and call.get("mask_function", causal_mask_function) is causal_mask_function:
        run.warn_dense(reason)
    mask: Tensor | None = sdpa_mask(**call)
    return mask


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention by S2O's function for a layer with a profile, shapes as transformers has them.

    Calls that S2O's own function refuses, or that are not causal, get transformers' function and mask.
    """
    if is_batch(options):  # from transformers 5.19 on
        return _attend_batch(sdpa_attention_forward, module, query, key, value, attention_mask, **options)
    state = module.__dict__.get(STATE)
    ours = is_prefill_mask(attention_mask)
    if state is None and ours and not torch.compiler.is_compiling():
        state = run.attach_profile(module, query.device)
    prefill: PrefillCall | None = getattr(attention_mask, CALL, None)
    if (state is None or not is_causal(module, options)) and (prefill is not None or not ours):
        mask = attention_mask if prefill is None else prefill.sdpa_mask()
        if state is not None:
            state.count("dense", "the layer is not causal", query.shape[2], key.shape[2])
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0], None
    return s2o_attention_forward(module, query, key, value, attention_mask, **options)


def attend_paged(module: nn.Module, *tensors: Tensor, **options: Any) -> tuple[Tensor, None]:
    """Compute attention in continuous batching by S2O's function for a layer with a profile, else transformers'."""
    # no `partial`: `DenseWatch.check_forward` knows S2O's functions by their modules
    return _attend_batch(_replaced[PAGED], module, *tensors, **options)


def _attend_batch(
    other: Callable[..., tuple[Tensor, None]], module: nn.Module, query: Tensor, *tensors: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    state = module.__dict__.get(STATE) or run.attach_profile(module, query.device)
    if state is None or state.rejected is not None or not is_batch(options):
        return other(module, query, *tensors, **options)
    return s2o_paged_forward(module, query, *tensors, **options)


def _print_summary() -> None:
    """Print the table that was asked for, and why no model ran S2O, if none did; at the end of the process."""
    reason = find_why_none_ran()
    if os.environ.get(EXPLAIN):
        print(explain_layers(run.attached), file=sys.stderr)
    if reason is not None:
        print(f"s2o-run: no model of this program ran S2O in this process: {reason}", file=sys.stderr)


def find_why_none_ran() -> str | None:
    """Return why no model of this process ran S2O; None if one did, or if none ran and s2o-run did not become it."""
    if "s2o" in paths_taken:
        return None
    prefills: Counter[str] = Counter()
    for state in run.attached:
        prefills.update({reason: calls for (_, reason), calls in state.counts.items() if reason != DenseReason.DECODE})
    if run.refused:
        return next(iter(run.refused))
    if prefills:
        return prefills.most_common(1)[0][0]
    if os.environ.get(run.STARTED) != str(os.getpid()):
        return None
    return "no transformers model with SDPA attention had a plain causal prefill outside torch.compile"
