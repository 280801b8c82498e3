"""The ends of prompts and the LoRA adapters of vLLM's requests, of which it tells its workers, not its backends."""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

log = logging.getLogger("s2o_runtime")


class Prompts:
    """The prompts that a worker has not read to their end, and their sizes in the current step.

    has_lora: whether the server lets requests have LoRA adapters.
    """

    has_lora = False

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._adapters: set[str] = set()  # requests that have one
        self._by_adapter: dict[tuple[int, int], bool] = {}
        self._unknown = False
        self._watched: set[type] = set()

    def watch(self, worker: type) -> None:
        """Observe every step of a worker's class before it runs; once, however often it is asked for."""
        if worker in self._watched:
            return
        self._watched.add(worker)
        execute = worker.execute_model  # type: ignore[attr-defined]

        @wraps(execute)
        def execute_model(self: Any, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
            prompts.observe(scheduler_output)
            return execute(self, scheduler_output, *arguments, **named)

        prompts = self
        worker.execute_model = execute_model  # type: ignore[attr-defined]

    def observe(self, step: Any) -> None:
        """Take in a step, vLLM's `SchedulerOutput`; from one that is not understood on, no prompt is known to end."""
        self._left, self._by_adapter = {}, {}
        if self._unknown:
            return
        try:
            self._read(step)
        except (AttributeError, KeyError, TypeError) as error:
            self._unknown = True
            log.warning("S2O: this vLLM does not say where prompts end (%r): their last rows are sparse too", error)

    def _read(self, step: Any) -> None:
        for request in step.finished_req_ids:
            self._lengths.pop(request, None)
            self._adapters.discard(request)
        for new in step.scheduled_new_reqs:
            # vLLM's runner V2 has a preempted request here again, with what it has written
            prompt = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            self._lengths[new.req_id] = len(new.prompt_embeds if prompt is None else prompt)
            if self.has_lora and new.lora_request is not None:
                self._adapters.add(new.req_id)
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
            self._left[sizes] = min(left, self._left.get(sizes, left))
            self._by_adapter[sizes] = request in self._adapters or self._by_adapter.get(sizes, False)
            if left <= 0:
                del self._lengths[request]

    def count_left(self, queries: int, keys: int) -> int | None:
        """Count the tokens of a prompt behind this step's request of so many queries and keys; None if unknown."""
        return self._left.get((queries, keys))

    def has_adapter(self, queries: int, keys: int) -> bool:
        """Return whether one of this step's requests of so many queries and keys has an adapter, or may have."""
        return self.has_lora and self._by_adapter.get((queries, keys), True)
