"""One layer of a profile as a process runs it, in a patched model of transformers or in a server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from s2o_runtime.config import LayerConfig
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.lengths import length_step
from s2o_runtime.monitor.drift import DriftMonitor
from s2o_runtime.profile import Profile

TRUSTED_BEYOND = 1.5  # a profile's settings hold up to this many times its longest calibrated length

log = logging.getLogger("s2o_runtime")


@dataclass(eq=False)
class ServedLayer:
    """What a layer runs, and for which prompts.

    layer: the number of the decoder layer, which counters and logs name.
    config_at: the layer's configuration for a number of keys; min_length: fewer keys than this stay dense;
    max_length: more keys than this stay dense too, or with warn_beyond run S2O after one warning; None for no limit.
    rejected: why the layer cannot run S2O at all, if so.
    heads: the query heads of the layer that this process computes; None for all.
    drift: checks the layer's error, None does not.
    ends_known: whether calls are taken to hold the ends of their prompts, whose last rows then run dense
    (`LayerConfig.last_rows`); otherwise none do.
    """

    layer: int
    config_at: Callable[[int], LayerConfig]
    min_length: int
    rejected: str | None = None
    max_length: int | None = None
    warn_beyond: bool = False
    heads: range | None = None
    drift: DriftMonitor | None = None
    ends_known: bool = True
    configs: dict[int, LayerConfig] = field(default_factory=dict)

    def config(self, keys: int) -> LayerConfig:
        """The configuration of this process's heads behind so many keys; one object for lengths that share it."""
        step = length_step(keys)
        if step not in self.configs:
            config = self.of_heads(self.config_at(keys))
            config = config if self.ends_known else replace(config, last_rows=0)
            self.configs[step] = next((known for known in self.configs.values() if known == config), config)
        return self.configs[step]

    def of_heads(self, config: LayerConfig) -> LayerConfig:
        """A configuration of the whole layer, cut to the heads of this process."""
        if self.heads is None:
            return config
        return replace(config, heads=config.heads[self.heads.start : self.heads.stop])

    @property
    def past_budget(self) -> str | None:
        """Why the layer runs dense because of its drift check; None if it does not."""
        return self.drift.verdict if self.drift is not None and self.drift.runs_dense else None

    def why_dense_at(self, keys: int) -> str | None:
        """Why a prompt of so many keys is dense in this layer, by the profile and by what was found since.

        What the call's own sizes say is `attention.backend.why_dense`.
        """
        if reason := self.rejected or self.past_budget:
            return reason
        if keys < self.min_length:
            return DenseReason.TOO_SHORT.about(self.min_length)
        if self.max_length is not None and keys > self.max_length:
            if not self.warn_beyond:
                return DenseReason.TOO_LONG.about(self.max_length, TRUSTED_BEYOND)
            _warn_beyond(self.max_length)
        return None


def longest_trusted(profile: Profile) -> int:
    """The keys up to which a profile's settings are taken to hold."""
    return int(TRUSTED_BEYOND * profile.lengths[-1])


@lru_cache(maxsize=64)
def _warn_beyond(max_length: int) -> None:
    log.warning(
        "a prompt has more than %d keys, 1.5 times the longest calibrated length: its errors were not proven, "
        "calibrate with longer --lengths",
        max_length,
    )
