"""Tiles of the baselines' kernels by GPU, as `s2o_runtime.tiles` has those of S2O's."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from s2o_runtime.devices import get_capability
from s2o_runtime.errors import InputError
from s2o_runtime.sequences import KERNEL_TYPES
from s2o_runtime.tiles import Capability, format_capability, get_family

BLOCK_SPARSE_HEAD_DIMS = (64, 128)


class KernelTile(NamedTuple):
    """The tile of a baseline's kernel: its rows and keys, and Triton's launch options."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# Block-sparse tiles, the fastest first: for head dim 64 of every GPU, for 128 by family. The last one divides every
# selection's blocks.
_OF_64 = (KernelTile(128, 64, 8, 3), KernelTile(64, 64, 4, 3))
_OF_128: dict[int, tuple[KernelTile, ...]] = {
    80: (KernelTile(128, 64, 8, 3), KernelTile(64, 64, 8, 3)),
    89: (KernelTile(128, 32, 8, 3), KernelTile(128, 64, 8, 2), KernelTile(64, 64, 8, 2)),
    90: (KernelTile(128, 128, 8, 3), KernelTile(128, 64, 8, 3), KernelTile(64, 64, 4, 2)),
    100: (KernelTile(128, 64, 8, 3), KernelTile(64, 64, 8, 2)),
    120: (KernelTile(128, 32, 8, 3), KernelTile(128, 64, 8, 2), KernelTile(64, 64, 8, 2)),
}

# Tiles of XAttention's scores, groups of queries and of keys: on sm_90, and on all others. They serve any head dim.
_ANTIDIAGONAL_HOPPER, _ANTIDIAGONAL = KernelTile(128, 256, 8, 4), KernelTile(128, 128, 8, 3)


def block_sparse_tile(head_dim: int, capability: Capability, block_m: int, block_n: int) -> KernelTile:
    """Return the first tile of the block-sparse kernel that divides such a block. Raises InputError without one."""
    family = get_family(capability)
    if family is None or head_dim not in BLOCK_SPARSE_HEAD_DIMS:
        raise InputError(
            f"head_dim {head_dim} on {format_capability(capability)} has no block-sparse tile: "
            "run it with the reference"
        )
    for tile in _OF_64 if head_dim == 64 else _OF_128[family]:
        if block_m % tile.block_m == 0 and block_n % tile.block_n == 0:
            return tile
    raise InputError(f"blocks of {block_m} x {block_n} have no block-sparse tile: use multiples of 64")


def has_kernels(q: Tensor) -> bool:
    """Return whether kernels select blocks for these queries; otherwise plain torch does."""
    return q.is_cuda and q.dtype in KERNEL_TYPES and get_family(get_capability(q.device)) is not None


def antidiagonal_tile(capability: Capability) -> KernelTile:
    """Return the tile of XAttention's scores, groups of queries by groups of keys. Raises InputError without one."""
    number = get_family(capability)
    if number is None:
        raise InputError(
            f"{format_capability(capability)} has no tile for antidiagonal scores: select with plain torch"
        )
    return _ANTIDIAGONAL_HOPPER if number == 90 else _ANTIDIAGONAL
