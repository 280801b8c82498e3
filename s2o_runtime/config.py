"""Every parameter of S2O attention, its range, and which combinations are legal.

docs/options.md explains the words. All classes are frozen and hashable, so a config can key a cache.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from .errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Unpack

Mode = Literal["s2o", "dense"]
Tail = Literal["none", "mean"]  # their numbers stand in a profile file
KvCacheDtype = Literal["auto", "fp8"]  # of a server's cache: the type of the inputs, or e4m3 with a scale of 1

HEAD_DIMS = (64, 128, 256)  # others up to the last are filled with zeros
SEGMENT_STEP = 64
MIN_SEGMENT = 64
MAX_SEGMENT = 1 << 16
MAX_TAU = 1e6
MAX_CHUNK = 64
MAX_KEYS = (1 << 31) - 1
KEY_BLOCK = 4  # adjacent keys that are ranked and visited together, a step; 1 in the paper
REPRESENTATIVES = (1, 16)
LAST_ROWS = (0, 128, 256, 512)
LOOKBACKS = (64, 128, 256)
LOOKBACK = 128  # by default, and of profiles that were measured without any


class StopRule(IntEnum):
    """The rule by which a row tile stops visiting its prefix, by the gain of its last chunk of keys.

    The gain is what the chunk added to the softmax denominator, relative to it, for each tile of the chunk. The
    numbers are those of the tensor `stop_rule` in a profile file. Written in lower case: "rest", "paper".
    """

    REST = 0
    """Stop once all keys that are left would add less than `tau` if each added as much as the keys just visited.

    One tau then means nearly the same at every length and tile size. This is the rule that the calibrator uses.
    """
    PAPER = 2
    """Stop once a tile's gain is below `tau` (Algorithm 3 of the paper). The text "raw" names it too."""

    @classmethod
    def parse(cls, text: str) -> StopRule:
        """Return the rule that a text names. Raises ConfigError if no rule has this name.

        >>> StopRule.parse("raw")
        <StopRule.PAPER: 2>
        """
        rules = {str(rule): rule for rule in cls} | {"raw": cls.PAPER}
        if text in rules:
            return rules[text]
        raise ConfigError(f"stop_rule {text!r} is not known: use one of {', '.join(map(str, cls))}")

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:  # an IntEnum's own would print the number
        return format(str(self), spec)


@dataclass(frozen=True)
class HeadConfig:
    """The settings of one query head: how much of its prefix it computes.

    >>> HeadConfig(tau=0.3, segment=1024, representatives=16, tail="mean").mode
    's2o'
    """

    tau: float = 0.0  # the threshold of the stop rule; 0 never stops (exact attention)
    segment: int = 512  # queries that share one ranking; a multiple of 64
    mode: Mode = "s2o"  # "dense" computes every causal pair and ignores all other fields
    stop_rule: StopRule = StopRule.REST  # says what is compared with tau
    # The segment is cut into this many parts, and the mean query of each ranks the keys with a softmax of its own; a
    # key counts with its largest weight. 1 is the paper's mean of the whole segment.
    representatives: int = 1
    tail: Tail = "none"  # keys after the stop count for nothing, or ("mean") their mean value estimates them

    def validate(self) -> HeadConfig:
        """Return the config itself. Raises ConfigError for a field that is out of its range."""
        _check_one_of(self, "mode", get_args(Mode), "is not known")
        if not isinstance(self.stop_rule, StopRule):
            raise ConfigError(f"stop_rule {self.stop_rule!r} is not a StopRule: use one of {list(StopRule)}")
        is_number = isinstance(self.tau, (int, float)) and not isinstance(self.tau, bool)  # also numpy's float64
        if not is_number or not 0.0 <= self.tau <= MAX_TAU:
            raise ConfigError(f"tau {self.tau!r} is out of range: use a number from 0 to {MAX_TAU:g}")
        _check_within(self, "segment", MIN_SEGMENT, MAX_SEGMENT, f"use {MIN_SEGMENT} to {MAX_SEGMENT}")
        if self.segment % SEGMENT_STEP:
            raise ConfigError(f"segment {self.segment} is not a multiple of {SEGMENT_STEP}: round it")
        _check_one_of(self, "representatives", REPRESENTATIVES)
        _check_one_of(self, "tail", get_args(Tail), "is not known")
        return self


class HeadOptions(TypedDict, total=False):
    """The fields of `HeadConfig` as optional arguments; `stop_rule` may be a text that `StopRule.parse` reads."""

    tau: float
    segment: int
    mode: Mode
    stop_rule: StopRule | str
    representatives: int
    tail: Tail


@dataclass(frozen=True)
class TileConfig:
    """The shape of the kernel's work on one GPU.

    `block_m`, `block_n` and `chunk` also decide where a head may stop, so the reference follows them too. `validate`
    checks what holds on every GPU; `tiles.find_tile_obstacle` names what a GPU cannot run of it.

    >>> TileConfig(block_m=64, block_n=64, chunk=4).stride  # keys between two stop checks
    256
    """

    block_m: int = 128  # query rows of a tile (BM)
    block_n: int = 64  # keys of a tile (BN)
    chunk: int = 4  # tiles between two stop checks
    num_warps: int = 8
    num_stages: int = 2
    # Use the kernel for sm_90, some warps of which only copy. There a program computes two row tiles, `num_warps` is
    # the warps of each and `num_stages` the stages of its ring.
    specialized: bool = False
    # A whole prompt of fewer keys than this is faster with dense attention on this GPU, however early heads stop, and
    # so is every call with fewer query-key pairs than such a prompt.
    dense_below: int = 0
    # Fewer queries than this behind a longer prefix are faster with dense attention on this GPU, because they rank all
    # of it for little. At least 2, so that a decode step never ranks; 0 where it was not measured: then the GPU's
    # default holds (`tiles.get_fewest_queries`).
    min_queries: int = 0
    # From so many keys on, `min_queries` was measured for calls whose prefix is at least as long as their queries, so
    # that it alone decides about them, and not `dense_below`. With fewer keys, but at least `dense_below`, as much work
    # as that of `min_queries` is enough too (`CallShape.is_little_for`). 0 where it was not measured: then both decide.
    tail_keys: int = 0

    @property
    def stride(self) -> int:
        """Keys between two stop checks."""
        return self.block_n * self.chunk

    def count_chunk(self, splits: int) -> int:
        """Count the tiles between two stop checks of one of so many programs that share the keys of a row tile."""
        return max(1, self.chunk // splits)

    @property
    def rows(self) -> int:
        """Query rows of one program: they share one order of keys, so their number divides every segment."""
        return self.block_m * (2 if self.specialized else 1)

    def __str__(self) -> str:
        warps = "ws" if self.specialized else f"w{self.num_warps}"
        return f"{self.block_m}x{self.block_n}x{self.chunk} {warps} s{self.num_stages}"

    def validate(self) -> TileConfig:
        """Return the config itself. Raises ConfigError for a field out of its range, or one that fits no kernel."""
        _check_one_of(self, "block_m", (64, 128, 256))
        _check_one_of(self, "block_n", (32, 64, 128))
        _check_one_of(self, "num_warps", (4, 8))
        _check_one_of(self, "num_stages", (1, 2, 3, 4, 5, 6))
        _check_within(self, "chunk", 1, MAX_CHUNK, f"use 1 to {MAX_CHUNK} tiles")
        if self.block_m >= 128 and self.num_warps < 8:
            raise ConfigError(f"block_m {self.block_m} with {self.num_warps} warps spills registers: use 8 warps")
        _check_within(self, "dense_below", 0, MAX_KEYS, "use a number of keys")
        least = 2 if self.min_queries else 0
        _check_within(self, "min_queries", least, MAX_KEYS, "use at least 2 queries, or 0 for the GPU's default")
        _check_within(self, "tail_keys", 0, MAX_KEYS, "use a number of keys, or 0 for no tail")
        if not isinstance(self.specialized, bool):
            raise ConfigError(f"specialized is {self.specialized!r}: use True or False")
        return self


@dataclass(frozen=True)
class LayerConfig:
    """One attention layer: a `HeadConfig` for each query head and the tile they share.

    >>> LayerConfig((HeadConfig(tau=0.3), HeadConfig(mode="dense"))).is_dense
    False
    """

    heads: tuple[HeadConfig, ...]
    tile: TileConfig = TileConfig()
    # So many keys before a segment are always visited, and up to a tile more (`sequences.find_window_start`): without
    # them the first rows of a segment, whose neighbours they are, erred up to 50 times their layer's mean.
    lookback: int = LOOKBACK
    last_rows: int = 0  # so many queries at the end of each sequence run dense (`find_first_dense_row`)

    @classmethod
    def uniform(
        cls,
        num_heads: int,
        *,
        tile: TileConfig | None = None,
        lookback: int = LOOKBACK,
        last_rows: int = 0,
        **head: Unpack[HeadOptions],
    ) -> LayerConfig:
        """Return a layer with the same settings, fields of `HeadConfig`, for all heads. Raises as `validate`.

        >>> LayerConfig.uniform(32, tau=0.1, segment=1024).heads[31].tau
        0.1
        """
        fields: dict[str, Any] = dict(head)
        if isinstance(rule := head.get("stop_rule"), str):
            fields["stop_rule"] = StopRule.parse(rule)
        every_head = HeadConfig(**fields)
        return cls((every_head,) * num_heads, tile or TileConfig(), lookback, last_rows).validate()

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return len(self.heads)

    @property
    def segment(self) -> int:
        """The segment of the first head, which all heads of a calibrated layer share."""
        return self.heads[0].segment

    @cached_property
    def is_dense(self) -> bool:
        """True if every head is dense."""
        return all(head.mode == "dense" for head in self.heads)

    @cached_property
    def shortest_segment(self) -> int:
        """The shortest segment of the heads that are not dense; 0 if all are."""
        return min((head.segment for head in self.heads if head.mode == "s2o"), default=0)

    @cached_property
    def has_tail(self) -> bool:
        """True if any head that is not dense estimates the keys after its stop."""
        return any(head.mode == "s2o" and head.tail == "mean" for head in self.heads)

    def find_first_dense_row(self, q_len: int) -> int:
        """Return the first of the last rows of a sequence of `q_len` queries that run dense; `q_len` if none do.

        Programs run dense as a whole, so up to `tile.rows - 1` rows before the last `last_rows` do too. The rows before
        them are what they would be without: rankings are of whole segments, and row tiles stop by themselves.

        >>> LayerConfig.uniform(1, last_rows=256).find_first_dense_row(1000)  # row tiles of 128
        640
        """
        return find_first_dense_row(q_len, self.last_rows, self.tile.rows)

    def as_dense(self) -> LayerConfig:
        """Return the layer with every head dense."""
        heads = tuple(replace(head, mode="dense") for head in self.heads)
        return replace(self, heads=heads, last_rows=0)

    def as_exact(self) -> LayerConfig:
        """The same layer with S2O that never stops, so that it computes dense attention."""
        heads = (replace(head, tau=0.0) for head in self.heads)
        return replace(self, heads=tuple(heads))

    def with_tile(self, tile: TileConfig) -> LayerConfig:
        """Return the layer with another tile. Raises ConfigError as `validate` does."""
        return replace(self, tile=tile).validate()

    def validate(self) -> LayerConfig:
        """Return the config itself; only the first call checks it, because every call of the op validates.

        Raises ConfigError for no heads, a field of the layer, its tile or a head that is out of its range, or a head's
        segment that the rows of the tile do not divide.
        """
        _ = self._checked
        return self

    @cached_property
    def _checked(self) -> bool:
        if not self.heads:
            raise ConfigError("a layer has no heads: give one HeadConfig per query head")
        _check_one_of(self, "lookback", LOOKBACKS)
        _check_one_of(self, "last_rows", LAST_ROWS)
        self.tile.validate()
        for index, head in enumerate(self.heads):
            head.validate()
            if head.mode == "s2o" and head.segment % self.tile.rows:
                raise ConfigError(
                    f"segment {head.segment} of head {index} is not a multiple of {self.tile.rows}, the rows of "
                    f"tile {self.tile}: a tile may not cross a segment's end"
                )
        return True

    def as_text(self) -> str:
        """Return the layer as JSON, of which `torch_op.config_from_text` makes it again.

        It is text, not a key of this process, because compiled graphs are cached for other processes.
        """
        distinct = list(dict.fromkeys(self.heads))
        heads = [vars(head) for head in distinct]
        fields: dict[str, Any] = {name: getattr(self, name) for name in ("lookback", "last_rows")}
        fields["tile"] = vars(self.tile)
        return json.dumps(fields | {"heads": heads, "head": [distinct.index(head) for head in self.heads]})

    # While torch.compile traces, it calls the method and takes the text for a constant of the config. This is what
    # torch.compiler.assume_constant_result does, but that imports torch._dynamo, which takes a second. It is a method
    # because torch 2.11 takes no frozen dataclass for an argument of such a function.
    as_text._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @cached_property
    def identity(self) -> object:
        """A token of this very config: as part of a cache's key it takes no time to hash and to compare."""
        return object()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[LayerConfig], tuple[object, ...]]:
        fields = self.heads, self.tile, self.lookback, self.last_rows
        return LayerConfig, fields  # without the hash, which is valid in one process only

    @cached_property
    def _hash(self) -> int:  # computed once: a config is the key of several caches
        return hash(self.__reduce__()[1])


def find_first_dense_row(q_len: int, last_rows: int, rows: int) -> int:
    """Return `LayerConfig.find_first_dense_row` for programs of `rows` rows."""
    return max(q_len - last_rows, 0) // rows * rows if last_rows else q_len


def convert_to_json(config: HeadConfig | LayerConfig) -> dict[str, Any]:
    """Return the fields of a config as JSON can hold them, with every stop rule as its text."""

    def make_dict(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, StopRule) else value for name, value in fields}

    return asdict(config, dict_factory=make_dict)


def _check_one_of(config: object, name: str, allowed: tuple[object, ...], wrong: str = "is not supported") -> None:
    value = getattr(config, name)
    if value not in allowed or type(value) is not type(allowed[0]):  # True equals 1, and 64.0 equals 64
        raise ConfigError(f"{name} {value!r} {wrong}: use one of {allowed}")


def _check_within(config: object, name: str, low: int, high: int, advice: str) -> None:
    value = getattr(config, name)
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name} {value!r} is out of range: {advice}")
