"""A proof under a server's chunk: prompts are fed to every layer in parts, each a call behind those before it.

Every chunk follows the configuration of the keys that there are by then, as the runtime would choose it, and is dense
while these are fewer than the shortest calibrated length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from s2o_runtime.config import LayerConfig


class ByLength(Protocol):
    """What says what layers run: a profile, or a candidate for one."""

    @property
    def min_length(self) -> int:
        """The shortest calibrated length."""

    def layer_config(self, layer: int, length: int) -> LayerConfig:
        """What a layer runs for a prompt of `length` tokens."""


@dataclass(frozen=True)
class Chunks:
    """How one layer is fed. size: Tokens of a chunk. config_at: What the layer runs behind so many keys."""

    size: int
    config_at: Callable[[int], LayerConfig]


def chunks_of(configured: ByLength, chunk: int | None, layer: int, length: int) -> Chunks | None:
    """How a layer is fed prompts of `length` tokens; None where they are fed whole."""
    if chunk is None or length <= chunk:
        return None
    return Chunks(chunk, partial(_config_at, configured, layer))


def _config_at(configured: ByLength, layer: int, keys: int) -> LayerConfig:
    config = configured.layer_config(layer, keys)
    return config.as_dense() if keys < configured.min_length else config
