"""The outputs of a server batch's requests, each computed on its own from contiguous tensors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from s2o_runtime import LayerConfig, s2o_attention
from s2o_runtime.attention.backend import Backend
from s2o_runtime.attention.compute import Attention
from s2o_runtime.config import HeadConfig, TileConfig
from s2o_runtime.devices import DeviceIdentity, identify
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile
from s2o_runtime.reference.dense import exact_attention
from support.fake_server import Request

FEWEST = 40  # queries


def two_layers(tau: float = 1.0, lengths: tuple[int, ...] = (128, 512), layer_numbers: tuple[int, ...] = ()) -> Profile:
    """Two layers, one of them dense; the heads of a layer differ. With layer numbers the model has two others."""
    tile = TileConfig(64, 32, 2, 4, 1, min_queries=FEWEST)
    heads = tuple(HeadConfig(tau * (1 + index), 64, representatives=(1, 16)[index % 2]) for index in range(4))
    config = LayerConfig(heads, tile)
    longer = LayerConfig(tuple(replace(head, tau=head.tau / 2) for head in heads), tile)
    others = (("sliding_attention", 2),) if layer_numbers else ()
    geometry = Geometry("llama", 2, 4, 2, 64, layer_numbers, others)
    buckets = ((config, config.as_dense()), (longer, longer.as_dense()))
    return Profile("made", geometry, "", DeviceIdentity("cpu", "cpu"), lengths, buckets).validate()


def with_last_rows(rows: int) -> Profile:
    """The same, where prompts' last rows are dense in the first layer."""
    profile = two_layers(lengths=(128, 768))
    first, second = profile.layers[0]
    return replace(profile, layers=((replace(first, last_rows=rows), second),) * 2)


def check_close(ours: Tensor, theirs: Tensor) -> None:
    """Raise AssertionError if float32 outputs differ by more than the order of sums."""
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def all_dense() -> Profile:
    """The same with both layers dense."""
    profile = two_layers()
    return replace(profile, layers=tuple((second, second) for _, second in profile.layers))


def served_profile(tile: TileConfig) -> Profile:
    """Of this GPU, for a model of two layers whose heads differ."""
    heads = tuple(
        HeadConfig(0.2 * (1 + index), 256, representatives=16, tail="none" if index % 2 else "mean")
        for index in range(8)
    )
    config = LayerConfig(heads, tile)
    geometry, device = Geometry("llama", 2, 8, 2, 128), identify(torch.device("cuda"))
    return Profile("made", geometry, "", device, (1024, 4096), ((config, config),) * 2).validate()


def alone(request: Request, count: int, config: LayerConfig, backend: Backend = "auto") -> Attention:
    """The op on the last `count` of the tokens fed so far; its output is [T, Hq, D]."""
    attention = s2o_attention(*_tensors(request, count), config, **request.scoring, backend=backend, return_stats=True)
    return attention._replace(out=attention.out[0].transpose(0, 1))


def dense(request: Request, count: int) -> Tensor:
    """Dense attention of the last `count` of the tokens fed so far: [T, Hq, D]."""
    return exact_attention(*_tensors(request, count), **request.scoring)[0].transpose(0, 1)


def joint_density(parts: list[tuple[Request, int]], config: LayerConfig, backend: Backend = "auto") -> Tensor:
    """The density of each head over the last tokens of several requests together: float64 [Hq].

    Computed pairs are counted row by row here, from the prefix keys that the op says it visited.
    """
    computed, causal = [0] * config.num_heads, 0
    for request, count in parts:
        stats, offset = alone(request, count, config, backend).stats, request.done - count
        assert stats is not None
        assert stats.visited is not None
        prefixes = stats.visited[0].tolist()
        for row in range(count):
            causal += row + offset + 1
            for index, head in enumerate(config.heads):
                window = row // head.segment * head.segment + offset - config.lookback
                window = max(window, 0) // config.tile.block_n * config.tile.block_n
                computed[index] += prefixes[index][row // config.tile.block_m] + row + offset + 1 - window
    return torch.tensor(computed, dtype=torch.float64) / causal


def _tensors(request: Request, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, H, L, D]."""
    end = request.done
    q, k, v = request.queries[end - count : end], request.keys[:end], request.values[:end]
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def check_mixed_batches(engine: Any, order: Sequence[str], feed: Callable[[list[tuple[Request, int]]], Tensor]) -> None:
    """Three rounds of two batches with the real kernels, which are compiled, recorded and replayed.

    Sparse rows are bit for bit what the op gives on contiguous tensors; the others are exact up to bf16.

    Args:
        engine: A server's, without requests; its counters sample every call.
        order: Of the requests in a batch: "first" and "second" are long prompts, "tailing" and "decoding" go on.
        feed: What feeds the second batch and returns its rows.
    """
    server = engine.server
    counts = {"first": (1000, 2000), "second": (1010, 2000), "decoding": (1999, 1), "tailing": (1400, 101)}
    requests = {name: engine.add(sum(counts[name])) for name in order}
    config = server.fit.layers[0].config(3010)
    for _ in range(3):
        for request in requests.values():
            request.done = 0
        engine.feed([(requests[name], counts[name][0]) for name in order])
        out = feed([(requests[name], counts[name][1]) for name in order])
        for name, ours in zip(order, out.split([counts[name][1] for name in order]), strict=True):
            if name in ("first", "second"):
                assert torch.equal(ours, alone(requests[name], len(ours), config, "triton").out)
            else:
                truth = dense(requests[name], len(ours)).float()
                torch.testing.assert_close(ours.float(), truth, rtol=2e-2, atol=2e-2)
    rows = {(path, reason.split(",")[0]): count for (_, path, reason), count in server.counters.rows.items()}
    assert rows == {
        ("dense", "decode"): 3,
        ("dense", "fewer than 200 queries behind a prefix"): 3 * 101,
        ("dense", "shorter than the shortest calibrated length"): 3 * (1000 + 1010),
        ("s2o", "the kernel supports this call"): 3 * (1999 + 1400 + 2000 + 2000),
    }
    # the last sampled call is the run of the two long prompts
    long_prompts = [(requests[name], 2000) for name in ("first", "second")]
    kept = server.counters.sampled[0].density.cpu()
    torch.testing.assert_close(kept, joint_density(long_prompts, config, "triton"), rtol=1e-9, atol=0)
    assert kept[-1] < 0.8 * kept[0] < 0.8  # heads of a larger tau stop earlier
    by_reference = joint_density(long_prompts, config, "reference")
    torch.testing.assert_close(kept, by_reference, rtol=0.1, atol=0)  # the kernel's order is coarser
