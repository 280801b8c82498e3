"""What the requests of a server batch come to, each computed on its own from contiguous tensors."""

from dataclasses import replace

import torch
from torch import Tensor

from s2o_runtime import LayerConfig, s2o_attention
from s2o_runtime.attention.backend import Backend
from s2o_runtime.attention.result import Attention
from s2o_runtime.config import HeadConfig, TileConfig
from s2o_runtime.devices import DeviceIdentity, identify
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile
from s2o_runtime.reference.dense import exact_attention
from s2o_runtime.tiles import candidate_tiles
from support.fake_server import Request

FEWEST = 40  # queries


def two_layers(tau: float = 1.0, lengths: tuple[int, ...] = (128, 512), layer_numbers: tuple[int, ...] = ()) -> Profile:
    """Two layers, one of them dense; the heads of a layer differ. With layer numbers the model has two others."""
    tile = TileConfig(64, 32, 2, 4, 1, min_queries=FEWEST)
    heads = tuple(HeadConfig(tau * (1 + index), 64, representatives=1 + index % 2) for index in range(4))
    config = LayerConfig(heads, tile, grain=4)
    longer = LayerConfig(tuple(replace(head, tau=head.tau / 2) for head in heads), tile, grain=4)
    others = (("sliding_attention", 2),) if layer_numbers else ()
    geometry = Geometry("llama", 2, 4, 2, 64, layer_numbers, others)
    buckets = ((config, config.as_dense()), (longer, longer.as_dense()))
    return Profile("made", geometry, "", DeviceIdentity("cpu", "cpu"), lengths, buckets).validate()


def served_profile(tile: TileConfig) -> Profile:
    """Of this GPU, for a model of two layers whose heads differ."""
    heads = tuple(HeadConfig(0.2 * (1 + index), 256, representatives=8, tail=index % 2 == 0) for index in range(8))
    config = LayerConfig(heads, tile, grain=4)
    geometry, device = Geometry("llama", 2, 8, 2, 128), identify(torch.device("cuda"))
    return Profile("made", geometry, "", device, (1024, 4096), ((config, config),) * 2).validate()


def served_tiles() -> list[TileConfig]:
    """One of each kind that this GPU has; two tiles between stop checks, so that prefixes can stop more than once."""
    if not torch.cuda.is_available():
        return [TileConfig()]
    candidates = candidate_tiles(128, torch.cuda.get_device_capability())
    shapes = {(tile.block_m, tile.specialized): tile for tile in candidates}
    return [replace(tile, chunk=2, min_queries=200) for tile in shapes.values()]


def alone(request: Request, count: int, config: LayerConfig, backend: Backend = "auto") -> Attention:
    """The op on the last `count` of the tokens fed so far; its output is [T, Hq, D]."""
    attention = s2o_attention(
        *_tensors(request, count), config, scale=request.queries.shape[2] ** -0.5, backend=backend, return_stats=True
    )
    return attention._replace(out=attention.out[0].transpose(0, 1))


def dense(request: Request, count: int) -> Tensor:
    """Dense attention of the last `count` of the tokens fed so far: [T, Hq, D]."""
    return exact_attention(*_tensors(request, count))[0].transpose(0, 1)


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
                window = (row // head.segment * head.segment + offset) // config.tile.block_n * config.tile.block_n
                computed[index] += prefixes[index][row // config.tile.block_m] + row + offset + 1 - window
    return torch.tensor(computed, dtype=torch.float64) / causal


def _tensors(request: Request, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, H, L, D]."""
    end = request.done
    q, k, v = request.queries[end - count : end], request.keys[:end], request.values[:end]
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
