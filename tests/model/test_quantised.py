"""Quantised checkpoints, as transformers loads them: what each format's package reads is calibrated, and stays itself.

Formats whose packages are not installed are skipped with the package's name; `make transformers` installs those
that run on every CPU.
"""

import json
from copy import deepcopy
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file

from calibrate import calibrate
from calibrate.commands import calibrate as command
from calibrate.model.models import from_memory, load
from calibrate.model.weights import InMemory
from s2o_runtime import load_profile, patched
from s2o_runtime.errors import ModelError
from s2o_runtime.identity import fingerprint
from support.models import build
from support.tiny import QUICKEST, save_tiny, tiny_tokenizer

IDS = torch.randint(8, 120, (1, 90), generator=torch.Generator().manual_seed(1))
INT8_CHANNELS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def by_transformers(make_settings):
    """A checkpoint that transformers quantises and saves."""

    def save(model, folder):
        options = {"config": model.config, "state_dict": model.state_dict(), "dtype": torch.float32}
        type(model).from_pretrained(None, quantization_config=make_settings(), **options).save_pretrained(folder)

    return save


def bits(**options):
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **options)


def torchao_int8():
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def by_hand(settings, pack, dtype=torch.float32):
    """A checkpoint whose linear layers but the head are packed as the format says; the others are of this type."""

    def save(model, folder):
        model = deepcopy(model).to(dtype)
        model.save_pretrained(folder)
        tensors = {}
        for name, value in model.state_dict().items():
            packed = pack(value.float()) if name.endswith("_proj.weight") else {"weight": value}
            tensors |= {f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in packed.items()}
        save_file(tensors, folder / "model.safetensors")
        write_settings(folder, settings)

    return save


def write_settings(folder, settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def int8_channels(weight):
    """compressed-tensors: integers, and a scale for each row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def fp8_blocks(weight):
    """DeepSeek's fp8: blocks of 64 x 64 share a scale, which divides their sizes here."""
    rows, columns = (size // 64 for size in weight.shape)
    blocks = weight.reshape(rows, 64, columns, 64)
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    packed = (blocks / scale[:, None, :, None]).reshape(weight.shape)
    return {"weight": packed.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def nibbles(values, order):
    """Integers of 4 bits, eight in an int32 along the last dimension, in the order that a format has."""
    parts = values.reshape(*values.shape[:-1], -1, 8)[..., list(order)].to(torch.int64)
    words = (parts << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def int4_groups(weight):
    """Integers 0 .. 15 around 8, [in, out], and a scale for each 32 inputs: as GPTQ and AWQ mean them."""
    groups = weight.T.reshape(-1, 32, weight.shape[0])
    scale = groups.abs().amax(1, keepdim=True) / 7
    return ((groups / scale).round() + 8).reshape(weight.T.shape), scale[:, 0].half()


def gptq(weight):
    values, scales = int4_groups(weight)
    zeros = torch.full_like(scales, 7)  # the format of AutoGPTQ stores one less
    return {
        "qweight": nibbles(values.T.contiguous(), range(8)).T,
        "qzeros": nibbles(zeros, range(8)),
        "scales": scales,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // 32,
    }


def awq(weight):
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    values, scales = int4_groups(weight)
    return {"qweight": nibbles(values, order), "qzeros": nibbles(torch.full_like(scales, 8), order), "scales": scales}


GROUP = {"targets": ["Linear"], "weights": INT8_CHANNELS, "format": "int-quantized"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
COMPRESSED |= {"config_groups": {"group_0": GROUP}, "ignore": ["lm_head"]}
FP8 = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}
INT4 = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
GPTQ, AWQ = {"quant_method": "gptq"} | INT4, {"quant_method": "awq", "zero_point": True} | INT4
FORMATS = {  # the packages that read it, and what makes a checkpoint of it
    "bitsandbytes-4": (("bitsandbytes", "accelerate"), by_transformers(lambda: bits(load_in_4bit=True))),
    "bitsandbytes-8": (("bitsandbytes", "accelerate"), by_transformers(lambda: bits(load_in_8bit=True))),
    "torchao": (("torchao",), by_transformers(torchao_int8)),
    "compressed-tensors": (("compressed_tensors",), by_hand(COMPRESSED, int8_channels)),
    "fp8": (("accelerate",), by_hand(FP8, fp8_blocks)),
}
for dtype in (torch.float32, torch.float16, torch.bfloat16):  # each is run by another kernel
    name = str(dtype).removeprefix("torch.")
    FORMATS[f"gptq-{name}"] = (("gptqmodel", "optimum", "accelerate"), by_hand(GPTQ, gptq, dtype))
    FORMATS[f"awq-{name}"] = (("gptqmodel", "accelerate"), by_hand(AWQ, awq, dtype))


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(request, tmp_path_factory):
    """The model before it was quantised, and the folder with its quantised checkpoint."""
    packages, save = FORMATS[request.param]
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    model = build("llama")
    save(model, folder)
    tiny_tokenizer().save_pretrained(folder)
    return model, folder


def test_it_is_loaded_as_a_whole_keeps_its_fingerprint_and_is_calibrated(checkpoint, tmp_path):
    """A loaded model computes nearly what it was made of; running it changes nothing that names it, nor naming
    it what it computes."""
    model, folder = checkpoint
    loaded, out = load(str(folder), "cpu"), tmp_path / "p.safetensors"
    assert isinstance(loaded.weights, InMemory)
    with torch.no_grad():
        exact, quantised = model(IDS).logits, loaded.model(IDS).logits.float()
        error = (quantised - exact).square().mean() / exact.square().mean()
        assert 1e-7 < error < 0.2
        assert fingerprint(loaded.model) == loaded.fingerprint != fingerprint(model)
        assert from_memory(loaded.model, loaded.tokenizer).fingerprint == loaded.fingerprint
        assert torch.equal(loaded.model(IDS).logits.float(), quantised)
    assert calibrate(str(folder), progress=False, out=out, device="cpu", budget_rel_mse=1e-2, **QUICKEST).written
    with torch.no_grad(), patched(load(str(folder), "cpu").model, load_profile(out), strict=True) as model:
        assert bool(model(IDS).logits.isfinite().all())


NEEDED = {  # formats, settings beside their names, and what is missing where nothing is installed
    "bitsandbytes": ({"load_in_4bit": True}, ("bitsandbytes", "accelerate")),
    "gptq": (INT4, ("gptqmodel",)),
    "awq": (INT4, ("gptqmodel",)),
    "fp8": (FP8, ("accelerate",)),
    "compressed-tensors": (COMPRESSED, ("compressed_tensors",)),
    "quanto": ({"weights": "int8"}, ("optimum",)),
    "torchao": ({"quant_type": "int8_weight_only"}, ("torchao",)),
    "mxfp4": ({}, ("accelerate",)),
    "hqq": ({}, ("hqq",)),
}


@pytest.mark.parametrize("method", NEEDED)
def test_a_missing_package_is_one_sentence_before_anything_is_loaded(method, tmp_path, capsys):
    settings, packages = NEEDED[method]
    if all(find_spec(package) for package in packages):
        pytest.skip(f"{' and '.join(packages)} are installed")
    folder = save_tiny(tmp_path)
    (folder / "model.safetensors").unlink()  # it is not read
    write_settings(folder, settings | {"quant_method": method})
    capsys.readouterr()
    assert command.main(["--model", str(folder), "--device", "cpu", "--out", str(tmp_path / "out" / "p")]) == 4
    (line,) = [line for line in capsys.readouterr().err.strip().splitlines() if "[transformers]" not in line]
    assert f"model '{folder}' is quantised ({method}) and a package for that is missing (" in line


@pytest.mark.parametrize("method", ["higgs", "spqr", "fp_quant", "fbgemm_fp8", "unknown"])
def test_a_format_that_is_unknown_or_needs_a_gpu_is_one_sentence_on_a_cpu(method, tmp_path):
    folder = save_tiny(tmp_path)
    write_settings(folder, {"quant_method": method})
    message = rf"is quantised \({method}\) in a format that cannot be loaded on a cpu"
    with pytest.raises(ModelError, match=f"{message}|transformers does not know: unknown") as error:
        load(str(folder), "cpu")
    assert "\n" not in str(error.value)
