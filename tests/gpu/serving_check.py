"""What a served layer does on this machine, checked and then timed: the self-test, and caches of 16 and of 8 bits.

    PYTHONPATH=.:tests python tests/gpu/serving_check.py

Between fakes of both servers with the real kernels (without a GPU the reference). Exits with 1 if a layer is refused,
if one that reads other heads is not, or if an fp8 cache gives other numbers than keys and values rounded beforehand.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import torch

from s2o_runtime.quantisation import round_as_cached
from s2o_runtime.serving import attend as self_test
from s2o_runtime.serving.fit import Rank
from support.engines import ENGINES
from support.fake_server import FakeServer
from support.server_batches import alone, served_profile, served_tiles, two_layers

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE, LENGTH = ("cuda", torch.bfloat16, 4000) if ON_GPU else ("cpu", torch.float32, 500)
FP8 = {"vllm": "fp8", "sglang": "float8_e4m3fn"}
CLOSE = 2e-5 if ON_GPU else 1e-9  # mean square of the difference over that of the output


def engine_of(server_name, tile, fp8=False):
    profile = served_profile(tile) if ON_GPU else two_layers()
    profile = replace(profile, record={"recipe": {"kv_cache_dtype": "fp8"}})
    server = FakeServer(profile, Rank(), DEVICE, 8192, tested=False)
    size = {"pages": 512} if server_name == "vllm" else {"slots": 16384, "width": 8192}
    cache = {"kv_cache_dtype": FP8[server_name]} if fp8 else {}
    engine = ENGINES[server_name](server, dtype=DTYPE, device=DEVICE, **size, **cache)
    if fp8 and server_name == "sglang":
        engine.pool.k, engine.pool.v = (slots.to(torch.float8_e4m3fn) for slots in (engine.pool.k, engine.pool.v))
    return engine


def seconds(call):
    """What a call takes until the device is done, and its answer."""
    if ON_GPU:
        torch.cuda.synchronize()
    began = time.perf_counter()
    answer = call()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began, answer


def check(server_name, tile, fp8):
    engine = engine_of(server_name, tile, fp8)
    layer = engine.server.fit.layers[0]
    first, second = engine.add(300), engine.add(LENGTH)
    tested, _ = seconds(lambda: engine.outputs([(first, 300)]))
    if not layer.tested or layer.rejected:
        return f"the layer was refused: {layer.rejected}"
    times = []
    for _ in range(4):
        second.done = 0
        took, out = seconds(lambda: engine.outputs([(second, LENGTH)]))
        times.append(1e3 * took)
    if fp8:
        second.keys, second.values = (round_as_cached(tensor, "fp8") for tensor in (second.keys, second.values))
    truth = alone(second, LENGTH, layer.config(LENGTH)).out.float()
    error = float((out.float() - truth).square().mean() / truth.square().mean())
    paths = {path for path, _ in engine.counted()}
    print(
        f"{server_name}, {'fp8' if fp8 else '16 bits'}, {tile}: self-test {1e3 * tested:.1f} ms; {LENGTH} tokens "
        f"{min(times):.2f} ms; error {error:.1e}; {sorted(paths)}",
        flush=True,
    )
    return None if error <= CLOSE and "s2o" in paths else "the numbers are others, or no row was sparse"


def check_refusal(server_name, tile):
    """A layer that would read other heads than the stock backend must be refused."""
    right = self_test.s2o_attention_paged
    self_test.s2o_attention_paged = lambda *arguments, **named: right(*arguments, **named).roll(1, 1)
    try:
        engine = engine_of(server_name, tile)
        engine.outputs([(engine.add(300), 300)])
    finally:
        self_test.s2o_attention_paged = right
    return None if engine.server.fit.layers[0].rejected else "a layer with other heads was not refused"


def main():
    torch.manual_seed(0)
    problems = []
    for tile in served_tiles():
        for server_name in ENGINES:
            problems.append(check_refusal(server_name, tile))
            problems += [check(server_name, tile, fp8) for fp8 in (False, True)]
    problems = [problem for problem in problems if problem]
    print("\n".join(problems) or "all as expected", flush=True)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
