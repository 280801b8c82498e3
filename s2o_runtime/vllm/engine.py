"""The vLLM around S2O's backend: its configuration, its ranks and its log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from s2o_runtime.sequences import find_page_obstacle
from s2o_runtime.serving.checkpoint import find_local_folder
from s2o_runtime.serving.fit import Rank
from s2o_runtime.serving.server import Process, Server, ServerContext, Settings, log_start_failures
from s2o_runtime.vllm.backend import VllmApi
from s2o_runtime.vllm.prompts import Prompts

SECTION = "s2o"  # of --additional-config, which has the settings

PROMPTS = Prompts()  # of this process

log = logging.getLogger("s2o_runtime")


def make_api() -> VllmApi:
    """Return the functions by which S2O's classes ask this vLLM."""
    from vllm.model_executor.models.utils import extract_layer_index

    return VllmApi(get_server, extract_layer_index, PROMPTS.count_left, PROMPTS.has_adapter)


@lru_cache(maxsize=1)
def get_server() -> Server:
    """Return S2O in this process, made when vLLM makes its first layer.

    Raises:
        S2OError: the settings or the profile do not fit; the sentence says how.
    """
    import vllm
    from vllm.config import get_current_vllm_config
    from vllm.distributed import (
        get_pp_group,
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
        get_world_group,
    )
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker  # of a CPU's too

    PROMPTS.watch(Worker)
    config = get_current_vllm_config()
    PROMPTS.has_lora = getattr(config, "lora_config", None) is not None
    model = config.model_config
    on_cpu = current_platform.is_cpu()
    context = ServerContext(
        engine=f"vLLM {vllm.__version__}",
        stock="the plain backend" if on_cpu else "FLASH_ATTN",
        model_config=model.hf_config,
        checkpoint=find_local_folder(model.model, model.revision),
        rank=Rank(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()),
        device=torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device()),
        max_keys=int(model.max_model_len),
        # its last token and those to be verified; a parallel drafter may add as many again
        decode_queries=1 + 2 * int(getattr(config.speculative_config, "num_speculative_tokens", None) or 0),
        process=_find_process(config.parallel_config, get_world_group().rank_in_group, get_pp_group().rank_in_group),
        kv_cache_dtype=_get_cache_dtype(config.cache_config),
        obstacle=find_page_obstacle(
            config.cache_config.block_size or 1
        ),  # 0 or None where vLLM will choose, a small one
    )
    vllm_log = logging.getLogger("vllm")
    if not log.handlers:  # S2O's log goes where vLLM's goes
        for handler in vllm_log.handlers:
            log.addHandler(handler)
        log.setLevel(vllm_log.level or logging.INFO)
    with log_start_failures():
        return Server(read_settings(config.additional_config), context)


def read_settings(additional_config: Any) -> Settings:
    """Read the settings in vLLM's `additional_config`; without a profile there, the environment's S2O_PROFILE.

    Raises:
        ConfigError: a setting is unknown or illegal.
    """
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
    return Settings.from_section(section, f'"{SECTION}" in --additional-config')


def _find_process(parallel: Any, world_rank: int, stage: int) -> Process:
    """Return this process among those of the server.

    Args:
        parallel: vLLM's ParallelConfig.
        world_rank: among the processes that vLLM has in one group: of a replica, or of all replicas.
        stage: of pipeline parallelism.
    """
    replica = getattr(parallel, "data_parallel_index", None)  # stays where vLLM takes replicas apart; 0.23 has it not
    replica = parallel.data_parallel_rank if replica is None else replica
    of_replica = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    of_replica *= getattr(parallel, "prefill_context_parallel_size", 1)
    return Process(replica * of_replica + world_rank % of_replica, stage, replica)


def _get_cache_dtype(cache: Any) -> str:
    """Return the type of all caches, by vLLM's CacheConfig; "auto" where some layers are excepted from it."""
    return "auto" if getattr(cache, "kv_cache_dtype_skip_layers", None) else str(cache.cache_dtype)
