"""A profile as one rank of a server runs it: its layers, and why a request or a layer is dense."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from s2o_runtime.attention.backend import why_dense
from s2o_runtime.config import LayerConfig
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.devices import capability
from s2o_runtime.errors import ModelError, ProfileError
from s2o_runtime.identity import RANDOM, compose_fingerprint, fingerprint_mismatch, geometry
from s2o_runtime.layer_kinds import text_config
from s2o_runtime.lengths import length_step
from s2o_runtime.monitor.drift import DriftMonitor
from s2o_runtime.profile import Profile
from s2o_runtime.profile.profile import fitted
from s2o_runtime.sequences import CallShape
from s2o_runtime.serving.checkpoint import checkpoint_hashes, names_are_known
from s2o_runtime.tiles import fewest_queries, tile_obstacle

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


NO_GPU = (0, 0)  # the capability of a CPU
TEST_KEYS = 256  # of a prompt that layers are tested on, at least
COMPARED = "weights compared"  # what `check_model` answers, with "config not compared" behind it where that is so
STRICT = ANOTHER, UNSEEN, UNKNOWN = "another function", "weights not compared", "config not compared"


@dataclass(frozen=True)
class Rank:
    """One process of a tensor-parallel group: its index, and how many there are."""

    index: int = 0
    size: int = 1

    def heads(self, query_heads: int) -> range:
        """The query heads of the model that this rank holds.

        Raises:
            ProfileError: the group cannot share so many heads.
        """
        if query_heads % self.size:
            raise ProfileError(
                f"{query_heads} query heads cannot be shared by {self.size} ranks: use a number of ranks that divides "
                "them (--tensor-parallel-size, --tp, or the processes of tp_plan)"
            )
        count = query_heads // self.size
        return range(self.index * count, (self.index + 1) * count)

    def kv_heads(self, kv_heads: int) -> range:
        """The KV heads that this rank holds: a share of them, or one that several ranks hold."""
        if kv_heads >= self.size:
            count = kv_heads // self.size
            return range(self.index * count, (self.index + 1) * count)
        head = self.index * kv_heads // self.size
        return range(head, head + 1)


class LayerFit(ServedLayer):
    """One layer of a profile on one rank.

    Attributes:
        fit: the profile on this rank.
        lengths: that the profile was calibrated at.
        tested: whether the self-test has looked at the layer; it is dense before.
    """

    def __init__(self, fit: ProfileFit, row: int) -> None:
        profile = fit.profile
        super().__init__(
            profile.geometry.layer_number(row), partial(profile.layer_config, row), profile.min_length, fit.rejected,
            max_length=fit.max_length, heads=fit.heads, ends_known=False,  # last rows are apart: `last_rows`
        )  # fmt: skip
        self.fit = fit
        self.lengths = profile.lengths
        self.tested = False
        of_buckets = [bucket[row] for bucket in profile.layers]
        limits = tuple(  # all that `why_dense` looks at
            (
                config.is_dense,
                config.scores,
                self._tile_obstacle(config),
                config.tile.dense_below,
                config.tile.tail_keys,
                fewest_queries(config.tile, fit.capability),
                config.shortest_segment,
            )
            for config in map(self.of_heads, of_buckets)
        )
        self._limits = fit.kinds.setdefault(limits, len(fit.kinds))  # one number, which takes no time to hash

    @property
    def kind(self) -> object:
        """Equal for layers that send the same requests to the stock backend."""
        return self._limits, self.rejected, self.past_budget

    def refuse(self, reason: str) -> None:
        """Let the stock backend compute the layer from now on, and log why."""
        self.rejected = reason
        log.error("S2O: layer %d is dense: %s", self.layer, reason)

    def _tile_obstacle(self, config: LayerConfig) -> str | None:
        """Why the device cannot run a configuration's tile; None if it can, or is a CPU, which runs the reference."""
        fit = self.fit
        if fit.capability == NO_GPU:
            return None
        return tile_obstacle(config.tile, fit.profile.geometry.head_dim, fit.capability)

    def why_dense(self, queries: int, keys: int) -> str | None:
        """Why a request of so many queries and keys is computed densely, by the stock backend; None if S2O does.

        Args:
            queries: new tokens of the request.
            keys: its tokens so far, the new ones included.
        """
        fit = self.fit
        if reason := fit.why_all_dense(queries, keys) or self.why_dense_at(keys):
            return reason
        config = self.config(keys)
        return self._tile_obstacle(config) or why_dense(config, fit.shape(queries, keys), fit.capability)


class ProfileFit:
    """A profile on one rank of a server.

    Attributes:
        profile: as it can run on the device.
        rejected: why nothing of it can, if so.
        made_for: the type of the KV cache that it was made for.
        obstacle: why no request runs it, whatever its length; None if some may.
        max_length: keys; more run dense. None for no limit.
        heads, kv_heads: of the model, those that this rank holds.
        capability: the device's, (0, 0) for a CPU.
        decode_queries: the most queries that a request brings while it decodes; such batches may be CUDA graphs.
        host_flops: requests that take fewer floating-point operations in a dense layer are dense.
        row_weights: of a layer's matrices on this rank, those that a row of a request meets.
        kinds: the limits within which layers are sparse, each with a number of its own.
        layers: of the profile, on this rank, in the order of its tables.
    """

    def __init__(
        self, profile: Profile, rank: Rank, device: torch.device, beyond: str = "dense", decode_queries: int = 1,
        host_flops: float = 0.0, row_weights: int = 0,
    ) -> None:  # fmt: skip
        self.profile, self.rejected = fitted(profile, device)
        self.made_for = profile.kv_cache_dtype
        self.max_length = longest_trusted(profile) if beyond == "dense" else None
        self.heads = rank.heads(profile.geometry.query_heads)
        self.kv_heads = rank.kv_heads(profile.geometry.kv_heads)
        self.capability, self.decode_queries = capability(device), decode_queries
        self.host_flops, self.row_weights = host_flops, row_weights
        self.kinds: dict[object, int] = {}
        self._used: set[int] = set()  # rows of the layers that this process has, which a stage of a pipeline finds out
        self._tested = False
        self._last_rows: dict[int, int] = {}  # by the length's step
        self.layers: tuple[LayerFit, ...] = tuple(LayerFit(self, row) for row in range(profile.geometry.layers))
        self.obstacle: str | None = self.rejected or (
            None if self.sparse_layers else "every layer of the profile is dense"
        )

    @cached_property
    def min_queries(self) -> int:
        """Fewer queries than this are computed by no layer; where none computes any, those of decoding."""
        tiles = [config.tile for bucket in self.profile.layers for config in bucket if not config.is_dense]
        fewest = min((fewest_queries(tile, self.capability) for tile in tiles), default=0)
        return max(fewest, self.decode_queries + 1)

    def shape(self, queries: int, keys: int) -> CallShape:
        """Of a request's call of one layer, on this rank."""
        head_dim = self.profile.geometry.head_dim
        return CallShape(1, len(self.heads), len(self.kv_heads), queries, keys, head_dim, head_dim)

    def why_all_dense(self, queries: int, keys: int) -> str | None:
        """Why no layer computes a request of so many queries and keys, whatever the profile says of it; else None."""
        if queries <= self.decode_queries:
            return DenseReason.DECODE
        shape = self.shape(queries, keys)
        attention = 4 * shape.causal_pairs * shape.query_heads * shape.head_dim
        return DenseReason.HOST if attention + 2 * queries * self.row_weights < self.host_flops else None

    def why_whole(self, max_q: int, max_k: int) -> str | None:
        """Why a batch whose requests have at most so many queries and keys is the stock backend's as a whole.

        None if a request may not be, or while a layer waits for its self-test. A server asks before it makes anything
        of a batch: code that has not run for milliseconds is slow on the host.
        """
        if self.obstacle is not None:
            return self.obstacle
        self._tested = self._tested or (bool(self._used) and all(self.layers[row].tested for row in self._used))
        return self.why_all_dense(max_q, max_k) if self._tested or max_k < TEST_KEYS else None

    def last_rows(self, queries: int, keys: int, left: int | None) -> int:
        """How many of a request's queries are dense in every layer because they are a prompt's last.

        Args:
            queries, keys: of the request.
            left: tokens of its prompt behind them; None if that is not known.
        """
        if left is None or keys < self.profile.min_length or self.why_all_dense(queries, keys):
            return 0
        step = length_step(keys)
        if step not in self._last_rows:
            layers = range(self.profile.geometry.layers)
            self._last_rows[step] = max(self.profile.layer_config(layer, keys).last_rows for layer in layers)
        return max(0, min(queries, self._last_rows[step] - left))

    @property
    def sparse_layers(self) -> int:
        """Layers that are sparse at some length."""
        return sum(
            any(not bucket[layer].is_dense for bucket in self.profile.layers)
            for layer in range(self.profile.geometry.layers)
        )

    def layer(self, number: int, num_heads: int, num_kv_heads: int, head_dim: int) -> LayerFit | str:
        """A decoder layer of the served model by its number, or why it is none of the profile's.

        Layers of another kind have no row in a profile's tables, nor have a draft model's.
        """
        expected = (len(self.heads), len(self.kv_heads), self.profile.geometry.head_dim)
        row = self.profile.geometry.row_of(number)
        if row is None or (num_heads, num_kv_heads, head_dim) != expected:
            return "the layer is none of the profile's"
        self._used.add(row)
        return self.layers[row]


class NoFit(ProfileFit):
    """What stands for a profile where none was found: every request is the stock backend's, for this reason."""

    made_for = "auto"

    def __init__(self, obstacle: str, decode_queries: int) -> None:
        self.obstacle, self.decode_queries, self.layers = obstacle, decode_queries, ()

    @cached_property
    def min_queries(self) -> int:
        """Fewer queries than this are decoding's, and not counted."""
        return self.decode_queries + 1

    def layer(self, number: int, num_heads: int, num_kv_heads: int, head_dim: int) -> str:
        """Why no layer of the served model has a profile."""
        assert self.obstacle is not None
        return self.obstacle


def row_weights(config: Any) -> int:
    """How many weights of a decoder layer's matrices a row meets, by a transformers configuration.

    Those of attention and of a gated MLP, or of the experts that a row is sent to; what a configuration does not say
    counts as none.
    """
    decoder = text_config(config)

    def size(name: str) -> int:
        value = getattr(decoder, name, None)
        return value if isinstance(value, int) else 0  # some have a list, of layers

    hidden, heads, experts = size("hidden_size"), size("num_attention_heads"), size("num_experts_per_tok")
    kv_heads, head_dim = size("num_key_value_heads") or heads, size("head_dim") or hidden // max(1, heads)
    inner = (experts and size("moe_intermediate_size")) or size("intermediate_size")
    return hidden * (2 * head_dim * (heads + kv_heads) + 3 * inner * max(1, experts))


def check_model(profile: Profile, config: Any, checkpoint: Path | None, refused: Sequence[str] = STRICT) -> str:
    """Check that a profile is of the model that is served. Returns what was compared, for the log.

    Args:
        profile: the profile.
        config: the model's transformers configuration.
        checkpoint: the folder of its safetensors files; None where it is not known.
        refused: what is, of `STRICT`; the rest is only reported. A profile of random weights, a rehearsal's, is not.

    Raises:
        ProfileError: it is of another model; the sentence names the difference. Other sizes are always refused.
    """
    try:
        served = geometry(config)
    except ModelError as error:
        raise ProfileError(f"the served model has no profiles: {error}") from error
    name = profile.model_name
    if difference := served.difference(profile.geometry):
        raise ProfileError(
            f"the profile is of {name} ({profile.geometry}) but the served model has {difference}: "
            "calibrate the model that you serve"
        )
    if profile.fingerprint.startswith(RANDOM):
        return "weights not compared: the profile is of random ones"
    calibrated, unseen = profile.fingerprint.partition("+")[0], ""
    hashes: tuple[str, ...] = (calibrated,)
    if getattr(config, "quantization_config", None) is not None:
        unseen = "their types differ between checkpoint and model"
    elif checkpoint is None or not (stored := checkpoint_hashes(checkpoint, config)):
        unseen = "the checkpoint has no safetensors files here"
    else:
        hashes = tuple(known for known in stored if known.startswith(calibrated)) or stored
        if not hashes[0].startswith(calibrated) and not names_are_known(config, checkpoint):
            unseen, hashes = "how transformers names those of such a model is not known", (calibrated,)
    mismatch = fingerprint_mismatch(compose_fingerprint(hashes[0], config), profile.fingerprint)
    sentences = {
        ANOTHER: mismatch and f"{mismatch} of {name}: calibrate the model that you serve, or",
        UNSEEN: unseen and f"weights not compared: {unseen}:",
        UNKNOWN: profile.config_unknown and f"{profile.config_unknown}, or",
    }
    for kind in refused:
        if sentences[kind]:
            raise ProfileError(f'{sentences[kind]} say "strict": false to serve it unproven')
    if mismatch:
        return f"{mismatch} of {name}: nothing is proven"
    weights = f"weights not compared: {unseen}" if unseen else COMPARED
    return f"{weights}, config not compared" if profile.config_unknown else weights


def weights_mismatch(profile: Profile, config: Any, checkpoint: Path | None) -> str | None:
    """Why a profile that was found is not known to be of the served model; None if it is. Args: `check_model`'s."""
    try:
        compared = check_model(profile, config, checkpoint, (ANOTHER, UNSEEN))
    except ProfileError as error:
        return str(error)
    return None if compared.startswith(COMPARED) else compared
