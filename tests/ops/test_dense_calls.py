"""Calls that go dense and come again: nothing is checked or chosen a second time, and nothing else becomes dense."""

import sys

import pytest
import torch

from s2o_runtime.attention import api
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.replay import STEPS, _get_step
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.reference import dense
from s2o_runtime.reference.dense import FASTEST_FIRST, dense_attention, use_sdpa_backend
from support.naive import naive_attention

CONFIG = LayerConfig.uniform(4, tau=0.5, segment=64, tile=TileConfig(64, 64, 2))
OTHER = LayerConfig.uniform(4, tau=0.1, segment=128, tile=TileConfig(64, 64, 4))
DENSE = LayerConfig.uniform(4, mode="dense", tile=TileConfig(64, 64, 2))
MOST_FUNCTIONS = 30  # of Python that a call may enter which is known to go dense; the first enters some 60


@pytest.fixture
def checks(monkeypatch):
    """Return how often calls were checked."""
    seen = []
    original = api.Call.from_tensors

    def of(*arguments, **options):
        seen.append(arguments[0].shape)
        return original(*arguments, **options)

    monkeypatch.setattr(api.Call, "from_tensors", of)
    return seen


def inputs(queries, keys, batch=1, value_dim=32):
    q = torch.randn(batch, 4, queries, 32)
    return q, torch.randn(batch, 2, keys, 32), torch.randn(batch, 2, keys, value_dim)


def close(out, expected):
    torch.testing.assert_close(out.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "config", "value_dim"),
    [(1, 100, CONFIG, 32), (1, 100, CONFIG, 24), (30, 100, DENSE, 48), (100, 100, DENSE, 32), (40, 40, CONFIG, 24)],
)
def test_a_call_that_goes_dense_is_checked_once(queries, keys, config, value_dim, checks):
    for _ in range(3):
        q, k, v = inputs(queries, keys, value_dim=value_dim)
        close(s2o_attention(q, k, v, config), naive_attention(q, k, v))
    assert len(checks) == 1
    close(s2o_attention(q, k, v, config, scale=0.3), naive_attention(q, k, v, scale=0.3))
    assert len(checks) == 2
    out, _, stats = s2o_attention(q, k, v, config, return_stats=True)
    assert torch.equal(out, s2o_attention(q, k, v, config, return_stats=True).out)
    assert torch.equal(out, s2o_attention(q, k, v, config))
    assert (stats.backend, stats.config) == ("dense", config)
    assert len(checks) == 3


def test_the_layers_of_a_decode_step_are_alike_and_those_of_other_calls_are_not(checks):
    q, k, v = inputs(1, 50)
    for config in (CONFIG, OTHER, DENSE):
        close(s2o_attention(q, k, v, config), naive_attention(q, k, v))
    assert len(checks) == 1
    reasons = {s2o_attention(q, k, v, config, return_stats=True).stats.reason for config in (CONFIG, DENSE)}
    assert len(reasons) == 2  # what is asked for statistics is known for each layer by itself
    q, k, v = inputs(128, 300)
    for _ in range(2):
        assert torch.equal(s2o_attention(q, k, v, DENSE), dense_attention(q, k, v))
        assert not torch.equal(s2o_attention(q, k, v, CONFIG), dense_attention(q, k, v))


@pytest.mark.parametrize("config", [CONFIG, DENSE])
@pytest.mark.parametrize("queries", [1, 20])
def test_what_sdpa_does_not_know_is_never_forgotten(queries, config):
    q, k, v = inputs(queries, 60, batch=2)
    sinks = torch.randn(4) * 3
    for starts in ([0, 30], [50, 2]):
        options = {"kv_start": torch.tensor(starts), "softcap": 1.5, "sinks": sinks, "scale": 0.3}
        for names in (("kv_start",), ("softcap",), ("sinks",), ("scale",), tuple(options), ()):
            chosen = {name: options[name] for name in names}
            for _ in range(2):
                out = s2o_attention(q, k, v, config, backend="dense", **chosen)
                close(out, naive_attention(q, k, v, **chosen))
    for _ in range(2):
        assert s2o_attention(q, k, v, DENSE, return_lse=True).lse is not None


def test_calls_that_do_not_fit_are_refused_whatever_came_before():
    q, k, v = inputs(1, 50)
    for _ in range(3):
        s2o_attention(q, k, v, CONFIG)
        for wrong in ((q, k[:, :, :49], v), (q, k.half(), v), (q[:, :3], k, v), (q, k, v[:, :1]), (q[0], k, v)):
            with pytest.raises(InputError):
                s2o_attention(*wrong, CONFIG)
        with pytest.raises(InputError, match="2 query heads"):
            s2o_attention(q, k, v, LayerConfig.uniform(2, tau=0.5))
        with pytest.raises(ConfigError):
            s2o_attention(q, k, v, LayerConfig(CONFIG.heads, CONFIG.tile, last_rows=3))
        with pytest.raises(InputError, match="scale is -1"):
            s2o_attention(q, k, v, CONFIG, scale=-1.0)
    q.requires_grad_()  # and gradients flow through what was known without them
    s2o_attention(q, k, v, CONFIG).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize(("queries", "config"), [(1, CONFIG), (40, DENSE)])
def test_a_known_call_runs_little_python_and_few_are_known(queries, config):
    q, k, v = inputs(queries, 40)
    entered = []
    for _ in range(2):
        calls = []
        sys.setprofile(lambda frame, event, _, calls=calls: calls.append(frame) if event == "call" else None)
        try:
            s2o_attention(q, k, v, config)
        finally:
            sys.setprofile(None)
        entered.append(len(calls))
    assert entered[1] < MOST_FUNCTIONS < entered[0]
    q, k, v = inputs(1, STEPS + 30)
    for keys in range(2, STEPS + 30):
        s2o_attention(q, k[:, :, :keys], v[:, :, :keys], CONFIG)
    assert _get_step.cache_info().currsize == STEPS


@pytest.fixture
def orders(monkeypatch):
    """SDPA's order of backends and those enabled while it runs, on what is called a GPU."""
    seen = []
    by_shape = dense._call_sdpa

    def watched(*arguments):
        enabled = (torch._C._get_flash_sdp_enabled(), torch._C._get_cudnn_sdp_enabled())
        seen.append((torch._C._get_sdp_priority_order()[: len(FASTEST_FIRST)], enabled))
        return by_shape(*arguments)

    monkeypatch.setattr(dense, "_call_sdpa", watched)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return seen


def settings():
    return torch._C._get_sdp_priority_order(), torch._C._get_flash_sdp_enabled(), torch._C._get_cudnn_sdp_enabled()


@pytest.mark.parametrize("first", [None, *FASTEST_FIRST[1:]])
@pytest.mark.parametrize("flash", [True, False])
def test_the_fastest_backends_come_first_and_the_programs_own_order_stays(first, flash, orders):
    dense_attention(*inputs(8, 8))  # settles torch's own order
    before = settings()
    if first is not None:
        wanted = [int(first), *(number for number in before[0] if number != int(first))]
        torch._C._set_sdp_priority_order(wanted)
    torch.backends.cuda.enable_flash_sdp(flash)
    try:
        own = settings()
        for shape in ((8, 8), (1, 8), (3, 8)):
            dense_attention(*inputs(*shape))
            assert settings() == own
        assert set(map(str, orders[1:])) == {str(([int(backend) for backend in FASTEST_FIRST], (True, True)))}
        with use_sdpa_backend(FASTEST_FIRST[2]):
            dense_attention(*inputs(8, 8))
        assert orders[-1][0][0] == int(FASTEST_FIRST[2])
        assert orders[-1][1] == (False, False)
        with pytest.raises(RuntimeError):
            dense.run_sdpa(*inputs(8, 8)[:2], torch.randn(1, 3, 9, 32), 0.1)
        assert settings() == own
    finally:
        torch._C._set_sdp_priority_order(before[0])
        torch.backends.cuda.enable_flash_sdp(True)
