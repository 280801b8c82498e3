"""The entry point of the group `sglang.srt.plugins`, which SGLang calls in every one of its processes."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

NAME = "s2o"  # of the backend, as --prefill-attention-backend takes it

log = logging.getLogger("s2o_runtime")


@lru_cache(maxsize=1)
def register() -> None:
    """Name S2O's backend in SGLang's registry; it is imported if it is chosen."""
    try:
        from sglang.srt.arg_groups.choices import add_attention_backend_choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:
        log.warning("S2O is not registered, this SGLang has no known registry of backends (%s): use 0.5.23", error)
        return
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)


def create(runner: Any) -> Any:
    """Create the backend of a model runner, for SGLang."""
    from .engine import create_backend

    return create_backend(runner)
