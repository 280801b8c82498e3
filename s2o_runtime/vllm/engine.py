"""The vLLM around S2O's backend: its configuration, its ranks, its log and its requests' prompts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache, wraps
from typing import Any

import torch

from ..dense_reason import DenseReason
from ..profile.find import find_local_folder
from ..profile.record import Reads
from ..sequences import find_page_obstacle
from ..serving.fit import Rank
from ..serving.server import Process, Server, ServerContext, Settings, log_start_failures
from .backend import RequestPart, VllmApi
from .salt import opts_out

SECTION = "s2o"  # of --additional-config, which has the settings
UNKNOWN = RequestPart(reason=DenseReason.UNKNOWN_REQUEST)

log = logging.getLogger("s2o_runtime")


class Prompts:
    """The prompts that a worker has not read to their end, and their sizes in the current step.

    vLLM tells its workers where prompts end, which requests have LoRA adapters and what is read of them, not its
    backends. A request that the step does not have is dense: a microbatch's part of one, or of a worker that is not
    watched.
    """

    reads: Reads = "all"  # what the profile's budget is about

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}
        self._reasons: dict[str, DenseReason] = {}  # of requests that have one
        self._parts: dict[tuple[int, int], RequestPart] = {}  # of the current step, by queries and keys
        self._unknown = False

    def watch(self, worker: type) -> None:
        """Observe every step of a worker's class before it runs."""
        execute = worker.execute_model  # type: ignore[attr-defined]

        @wraps(execute)
        def execute_model(self: Any, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
            prompts.observe(scheduler_output)
            return execute(self, scheduler_output, *arguments, **named)

        prompts = self
        worker.execute_model = execute_model  # type: ignore[attr-defined]

    def observe(self, step: Any) -> None:
        """Take in a step, vLLM's `SchedulerOutput`; from one that is not understood on, no prompt is known to end."""
        self._parts = {}
        if self._unknown:
            return
        try:
            self._read(step)
        except Exception as error:  # nothing of S2O's ends a server
            self._unknown = True
            log.warning("S2O: this vLLM does not say where prompts end (%r): all are dense", error)

    def _read(self, step: Any) -> None:
        for request in step.finished_req_ids:
            self._lengths.pop(request, None)
            self._reasons.pop(request, None)
        for new in step.scheduled_new_reqs:
            # vLLM's runner V2 has a preempted request here again, with what it has written
            prompt = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            self._lengths[new.req_id] = len(new.prompt_embeds if prompt is None else prompt)
            if reason := self._find_own_reason(new):
                self._reasons[new.req_id] = reason
        running = step.scheduled_cached_reqs
        for request in running.resumed_req_ids:  # what it has written so far is read again, as a part of its prompt
            if request in running.all_token_ids:
                self._lengths[request] = len(running.all_token_ids[request])
        if not self._lengths:
            return  # as in nearly all steps, which decode
        before = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        before |= zip(running.req_ids, running.num_computed_tokens, strict=True)
        for request, length in list(self._lengths.items()):
            queries = step.num_scheduled_tokens.get(request, 0)
            if not queries:
                continue
            left = length - before[request] - queries
            # backends know requests by their sizes alone: of two alike, the one that is dense counts
            sizes = queries, before[request] + queries
            other = self._parts.get(sizes, RequestPart(request, left))
            reason = self._reasons.get(request) or other.reason
            self._parts[sizes] = RequestPart(request, min(left, other.left), reason)
            if left <= 0:
                del self._lengths[request]

    def find_part(self, queries: int, keys: int) -> RequestPart:
        """Return this step's part of so many queries and keys."""
        return self._parts.get((queries, keys), UNKNOWN)

    def _find_own_reason(self, new: Any) -> DenseReason | None:
        """Return why a request, vLLM's `NewRequestData`, is dense whatever its sizes; None if it is not."""
        if new.lora_request is not None:
            return DenseReason.ADAPTER
        if opts_out(new.sampling_params):
            return DenseReason.OPTED_OUT
        if self.reads == "all":
            return None
        if new.pooling_params is not None:  # embeddings, scores, classes
            return DenseReason.POOLING
        return None if new.sampling_params.prompt_logprobs is None else DenseReason.PROMPT_LOGPROBS


PROMPTS = Prompts()  # of this process


def make_api() -> VllmApi:
    """Return the functions by which S2O's classes ask this vLLM."""
    from vllm.model_executor.models.utils import extract_layer_index

    return VllmApi(get_server, extract_layer_index, PROMPTS.find_part)


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
    model = config.model_config
    on_cpu = current_platform.is_cpu()
    drafter = str(config.speculative_config.method) if config.speculative_config else None
    context = ServerContext(
        engine=f"vLLM {vllm.__version__}",
        stock="the plain backend" if on_cpu else "FLASH_ATTN",
        model_config=model.hf_config,
        checkpoint=find_local_folder(model.model, model.revision),
        rank=Rank(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()),
        device=torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device()),
        max_keys=int(model.max_model_len),
        chunk=int(config.scheduler_config.max_num_batched_tokens),
        # its last token and those to be verified; a parallel drafter may add as many again
        decode_queries=1 + 2 * int(getattr(config.speculative_config, "num_speculative_tokens", None) or 0),
        process=_find_process(config.parallel_config, get_world_group().rank_in_group, get_pp_group().rank_in_group),
        kv_cache_dtype=_get_cache_dtype(config.cache_config),
        # 0 or None where vLLM will choose, a small one
        obstacle=find_page_obstacle(config.cache_config.block_size or 1),
        quantisation=getattr(model, "quantization", None),
        drafter=drafter,
        reads_all=DenseReason.HIDDEN_STATES if drafter == "extract_hidden_states" else None,
    )
    vllm_log = logging.getLogger("vllm")
    if not log.handlers:  # S2O's log goes where vLLM's goes
        for handler in vllm_log.handlers:
            log.addHandler(handler)
        log.setLevel(vllm_log.level or logging.INFO)
    with log_start_failures():
        server = Server(read_settings(config.additional_config), context)
    PROMPTS.reads = server.fit.reads
    return server


def read_settings(additional_config: Any) -> Settings:
    """Read the settings in vLLM's `additional_config`; without a profile there, the environment's S2O_PROFILE.

    Raises:
        ConfigError: a setting is unknown or illegal.
    """
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
    return Settings.from_section(section, f'"{SECTION}" in --additional-config')


def _find_process(parallel: Any, world_rank: int, stage: int) -> Process:
    """Return this process among the server's, by its rank in the group that vLLM has for a replica or for all."""
    replica = getattr(parallel, "data_parallel_index", None)  # stays where vLLM takes replicas apart; 0.23 has it not
    replica = parallel.data_parallel_rank if replica is None else replica
    of_replica = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    of_replica *= getattr(parallel, "prefill_context_parallel_size", 1)
    return Process(replica * of_replica + world_rank % of_replica, stage, replica)


def _get_cache_dtype(cache: Any) -> str:
    """Return the type of all caches, by vLLM's CacheConfig; "auto" where some layers are excepted from it."""
    return "auto" if getattr(cache, "kv_cache_dtype_skip_layers", None) else str(cache.cache_dtype)
