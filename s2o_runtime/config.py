"""Every parameter of S2O attention, its range, and which combinations are legal.

The words are those of DESIGN section 3. All classes are frozen and hashable, so a config can key a cache.
"""

from __future__ import annotations

import itertools
import math
import weakref
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from s2o_runtime.errors import ConfigError

if TYPE_CHECKING:
    from s2o_runtime.baselines.settings import Baseline

Mode = Literal["s2o", "dense", "blocks"]
Threshold = Literal["rest", "share", "raw"]
RowReduce = Literal["mean", "max"]

HEAD_DIMS = (64, 128, 256)  # others up to the last are filled with zeros
SEGMENT_STEP = 64
MIN_SEGMENT = 64
MAX_SEGMENT = 1 << 16
MAX_TAU = 1e6
REPRESENTATIVES = (1, 2, 4, 8, 16, 32, 64)
GRAINS = (1, 2, 4, 8)


@dataclass(frozen=True)
class HeadConfig:
    """How one query head attends to its prefix.

    tau: stop once the gain of a tile falls below it; 0 never stops (exact attention).
    segment: queries that share one ranking; a multiple of 64.
    mode: "dense" computes every causal pair from contiguous tiles and ignores all other fields; "blocks" computes
        the blocks of keys that `blocks`, another method, selects, and ignores all others.
    threshold: "raw" compares the gain with `tau` (Algorithm 3 of the paper); "share" with
        `tau * tile keys / prefix keys`, the gain a tile would bring if every key counted alike;
        "rest" stops once all keys that are left would together gain less than `tau` if each brought as much as
        those just visited. With "share" and "rest" one tau serves every length and tile size.
    representatives: means of so many parts of the segment rank its keys, each by its own softmax, the largest
        weight counts; 1 is the paper's mean of the whole segment.
    tail: add what the skipped keys are estimated to bring (docs/method.md).
    """

    tau: float = 0.0
    segment: int = 512
    mode: Mode = "s2o"
    threshold: Threshold = "rest"
    representatives: int = 1
    tail: bool = False
    blocks: Baseline | None = None

    def validate(self) -> HeadConfig:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode {self.mode!r} is not known: use one of {get_args(Mode)}")
        if self.threshold not in get_args(Threshold):
            raise ConfigError(f"threshold {self.threshold!r} is not known: use one of {get_args(Threshold)}")
        if not _is_number(self.tau) or not 0.0 <= self.tau <= MAX_TAU:
            raise ConfigError(f"tau {self.tau!r} is out of range: use a number from 0 to {MAX_TAU:g}")
        if not _is_int(self.segment) or not MIN_SEGMENT <= self.segment <= MAX_SEGMENT:
            raise ConfigError(f"segment {self.segment!r} is out of range: use {MIN_SEGMENT} to {MAX_SEGMENT}")
        if self.segment % SEGMENT_STEP:
            raise ConfigError(f"segment {self.segment} is not a multiple of {SEGMENT_STEP}: round it")
        if self.representatives not in REPRESENTATIVES or not _is_int(self.representatives):
            raise ConfigError(
                f"representatives {self.representatives!r} is not supported: use one of {REPRESENTATIVES}"
            )
        if not isinstance(self.tail, bool):
            raise ConfigError(f"tail is {self.tail!r}: use True or False")
        if (self.mode == "blocks") != (self.blocks is not None):
            raise ConfigError(f'mode is "{self.mode}" and blocks {self.blocks}: give a method with mode "blocks" only')
        if self.blocks is not None:
            self.blocks.validate()
        return self


@dataclass(frozen=True)
class TileConfig:
    """The shape of the kernel's work on one GPU.

    block_m, block_n: rows and keys of a tile (BM, BN); chunk: tiles between two stop checks;
    num_warps, num_stages: Triton's launch options; specialized: the kernel for sm_90 with warps that only
    copy, where a program computes two row tiles, `num_warps` is that of each and `num_stages` the depth of its
    ring. `block_m`, `block_n` and `chunk` also decide where a head may stop, so the reference follows them too.
    dense_below: fewer keys than this and dense attention is faster on this GPU, whatever the density.
    """

    block_m: int = 128
    block_n: int = 64
    chunk: int = 4
    num_warps: int = 8
    num_stages: int = 2
    specialized: bool = False
    dense_below: int = 0

    @property
    def stride(self) -> int:
        """Keys between two stop checks."""
        return self.block_n * self.chunk

    @property
    def rows(self) -> int:
        """Query rows of one program; they share one order, so it divides every segment."""
        return self.block_m * (2 if self.specialized else 1)

    def __str__(self) -> str:
        kind = "ws" if self.specialized else f"w{self.num_warps}"
        return f"{self.block_m}x{self.block_n}x{self.chunk} {kind} s{self.num_stages}"

    def validate(self) -> TileConfig:
        ranges = {
            "block_m": (64, 128, 256),
            "block_n": (32, 64, 128),
            "num_warps": (4, 8),
            "num_stages": (1, 2, 3, 4, 5, 6),
        }
        for name, allowed in ranges.items():
            if getattr(self, name) not in allowed or not _is_int(getattr(self, name)):
                raise ConfigError(f"{name} {getattr(self, name)!r} is not supported: use one of {allowed}")
        if not _is_int(self.chunk) or not 1 <= self.chunk <= 64:
            raise ConfigError(f"chunk {self.chunk!r} is out of range: use 1 to 64 tiles")
        if self.block_m >= 128 and self.num_warps < 8:
            raise ConfigError(f"block_m {self.block_m} with {self.num_warps} warps spills registers: use 8 warps")
        if not _is_int(self.dense_below) or not 0 <= self.dense_below < 1 << 31:
            raise ConfigError(f"dense_below {self.dense_below!r} is out of range: use a number of keys")
        if not isinstance(self.specialized, bool):
            raise ConfigError(f"specialized is {self.specialized!r}: use True or False")
        if self.specialized and (self.block_m, self.num_warps) != (64, 4):
            raise ConfigError(f"tile {self} has no specialised kernel: use block_m 64 and 4 warps")
        if self.specialized and (self.block_n < 64 or self.num_stages < 2):
            raise ConfigError(f"tile {self} has no specialised kernel: use block_n 64 or 128, 2 stages or more")
        return self


@dataclass(frozen=True)
class LayerConfig:
    """One attention layer: a `HeadConfig` for each query head and the tile they share.

    row_reduce: how the rows of a tile become one decision: the mean of their gains, or the largest.
    grain: so many adjacent keys are ranked and visited together; 1 is the paper's.
    """

    heads: tuple[HeadConfig, ...]
    tile: TileConfig = TileConfig()
    row_reduce: RowReduce = "mean"
    grain: int = 1

    @classmethod
    def uniform(
        cls,
        num_heads: int,
        *,
        tau: float = 0.0,
        segment: int = 512,
        mode: Mode = "s2o",
        threshold: Threshold = "rest",
        representatives: int = 1,
        tail: bool = False,
        tile: TileConfig | None = None,
        row_reduce: RowReduce = "mean",
        grain: int = 1,
    ) -> LayerConfig:
        """The same settings for all `num_heads` query heads.

        >>> LayerConfig.uniform(32, tau=0.1, segment=1024).heads[31].tau
        0.1
        """
        head = HeadConfig(tau, segment, mode, threshold, representatives, tail)
        return cls((head,) * num_heads, tile or TileConfig(), row_reduce, grain).validate()

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @property
    def is_dense(self) -> bool:
        return all(head.mode == "dense" for head in self.heads)

    @cached_property
    def block_heads(self) -> tuple[int, ...]:
        """The heads that another method than S2O computes."""
        return tuple(index for index, head in enumerate(self.heads) if head.mode == "blocks")

    def with_tile(self, tile: TileConfig) -> LayerConfig:
        return replace(self, tile=tile).validate()

    def validate(self) -> LayerConfig:
        _ = self.number  # checked once: every call of the op validates
        return self

    @cached_property
    def number(self) -> int:
        """What stands for this config where an object cannot, such as a compiled graph."""
        self._check()
        number = next(_numbers)
        _numbered[number] = self
        return number

    def _check(self) -> None:
        if not self.heads:
            raise ConfigError("a layer has no heads: give one HeadConfig per query head")
        if self.row_reduce not in get_args(RowReduce):
            raise ConfigError(f"row_reduce {self.row_reduce!r} is not known: use one of {get_args(RowReduce)}")
        if self.grain not in GRAINS or not _is_int(self.grain):
            raise ConfigError(f"grain {self.grain!r} is not supported: use one of {GRAINS}")
        self.tile.validate()
        for index, head in enumerate(self.heads):
            head.validate()
            if head.mode == "s2o" and head.segment % self.tile.rows:
                raise ConfigError(
                    f"segment {head.segment} of head {index} is not a multiple of {self.tile.rows}, the rows of "
                    f"tile {self.tile}: a tile may not cross a segment's end"
                )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[LayerConfig], tuple[object, ...]]:
        return LayerConfig, (self.heads, self.tile, self.row_reduce, self.grain)  # a hash holds in one process only

    @cached_property
    def _hash(self) -> int:  # a config keys caches in every call
        return hash((self.heads, self.tile, self.row_reduce, self.grain))


def numbered_config(number: int) -> LayerConfig:
    """The config with this number. Raises ConfigError if nothing keeps it any more."""
    config = _numbered.get(number)
    if config is None:
        raise ConfigError(f"config {number} is gone: keep the LayerConfig as long as what was compiled with it")
    return config


_numbers = itertools.count()
_numbered: weakref.WeakValueDictionary[int, LayerConfig] = weakref.WeakValueDictionary()


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
