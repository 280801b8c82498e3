"""What the plan says of a model by its configuration alone."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3NextConfig,
)

from calibrate.model.estimate import ModelSizes
from calibrate.model.preflight import compute_attention_share, describe_loading, preflight
from calibrate.model.weights import skeleton
from s2o_runtime.errors import ModelError
from s2o_runtime.identity import geometry
from s2o_runtime.layer_kinds import UNLIMITED, layer_kinds, positions, visible_keys
from support.architectures import CASES
from support.models import CONFIGS, save

CPU = torch.device("cpu")
GEMMA = Gemma3TextConfig(sliding_window=1024)  # 22 of its 26 layers have windows


@pytest.mark.parametrize("name", CASES)
def test_the_plan_knows_what_the_tests_of_architectures_show(name):
    case = CASES[name]
    kinds = layer_kinds(case.config)
    assert [visible_keys(kind, case.config) is None for kind in kinds] == [
        reason not in ("linear", "convolution") and "sees" not in reason for reason in case.reasons
    ]
    options = {"device": "cpu", "lengths": (100,), "random_weights": True}
    if case.runs and case.others:
        said = f"1 of 2 run S2O ({kinds.index('full_attention')}); {case.others} stay as they are"
        assert preflight(str(name), case.config, **options).layers == said
    elif case.runs:
        assert preflight(str(name), case.config, **options).layers == "all 2 run S2O"
    else:
        with pytest.raises(ModelError, match=r"layer [01] cannot run S2O \("):
            preflight(str(name), case.config, **options)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (LlamaConfig(num_hidden_layers=2), ("full_attention",) * 2),
        (MistralConfig(num_hidden_layers=1, sliding_window=4096), ("sliding_attention",)),
        (MistralConfig(num_hidden_layers=1, sliding_window=131072), ("full_attention",)),
        (Phi3Config(num_hidden_layers=1, sliding_window=262144, max_position_embeddings=131072), ("full_attention",)),
        (Phi3Config(num_hidden_layers=1, sliding_window=2047, max_position_embeddings=4096), ("sliding_attention",)),
        (Qwen3NextConfig(num_hidden_layers=4), ("linear_attention",) * 3 + ("full_attention",)),
        (Llama4TextConfig(num_hidden_layers=4), ("chunked_attention",) * 3 + ("full_attention",)),
        (
            CONFIG_MAPPING["mllama"](text_config={"num_hidden_layers": 3, "cross_attention_layers": [1]}),
            ("full_attention", "cross_attention", "full_attention"),
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_the_kinds_of_layers(config, kinds):
    assert layer_kinds(config) == kinds


def test_what_is_no_decoder():
    with pytest.raises(ModelError, match="a model of type 't5' is an encoder with a decoder"):
        layer_kinds(CONFIG_MAPPING["t5"]())
    with pytest.raises(ModelError, match="does not say num_hidden_layers"):
        layer_kinds(CONFIG_MAPPING["resnet"]())
    with pytest.raises(ModelError, match="has no layer of full_attention, only 32 of"):
        geometry(CONFIG_MAPPING["mamba"]())
    assert positions(CONFIG_MAPPING["mamba"]()) == UNLIMITED


def test_the_share_of_attention():
    """Against counting the pairs one by one."""
    length = 3000
    window = sum(min(row + 1, 1024) for row in range(length))
    full = length * (length + 1) // 2
    assert compute_attention_share(GEMMA, length) == pytest.approx(4 * full / (4 * full + 22 * window), rel=1e-9)
    assert compute_attention_share(GEMMA, 1000) == pytest.approx(4 / 26)
    assert compute_attention_share(GEMMA, 131072) == pytest.approx(0.92, abs=0.01)
    assert compute_attention_share(Qwen3NextConfig(), 1000) == 1.0  # linear layers have no pairs
    assert compute_attention_share(CONFIGS["llama"], 7) == 1.0
    chunks = CASES["llama4"].config  # of 48
    chunked = sum(row % 48 + 1 for row in range(480))
    full = 480 * 481 // 2
    assert compute_attention_share(chunks, 480) == pytest.approx(full / (full + chunked), rel=1e-9)


def test_how_a_checkpoint_is_loaded(tmp_path):
    folder = str(save("llama", tmp_path))
    model = skeleton(CONFIGS["llama"], torch.bfloat16, CPU)
    resident = ModelSizes.of(model, "cpu")

    def said(name, sizes):
        return describe_loading(name, CONFIGS["llama"], model, sizes, "cpu", False)

    total = sum(parameter.numel() for parameter in model.parameters()) * 4 / 1e9
    assert said(folder, resident) == f"{total:.3g} GB, which stay on the device"
    sizes = replace(resident, resident=False)
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters()) * 4 / 1e9
    streamed = f"layer by layer, {layer:.3g} GB at a time of {total:.3g} GB"
    assert said(folder, sizes) == streamed
    assert said("org/name", sizes).startswith(f"{streamed}; as a whole if its files")
    index = {"weight_map": {"model.layers.0.mlp.experts.0.gate_proj.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "transformers makes its tensors of others" in said(folder, sizes)
