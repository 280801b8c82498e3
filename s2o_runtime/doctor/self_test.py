"""A short self-test: on a GPU the kernels against the reference, on a CPU the reference against plain softmax."""

from __future__ import annotations

import math
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.api import s2o_attention
from ..attention.compute import Attention
from ..command_line import NO_RESOURCE, OK
from ..config import HeadConfig, LayerConfig, TileConfig
from ..devices import decide_fit, get_capability, identify, launch_on
from ..reference.dense import dense_attention, exact_attention
from ..tiles import list_candidate_tiles
from .findings import Finding, describe_error

SEGMENT = 256  # queries; a whole number of rows of every tile
TAU = 1.0  # of the heads that stop
LOCAL = 6.0  # the weight of each query's own key, over that of all keys that it has no use for
SOUGHT = 7.0  # how far the scores of the keys that a segment looks for are above the others, in nats
SOUGHT_KEYS = slice(2 * SEGMENT, 3 * SEGMENT, 6)  # neither the first nor the last ones of a long prefix
CPU_TILE = TileConfig(64, 32, 2, 4, 1)
ROUNDING = 1e-3  # relative: what is left of an error beside twice that of torch's SDPA on the same inputs
STOP_ROUNDING = 5e-3  # relative: the rounding of a bfloat16 output, 2^-8
STOPS_APART = 0.1  # relative: keys of near-equal scores are skipped in each other's place, which is 1% of the error
DENSITY_APART = 1e-3  # less than a row tile's chunk, 0.4% of 2045 tokens: `make_inputs` leaves no stop to rounding
EXACT = 1e-5  # relative: float32 against float64


def run_self_test(device: torch.device) -> list[Finding]:
    """Run the op on small inputs of an odd length, half of whose heads never stop.

    Returns:
        One finding for each kernel, or for the reference on a CPU; what an exception says is a problem too.
    """
    checks = {"reference": partial(check_reference, device)}
    if device.type == "cuda":
        if (verdict := decide_fit(identify(device), identify(device))).tiles is None:
            return [Finding("kernels", "not run", verdict.reason, NO_RESOURCE)]
        names = {True: "specialised kernel", False: "kernel"}
        checks = {names[tile.specialized]: partial(check_kernel, device, tile) for tile in list_kernel_tiles(device)}
    findings = []
    for name, check in checks.items():
        start = time.monotonic()
        try:
            value, problem = check()
            value = f"{value} ({time.monotonic() - start:.1f} s)"
            advice = f"{problem}: do not use S2O here, and report this output" if problem else ""
        except Exception as error:  # a compiler, a driver, memory: whatever keeps kernels from running is what is asked
            value = describe_error(error)
            advice = "expected it to run: see the C compiler, headers, driver and memory above, or report this output"
        findings.append(Finding(name, value, advice, NO_RESOURCE if advice else OK))
    return findings


def list_kernel_tiles(device: torch.device) -> list[TileConfig]:
    """Return the safest tile of each kernel that this GPU has."""
    safest_last = reversed(list_candidate_tiles(128, get_capability(device)))
    return list({tile.specialized: tile for tile in safest_last}.values())


def make_layer(tile: TileConfig) -> LayerConfig:
    """Return four heads: two that never stop and two that do, one of which estimates what it skips."""
    never, stopping = HeadConfig(0.0, SEGMENT), HeadConfig(TAU, SEGMENT)
    return LayerConfig((never, stopping, never, HeadConfig(TAU, SEGMENT, tail="mean")), tile)


def make_inputs(
    length: int, head_dim: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [1, 4, L, D], k and v [1, 2, L, D], with stops that no rounding can move.

    Queries of heads 0 and 2 are random. Those of heads 1 and 3 know their own key, which has most of their weight; the
    keys before it have little, alike. In every other segment they also look for some keys of the third one. So a chunk
    of a prefix that has what is looked for brings at least 4 times what the stop rule asks for, any other at most half
    of it, and of 1021 tokens on some chunks are skipped.
    """
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    q, k, v = normal(1, 4, length, head_dim), normal(1, 2, length, head_dim), normal(1, 2, length, head_dim)
    topic = normal(head_dim)
    topic *= SOUGHT**0.5 * head_dim**0.25 / topic.norm()  # two of them have a score of SOUGHT
    k[:, :, SOUGHT_KEYS] += topic
    own = k / k.square().sum(-1, keepdim=True) * (math.log(LOCAL * length) * head_dim**0.5)
    looks = (torch.arange(length) // SEGMENT % 2 == 0)[:, None] * topic
    for head in (1, 3):
        q[:, head] = q[:, head] * 0.5 + own[:, head // 2] + looks
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def check_reference(device: torch.device) -> tuple[str, str]:
    """Return a sentence about what the reference computes, and what is wrong with it, if anything."""
    q, k, v = make_inputs(1021, 64, torch.float32, device)
    result = s2o_attention(q, k, v, make_layer(CPU_TILE), backend="reference", return_stats=True)
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    errors, density = measure_errors(result.out, truth), result.density.tolist()  # truth shares no code with S2O
    exact = max(errors[0], errors[2])
    value = (
        "plain torch against softmax in float64, float32, 1021 tokens, no kernel: "
        f"error {exact:.0e} without stopping; {density[1]:.0%} computed with an error of {errors[1]:.1e} where it stops"
    )
    if not exact <= EXACT:  # so that nan is too much, here and below
        return value, f"expected an error of {EXACT:.0e} at most without stopping"
    if not max(density[1], density[3]) < 1 or min(density[0], density[2]) < 1:
        return value, "expected heads with a tau above 0, and no others, to skip keys"
    return value, ""


def check_kernel(
    device: torch.device, tile: TileConfig, length: int = 2045, dtype: torch.dtype = torch.bfloat16
) -> tuple[str, str]:
    """Return a sentence about what a kernel computes with a tile, and what is wrong with it, if anything."""
    with launch_on(device):
        q, k, v = make_inputs(length, 128, dtype, device)
        ours, theirs = (
            s2o_attention(q, k, v, make_layer(tile), backend=backend, return_stats=True)
            for backend in ("triton", "reference")
        )
        return judge_kernel(tile, ours, theirs, exact_attention(q, k, v), dense_attention(q, k, v))


def judge_kernel(tile: TileConfig, ours: Attention, theirs: Attention, truth: Tensor, dense: Tensor) -> tuple[str, str]:
    """Return a sentence about a kernel's result, and what is wrong with it, if anything.

    ours, theirs: the kernel's and the reference's result for the heads of `make_layer`, with statistics; truth: dense
    attention in float32; dense: torch's SDPA in the type of the inputs.
    """
    errors, expected, sdpa = (measure_errors(out, truth) for out in (ours.out, theirs.out, dense))
    density, expected_density = ours.density.tolist(), theirs.density.tolist()
    dtype = str(ours.out.dtype).removeprefix("torch.")
    value = (
        f"tile {tile}, {dtype}, {truth.shape[2]} tokens: error {max(errors[0], errors[2]):.1e} without stopping (SDPA "
        f"{max(sdpa[0], sdpa[2]):.1e}); {density[1]:.0%} computed with an error of {errors[1]:.1e} where it stops "
        f"(reference {expected_density[1]:.0%}, {expected[1]:.1e})"
    )
    for head in (0, 2):
        if not errors[head] <= 2 * sdpa[head] + ROUNDING:
            return value, f"expected at most twice SDPA's error in head {head}, which skips nothing"
    for head in (1, 3):
        if not abs(density[head] - expected_density[head]) <= DENSITY_APART:
            both = f"{expected_density[head]:.1%}, not {density[head]:.1%}"
            return value, f"expected the reference's density in head {head}, {both}"
        if not abs(errors[head] - expected[head]) <= STOPS_APART * expected[head] + STOP_ROUNDING:
            return value, f"expected the reference's error in head {head}, {expected[head]:.1e}, not {errors[head]:.1e}"
    return value, ""


def measure_errors(out: Tensor, truth: Tensor) -> list[float]:
    """Return the relative error of each head of the first sequence, by norms; nan stays nan."""
    difference = (out.double() - truth.double())[0].flatten(1).norm(dim=1)
    errors: list[float] = (difference / truth.double()[0].flatten(1).norm(dim=1)).tolist()
    return errors
