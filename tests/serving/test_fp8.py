"""fp8 KV caches: which layers may be sparse with one, and what they compute, between fakes of both servers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from s2o_runtime.monitor.counters import Counters
from s2o_runtime.quantisation import round_as_cached
from s2o_runtime.serving.fit import Rank, find_cache_obstacle, find_scales_obstacle
from support.engines import ENGINES
from support.fake_server import FakeServer
from support.server_batches import alone, check_close, two_layers


def test_layers_are_sparse_over_keys_and_values_as_the_cache_rounds_them(make_engine):
    profile = replace(two_layers(), record={"recipe": {"kv_cache_dtype": "fp8"}})
    engine = make_engine(profile, tested=False, kv_cache_dtype="fp8")
    first, second = engine.add(300), engine.add(305)
    engine.outputs([(first, 300)])
    layer = engine.server.fit.layers[0]
    assert (layer.tested, layer.rejected) == (True, None)
    engine.server.counters = Counters()
    out = engine.outputs([(second, 305)])
    assert {path for path, _ in engine.counted()} == {"s2o"}
    second.keys, second.values = (round_as_cached(tensor, "fp8") for tensor in (second.keys, second.values))
    check_close(out, alone(second, 305, layer.config(305)).out)


def test_which_caches_and_scales_a_profile_is_for():
    for kind, made_for in (("auto", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8"), ("fp8_e4m3", "fp8")):
        assert find_cache_obstacle(kind, made_for) is None
    assert find_cache_obstacle("fp8_e5m2", "fp8") == "the KV cache is fp8_e5m2"
    assert find_scales_obstacle(None, 1.0, torch.ones(8)) is None
    said = "the fp8 cache has scales up to 0.5, the profile was made for 1"
    assert find_scales_obstacle(torch.ones(1), torch.tensor([0.25, 0.5])) == said


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"supports_quant_query_input": True}, "queries are rounded to fp8, which the profile was not made for"),
        ({"layer": {}}, "the scales of the fp8 cache are not where they are expected"),
        ({"layer": {"_k_scale": 2.0, "_v_scale": 1.0}}, "the fp8 cache has scales up to 2, the profile was made for 1"),
        ({"layer": {"_k_scale": 1.0, "_v_scale": 1.0}}, None),
    ],
)
def test_what_vllms_layers_must_be_like(change, reason):
    server = FakeServer(two_layers(), Rank(), "cpu", 2048)
    engine = ENGINES["vllm"](server, kv_cache_dtype="fp8")
    if "layer" not in change:
        engine.impl.supports_quant_query_input = change["supports_quant_query_input"]
    assert engine.impl._find_cache_obstacle(SimpleNamespace(**change.get("layer", {})), engine.cache) == reason


def test_rounding_is_to_the_nearest_number_of_e4m3():
    numbers = torch.tensor([0.0, 1.0, 1.06, 1.07, -3.3, 500.0, -1e4])
    assert round_as_cached(numbers, "fp8").tolist() == [0.0, 1.0, 1.0, 1.125, -3.25, 448.0, -448.0]
    assert round_as_cached(numbers, "auto") is numbers
