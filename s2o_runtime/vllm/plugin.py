"""The entry point of the group `vllm.general_plugins`, which vLLM calls in every one of its processes."""

from __future__ import annotations

import copyreg
import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..serving.sources import find_interface_obstacle
from .compat import VllmInterface
from .salt import salt_requests

NAME = "S2O"  # of the backend where vLLM lets plugins name one, else CUSTOM
FLASH = "s2o_runtime.vllm.flash.S2OBackend"
STOCK = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
CPU_VARIABLE = "S2O_VLLM_CPU"  # a class that takes the place of the CPU engine's backend, for tests

log = logging.getLogger("s2o_runtime")


@lru_cache(maxsize=1)
def register() -> None:
    """Name S2O's backend in vLLM's registry, or the stock one with a warning if vLLM's interface is not known."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        log.warning("S2O is not registered, this vLLM has no registry of backends (%s): use 0.23 or later", error)
        return
    import vllm

    obstacle = find_interface_obstacle(VllmInterface, Path(str(vllm.__file__)).parent)
    if obstacle is not None:
        log.warning("S2O does not know this vLLM (%s): the stock backend runs in its place", obstacle)
    path = FLASH if obstacle is None else STOCK
    if get_backend_name() == NAME:
        if NAME not in AttentionBackendEnum.__members__:
            register_backend(NAME, path)
        # vLLM hands its configuration to processes that have not loaded plugins yet, and an enum's member is pickled by
        # its value, which is unknown there
        copyreg.pickle(AttentionBackendEnum, _reduce_member)
    else:
        register_backend(AttentionBackendEnum.CUSTOM, path)
    if obstacle is not None:
        return
    from vllm.v1.request import Request

    salt_requests(Request)
    if path := os.environ.get(CPU_VARIABLE, ""):
        register_backend(AttentionBackendEnum.CPU_ATTN, path)


def get_backend_name() -> str:
    """Return the name of S2O's backend in the installed vLLM: CUSTOM where plugins cannot name one."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return NAME if hasattr(AttentionBackendEnum, "register") else "CUSTOM"


def _reduce_member(member: Any) -> tuple[Any, ...]:
    """Reduce a member of vLLM's registry for pickle: S2O's to its name, the others to their values."""
    return (get_member, ()) if member.name == NAME else (type(member), (member.value,))


def get_member() -> Any:
    """Return S2O's member of the registry, which is registered first in a process that has not done so."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[NAME]
