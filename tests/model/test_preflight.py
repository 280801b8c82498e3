"""Tests of what the plan says of a model by its configuration alone."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, Llama4TextConfig, MistralConfig, Phi3Config, Qwen3NextConfig

from calibrate.model.estimate import ModelSizes
from calibrate.model.preflight import compute_attention_share, describe_loading, make_preflight
from calibrate.model.weights import build_skeleton
from s2o_runtime.errors import ModelError
from s2o_runtime.identity import geometry
from s2o_runtime.layer_kinds import UNLIMITED, count_visible_keys, get_max_positions, list_layer_kinds
from support.architectures import CASES
from support.models import CONFIGS, save

CPU = torch.device("cpu")
MLLAMA_TEXT = {"num_hidden_layers": 3, "cross_attention_layers": [1]}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_knows_what_the_tests_of_architectures_show(name):
    case = CASES[name]
    kinds = list_layer_kinds(case.config)
    assert [count_visible_keys(kind, case.config) is None for kind in kinds] == [
        reason not in ("linear", "convolution") and "sees" not in reason for reason in case.reasons
    ]
    options = {"device": "cpu", "lengths": (100,), "random_weights": True}
    if case.runs:
        some = f"1 of 2 run S2O ({kinds.index('full_attention')}); {case.others} stay as they are"
        expected = some if case.others else "all 2 run S2O"
        assert make_preflight(str(name), case.config, **options).layers == expected
    else:
        with pytest.raises(ModelError, match=r"layer [01] cannot run S2O \("):
            make_preflight(str(name), case.config, **options)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (MistralConfig(num_hidden_layers=1, sliding_window=4096), "sliding"),
        (MistralConfig(num_hidden_layers=1, sliding_window=131072), "full"),
        (Phi3Config(num_hidden_layers=1, sliding_window=262144, max_position_embeddings=131072), "full"),
        (Phi3Config(num_hidden_layers=1, sliding_window=2047, max_position_embeddings=4096), "sliding"),
        (Qwen3NextConfig(num_hidden_layers=4), "linear linear linear full"),
        (Llama4TextConfig(num_hidden_layers=4), "chunked chunked chunked full"),
        (CONFIG_MAPPING["mllama"](text_config=MLLAMA_TEXT), "full cross full"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_the_kinds_of_layers(config, kinds):
    assert list_layer_kinds(config) == tuple(f"{kind}_attention" for kind in kinds.split())


def test_what_is_no_decoder():
    for config, message in (("t5", "type 't5' is an encoder with a"), ("resnet", "does not say num_hidden_layers")):
        with pytest.raises(ModelError, match=message):
            list_layer_kinds(CONFIG_MAPPING[config]())
    with pytest.raises(ModelError, match="has no layer of full_attention, only 32 of"):
        geometry(CONFIG_MAPPING["mamba"]())
    assert get_max_positions(CONFIG_MAPPING["mamba"]()) == UNLIMITED


@given(st.integers(1, 300), st.integers(2, 200), st.sampled_from(["sliding_attention", "chunked_attention"]))
def test_the_share_of_attention(length, size, kind):
    """Against counting the pairs one by one. Linear layers have no pairs."""
    kinds = [kind, "full_attention", "linear_attention", kind]
    if kind == "sliding_attention":
        config = Qwen3NextConfig(num_hidden_layers=4, sliding_window=size, layer_types=kinds)
        seen = [min(row + 1, size) for row in range(length)]
    else:
        config = Llama4TextConfig(num_hidden_layers=4, attention_chunk_size=size, layer_types=kinds)
        seen = [row % size + 1 for row in range(length)]
    full = length * (length + 1) / 2
    assert compute_attention_share(config, length) == pytest.approx(full / (full + 2 * sum(seen)), rel=1e-9)


def test_how_a_checkpoint_is_loaded(tmp_path):
    folder = str(save("llama", tmp_path))
    model = build_skeleton(CONFIGS["llama"], torch.bfloat16, CPU)
    resident = ModelSizes.from_model(model, "cpu")

    def describe(name, sizes):
        return describe_loading(name, CONFIGS["llama"], model, sizes, "cpu", False)

    total = sum(parameter.numel() for parameter in model.parameters()) * 4 / 1e9
    assert describe(folder, resident) == f"{total:.3g} GB, which stay on the device"
    sizes = replace(resident, resident=False)
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters()) * 4 / 1e9
    streamed = f"layer by layer, {layer:.3g} GB at a time of {total:.3g} GB"
    assert describe(folder, sizes) == streamed
    assert describe("org/name", sizes).startswith(f"{streamed}; as a whole if its files")
    index = {"weight_map": {"model.layers.0.mlp.experts.0.gate_proj.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "transformers makes its tensors of others" in describe(folder, sizes)
