"""Compile every shipped kernel configuration for GPUs that are not here, and check the compiled kernels.

    python tests/aot.py [--quick]

prints one JSON object per configuration and fails when one of them breaks a rule. With --quick only the largest
configuration of each kernel is compiled, for each GPU generation and variant. It is a program of its own
because kernels that were imported for the interpreter cannot be compiled in the same process. The Triton that
is imported is the one that is checked: `make aot` runs this with the oldest and the newest supported one.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import typing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from calibrate.curves import trace_pass as kernel_pass
from calibrate.curves.curves import TAUS
from s2o_runtime.config import HEAD_DIMS, REPRESENTATIVES, TileConfig
from s2o_runtime.tiles import FP8_CAPABILITY, SHARED_MEMORY, list_candidate_tiles, make_trace_tile
from scripts.bench.baselines.tiles import BLOCK_SPARSE_HEAD_DIMS, antidiagonal_tile, block_sparse_tile

PRODUCER_THREADS = 128  # of the specialised kernel
COPY_BYTES = 16  # of one cp.async.cg
SCORE_COLUMNS = (16, 128)  # the fewest and the most representatives that a program of `scores` keeps
TAIL_SEGMENTS = (40, 80)  # of a call, one number for each form of the kernel `tail`
POINTERS_OF = {  # by type
    "bf16": "Q K V OUT REP SINKS VALUES POOLED TRUTH X K_MEAN OUT_K OUT_V MEAN_KEYS MEAN_VALUES",
    "fp16": "SCORE",
    "fp32": (
        "SHARE_OF_RANK LSE TAU LOG_SUM EDGE MASS SUMS FLOOR TAUS TRACED MEAN SIMILARITY LOCAL WEIGHTS "
        "K_SCALE SPLIT_OUT SPLIT_LSE V_SCALE"
    ),
    "i32": (
        "ORDER VISITED CU_Q CU_K PAGES SEGMENT FLAGS LAUNCH_ORDER REPRESENTATIVES FIRST ARRIVED BLOCKS COUNTS "
        "KEY_ORDER HEADS BLOCK_TABLE SPLIT_VISITED"
    ),
    "i64": "KV_START",
    "i8": "PRUNED",
}
POINTERS = {name: kind for kind, names in POINTERS_OF.items() for name in names.split()}
FLOATS = ("qk_scale", "log_share")
# Bytes that a thread may keep in local memory; meant for what is computed once, outside the loops.
# The trace kernel, which only calibration runs, keeps what it writes down where thresholds stop. 56 bytes of the plain
# prefill are of head dim 256 with int8 scores on sm_90 in Triton 3.6; 48 before there were dense last rows.
KEPT_BYTES = {"prefill_hopper": 16, "prefill": 56, "trace": 896, "antidiagonal": 24}
KEPT_BYTES_SCORES = 24  # of 16 representatives' scores on sm_80 (8) and sm_120 in Triton 3.9; none on sm_90
KEPT_BYTES_CAPPED = 48  # of the specialised kernel with a soft cap in Triton 3.9; with sinks alone it spills none
KEPT_BYTES_RING = 72  # of the specialised kernel with three stages of head dim 128 in Triton 3.9; 16 in 3.6 and 3.7
# of the specialised kernel with head dim 256 in Triton 3.9, 208 in 3.6 and 3.7: what it needs outside its loops; of 540
# instructions for a tile at most 8 read or write it (docs/results/head-dim-256-h200.txt)
KEPT_BYTES_WIDE = 304
KEPT_BYTES_SPLITS = 72  # with split dense heads, on sm_100 in Triton 3.9; 56 in 3.7, none in 3.6
# of the block-sparse kernel: it stores its rows at the end where permuted or packed queries stand; 8 is of sm_90 in
# Triton 3.9, 48 of sm_120 in 3.7
KEPT_BYTES_MOVED = {"keys-moved": 8, "packed-means": 48}
# The switches of a kernel that are on, all others are off.
VARIANTS: dict[str, dict[str, object]] = {
    "": {},
    "padded": {"HAS_START": True, "WIDE": True, "HAS_TAIL": True, "HAS_LAUNCH_ORDER": True},
    "packed": {"PACKED": True, "HAS_LSE": True, "HAS_TAIL": True},
}
# What few models ask for, learned sinks and soft-capped scores together: the largest configuration of each kernel is
# compiled for a GPU of each generation of tensor cores. CAP is Gemma 2's 50 in base 2.
FEATURES = "features"
FEATURE_VARIANTS: dict[str, dict[str, object]] = {
    FEATURES: {"HAS_SINKS": True, "CAP": 72.13, "HAS_LSE": True, "HAS_TAIL": True, "HAS_LAUNCH_ORDER": True}
}
# Keys and values in the pages of a cache: every tile of the prefill, and the largest configuration of the other kernels
# that read them there.
PAGED = "paged"
PAGED_VARIANTS: dict[str, dict[str, object]] = {
    PAGED: {"PACKED": True, "PAGED": True, "HAS_LSE": True, "HAS_TAIL": True, "HAS_LAUNCH_ORDER": True}
}
# Dense heads split over keys: every tile of the prefill with packed sequences and with keys in pages, as servers call
# it, the largest with all else too, and what combines the splits.
SPLITS, SPLITS_PAGED = "splits", "splits-paged"
SPLIT_VARIANTS: dict[str, dict[str, object]] = {
    SPLITS: {"PACKED": True, "HAS_TAIL": True, "HAS_LAUNCH_ORDER": True, "HAS_SPLITS": True},
    "splits-features": FEATURE_VARIANTS[FEATURES] | {"HAS_SPLITS": True},
    SPLITS_PAGED: PAGED_VARIANTS[PAGED] | {"HAS_SPLITS": True},
}
PREFILLS = ("prefill", "prefill_hopper")
PAGED_KERNELS = ("means", "scores", "order")
FEATURE_KERNELS = ("prefill", "prefill_hopper", "trace", "means", "scores")
FEATURE_CAPABILITIES = (80, 90, 100)
# The same for the kernel of the baselines.
BLOCK_SPARSE_VARIANTS: dict[str, dict[str, object]] = {
    "blocks": {},
    "packed-means": {"PACKED": 6, "HAS_MEANS": True},
    "keys-moved": {"KEYS_MOVED": True},
}
# And for XAttention's scores: what is usual, the most columns of a block, and the fewest.
ANTIDIAGONAL_VARIANTS: dict[str, dict[str, object]] = {
    "stride16-block128": {"S": 16, "PER": 8},
    "stride4-block256": {"S": 4, "PER": 64},
    "stride64-block64": {"S": 64, "PER": 1},
}
# And for the copy out of pages: what a cache of 8 bits has is scaled, by KV head. The GPUs before sm_89 have none.
PAGE_VARIANTS: dict[str, dict[str, object]] = {"same-type": {}, "fp8": {"SCALED": True, "SCALE_STEP": 1}}
ALL_VARIANTS = VARIANTS | FEATURE_VARIANTS | PAGED_VARIANTS | SPLIT_VARIANTS
ALL_VARIANTS |= BLOCK_SPARSE_VARIANTS | ANTIDIAGONAL_VARIANTS | PAGE_VARIANTS
FP8_POINTERS = {"K": "fp8e4nv", "V": "fp8e4nv"}


@dataclass(frozen=True)
class Case:
    """One kernel in one configuration for one GPU generation.

    variant: a key of one of the dictionaries above; rows: of a block of `mean_key_mass`, the representatives of a call
    of `scores`, or the segments of a call of `tail`; representatives: of a segment of some heads, others have one.
    """

    kernel: str
    capability: int
    head_dim: int = 0
    tile: TileConfig | None = None
    rows: int = 0
    representatives: int = 1
    variant: str = ""

    def __str__(self) -> str:
        parts = [self.kernel, f"sm{self.capability}"]
        parts += [f"D{self.head_dim}"] if self.head_dim else []
        parts += [str(self.tile).replace(" ", "-")] if self.tile else []
        parts += [f"rows{self.rows}"] if self.rows else []
        parts += [f"R{self.representatives}"] if self.representatives > 1 else []
        return "-".join(parts + ([self.variant] if self.variant else []))


@dataclass(frozen=True)
class Compiled:
    """The parts of a compiled kernel: instructions by kind, bytes of memory, layouts."""

    cp_async: int
    wgmma: int
    tcgen05: int
    mma_sync: int
    shared: int
    stack: int
    local: int
    assembly_layouts: tuple[str, ...]


def pipelined(case: Case, built: Compiled) -> str | None:
    """The loops over keys copy k and v to shared memory in advance, 16 bytes at a time: two loops, or one over blocks
    and one over columns. The loop over a product's depth copies q and k, every stage of it; means of queries q.

    Fewer copies mean that the pipeline, or the divisibility of the rows' strides, was lost.
    """
    if case.kernel == "means":
        from s2o_runtime.kernels.rank import means

        rows = means.count_query_rows(case.head_dim)
        tile_bytes, copies, threads = 2 * rows * case.head_dim, 2, 32 * means.MEAN_WARPS
    elif case.tile is None:
        return None
    elif case.kernel == "antidiagonal":
        from scripts.bench.baselines.kernels.antidiagonal import DEPTH

        tile_bytes = 2 * (case.tile.block_m + case.tile.block_n) * DEPTH
        copies, threads = case.tile.num_stages, 32 * case.tile.num_warps
    else:
        tile_bytes = 2 * case.tile.block_n * case.head_dim
        if case.tile.specialized:  # two loops; the ring takes the place of a prologue
            copies, threads = 2 * 2, PRODUCER_THREADS
        else:  # k and v, at least one tile ahead
            loops = 1 if case.kernel == "block_sparse" else 2
            copies, threads = loops * 2 * 2, 32 * case.tile.num_warps
    expected = copies * (tile_bytes // COPY_BYTES // threads)
    return f"{built.cp_async} cp.async, expected {expected} or more" if built.cp_async < expected else None


def tensor_cores(case: Case, built: Compiled) -> str | None:
    """Products run on tensor cores: as wgmma on sm_90, where its 64 rows are there."""
    if case.tile is None and case.kernel not in ("means", "scores", "tail", "mean_key_mass"):
        return None
    if case.capability == 90 and case.kernel != "means":  # which has 16
        return "no wgmma" if built.wgmma == 0 else None
    return "no tensor core instruction" if built.wgmma + built.tcgen05 + built.mma_sync == 0 else None


def shared_memory(case: Case, built: Compiled) -> str | None:
    limit = SHARED_MEMORY[case.capability]
    return f"{built.shared} bytes of shared memory, at most {limit} fit" if built.shared > limit else None


def no_spills(case: Case, built: Compiled) -> str | None:
    """Spilled registers show as stack or local memory.

    The specialised kernel may keep a few values there that it computes once, before the warps part; kernels with a tail
    what they need at their end.
    """
    spilled = built.stack + built.local
    allowed = KEPT_BYTES_MOVED.get(case.variant, KEPT_BYTES.get(case.kernel, 0))
    if case.kernel == "scores" and case.capability != 90:
        allowed = KEPT_BYTES_SCORES
    if case.kernel == "prefill_hopper" and case.variant == FEATURES:
        allowed = KEPT_BYTES_CAPPED
    if case.kernel == "prefill_hopper" and case.head_dim == 128 and case.tile and case.tile.num_stages == 3:
        allowed = KEPT_BYTES_RING
    if case.variant in SPLIT_VARIANTS and case.kernel != "combine":
        allowed = max(allowed, KEPT_BYTES_SPLITS)
    if case.kernel == "prefill_hopper" and case.head_dim == 256:
        allowed = KEPT_BYTES_WIDE
    return f"{spilled} bytes of spilled registers" if spilled > allowed else None


def one_key_a_lane(case: Case, built: Compiled) -> str | None:
    """The assembly of the kernel `order` counts on one key a lane and one row a warp."""
    if case.kernel != "order":
        return None
    expected = r".*sizePerThread = \[1, 1\], threadsPerWarp = \[1, 32\], warpsPerCTA = \[\d+, 1\].*"
    layouts = built.assembly_layouts
    if layouts and all(re.fullmatch(expected, layout) for layout in layouts):
        return None
    return f"inline assembly works on {', '.join(layouts) or 'nothing'}"


RULES = (pipelined, tensor_cores, shared_memory, no_spills, one_key_a_lane)


def broken_rules(case: Case, built: Compiled) -> dict[str, str]:
    """Return what is wrong with a compiled kernel, by rule."""
    return {rule.__name__: text for rule in RULES if (text := rule(case, built)) is not None}


def cases() -> list[Case]:
    """Every configuration that ships: all candidate tiles and the defaults, and the ranking kernels.

    The chunk is an argument of the kernel, not a constant, so it makes no difference here.
    """
    chosen: list[Case] = []
    for capability in SHARED_MEMORY:
        for head_dim in HEAD_DIMS:
            pair = divmod(capability, 10)
            tiles = {replace(tile, chunk=1) for tile in list_candidate_tiles(head_dim, pair)}
            if not tiles:
                continue  # dense there
            for tile in sorted(tiles, key=str):
                chosen.append(Case("prefill_hopper" if tile.specialized else "prefill", capability, head_dim, tile))
            chosen += [Case("means", capability, head_dim, representatives=count) for count in REPRESENTATIVES]
            chosen += [
                Case("scores", capability, head_dim, representatives=count, rows=rows)
                for count, rows in itertools.product(REPRESENTATIVES, SCORE_COLUMNS)
            ]
            chosen += [Case("tail", capability, head_dim, rows=rows) for rows in TAIL_SEGMENTS]
            if kernel_pass.may_compile(pair, triton.__version__):
                heights = {(tile.block_m, min(other.stride for other in tiles)) for tile in tiles}
                traced = {replace(make_trace_tile(head_dim, pair, *height), chunk=1) for height in heights}
                chosen += [Case("trace", capability, head_dim, tile) for tile in sorted(traced, key=str)]
        chosen.append(Case("order", capability))
    return (
        block_sparse_cases()
        + antidiagonal_cases()
        + largest(
            replace(case, variant=FEATURES)
            for case in chosen
            if case.kernel in FEATURE_KERNELS and case.capability in FEATURE_CAPABILITIES
        )
        + page_cases()
        + split_cases(chosen)
        + of_variant(chosen, PAGED, PAGED_KERNELS)
        + [
            replace(case, variant=variant)
            for case in chosen
            for variant, switches in VARIANTS.items()
            if case.kernel != "tail" or "HAS_TAIL" in switches
            if case.kernel != "trace" or "PACKED" not in switches
        ]
    )


def largest(every: Iterable[Case]) -> list[Case]:
    """Of each kernel, GPU generation and variant the configuration that needs most registers and memory."""

    def size(case: Case) -> tuple[int, int, int, int]:
        area = case.tile.block_m * case.tile.block_n * case.tile.num_stages if case.tile else 0
        return case.head_dim, area, case.rows, case.representatives

    chosen: dict[tuple[str, int, str], Case] = {}
    for case in every:
        key = case.kernel, case.capability, case.variant
        if key not in chosen or size(case) > size(chosen[key]):
            chosen[key] = case
    return list(chosen.values())


def block_sparse_cases() -> list[Case]:
    """The tiles of the baselines' kernel; what is computed of block means before it has none."""
    chosen: list[Case] = []
    for capability in SHARED_MEMORY:
        pair = divmod(capability, 10)
        chosen.append(Case("choose", capability))
        for head_dim in BLOCK_SPARSE_HEAD_DIMS:
            chosen.append(Case("pool_blocks", capability, head_dim))
            chosen += [Case("mean_key_mass", capability, head_dim, rows=rows) for rows in (64, 128)]
            for variant in BLOCK_SPARSE_VARIANTS:
                tiles = map(_as_tile, sorted({block_sparse_tile(head_dim, pair, block, block) for block in (64, 128)}))
                chosen += [Case("block_sparse", capability, head_dim, tile, variant=variant) for tile in tiles]
    return chosen


def antidiagonal_cases() -> list[Case]:
    """XAttention's two kernels: the first with head dims of one step, of one and a part, and of two."""
    chosen: list[Case] = []
    for capability, variant in itertools.product(SHARED_MEMORY, ANTIDIAGONAL_VARIANTS):
        tile = _as_tile(antidiagonal_tile(divmod(capability, 10)))
        chosen += [Case("antidiagonal", capability, dim, tile, variant=variant) for dim in (64, 96, 128)]
        chosen.append(Case("mass", capability, variant=variant))
    return chosen


def _as_tile(shape: Any) -> TileConfig:
    return TileConfig(shape.block_m, shape.block_n, 1, shape.warps, shape.stages)


def split_cases(chosen: list[Case]) -> list[Case]:
    """Dense heads split over keys: every tile of the prefill, the largest with other features, and the combination."""
    prefills = [case for case in chosen if case.kernel in PREFILLS]
    featured = [case for case in prefills if case.capability in FEATURE_CAPABILITIES]
    others = [variant for variant in SPLIT_VARIANTS if variant not in (SPLITS, SPLITS_PAGED)]
    return (
        of_variant(prefills, SPLITS)
        + of_variant(prefills, SPLITS_PAGED)
        + largest(replace(case, variant=variant) for case in featured for variant in others)
        + [
            Case("combine", capability, head_dim, variant=variant)
            for capability, head_dim in sorted({(case.capability, case.head_dim) for case in prefills})
            for variant in (SPLITS, "splits-features")
        ]
    )


def of_variant(chosen: list[Case], variant: str, others: tuple[str, ...] = ()) -> list[Case]:
    """Every tile of the prefill in a variant, and the largest of the other kernels that it makes a difference to."""
    cases = [replace(case, variant=variant) for case in chosen]
    return [case for case in cases if case.kernel in PREFILLS] + largest(
        case for case in cases if case.kernel in others
    )


def page_cases() -> list[Case]:
    """The copy of keys and values out of pages, with a head dim that is no power of two too."""
    return [
        Case("gather_pages", capability, head_dim, variant=variant)
        for capability in SHARED_MEMORY
        for head_dim in (80, *HEAD_DIMS)
        for variant in PAGE_VARIANTS
        if variant != "fp8" or divmod(capability, 10) >= FP8_CAPABILITY
    ]


def compile_case(case: Case) -> Compiled:
    # not imported above: the tests of the rules want those without the kernels
    from triton.experimental.gluon._runtime import GluonASTSource

    from s2o_runtime.kernels import pages, prefill, prefill_hopper, primitives, splits, trace
    from s2o_runtime.kernels.rank import means, order, scores, tail
    from scripts.bench.baselines.kernels import antidiagonal, block_sparse, mean_keys

    head_dim, rows, tile, name = case.head_dim, case.rows, case.tile, case.kernel
    switches = ALL_VARIANTS[case.variant]
    constants: dict[str, object] = {
        "GROUP": 4, "D": head_dim, "BN": 64, "SAMPLES": order.SAMPLES, "BUCKETS": order.BUCKETS, "EDGES": tail.EDGES,
        "COUNTS": tuple(sorted({1, case.representatives})), **switches,
    }  # fmt: skip
    types = POINTERS
    home: Any
    more: dict[str, object] = {}  # constants of this kernel
    options: dict[str, int] = {}
    if tile is not None:
        constants |= {"BM": tile.block_m, "BN": tile.block_n, "STAGES": tile.num_stages}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": primitives.MAX_REGISTERS}
    match name:
        case "prefill":
            home = prefill
        case "prefill_hopper":
            home, options["maxnreg"] = prefill_hopper, prefill_hopper.MAX_REGISTERS
        case "trace":
            home, more = trace, {"STRIDES": trace.STRIDES, "T": 1 << (len(TAUS) - 1).bit_length()}
        case "block_sparse":
            home, more = block_sparse, {"BLOCK_M": 128, "BLOCK_N": 128, "PACKED": switches.get("PACKED", 1)}
            more |= {"BC": block_sparse.MEANS_AT_ONCE, "MEAN_STAGES": block_sparse.MEAN_STAGES}
        case "antidiagonal":
            home, more = antidiagonal, {"DEPTH": antidiagonal.DEPTH, "SWEEP": antidiagonal.SWEEP}
        case "mass":
            per = ANTIDIAGONAL_VARIANTS[case.variant]["PER"]
            home, more = antidiagonal, {"ROWS": per, "BC": antidiagonal.MASS_SCORES // per}
            options = {"num_warps": antidiagonal.MASS_WARPS}
        case "pool_blocks":
            home, name, more = block_sparse, "pool", {"DP": head_dim, "BLOCK": 128}
            options = {"num_warps": block_sparse.POOL_WARPS}
        case "mean_key_mass":
            home, more = mean_keys, {"DP": head_dim, "BM": rows, "BC": mean_keys.KEY_BLOCKS, "BLOCK_N": rows}
            more |= {"STAGES": mean_keys.STAGES, "PACKED": 6}
            options = {"num_warps": mean_keys.mass_warps(rows), "num_stages": mean_keys.STAGES}
            options["maxnreg"] = mean_keys.MAX_REGISTERS
        case "choose":
            home, more = mean_keys, {"BM": 128, "BC": mean_keys.CHOSEN_AT_ONCE, "BLOCK_N": 128, "PACKED": 6}
            more["PRUNES"], options = True, {"num_warps": mean_keys.CHOOSE_WARPS}
        case "gather_pages":
            home, options = pages, {"num_warps": pages.GATHER_WARPS}
            more = {"WIDTH": triton.next_power_of_2(head_dim), "PAGE": 16, "ROWS": pages.GATHER_ROWS}
            types = POINTERS | (FP8_POINTERS if case.variant == "fp8" else {})
        case "combine":
            home, more = splits, {"ROWS": splits.COMBINED_ELEMENTS // head_dim, "BM": 64}
            options = {"num_warps": splits.COMBINE_WARPS}
        case "means":
            home, options = means, {"num_warps": means.MEAN_WARPS}
            more = {"ROWS": means.count_query_rows(head_dim), "STAGES": means.MEAN_STAGES, "BK": means.LOG_SUM_KEYS}
            more |= {"SAMPLE": means.LOG_SUM_SAMPLE, "STEPS": means.POOL_STEPS}
        case "scores":
            home, more = scores, {"WARPS": scores.SCORE_WARPS, "COLUMNS": scores.count_columns(head_dim, rows)}
            more |= {"KEYS": scores.SCORE_KEYS, "STAGES": scores.SCORE_STAGES}
            options = {"num_warps": scores.SCORE_WARPS, "maxnreg": scores.MAX_REGISTERS}
        case "order":
            home, more, options = order, {"WARPS": order.ORDER_WARPS}, {"num_warps": order.ORDER_WARPS}
        case "tail":
            home, segments = tail, tail.count_tail_segments(rows, head_dim)
            more = {"BS": segments, "BK": tail.count_tail_steps(segments, head_dim)}
            options = {"num_warps": segments}
    source = GluonASTSource if name == "prefill_hopper" else ASTSource
    constants |= more
    return compile_kernel(getattr(home, f"_{name}"), constants, case.capability, source, options, types)


def compile_kernel(
    kernel: Any,
    constants: dict[str, object],
    capability: int,
    source: type[ASTSource],
    options: dict[str, int],
    types: dict[str, str] = POINTERS,
) -> Compiled:
    """Compile `kernel` as its launcher would for an NVIDIA GPU.

    Upper case arguments are pointers; they and the strides are multiples of 16, as they are for real tensors,
    unless the kernel says not to look. Constants that are not in `constants` are switches that are off.
    """
    from s2o_runtime.kernels.groups import PREFILL_CONSTANTS
    from scripts.bench.baselines.kernels import block_sparse

    signature: dict[str, Any] = {}
    values: dict[str, object] = {}
    attributes = {}
    annotations = typing.get_type_hints(kernel.fn)
    constant_groups = block_sparse.CONSTANTS if kernel.fn.__name__ == "_block_sparse" else PREFILL_CONSTANTS
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            if group := constant_groups.get(name):
                values[name] = group(*(constants.get(field, False) for field in group._fields))
            else:
                values[name] = constants.get(name, False)
            continue
        pointer = name.isupper()
        aligned = (pointer or name.startswith("stride_")) and not parameter.do_not_specialize
        if group := annotations.get(name):
            kinds = (f"*{types[field.upper()]}" if pointer else "i32" for field in group._fields)
            signature[name] = group._make(kinds)
            paths = [(index, place) for place in range(len(group._fields))]
        else:
            signature[name] = f"*{types[name]}" if pointer else "fp32" if name in FLOATS else "i32"
            paths = [(index,)]
        if aligned:
            attributes |= {path: [["tt.divisibility", 16]] for path in paths}
    tree = source(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    built = triton.compile(tree, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _resource_usage(built.asm["cubin"])
    stack, local = (int(re.search(rf"{kind}:(\d+)", usage)[1]) for kind in ("STACK", "LOCAL"))
    ptx = built.asm["ptx"]
    return Compiled(
        cp_async=len(re.findall(r"cp\.async\.cg", ptx)),
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        tcgen05=len(re.findall(r"tcgen05\.mma", ptx)),
        mma_sync=len(re.findall(r"mma\.sync", ptx)),
        shared=built.metadata.shared,
        stack=stack,
        local=local,
        assembly_layouts=_assembly_layouts(built.asm["ttgir"]),
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


def _assembly_layouts(ttgir: str) -> tuple[str, ...]:
    """The layouts of the tensors that inline assembly works on."""
    layouts = dict(re.findall(r"^(#\w+) = (#.*)$", ttgir, re.MULTILINE))
    lines = re.findall(r"tt\.elementwise_inline_asm .*", ttgir)
    names = {name for line in lines for name in re.findall(r"tensor<[^>]*(#\w+)>", line)}
    return tuple(sorted(layouts[name] for name in names))


def report(case: Case) -> dict[str, Any]:
    """The case, what it became and the rules it breaks; a compiler's error is one of them."""
    try:
        built = compile_case(case)
    except Exception as error:  # any kind: each version of Triton has its own
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = f"{type(cause).__name__}: {cause}"[-500:]
        return {"case": str(case), **asdict(case), "built": None, "broken": {"compiles": text}}
    return {"case": str(case), **asdict(case), "built": asdict(built), "broken": broken_rules(case, built)}


def main() -> None:
    if sys.argv[1:] not in ([], ["--quick"]):
        raise SystemExit("aot.py takes no arguments but --quick")
    total = 0
    broken = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for entry in pool.map(report, largest(cases()) if sys.argv[1:] else cases()):
            print(json.dumps(entry), flush=True)
            total += 1
            broken += [f"{entry['case']}: {rule}: {text}" for rule, text in entry["broken"].items()]
    summary = f"Triton {triton.__version__}: {total} configurations compiled, {len(broken)} rules broken"
    print("\n".join([*broken, summary]), file=sys.stderr)
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
