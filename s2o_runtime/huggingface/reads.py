"""Count the rows that the caller of a transformers model reads, which decides under a budget of answers."""

from __future__ import annotations

import inspect
import sys
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from torch import nn

from ..dense_reason import DenseReason

_CALL = nn.Module._wrapped_call_impl.__code__


def count_read_rows() -> int | DenseReason:
    """Count the last rows whose logits the running call of a model returns; the reason if other rows may be read.

    The call is the outermost one of a transformers model on the stack. No hook sees it: PEFT calls `forward` itself, a
    program that s2o-run started has its first prompt before any hook is there, and compiled graphs leave hooks out. A
    call inside a function that the program compiled is not seen: all its rows may be read.
    """
    frame: FrameType | None = sys._getframe(1)
    call: dict[str, Any] | None = None
    generates = False
    while frame is not None and not generates:
        if frame.f_code is _CALL and hasattr(frame.f_locals["self"], "get_output_embeddings"):
            call = frame.f_locals
        generates, frame = frame.f_code is _find_generate(), frame.f_back
    if call is None:  # generate may have compiled the model itself
        return 1 if generates else DenseReason.HIDDEN_STATES
    model, options = call["self"], call["kwargs"]
    returns_hidden = options.get("output_hidden_states")
    if returns_hidden is None:
        returns_hidden = getattr(model.config, "output_hidden_states", False)
    if returns_hidden or model.get_output_embeddings() is None:
        return DenseReason.HIDDEN_STATES
    if options.get("labels") is not None:
        return DenseReason.LOSS
    kept = options.get("logits_to_keep", int(generates))  # generate reads one row of models that cannot be told so
    return kept if isinstance(kept, int) and kept > 0 else DenseReason.ALL_LOGITS


@lru_cache(maxsize=1)
def _find_generate() -> CodeType:
    # not when this file is imported: s2o-run does so while transformers is
    from transformers import GenerationMixin

    code: CodeType = inspect.unwrap(GenerationMixin.generate).__code__
    return code
