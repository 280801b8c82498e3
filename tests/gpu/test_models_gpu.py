"""On a GPU in bfloat16: the self-test of every architecture that it holds for, and calibrations of mixed models."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from calibrate import calibrate
from calibrate.model.models import in_memory, load
from calibrate.model.self_test import self_test
from calibrate.model.weights import model_class
from s2o_runtime import explain, patched
from s2o_runtime.huggingface import hf
from s2o_runtime.identity import fingerprint
from s2o_runtime.layer_kinds import window
from support.architectures import CASES, RUNNING
from support.tiny import tiny_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

BUDGET = {"budget_rel_mse": 0.3, "lengths": (2048,), "segments": (256, 512), "representatives": (1,), "trials": 2}
QUICK = BUDGET | {"num_prompts": 1, "num_held_out": 1, "num_certify": 0, "worst_rows": 0, "hide_needles": False}

UNLIMITED = [name for name, case in CASES.items() if case.runs_all and window(case.config) is not None]


def on_gpu(name):
    """The architecture's tiny model for prompts of 4096 tokens, with heads of 64 dimensions where it may choose."""
    torch.manual_seed(1)
    config = CASES[name].config
    text = config.get_text_config()
    if name in UNLIMITED:  # a window of as many keys as the model has positions hides none
        text.sliding_window *= 4096 // text.max_position_embeddings
    text.max_position_embeddings = 4096
    return model_class(config).from_config(config, dtype=torch.bfloat16).eval().cuda()


@pytest.mark.parametrize("name", RUNNING)
def test_the_self_test_holds(name):
    self_test(in_memory(on_gpu(name), tiny_tokenizer(), name))


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "qwen3-next", "qwen2.5-vl", "granite", "gemma3-vision"])
def test_a_model_in_memory_is_calibrated_and_runs(name, tmp_path):
    model = on_gpu(name)
    out = tmp_path / "p.safetensors"
    result = calibrate(model, tiny_tokenizer(), progress=False, out=out, allow_regression=True, **QUICK)
    numbers = [result.profile.geometry.layer_number(row) for row in range(result.profile.geometry.layers)]
    ids = torch.randint(8, 120, (1, 2048), device="cuda")
    with torch.no_grad(), patched(model, out, strict=True):
        assert bool(model(ids).logits.isfinite().all())
        assert {row["layer"] for row in explain(model) if row["path"] == "s2o"} <= set(numbers)
        assert set(numbers) <= {row["layer"] for row in explain(model)}


@pytest.mark.parametrize("name", ["gemma3", "llama4", "cohere2", "lfm2"])
def test_a_mixed_model_streams_as_it_runs_whole(name, tmp_path):
    """The same fingerprint, and the same profile whether its layers come one at a time or not."""
    on_gpu(name).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    streamed, resident = (load(str(tmp_path / "model"), "cuda", resident=stays) for stays in (False, True))
    assert streamed.fingerprint == resident.fingerprint
    for loaded in (streamed, resident):
        self_test(loaded)
    assert all(parameter.is_meta for parameter in streamed.model.parameters())


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
@torch.no_grad()
def test_windows_of_long_prompts_need_no_mask_of_rows_by_keys(name, monkeypatch):
    """In float32 the logits are those with a mask; and 16384 tokens, whose mask alone would have 256 MiB, take less."""
    config = CASES[name].config
    config.get_text_config().max_position_embeddings = 16384
    torch.manual_seed(1)
    model = model_class(config).from_config(config).eval().cuda()
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


def test_a_model_in_4_bits(tmp_path):
    """Its fingerprint is the same before and after it ran."""
    for package in ("bitsandbytes", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from transformers import BitsAndBytesConfig

    plain = on_gpu("llama")
    model = (
        type(plain)
        .from_pretrained(
            None,
            config=plain.config,
            state_dict=plain.state_dict(),
            quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
            device_map={"": "cuda:0"},
            dtype=torch.bfloat16,
        )
        .eval()
    )
    before = fingerprint(model)
    assert before != fingerprint(plain)
    out = tmp_path / "p.safetensors"
    result = calibrate(model, tiny_tokenizer(), progress=False, out=out, allow_regression=True, **QUICK)
    assert result.profile.fingerprint == before == fingerprint(model)
    with torch.no_grad(), patched(model, out, strict=True):
        assert bool(model(torch.randint(8, 120, (1, 2048), device="cuda")).logits.isfinite().all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_spread_over_two_gpus(tmp_path):
    """By accelerate, whose hooks move what a layer gets to the layer's GPU."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = on_gpu("llama")
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    places |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    accelerate.dispatch_model(model, places)
    out = tmp_path / "p.safetensors"
    result = calibrate(model, tiny_tokenizer(), progress=False, out=out, allow_regression=True, **QUICK)
    assert result.profile.geometry.layers == 2
    with torch.no_grad(), patched(model, out, strict=True):
        assert bool(model(torch.randint(8, 120, (1, 2048), device="cuda:0")).logits.isfinite().all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_of_a_patched_model_give_what_one_gpu_gives(tmp_path):
    """Split by transformers' tp_plan, through NCCL; each rank runs its own heads of the profile, on its own GPU."""
    pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers needs for tp_plan")
    model, length = on_gpu("llama"), 2048
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "p.safetensors"
    calibrate(model, tiny_tokenizer(), progress=False, out=out, allow_regression=True, **QUICK)
    ids = torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad(), patched(model, out, strict=True):
        expected = model(ids, use_cache=False).logits.float().cpu()
    program = Path(__file__).parents[1] / "tensor_parallel.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
    arguments = [str(tmp_path / "model"), str(out), str(length), str(tmp_path / "out")]
    run = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in range(2):
        of_rank = torch.load(tmp_path / f"out.{rank}")
        off = (of_rank["logits"] - expected).square().mean() / expected.square().mean()
        assert off < 1e-2  # bfloat16, whose products are summed in another order
        assert not [text for text in of_rank["said"] if "calibrated on" in text]
