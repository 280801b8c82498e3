"""The type of a profile: what each layer of one model does at each calibrated length, and between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from s2o_runtime.config import HeadConfig, KvCacheDtype, LayerConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ConfigError, ProfileError
from s2o_runtime.identity import RANDOM, Geometry
from s2o_runtime.lengths import MAX_LENGTH, STEPS_PER_OCTAVE, far_apart, length_step
from s2o_runtime.profile.record import get_object


@dataclass(frozen=True)
class Profile:
    """One model's calibration.

    model_name: what the calibration was given: an alias, a folder or a hub id.
    geometry: the sizes of the model; fingerprint: a hash of its weights (`identity.fingerprint`).
    device: what the tiles were tuned on.
    lengths: the calibrated buckets in tokens, ascending; layers[bucket][layer] is that layer's configuration.
    record: how it was made and what was shown, as the file's JSON; `calibrate.record` has its types. Of it the runtime
        reads the budget and the limits of the held-out proof (drift check), and `s2o-doctor` the proof, the certificate
        and the problems.

    >>> from s2o_runtime import load_profile
    >>> profile = load_profile("profiles/demo/cpu/mse-0.0001.safetensors")  # in a clone of the repository
    >>> profile.min_length, profile.layer_config(0, 2048).num_heads
    (1024, 8)
    """

    model_name: str
    geometry: Geometry
    fingerprint: str
    device: DeviceIdentity
    lengths: tuple[int, ...]
    layers: tuple[tuple[LayerConfig, ...], ...]
    record: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def min_length(self) -> int:
        """The shortest prompt that was calibrated; shorter ones stay dense."""
        return self.lengths[0]

    @property
    def kv_cache_dtype(self) -> KvCacheDtype:
        """The type of the server's KV cache that the profile was made for."""
        return "fp8" if get_object(self.record, "recipe").get("kv_cache_dtype") == "fp8" else "auto"

    def layer_config(self, layer: int, length: int) -> LayerConfig:
        """The configuration of a layer for a prompt of `length` keys.

        The bucket nearest in log length decides everything but tau. For heads that the two buckets around `length`
        treat alike, tau is interpolated in log length; for others it is the smaller of the two, because the same tau
        means another error with another segment or other checks. A layer with linear tails in one of the two, which
        have no tau, is as in the longer one, because what it errs by grows with the length. Lengths are rounded to an
        eighth of an octave, so that a server sees few distinct configurations.
        """
        steps = [length_step(bucket) for bucket in self.lengths]
        if length_step(length) in steps:
            return self.layers[steps.index(length_step(length))][layer]
        position = length_step(length) / STEPS_PER_OCTAVE
        logs = [math.log2(bucket) for bucket in self.lengths]
        nearest = min(range(len(logs)), key=lambda bucket: abs(logs[bucket] - position))
        config = self.layers[nearest][layer]
        other = nearest + 1 if position > logs[nearest] else nearest - 1
        if not 0 <= other < len(logs):
            return config
        other_config = self.layers[other][layer]
        if "linear" in config.tails | other_config.tails:
            return self.layers[max(nearest, other)][layer]
        alike = _checks(config) == _checks(other_config)
        weight = (position - logs[nearest]) / (logs[other] - logs[nearest]) if alike else None
        pairs = zip(config.heads, other_config.heads, strict=True)
        return replace(config, heads=tuple(_between(near, distant, weight) for near, distant in pairs))

    def misfit(self, model: Geometry) -> str | None:
        """Why the profile is not of a model with this geometry; None if it may be."""
        difference = model.difference(self.geometry)
        return f"the profile of {self.model_name} does not fit this model: it has {difference}" if difference else None

    def check_trained(self) -> Profile:
        """The profile itself. Raises ProfileError if a rehearsal made it."""
        if self.fingerprint.startswith(RANDOM):
            raise ProfileError(
                f"the profile of {self.model_name} was calibrated on random weights, expected ones of a trained model: "
                "calibrate without --random-weights"
            )
        return self

    def validate(self) -> Profile:
        """The profile itself.

        Raises:
            ProfileError: naming the first thing that is out of range or does not fit another.
        """
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ProfileError(f"lengths {self.lengths} are not ascending: expected at least one bucket, each once")
        if not all(1 <= length <= MAX_LENGTH for length in self.lengths):
            raise ProfileError(f"lengths {self.lengths} are out of range: expected 1 to {MAX_LENGTH}")
        for shorter, longer in pairwise(self.lengths):
            if not far_apart(shorter, longer):
                raise ProfileError(
                    f"lengths {shorter} and {longer} are less than an eighth of an octave apart: keep one of them"
                )
        if len(self.layers) != len(self.lengths):
            raise ProfileError(f"{len(self.layers)} tables for {len(self.lengths)} lengths: expected one each")
        for length, bucket in zip(self.lengths, self.layers, strict=True):
            if len(bucket) != self.geometry.layers:
                raise ProfileError(f"{len(bucket)} layers in a table: expected {self.geometry.layers}")
            for index, layer in enumerate(bucket):
                if layer.num_heads != self.geometry.query_heads:
                    raise ProfileError(
                        f"layer {index} has {layer.num_heads} heads: expected {self.geometry.query_heads}"
                    )
                try:
                    layer.validate()
                except ConfigError as error:
                    raise ProfileError(f"layer {index} at length {length}: {error}") from error
        return self


def _checks(config: LayerConfig) -> tuple[object, ...]:
    """What, besides a head's own settings, decides where it stops: tau means the same only where this is equal."""
    return config.tile.block_m, config.tile.stride, config.grain


def _between(near: HeadConfig, distant: HeadConfig, weight: float | None) -> HeadConfig:
    """The head of the nearer bucket with a tau for a length between the buckets.

    weight: how far towards the other bucket, 0 to 0.5 in log length; None if the layers check the stop unlike.
    """
    if near.mode != "s2o" or distant.mode != "s2o" or near.stop_rule != distant.stop_rule:
        return near
    alike = all(getattr(near, name) == getattr(distant, name) for name in ("segment", "representatives", "far"))
    if weight is None or not alike or near.tau == 0.0 or distant.tau == 0.0:
        return replace(near, tau=min(near.tau, distant.tau))
    return replace(near, tau=math.exp((1 - weight) * math.log(near.tau) + weight * math.log(distant.tau)))
