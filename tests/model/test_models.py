"""Loading by name: what is shipped, what is refused, and what random weights need."""

import json
import logging
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
import torch

from calibrate.model.models import DEMO_FOLDER, load, load_config, load_tokenizer
from calibrate.model.weights import build_skeleton
from s2o_runtime.errors import ModelError, ResourceError
from s2o_runtime.identity import Geometry, geometry

FIVE_OF_SIX = tuple(range(5, 48, 6)), (("sliding_attention", 40),)
EVERY_OTHER = tuple(range(1, 24, 2)), (("sliding_attention", 12),)
PUBLISHED = {  # geometry and parameters in billions, as the models' pages say
    "qwen2.5-0.5b": (Geometry("qwen2", 24, 14, 2, 64), 0.49),
    "qwen2.5-1.5b": (Geometry("qwen2", 28, 12, 2, 128), 1.54),
    "qwen2.5-3b": (Geometry("qwen2", 36, 16, 2, 128), 3.09),
    "qwen2.5-7b": (Geometry("qwen2", 28, 28, 4, 128), 7.62),
    "qwen2.5-14b": (Geometry("qwen2", 48, 40, 8, 128), 14.77),
    "qwen2.5-32b": (Geometry("qwen2", 64, 40, 8, 128), 32.76),
    "qwen2.5-72b": (Geometry("qwen2", 80, 64, 8, 128), 72.71),
    "llama-3.1-8b": (Geometry("llama", 32, 32, 8, 128), 8.03),
    "llama-3.1-70b": (Geometry("llama", 80, 64, 8, 128), 70.55),
    "llama-3.2-1b": (Geometry("llama", 16, 32, 8, 64), 1.24),
    "llama-3.2-3b": (Geometry("llama", 28, 24, 8, 128), 3.21),
    "gemma-3-12b": (Geometry("gemma3_text", 8, 16, 8, 256, *FIVE_OF_SIX), 11.77),
    "gpt-oss-20b": (Geometry("gpt_oss", 12, 64, 8, 64, *EVERY_OTHER), 20.91),
    "gpt-oss-120b": (Geometry("gpt_oss", 18, 64, 8, 64, tuple(range(1, 36, 2)), (("sliding_attention", 18),)), 116.83),
    "qwen3-30b-a3b": (Geometry("qwen3_moe", 48, 32, 4, 128), 30.53),
    "qwen3-4b": (Geometry("qwen3", 36, 32, 8, 128), 4.02),
    "qwen3-8b": (Geometry("qwen3", 36, 32, 8, 128), 8.19),
    "qwen3-14b": (Geometry("qwen3", 40, 40, 8, 128), 14.77),
    "qwen3-32b": (Geometry("qwen3", 64, 64, 8, 128), 32.76),
    "qwen3-32b-yarn": (Geometry("qwen3", 64, 64, 8, 128), 32.76),
    "llama-3.3-70b": (Geometry("llama", 80, 64, 8, 128), 70.55),
    "mistral-small-3.1-24b": (Geometry("mistral", 40, 32, 8, 128), 23.57),
    "glm-4.5-air": (Geometry("glm4_moe", 46, 96, 8, 128), 106.85),
}
POSITIONS = {"qwen3-30b-a3b": 262144} | dict.fromkeys(("qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b"), 40960)
POSITIONS |= {"qwen3-32b-yarn": 131072}
THETA = {"gemma-3-12b": 1e6, "gpt-oss-20b": 150000, "gpt-oss-120b": 150000, "qwen3-30b-a3b": 1e7}
THETA |= {"mistral-small-3.1-24b": 1e9, "glm-4.5-air": 1e6}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_sizes_are_the_published_ones(name, offline):
    config = load_config(name, random_weights=True)
    shape, billions = PUBLISHED[name]
    assert geometry(config) == shape
    model = build_skeleton(config, torch.bfloat16, torch.device("cpu"))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.006)
    assert all(weight.is_meta and weight.dtype == torch.bfloat16 for weight in model.parameters())
    assert all(not buffer.is_meta for buffer in model.buffers())
    assert all(buffer.dtype == torch.float32 for key, buffer in model.named_buffers() if "inv_freq" in key)
    assert config.max_position_embeddings == POSITIONS.get(name, 32768 if name.startswith("qwen") else 131072)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert (rope["rope_type"] == "yarn") == (name.endswith("yarn") or name.startswith("gpt-oss"))
    assert rope["rope_theta"] == THETA.get(name, 1e6 if name.startswith("qwen") else 5e5)


def test_a_folder_without_weights_will_do_for_random_ones(tmp_path, caplog):
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING, logger="calibrate"):
        loaded = load(str(tmp_path), "cpu", random_weights=True, seed=2)
    assert "random weights read the demo model's tokens" in caplog.text
    assert loaded.weights.resident
    assert loaded.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2).shape == (1, 5)
    with pytest.raises(ModelError, match="the tokenizer of"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(ModelError, match="has a vocabulary of 100, its prompts are made of 4096 tokens"):
        load(str(tmp_path), "cpu", random_weights=True)


def test_the_hub_is_asked_once_and_briefly(monkeypatch, caplog, tmp_path):
    asked = []

    def head(url, timeout):
        asked.append(timeout)
        raise httpx.ConnectTimeout("no answer")

    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ResourceError, match="from some/thing: the Hub cannot be reached"):
        load_config("some/thing")
    assert asked == [5.0]
    assert caplog.messages == ["asking the Hub for some/thing"]
    load_config("demo")
    assert len(asked) == 1
