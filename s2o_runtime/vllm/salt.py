"""Requests of vLLM that opt out of S2O, and the salt by which they find only blocks of one another in the cache."""

from __future__ import annotations

from functools import wraps
from typing import Any

SALT = "s2o-off"


def opts_out(sampling_params: Any) -> bool:
    """Return whether a request says "s2o": "off" in vLLM's SamplingParams (`vllm_xargs`); None of pooling requests."""
    return (getattr(sampling_params, "extra_args", None) or {}).get("s2o") == "off"


def salt_requests(requests: Any) -> None:
    """Let vLLM's class of requests, which look for blocks in the cache as they are made, salt those that opt out."""
    make = requests.from_engine_core_request

    @wraps(make)
    def from_engine_core_request(request: Any, *arguments: Any, **named: Any) -> Any:
        if opts_out(request.sampling_params):
            request.cache_salt = f"{request.cache_salt or ''}{SALT}"
        return make(request, *arguments, **named)

    requests.from_engine_core_request = from_engine_core_request
