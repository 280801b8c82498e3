"""Heads of other methods beside S2O's in one layer: the op, the kernels, the profile."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.baselines import baseline_attention
from s2o_runtime.baselines.settings import PBS, Prism, Sparge
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.devices import DeviceIdentity, interpreted
from s2o_runtime.errors import ConfigError, InputError, ProfileError
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, load_profile, save_profile
from support.marks import all_but_first
from support.profiles import rewrite

pytestmark = pytest.mark.usefixtures("small_sample")

SLOW = pytest.mark.slow(reason="more cases of a kernel in Triton's interpreter, seconds each")

TILE = TileConfig(block_m=64, block_n=32, chunk=2, num_warps=4, num_stages=1)
HEADS = (
    HeadConfig(2.0, 128, tail=True),
    HeadConfig(mode="baseline", baseline=PBS(keep=0.5, segment=128, block=64)),
    HeadConfig(mode="dense"),
    HeadConfig(mode="baseline", baseline=Sparge(keep=0.5, similarity=-1.0)),
)
MIXED = LayerConfig(HEADS, TILE)
kernels = pytest.param(
    "triton", marks=pytest.mark.skipif(not interpreted(), reason="a GPU is here: see tests/gpu/test_baselines_gpu.py")
)


def inputs(batch=1, q_len=500, kv_len=500, dtype=torch.float32):
    q = (2 * torch.randn(batch, 4, q_len, 64)).to(dtype)
    k, v = (torch.randn(batch, 2, kv_len, 64).to(dtype) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("backend", ["reference", kernels])
@pytest.mark.parametrize(
    ("batch", "q_len", "starts"),
    all_but_first(
        [
            pytest.param(1, 330, None, id="whole"),
            pytest.param(2, 101, None, id="chunk"),
            pytest.param(2, 330, (0, 77), id="padded"),
        ],
        SLOW,
    ),
)
def test_every_head_is_what_it_is_alone(backend, batch, q_len, starts, nan_filled):
    q, k, v = inputs(batch, q_len, 330)
    kv_start = None if starts is None else torch.tensor(starts)
    out, _, stats = s2o_attention(q, k, v, MIXED, kv_start=kv_start, backend=backend, return_stats=True)

    no_blocks = tuple(HeadConfig(mode="dense") if head.mode == "baseline" else head for head in HEADS)
    ours, _, our_stats = s2o_attention(
        q, k, v, replace(MIXED, heads=no_blocks), kv_start=kv_start, backend=backend, return_stats=True
    )
    assert_close(out[:, ::2], ours[:, ::2], rtol=0, atol=0)
    assert_close(stats.density[::2], our_stats.density[::2])
    for head in (1, 3):
        alone, of_method = baseline_attention(
            q, k, v, HEADS[head].baseline, kv_start=kv_start, heads=[head], backend=backend
        )
        assert_close(out[:, head], alone[:, head], rtol=1e-4, atol=1e-5)  # products of other sizes round elsewhere
        assert 0.1 < float(of_method.density[0]) < 0.95
        assert_close(stats.density[head], of_method.density[0], rtol=0.01, atol=0)  # whole keys a row


@pytest.mark.skipif(not interpreted(), reason="a GPU is here: see tests/gpu")
def test_the_kernels_skip_what_they_do_not_compute():
    from s2o_runtime.kernels.call import Call, head_tables
    from s2o_runtime.kernels.keys import keys_of
    from s2o_runtime.kernels.prefill import prefill
    from s2o_runtime.shapes import call_shape

    q, k, v = inputs(1, 130, 400)
    config = LayerConfig((HeadConfig(mode="dense"), *(HEADS[1],) * 3), TILE)
    call = Call(config, call_shape(q, k, v), 0.125, head_tables(config, q.device))
    out = torch.full_like(q, 7.0)
    visited = torch.full((1, 4, 3), 7, dtype=torch.int32)
    prefill(q, keys_of(k, call), v, None, out, visited, call, range(130), None)
    assert (out[:, 1:] == 7.0).all()
    assert (visited[:, 1:] == 0).all()
    dense, _, _ = s2o_attention(q, k, v, LayerConfig.uniform(4, mode="dense", tile=TILE), return_lse=True)
    assert_close(out[:, 0], dense[:, 0])


def test_what_other_methods_cannot_do_runs_dense_and_says_so():
    q, k, v = inputs()
    out, _, stats = s2o_attention(q, k, v, MIXED, return_lse=True, return_stats=True)
    assert (stats.backend, stats.reason) == ("dense", f"the log-sum-exp cannot be done by {HEADS[1].baseline}")
    assert_close(out, s2o_attention(q, k, v, MIXED, backend="dense"))
    edges = torch.tensor([0, 200, 500], dtype=torch.int32)
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    _, _, stats = s2o_attention_varlen(*packed, edges, edges, 300, 300, MIXED, return_stats=True)
    assert stats.backend == "dense"
    assert "packed sequences cannot be done by" in stats.reason
    for backend in ("triton", "reference"):
        with pytest.raises(InputError, match=r'the log-sum-exp cannot be done by pbs.*: run with backend="auto"'):
            s2o_attention(q, k, v, MIXED, return_lse=True, backend=backend)


@pytest.mark.parametrize(("settings", "block"), [(PBS(block=64), 64), (Sparge(), 128), (Prism(block=256), 256)])
def test_a_prompt_that_fits_one_block_of_the_baseline_is_dense(settings, block):
    config = LayerConfig((HeadConfig(mode="baseline", baseline=settings),) * 4, TILE)
    stats = s2o_attention(*inputs(1, block, block), config, return_stats=True).stats
    assert (stats.backend, stats.reason) == ("dense", "the whole prompt fits one segment")
    assert s2o_attention(*inputs(1, block + 1, block + 1), config, return_stats=True).stats.backend == "reference"


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (HeadConfig(mode="baseline"), 'mode is "baseline" and baseline None'),
        (HeadConfig(baseline=PBS()), 'mode is "s2o" and baseline pbs'),
        (HeadConfig(mode="baseline", baseline=PBS(keep=2.0)), "keep"),
    ],
)
def test_bad_heads_are_refused(head, message):
    with pytest.raises(ConfigError, match=message):
        head.validate()


def profile(config=MIXED):
    device = DeviceIdentity("cpu", "cpu", (0, 0), 0, 0)
    return Profile("m", Geometry("llama", 1, 4, 2, 64), "f" * 16, device, (1024, 4096), ((config,), (config,)))


def test_a_profile_keeps_baselines(tmp_path):
    path = tmp_path / "p.safetensors"
    changed = replace(MIXED, heads=(*HEADS[:3], HeadConfig(mode="baseline", baseline=Prism(keep=0.7))))
    mixed = replace(profile(), layers=((MIXED,), (changed,)))
    save_profile(mixed, path)
    assert load_profile(path) == mixed
    assert load_profile(path).layer_config(0, 2048).heads[1] == HEADS[1]  # nothing is interpolated in it


def test_a_profile_without_baselines_names_none(tmp_path):
    path = tmp_path / "p.safetensors"
    save_profile(profile(replace(MIXED, heads=(HEADS[0],) * 4)), path)
    assert b'\\"baselines\\":[]' in path.read_bytes()


@pytest.mark.parametrize(
    ("baselines", "message"),
    [
        (None, "field baselines is missing"),
        ([], "tensor mode holds 2: expected one of"),
        (["pbs:keep=0.5"] * 255, "field baselines has 255 entries: expected at most 254"),
        (["pbs:keep=0.5,segment=128,block=64", 3], r"field baselines\[1\] is 3"),
        (["pbs:keep=0.5,segment=128,block=64", "x" * 1000], r"field baselines\[1\] is 'xx"),
        (["pbs:keep=0.5,segment=128,block=64", "quantum"], r"field baselines\[1\]: .*quantum"),
        (["pbs:keep=0.5,segment=128,block=64", "pbs:keep=7"], r"field baselines\[1\]: .*keep"),
        (["pbs:keep=0.5,segment=128,block=64"], "tensor mode holds 3: expected one of"),
        (["pbs:keep=0.5,segment=128,block=64", "sparge:keep=0.4"], "the digest does not match"),
    ],
)
def test_baselines_that_are_none_are_refused_by_name(tmp_path, baselines, message):
    path = tmp_path / "p.safetensors"
    save_profile(profile(), path)

    def change(document):
        del document["baselines"]
        document.update({} if baselines is None else {"baselines": baselines})

    rewrite(path, change)
    with pytest.raises(ProfileError, match=message):
        load_profile(path)
