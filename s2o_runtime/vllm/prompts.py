"""Where prompts of vLLM's requests end and which have LoRA adapters: it tells its workers, not attention backends."""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

log = logging.getLogger("s2o_runtime")


class Prompts:
    """The prompts that a worker has not read to their end, and what the step of now leaves of them.

    lora: whether the server lets requests have adapters of LoRA.
    """

    lora = False

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._adapters: set[str] = set()  # requests that have one
        self._adapted: dict[tuple[int, int], bool] = {}
        self._unknown = False
        self._watched: set[type] = set()

    def watch(self, worker: type) -> None:
        """See every step of a worker's class before it runs; once, however often it is asked for."""
        if worker in self._watched:
            return
        self._watched.add(worker)
        execute = worker.execute_model  # type: ignore[attr-defined]

        @wraps(execute)
        def execute_model(self: Any, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
            prompts.see(scheduler_output)
            return execute(self, scheduler_output, *arguments, **named)

        prompts = self
        worker.execute_model = execute_model  # type: ignore[attr-defined]

    def see(self, step: Any) -> None:
        """Take in a step, vLLM's `SchedulerOutput`; from one that is not understood on, no prompt is known to end."""
        self._left, self._adapted = {}, {}
        if self._unknown:
            return
        try:
            self._see(step)
        except (AttributeError, KeyError, TypeError) as error:
            self._unknown = True
            log.warning("S2O: this vLLM does not say where prompts end (%r): their last rows are sparse too", error)

    def _see(self, step: Any) -> None:
        for request in step.finished_req_ids:
            self._lengths.pop(request, None)
            self._adapters.discard(request)
        for new in step.scheduled_new_reqs:
            # vLLM's runner V2 has a preempted request here again, with what it has written
            prompt = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            self._lengths[new.req_id] = len(new.prompt_embeds if prompt is None else prompt)
            if self.lora and new.lora_request is not None:
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
            shape = queries, before[request] + queries
            self._left[shape] = min(left, self._left.get(shape, left))
            self._adapted[shape] = request in self._adapters or self._adapted.get(shape, False)
            if left <= 0:
                del self._lengths[request]

    def left(self, queries: int, keys: int) -> int | None:
        """Tokens of a prompt behind this step's request of so many queries and keys; None if that is not known."""
        return self._left.get((queries, keys))

    def adapted(self, queries: int, keys: int) -> bool:
        """Whether one of this step's requests of so many queries and keys has an adapter, or may have."""
        return self.lora and self._adapted.get((queries, keys), True)
