"""A profile as one rank of a server runs it: its layers, and the one function that says why a request is dense."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.backend import find_dense_reason
from ..config import KvCacheDtype, LayerConfig
from ..dense_reason import DenseReason
from ..devices import get_capability
from ..errors import ModelError, ProfileError
from ..identity import RANDOM, compose_fingerprint, explain_mismatch, geometry
from ..layer_kinds import describe_window, get_text_config
from ..lengths import find_nearest
from ..logs import log_once
from ..monitor.drift import DriftMonitor
from ..profile import Profile
from ..profile.profile import adapt_to_device
from ..sequences import CallShape
from ..tiles import find_tile_obstacle, get_fewest_queries
from .checkpoint import has_known_names, hash_checkpoint

TRUSTED_BEYOND = 1.5  # a profile's settings hold up to this many times its longest calibrated length
NO_GPU = (0, 0)  # the capability of a CPU
TEST_KEYS = 256  # of a prompt that layers are tested on, at least
COMPARED = "weights compared"  # what `check_model` answers, with "config not compared" behind it where that is so
STRICT = ANOTHER, UNSEEN, UNKNOWN = "another function", "weights not compared", "config not compared"
PLAIN_CACHES = ("auto", "float16", "bfloat16", "float32")  # of the types that queries have
FP8_CACHES = ("fp8", "fp8_e4m3", "float8_e4m3fn")
WEIGHTS_ONLY = ("awq", "bitsandbytes", "gguf", "gptq", "mxfp4")  # quantisations that leave activations as they are
NOT_IN_PROFILE = "the layer is none of the profile's"

log = logging.getLogger("s2o_runtime")


class Request(NamedTuple):
    """One request's rows in a batch."""

    queries: int  # new tokens
    keys: int  # all tokens so far
    own_reason: DenseReason | None = None  # why the stock backend computes it in every layer, whatever its sizes
    is_last_rows: bool = False  # a prompt's last ones, which are dense (`LayerConfig.last_rows`)
    left: int = 0  # tokens of its prompt behind these; none where that is not known

    @property
    def length(self) -> int:
        """The tokens of the whole prompt, as far as they are known, by which its settings are chosen.

        A budget is a mean over a prompt's rows, so a chunk that ran a shorter prompt's settings would have another
        error and another density than its prompt has.
        """
        return self.keys + self.left

    @property
    def is_unread(self) -> bool:
        """True if no row of it is the last of a prompt, of which alone the next token is read."""
        return self.left > 0 and not self.is_last_rows


@dataclass(eq=False)
class ServedLayer:
    """The settings of one layer, and the prompts that they are for."""

    layer: int  # the number of the decoder layer, which counters and logs name
    config_at: Callable[[int], LayerConfig]  # for the tokens of a prompt
    min_length: int  # shorter prompts stay dense
    rejected: str | None = None  # the reason why the layer cannot run S2O at all, if so
    max_length: int | None = None  # longer ones stay dense too, or with warn_beyond run S2O after one warning
    warn_beyond: bool = False
    heads: range | None = None  # of the layer's query heads, those that this process computes; None for all
    drift: DriftMonitor | None = None  # checks the layer's error
    ends_known: bool = True  # calls hold the ends of their prompts, so last rows are dense (`LayerConfig.last_rows`)
    configs: dict[LayerConfig, LayerConfig] = field(default_factory=dict)  # this process's, by the whole layer's
    tested: bool = False  # a server's self-test has looked at the layer, which is dense before
    skips_unread: bool = False  # rows that nothing reads are zeros, as no layer comes behind this one
    limits: int = 0  # equal for layers between whose settings `RankProfile.dense_reason` tells no difference

    def config(self, length: int) -> LayerConfig:
        """Return the configuration of this process's heads for a prompt; lengths that share one get one object."""
        whole = self.config_at(length)
        if whole not in self.configs:
            config = self.select_heads(whole)
            self.configs[whole] = config if self.ends_known else replace(config, last_rows=0)
        return self.configs[whole]

    def select_heads(self, config: LayerConfig) -> LayerConfig:
        """Return a configuration of the whole layer, cut to the heads of this process."""
        if self.heads is None:
            return config
        return replace(config, heads=config.heads[self.heads.start : self.heads.stop])

    @property
    def dense_verdict(self) -> str | None:
        """The reason why the layer is dense whatever the prompt, by a refusal or the drift check; None if it is not."""
        drift = self.drift
        return self.rejected or (drift.verdict if drift is not None and drift.check.action == "dense" else None)

    @property
    def plan_key(self) -> object:
        """A value that is equal for layers which leave the same requests to the stock backend."""
        return self.limits, self.dense_verdict, self.skips_unread

    def refuse(self, reason: str) -> None:
        """Leave the layer to the stock backend from now on, and log why."""
        self.rejected = reason
        log.error("S2O: layer %d is dense: %s", self.layer, reason)

    def find_own_reason(self, length: int) -> str | None:
        """Return the reason why a prompt of so many tokens is dense by the profile and the checks so far, or None.

        `ProfileFit.dense_reason` asks this too; transformers' calls leave the rest to `attention.backend`.
        """
        if reason := self.dense_verdict:
            return reason
        if length < self.min_length:
            return DenseReason.TOO_SHORT.fill_in(self.min_length)
        if self.max_length is not None and length > self.max_length:
            if not self.warn_beyond:
                return DenseReason.TOO_LONG.fill_in(self.max_length, TRUSTED_BEYOND)
            log_once(
                logging.WARNING,
                "a prompt has more than %d keys, 1.5 times the longest calibrated length: its errors were not proven, "
                "calibrate with longer --lengths",
                self.max_length,
            )
        return None


def get_longest_trusted(profile: Profile) -> int:
    """Return the most keys for which a profile's settings are taken to hold."""
    return int(TRUSTED_BEYOND * profile.lengths[-1])


@dataclass(frozen=True)
class Rank:
    """One process of a tensor-parallel group: its index, and how many there are."""

    index: int = 0
    size: int = 1

    def heads(self, query_heads: int) -> range:
        """Return the query heads of the model that this rank holds.

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
        """Return the KV heads that this rank holds: a share of them, or one that several ranks hold."""
        count = max(1, kv_heads // self.size)
        first = self.index * count if kv_heads >= self.size else self.index * kv_heads // self.size
        return range(first, first + count)


class RankProfile:
    """A profile on one rank of a server: what it can run on the device, and the reason why nothing of it can, if so.

    Attributes:
        made_for: the type of the KV cache that the profile was made for; reads: the rows that its budget is about.
        obstacle: the reason why no request runs it, whatever its length; None if some may.
        heads, kv_heads: of the model, those that this rank holds.
        decode_queries: the most queries that a request brings while it decodes; such batches may be CUDA graphs.
        min_queries: fewer are computed by no layer; where none computes any, one more than decoding brings.
        host_flops: requests that take this rank fewer floating-point operations in a dense layer are dense, because the
            host would decide, whose time no number of ranks divides; 0 until it is measured.
        row_weights: of a layer's matrices on this rank, those that a row of a request meets.
        layers: of the profile, on this rank, in the order of its tables.
        off_file: while it exists, the stock backend computes all new batches. Ranks need not agree on a batch, since
            each computes its own heads.
    """

    off_file: Path | None = None

    def __init__(
        self,
        profile: Profile,
        rank: Rank,
        device: torch.device,
        beyond: str = "dense",
        decode_queries: int = 1,
        row_weights: int = 0,
    ) -> None:
        self.profile, self.rejected = adapt_to_device(profile, device)
        self.made_for, self.reads = profile.kv_cache_dtype, profile.reads
        self.max_length = get_longest_trusted(profile) if beyond == "dense" else None
        self.heads = rank.heads(profile.geometry.query_heads)
        self.kv_heads = rank.kv_heads(profile.geometry.kv_heads)
        self.capability, self.decode_queries = get_capability(device), decode_queries
        self.host_flops, self.row_weights = 0.0, row_weights
        self._used: set[int] = set()  # rows of the layers that this process has, which a stage of a pipeline finds out
        self._all_tested = False
        self._last_rows = [max(config.last_rows for config in bucket) for bucket in self.profile.layers]
        known_limits, layers = dict[object, int](), list[ServedLayer]()
        for row, buckets in enumerate(zip(*self.profile.layers, strict=True)):
            layer = ServedLayer(
                profile.geometry.get_layer_number(row), partial(self.profile.layer_config, row), profile.min_length,
                self.rejected, self.max_length, heads=self.heads, ends_known=False,  # see `count_last_rows`
            )  # fmt: skip
            # all that `dense_reason` reads of a configuration; a number takes no time to hash
            limits = tuple((c.is_dense, c.tile, c.shortest_segment) for c in map(layer.select_heads, buckets))
            layer.limits = known_limits.setdefault(limits, len(known_limits))
            layers.append(layer)
        self.layers: tuple[ServedLayer, ...] = tuple(layers)
        tiles = [config.tile for bucket in self.profile.layers for config in bucket if not config.is_dense]
        self.obstacle: str | None = self.rejected or (None if tiles else "every layer of the profile is dense")
        fewest = min((get_fewest_queries(tile, self.capability) for tile in tiles), default=0)
        self.min_queries = max(fewest, decode_queries + 1)

    def dense_reason(self, request: Request, layer: ServedLayer | None = None) -> str | None:
        """Return the reason why the stock backend computes a request in a layer; None if S2O does.

        Without a layer: the reason why it does so in all of them, whatever the profile has for them.
        """
        if request.queries <= self.decode_queries:
            return DenseReason.DECODE
        head_dim = self.profile.geometry.head_dim
        shape = CallShape(1, len(self.heads), len(self.kv_heads), request.queries, request.keys, head_dim, head_dim)
        # two operations for each of a pair's numbers in scores and values, and for each weight that a row meets
        attention = 4 * shape.causal_pairs * shape.query_heads * head_dim
        if attention + 2 * request.queries * self.row_weights < self.host_flops:
            return DenseReason.HOST
        if layer is None:
            return None
        if reason := layer.find_own_reason(request.length):
            return reason
        if layer.skips_unread and request.is_unread and request.own_reason is None:
            return DenseReason.UNREAD
        config = layer.config(request.length)
        if self.capability != NO_GPU and (obstacle := find_tile_obstacle(config.tile, head_dim, self.capability)):
            return obstacle  # a CPU runs the reference, which takes any tile
        if reason := find_dense_reason(config, shape, self.capability):
            return reason
        return request.own_reason or (DenseReason.LAST_ROWS if request.is_last_rows else None)

    def find_fewest_keys(self, chunk: int, most: int) -> int | None:
        """Return the fewest keys, in steps of 256 and at most `most`, of which some layer computes a chunk; or None.

        chunk: new tokens; of fewer keys all are new.
        """
        unlike = {layer.limits: layer for layer in self.layers}.values()
        for keys in range(self.profile.min_length, most + 1, 256):
            request = Request(min(chunk, keys), keys)
            if any(self.dense_reason(request, layer) is None for layer in unlike):
                return keys
        return None

    def batch_reason(self, largest: Request) -> str | None:
        """Return the reason why the stock backend computes a batch as a whole; None if S2O may have a part in it.

        `largest` has the most queries and the most keys of the batch's requests. A server asks before it makes anything
        of a batch: code that has not run for milliseconds is slow on the host.
        """
        if self.obstacle is not None:
            return self.obstacle
        if self.is_switched_off:
            return DenseReason.SWITCHED_OFF
        self._all_tested = self._all_tested or (bool(self._used) and all(self.layers[row].tested for row in self._used))
        # a layer that waits for its self-test needs to see the first batch that is long enough
        return self.dense_reason(largest) if self._all_tested or largest.keys < TEST_KEYS else None

    @property
    def is_switched_off(self) -> bool:
        """True while the settings' file exists: a look takes microseconds, once a batch with prompts."""
        return self.off_file is not None and os.path.exists(self.off_file)

    def count_last_rows(self, queries: int, keys: int, left: int | None) -> int:
        """Count the queries that are dense in every layer as a prompt's last; `left` of its tokens are behind them."""
        request = Request(queries, keys, left=left or 0)
        if left is None or request.length < self.profile.min_length or self.dense_reason(request):
            return 0
        return max(0, min(queries, self._last_rows[find_nearest(self.profile.lengths, request.length)] - left))

    def skip_unread_rows(self) -> bool:
        """Let the model's last layer compute no rows that nothing reads; return False if that may change others.

        A budget of all rows is about them, and a layer of another kind may be the last one.
        """
        row = self.profile.geometry.find_row(self.profile.geometry.decoder_layers - 1)
        if row is None or self.reads == "all":
            return False
        self.layers[row].skips_unread = True
        return True

    def find_layer(self, number: int, num_heads: int, num_kv_heads: int, head_dim: int) -> ServedLayer | str:
        """Return a decoder layer of the served model by its number, or the reason why it has no profile."""
        if self.obstacle is not None:
            return self.obstacle
        expected = (len(self.heads), len(self.kv_heads), self.profile.geometry.head_dim)
        row = self.profile.geometry.find_row(number)  # layers of another kind have none, nor have a draft model's
        if row is None or (num_heads, num_kv_heads, head_dim) != expected:
            return NOT_IN_PROFILE
        self._used.add(row)
        return self.layers[row]


class NoProfile(RankProfile):
    """The stand-in where no profile was found: every request is the stock backend's, for this reason."""

    made_for, reads = "auto", "all"

    def __init__(self, obstacle: str, decode_queries: int) -> None:
        self.obstacle, self.decode_queries, self.layers = obstacle, decode_queries, ()
        self.min_queries = decode_queries + 1  # the batches of decoding are not counted


def find_layer_obstacle(
    *, attn_type: str = "decoder", sliding_window: int | None = None, alibi: bool = False
) -> str | None:
    """Return the reason why a layer never runs S2O, by what a server makes it with; None if it may."""
    if attn_type != "decoder":
        return f"the layer's attention is of type {attn_type}"
    if sliding_window is not None:
        return describe_window(sliding_window)
    return "the layer has ALiBi slopes" if alibi else None


def find_cache_obstacle(kv_cache_dtype: str, made_for: KvCacheDtype = "auto") -> str | None:
    """Return the reason why no layer runs S2O over a cache of this type, as a server calls it; None if layers may."""
    # a profile that was made for an fp8 cache keeps to its errors in one that does not round, too
    if kv_cache_dtype in PLAIN_CACHES or (kv_cache_dtype in FP8_CACHES and made_for == "fp8"):
        return None
    hint = ", which the profile was not made for" if kv_cache_dtype in FP8_CACHES else ""
    return f"the KV cache is {kv_cache_dtype}{hint}"


def find_scales_obstacle(*scales: float | Tensor | None) -> str | None:
    """Return the reason why a layer runs no S2O over an fp8 cache with these scales; None if they are 1.

    The calibrator rounds with a scale of 1. Reading those of a tensor waits for the device.
    """
    for scale in scales:
        numbers = torch.as_tensor(1.0 if scale is None else scale)
        if not bool((numbers == 1).all()):
            return f"the fp8 cache has scales up to {float(numbers.max()):g}, the profile was made for 1"
    return None


def find_shared_scale(config: Any, method: str | None) -> str | None:
    """Return the reason that a layer's rows may be rounded with one scale for all, so that zeros move others; or None.

    config: the model's transformers configuration; method: its quantisation as the server calls it, None for none.
    """
    described = getattr(config, "quantization_config", None) or {}
    described = described if isinstance(described, Mapping) else described.to_dict()
    method = described.get("quant_method") or method
    if method is None or method in WEIGHTS_ONLY:
        return None
    if method == "fp8" and described.get("weight_block_size") is not None:  # and scales of rows' blocks
        return None
    groups = described.get("config_groups", {}).values()
    strategies = {(group.get("input_activations") or {}).get("strategy", "token") for group in groups}
    if strategies and strategies <= {"token", "group"}:
        return None
    return f"activations may be rounded with one scale for all rows ({method})"


def log_obstacle(obstacle: str | None) -> str | None:
    """Log why layers are the stock backend's, each reason once in a process; return the reason."""
    if obstacle is not None:
        log_once(logging.INFO, "S2O: layers go to the stock backend as a whole: %s", obstacle)
    return obstacle


def count_row_weights(config: Any) -> int:
    """Count the weights of a decoder layer's matrices that a row meets, by a transformers configuration.

    Experts count as far as a row is sent to them; what a configuration does not say counts as none.
    """
    decoder = get_text_config(config)

    def size(name: str) -> int:
        value = getattr(decoder, name, None)
        return value if isinstance(value, int) else 0  # some have a list, of layers

    hidden, heads, experts = size("hidden_size"), size("num_attention_heads"), size("num_experts_per_tok")
    kv_heads, head_dim = size("num_key_value_heads") or heads, size("head_dim") or hidden // max(1, heads)
    inner = (experts and size("moe_intermediate_size")) or size("intermediate_size")
    return hidden * (2 * head_dim * (heads + kv_heads) + 3 * inner * max(1, experts))


def check_model(profile: Profile, config: Any, checkpoint: Path | None, refused: Sequence[str] = STRICT) -> str:
    """Check that a profile is of the model that is served; return what was compared, for the log.

    A profile of random weights, a rehearsal's, is compared by its sizes alone.

    Args:
        profile, config: the profile, and the model's transformers configuration.
        checkpoint: the folder of its safetensors files; None where it is not known.
        refused: what is, of `STRICT`; the rest is only reported.

    Raises:
        ProfileError: it is of another model; the sentence names the difference. Other sizes are always refused.
    """
    try:
        served = geometry(config)
    except ModelError as error:
        raise ProfileError(f"the served model has no profiles: {error}") from error
    name = profile.model_name
    if difference := served.describe_difference(profile.geometry):
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
    elif checkpoint is None or not (stored := hash_checkpoint(checkpoint, config)):
        unseen = "the checkpoint has no safetensors files here"
    else:
        hashes = tuple(known for known in stored if known.startswith(calibrated)) or stored
        if not hashes[0].startswith(calibrated) and not has_known_names(config, checkpoint):
            unseen, hashes = "how transformers names those of such a model is not known", (calibrated,)
    mismatch = explain_mismatch(compose_fingerprint(hashes[0], config), profile.fingerprint)
    sentences = {
        ANOTHER: mismatch and f"{mismatch} of {name}: calibrate the model that you serve, or",
        UNSEEN: unseen and f"weights not compared: {unseen}:",
        UNKNOWN: profile.config_unknown and f"{profile.config_unknown}, or",
    }
    for check in refused:
        if sentences[check]:
            raise ProfileError(f'{sentences[check]} say "strict": false to serve it unproven')
    if mismatch:
        return f"{mismatch} of {name}: nothing is proven"
    weights = f"weights not compared: {unseen}" if unseen else COMPARED
    return f"{weights}, config not compared" if profile.config_unknown else weights


def find_mismatch(profile: Profile, config: Any, checkpoint: Path | None) -> str | None:
    """Return the reason why a profile that was found is not known to be of the served model, or None."""
    try:
        compared = check_model(profile, config, checkpoint, (ANOTHER, UNSEEN))
    except ProfileError as error:
        return str(error)
    return None if compared.startswith(COMPARED) else compared
