"""On a GPU in bfloat16: the self-test of every architecture that it holds for, and calibrations of mixed models."""

from dataclasses import replace

import pytest
import torch

from calibrate import calibrate
from calibrate.model.models import from_memory
from calibrate.model.self_test import run_self_test
from calibrate.model.weights import get_model_class
from s2o_runtime import explain, patched
from s2o_runtime.config import LayerConfig
from s2o_runtime.devices import get_capability, identify
from s2o_runtime.huggingface import hf
from s2o_runtime.huggingface.hf import get_layer_states
from s2o_runtime.identity import fingerprint, geometry
from s2o_runtime.layer_kinds import get_window
from s2o_runtime.profile import Profile, save_profile
from s2o_runtime.tiles import get_default_tile
from support.architectures import CASES, RUNNING
from support.tiny import tiny_tokenizer
from tensor_parallel import run_two_ranks

BUDGET = {"budget_rel_mse": 0.3, "lengths": (2048,), "segments": (256, 512), "trials": 2}
QUICK = BUDGET | {"num_prompts": 1, "num_held_out": 1, "num_certify": 0, "worst_rows": 0, "hide_needles": False}

HEAD_TAUS = (0.01, 0.3, 1.0, 10.0)  # of a model's four heads: from all pairs computed to few
DENSITY_APART = 0.04  # of two runs in bfloat16: few of the row tiles stop a chunk earlier or later

UNLIMITED = [name for name, case in CASES.items() if case.runs_all and get_window(case.config) is not None]


def on_gpu(name):
    """The architecture's tiny model for prompts of 4096 tokens, with heads of 64 dimensions where it may choose."""
    torch.manual_seed(1)
    config = CASES[name].config
    text = config.get_text_config()
    if name in UNLIMITED:  # a window of as many keys as the model has positions hides none
        text.sliding_window *= 4096 // text.max_position_embeddings
    text.max_position_embeddings = 4096
    return get_model_class(config).from_config(config, dtype=torch.bfloat16).eval().cuda()


def a_threshold_for_each_head(model, taus):
    """A profile of every layer with the same thresholds, one for each query head."""
    shape, device = geometry(model.config), torch.device("cuda", 0)
    tile = get_default_tile(shape.head_dim, get_capability(device))
    config = LayerConfig.uniform(len(taus), tau=1.0, segment=256, tile=tile)
    config = replace(config, heads=tuple(replace(head, tau=tau) for head, tau in zip(config.heads, taus, strict=True)))
    lengths = (2048, 8192)
    layers = ((config,) * shape.layers,) * len(lengths)
    return Profile("tiny", shape, fingerprint(model), identify(device), lengths, layers)


def calibrated_and_run(model, out):
    """A model's profile, and what its layers ran with it."""
    result = calibrate(model, tiny_tokenizer(), progress=False, out=out, allow_regression=True, **QUICK)
    with torch.no_grad(), patched(model, out, strict=True):
        assert bool(model(torch.randint(8, 120, (1, 2048), device="cuda:0")).logits.isfinite().all())
        return result.profile, explain(model)


@pytest.mark.parametrize("name", RUNNING)
def test_the_self_test_holds(name):
    run_self_test(from_memory(on_gpu(name), tiny_tokenizer(), name))


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "qwen3-next", "qwen2.5-vl", "granite", "gemma3-vision"])
def test_a_model_in_memory_is_calibrated_and_runs(name, tmp_path):
    model = on_gpu(name)
    profile, ran = calibrated_and_run(model, tmp_path / "p.safetensors")
    numbers = {profile.geometry.get_layer_number(row) for row in range(profile.geometry.layers)}
    assert {row["layer"] for row in ran if row["path"] == "s2o"} <= numbers <= {row["layer"] for row in ran}


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
@torch.no_grad()
def test_windows_of_long_prompts_need_no_mask_of_rows_by_keys(name, monkeypatch):
    """In float32 the logits are those with a mask; and 16384 tokens, whose mask alone would have 256 MiB, take less."""
    config = CASES[name].config
    config.get_text_config().max_position_embeddings = 16384
    torch.manual_seed(1)
    model = get_model_class(config).from_config(config).eval().cuda()
    hf.register()
    model.set_attn_implementation("s2o")
    ids = torch.randint(8, 120, (1, 2000), device="cuda")
    masked = model(ids, use_cache=False).logits
    monkeypatch.setattr(hf, "SMALL_MASK", 0)
    difference = model(ids, use_cache=False).logits - masked
    assert float(difference.square().mean() / masked.square().mean()) < 1e-4
    model.bfloat16()
    ids = torch.randint(8, 120, (1, 16384), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert bool(model(ids, use_cache=False, logits_to_keep=1).logits.isfinite().all())
    assert torch.cuda.max_memory_allocated() - before < 200 << 20


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_spread_over_two_gpus(tmp_path):
    """By accelerate, whose hooks move what a layer gets to the layer's GPU: it is calibrated, and runs as on one GPU.

    What a layer on the second GPU gets in place of a mask is a copy. That S2O runs there is shown with a profile made
    by hand, because a calibration of so small a model finds dense attention faster and makes its layers dense.
    """
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = on_gpu("llama")
    profile = a_threshold_for_each_head(model, HEAD_TAUS)
    ids = torch.randint(8, 120, (2, 4096), generator=torch.Generator().manual_seed(0)).cuda()
    padding = torch.ones_like(ids)
    padding[1, :1000] = 0
    real = padding.bool().cpu()

    @torch.no_grad()
    def runs():
        with patched(model, profile, strict=True):
            logits = model(ids, attention_mask=padding, use_cache=False).logits.float().cpu()[real]
            assert all(path == "s2o" for state in get_layer_states(model) for path, _ in state.counts), explain(model)
            return logits, [state.last.density.cpu() for state in get_layer_states(model)]

    expected, densities = runs()
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    places |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    accelerate.dispatch_model(model, places)
    logits, spread = runs()
    torch.testing.assert_close(torch.stack(spread), torch.stack(densities), rtol=0, atol=1e-3)
    assert (logits - expected).square().mean() / expected.square().mean() < 1e-6  # the same kernels
    profile, _ = calibrated_and_run(model, tmp_path / "p.safetensors")
    assert profile.geometry.layers == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_of_a_patched_model_give_what_one_gpu_gives(tmp_path):
    """Split by transformers' tp_plan, through NCCL; each rank runs its own heads of the profile, on its own GPU.

    Every head has a threshold of its own, so a rank that took another's would compute other pairs. The profile is made
    by hand: a calibration of so small a model finds dense attention faster on a GPU and makes its layers dense.
    """
    pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers needs for tp_plan")
    model, length = on_gpu("llama"), 4096
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "p.safetensors"
    save_profile(a_threshold_for_each_head(model, HEAD_TAUS), out)
    ids = torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad(), patched(model, out, strict=True):
        expected = model(ids, use_cache=False).logits.float().cpu()
        assert all(path == "s2o" for state in get_layer_states(model) for path, _ in state.counts), explain(model)
        whole = [state.last.density.cpu() for state in get_layer_states(model)]
    assert (whole[0].sort().values.diff() > 2 * DENSITY_APART).all()  # the heads differ
    for rank, of_rank in enumerate(run_two_ranks(tmp_path / "model", out, length, tmp_path / "out")):
        assert all(path == "s2o" for counts in of_rank["paths"] for path, _ in counts), of_rank["paths"]
        half = slice(2 * rank, 2 * rank + 2)
        assert of_rank["heads"] == [(half.start, half.stop)] * len(whole)
        for mine, of_all in zip(of_rank["densities"], whole, strict=True):
            torch.testing.assert_close(mine, of_all[half], rtol=0, atol=DENSITY_APART)
        off = (of_rank["logits"] - expected).square().mean() / expected.square().mean()
        assert off < 1e-2  # bfloat16, whose products are summed in another order
        assert not [text for text in of_rank["said"] if "calibrated on" in text]
