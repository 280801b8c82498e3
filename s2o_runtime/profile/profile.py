"""One model's calibration, and its form for a device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..config import MAX_CHUNK, KvCacheDtype, LayerConfig, TileConfig
from ..devices import DeviceIdentity, decide_fit, identify
from ..errors import ConfigError, ProfileError
from ..fields import short_repr
from ..identity import CONFIG, RANDOM, Geometry
from ..lengths import find_nearest
from ..tiles import list_candidate_tiles
from .record import Reads, get_object, read_budget

log = logging.getLogger("s2o_runtime")


@dataclass(frozen=True)
class Profile:
    """One model's calibration.

    model_name: what the calibration was given: an alias, a folder or a hub id.
    geometry: the sizes of the model; fingerprint: what names its function (`identity.fingerprint`).
    device: what the tiles were tuned on.
    lengths: the calibrated buckets in tokens, ascending; layers[bucket][layer] is that layer's configuration.
    record: how it was made and what was shown, as the file's JSON; `calibrate.record` has its types. Of it the runtime
        reads the budget and the limits of the held-out proof (drift check), and `s2o-doctor` the proof, the certificate
        and the problems.
    unsupported_heads: how many heads are dense because the file gives them settings of an earlier version.

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
    unsupported_heads: int = field(default=0, compare=False)

    @property
    def min_length(self) -> int:
        """The shortest prompt that was calibrated; shorter ones stay dense."""
        return self.lengths[0]

    @property
    def kv_cache_dtype(self) -> KvCacheDtype:
        """The type of the server's KV cache that the profile was made for."""
        return "fp8" if get_object(self.record, "recipe").get("kv_cache_dtype") == "fp8" else "auto"

    @property
    def reads(self) -> Reads:
        """The rows of a prompt's output that the budget is about: "answers" of a budget in KL, "all" of any other."""
        return "answers" if read_budget(self.record).kind == "kl" else "all"

    @property
    def config_unknown(self) -> str | None:
        """The reason that no model's config.json can be compared with the profile's; None if it can."""
        if CONFIG in self.fingerprint:
            return None
        return f"the profile of {self.model_name} lacks the values of config.json: calibrate again"

    def layer_config(self, layer: int, length: int) -> LayerConfig:
        """Return the configuration of a layer for a prompt of `length` keys: that of the bucket nearest in log length.

        Settings are never mixed: what a bucket has was measured together.
        """
        return self.layers[find_nearest(self.lengths, length)][layer]

    def explain_misfit(self, model: Geometry) -> str | None:
        """Return the reason that the profile is not of a model with this geometry; None if it may be."""
        difference = model.describe_difference(self.geometry)
        return f"the profile of {self.model_name} does not fit this model: it has {difference}" if difference else None

    def check_trained(self) -> Profile:
        """Return the profile itself. Raises ProfileError if a rehearsal made it."""
        if self.fingerprint.startswith(RANDOM):
            raise ProfileError(
                f"the profile of {self.model_name} was calibrated on random weights, expected ones of a trained model: "
                "calibrate without --random-weights"
            )
        return self

    def validate(self) -> Profile:
        """Return the profile itself. Raises ProfileError naming the first thing out of range or that fits no other."""
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ProfileError(f"lengths {self.lengths} are not ascending: expected at least one bucket, each once")
        expected = [[self.geometry.query_heads] * self.geometry.layers] * len(self.lengths)
        heads = [[layer.num_heads for layer in bucket] for bucket in self.layers]
        if heads != expected:
            raise ProfileError(
                f"the layers have {short_repr(heads)} heads: expected {short_repr(expected)}, by length and layer"
            )
        for length, bucket in zip(self.lengths, self.layers, strict=True):
            for index, layer in enumerate(bucket):
                try:
                    layer.validate()
                except ConfigError as error:
                    raise ProfileError(f"layer {index} at length {length}: {error}") from error
        return self


def adapt_to_device(profile: Profile, device: torch.device) -> tuple[Profile, str | None]:
    """Return the profile as it can run on a device, and the reason if it cannot; warn of what was not proven there."""
    here = identify(device)
    verdict = decide_fit(profile.device, here)
    if verdict.tiles == "profile":
        return profile, None
    log.warning("%s", verdict.reason)
    if verdict.tiles is None:
        return profile, verdict.reason
    tiles = list_candidate_tiles(profile.geometry.head_dim, here.capability)
    layers = tuple(tuple(with_safe_tile(layer, tiles) for layer in bucket) for bucket in profile.layers)
    return replace(profile, layers=layers), None


def with_safe_tile(config: LayerConfig, tiles: Sequence[TileConfig]) -> LayerConfig:
    """Return a layer with a tile of another GPU that stops its heads where the layer's own tile does.

    The same tau means the same error only with as many keys between two stop checks and as many rows that stop
    together. So the stride is kept, rounded up to whole tiles, and the height where the GPU has a tile of it. The
    layer becomes dense if no tile fits its segments, and stays as it is where the GPU has no tile at all.

    tiles: the GPU's, the safest first.
    """
    segments = {head.segment for head in config.heads if head.mode == "s2o"}
    if config.is_dense or not segments or not tiles:
        return config
    strided = (replace(tile, chunk=-(-config.tile.stride // tile.block_n)) for tile in tiles)
    fitting = [
        tile for tile in strided if tile.chunk <= MAX_CHUNK and not any(segment % tile.rows for segment in segments)
    ]
    if not fitting:
        return config.as_dense()
    return config.with_tile(min(fitting, key=lambda tile: tile.block_m != config.tile.block_m))
