"""The SGLang around S2O's backend: its model runner, its ranks and its interface."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from ..call import PLAIN
from ..dense_reason import DenseReason
from ..errors import ConfigError, ResourceError
from ..profile.find import find_local_folder
from ..serving.fit import Rank
from ..serving.server import Process, Server, ServerContext, Settings, log_start_failures
from ..serving.sources import find_interface_obstacle
from .backend import SglangApi, mix_in, watch_prompts
from .compat import READ, SglangInterface

FLASH_ATTENTION_3 = (8, 9)  # major compute capabilities that SGLang runs it on

VARIABLE = "S2O_SETTINGS"  # a JSON object: SGLang passes nothing on to a backend

log = logging.getLogger("s2o_runtime")


@log_start_failures()
def create_backend(runner: Any) -> Any:
    """Create S2O's backend for a model runner; the stock one for a draft model, and in a SGLang that is not known.

    Raises:
        S2OError: the GPU, the settings, the profile or the server's flags do not fit; the sentence says how.
    """
    import sglang

    stock = get_stock_class(runner)
    obstacle = find_interface_obstacle(SglangInterface, Path(str(sglang.__file__)).parent / "srt")
    if obstacle is not None:
        log.warning(
            "S2O does not know SGLang %s (%s), only %s: the stock backend runs in its place",
            sglang.__version__, obstacle, ", ".join(READ),
        )  # fmt: skip
        return stock(runner)
    if runner.is_draft_worker:
        return stock(runner)
    return mix_in(stock, make_api(runner))(runner)


def get_stock_class(runner: Any) -> type[Any]:
    """Return the stock backend that S2O is mixed into: FlashAttention 3, or on a CPU SGLang's own in plain torch.

    Raises:
        ConfigError: SGLang's FlashAttention 3 does not run on the GPU.
    """
    if runner.device == "cpu":
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return TorchNativeAttnBackend  # type: ignore[no-any-return]
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if major not in FLASH_ATTENTION_3:
        raise ConfigError(
            f"S2O runs in SGLang with its FlashAttention 3, which has no kernels for compute capability "
            f"{major}.{minor} (8 and 9 only): serve with another --prefill-attention-backend"
        )
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    return FlashAttentionBackend  # type: ignore[no-any-return]


def make_api(runner: Any) -> SglangApi:
    """Return what S2O's class asks of this SGLang.

    Raises:
        S2OError: the settings, the profile or the server's flags do not fit; the sentence says how.
    """
    import sglang
    from sglang.srt.layers.cp.utils import is_cp_active
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.runtime_context import get_flags, get_parallel, get_schedule

    on_cpu = runner.device == "cpu"
    if check_cuda_graph_backend(Phase.PREFILL, Backend.FULL):
        raise ConfigError(
            "S2O takes decisions on the host, which full CUDA graphs of prompts have no room for: use "
            "--cuda-graph-backend-prefill breakable, or serve with another --prefill-attention-backend"
        )
    parallel, model = get_parallel(), runner.model_config
    kv_cache_dtype, obstacle = str(runner.kv_cache_dtype).removeprefix("torch."), _find_obstacle(runner)
    chunk = get_schedule().chunked_prefill_size
    chunk = chunk if chunk is not None and chunk > 0 else int(model.context_len)
    server = Server(
        read_settings(),
        ServerContext(
            engine=f"SGLang {sglang.__version__}",
            stock="torch_native" if on_cpu else "fa3",
            model_config=model.hf_config,
            checkpoint=find_local_folder(model.model_path),
            rank=Rank(parallel.attn_tp_rank, parallel.attn_tp_size),
            device=torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device()),
            max_keys=int(model.context_len),
            chunk=chunk,
            process=_find_process(parallel),
            kv_cache_dtype=kv_cache_dtype,
            obstacle=obstacle,
            reads_all=_find_reader(runner),
            quantisation=model.quantization,
            drafter=None if runner.spec_algorithm.is_none() else runner.spec_algorithm.name.lower(),
        ),
    )
    _reserve(server, runner, chunk)
    watch_prompts(ForwardBatch)

    def write(layer: Any, forward_batch: Any, keys: Any, values: Any) -> None:
        location = KVWriteLoc.for_layer(forward_batch, layer)
        runner.token_to_kv_pool.set_kv_buffer(layer, location, keys, values, layer.k_scale, layer.v_scale)

    def find_reason(forward_batch: Any) -> str | None:
        if get_flags().dp.capturing_prefill_graph:  # by prompts of zeros, which would test layers too
            return "the batch is of a CUDA graph"
        return "the context is shared by several ranks" if is_cp_active(forward_batch) else None

    return SglangApi(server, obstacle, kv_cache_dtype, find_reason, write)


def read_settings() -> Settings:
    """Read the settings in the environment's S2O_SETTINGS; without a profile there, its S2O_PROFILE.

    Raises:
        ConfigError: a setting is unknown or illegal.
    """
    try:
        section = json.loads(os.environ.get(VARIABLE) or "{}")
    except ValueError as error:
        raise ConfigError(f'{VARIABLE} is no JSON ({error}): use an object, {{"profile": FILE}}') from error
    return Settings.from_section(section, VARIABLE)


def _find_process(parallel: Any) -> Process:
    """Return this process among the server's; replicas are processes of their own, or ranks of attention."""
    apart = 0 if parallel.attn_dp_size > 1 else parallel.dp_rank or 0
    number = (apart * parallel.pp_size + parallel.pp_rank) * parallel.tp_size + parallel.tp_rank
    return Process(number, parallel.pp_rank, parallel.attn_dp_rank if parallel.attn_dp_size > 1 else apart)


def _find_obstacle(runner: Any) -> str | None:
    """Return the reason why S2O computes nothing of a model runner; None if it may."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = getattr(runner.token_to_kv_pool, "full_kv_pool", runner.token_to_kv_pool)  # sliding layers have their own
    if runner.kv_index_translator is not None and runner.kv_index_translator.is_translating:
        return "the KV cache shares its memory with other caches (unified memory)"
    if type(pool) is not MHATokenToKVPool or pool.get_key_buffer(pool.start_layer).ndim != 3:
        return f"the KV cache is a {type(pool).__name__}, not one of plain rows"
    return None


def _find_reader(runner: Any) -> DenseReason | None:
    """Return why hidden states of more than last rows are read of every request of a model runner; None if not."""
    if not runner.is_generation:
        return DenseReason.POOLING
    arguments = runner.server_args
    is_full = arguments.enable_return_hidden_states or arguments.return_hidden_states_mode == "full"
    return DenseReason.HIDDEN_STATES if is_full else None


def _reserve(server: Server, runner: Any, rows: int) -> None:
    """Take, and give back, the memory of S2O's calls, and compile its kernels: the KV cache has its memory already.

    Raises:
        ResourceError: so much is not left.
    """
    if runner.device == "cpu" or server.obstacle:
        return
    sizes = rows, len(server.fit.heads), server.fit.profile.geometry.head_dim
    try:
        server.reserve(torch.empty(sizes, dtype=runner.dtype, device="cuda"), PLAIN)  # caps and sinks compile later
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            "S2O's calls need memory beside the KV cache that is not left: lower --mem-fraction-static"
        ) from error
