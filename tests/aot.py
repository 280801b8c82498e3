"""Compile every shipped kernel configuration for GPUs that are not here, and read what came out.

    python tests/aot.py

prints one JSON object per configuration. It is a program of its own because kernels that were imported for the
interpreter cannot be compiled in the same process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from s2o_runtime.config import HEAD_DIMS, TileConfig
from s2o_runtime.gpu import candidate_tiles, default_tile
from s2o_runtime.kernels import rank
from s2o_runtime.kernels.prefill import _prefill

CAPABILITIES = (80, 90, 100)
POINTERS = {
    "Q": "bf16",
    "K": "bf16",
    "V": "bf16",
    "OUT": "bf16",
    "REP": "bf16",
    "SCORE": "fp16",
    "SHARE_OF_RANK": "fp32",
    "ORDER": "i32",
    "VISITED": "i32",
    "KV_START": "i32",
    "TAU": "fp32",
    "SEGMENT": "i32",
    "SHARE": "i32",
}


@dataclass(frozen=True)
class Case:
    """One kernel in one configuration for one GPU generation."""

    kernel: str
    capability: int
    head_dim: int
    tile: str = ""

    def __str__(self) -> str:
        return f"{self.kernel}-sm{self.capability}-D{self.head_dim}-{self.tile}".replace(" ", "-").rstrip("-")


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel is made of."""

    cp_async: int
    tensor_core: int
    shared: int
    registers: int
    stack: int
    local: int


def cases() -> list[tuple[Case, TileConfig | None]]:
    """Every configuration that ships: all candidate tiles and the defaults, and the ranking kernels.

    The chunk is an argument of the kernel, not a constant, so it makes no difference here.
    """
    found: list[tuple[Case, TileConfig | None]] = []
    for capability in CAPABILITIES:
        for head_dim in HEAD_DIMS:
            pair = (capability // 10, capability % 10)
            tiles = {
                replace(tile, chunk=1) for tile in (*candidate_tiles(head_dim, pair), default_tile(head_dim, pair))
            }
            found += [(Case("prefill", capability, head_dim, str(tile)), tile) for tile in sorted(tiles, key=str)]
            found += [(Case(kernel, capability, head_dim), None) for kernel in ("representatives", "scores")]
        found.append((Case("order", capability, 0), None))
    return found


def build(case: Case, tile: TileConfig | None) -> Compiled:
    if tile is not None:
        constants = {
            "GROUP": 4,
            "D": case.head_dim,
            "BM": tile.block_m,
            "BN": tile.block_n,
            "STAGES": tile.num_stages,
            "HAS_START": False,
            "ROW_MAX": False,
            "WIDE": False,
        }
        return compile_kernel(_prefill, constants, case, num_warps=tile.num_warps, num_stages=tile.num_stages)
    if case.kernel == "representatives":
        constants = {"D": case.head_dim, "ROWS": rank.REPRESENTATIVE_ROWS, "HAS_START": False}
        return compile_kernel(rank._representatives, constants, case)
    if case.kernel == "order":
        constants = {
            "SAMPLES": rank.SAMPLES,
            "BINS": rank.BINS,
            "BUCKETS": rank.BUCKETS,
            "BLOCK": rank.ORDER_KEYS,
            "BN": 64,
            "HAS_START": False,
        }
        return compile_kernel(rank._order, constants, case)
    constants = {
        "GROUP": 4,
        "D": case.head_dim,
        "BS": 64,
        "BK": rank.SCORE_KEYS,
        "BN": 64,
        "HAS_START": False,
    }
    return compile_kernel(rank._scores, constants, case)


def compile_kernel(kernel, constants: dict[str, object], case: Case, **options: int) -> Compiled:
    """Compile `kernel` as its launcher would for an NVIDIA GPU.

    Strides and pointers are multiples of 16, as they are for real tensors; the scale is float32, everything
    else a plain int32.
    """
    signature: dict[str, str] = {}
    attributes = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in POINTERS:
            signature[name] = "*" + POINTERS[name]
        else:
            signature[name] = "fp32" if name in ("qk_scale", "limit") else "i32"
        if name in POINTERS or name.startswith("stride_"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", case.capability, 32), options=options)
    usage = _resource_usage(built.asm["cubin"])
    ptx = built.asm["ptx"]
    return Compiled(
        cp_async=len(re.findall(r"cp\.async\.cg", ptx)),
        tensor_core=len(re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", ptx)),
        shared=built.metadata.shared,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        local=int(re.search(r"LOCAL:(\d+)", usage)[1]),
    )


def _resource_usage(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        )
    return next(line for line in listing.stdout.splitlines() if "REG:" in line)


def _report(item: tuple[Case, TileConfig | None]) -> str:
    return json.dumps({"case": str(item[0]), **asdict(item[0]), "built": asdict(build(*item))})


def main() -> None:
    if len(sys.argv) > 1:
        raise SystemExit("aot.py takes no arguments")
    with ProcessPoolExecutor(2) as pool:
        for line in pool.map(_report, cases()):
            print(line, flush=True)


if __name__ == "__main__":
    main()
