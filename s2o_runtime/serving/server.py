"""S2O inside a server: its settings, its profile, and its reports."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..attention.api import s2o_attention_varlen
from ..attention.paged import IN_PLACE_ELEMENTS, gather_keys, s2o_attention_paged
from ..attention.warmup import SEGMENTS, SPLIT_CALL, THREADS
from ..call import Scoring
from ..config import LayerConfig
from ..dense_reason import DenseReason
from ..errors import ConfigError, ModelError, ProfileError, S2OError
from ..fields import DURATION, Rule, get_rules, validated_field
from ..files import hash_file
from ..monitor.counters import Counters, serve_metrics
from ..monitor.drift import HEAD_CAP, Action, DriftChoice, DriftMonitor, check_and_limits
from ..profile import load_profile
from ..profile.find import OFF, find_profile, read_named
from ..sequences import PagedKeys
from ..version import __version__
from . import fit
from .attend import exact_config
from .batch import BatchSlice, make_call
from .fit import NoProfile, Rank, RankProfile, Request

Beyond = Literal["dense", "s2o"]
Mode = Literal["s2o", "shadow"]


@dataclass(frozen=True)
class Settings:
    """The settings of a server."""

    # a file; None for the profile that `s2o_runtime.profile.find` finds for the served model; OFF for none
    profile: Path | None = validated_field(None, Rule(Path, optional=True))
    # what prompts of more than 1.5 times the longest calibrated length run
    beyond: Beyond = validated_field("dense", Rule(str, allowed=get_args(Beyond)))
    # in shadow mode the server's own backend answers, and S2O computes beside it in one of so many calls of a layer
    mode: Mode = validated_field("s2o", Rule(str, allowed=get_args(Mode)))
    shadow_every: int = validated_field(16, Rule(int, low=1))
    # while this file exists, no new batch runs S2O
    off_file: Path | None = validated_field(None, Rule(Path, optional=True))
    # where sampled errors are past the profile's limits: "auto" runs dense from then on, where it has limits
    drift: DriftChoice = validated_field("auto", Rule(str, allowed=get_args(DriftChoice)))
    # refuse another function of the same sizes, and what cannot be compared; else that is reported, nothing is proven
    strict: bool = validated_field(True, Rule(bool))
    # of the first process's counters for Prometheus, the others' behind it, at an address of this machine, or 0.0.0.0
    metrics_port: int | None = validated_field(None, Rule(int, low=1, high=65535, optional=True))
    metrics_host: str = validated_field("127.0.0.1", Rule(str))
    # seconds between two summaries of the counters in the log; 0 for none
    log_every: float = validated_field(300.0, Rule(float, low=0, unit=DURATION))

    @classmethod
    def from_section(cls, section: Any, name: str) -> Settings:
        """Read a section that a user gave, which errors call by name; for want of a profile, take S2O_PROFILE's.

        Raises:
            ConfigError: a setting is unknown or illegal.
        """
        if not isinstance(section, Mapping):
            raise ConfigError(f'{name} is {section!r}: use an object, {{"profile": FILE}}')
        rules = get_rules(cls)
        for setting in section:
            if setting not in rules:
                raise ConfigError(f'"{setting}" is not a setting of {name}: use {", ".join(sorted(rules))}')
        given = dict(section) | {"profile": section.get("profile") or read_named()}
        return cls(**{setting: rules[setting].checked(value, setting) for setting, value in given.items()})


BLIND_DRAFTERS = ("draft_model", "ngram", "ngram_gpu", "standalone", "suffix")  # which read no hidden states
# A dense layer must take the GPU so many times as long as the host takes to start a call of S2O again and again: in a
# batch a layer takes the host two to three times that, and S2O leaves the GPU about half of its work.
HOST_MARGIN = 5
REPEATS = 60  # of what is timed at start: their launches, at most nine each, must not fill the GPU's queue of 1024
SIDE = 4096  # of the matrices whose product says how fast the GPU is
CACHE_SHARE = 0.9  # of the GPU's memory, at most
RANKING_BYTES = 480 << 20  # the most that the kernels of one call need beside their inputs and output

log = logging.getLogger("s2o_runtime")


@dataclass(frozen=True)
class Process:
    """One of a server's processes: its number among all, its pipeline stage and its data-parallel replica."""

    number: int = 0
    stage: int = 0
    replica: int = 0


@dataclass(frozen=True)
class ServerContext:
    """The surroundings of S2O in a server's process."""

    engine: str  # the server's name and version
    stock: str  # the stock backend's name
    model_config: Any  # transformers' configuration of the served model
    checkpoint: Path | None  # the folder of its weights, if it is known
    rank: Rank  # of this process, among those that share the heads of its layers
    device: torch.device  # of this process
    max_keys: int  # of the longest prompt that the server takes
    chunk: int  # new tokens of a step, at most
    decode_queries: int = 1  # the most that a request brings while it decodes, more than one with speculation
    process: Process = Process()
    kv_cache_dtype: str = "auto"  # which it also is where layers differ
    obstacle: str | None = None  # another reason, known at start, why no layer will run S2O
    reads_all: DenseReason | None = None  # the same, under a budget of answers
    quantisation: str | None = None  # of the model, as the server calls it
    drafter: str | None = None  # the method of speculative decoding


@contextmanager
def log_start_failures() -> Iterator[None]:
    """Log an error that ends a server's start as one line too: the server prints much around it."""
    try:
        yield
    except S2OError as error:
        log.error("S2O cannot start: %s", error)
        raise


class Server:
    """The profile of a server, on one rank; `obstacle` says why nothing will run S2O, if that is known at start.

    Raises:
        ProfileError: the profile cannot be read, or is of another model or for another number of ranks.
        ConfigError: S2O_PROFILES names no folder.
    """

    def __init__(self, settings: Settings, context: ServerContext) -> None:
        self.fit, source, digest = _load_fit(settings, context)
        cache = fit.find_cache_obstacle(context.kv_cache_dtype, self.fit.made_for)
        if self.fit.reads == "answers" and self.fit.obstacle is None:
            self.fit.obstacle = context.reads_all
        self.obstacle = self.fit.obstacle or context.obstacle or cache
        self.max_keys = context.max_keys
        self.fit.off_file = settings.off_file
        shadow_every = settings.shadow_every if settings.mode == "shadow" else 0
        build = __version__, digest, settings.mode
        self.counters = Counters(settings.log_every, shadow_every, build, self.is_enabled)
        self._check_drift(settings, context.rank)
        if settings.metrics_port is not None:
            host, port = settings.metrics_host, settings.metrics_port + context.process.number
            labels = {"rank": context.rank.index, "pp": context.process.stage, "dp": context.process.replica}
            try:
                serve_metrics(self.counters, host, port, {name: str(number) for name, number in labels.items()})
            except OSError as error:
                log.warning(
                    "S2O's counters are not served at %s, port %d (%s): use another metrics_port, or a metrics_host "
                    "that is an address of this machine",
                    host, port, error,
                )  # fmt: skip
        self._reserved_rows, self._context, self._source = 0, context, source
        if self.obstacle or context.device.type != "cuda":  # a GPU's is logged when the host's time is known
            self.log_start()
        if self.fit.reads == "answers" and not self.obstacle and not shadow_every:
            self._skip_unread_rows(context)

    def is_enabled(self) -> bool:
        """Return whether S2O may run: nothing at start was in its way, and it is not switched off."""
        return not self.obstacle and not self.fit.is_switched_off

    def _skip_unread_rows(self, context: ServerContext) -> None:
        """Let the last layer compute no rows that nothing reads, unless something does; log it with the rest."""
        drafts = context.drafter is not None and context.drafter not in BLIND_DRAFTERS
        needed = f"the drafter {context.drafter} may read hidden states" if drafts else None
        needed = needed or fit.find_shared_scale(context.model_config, context.quantisation)
        if needed is None and not self.fit.skip_unread_rows():
            needed = "it is of another kind"
        log.info(
            "S2O: the profile's budget is of answers: requests for prompt log-probabilities, scores, embeddings or "
            "hidden states are dense, and the model's last layer computes %s",
            "only rows that are read" if needed is None else f"all rows: {needed}",
        )

    def _check_drift(self, settings: Settings, rank: Rank) -> None:
        """Give the layers their drift monitors, which check every sampled call."""
        if not self.fit.layers:
            return
        check, allowed = check_and_limits(self.fit.profile, settings.drift, "S2O: ")
        if check is None:
            return
        action: Action = "warn" if settings.drift == "warn" else "dense"
        # the profile has the errors of whole layers, and a rank's heads may spend up to this multiple of their part
        margin = check.margin * min(rank.size, HEAD_CAP)
        check = replace(check, every=1, action=action, margin=margin)
        for layer, errors in zip(self.fit.layers, allowed, strict=True):
            layer.drift = DriftMonitor(check, layer.layer, errors)
            self.counters.drift[layer.layer] = layer.drift

    def log_start(self) -> None:
        """Log one line that says what will run where, a warning if nothing will."""
        context, fit = self._context, self.fit
        if self.obstacle:
            start = f"S2O {__version__} in {context.engine}: all rows go to {context.stock}: {self.obstacle}"
            log.warning(start)
            return
        most = min(context.max_keys, fit.max_length or context.max_keys)
        chunk = min(context.chunk, most)
        if fewest := fit.find_fewest_keys(chunk, most):
            runs = f"sparse from {fewest} to {most} keys and from {fit.min_queries} new tokens on in chunks of {chunk}"
        else:
            larger = (1 << power for power in range(chunk.bit_length(), most.bit_length()))
            hint = next((f": use chunks of {tokens}" for tokens in larger if fit.find_fewest_keys(tokens, most)), "")
            reason = fit.dense_reason(Request(chunk, most), fit.layers[0])
            runs = f"sparse, but in chunks of {chunk} never up to {most} keys ({reason}){hint}"
        profile, rank, heads = fit.profile, context.rank, fit.heads
        sparse = sum(any(not config.is_dense for config in row) for row in zip(*profile.layers, strict=True))
        others = f"with full attention ({profile.geometry.other_layers} stay) " if profile.geometry.others else ""
        message = (
            f"S2O {__version__} in {context.engine}: profile {self._source}, {sparse} of {len(fit.layers)} layers "
            f"{others}{runs}; rank {rank.index} of {rank.size} holds query heads {heads.start} to {heads.stop - 1}; "
            f"all else goes to {context.stock}"
        )
        log.log(logging.INFO if fewest else logging.WARNING, message)

    def reserve(self, query: Tensor, scoring: Scoring) -> None:
        """Take, and give back, the most memory that a call of these queries, [T, Hq, D], will need.

        The first time compile the kernels, measure the host and log the start.
        """
        # vLLM does so while it measures the memory of a batch, and its KV cache gets the rest; SGLang behind its cache
        if query.device.type != "cuda" or self.obstacle or len(query) <= self._reserved_rows:
            return  # the profiling run comes first and has the most rows; smaller runs capture graphs
        compiled, self._reserved_rows = self._reserved_rows > 0, len(query)
        keys_and_values = 2 * self.max_keys * len(self.fit.kv_heads) * query.shape[2] * query.element_size()
        output = query.numel() * query.element_size()
        torch.empty(RANKING_BYTES + keys_and_values + output, dtype=torch.uint8, device=query.device)
        if not compiled:
            if calls := self.compile_kernels(query, scoring):
                self.fit.host_flops = HOST_MARGIN * measure_host_flops(calls[0], query)
            self.log_start()

    def compile_kernels(self, query: Tensor, scoring: Scoring) -> list[Callable[[], object]]:
        """Run one small call of every configuration with kernels of its own, so that no request waits for them.

        Threads share the work, because Triton leaves Python's lock while it compiles. The calls to come are of the type
        of `query`, [T, Hq, D], and on its device. Returns functions that run such calls again.
        """
        by_kernels, lengths = dict[object, LayerConfig](), self.fit.profile.lengths
        for layer in self.fit.layers:
            for config in (*map(layer.config, lengths), exact_config(layer, lengths)):
                if config is not None and not config.is_dense:
                    by_kernels.setdefault(_kernels_key(config), config)
        at_once = min(THREADS, os.cpu_count() or 1) if query.is_cuda else 1  # Triton's interpreter is for one
        in_pages = (True, False) if self._may_be_copied(query) else (True,)
        with ThreadPoolExecutor(at_once) as threads:
            cases = product(by_kernels.values(), in_pages)
            calls = [threads.submit(self._run_small, *case, query, scoring) for case in cases]
        repeated = []
        for call in calls:
            try:
                repeated.append(call.result())
            except Exception as error:  # its layers are refused when they are called
                self.counters.count_fault(-1, error)
        return repeated

    def _may_be_copied(self, query: Tensor) -> bool:
        """Return whether a layer's cache, of a share of the GPU's memory, may be too large for kernels to read."""
        if not query.is_cuda:
            return False
        elements = torch.cuda.get_device_properties(query.device).total_memory // query.element_size()
        return CACHE_SHARE * elements / self.fit.profile.geometry.decoder_layers >= IN_PLACE_ELEMENTS

    def _run_small(self, config: LayerConfig, in_pages: bool, query: Tensor, scoring: Scoring) -> Callable[[], object]:
        """Run the lengths at which a configuration's kernels differ, over the pages of a cache or over a copy.

        Returns a function that runs the last of them again.
        """
        segment, kv_heads, page, device = config.shortest_segment, len(self.fit.kv_heads), 16, query.device
        lengths = sorted({min(count * segment, len(query)) for count in SEGMENTS})  # a batch has no more
        for queries, keys in [*((length, length + segment) for length in lengths), SPLIT_CALL]:
            q = query.new_zeros(queries, config.num_heads, query.shape[2])
            cache = query.new_zeros(2, 1, page, kv_heads, query.shape[2])
            seq_lens = torch.tensor([keys], dtype=torch.int32, device=device)
            table = torch.zeros(1, -(-keys // page), dtype=torch.int32, device=device)
            cu_q, span = torch.tensor([0, queries], device=device), BatchSlice(0, 1, 0, queries, 0, queries, keys, keys)
            arguments = make_call(span, cu_q.int(), seq_lens, table, page)
            if in_pages:
                run = partial(s2o_attention_paged, q, *cache, config, **arguments)
            else:
                k, v = query.new_zeros(2, keys, kv_heads, query.shape[2])
                starts = arguments["cu_q"], arguments["cu_k"]
                run = partial(s2o_attention_varlen, q, k, v, *starts, queries, keys, config)
            run = partial(run, **scoring.arguments(), backend="triton")
            run()
            # what a check of drift reads
            gather_keys(PagedKeys(cache[0], cache[1], table, arguments["cu_k"], keys, keys), query.dtype)
        return run


def measure_host_flops(call: Callable[[], object], like: Tensor) -> float:
    """Return the operations of a matrix product that the GPU does while the host starts a call; waits for the GPU.

    like: a tensor on the GPU, of the type of the matrices.
    """
    from torch.utils.benchmark import Timer  # brings numpy, which servers have

    square = torch.randn(SIDE, SIDE, dtype=like.dtype, device=like.device)
    host = Timer("call()", globals={"call": call}, timer=time.perf_counter)  # the default one waits for the GPU
    gpu = Timer("square @ square", globals={"square": square})
    return 2 * SIDE**3 * host.timeit(REPEATS).mean / gpu.timeit(REPEATS).mean


def _load_fit(settings: Settings, context: ServerContext) -> tuple[RankProfile, str, str]:
    """Load the profile that the settings name, or one that is found, if any; return its name and digest too."""
    model, checkpoint, decode_queries = context.model_config, context.checkpoint, context.decode_queries
    if settings.profile not in (None, Path(OFF)):
        path, profile = settings.profile, load_profile(settings.profile)
        compared = fit.check_model(profile, model, checkpoint, fit.STRICT if settings.strict else ())
        source = f"{settings.profile} of {profile.model_name} ({compared})"
    else:
        try:
            is_other = partial(fit.find_mismatch, config=model, checkpoint=checkpoint)
            match = find_profile(model, context.device, is_other, checkpoint, settings.profile)
        except (ProfileError, ModelError) as error:
            return NoProfile(str(error), decode_queries), "", ""
        path, profile = match.path, match.profile
        source = f"{match}{', config not compared' if profile.config_unknown else ''}"
    work = decode_queries, fit.count_row_weights(model) // context.rank.size
    rank_profile = RankProfile(profile, context.rank, context.device, settings.beyond, *work)
    return rank_profile, source, hash_file(path)


def _kernels_key(config: LayerConfig) -> object:
    """Return the parts of a configuration that make other kernels."""
    heads, tile = [head for head in config.heads if head.mode == "s2o"], config.tile
    counts = tuple(sorted({head.representatives for head in heads}))
    shape = tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, tile.specialized
    modes = frozenset(head.mode for head in config.heads)
    # short segments are scored more at once, and heads of several modes start in turns
    return shape, counts, config.has_tail, config.shortest_segment, modes
