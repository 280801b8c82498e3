"""One attention layer of a model that transformers runs: its state, and what it computes."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple, cast, get_args
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attention.api import s2o_attention
from ..attention.compute import Attention, AttentionStats
from ..attention.dense import fastest_dense_attention
from ..call import Scoring, without_gradients
from ..config import HEAD_DIMS, KvCacheDtype, LayerConfig
from ..dense_reason import DenseReason
from ..errors import ModelError
from ..fields import Rule
from ..identity import find_decoder_attention, list_attention_modules
from ..layer_kinds import describe_kind, list_layer_kinds
from ..logs import log_once
from ..monitor.counters import DenseWatch, Meter
from ..monitor.drift import Drift, DriftMonitor, check_and_limits
from ..profile import Profile
from ..profile.profile import adapt_to_device
from ..profile.record import Reads
from ..quantisation import round_as_cached
from ..sequences import CallShape, needs_gradients
from ..serving.fit import Rank, ServedLayer, get_longest_trusted

STATE = "s2o_layer"  # attribute of a patched attention module
DENSE = "dense"  # in place of a profile's digest, of states that never run S2O
LongPromptPolicy = Literal["dense", "warn", "s2o"]
Implementations = list[tuple[Any, str]]  # configurations of transformers, each with its attention implementation
Observer = Callable[[int, Tensor, Tensor, Tensor, Scoring, Tensor], None]

log = logging.getLogger("s2o_runtime")

paths_taken: set[str] = set()  # by any layer of this process


class TransformersCall(NamedTuple):
    """The arguments of transformers' attention function."""

    module: nn.Module  # of attention
    q: Tensor  # [B, Hq, Lq, D]
    k: Tensor  # [B, Hkv, Lk, D]
    v: Tensor  # [B, Hkv, Lk, Dv]
    mask: Tensor | None
    options: Mapping[str, Any]  # the others by name, `scaling` and `dropout` among them

    @property
    def scoring(self) -> Scoring:
        """The factor of the scores, their cap and the sinks."""
        scale = self.options.get("scaling")
        scale = self.q.shape[3] ** -0.5 if scale is None else scale
        return Scoring(scale, self.options.get("softcap"), without_gradients(self.options.get("s_aux")))

    @property
    def obstacle(self) -> str | None:
        """The reason why S2O cannot do the layer's attention, whatever the prompt; None if it can."""
        return find_layer_obstacle(self.q.shape[3], self.v.shape[3])

    def check_supported(self) -> TransformersCall:
        """Return the call itself. Raises ModelError if S2O cannot do its attention."""
        if self.obstacle is not None:
            layer = getattr(self.module, "layer_idx", "?")
            raise ModelError(f"layer {layer} cannot run S2O ({self.obstacle}): the model is not supported")
        return self

    def compute(self, attention: Callable[..., tuple[Tensor, Any]]) -> Tensor:
        """Compute the call by another attention function of transformers: [B, Lq, Hq, Dv]."""
        return attention(self.module, self.q, self.k, self.v, self.mask, **self.options)[0]


def find_layer_obstacle(*head_dims: int) -> str | None:
    """Return why S2O cannot do a layer's attention, whatever the prompt, by the head dims of queries and values."""
    if max(head_dims) > HEAD_DIMS[-1]:
        return f"head_dim {max(head_dims)} is not supported by the kernel (up to {HEAD_DIMS[-1]})"
    return None


def is_causal(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Return whether a call is causal, by what transformers' SDPA function goes by."""
    causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


def expect_obstacle(module: nn.Module, config: Any) -> str | None:
    """Return what `find_layer_obstacle` will say of an attention module, whose parameters need not be in memory."""
    query_dim = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None) or 0
    return find_layer_obstacle(query_dim, getattr(module, "v_head_dim", None) or query_dim)


@dataclass(eq=False)
class LayerState(ServedLayer):
    """State of one patched attention layer, and what it has done."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # calls by path and reason
    last: AttentionStats | None = None  # of the last prefill
    # called with the layer's index, q, k, v, scoring and output after every plain causal prefill of unpadded prompts
    observer: Observer | None = None
    meter: Meter | None = field(default_factory=Meter)  # measures some of its calls
    watch: DenseWatch | None = None  # shared by the model's layers, warns if most calls are dense
    other_kind: str | None = None  # the reason of a layer that has no full attention and stays what it is
    hook: RemovableHandle | None = None  # of its module, removed when it is detached
    answer_rows: int | None = None  # of a budget of answers: a call that returns more of its last rows is dense
    reads: str = ""  # a sentence that says so
    previous: Implementations = field(default_factory=list)  # before `patch`, in the first layer that it attached
    source: str | None = None  # a digest of the profile, or DENSE; None where neither is known
    key: str = field(init=False)  # stands for the state in a compiled graph (`_make_key`)

    def __post_init__(self) -> None:
        self.key = _make_key(self.source, self.layer)
        _states[self.key] = self

    @property
    def density(self) -> float:
        """The mean density over the heads of the last prefill; reading it waits for the device."""
        return 1.0 if self.last is None else float(self.last.density.mean())

    def count(self, path: str, reason: str, queries: int = 1, keys: int = 0) -> None:
        """Count a call of so many queries and keys."""
        if not torch.compiler.is_compiling():  # logging would break the graph
            if (path, reason) not in self.counts:
                paths_taken.add(path)
                log_once(logging.INFO, "layers run %s: %s", path, reason)
            if self.watch is not None and queries > 1:
                self.watch.count(path, reason, keys)
        self.counts[path, reason] += 1

    def warn_of_mode(self, mode: DenseReason, keys: int) -> None:
        """Warn once of a prompt that is dense only because of the model's or autograd's mode, or of what is read."""
        if self.watch is not None and self.find_own_reason(keys) is None:
            self.watch.warn_of_mode(mode, keys)

    def find_read_reason(self, count_read_rows: Callable[[], int | DenseReason], keys: int) -> DenseReason | None:
        """Return why a call of so many keys is dense by the rows that its caller reads, None if it is not."""
        if self.answer_rows is None or self.other_kind or self.find_own_reason(keys):
            return None
        rows = count_read_rows()
        if isinstance(rows, int):
            if rows <= self.answer_rows:
                return None
            rows = DenseReason.ALL_LOGITS
        self.warn_of_mode(rows, keys)
        return rows

    def dense_reason(self, q: Tensor, k: Tensor, v: Tensor, obstacle: str | None) -> str | None:
        """Return why a prefill is dense before the op decides, None if it is not. Args: those of `attend`."""
        keys = k.shape[2]
        if reason := self.other_kind or obstacle or self.find_own_reason(keys):
            return reason
        if needs_gradients(q, k, v):  # the op has no backward pass
            self.warn_of_mode(DenseReason.GRADIENTS, keys)
            return DenseReason.GRADIENTS
        config = self.config(keys)
        if config.num_heads != q.shape[1]:
            return f"the profile is of {config.num_heads} query heads, the layer has {q.shape[1]} here"
        return DenseReason.NO_S2O_HEAD if config.is_dense else None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, kv_start: Tensor | None, obstacle: str | None = None
    ) -> Tensor:
        """Compute a causal prefill, S2O or dense unless there is an obstacle, and record it: [B, Hq, Lq, Dv].

        Args:
            q: [B, Hq, Lq, D]; the last query sees all keys.
            k, v: [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv].
            kv_start: the first key of each sequence, integers [B]; None if nothing is padded.
        """
        reason = self.dense_reason(q, k, v, obstacle)
        sample = None if self.meter is None else self.meter.begin(reason, q.device)
        if reason is None:
            result = self.run_s2o(q, k, v, scoring, kv_start)
            out, stats = result.out, result.stats
            assert stats is not None
            path, reason = "dense" if stats.backend == "dense" else "s2o", stats.reason
        else:
            out, stats, path = fastest_dense_attention(q, k, v, scoring, kv_start), None, "dense"
        self.last = stats
        self.count(path, reason, q.shape[2], k.shape[2])
        if self.meter is not None and sample is not None:
            self.meter.end(sample, (path, reason), stats, q.device)
        if self.drift is not None and path == "s2o":
            self.drift.see(q, k, v, out, scoring, kv_start)
        if self.observer is not None and kv_start is None:
            self.observer(self.layer, q, k, v, scoring, out)
        return out

    def run_s2o(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, kv_start: Tensor | None) -> Attention:
        """Run the op with the layer's configuration; it may still choose dense attention."""
        config, options = self.config(k.shape[2]), scoring.arguments()
        return s2o_attention(q, k, v, config, kv_start=kv_start, return_stats=True, **options)


@dataclass(eq=False)
class ServerLikeState(LayerState):
    """State of a layer that the calibrator measures as a server would run it.

    The observer sees keys and values as they were before they were rounded, and chunks as one prefill.
    """

    chunk: int | None = None  # queries of a call, as a server feeds long prompts; None for all
    kv_cache_dtype: KvCacheDtype = "auto"  # "fp8" rounds keys and values before S2O reads them
    last_density: float | None = None  # of the last prefill in chunks, where `last` is of its last chunk

    @property
    def density(self) -> float:
        """The mean density over the heads of the last prefill; reading it waits for the device."""
        return super().density if self.last_density is None else self.last_density

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, kv_start: Tensor | None, obstacle: str | None = None
    ) -> Tensor:
        """Compute a causal prefill chunk by chunk. Args, Returns: `LayerState.attend`'s."""
        self.last_density = None
        if self.chunk is None or q.shape[2] <= self.chunk:
            return super().attend(q, k, v, scoring, kv_start, obstacle)
        offset, outputs, computed, causal = k.shape[2] - q.shape[2], [], 0.0, 0
        observer, self.observer = self.observer, None
        try:
            for begin in range(0, q.shape[2], self.chunk):
                chunk = q[:, :, begin : begin + self.chunk]
                keys = offset + begin + chunk.shape[2]
                outputs.append(super().attend(chunk, k[:, :, :keys], v[:, :, :keys], scoring, kv_start, obstacle))
                pairs = CallShape(1, 1, 1, chunk.shape[2], keys, 1, 1).causal_pairs
                computed += pairs * super().density
                causal += pairs
        finally:
            self.observer = observer
        self.last_density = computed / causal
        out = torch.cat(outputs, 2)
        if self.observer is not None and kv_start is None:
            self.observer(self.layer, q, k, v, scoring, out)
        return out

    def run_s2o(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, kv_start: Tensor | None) -> Attention:
        """Run the op on keys and values as they are read from the cache."""
        k, v = round_as_cached(k, self.kv_cache_dtype), round_as_cached(v, self.kv_cache_dtype)
        return super().run_s2o(q, k, v, scoring, kv_start)


def attach(module: nn.Module, state: LayerState) -> None:
    """Give one attention module its state, whatever the model. For the calibrator; models are patched by `patch`."""
    setattr(module, STATE, state)


def detach(module: nn.Module) -> None:
    """Undo `attach`: the module has no profile, so it runs dense attention, whatever S2O_PROFILE says."""
    state: LayerState | None = module.__dict__.pop(STATE, None)
    if state is not None:
        _detached.add(module)
        if state.hook is not None:
            state.hook.remove()


def is_detached(module: nn.Module) -> bool:
    """Return whether a module had a state once, and lost it."""
    return module in _detached


def _make_key(source: str | None, layer: int) -> str:
    """Return a key that no other state of this process has or had.

    A graph holds the key as text, and torch's on-disk caches find a compiled graph by its text: so keys are the same in
    every process that patches its models in the same order. That is safe because a key is resolved in the process that
    runs the graph, to a layer of the same number of a profile with the same digest, which computes the same function of
    its inputs, or to nothing, which is an error. What two processes may do otherwise, such as `beyond` or drift checks,
    is decided by the state that is found. No key is issued twice: a copy, a model that is patched anew and a second
    model with the same profile get the next number, so that a graph never runs another model's layer in its place.
    A state without a source (the calibrator's and tests') may compute anything: its key is of this process alone.
    """
    return uuid4().hex if source is None else f"{source}:{layer}:{next(_issued[source, layer])}"


def find_state(key: str) -> LayerState:
    """Return the state that a compiled graph means. Raises ModelError if it is gone."""
    state = _states.get(key)
    if state is None:
        raise ModelError("the model of this compiled graph is gone: compile the new one")
    return state


_issued: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(count)  # numbers of keys, by source and layer
_states: weakref.WeakValueDictionary[str, LayerState] = weakref.WeakValueDictionary()
_detached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_model(model: object, profile: object = None) -> None:
    """Raise ModelError for what is no transformers model; `profile` is what `patch` was given besides."""

    def is_model(thing: object) -> bool:
        return hasattr(thing, "config") and hasattr(thing, "set_attn_implementation")

    if is_model(model):
        return
    name, other = type(model).__name__, type(profile).__name__
    if is_model(profile):
        raise ModelError(f"the model is a {name} and the profile a {other}: swap them, patch(model, profile)")
    raise ModelError(f"{name} is not a transformers model: load it with AutoModelForCausalLM")


def get_layer_states(model: nn.Module) -> list[LayerState]:
    """Return the states of a model's layers of full attention, in order. Raises ModelError if it is not patched."""
    try:
        return [module.__dict__[STATE] for module in list_attention_modules(model)]
    except KeyError as error:
        raise ModelError("the model is not patched: call s2o_runtime.patch(model, profile) first") from error


def list_states(model: nn.Module) -> list[LayerState]:
    """Return the states of all attention layers of a patched model, in order, also of those without a profile's row."""
    get_layer_states(model)  # which raises ModelError if it is not patched
    states = {module.__dict__.get(STATE) for modules in find_decoder_attention(model).values() for module in modules}
    return sorted((state for state in states if isinstance(state, LayerState)), key=lambda state: state.layer)


def pair_states(
    modules: Iterable[nn.Module], states: Iterable[LayerState], config: Any, query_heads: int | None = None
) -> list[tuple[nn.Module, LayerState]]:
    """Pair attention modules with the states of their layers; those of other kinds get states that leave them as is.

    The states learn which of the model's `query_heads` they have in this process; None where no state runs S2O. Raises
    ProfileError if the ranks of the process group cannot share so many heads.
    """
    by_layer, pairs = {state.layer: state for state in states}, []
    for module in modules:
        number = int(module.layer_idx)  # type: ignore[arg-type]
        if number not in by_layer:
            reason = describe_kind(list_layer_kinds(config)[number], config)
            by_layer[number] = LayerState(number, refuse_config, 0, other_kind=reason, meter=None, source=DENSE)
        elif query_heads is not None and by_layer[number].other_kind is None:
            by_layer[number].heads = find_local_heads(module, query_heads)
        pairs.append((module, by_layer[number]))
    return pairs


def refuse_config(length: int) -> LayerConfig:
    """Raise ModelError in place of the configuration of a layer that has none."""
    raise ModelError(f"a layer without a profile has no configuration for {length} keys")


def make_states(
    profile: Profile,
    device: torch.device | Sequence[torch.device],
    drift: Drift = None,
    beyond: LongPromptPolicy = "dense",
    rejected: str | None = None,
    reads: Reads | None = None,
) -> list[LayerState]:
    """Return a state for each layer of a profile, as it can run here; one log line says where S2O will run.

    Args:
        profile: of the model whose layers these are.
        device: where the model's attention runs; one for each layer where they are on several.
        drift, beyond, reads: as `patch` takes them, which also says what is raised.
        rejected: why no layer may run S2O, if that is known already.
    """
    check_policy(beyond)
    check, allowed = check_and_limits(profile, drift)
    devices = [device] * profile.geometry.layers if isinstance(device, torch.device) else list(device)
    fits = {
        here: (profile, rejected) if rejected else adapt_to_device(profile, here) for here in dict.fromkeys(devices)
    }
    rejected = next((why for _, why in fits.values() if why is not None), None)
    answer_rows, sentence = _limit_reads(profile, reads)
    longest, min_length = get_longest_trusted(profile), profile.min_length
    runs = profile.geometry, profile.fingerprint, profile.lengths, profile.layers
    digest = hashlib.sha256(repr(runs).encode()).hexdigest()  # of what decides what layers compute, as memory has it
    watch = None if rejected else DenseWatch(profile.geometry.layers, min_length)
    states = [
        LayerState(
            profile.geometry.get_layer_number(index),
            partial(fits[here][0].layer_config, index),
            min_length,
            rejected,
            max_length=None if beyond == "s2o" else longest,
            warn_beyond=beyond == "warn",
            watch=watch,
            answer_rows=answer_rows,
            reads=sentence,
            source=digest,
        )
        for index, here in enumerate(devices)
    ]
    if rejected is None:
        until, others = (f" to {longest}", "other") if beyond == "dense" else ("", "shorter")
        log.info(
            "S2O runs from %d%s tokens (calibrated at %s), %s prompts run dense%s",
            min_length, until, ", ".join(map(str, profile.lengths)), others, sentence and f"; {sentence}",
        )  # fmt: skip
    if check is not None:
        for state, errors in zip(states, allowed, strict=True):
            state.drift = DriftMonitor(check, state.layer, errors)
    return states


def _limit_reads(profile: Profile, reads: Reads | None) -> tuple[int | None, str]:
    """Return how many of its last rows a call may return to run S2O, None for all, and a sentence about it."""
    if profile.reads == "all":
        return None, ""
    if reads == "answers":
        return None, "the profile's budget is of answers, and the caller reads no others"
    configs = [config for bucket in profile.layers for config in bucket if not config.is_dense]
    # the last row is read of every prompt, whatever is exact
    rows = 0 if reads == "all" else max(1, min((config.last_rows for config in configs), default=1))
    return rows, f"the profile's budget is of answers: calls that return more than the last {rows} rows run dense"


def find_local_heads(attention: nn.Module, query_heads: int) -> range | None:
    """Return the query heads that an attention module computes in this process; None if all of them.

    Raises ProfileError if the ranks cannot share the model's `query_heads`.
    """
    # torch cuts the rows of the projections, which are DTensors then, into equal parts in the order of the ranks
    for parameter in attention.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        for dimension, placement in enumerate(getattr(parameter, "placements", ())):
            if mesh is not None and placement.is_shard() and mesh.size(dimension) > 1:
                return Rank(mesh.get_local_rank(dimension), mesh.size(dimension)).heads(query_heads)
    return None


def check_policy(beyond: str, name: str = "beyond") -> LongPromptPolicy:
    """Return the value itself, which is called by that name. Raises ConfigError if it is not known."""
    return cast(LongPromptPolicy, Rule(str, allowed=get_args(LongPromptPolicy)).checked(beyond, name))
