"""Tiles: the shapes of work that each kernel is compiled for on each GPU, and the rule of which tiles are legal.

This is the one place that knows tiles by GPU. `find_tile_obstacle` decides whether the prefill kernels can run a tile
that a profile or a user brings; the tables hold the tiles that are worth running, and tests/aot.py compiles them all.
A new tile goes into a table here; a new GPU generation is a new key of every table and of `SHARED_MEMORY`.
"""

from __future__ import annotations

from functools import lru_cache

from .config import HEAD_DIMS, TileConfig
from .errors import InputError

Capability = tuple[int, int]  # CUDA's compute capability: (9, 0) is sm_90

MIN_CAPABILITY: Capability = (8, 0)
FP8_CAPABILITY: Capability = (8, 9)  # kernels on older GPUs cannot read 8-bit floating point
SPECIALIZED_CAPABILITY: Capability = (9, 0)  # wgmma as the specialised kernel issues it exists on sm_90 only
SPECIALIZED_ROWS, SPECIALIZED_WARPS = 64, 4  # of a row tile; a program computes two

# The most shared memory one block may use, in bytes, by family (CUDA programming guide, table of compute capabilities).
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


_Shape = tuple[int, int, int, int, bool]  # block_m, block_n, warps, stages, specialized

# Prefill tiles by family and head dim. wgmma (sm_90) and tcgen05 (sm_100) read operands from shared memory, which
# leaves registers for larger tiles. The specialised tile of 256 fills them and the shared memory: more keys at once or
# another stage fit neither (docs/results/head-dim-256-h200.txt).
_PREFILL: dict[int, dict[int, list[_Shape]]] = {
    80: {
        64: [(128, 64, 8, 3, False), (128, 64, 8, 2, False), (64, 64, 8, 2, False)],
        128: [(128, 32, 8, 3, False), (64, 64, 8, 3, False), (64, 32, 8, 3, False)],
    },
    89: {
        64: [(128, 64, 8, 3, False), (128, 64, 8, 2, False), (64, 64, 4, 2, False)],
        128: [(128, 32, 8, 3, False), (64, 64, 8, 2, False), (64, 32, 8, 3, False)],
    },
    90: {
        64: [(64, 128, 4, 3, True), (64, 128, 4, 4, True), (128, 64, 8, 3, False), (64, 64, 4, 2, False)],
        128: [(64, 128, 4, 2, True), (64, 128, 4, 3, True), (128, 64, 8, 3, False), (64, 64, 4, 2, False)],
        256: [(64, 64, 4, 2, True), (64, 32, 8, 2, False)],
    },
    100: {
        64: [(128, 32, 8, 3, False), (128, 128, 8, 2, False), (64, 64, 8, 3, False)],
        128: [(128, 64, 8, 3, False), (128, 32, 8, 3, False), (64, 32, 4, 3, False)],
        256: [(64, 64, 8, 2, False), (64, 32, 8, 2, False)],
    },
    120: {
        64: [(128, 64, 8, 3, False), (64, 64, 8, 2, False), (64, 64, 4, 2, False)],
        128: [(128, 32, 8, 3, False), (64, 64, 8, 2, False), (64, 32, 8, 3, False)],
    },
}

# The fewest queries behind a longer prefix that are worth ranking it for, where no calibration measured it for the tile
# (`TileConfig.min_queries`). On an H200 a layer that computes a quarter of its pairs ties with dense from 256 queries
# on behind 8192 keys, from 512 behind 4096, and with 1024 behind 2048 it does not (docs/results/bench-tails-h200.json).
MIN_QUERIES = 1024
DECODE = 2  # queries: fewer are a decode step, which never ranks


def format_capability(capability: Capability) -> str:
    """Return the name of a compute capability: "sm_90" for (9, 0)."""
    return f"sm_{capability[0]}{capability[1]}"


def get_family(capability: Capability) -> int | None:
    """Return the key of the tables for a compute capability, such as 90; None where no kernel was ever compiled."""
    major, minor = capability
    if major == 8 and minor:
        return 89  # sm_86 and sm_87 too
    number = major * 10
    return number if number in SHARED_MEMORY and (major != 9 or not minor) else None


def list_families() -> str:
    """Return the GPU generations that the kernels are compiled for, as text."""
    return ", ".join(f"sm_{number}" for number in SHARED_MEMORY)


def pad_head_dim(head_dim: int) -> int:
    """Return the head dim that the prefill kernels run `head_dim` as, filled with zeros. Raises InputError if none."""
    if head_dim > HEAD_DIMS[-1]:
        raise InputError(
            f"head_dim {head_dim} is larger than {HEAD_DIMS[-1]}, the largest the kernels support: run it dense"
        )
    return min(size for size in HEAD_DIMS if size >= head_dim)


def find_tile_obstacle(tile: TileConfig, head_dim: int, capability: Capability) -> str | None:
    """Return the reason that no prefill kernel runs a valid tile on a GPU; None if the tile is legal there.

    It is a clause that names the tile, the head dim or the GPU, without an end: the caller says what happens instead.
    """
    if head_dim > HEAD_DIMS[-1]:
        return f"head_dim {head_dim} is not supported by the kernel (up to {HEAD_DIMS[-1]})"
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is older than 8.0"
    if tile.specialized and capability != SPECIALIZED_CAPABILITY:
        intended, here = map(format_capability, (SPECIALIZED_CAPABILITY, capability))
        return f"tile {tile} is for {intended}, this GPU is {here}"
    number, padded = get_family(capability), pad_head_dim(head_dim)
    if number is None or padded not in _PREFILL[number]:
        return f"head_dim {head_dim} has no tile on {format_capability(capability)}"
    if tile.specialized:
        if (tile.block_m, tile.num_warps) != (SPECIALIZED_ROWS, SPECIALIZED_WARPS):
            return f"tile {tile} has no specialised kernel (block_m {SPECIALIZED_ROWS}, {SPECIALIZED_WARPS} warps)"
        if tile.block_n < 64 or tile.num_stages < 2:
            return f"tile {tile} has no specialised kernel (block_n 64 or 128, 2 stages or more)"
    if tile.specialized:  # the queries of two row tiles, and a ring of keys and of values
        rows = 2 * tile.block_m + 2 * tile.num_stages * tile.block_n
    else:  # tiles of k and v on their way; the oldest is in use
        rows = max(2 * tile.num_stages - 3, 0) * tile.block_n
    needed, limit = 2 * padded * rows, SHARED_MEMORY[number]  # for 16-bit inputs; a compiler may need some more
    if needed > limit:
        return f"tile {tile} needs {-(-needed >> 10)} KiB of shared memory for head_dim {head_dim}, of {limit >> 10}"
    return None


@lru_cache(maxsize=64)
def list_candidate_tiles(head_dim: int, capability: Capability) -> tuple[TileConfig, ...]:
    """Return the prefill tiles worth timing on a GPU; empty where the kernels have none for this head dim.

    They compile for it with a few spilled registers at most, and fit its shared memory. Each shape comes with
    several spacings of the check.
    """
    number = get_family(capability)
    shapes = _PREFILL[number].get(pad_head_dim(head_dim), []) if number is not None else []
    return tuple(
        TileConfig(block_m, block_n, stride // block_n, warps, stages, specialized).validate()
        for block_m, block_n, warps, stages, specialized in shapes
        for stride in ((512, 1024, 2048, 256) if specialized else (256, 512, 1024))
    )


def get_default_tile(head_dim: int, capability: Capability) -> TileConfig:
    """Return the first candidate, which is safe on every GPU of this capability. Raises InputError if there is none."""
    tiles = list_candidate_tiles(head_dim, capability)
    if not tiles:
        raise InputError(f"head_dim {head_dim} has no tile on {format_capability(capability)}: run it dense")
    return tiles[0]


def get_fewest_queries(tile: TileConfig, capability: Capability) -> int:
    """Return the fewest queries after a longer prefix that S2O computes with a tile on a device; fewer run dense.

    A CPU, of capability (0, 0), needs no more than what is no decode step.
    """
    default = DECODE if get_family(capability) is None else MIN_QUERIES
    return max(DECODE, tile.min_queries or default)


def make_trace_tile(head_dim: int, capability: Capability, block_m: int, stride: int) -> TileConfig:
    """Return the trace kernel's tile for row tiles of `block_m` and first checks of the stop `stride` keys apart.

    It keeps more in registers than the prefill does, so its tiles of keys are smaller.
    """
    wgmma = capability[0] == 9 and head_dim <= 128
    block_n = 64 if wgmma else 32
    warps = 4 if wgmma and block_m == 64 else 8
    stages = 3 if block_m == 128 and head_dim <= 128 else 2
    return TileConfig(block_m, block_n, stride // block_n, warps, stages).validate()
